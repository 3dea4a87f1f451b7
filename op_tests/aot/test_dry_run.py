"""The replay context: what it forbids, what it records, and that it leaves nothing behind."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from flydsl.compiler import jit_executor

from aiter.aot.flydsl.dry_run import DEVICE, DryRunError, dry_run, preload
from aiter.jit.utils import chip_info, host_scalars
from aiter.jit.utils.chip_info import Target, get_target
from aiter.ops.flydsl.kernels import tensor_shim
from aiter.ops.flydsl.kernels.tensor_shim import _run_compiled, launch_of

from .samples import ScaleKey, build_scale

TARGET = Target("gfx942", 80)


def surroundings() -> dict[str, Any]:
    """Everything the context changes."""
    return {
        "environment": dict(os.environ),
        "pins": list(chip_info._pins),
        "saved environment": chip_info._saved_env,
        "interceptor": tensor_shim._mode.interceptor,
        "host scalars": host_scalars.host_scalar_ops_run(),
        "engine": jit_executor.ExecutionEngine,
        "dispatch modes": torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        **{
            name: getattr(torch.cuda, name)
            for name in ("_lazy_init", "current_stream", "current_device", "synchronize")
        },
    }


@pytest.fixture(autouse=True)
def other_settings(monkeypatch):
    """Values that the context must bring back, not only remove."""
    monkeypatch.setenv("ARCH", "gfx90a")
    monkeypatch.setenv("FLYDSL_GPU_ARCH", "gfx90a")
    monkeypatch.delenv("COMPILE_ONLY", raising=False)
    preload()  # importing torch._dynamo sets variables of its own, for good


def test_all_of_it_is_in_effect_inside_and_nothing_after_twice():
    before = surroundings()
    for _ in range(2):
        with dry_run(TARGET):
            inside = surroundings()
            assert get_target() == TARGET
            assert os.environ["COMPILE_ONLY"] == "1"
            assert os.environ["FLYDSL_GPU_ARCH"] == "gfx942"
        changed = {name for name in before if inside[name] != before[name]}
        assert changed == before.keys()
        assert surroundings() == before


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, KeyboardInterrupt])
def test_an_exception_restores_as_much_as_a_normal_exit(error):
    before = surroundings()
    with pytest.raises(error), dry_run(TARGET):
        raise error
    assert surroundings() == before


def test_a_failure_to_enter_restores_too(monkeypatch):
    before = surroundings()

    def refuse(*args: object, **kwargs: object) -> None:
        raise ImportError("no fake tensors")

    monkeypatch.setattr("aiter.aot.flydsl.dry_run.FakeTensorMode", refuse)
    with pytest.raises(ImportError), dry_run(TARGET):
        pass
    assert surroundings() == before


def test_contexts_nest():
    before = surroundings()
    with dry_run(TARGET) as outer:
        within = surroundings()
        with dry_run(Target.of("gfx950")) as inner:
            assert get_target().gfx == "gfx950"
            _run_compiled(build_scale(ScaleKey(2.0)), 0, 0, 1, None)
            assert len(inner.take()) == 1
        assert surroundings() == within
        assert outer.take() == ()
    assert surroundings() == before


def test_tensors_are_fake_and_on_a_gpu():
    with dry_run(TARGET):
        x = torch.empty(1 << 40, 1 << 20, dtype=torch.bfloat16, device=DEVICE)
        assert x.is_cuda
        assert x.device == DEVICE
        assert x.narrow(0, 8, 4).view(torch.uint8).shape == (4, 1 << 21)


def test_a_real_tensor_is_refused():
    real = torch.zeros(3)
    with dry_run(TARGET), pytest.raises(Exception, match="(?i)fake"):
        torch.add(real, 1)


@pytest.mark.parametrize(
    "reach",
    [
        lambda: torch.cuda.init(),
        lambda: torch.cuda.get_device_properties(0),
        lambda: jit_executor.ExecutionEngine(None),
    ],
)
def test_reaching_for_a_gpu_raises(reach):
    with dry_run(TARGET), pytest.raises(DryRunError, match="must not touch a GPU"):
        reach()


def test_what_a_runtime_asks_of_its_stream_and_device_is_answered():
    with dry_run(TARGET):
        assert torch.cuda.current_stream(DEVICE).cuda_stream == 0
        assert torch.cuda.current_device() == 0
        torch.cuda.current_stream().synchronize()
        torch.cuda.synchronize()


def test_launches_are_recorded_once_each_in_order_and_not_made():
    two, three = build_scale(ScaleKey(2.0)), build_scale(ScaleKey(3.0))
    with dry_run(TARGET) as recorder:
        x = torch.empty(4, device=DEVICE)
        for launcher in (three, two, three):
            _run_compiled(launcher, x, x, 4, torch.cuda.current_stream().cuda_stream)
        assert recorder.take() == (launch_of(three), launch_of(two))
        assert recorder.take() == ()


def test_a_call_with_wrong_arguments_fails_as_it_would_when_served():
    with dry_run(TARGET) as recorder:
        with pytest.raises(TypeError, match="takes 4 arguments"):
            _run_compiled(build_scale(ScaleKey(2.0)), 0)
        assert recorder.take() == ()
