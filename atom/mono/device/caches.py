"""The paged caches of keys, values and index keys, in bf16 or fp8 (e4m3).

A page has PAGE tokens. Shapes, an element times its cache's scale being the value:

    k       [pages, kv heads, PAGE, HEAD_DIM]
    v       [pages, kv heads, HEAD_DIM, PAGE]      transposed, so that both are in operand order
    index   [pages, 1, PAGE, HEAD_DIM]
    scales  [3] f32 of k, v, index; not read for bf16, whose scale is 1

One scale serves a whole cache: keys are normed per head, so their range does not move.
"""

from __future__ import annotations

import flydsl.expr as fx

from aiter.ops.flydsl.kernels.device import (
    TraceObject,
    div,
    global_pointer,
    load_word,
    mod,
    reciprocal,
)

from .formats import BITS, RUNS, fp8_pair, widen_fp8, widened
from .sync import beyond, float_pair

HEAD_DIM = 128
PAGE = 128
ROW = 128  # elements of a row of a page: HEAD_DIM of a token, or PAGE of a dimension
_PAIRS = ROW // 2


class Plane(TraceObject):
    """One cache, [pages, heads, 128, 128] in `fmt` at `address`; `scale` is where its scale is."""

    def __init__(self, fmt: str, address: fx.Int64, heads: int, scale: fx.Int64 | None) -> None:
        self.fmt, self.address, self.heads, self._scale = fmt, address, heads, scale
        self.row_bytes = ROW * BITS[fmt] // 8

    @property
    def scaled(self) -> bool:
        """Whether elements stand for a multiple of themselves."""
        return self.fmt != "bf16"

    def scale(self) -> fx.Float32:
        """The cache's scale, uniform; 1 where it has none."""
        return load_word(self._scale, 0).bitcast(fx.Float32) if self.scaled else fx.Float32(1.0)

    def inverse(self) -> fx.Float32:
        """One over the scale."""
        return reciprocal(self.scale()) if self.scaled else fx.Float32(1.0)

    def page(self, page: fx.Int32, head: fx.Int32 | int = 0) -> fx.Int64:
        """Address of a head's [128, 128] elements of a page."""
        return self.address + (fx.Int64(page) * self.heads + fx.Int64(head)) * (
            ROW * self.row_bytes
        )

    def row_operands(self, page: fx.Int64, row: fx.Int32, lane: fx.Int32) -> list[fx.Vector]:
        """The lane's operands, bf16 x 8, of the whole row `row`; columns as in `formats`."""
        at = row * self.row_bytes + div(lane, 16) * 16
        runs = [
            fx.generic_load(global_pointer(fx.Int32, beyond(page + 64 * run, at), 16), count=4)
            for run in range(RUNS[self.fmt])
        ]
        return widened(self.fmt, runs, [fx.Float32(1.0)] * len(runs))

    def first_of_eight(self, count: fx.Int32) -> list[fx.Int32]:
        """The bits of the first `count` of eight elements, in words; `count` is any number."""
        bits = BITS[self.fmt]
        each = 32 // bits
        masks = []
        for word in range(8 // each):
            here = fx.min(fx.max(count - word * each, fx.Int32(0)), fx.Int32(each))
            some = (fx.Int32(1) << (fx.min(here, fx.Int32(each - 1)) * bits)) - 1
            masks.append((here == each).select(fx.Int32(-1), some))
        return masks

    def eight(
        self, page: fx.Int64, row: fx.Int32, column: fx.Int32, bits: list[fx.Int32]
    ) -> fx.Vector:
        """Eight elements of a row from `column`, a multiple of 8, as bf16; zeros but for `bits`,
        from `first_of_eight`."""
        at = beyond(page, row * self.row_bytes + column * (self.row_bytes // ROW))
        alignment = 4 * len(bits)
        held = fx.generic_load(global_pointer(fx.Int32, at, alignment), count=len(bits))
        words = [fx.Int32(held[i]) & mask for i, mask in enumerate(bits)]
        if self.fmt == "bf16":
            return fx.Vector.from_elements(words, fx.Int32).bitcast(fx.BFloat16)
        return widen_fp8(words[0], words[1], fx.Float32(1.0))

    def insert_row(
        self,
        page: fx.Int64,
        row: fx.Int32,
        lane: fx.Int32,
        values: tuple[fx.Float32, fx.Float32],
        inverse: fx.Float32,
    ) -> None:
        """Store the lane's columns (2 lane, 2 lane + 1) of a row, `inverse` being `inverse()`."""
        low, high = values
        place = row * _PAIRS + lane
        if self.fmt == "bf16":
            global_pointer(fx.Int32, page)[place] = float_pair(low, high)
        else:
            pair = fp8_pair(low * inverse, high * inverse)
            global_pointer(fx.Int16, page)[place] = fx.Int16(pair)

    def insert_column(
        self,
        page: fx.Int64,
        column: fx.Int32,
        lane: fx.Int32,
        values: tuple[fx.Float32, fx.Float32],
        inverse: fx.Float32,
    ) -> None:
        """Store the lane's rows (2 lane, 2 lane + 1) of a column."""
        low, high = values
        places = [lane * (2 * ROW) + column, lane * (2 * ROW) + (ROW + column)]
        if self.fmt == "bf16":
            for place, value in zip(places, (low, high), strict=True):
                global_pointer(fx.BFloat16, page)[place] = value.to(fx.BFloat16)
        else:
            pair = fp8_pair(low * inverse, high * inverse)
            for i, place in enumerate(places):
                global_pointer(fx.Int8, page)[place] = fx.Int8(pair >> (8 * i))


class Caches(TraceObject):
    """A rank's caches; a kernel that has no index heads has no index cache."""

    def __init__(
        self,
        kv_heads: int,
        kv_format: str,
        k: fx.Int64,
        v: fx.Int64,
        scales: fx.Int64,
        index_format: str = "bf16",
        index: fx.Int64 | None = None,
    ) -> None:
        self.k = Plane(kv_format, k, kv_heads, scales)
        self.v = Plane(kv_format, v, kv_heads, scales + 4)
        self.index = None if index is None else Plane(index_format, index, 1, scales + 8)


def cell_of(slot: fx.Int32) -> tuple[fx.Int32, fx.Int32]:
    """(page, place in it) of a slot; those of slot 0 for a padding row's -1."""
    cell = fx.max(slot, fx.Int32(0))
    return div(cell, PAGE), mod(cell, PAGE)
