"""Copies from global memory to LDS that finish later than they are issued.

In lock-step order a copy lands at once. In random order it lands when a wait demands it, or at a
random earlier moment, and copies do not land in order: a missing wait reads old data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Land = Callable[[np.ndarray], None]


@dataclass
class _Issued:
    """``lanes``: the lanes not landed yet; ``weight``: instructions it counts for."""

    counter: str
    waves: np.ndarray
    lanes: np.ndarray
    land: Land | None
    weight: int = 1
    marks: np.ndarray | None = None  # per wave, the number of marks before it


class ImmediateCopies:
    """Everything lands when issued."""

    deferred = False

    def __init__(self, batch) -> None:
        self.batch = batch

    def issue(self, counter: str, land: Land) -> None:
        land(self.batch.mask_array)

    def count(self, counter: str, weight: int = 1) -> None:
        pass

    def mark(self) -> None:
        pass

    def wait(self, counter: str, left: int) -> None:
        pass

    def wait_marks(self, left: int) -> None:
        pass

    def wander(self) -> None:
        pass

    def finish(self) -> None:
        pass


class DeferredCopies:
    """Copies wait in issue order; ``wander`` lets some land early."""

    deferred = True

    def __init__(self, batch, rng: np.random.Generator) -> None:
        self.batch, self.rng = batch, rng
        self._issued: list[_Issued] = []
        self._marks = np.zeros(batch.count, np.int64)

    def issue(self, counter: str, land: Land) -> None:
        """A copy of the active lanes; ``land(lanes)`` performs it for a lane mask."""
        batch = self.batch
        self._issued.append(
            _Issued(
                counter, batch.active_waves(), batch.mask_array.copy(), land, 1, self._marks.copy()
            )
        )

    def count(self, counter: str, weight: int = 1) -> None:
        """Another instruction that the counter counts, already complete."""
        if self._issued:
            waves = self.batch.active_waves()
            self._issued.append(_Issued(counter, waves, np.zeros(self.batch.n, bool), None, weight))

    def mark(self) -> None:
        self._marks += self.batch.active_waves()

    def wait(self, counter: str, left: int) -> None:
        """Land the active waves' copies of ``counter`` but the ``left`` newest instructions."""
        waiting = self.batch.active_waves()
        newer = np.zeros(self.batch.count, np.int64)
        for entry in reversed(list(self._issued)):
            if entry.counter != counter:
                continue
            self._land(entry, entry.waves & waiting & (newer >= left))
            newer += entry.waves * entry.weight
        self._prune()

    def wait_marks(self, left: int) -> None:
        """Land the copies of the active waves that belong to all but the ``left`` newest marks."""
        waiting = self.batch.active_waves()
        for entry in list(self._issued):
            if entry.marks is not None:
                self._land(entry, entry.waves & waiting & (entry.marks < self._marks - left))
        self._prune()

    def wander(self) -> None:
        if self._issued and self.rng.random() < 0.1:
            entry = self._issued[self.rng.integers(len(self._issued))]
            self._land(entry, entry.waves & (self.rng.random(self.batch.count) < 0.5))

    def finish(self) -> None:
        for entry in self._issued:
            self._land(entry, entry.waves)
        self._issued.clear()

    def _land(self, entry: _Issued, waves: np.ndarray) -> None:
        lanes = entry.lanes & np.repeat(waves, self.batch.width)
        if entry.land is None or not lanes.any():
            return
        entry.lanes &= ~lanes
        saved = self.batch.mask
        self.batch.set_mask(lanes)
        entry.land(lanes)
        self.batch.set_mask(saved)

    def _prune(self) -> None:
        """Forget old entries that have landed: no later wait can depend on them."""
        while self._issued and not self._issued[0].lanes.any():
            self._issued.pop(0)


def make_copies(batch, rng: np.random.Generator | None):
    return ImmediateCopies(batch) if rng is None else DeferredCopies(batch, rng)
