"""The driver functions that peer memory needs, over host memory; handles hold an address."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


class FakeHip:
    """`fails` names a function that returns an error; `calls` are those made, in order.

    A peer's memory is "opened" at its own address + `opened_at`, to tell it from the original.
    """

    opened_at = 1 << 52

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.calls: list[str] = []
        self.memory: list[ctypes.Array] = []
        self.closed: list[int] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*args: object) -> int:
            self.calls.append(name)
            if name == self.fails:
                return 2
            getattr(self, f"_{name}", lambda *args: None)(*args)
            return 0

        if name.startswith("_"):
            raise AttributeError(name)
        return call

    def _hipExtMallocWithFlags(self, out, size, flags) -> None:
        assert flags == 3, "polled memory must be uncached"
        self.memory.append(ctypes.create_string_buffer(b"\xff" * size.value, size.value))
        out._obj.value = ctypes.addressof(self.memory[-1])

    def _hipMemset(self, address, value, size) -> None:
        ctypes.memset(address, value, size.value)

    def _hipIpcGetMemHandle(self, handle, address) -> None:
        ctypes.memmove(ctypes.addressof(handle._obj), address.value.to_bytes(8, "little"), 8)

    def _hipIpcOpenMemHandle(self, out, handle, flags) -> None:
        raw = bytes(handle)
        assert len(raw) == 64, "a handle is 64 bytes, some of which may be zero"
        out._obj.value = int.from_bytes(raw[:8], "little") + self.opened_at

    def _hipIpcCloseMemHandle(self, address) -> None:
        self.closed.append(address.value)
