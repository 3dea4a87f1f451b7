"""Memory that checks itself: the tensors of this process, and the LDS and scratch of workgroups.

Global memory is the process's own: a CPU tensor is a device tensor at its ``data_ptr()``, without
copies. Only addresses inside a registered tensor's storage may be touched.
"""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass

import numpy as np
import torch

LDS_APERTURE = 1 << 56  # where a generic pointer to LDS lives; no process address is that high
PRIVATE_APERTURE = 1 << 57
_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class MemoryFault(Exception):
    """A bad access. ``lane`` indexes the lanes of the access; None when it does not matter."""

    def __init__(self, text: str, lane: int | None = None) -> None:
        super().__init__(text)
        self.lane = lane


def typed_views(data: np.ndarray) -> dict[int, np.ndarray]:
    """The same bytes as arrays of 1, 2, 4, 8 and 16 byte units."""
    return {size: data.view(kind) for size, kind in _UNITS.items()}


def _process_memory() -> dict[int, np.ndarray]:
    length = (1 << 47) - 2 * _ORIGIN
    everything = (ctypes.c_uint8 * length).from_address(_ORIGIN)
    return typed_views(np.frombuffer(everything, np.uint8))


_ORIGIN = 4096
_PROCESS = _process_memory()


def _unit(at: np.ndarray, size: int) -> int:
    """The widest unit every access of ``size`` bytes at ``at`` is a whole number of."""
    low = int(np.bitwise_or.reduce(at)) | size | 16
    return low & -low


def gather(views: dict[int, np.ndarray], at: np.ndarray, size: int) -> np.ndarray:
    """``(len(at), size)`` uint8 read from offsets ``at``."""
    unit = _unit(at, size)
    index = at // unit
    count = size // unit
    if count > 1:
        index = index[:, None] + np.arange(count)
    return views[unit][index].view(np.uint8).reshape(len(at), size)


def scatter(views: dict[int, np.ndarray], at: np.ndarray, data: np.ndarray) -> None:
    """Write ``data`` (lanes, size) uint8 at offsets ``at``; of equal offsets the last wins."""
    size = data.shape[1]
    unit = _unit(at, size)
    index = at // unit
    count = size // unit
    words = np.ascontiguousarray(data).view(_UNITS[unit])
    if count > 1:
        views[unit][index[:, None] + np.arange(count)] = words
    else:
        views[unit][index] = words[:, 0]


@dataclass
class Allocation:
    """A registered storage. ``written`` has a flag a byte when unwritten reads are reported."""

    base: int
    size: int
    label: str
    tensor: torch.Tensor
    uses: int = 0
    written: np.ndarray | None = None


