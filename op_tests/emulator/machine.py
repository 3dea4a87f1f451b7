"""A batch of waves that execute together: their registers, masks and view of memory.

Lanes are numbered wave by wave. ``mask`` selects the lanes the running segment executes; None
stands for all of them, which is the fast case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .lltypes import Type
from .memory import LDS_APERTURE, PRIVATE_APERTURE, Bank, MemoryFault

if TYPE_CHECKING:
    from .scheduler import Group

FAR_FUTURE = 1 << 30


class Batch:
    """``waves``: the group's wave numbers that run here; ``width``: lanes a wave."""

    def __init__(self, group: Group, waves: np.ndarray, width: int, registers: list) -> None:
        self.group, self.waves, self.width = group, waves, width
        self.count, self.n = len(waves), len(waves) * width
        self.v = registers
        self.mask: np.ndarray | None = None
        self.lane = np.tile(np.arange(width), self.count)
        self.lane_wave = np.repeat(np.arange(self.count), width)
        self.wave_owner = waves // group.waves_each
        self.owner = np.repeat(self.wave_owner, width)
        self.thread = np.repeat((waves % group.waves_each) * width, width) + self.lane
        self.everyone = np.ones(self.n, bool)
        self.alive = self.thread < group.threads_each
        self.private: Bank | None = None
        self.private_used = 0
        self.copies = group.grid.copies(self)
        self.fp16_overflow = False  # MODE.FP16_OVFL: conversions to 8 bit saturate
        self.recent: tuple[str, np.ndarray] | None = None
        self._active: np.ndarray | None = None

    # ---- lanes -------------------------------------------------------------------------------

    def set_mask(self, mask: np.ndarray | None) -> None:
        self.mask, self._active = mask, None

    @property
    def active(self) -> np.ndarray:
        """Indices of the active lanes."""
        if self._active is None:
            mask = self.everyone if self.mask is None else self.mask
            self._active = np.flatnonzero(mask)
        return self._active

    @property
    def mask_array(self) -> np.ndarray:
        return self.everyone if self.mask is None else self.mask

    def active_waves(self) -> np.ndarray:
        """Which waves have an active lane."""
        if self.mask is None:
            return np.ones(self.count, bool)
        return self.mask.reshape(self.count, self.width).any(axis=1)

    def spread(self, value: np.ndarray) -> np.ndarray:
        """A value with one row a lane."""
        if len(value) == self.n:
            return value
        return np.broadcast_to(value, (self.n, *value.shape[1:]))

    def by_wave(self, value: np.ndarray) -> np.ndarray:
        """``(waves, width, ...)`` of a value."""
        return self.spread(value).reshape(self.count, self.width, *value.shape[1:])

    def first_active(self) -> np.ndarray:
        """For every wave, the lane index (within the batch) of its first active lane."""
        base = np.arange(self.count) * self.width
        if self.mask is None:
            return base
        return base + self.mask.reshape(self.count, self.width).argmax(axis=1)

    # ---- memory ------------------------------------------------------------------------------

    def load(self, space: int, at: np.ndarray, size: int, where: str = "") -> np.ndarray:
        """``(lanes, size)`` uint8 from pointers ``at`` of a space; inactive lanes get 0."""
        if space == 3 or space == 5:
            return self._bank_load(space, at, size)
        if space not in (0, 1, 4):
            raise NotImplementedError(f"load from address space {space}")
        if len(at) == 1:
            if space == 0 and int(at[0]) >= LDS_APERTURE:
                return self._generic(at, size, None)
            self.recent = (where, at)
            self.group.stats.global_read(size)
            return self.group.memory.load(at, size)
        active = self.active
        picked = at if self.mask is None else at[active]
        if space == 0 and int(picked.max()) >= LDS_APERTURE:
            return self._generic(at, size, None)
        self.recent = (where, picked)
        self.group.stats.global_read(size * len(picked))
        try:
            data = self.group.memory.load(picked, size)
        except MemoryFault as fault:
            raise self._at_lane(fault) from None
        return data if self.mask is None else self._scattered(data)

    def store(self, space: int, at: np.ndarray, data: np.ndarray) -> None:
        """Write ``data`` (lanes or one, size) uint8 in the active lanes."""
        if space == 3 or space == 5:
            self._bank_store(space, at, data)
            return
        if space not in (0, 1):
            raise NotImplementedError(f"store to address space {space}")
        if len(at) == 1:
            if space == 0 and int(at[0]) >= LDS_APERTURE:
                self._generic(at, data.shape[1], data)
                return
            data = data if len(data) == 1 else data[self.active[-1:]]
            self.group.stats.global_write(data.shape[1])
            self.group.memory.store(at, data)
            return
        picked, data = at[self.active], self.spread(data)[self.active]
        if space == 0 and int(picked.max()) >= LDS_APERTURE:
            self._generic(at, data.shape[1], self.spread(data))
            return
        self.group.stats.global_write(data.size)
        try:
            self.group.memory.store(picked, data)
        except MemoryFault as fault:
            raise self._at_lane(fault) from None

    def _at_lane(self, fault: MemoryFault) -> MemoryFault:
        if fault.lane is not None:
            fault.lane = int(self.active[fault.lane])
        return fault

    def _scattered(self, data: np.ndarray) -> np.ndarray:
        result = np.zeros((self.n, data.shape[1]), np.uint8)
        result[self.active] = data
        return result

    def _bank(self, space: int) -> tuple[Bank, np.ndarray]:
        if space == 3:
            return self.group.lds, self.owner
        if self.private is None:
            self.private = Bank("scratch", self.n, 1 << 14, self.group.grid.options.poison)
        return self.private, np.arange(self.n)

    def _bank_load(self, space: int, at: np.ndarray, size: int) -> np.ndarray:
        bank, owner = self._bank(space)
        at = self.spread(at)
        stats = self.group.stats
        if space == 3:
            stats.lds_access(self, at, size)
        try:
            if self.mask is None:
                return bank.load(owner, at, size)
            active = self.active
            return self._scattered(bank.load(owner[active], at[active], size))
        except MemoryFault as fault:
            raise self._at_lane(fault) from None

    def _bank_store(self, space: int, at: np.ndarray, data: np.ndarray) -> None:
        bank, owner = self._bank(space)
        at, data = self.spread(at), self.spread(data)
        if space == 3:
            self.group.stats.lds_access(self, at, data.shape[1], wrote=True)
        self.group.grid.changes += 1
        active = self.active
        try:
            bank.store(owner[active], at[active], data[active])
        except MemoryFault as fault:
            raise self._at_lane(fault) from None

    def _generic(self, at: np.ndarray, size: int, data: np.ndarray | None) -> np.ndarray | None:
        """An access through generic pointers, some of which point to LDS or scratch."""
        at, saved = self.spread(at), self.mask
        result = np.zeros((self.n, size), np.uint8)
        edges = (0, LDS_APERTURE, PRIVATE_APERTURE, 1 << 58)
        for space, low, high in zip((1, 3, 5), edges[:-1], edges[1:], strict=True):
            inside = self.mask_array & (at >= low) & (at < high)
            if not inside.any():
                continue
            self.set_mask(inside)
            base = 0 if space == 1 else low
            if data is None:
                part = self.load(space, at - base, size)
                result[inside] = part[inside]
            else:
                self.store(space, at - base, data)
            self.set_mask(saved)
        return None if data is not None else result

    def atomic(self, space: int, at: np.ndarray, size: int, update) -> np.ndarray:
        """Read-modify-write of the active lanes, one after another where addresses are equal.

        ``update(old, lanes)`` maps ``(k, size)`` uint8 old contents of lanes to new contents.
        Returns the old contents of every lane, ``(lanes, size)`` uint8.
        """
        lanes = self.active
        if self.group.rng is not None:
            lanes = self.group.rng.permutation(lanes)
        at = self.spread(at)[lanes]
        owner = self.owner[lanes]
        if space == 0 and int(at.max(initial=0)) >= LDS_APERTURE:
            space, at = 3, at - LDS_APERTURE
        key = at if space != 3 else at + owner * (1 << 40)
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        fresh = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        rank = np.empty(len(lanes), np.int64)
        rank[order] = np.arange(len(lanes)) - np.repeat(fresh, np.diff(np.r_[fresh, len(lanes)]))
        result = np.zeros((self.n, size), np.uint8)
        for turn in range(int(rank.max(initial=-1)) + 1):
            now = np.flatnonzero(rank == turn)
            old = self._raw_load(space, owner[now], at[now], size, lanes[now])
            new = update(old, lanes[now])
            self._raw_store(space, owner[now], at[now], new, bool((new != old).any()))
            result[lanes[now]] = old
        self.group.stats.atomic(size * len(lanes))
        return result

    def _raw_load(self, space, owner, at, size, lanes) -> np.ndarray:
        try:
            if space == 3:
                return self.group.lds.load(owner, at, size)
            return self.group.memory.load(at, size)
        except MemoryFault as fault:
            fault.lane = int(lanes[fault.lane])
            raise

    def _raw_store(self, space, owner, at, data, changed: bool) -> None:
        """A polling atomic that changes nothing is no progress."""
        memory = self.group.memory
        if space == 3:
            self.group.lds.store(owner, at, data)
            self.group.grid.changes += changed
        else:
            before = memory.changes
            memory.store(at, data)
            memory.changes = before + changed


def pointee_size(kind: Type) -> int:
    """Bytes from one element to the next in an array of ``kind``."""
    return -(-kind.size // kind.align) * kind.align
