"""Launchers that take tensors as tensors: addresses, and the sizes and strides that may vary."""

from __future__ import annotations

import struct
from typing import Any

import flydsl.compiler as flyc
import pytest
import torch

from aiter.ops.flydsl.kernels import host_convert
from aiter.ops.flydsl.kernels.tensor_shim import _run_compiled
from op_tests.dispatch.kernels import make_tensors
from op_tests.hip_stub import Driver, HipStub

pytestmark = pytest.mark.compile


def _vector(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.float32)


def _matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=torch.bfloat16)


def _expected(a: torch.Tensor, b: torch.Tensor) -> tuple[bytes, ...]:
    return (
        struct.pack("Q", a.data_ptr()),
        struct.pack("<i", a.shape[0]),
        struct.pack("Q", b.data_ptr()),
        struct.pack("<iiq", *b.shape, b.stride(0)),
        struct.pack("i", 1),
    )


def dynamic(driver: Driver, exchange: bool) -> list[bool]:
    if not exchange:
        host_convert._exchange_function = lambda: 0
    launcher = make_tensors()
    calls = [
        (_vector(5), _matrix(4, 3)),
        (_vector(7)[2:], _matrix(4, 8)[1:, :5]),
        (torch.nn.Parameter(_vector(1)), _matrix(9, 1)),
        (_vector(0), _matrix(0, 3)),
    ]
    for a, b in calls:
        _run_compiled(launcher, a, b, 1, None)
    return [
        launch.args == _expected(a, b)
        for launch, (a, b) in zip(driver.launches(), calls, strict=True)
    ]


@pytest.mark.parametrize("exchange", [True, False], ids=["dlpack", "older torch"])
def test_addresses_sizes_and_strides_are_those_of_each_call(hip_stub: HipStub, exchange: bool):
    assert hip_stub.run(dynamic, exchange) == [True] * 4


def static(driver: Driver) -> tuple[list[bool], str]:
    launcher = make_tensors()
    a, b, other = _vector(5), _matrix(4, 3), _matrix(4, 3)
    _run_compiled(launcher, flyc.from_torch_tensor(a), flyc.from_torch_tensor(b), 1, None)
    _run_compiled(launcher, a, other, 1, None)
    message = ""
    try:
        _run_compiled(launcher, a, _matrix(4, 4), 1, None)
    except TypeError as error:
        message = str(error)
    return [
        launch.args[:3]
        == (struct.pack("Q", a.data_ptr()), struct.pack("Q", y.data_ptr()), launch.args[2])
        and len(launch.args) == 3
        for launch, y in zip(driver.launches(), (b, other), strict=True)
    ], message


def test_a_static_layout_is_not_passed_and_no_other_is_accepted(hip_stub: HipStub):
    arrived, message = hip_stub.run(static)
    assert arrived == [True, True]
    assert message == (
        "launch_tensors: argument 1 (b) has shape (4, 4) and strides (4, 1), the launcher was "
        "compiled for (4, 3) and (3, 1) (None: any)"
    )


BAD = {
    "type": lambda: (_vector(5).double(), _matrix(4, 3)),
    "rank": lambda: (_vector(5), _matrix(4, 3)[0]),
    "leading stride": lambda: (_vector(10)[::2], _matrix(4, 3)),
    "transposed": lambda: (_vector(5), _matrix(3, 4).t()),
    "address": lambda: (_vector(5).data_ptr(), _matrix(4, 3)),
    "none": lambda: (_vector(5), None),
}


def refused(driver: Driver, case: str) -> tuple[str, int]:
    launcher = make_tensors()
    _run_compiled(launcher, _vector(5), _matrix(4, 3), 1, None)
    try:
        _run_compiled(launcher, *BAD[case](), 1, None)
    except TypeError as error:
        return str(error), driver.count("hipModuleLaunchKernel")
    return "", 0


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "type",
            "argument 0 (a) has type torch.float64, the launcher was compiled for torch.float32",
        ),
        ("rank", "argument 1 (b) has rank 1, the launcher was compiled for 2"),
        ("leading stride", "argument 0 (a) has shape (5,) and strides (2,)"),
        ("transposed", "argument 1 (b) has shape (4, 3) and strides (1, 4)"),
        ("address", "argument 0 (a) is "),
        ("none", "argument 1 (b) is None, not a tensor"),
    ],
)
def test_a_tensor_the_launcher_was_not_compiled_for_is_named(
    hip_stub: HipStub, case: str, message: Any
):
    text, launches = hip_stub.run(refused, case)
    assert text.startswith(f"launch_tensors: {message}")
    assert launches == 1
