"""The recording driver itself: what it counts, records, refuses and fails."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from aiter.jit.utils.flydsl_private import runtime_library
from aiter.ops.flydsl.kernels.tensor_shim import _run_compiled
from op_tests.dispatch.kernels import Key, build_mixed
from op_tests.hip_stub import Driver, HipStub, ScenarioError, StubError, build

ARGS = (0x1000, 0x2000, 3, 0.5, 0x77)

# What libfly_jit_runtime.so of FlyDSL 0.5 links against.
NEEDED = [
    "hipDeviceSynchronize",
    "hipEventCreateWithFlags",
    "hipEventDestroy",
    "hipEventRecord",
    "hipEventSynchronize",
    "hipFree",
    "hipGetDevice",
    "hipGetErrorName",
    "hipGetLastError",
    "hipHostGetDevicePointer",
    "hipHostRegister",
    "hipHostUnregister",
    "hipMalloc",
    "hipMemcpy",
    "hipMemcpyAsync",
    "hipMemset",
    "hipMemsetD16Async",
    "hipMemsetD32Async",
    "hipModuleGetFunction",
    "hipModuleLaunchKernel",
    "hipModuleLoadData",
    "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor",
    "hipModuleUnload",
    "hipSetDevice",
    "hipStreamCreate",
    "hipStreamDestroy",
    "hipStreamSynchronize",
    "hipStreamWaitEvent",
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build(tmp_path_factory.mktemp("stub"))
    except StubError as error:
        pytest.skip(str(error))


def test_it_has_the_names_and_the_version_flydsls_runtime_links_against(library: Path):
    listed = subprocess.run(["objdump", "-T", str(library)], capture_output=True, text=True)
    exported = {
        line.split()[-1] for line in listed.stdout.splitlines() if " hip_4.2 " in f"{line} "
    }
    assert set(NEEDED) <= exported
    headers = subprocess.run(["objdump", "-p", str(library)], capture_output=True, text=True)
    assert "SONAME               libamdhip64.so.7" in headers.stdout


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StubError, match="needs gcc"):
        build(tmp_path)


def counting(driver: Driver) -> dict[str, int]:
    lib = runtime_library()

    def work() -> None:
        out = ctypes.c_int()
        for _ in range(5000):
            lib.hipGetDevice(ctypes.byref(out))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return driver.counts()


def test_no_call_is_lost_when_threads_call_at_once(hip_stub: HipStub):
    assert hip_stub.run(counting) == {"hipGetDevice": 20000}


def failing(driver: Driver) -> list[int]:
    lib, out = runtime_library(), ctypes.c_int()
    driver.fail("hipGetDevice", 101, skip=2, times=2)
    return [lib.hipGetDevice(ctypes.byref(out)) for _ in range(6)] + [
        lib.hipGetLastError(),
        lib.hipGetLastError(),
    ]


def test_the_calls_asked_for_fail_and_no_others(hip_stub: HipStub):
    assert hip_stub.run(failing) == [0, 0, 101, 101, 0, 0, 101, 0]


def misuse(driver: Driver) -> list[int]:
    lib, module, function = runtime_library(), ctypes.c_void_p(), ctypes.c_void_p()
    driver.devices(2)
    garbage = ctypes.create_string_buffer(b"\x7fELF" + bytes(200))
    return [
        lib.hipModuleLoadData(ctypes.byref(module), garbage),
        lib.hipModuleGetFunction(ctypes.byref(function), None, b"x"),
        lib.hipModuleLaunchKernel(None, 1, 1, 1, 1, 1, 1, 0, None, None, None),
        lib.hipSetDevice(2),
        lib.hipSetDevice(1),
    ]


def test_misuse_is_an_error_and_not_a_crash(hip_stub: HipStub):
    assert hip_stub.run(misuse) == [200, 400, 400, 101, 0]


@pytest.mark.compile
def test_a_grid_of_no_blocks_is_refused_as_by_the_driver(hip_stub: HipStub):
    with pytest.raises(ScenarioError, match=r"hipErrorInvalidValue \(1\)"):
        hip_stub.run(empty_grid)


def empty_grid(driver: Driver) -> None:
    _run_compiled(build_mixed(Key()), 0, 0, 0, 0.5, None)


def dies(driver: Driver) -> None:
    ctypes.string_at(0)


def sleeps(driver: Driver) -> None:
    threading.Event().wait(30)


def test_a_scenario_that_dies_or_hangs_is_reported(hip_stub: HipStub):
    with pytest.raises(ScenarioError, match=r"dies\(\) was ended by SIGSEGV"):
        hip_stub.run(dies)
    with pytest.raises(ScenarioError, match=r"sleeps\(\) was ended by SIGALRM"):
        hip_stub.run(sleeps, seconds=1)
    assert hip_stub.run(counting) == {"hipGetDevice": 20000}


def test_without_a_driver_a_launch_is_an_error_and_not_the_end_of_the_process(tmp_path: Path):
    """FlyDSL itself aborts. Runs where there is no HIP at all, so without the stub."""
    script = (
        "import ctypes, sys\n"
        "try:\n    ctypes.CDLL('libamdhip64.so.7')\nexcept OSError: pass\nelse: sys.exit(77)\n"
        "from aiter.jit.utils.chip_info import Target, pinned\n"
        "from aiter.ops.flydsl.kernels.tensor_shim import DriverError, _run_compiled\n"
        "from op_tests.dispatch.kernels import Key, build_mixed\n"
        "with pinned(Target.of('gfx950')):\n"
        "    try:\n        _run_compiled(build_mixed(Key()), 0, 0, 1, 0.5, None)\n"
        "    except DriverError as error: print(error)\n"
    )

    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    if result.returncode == 77:
        pytest.skip("this machine has a HIP driver")
    assert result.returncode == 0, result.stderr
    assert "there is no HIP driver to launch kernels with: libamdhip64.so.7" in result.stdout
