"""Several devices: each has its own copy of the code, loaded at the first launch there."""

from __future__ import annotations

import threading

import pytest

from aiter.ops.flydsl.kernels.tensor_shim import DriverError, _run_compiled
from op_tests.dispatch.kernels import Key, build_mixed
from op_tests.hip_stub import Driver, HipStub

pytestmark = pytest.mark.compile

ARGS = (0x1000, 0x2000, 3, 0.5, None)


def in_turn(driver: Driver) -> tuple[list[int], dict[str, int]]:
    driver.devices(3)
    launcher = build_mixed(Key())
    for device in (1, 0, 2, 1, 0, 2):
        driver.set_device(device)
        _run_compiled(launcher, *ARGS)
    return [launch.device for launch in driver.launches()], driver.counts()


def test_a_second_device_gets_its_own_module_and_no_second_compile(hip_stub: HipStub):
    devices, counts = hip_stub.run(in_turn)
    # The stub refuses to launch a function that another device loaded.
    assert devices == [1, 0, 2, 1, 0, 2]
    assert (counts["hipModuleLoadData"], counts["hipModuleGetFunction"]) == (3, 3)


def at_once(driver: Driver) -> tuple[dict[int, int], int]:
    driver.devices(4)
    launcher = build_mixed(Key())

    def work(device: int) -> None:
        driver.set_device(device)
        for _ in range(100):
            _run_compiled(launcher, *ARGS)

    threads = [threading.Thread(target=work, args=(device % 4,)) for device in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    devices = [launch.device for launch in driver.launches()]
    return {device: devices.count(device) for device in range(4)}, driver.count("hipModuleLoadData")


def test_threads_on_different_devices_launch_on_their_own(hip_stub: HipStub):
    assert hip_stub.run(at_once) == (dict.fromkeys(range(4), 200), 4)


def second_load_fails(driver: Driver) -> tuple[str, list[int]]:
    driver.devices(2)
    launcher = build_mixed(Key())
    _run_compiled(launcher, *ARGS)
    driver.set_device(1)
    driver.fail("hipModuleLoadData", 2)
    message = ""
    try:
        _run_compiled(launcher, *ARGS)
    except DriverError as error:
        message = str(error)
    _run_compiled(launcher, *ARGS)
    driver.set_device(0)
    _run_compiled(launcher, *ARGS)
    return message, [launch.device for launch in driver.launches()]


def test_a_device_that_cannot_load_the_code_says_so_and_spoils_no_other(hip_stub: HipStub):
    message, devices = hip_stub.run(second_load_fails)
    assert message.startswith("loading the code of mixed_kernel_0 of launch_mixed failed with ")
    assert "hipErrorOutOfMemory (2)" in message
    assert devices == [0, 1, 0]
