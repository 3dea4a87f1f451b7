"""Weights times up to 16 tokens: the products of a decode step.

    y[n, t] = sum over k of W[n, k] * x[t, k]            x bf16, sums in f32

A task is a tile of 16 rows. The waves of a workgroup split K in steps of 128 and their sums meet
in LDS, in wave order. A step is four 16x16x32 matrix operations with the weights as first operand
and the tokens as columns; tokens the kernel does not have repeat the last one.

Quantised weights are widened in registers (`formats`), so only x and the sums are rounded. Lane l,
g = l div 16, takes row l mod 16; its 16-byte runs lie in the order of `shuffle_weight`, run r of
a step of a tile at byte 16 (64 r + l). fp8 and fp4 have one e8m0 scale for 32 elements of K
(per_1x32), in the byte order of `shuffle_scale` (rows/32, K/256, 64, 4 bytes): a lane takes those
of block 2 r + g div 2 for run r of fp8, of block g for fp4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import flydsl.expr as fx

from aiter.ops.flydsl.kernels.device import (
    LANES,
    TraceObject,
    div,
    global_pointer,
    mod,
    shift_right,
    traced,
)
from aiter.ops.flydsl.kernels.mx_widen import multiply
from atom.mono.plan.execution import WAVES

from .cta import Cta
from .formats import BITS, OPERATIONS, RUNS, STEP, column_of, widened
from .sync import Run, Words, beyond, poll_runs

TILE = 16  # rows of a task
# Steps whose weights and tokens a wave has on their way at once, at most.
AHEAD = {"bf16": 2, "fp8": 3, "fp4": 3}
_TILE_FLOATS = WAVES * TILE * TILE
TILE_BYTES = 4 * _TILE_FLOATS  # LDS of one tile's partial sums
_PAIRS = TILE // 2 * TILE  # threads that finish a tile, two rows each

# What a stage does with rows (row, row + 1) of a token's product.
Emit = Callable[[fx.Int32, fx.Int32, fx.Float32, fx.Float32], None]


class Weight(TraceObject):
    """A matrix [rows, k] in `fmt`: `data` and `scale` are addresses."""

    def __init__(self, fmt: str, data: fx.Int64, scale: fx.Int64, rows: int, k: int) -> None:
        if k % STEP or rows % TILE:
            raise ValueError(f"a weight of {rows} x {k}: multiples of {TILE} x {STEP}")
        if fmt != "bf16" and rows % 32:
            raise ValueError(f"a quantised weight has whole groups of 32 rows, not {rows}")
        self.fmt, self.data, self.scale, self.rows, self.k = fmt, data, scale, rows, k

    @property
    def bytes(self) -> int:
        return self.rows * self.k * BITS[self.fmt] // 8

    @property
    def scale_row_bytes(self) -> int:
        """Bytes of the scales of 32 rows."""
        return -(-self.k // 256) * LANES * 4

    @property
    def steps(self) -> int:
        return self.k // STEP

    def of_expert(self, expert: fx.Int32) -> Weight:
        """The matrix of `expert` in a stack of matrices like this one."""
        return Weight(
            self.fmt,
            self.data + fx.Int64(expert) * self.bytes,
            self.scale + fx.Int64(expert) * (self.rows // 32 * self.scale_row_bytes),
            self.rows,
            self.k,
        )

    def fetch(self, tile: fx.Int32, step: fx.Int32, lane: fx.Int32) -> Fetched:
        """Start to load what the lane needs of a step."""
        runs = RUNS[self.fmt]
        step_bytes = runs * 16 * LANES
        base = self.data + (fx.Int64(tile) * self.steps + fx.Int64(step)) * step_bytes
        raw = [self._run(beyond(base + 16 * LANES * r, lane * 16)) for r in range(runs)]
        if self.fmt == "bf16":
            return Fetched(raw, [], fx.Int32(0))
        shift = (mod(step, 2) * 2 + mod(tile, 2)) * 8
        row_words = self.scale_row_bytes // 4
        word0 = div(tile, 2) * row_words + div(step, 2) * LANES
        if self.fmt == "fp4":
            places = [lane]
        else:
            places = [(2 * run + div(lane, 32)) * 16 + mod(lane, 16) for run in range(2)]
        return Fetched(raw, [self._scales(word0 + place) for place in places], shift)

    def operands(self, fetched: Fetched) -> list[fx.Vector]:
        """The lane's operands, bf16 x 8, of the operations of a step."""
        scales = [_scale(word, fetched.shift) for word in fetched.scales]
        return widened(self.fmt, fetched.raw, scales)

    def _run(self, at: fx.Int64) -> fx.Vector:
        return fx.generic_load(global_pointer(fx.Int32, at, 16), count=4, nontemporal=True)

    def _scales(self, word: fx.Int32) -> fx.Int32:
        return global_pointer(fx.Int32, beyond(self.scale, word * 4)).load()


