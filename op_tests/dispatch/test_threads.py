"""Many threads: racing first calls, warm calls at once, and the GIL during a launch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from aiter.ops.flydsl.kernels.tensor_shim import _run_compiled, kernel_builder
from op_tests.dispatch.kernels import Key, build_mixed, build_pair
from op_tests.hip_stub import Driver, HipStub

pytestmark = pytest.mark.compile


def _at_once(count: int, work: Callable[[int], None]) -> list[BaseException]:
    barrier, errors = threading.Barrier(count), []

    def run(index: int) -> None:
        barrier.wait()
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def racing(driver: Driver, threads: int, calls: int) -> tuple[int, int, int, bool]:
    """Each thread passes its own arguments; a launch that mixes two threads' is found."""
    launcher = build_mixed(Key())

    def work(index: int) -> None:
        for call in range(calls):
            _run_compiled(launcher, index << 32 | call, index << 40, index + 1, index * 0.5, index)

    errors = _at_once(threads, work)
    if errors:
        raise errors[0]
    seen = set()
    for launch in driver.launches():
        index, call = divmod(launch.ints()[0], 1 << 32)
        assert launch.ints()[1] == index << 40
        assert (launch.grid[0], launch.stream) == (index + 1, index)
        seen.add((index, call))
    loads = driver.count("hipModuleLoadData")
    return (
        loads,
        driver.count("hipModuleLaunchKernel"),
        len(seen),
        hasattr(launcher, "_launch_address"),
    )


@pytest.mark.parametrize("run", range(3))
def test_racing_first_calls_compile_once_and_launch_each_once(hip_stub: HipStub, run: int):
    assert hip_stub.run(racing, 8, 200) == (1, 1600, 1600, True)


def racing_launchers(driver: Driver) -> tuple[int, int]:
    launchers = [build_mixed(Key()), build_mixed(Key(3.0)), build_mixed(Key(4.0))]
    errors = _at_once(6, lambda i: _run_compiled(launchers[i % 3], i, i, 1, 0.5, None))
    if errors:
        raise errors[0]
    return driver.count("hipModuleLoadData"), driver.count("hipModuleLaunchKernel")


def test_racing_first_calls_of_different_launchers_each_compile_once(hip_stub: HipStub):
    assert hip_stub.run(racing_launchers) == (3, 6)


def racing_failure(driver: Driver) -> tuple[int, int]:
    launcher = build_mixed(Key())
    driver.fail("hipModuleLaunchKernel", 719)
    errors = _at_once(4, lambda index: _run_compiled(launcher, index, 0, 1, 0.5, None))
    return len(errors), len(driver.launches())


def test_a_failed_first_call_fails_for_its_caller_alone(hip_stub: HipStub):
    assert hip_stub.run(racing_failure) == (1, 3)


def sleeping(driver: Driver, threads: int) -> float:
    launcher = build_pair(Key())
    _run_compiled(launcher, 0, 1, None)
    driver.delay("hipModuleLaunchKernel", 0.1)
    start = time.perf_counter()
    _at_once(threads, lambda index: _run_compiled(launcher, 0, 1, None))
    return time.perf_counter() - start


def test_other_threads_run_while_the_driver_works(hip_stub: HipStub):
    # Two kernels of 0.1 s each; four threads one after another would take 0.8 s.
    assert hip_stub.run(sleeping, 4) < 0.6


def test_threads_that_build_at_once_get_one_launcher():
    built = []

    @kernel_builder
    def build_slowly(key: Key):
        time.sleep(0.02)
        return build_pair.__wrapped__(key)

    assert not _at_once(8, lambda index: built.append(build_slowly(Key())))
    assert len(built) == 8
    assert len({id(launcher) for launcher in built}) == 1
