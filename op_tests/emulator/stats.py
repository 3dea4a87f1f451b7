"""Counters of what a kernel did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np


@dataclass
class KernelStats:
    """Per kernel. ``instructions`` counts operations once a wave; bytes count active lanes.

    A uniform global access counts once for the whole batch. ``conflicts`` are extra LDS cycles from
    lanes that meet in a bank, and are only counted when ``detailed``.
    """

    name: str
    detailed: bool = False
    banks: int = 32
    launches: int = 0
    instructions: Counter = field(default_factory=Counter)
    read_bytes: int = 0
    write_bytes: int = 0
    atomic_bytes: int = 0
    lds_read_bytes: int = 0
    lds_write_bytes: int = 0
    conflicts: int = 0

    @property
    def matrix(self) -> int:
        """Matrix instructions, once a wave."""
        return sum(n for k, n in self.instructions.items() if "mfma" in k or "wmma" in k)

    def global_read(self, size: int) -> None:
        self.read_bytes += size

    def global_write(self, size: int) -> None:
        self.write_bytes += size

    def atomic(self, size: int) -> None:
        self.atomic_bytes += size

    def lds_access(self, batch, at: np.ndarray, size: int, wrote: bool = False) -> None:
        lanes = len(batch.active)
        if wrote:
            self.lds_write_bytes += size * lanes
        else:
            self.lds_read_bytes += size * lanes
        if self.detailed:
            self.conflicts += self._conflicts(batch, at, size)

    def _conflicts(self, batch, at: np.ndarray, size: int) -> int:
        """Extra cycles when lanes of one pass touch different words of one bank.

        A pass serves the lanes whose accesses fill all banks once: 32 banks and 16 byte accesses
        make passes of 8 lanes.
        """
        words = max(size // 4, 1)
        lanes = max(self.banks // words, 1)
        word = at.reshape(-1, min(lanes, batch.width)) // 4
        live = batch.mask_array.reshape(word.shape)
        extra = 0
        for row, ok in zip(word, live, strict=True):
            touched = np.unique((row[ok][:, None] + np.arange(words)).reshape(-1))
            if len(touched):
                extra += int(np.bincount(touched % self.banks).max()) - 1
        return extra

    def add(self, other: KernelStats) -> None:
        """Sum in the counters of another run of the kernel."""
        self.launches += other.launches
        self.instructions += other.instructions
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def summary(self, name: str) -> str:
        """Two lines of text."""
        kinds = Counter()
        for instruction, count in self.instructions.items():
            kinds[kind_of(instruction)] += count
        by_kind = ", ".join(f"{k} {n}" for k, n in kinds.most_common())
        return (
            f"{name}: {self.launches} launches, read {self.read_bytes} B, write "
            f"{self.write_bytes} B, atomic {self.atomic_bytes} B, "
            f"LDS read {self.lds_read_bytes} B, LDS write {self.lds_write_bytes} B, "
            f"bank conflicts {self.conflicts} cycles\n"
            f"    {by_kind}"
        )


_SUMS = (
    "read_bytes",
    "write_bytes",
    "atomic_bytes",
    "lds_read_bytes",
    "lds_write_bytes",
    "conflicts",
)
_KINDS = (
    ("matrix", ("mfma", "wmma")),
    ("copy to LDS", (".lds", "tensor.")),
    ("memory", ("load", "store", "atomic", "cmpxchg")),
    ("lane exchange", ("dpp", "permute", "permlane", "readfirst", "readlane", "swizzle", "ballot")),
    ("synchronisation", ("barrier", "wait", "fence", "sleep", "asyncmark")),
    ("conversion", ("cvt", "trunc", "ext", "tofp", "fpto")),
)


def kind_of(instruction: str) -> str:
    """A coarse class of an operation's name."""
    for kind, parts in _KINDS:
        if any(part in instruction for part in parts):
            return kind
    return "arithmetic"
