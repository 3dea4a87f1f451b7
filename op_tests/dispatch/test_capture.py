"""While a graph is captured nothing may be compiled or loaded, only launched."""

from __future__ import annotations

import pytest
import torch

from aiter.ops.flydsl.kernels.tensor_shim import _run_compiled
from op_tests.dispatch.kernels import Key, build_mixed
from op_tests.dispatch.test_states import Traces
from op_tests.hip_stub import Driver, HipStub

pytestmark = pytest.mark.compile

STREAM = 0x77


def _launch(stream: int | None) -> str:
    try:
        _run_compiled(build_mixed(Key()), 0x1000, 0x2000, 3, 0.5, stream)
    except RuntimeError as error:
        return str(error)
    return ""


def cold(driver: Driver, stream: int | None) -> tuple[str, int, int, str, int]:
    traces = Traces()
    driver.capture(STREAM)
    message = _launch(stream)
    traced, loads = traces.count, driver.count("hipModuleLoadData")
    driver.capture(STREAM, False)
    return message, traced, loads, _launch(stream), len(driver.launches())


@pytest.mark.parametrize("stream", [STREAM, None], ids=["the stream", "the default stream"])
def test_a_first_launch_while_capturing_says_to_warm_up_and_compiles_nothing(
    hip_stub: HipStub, stream: int | None
):
    message, traced, loads, later, launches = hip_stub.run(cold, stream)
    assert message == (
        "the first launch of launch_mixed on this device came while a graph is captured, when "
        "nothing can be compiled or loaded; launch it once before capturing"
    )
    assert (traced, loads) == (0, 0)
    assert (later, launches) == ("", 1)


def warm(driver: Driver) -> tuple[str, int, int]:
    _launch(STREAM)
    driver.reset()
    driver.capture(STREAM)
    return _launch(STREAM), len(driver.launches()), driver.count("hipStreamIsCapturing")


def test_a_warm_launch_is_captured_without_asking(hip_stub: HipStub):
    assert hip_stub.run(warm) == ("", 1, 0)


def second_device(driver: Driver) -> tuple[str, int, str, int]:
    driver.devices(2)
    _launch(STREAM)
    driver.set_device(1)
    driver.capture(STREAM)
    message, loads = _launch(STREAM), driver.count("hipModuleLoadData")
    driver.capture(STREAM, False)
    return message, loads, _launch(STREAM), driver.launches()[-1].device


def test_a_first_launch_on_another_device_while_capturing_is_refused_too(hip_stub: HipStub):
    message, loads, later, device = hip_stub.run(second_device)
    assert "launch it once before capturing" in message
    assert loads == 1
    assert (later, device) == ("", 1)


def torch_says_so(driver: Driver) -> tuple[str, int]:
    torch.cuda.is_initialized = lambda: True
    torch.cuda.is_current_stream_capturing = lambda: True
    return _launch(STREAM), driver.count("hipModuleLoadData")


def test_torchs_current_stream_counts_as_well(hip_stub: HipStub):
    message, loads = hip_stub.run(torch_says_so)
    assert "launch it once before capturing" in message
    assert loads == 0