@dataclass(frozen=True)
class Fetched:
    """A lane's part of a step on its way: 16-byte runs, scale words, and the shift that brings a
    scale's byte down."""

    raw: list[fx.Vector]
    scales: list[fx.Int32]
    shift: fx.Int32


def _scale(word: fx.Int32, shift: fx.Int32) -> fx.Float32:
    """2^(e8m0 - 127) of a byte of a scale word."""
    return ((shift_right(word, shift) & 255) << 23).bitcast(fx.Float32)


@dataclass(frozen=True)
class Piece:
    """Eight elements of a row from column `k`, a multiple of 8; zeros in lanes not `wanted`."""

    row: fx.Int32
    k: fx.Int32
    wanted: fx.Boolean | None = None


class WordRows(TraceObject):
    """Rows of bf16 pairs in mailbox words."""

    def __init__(self, words: Words, columns: int) -> None:
        self.words, self.columns = words, columns

    def load(self, pieces: list[Piece]) -> list[fx.Vector]:
        """The pieces; all are waited for at once."""
        runs = [
            Run(self.words, p.row * (self.columns // 2) + shift_right(p.k, 1), p.wanted)
            for p in pieces
        ]
        return [
            fx.Vector.from_elements(values, fx.Int32).bitcast(fx.BFloat16)
            for values in poll_runs(runs, 4)
        ]


class PlainRows(TraceObject):
    """Rows of bf16 that an earlier kernel left in memory."""

    def __init__(self, address: fx.Int64, columns: int) -> None:
        self.address, self.columns = address, columns

    def load(self, pieces: list[Piece]) -> list[fx.Vector]:
        """The pieces."""
        return [self._load(piece) for piece in pieces]

    def _load(self, piece: Piece) -> fx.Vector:
        at = beyond(self.address, (piece.row * self.columns + piece.k) * 2)
        words = fx.generic_load(global_pointer(fx.Int32, at, 16), count=4)
        if piece.wanted is not None:
            zero = fx.Int32(0)
            held = [piece.wanted.select(fx.Int32(words[i]), zero) for i in range(4)]
            words = fx.Vector.from_elements(held, fx.Int32)
        return words.bitcast(fx.BFloat16)


def query_operands(
    rows: WordRows | PlainRows, row: fx.Int32, lane: fx.Int32, fmt: str
) -> list[fx.Vector]:
    """The lane's operands of a whole row of a step, in the order of a first operand in `fmt`."""
    return rows.load([Piece(row, column_of(fmt, lane, j)) for j in range(OPERATIONS)])


def zero_tile() -> fx.Vector:
    return fx.Vector.filled(4, 0.0, fx.Float32)


@dataclass(frozen=True)
class Step:
    """A step of K of tiles of `weight` that share their tokens: `row` is the row of x that the
    lane's column is, and lanes not `wanted` add nothing."""

    weight: Weight
    tiles: list[fx.Int32]
    number: fx.Int32
    row: fx.Int32
    wanted: fx.Boolean | None = None


def add_steps(
    steps: list[Step], source: WordRows | PlainRows, lane: fx.Int32, tiles: list[fx.Vector]
) -> list[fx.Vector]:
    """Add `steps` to the accumulators `tiles`. Weights are on their way before x is waited for."""
    fetched = [[s.weight.fetch(tile, s.number, lane) for tile in s.tiles] for s in steps]
    pieces = [
        Piece(s.row, s.number * STEP + column_of(s.weight.fmt, lane, operation), s.wanted)
        for s in steps
        for operation in range(OPERATIONS)
    ]
    columns = source.load(pieces)
    for i, s in enumerate(steps):
        operands = [s.weight.operands(tile) for tile in fetched[i]]
        for operation in range(OPERATIONS):
            column = columns[OPERATIONS * i + operation]
            tiles = [
                multiply(rows[operation], column, tile)
                for rows, tile in zip(operands, tiles, strict=True)
            ]
    return tiles


def steps_ahead(weight: Weight) -> int:
    """How many steps a wave takes at once: up to AHEAD, so that they come out even."""
    each = -(-weight.steps // WAVES)
    return max(ahead for ahead in range(1, AHEAD[weight.fmt] + 1) if each % ahead == 0)


def next_steps(weight: Weight, tiles: list[fx.Int32], first: fx.Int32, row: fx.Int32) -> list[Step]:
    """A wave's next steps, every WAVES-th from `first` on; those beyond the last add nothing."""
    whole = weight.steps % WAVES == 0
    steps = []
    for i in range(steps_ahead(weight)):
        number = first + i * WAVES
        wanted = None if whole else number < weight.steps
        number = number if whole else fx.min(number, fx.Int32(weight.steps - 1))
        steps.append(Step(weight, tiles, number, row, wanted))
    return steps


def finish_tiles(cta: Cta, tiles: list[fx.Vector]) -> list[tuple[fx.Float32, fx.Float32]]:
    """Sum each tile over the waves; thread 16 p + t gets rows (2 p, 2 p + 1) of column t."""
    lds = cta.lds_floats()
    at = (cta.wave * TILE + mod(cta.lane, 16)) * TILE + div(cta.lane, 16) * 4
    for i, tile in enumerate(tiles):
        fx.make_view(lds + (at + i * _TILE_FLOATS), fx.make_layout(4, 1)).store(tile)
    fx.gpu.barrier()
    row = mod(div(cta.thread, 16), TILE // 2) * 2
    finished = []
    for i in range(len(tiles)):
        total = None
        for wave in range(WAVES):
            offset = (mod(cta.thread, 16) + wave * TILE) * TILE + row + i * _TILE_FLOATS
            part = fx.make_view(lds + offset, fx.make_layout(2, 1)).load()
            total = part if total is None else total + part
        finished.append((total[0], total[1]))
    fx.gpu.barrier()
    return finished


@traced
def matvec(cta: Cta, weight: Weight, source: WordRows | PlainRows, tokens: int, emit: Emit) -> None:
    """Stage: `emit(row, token, y[row], y[row + 1])` once for every even row and token.

    Uses `TILE_BYTES` of LDS.
    """
    column = fx.min(mod(cta.lane, 16), fx.Int32(tokens - 1))
    for tile in range(cta.block, fx.Int32(weight.rows // TILE), fx.Int32(cta.blocks)):
        acc = zero_tile()
        for first in range(cta.wave, fx.Int32(weight.steps), fx.Int32(WAVES * steps_ahead(weight))):
            steps = next_steps(weight, [fx.Int32(tile)], fx.Int32(first), column)
            (acc,) = add_steps(steps, source, cta.lane, [acc])
        ((low, high),) = finish_tiles(cta, [acc])
        token = mod(cta.thread, 16)
        if (cta.thread < _PAIRS) & (token < tokens):
            emit(fx.Int32(tile) * TILE + div(cta.thread, 16) * 2, token, low, high)
