"""After its first launch a launcher keeps the environment and the hints it was compiled with."""

from __future__ import annotations

import os
from typing import Any

import flydsl.compiler as flyc
import pytest
from flydsl.compiler.jit_function import JitFunction

from aiter.jit.utils.flydsl_private import compiled_texts
from aiter.ops.flydsl.kernels.tensor_shim import _run_compiled, artifact_of
from op_tests.dispatch.kernels import Key, build_mixed
from op_tests.dispatch.test_states import ARGS, Traces
from op_tests.hip_stub import Driver, HipStub

pytestmark = pytest.mark.compile


def changed_environment(driver: Driver) -> tuple[int, int, int]:
    launcher = build_mixed(Key())
    _run_compiled(launcher, *ARGS)
    traces = Traces()
    os.environ.update(
        ARCH="gfx942",
        FLYDSL_GPU_ARCH="gfx942",
        FLYDSL_COMPILE_OPT_LEVEL="0",
        FLYDSL_RUNTIME_CACHE_DIR="/nonexistent",
        FLYDSL_RUNTIME_ENABLE_CACHE="0",
        ROCM_PATH="/nonexistent",
        PATH="",
    )
    _run_compiled(launcher, *ARGS)
    return traces.count, driver.count("hipModuleLoadData"), len(driver.launches())


def test_a_changed_environment_does_not_reach_a_warm_launcher(hip_stub: HipStub):
    assert hip_stub.run(changed_environment) == (0, 1, 2)


def early_hints(driver: Driver) -> tuple[bool, int, Any]:
    plain = build_mixed(Key())
    _run_compiled(plain, *ARGS)
    hinted = flyc.compile[{"waves_per_eu": 2}](build_mixed(Key(3.0)))
    other_key = artifact_of(hinted).sha256 != artifact_of(plain).sha256
    os.environ["COMPILE_ONLY"] = "1"
    _run_compiled(hinted, 0, 0, 0, 0.0, None)
    del os.environ["COMPILE_ONLY"]
    for _ in range(2):
        _run_compiled(hinted, *ARGS)
    return other_key, len(compiled_texts(hinted)), dict(hinted.compile_hints)


def test_hints_set_before_the_first_launch_are_kept(hip_stub: HipStub):
    assert hip_stub.run(early_hints) == (True, 1, {"waves_per_eu": 2})


def late_hints(driver: Driver) -> list[str]:
    launcher = flyc.compile[{"waves_per_eu": 2}](build_mixed(Key()))
    _run_compiled(launcher, *ARGS)
    flyc.compile[{"waves_per_eu": 2}](launcher)
    messages = []
    for change in (
        lambda: flyc.compile[{"fast_fp_math": True}](launcher),
        lambda: setattr(launcher, "compile_hints", {}),
        lambda: launcher.compile_hints.__setitem__("waves_per_eu", 1),
        lambda: launcher.compile_hints.update(waves_per_eu=1),
    ):
        try:
            change()
        except (RuntimeError, AttributeError, TypeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    _run_compiled(launcher, *ARGS)
    assert launcher.compile_hints == {"waves_per_eu": 2}
    return messages


def test_hints_changed_after_the_first_launch_are_refused(hip_stub: HipStub):
    messages = hip_stub.run(late_hints)
    assert len(messages) == 4
    assert messages[0] == (
        "RuntimeError: launch_mixed was launched with the compile hints {'waves_per_eu': 2}, which "
        "cannot become {'waves_per_eu': 2, 'fast_fp_math': True}: set them before, or build "
        "another launcher"
    )


def still_a_launcher(driver: Driver) -> tuple[bool, bool, int]:
    launcher = build_mixed(Key())
    key = artifact_of(launcher).sha256
    _run_compiled(launcher, *ARGS)
    same_key = artifact_of(launcher).sha256 == key
    return isinstance(launcher, JitFunction), same_key, len(compiled_texts(launcher))


def test_a_warm_launcher_can_still_be_traced_and_its_binary_read(hip_stub: HipStub):
    assert hip_stub.run(still_a_launcher) == (True, True, 1)
