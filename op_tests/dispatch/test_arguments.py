"""What reaches a kernel is what the caller passed, and what does not fit is named."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from aiter.ops.flydsl.kernels import host_convert
from aiter.ops.flydsl.kernels.tensor_shim import _run_compiled
from op_tests.dispatch.kernels import Key, build_mixed
from op_tests.hip_stub import Driver, HipStub

pytestmark = pytest.mark.compile

FINE = (0x1000, 0x2000, 3, 0.5, None)


def _received(driver: Driver, *args: Any) -> tuple[bytes, bytes, bytes, bytes, int]:
    driver.reset()
    _run_compiled(build_mixed(Key()), *args)
    (launch,) = driver.launches()
    return (*launch.args, launch.stream)


addresses = st.integers(-(1 << 63), (1 << 64) - 1)
counts = st.integers(1, (1 << 32) - 1)
scales = st.floats(width=32, allow_nan=False)
streams = st.none() | st.integers(0, (1 << 48))


def random_arguments(driver: Driver) -> int:
    runs = []

    @settings(max_examples=300, deadline=None, database=None)
    @given(addresses, addresses, counts, scales, streams)
    @example(0, (1 << 64) - 1, (1 << 32) - 1, float("inf"), None)
    @example(-1, 1 << 63, 1 << 31, -0.0, 0)
    def check(out: int, x: int, n: int, scale: float, stream: int | None) -> None:
        runs.append(1)
        assert _received(driver, out, x, n, scale, stream) == (
            struct.pack("Q", out & (1 << 64) - 1),
            struct.pack("Q", x & (1 << 64) - 1),
            struct.pack("I", n),
            struct.pack("f", scale),
            stream or 0,
        )

    _run_compiled(build_mixed(Key()), *FINE)
    check()
    return len(runs)


def test_addresses_numbers_and_streams_arrive_bit_for_bit(hip_stub: HipStub):
    assert hip_stub.run(random_arguments) >= 300


class Stream:
    def __init__(self, cuda_stream: object) -> None:
        self.cuda_stream = cuda_stream


class Index:
    def __index__(self) -> int:
        return 3


def converted_arguments(driver: Driver, exchange: bool) -> list[bool]:
    if not exchange:
        host_convert._exchange_function = lambda: 0
    base = torch.arange(64, dtype=torch.int32)
    parameter = torch.nn.Parameter(torch.zeros(4))
    one = torch.tensor(5)
    _run_compiled(build_mixed(Key()), *FINE)
    address = lambda value: int.from_bytes(_received(driver, value, *FINE[1:])[0], "little")
    count = lambda value: int.from_bytes(_received(driver, 0, 0, value, 0.5, None)[2], "little")
    scale = lambda value: struct.unpack("f", _received(driver, 0, 0, 1, value, None)[3])[0]
    stream = lambda value: _received(driver, 0, 0, 1, 0.5, value)[4]
    return [
        address(base) == base.data_ptr(),
        address(base[5:]) == base.data_ptr() + 20,
        address(base.view(8, 8).t()) == base.data_ptr(),
        address(base.to(torch.float8_e4m3fn)[3:]) != 0,
        address(torch.empty(0)) == 0,
        address(parameter) == parameter.data_ptr(),
        # An integer tensor of one element is an address here, not the integer it holds.
        address(one) == one.data_ptr(),
        address(None) == 0,
        address(np.int64(7)) == 7,
        count(np.int32(3)) == 3,
        count(Index()) == 3,
        count(True) == 1,
        count(torch.tensor(3)) == 3,
        scale(2) == 2.0,
        scale(np.float32(0.1)) == np.float32(0.1),
        scale(0.1) == struct.unpack("f", struct.pack("f", 0.1))[0],
        stream(Stream(0x99)) == 0x99,
        stream(Stream(None)) == 0,
    ]


@pytest.mark.parametrize("exchange", [True, False], ids=["dlpack", "older torch"])
def test_tensors_streams_and_numbers_of_other_types_are_converted(
    hip_stub: HipStub, exchange: bool
):
    results = hip_stub.run(converted_arguments, exchange)
    assert results == [True] * len(results)


def refused_argument(driver: Driver, position: int, value: Any, warm: bool) -> tuple[str, str, int]:
    if value == "fake":
        with FakeTensorMode():
            value = torch.empty(3)
    elif value == "meta":
        value = torch.empty(3, device="meta")
    args = (*FINE[:position], value, *FINE[position + 1 :])
    if warm:
        _run_compiled(build_mixed(Key()), *FINE)
    before = driver.count("hipModuleLaunchKernel")
    try:
        _run_compiled(build_mixed(Key()), *args)
    except (TypeError, OverflowError) as error:
        return type(error).__name__, str(error), driver.count("hipModuleLaunchKernel") - before
    return "", "", 1


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    ("position", "value", "kind", "message"),
    [
        (0, "text", "TypeError", "argument 0 (out) is 'text', not an integer"),
        (0, 2.0, "TypeError", "argument 0 (out) is 2.0, not an integer"),
        (1, 1 << 64, "OverflowError", f"argument 1 (x) = {1 << 64} does not fit its slot"),
        (1, "fake", "TypeError", "argument 1 (x) is a FakeTensor without memory"),
        (1, "meta", "TypeError", "argument 1 (x) is a Tensor without memory"),
        (2, 1 << 32, "OverflowError", f"argument 2 (n) = {1 << 32} does not fit its slot"),
        (2, -(1 << 31) - 1, "OverflowError", "argument 2 (n) = -2147483649 does not fit its slot"),
        (2, None, "TypeError", "argument 2 (n) is None, not an integer"),
        (2, 2.5, "TypeError", "argument 2 (n) is 2.5, not an integer"),
        (3, 1e39, "TypeError", "argument 3 (scale) is 1e+39, not a finite-range f32"),
        (3, None, "TypeError", "argument 3 (scale) is None, not a finite-range f32"),
        (4, "text", "TypeError", "argument 4 (stream): the stream is 'text'"),
    ],
)
def test_an_argument_that_does_not_fit_is_named_and_nothing_is_launched(
    hip_stub: HipStub, position: int, value: Any, kind: str, message: str, warm: bool
):
    found, text, launches = hip_stub.run(refused_argument, position, value, warm)
    assert (found, launches) == (kind, 0)
    assert text.startswith(f"launch_mixed: {message}")


def leaks(driver: Driver) -> dict[str, int]:
    import sys

    launcher = build_mixed(Key())
    tensor, number, stream = torch.zeros(3), 1 << 40, Stream(1 << 41)
    held = {"tensor": tensor, "int": number, "stream": stream, "handle": stream.cuda_stream}
    _run_compiled(launcher, tensor, number, 3, 0.5, stream)
    before = {name: sys.getrefcount(value) for name, value in held.items()}
    for _ in range(1000):
        _run_compiled(launcher, tensor, number, 3, 0.5, stream)
    return {name: sys.getrefcount(value) - before[name] for name, value in held.items()}


def test_arguments_are_neither_kept_nor_released(hip_stub: HipStub):
    assert hip_stub.run(leaks) == {"tensor": 0, "int": 0, "stream": 0, "handle": 0}
