"""Named regions within one allocation.

layout = Layout(Space.SCRATCH)
qkv = layout.place("qkv", 8 * 1024)
allocate(layout.nbytes); address = base + qkv.offset
"""

from __future__ import annotations

from dataclasses import dataclass

from .execution import round_up
from .trace import Space

ALIGN = 256  # bytes: two cache lines, so that regions never share one


@dataclass(frozen=True)
class Region:
    """`nbytes` at `offset` bytes from the start of its allocation."""

    name: str
    space: Space
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """The first offset behind it."""
        return self.offset + self.nbytes


class Layout:
    """Regions of one space placed one behind another, each at a multiple of `ALIGN`."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._regions: dict[str, Region] = {}
        self._end = 0

    def place(self, name: str, nbytes: int) -> Region:
        """The next region. Raises ValueError for a name already placed or a size below one."""
        if name in self._regions:
            raise ValueError(f"region {name} is already placed")
        if nbytes < 1:
            raise ValueError(f"region {name} of {nbytes} bytes")
        region = Region(name, self.space, self._end, nbytes)
        self._regions[name] = region
        self._end = round_up(region.end, ALIGN)
        return region

    @property
    def regions(self) -> tuple[Region, ...]:
        """All of them, in order."""
        return tuple(self._regions.values())

    @property
    def nbytes(self) -> int:
        """What the allocation must hold, a multiple of `ALIGN`."""
        return self._end

    def __getitem__(self, name: str) -> Region:
        return self._regions[name]