class GlobalMemory:
    """The tensors a kernel may touch."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._by_base: dict[int, Allocation] = {}
        self._shadowed = False
        self.changes = 0

    def register(self, tensor: torch.Tensor, label: str = "", scratch: bool = False) -> Allocation:
        """Allow access to the storage of a CPU ``tensor`` until :meth:`release`.

        ``scratch`` declares its content meaningless: bytes read before they are written are errors.
        """
        if tensor.device.type != "cpu":
            raise ValueError(f"the emulator runs on CPU tensors, got one on {tensor.device}")
        storage = tensor.untyped_storage()
        base, size = storage.data_ptr(), storage.nbytes()
        found = self._by_base.get(base)
        if found is None:
            name = label or f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            found = self._by_base[base] = Allocation(base, size, name, tensor)
            bisect.insort(self._bases, base)
        found.uses += 1
        if scratch:
            found.written = np.zeros(size, bool)
            self._shadowed = True
        return found

    def release(self, allocation: Allocation) -> None:
        allocation.uses -= 1
        if allocation.uses == 0:
            del self._by_base[allocation.base]
            self._bases.remove(allocation.base)

    def find(self, address: int) -> Allocation | None:
        """The allocation that holds ``address``."""
        at = bisect.bisect_right(self._bases, address) - 1
        if at < 0:
            return None
        allocation = self._by_base[self._bases[at]]
        return allocation if address < allocation.base + allocation.size else None

    def describe(self, address: int) -> str:
        """Where ``address`` is, for error texts."""
        inside = self.find(address)
        if inside:
            return f"byte {address - inside.base} of tensor {inside.label} ({inside.size} bytes)"
        at = bisect.bisect_right(self._bases, address) - 1
        near = [self._by_base[b] for b in self._bases[max(at, 0) : at + 2]]
        texts = []
        for a in near:
            gap = address - (a.base + a.size) if address >= a.base else a.base - address
            side = "past the end" if address >= a.base else "before the start"
            texts.append(f"{gap} bytes {side} of tensor {a.label} ({a.size} bytes)")
        return f"{address:#x}, outside every tensor" + (f"; {'; '.join(texts)}" if texts else "")

    def _check(self, at: np.ndarray, size: int, what: str) -> None:
        low, high = int(at.min()), int(at.max())
        inside = self.find(low)
        if inside and high + size <= inside.base + inside.size:
            return
        bases = np.array(self._bases, np.int64)
        ends = np.array([b + self._by_base[b].size for b in self._bases], np.int64)
        slot = np.searchsorted(bases, at, "right") - 1
        good = slot >= 0
        if len(bases):
            good &= at + size <= ends[slot]
        if not good.all():
            lane = int(np.flatnonzero(~good)[0])
            where = int(at[lane])
            if self.find(where):
                where += size - 1
            raise MemoryFault(f"{what} of {size} bytes at {self.describe(where)}", lane)

    def _shadow(self, at: np.ndarray, size: int, wrote: bool) -> None:
        for a in self._by_base.values():
            if a.written is None:
                continue
            inside = np.flatnonzero((at >= a.base) & (at < a.base + a.size))
            if not len(inside):
                continue
            spans = (at[inside] - a.base)[:, None] + np.arange(size)
            if wrote:
                a.written[spans] = True
            elif not a.written[spans].all():
                lane = int(inside[np.flatnonzero(~a.written[spans].all(axis=1))[0]])
                text = f"read of {size} bytes that nothing wrote, at {self.describe(int(at[lane]))}"
                raise MemoryFault(text, lane)

    def load(self, at: np.ndarray, size: int) -> np.ndarray:
        """``(lanes, size)`` uint8 at addresses ``at``."""
        self._check(at, size, "load")
        if self._shadowed:
            self._shadow(at, size, False)
        return gather(_PROCESS, at - _ORIGIN, size)

    def store(self, at: np.ndarray, data: np.ndarray) -> None:
        size = data.shape[1]
        self._check(at, size, "store")
        if self._shadowed:
            self._shadow(at, size, True)
        self.changes += 1
        scatter(_PROCESS, at - _ORIGIN, data)


class Bank:
    """Memory of several owners side by side: the LDS of workgroups, or the scratch of lanes.

    ``size`` is what one owner may touch, in bytes; ``poison`` reports reads of unwritten bytes.
    """

    def __init__(self, name: str, owners: int, size: int, poison: bool) -> None:
        self.name, self.size = name, size
        self.stride = -(-max(size, 1) // 16) * 16
        fill = 0xCB if poison else 0
        self._views = typed_views(np.full(owners * self.stride, fill, np.uint8))
        self._written = np.zeros(owners * self.stride, bool) if poison else None

    def _check(self, at: np.ndarray, size: int, what: str) -> None:
        if int(at.min()) < 0 or int(at.max()) + size > self.size:
            lane = int(np.flatnonzero((at < 0) | (at + size > self.size))[0])
            text = f"{what} of {size} bytes at {self.name} byte {int(at[lane])} of {self.size}"
            raise MemoryFault(text, lane)

    def load(self, owner: np.ndarray, at: np.ndarray, size: int) -> np.ndarray:
        """``(lanes, size)`` uint8 at byte ``at`` of each lane's ``owner``."""
        self._check(at, size, "load")
        where = owner * self.stride + at
        if self._written is not None:
            seen = self._written[where[:, None] + np.arange(size)]
            if not seen.all():
                lane = int(np.flatnonzero(~seen.all(axis=1))[0])
                text = (
                    f"read of {size} bytes at {self.name} byte {int(at[lane])} that nothing wrote"
                )
                raise MemoryFault(text, lane)
        return gather(self._views, where, size)

    def store(self, owner: np.ndarray, at: np.ndarray, data: np.ndarray) -> None:
        size = data.shape[1]
        self._check(at, size, "store")
        where = owner * self.stride + at
        if self._written is not None:
            self._written[where[:, None] + np.arange(size)] = True
        scatter(self._views, where, data)
