"""All-reduce over peers' memory: push partial sums to every rank, add them in rank order.

Every rank adds the same f32 numbers in the same order, so all get the same bits. A rank's part of
a region is words [tokens, columns]; rank r writes part r of every rank's region.

A region is free for a layer's sums once the layer before has consumed its own, though no rank asks
another: with two exchanges in a layer, each of which needs every element of the one before it, a
rank that sends again has what all others sent in between, and they sent it after consuming.
"""

from __future__ import annotations

import flydsl.expr as fx

from aiter.ops.flydsl.kernels.device import TraceObject, global_pointer
from atom.mono.plan.trace import Space

from .sync import WORD, Run, Waits, Words, poll_runs

_RUNS = 12  # pairs of words that a lane waits for at once, four registers each


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

    def sums(
        self, columns: list[tuple[fx.Int32, fx.Boolean]], token: fx.Int32
    ) -> list[tuple[fx.Float32, fx.Float32]]:
        """Wait for all ranks' sums of each (column, wanted) and the column after it; their sums,
        0 where not wanted."""
        at_once = max(1, _RUNS // self.tp)
        result = []
        for i in range(0, len(columns), at_once):
            result += self._sums(columns[i : i + at_once], token)
        return result

    def _sums(
        self, columns: list[tuple[fx.Int32, fx.Boolean]], token: fx.Int32
    ) -> list[tuple[fx.Float32, fx.Float32]]:
        runs = [
            Run(words, token * self.columns + column, wanted)
            for column, wanted in columns
            for words in self._own
        ]
        pairs = [[v.bitcast(fx.Float32) for v in pair] for pair in poll_runs(runs, 2)]
        result = []
        for i in range(len(columns)):
            low, high = pairs[i * self.tp]
            for rank in range(1, self.tp):
                a, b = pairs[i * self.tp + rank]
                low, high = low + a, high + b
            result.append((low, high))
        return result
