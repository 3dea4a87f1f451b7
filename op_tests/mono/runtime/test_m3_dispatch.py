"""A whole step of MiniMax-M3's depth against the recording driver."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from atom.mono.models.minimax_m3 import runner as runner_module
from atom.mono.models.minimax_m3.execution import Builders
from atom.mono.models.minimax_m3.runner import layer_builders
from atom.mono.runtime.compile import compile_only, scratch_bytes
from op_tests.dispatch.test_states import Traces
from op_tests.hip_stub import Driver, HipStub, Launched
from op_tests.mono.runtime.kernels import CopyKey, build_spilling
from op_tests.mono.runtime.stand_ins import STAND_INS, make_runner, make_step, small_config

pytestmark = pytest.mark.compile

# Every second sparse layer reuses a selection, so that a width has four layer launchers.
CONFIG = {"reusing": frozenset(range(5, 60, 2))}
LAUNCHERS = 5
STEP = 64


def _on_stream(handle: int | None) -> None:
    """Make `handle` what the runner finds as torch's current stream."""
    runner_module.current_stream = lambda device: handle


# ---------------------------------------------------------------- preload, warm-up, steps


def life_of_a_width(
    driver: Driver, real: bool
) -> tuple[dict[str, int], list[dict[str, int]], list[int]]:
    traces, config = Traces(), small_config(**CONFIG)
    runner = make_runner(config, builders=layer_builders() if real else STAND_INS)
    assert runner.prepare(4)
    preloaded, counts, traced = driver.counts(), [], []
    for _ in range(3):
        assert runner.prepare(4)
        driver.reset()
        before = traces.count
        runner.forward(make_step(config, 4))
        counts.append(driver.counts())
        traced.append(traces.count - before)
        assert runner.warm(4)
    return preloaded, counts, traced


@pytest.mark.parametrize(
    "real", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["stand-ins", "real kernels"]
)
def test_preparing_starts_nothing_warming_loads_once_and_a_step_is_64_launches(
    hip_stub: HipStub, real: bool
):
    preloaded, counts, traced = hip_stub.run(life_of_a_width, real, seconds=300)
    assert preloaded == {}
    assert [count["hipModuleLaunchKernel"] for count in counts] == [STEP] * 3
    assert [count.get("hipModuleLoadData", 0) for count in counts] == [LAUNCHERS, 0, 0]
    assert traced[1:] == [0, 0]
    assert traced[0] <= LAUNCHERS, "each launcher is traced at most once more to be loaded"


def kernels_of_a_step(driver: Driver) -> list[Launched]:
    config = small_config(**CONFIG)
    runner = make_runner(config)
    runner.prepare(1)
    _on_stream(0x70)
    runner.forward(make_step(config, 1))
    driver.reset()
    _on_stream(0x77)
    runner.forward(make_step(config, 1))
    return driver.launches()


def test_a_step_launches_its_kernels_in_order_all_on_the_current_stream(hip_stub: HipStub):
    launches = hip_stub.run(kernels_of_a_step)
    names = [launch.kernel.rpartition("_")[0] for launch in launches]
    assert names == ["step_begin", *["dense_pre", "dense_post"] * 3, *["sparse_layer"] * 57]
    assert {launch.stream for launch in launches} == {0x77}


# ---------------------------------------------------------------- fresh arguments


def two_steps(driver: Driver) -> tuple[list[list[tuple[int, ...]]], list[tuple[int, ...]]]:
    """The sparse layers' arguments in two steps, and the addresses each step brought."""
    config = small_config(**CONFIG)
    runner = make_runner(config)
    runner.prepare(4)
    runner.forward(make_step(config, 4))
    steps, seen, brought = [make_step(config, 4), make_step(config, 4)], [], []
    steps[1].block_table.resize_(4, 7)
    for step in steps:
        driver.reset()
        runner.forward(step)
        seen.append([x.ints() for x in driver.launches() if x.kernel.startswith("sparse_layer")])
        tensors = (step.positions, step.slots, step.block_table)
        brought.append((*(t.data_ptr() for t in tensors), step.block_table.shape[1]))
    return seen, brought


