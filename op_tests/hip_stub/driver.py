"""The stub's controls, in a process that has loaded it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAME, _ARGS, _ARG_BYTES = 128, 128, 1024  # as in hip_stub.h


class _Record(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char * _NAME),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("lds", ctypes.c_uint),
        ("device", ctypes.c_int),
        ("stream", ctypes.c_uint64),
        ("thread", ctypes.c_uint64),
        ("arg_count", ctypes.c_uint),
        ("arg_sizes", ctypes.c_uint * _ARGS),
        ("args", ctypes.c_ubyte * _ARG_BYTES),
    ]


@dataclass(frozen=True)
class Launched:
    """One kernel launch: `lds` in bytes, `args` the bytes of each argument."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    lds: int
    device: int
    stream: int
    thread: int
    args: tuple[bytes, ...]

    def ints(self) -> tuple[int, ...]:
        """The arguments as signed integers of their sizes."""
        return tuple(int.from_bytes(arg, "little", signed=True) for arg in self.args)


class Driver:
    """The stub driver of this process; load it before anything loads FlyDSL's runtime.

    Raises OSError for a library that cannot be loaded.
    """

    def __init__(self, library: Path) -> None:
        # By its soname it now is the driver of whatever is loaded after it.
        self._lib = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._lib.stub_log_entry.restype = ctypes.POINTER(_Record)

    def counts(self) -> dict[str, int]:
        """How often each driver function was called, without those never called."""
        name, calls = ctypes.c_char_p(), ctypes.c_ulonglong()
        found, index = {}, 0
        while self._lib.stub_api(index, ctypes.byref(name), ctypes.byref(calls)):
            if calls.value:
                found[(name.value or b"").decode()] = calls.value
            index += 1
        return found

    def count(self, function: str) -> int:
        """How often `function` was called."""
        return self.counts().get(function, 0)

    def launches(self) -> list[Launched]:
        """The launches so far, in order. Raises RuntimeError when the log overflowed."""
        size = self._lib.stub_log_size()
        if size > self._lib.stub_log_capacity():
            raise RuntimeError(f"{size} launches do not fit the stub's log")
        return [_launched(self._lib.stub_log_entry(index).contents) for index in range(size)]

    def reset(self) -> None:
        """Forget counts, launches, failures and delays."""
        self._lib.stub_reset()

    def fail(self, function: str, code: int, *, skip: int = 0, times: int = 1) -> None:
        """Have `times` calls of `function`, after `skip` good ones, return the error `code`."""
        self._known(self._lib.stub_fail(function.encode(), code, skip, times), function)

    def delay(self, function: str, seconds: float) -> None:
        """Have every call of `function` sleep first."""
        self._known(self._lib.stub_delay(function.encode(), int(seconds * 1e6)), function)

    def logging(self, on: bool) -> None:
        """Record launches, or only count them."""
        self._lib.stub_logging(int(on))

    def devices(self, count: int) -> None:
        """How many devices there are; one at first."""
        self._lib.stub_devices(count)

    def set_device(self, index: int) -> None:
        """Make `index` the calling thread's device. Raises ValueError if there is none such."""
        if self._lib.hipSetDevice(index):
            raise ValueError(f"there is no device {index}")

    def capture(self, stream: int, on: bool = True) -> None:
        """Begin or end the capture of `stream` into a graph; loading a module then fails."""
        if self._lib.stub_capture(ctypes.c_void_p(stream), int(on)):
            raise ValueError(f"stream {stream:#x} is not being captured")

    def nothing(self) -> int:
        """Address of a C function that takes a pointer and does nothing."""
        return ctypes.cast(self._lib.stub_nothing, ctypes.c_void_p).value or 0

    @staticmethod
    def _known(status: int, function: str) -> None:
        if status:
            raise ValueError(f"the stub has no {function}")


def _launched(record: Any) -> Launched:
    args, at = [], 0
    for size in record.arg_sizes[: record.arg_count]:
        args.append(bytes(record.args[at : at + size]))
        at += size
    return Launched(
        kernel=record.kernel.decode(),
        grid=tuple(record.grid),
        block=tuple(record.block),
        lds=record.lds,
        device=record.device,
        stream=record.stream,
        thread=record.thread,
        args=tuple(args),
    )
