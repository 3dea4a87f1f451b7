"""All-reduce over peers' memory: push partial sums to every rank, add them in rank order.

Every rank adds the same f32 numbers in the same order, so all get the same bits. A rank's part of
a region is words [tokens, columns]; rank r writes part r of every rank's region.
"""

from __future__ import annotations

import flydsl.expr as fx

from aiter.ops.flydsl.kernels.device import TraceObject, global_pointer
from atom.mono.plan.trace import Space

from .sync import WORD, Waits, Words


class Exchange(TraceObject):
    """One peer region of `tp` parts, at `offset` of each buffer of the table `peers`."""

    def __init__(
        self,
        region: str,
        peers: fx.Int64,
        offset: int,
        rank: fx.Int32,
        tp: int,
        tokens: int,
        columns: int,
        tag: fx.Int32,
        waits: Waits,
    ) -> None:
        self.tp, self.columns = tp, columns
        table = global_pointer(fx.Int64, peers)
        part = tokens * columns * WORD
        make = lambda base, index, sender: Words(
            region, Space.PEER, base + offset + fx.Int64(index) * part, tag, waits, sender
        )
        self._to = [make(table[r], rank, None) for r in range(tp)]
        self._own = [make(table[rank], fx.Int32(r), r) for r in range(tp)]

    def push(self, column: fx.Int32, token: fx.Int32, low: fx.Float32, high: fx.Float32) -> None:
        """Send this rank's partial sums of `column` and `column + 1` to every rank."""
        index = token * self.columns + column
        for words in self._to:
            words.push_float(index, low)
            words.push_float(index + 1, high)

    def sum(
        self, column: fx.Int32, token: fx.Int32, wanted: fx.Boolean
    ) -> tuple[fx.Float32, fx.Float32]:
        """Wait for all ranks' sums of `column` and `column + 1`; their sums, 0 if not `wanted`."""
        index = token * self.columns + column
        low = high = None
        for words in self._own:
            a, b = (value.bitcast(fx.Float32) for value in words.poll_run(index, 2, wanted))
            low, high = (a, b) if low is None else (low + a, high + b)
        return low, high