def test_every_step_brings_its_own_addresses_and_scalars(hip_stub: HipStub):
    seen, brought = hip_stub.run(two_steps)
    assert brought[0] != brought[1]
    assert [step[3] for step in brought] == [3, 7]
    for layers, (positions, slots, table, stride) in zip(seen, brought, strict=True):
        assert len(layers) == 57
        assert [args[6] for args in layers] == list(range(3, 60))
        assert {(*args[2:5], args[7]) for args in layers} == {(positions, slots, table, stride)}
        weights = [args[5] for args in layers]
        assert len(set(weights)) == 57, "each layer has weights of its own"
    assert [args[5] for args in seen[0]] == [args[5] for args in seen[1]]


# ---------------------------------------------------------------- compile-only


def compile_only_while_warm(driver: Driver) -> tuple[int, int, int, dict[str, int]]:
    config = small_config(**CONFIG)
    runner = make_runner(config)
    runner.prepare(4)
    step = make_step(config, 4)
    runner.forward(step)
    with compile_only():
        runner.forward(step)
        assert runner.prepare(1)
        runner.forward(make_step(config, 1))
        assert not runner.warm(1)
    held = driver.count("hipModuleLaunchKernel")
    driver.reset()
    assert runner.prepare(8)
    other_width = driver.count("hipModuleLaunchKernel")
    runner.forward(step)
    launchers = [launcher for launcher, _ in runner._widths[4].kernels.pairs()]
    scratch = {launcher.func.__name__: scratch_bytes(launcher) for launcher in launchers}
    return held, other_width, driver.count("hipModuleLaunchKernel"), scratch


def test_compiling_while_warm_launches_nothing_and_warm_launchers_stay_readable(hip_stub: HipStub):
    held, other_width, after, scratch = hip_stub.run(compile_only_while_warm)
    assert (held, other_width, after) == (STEP, 0, STEP)
    assert scratch == {"launch_dense_pre": 0, "launch_dense_post": 0, "launch_sparse": 0}


# ---------------------------------------------------------------- refusals and races


def refused_width(driver: Driver) -> tuple[list[bool], dict[str, int]]:
    """Width 8 has a kernel with scratch, until its builder is repaired."""
    broken = [True]

    def pre(key):
        spills = broken and key.shape.tokens == 8
        return build_spilling(CopyKey()) if spills else STAND_INS.dense_pre(key)

    runner = make_runner(
        small_config(**CONFIG), builders=Builders(pre, STAND_INS.dense_post, STAND_INS.sparse)
    )
    answers = [runner.prepare(8), runner.prepare(4)]
    broken.clear()
    answers.append(runner.prepare(8))
    return answers, driver.counts()


def test_a_refused_width_stays_refused_and_others_serve(hip_stub: HipStub):
    assert hip_stub.run(refused_width) == ([False, True, False], {})


def racing_runners(driver: Driver) -> tuple[int, int, Counter]:
    """Four runners over launchers they share, a thread each: all prepare, then all step.

    A step of six layers, three of them dense, is 10 launches.
    """
    config = small_config(layers=6, reusing=frozenset({4}))
    runners = [make_runner(config) for _ in range(4)]
    barrier, errors = threading.Barrier(4), []

    def run(runner) -> None:
        try:
            barrier.wait()
            assert runner.prepare(4)
            barrier.wait()
            for _ in range(3):
                runner.forward(make_step(config, 4))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(runner,)) for runner in runners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    per_thread = Counter(launch.thread for launch in driver.launches())
    loads = driver.count("hipModuleLoadData")
    return loads, driver.count("hipModuleLaunchKernel"), Counter(per_thread.values())


def test_racing_runners_load_each_launcher_once_and_launch_every_step(hip_stub: HipStub):
    loads, launches, per_thread = hip_stub.run(racing_runners)
    assert (loads, launches) == (LAUNCHERS, 4 * 3 * 10)
    assert per_thread == {3 * 10: 4}


def captured(driver: Driver) -> tuple[str, str, int]:
    config = small_config(**CONFIG)
    runner = make_runner(config)
    runner.prepare(4)
    _on_stream(0x77)
    messages = []
    for warm in (False, True):
        if warm:
            runner.forward(make_step(config, 4))
        driver.reset()
        driver.capture(0x77)
        try:
            runner.forward(make_step(config, 4))
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
        driver.capture(0x77, False)
    return *messages, driver.count("hipModuleLaunchKernel")


def test_only_a_step_that_has_run_can_be_captured(hip_stub: HipStub):
    cold, warm, launches = hip_stub.run(captured)
    assert "launch it once before capturing" in cold
    assert (warm, launches) == ("", STEP)
