"""Named regions within one allocation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .execution import round_up

ALIGN = 256  # bytes: two cache lines, so that no two regions share one


@dataclass(frozen=True)
class Region:
    """`bytes` at `offset` of a buffer. `space` and the stage `writer` are as in `check`."""

    name: str
    space: str
    writer: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Layout:
    """A buffer's regions, in ascending offsets without overlap; `bytes` is the buffer's size."""

    regions: tuple[Region, ...]
    bytes: int

    def __getitem__(self, name: str) -> Region:
        for region in self.regions:
            if region.name == name:
                return region
        raise KeyError(name)

    def at(self, offset: int) -> Region | None:
        """The region that holds the byte at `offset`, None for padding or beyond the end."""
        holds = lambda r: r.offset <= offset < r.offset + r.bytes
        return next(filter(holds, self.regions), None)


def laid_out(entries: Iterable[tuple[str, str, str, int]]) -> Layout:
    """Regions of (name, space, writer, bytes), one behind another at multiples of `ALIGN`.

    Raises ValueError for a name that comes twice or a size below one.
    """
    regions: list[Region] = []
    end = 0
    for name, space, writer, size in entries:
        if size < 1 or any(region.name == name for region in regions):
            raise ValueError(f"region {name} of {size} bytes: empty, or its name comes twice")
        regions.append(Region(name, space, writer, end, size))
        end = round_up(end + size, ALIGN)
    return Layout(tuple(regions), end)
