"""The state table of `_run_compiled`, one test a row."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import flydsl.expr as fx
import pytest
from flydsl._mlir import ir
from flydsl.compiler.jit_function import JitFunction

from aiter.jit.utils.flydsl_private import runtime_library
from aiter.jit.utils.toolkit import toolkit_env
from aiter.ops.flydsl.kernels.tensor_shim import DriverError, _run_compiled, intercepted
from op_tests.dispatch.kernels import BREAKS, Key, build_mixed, build_pair, build_trailing
from op_tests.hip_stub import Driver, HipStub, Launched

pytestmark = pytest.mark.compile

ARGS = (0x1000, 0x2000, 3, 0.5, 0x77)


class Traces:
    """Counts traces of any launcher from now on."""

    def __init__(self) -> None:
        self.count = 0
        trace = JitFunction._trace

        def counted(*args: Any, **keywords: Any) -> Any:
            self.count += 1
            return trace(*args, **keywords)

        JitFunction._trace = counted


def _compile_only(on: bool) -> None:
    if on:
        os.environ["COMPILE_ONLY"] = "1"
    else:
        del os.environ["COMPILE_ONLY"]


# ---------------------------------------------------------------- cold and warm


def cold_then_warm(driver: Driver) -> tuple[list[Launched], dict[str, int], dict[str, int], int]:
    traces = Traces()
    launcher = build_mixed(Key())
    _run_compiled(launcher, *ARGS)
    cold = driver.counts()
    traced = traces.count
    for step in range(10):
        _run_compiled(launcher, 0x1000 + step, 0x2000, 3, 0.5, step)
    warm = {name: calls - cold.get(name, 0) for name, calls in driver.counts().items()}
    assert traces.count == traced
    return driver.launches(), cold, {name: n for name, n in warm.items() if n}, traced


def test_the_first_call_compiles_loads_and_launches_once(hip_stub: HipStub):
    launches, cold, _, traced = hip_stub.run(cold_then_warm)
    assert (cold["hipModuleLoadData"], cold["hipModuleLaunchKernel"], traced) == (1, 1, 1)
    first = launches[0]
    assert first.kernel.startswith("mixed_kernel")
    assert (first.grid, first.block, first.lds, first.stream) == ((3, 2, 1), (64, 1, 1), 256, 0x77)
    assert first.args[:3] == (
        (0x1000).to_bytes(8, "little"),
        (0x2000).to_bytes(8, "little"),
        (3).to_bytes(4, "little"),
    )


def test_a_warm_call_only_launches_and_with_its_own_arguments(hip_stub: HipStub):
    launches, _, warm, _ = hip_stub.run(cold_then_warm)
    assert warm == {"hipModuleLaunchKernel": 10, "hipGetDevice": 10}
    assert [(launch.ints()[0], launch.stream) for launch in launches[1:]] == [
        (0x1000 + step, step) for step in range(10)
    ]


def launch_pair(driver: Driver) -> list[Launched]:
    for n in (5, 6):
        _run_compiled(build_pair(Key()), 0x40, n, None)
    return driver.launches()


def test_every_kernel_of_a_launcher_is_started_in_order(hip_stub: HipStub):
    launches = hip_stub.run(launch_pair)
    assert [launch.kernel.partition("_kernel")[0] for launch in launches] == ["first", "second"] * 2
    assert [launch.grid[0] for launch in launches] == [1, 5, 1, 6]


# ---------------------------------------------------------------- compile-only


def compile_only_cold(driver: Driver, cache: str) -> tuple[dict[str, int], int, int, int]:
    launcher = build_mixed(Key())
    _compile_only(True)
    _run_compiled(launcher, 0, 0, 0, 0.0, None)
    after_compile = driver.counts()
    files = len(list(Path(cache).rglob("*.pkl")))
    _compile_only(False)
    _run_compiled(launcher, *ARGS)
    first = driver.count("hipModuleLaunchKernel")
    _run_compiled(launcher, *ARGS)
    return after_compile, files, first, driver.count("hipModuleLaunchKernel")


def test_compile_only_when_cold_persists_and_the_next_call_is_the_first(
    hip_stub: HipStub, flydsl_cache: Path
):
    counts, files, first, second = hip_stub.run(
        compile_only_cold,
        str(flydsl_cache),
        environment={"FLYDSL_RUNTIME_CACHE_DIR": str(flydsl_cache)},
    )
    assert counts == {}
    assert files == 1
    assert (first, second) == (1, 2)


def compile_only_warm(driver: Driver) -> tuple[int, int, bool]:
    traces = Traces()
    launcher = build_mixed(Key())
    _run_compiled(launcher, *ARGS)
    address, traced = launcher._launch_address, traces.count
    _compile_only(True)
    _run_compiled(launcher, 0, 0, 0, 0.0, None)
    held = driver.count("hipModuleLaunchKernel")
    _compile_only(False)
    _run_compiled(launcher, *ARGS)
    assert traces.count == traced
    return held, driver.count("hipModuleLaunchKernel"), launcher._launch_address == address


def test_compile_only_when_warm_launches_nothing_and_keeps_what_is_retained(hip_stub: HipStub):
    assert hip_stub.run(compile_only_warm) == (1, 2, True)


def compile_only_set_to(driver: Driver, value: str) -> int:
    launcher = build_mixed(Key())
    _run_compiled(launcher, *ARGS)
    os.environ["COMPILE_ONLY"] = value
    _run_compiled(launcher, *ARGS)
    return driver.count("hipModuleLaunchKernel")


@pytest.mark.parametrize(("value", "launches"), [("0", 2), ("", 2), ("false", 2), ("true", 1)])
def test_compile_only_set_to_a_false_value_launches(hip_stub: HipStub, value: str, launches: int):
    assert hip_stub.run(compile_only_set_to, value) == launches


# ---------------------------------------------------------------- replay


def replay(driver: Driver, warm: bool) -> tuple[list[tuple[Any, ...]], int, int]:
    traces = Traces()
    launcher = build_mixed(Key())
    if warm:
        _run_compiled(launcher, *ARGS)
    before, seen = traces.count, []
    with intercepted(lambda exe, args: seen.append((exe is launcher, args))):
        _run_compiled(launcher, 1, None, 2, 0.25, None)
        with intercepted(lambda exe, args: seen.append("inner")):
            _run_compiled(launcher, 1, None, 2, 0.25, None)
        _run_compiled(launcher, 3, None, 2, 0.25, None)
    assert traces.count == before
    held = driver.count("hipModuleLaunchKernel")
    _run_compiled(launcher, *ARGS)
    return seen, held, driver.count("hipModuleLaunchKernel")


@pytest.mark.parametrize("warm", [False, True])
def test_a_replay_receives_the_launch_as_called_and_nothing_runs(hip_stub: HipStub, warm: bool):
    seen, held, after = hip_stub.run(replay, warm)
    assert seen == [(True, (1, None, 2, 0.25, None)), "inner", (True, (3, None, 2, 0.25, None))]
    assert (held, after) == (warm, warm + 1)


# ---------------------------------------------------------------- failures


def failed_trace(driver: Driver) -> tuple[str, bool, bool, int]:
    launcher = build_mixed(Key())
    BREAKS.append(KeyError("not today"))
    message = ""
    try:
        _run_compiled(launcher, *ARGS)
    except KeyError as error:
        message = str(error)
    BREAKS.clear()
    clean = ir.Context.current is None
    retained = hasattr(launcher, "_launch_address")
    _run_compiled(launcher, *ARGS)
    return message, clean, retained, driver.count("hipModuleLaunchKernel")


def test_a_first_call_whose_trace_fails_leaves_nothing_and_can_be_repeated(hip_stub: HipStub):
    message, clean, retained, launches = hip_stub.run(failed_trace)
    assert "not today" in message
    assert clean
    assert not retained
    assert launches == 1


def failed_driver(driver: Driver, function: str) -> tuple[str, bool, bool, dict[str, int]]:
    launcher = build_mixed(Key(3.0))
    driver.fail(function, 719)
    message = ""
    try:
        _run_compiled(launcher, *ARGS)
    except DriverError as error:
        message = str(error)
    clean = ir.Context.current is None
    retained = hasattr(launcher, "_launch_address")
    _run_compiled(launcher, *ARGS)
    return message, clean, retained, driver.counts()


@pytest.mark.parametrize(
    ("function", "loads", "launches"),
    [
        ("hipModuleLoadData", 2, 1),
        ("hipModuleGetFunction", 2, 1),
        ("hipModuleLaunchKernel", 2, 2),
        ("hipGetDevice", 1, 1),
    ],
)
def test_a_first_call_that_the_driver_refuses_leaves_nothing_and_can_be_repeated(
    hip_stub: HipStub, function: str, loads: int, launches: int
):
    message, clean, retained, counts = hip_stub.run(failed_driver, function)
    for part in ("mixed_kernel", "launch_mixed", "hipErrorLaunchFailure (719)", "factor=3.0"):
        assert part in message
    assert clean
    assert not retained
    assert (counts["hipModuleLoadData"], counts["hipModuleLaunchKernel"]) == (loads, launches)
    # What the failed call had loaded is unloaded again.
    assert counts.get("hipModuleUnload", 0) == (
        function in ("hipModuleLaunchKernel", "hipModuleGetFunction")
    )


def failed_later(driver: Driver) -> tuple[str, int, int]:
    launcher = build_mixed(Key(3.0))
    _run_compiled(launcher, *ARGS)
    driver.fail("hipModuleLaunchKernel", 700, skip=1)
    _run_compiled(launcher, *ARGS)
    message = ""
    try:
        _run_compiled(launcher, *ARGS)
    except DriverError as error:
        message = str(error)
    left = runtime_library().hipGetLastError()
    _run_compiled(launcher, *ARGS)
    return message, left, driver.count("hipModuleLaunchKernel")


def test_a_driver_error_names_kernel_key_and_error_and_the_next_call_works(hip_stub: HipStub):
    message, left, launches = hip_stub.run(failed_later)
    assert message.startswith("launching mixed_kernel_0 of launch_mixed failed with ")
    assert "hipErrorIllegalAddress (700)" in message
    assert message.endswith("built by kernels.build_mixed(Key(factor=3.0))")
    # Whoever asks the driver next is not told of it again.
    assert left == 0
    assert launches == 4


def someone_elses_error(driver: Driver) -> int:
    launcher, other = build_mixed(Key()), build_pair(Key())
    _run_compiled(launcher, *ARGS)
    driver.fail("hipModuleLaunchKernel", 719)
    # FlyDSL's own path records the error of its launch and leaves it there.
    with toolkit_env():
        other(0x40, 1, fx.Stream(None))
    _run_compiled(launcher, *ARGS)
    return len(driver.launches())


def test_an_error_of_a_launch_made_elsewhere_is_not_ours(hip_stub: HipStub):
    assert hip_stub.run(someone_elses_error) == 3


def wrong_count(driver: Driver, warm: bool) -> tuple[list[str], int]:
    launcher = build_mixed(Key())
    if warm:
        _run_compiled(launcher, *ARGS)
    messages = []
    for args, keywords in (
        (ARGS[:-1], {}),
        ((), {}),
        ((*ARGS, 9), {}),
        (ARGS[:-1], {"stream": 5}),
    ):
        try:
            _run_compiled(launcher, *args, **keywords)
        except TypeError as error:
            messages.append(str(error))
    return messages, driver.count("hipModuleLaunchKernel")


@pytest.mark.parametrize("warm", [False, True])
def test_missing_surplus_and_keyword_arguments_are_named_before_a_launch(
    hip_stub: HipStub, warm: bool
):
    messages, launches = hip_stub.run(wrong_count, warm)
    takes = "launch_mixed takes 5 arguments (out, x, n, scale, stream), "
    assert messages == [
        takes + "got 4: argument 4 (stream) is missing",
        takes + "got 0: argument 0 (out) is missing",
        takes + "got 6: argument 5 is 9",
        "launch_mixed takes positional arguments only (out, x, n, scale, stream), not stream=5",
    ]
    assert launches == warm


def parameter_behind_the_stream(driver: Driver) -> tuple[list[Launched], list[str], int]:
    launcher, messages = build_trailing(Key()), []
    _compile_only(True)
    _run_compiled(launcher, 0x10, 1, 0x70, 0x20)
    _compile_only(False)
    for warm in (False, True):
        for wrong in ((0x10, 1, 0x70), (0x10, 1, 0x20, "cache")):
            try:
                _run_compiled(launcher, *wrong)
            except TypeError as error:
                messages.append(str(error))
        if not warm:
            assert driver.launches() == []
            _run_compiled(launcher, 0x10, 1, 0x70, 0x20)
    _run_compiled(launcher, 0x11, 2, 0x71, 0x21)
    return driver.launches(), messages, driver.count("hipModuleLoadData")


def test_parameters_may_stand_behind_the_stream_and_are_given_too(hip_stub: HipStub):
    launches, messages, loads = hip_stub.run(parameter_behind_the_stream)
    assert [launch.ints() for launch in launches] == [(0x10, 1, 0x20), (0x11, 2, 0x21)]
    assert [launch.stream for launch in launches] == [0x70, 0x71]
    assert loads == 1
    takes = "launch_trailing takes 4 arguments (x, n, stream, cache_args), got 3: "
    assert messages == 2 * [
        takes + "argument 3 (cache_args) is missing",
        "launch_trailing: argument 3 (cache_args) is 'cache', not an integer",
    ]
