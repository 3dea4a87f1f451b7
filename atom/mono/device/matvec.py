"""Weights times up to 16 tokens: the products of a decode step.

    y[n, t] = sum over k of W[n, k] * x[t, k]            x bf16, sums in f32

A task is a tile of 16 rows. The waves of a workgroup split K in steps of 128 and their sums meet
in LDS, in wave order. A step is four 16x16x32 matrix operations with the weights as first operand
and the tokens as columns; tokens the kernel does not have repeat the last one.

Quantised weights are widened in registers. An element times a power of two is exact in bf16, so
only x and the sums are rounded. Lane l, g = l div 16, takes row l mod 16 and for operation j these
eight elements of K, in the order in which `shuffle_weight` stores 16-byte runs:

    format  bytes of a step        element of K            scale (rows/32, K/256, 64, 4 bytes)
    bf16    4 x 64 lanes x 16      32 j + 8 g + i          none
    fp8     2 x 64 lanes x 16      64 (j/2) + 16 g + 8 (j mod 2) + i    lane of block 2 (j/2) + g/2
    fp4     1 x 64 lanes x 16      32 g + 8 j + i          lane of block g

fp8 is e4m3, fp4 e2m1; both have one e8m0 scale for 32 elements of K (per_1x32), in the byte order
of `shuffle_scale`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import flydsl.expr as fx
from flydsl._mlir.dialects import rocdl as raw_rocdl
from flydsl.expr.typing import T

from aiter.ops.flydsl.kernels.device import (
    LANES,
    TraceObject,
    div,
    global_pointer,
    mod,
    shift_right,
    traced,
)
from atom.mono.plan.execution import WAVES

from .cta import Cta
from .sync import Run, Words, beyond, poll_runs

TILE = 16  # rows of a task
STEP = 128  # elements of K that a wave takes at once
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
        return self.rows * self.k * {"bf16": 16, "fp8": 8, "fp4": 4}[self.fmt] // 8

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

    def k_of(self, lane: fx.Int32, operation: int) -> fx.Int32:
        """The lane's first element of K in an operation of a step."""
        g = div(lane, 16)
        if self.fmt == "bf16":
            return g * 8 + 32 * operation
        if self.fmt == "fp8":
            return g * 16 + (64 * (operation // 2) + 8 * (operation % 2))
        return g * 32 + 8 * operation

    def fetch(self, tile: fx.Int32, step: fx.Int32, lane: fx.Int32) -> Fetched:
        """Start to load what the lane needs of a step."""
        runs = {"bf16": 4, "fp8": 2, "fp4": 1}[self.fmt]
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
        raw = fetched.raw
        if self.fmt == "bf16":
            return [run.bitcast(fx.BFloat16) for run in raw]
        scales = [_scale(word, fetched.shift) for word in fetched.scales]
        if self.fmt == "fp4":
            return [_widen_fp4(raw[0][j], scales[0]) for j in range(4)]
        return [
            _widen_fp8(raw[run][2 * h], raw[run][2 * h + 1], scales[run])
            for run in range(2)
            for h in range(2)
        ]

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


def _widen_fp4(word: fx.Int32, scale: fx.Float32) -> fx.Vector:
    pairs = [
        raw_rocdl.cvt_scalef32_pk_bf16_fp4(
            T.vec(2, T.bf16), fx.Int32(word).ir_value(), scale.ir_value(), i
        )
        for i in range(4)
    ]
    return _joined(pairs)


def _widen_fp8(low: fx.Int32, high: fx.Int32, scale: fx.Float32) -> fx.Vector:
    pairs = [
        raw_rocdl.cvt_scalef32_pk_bf16_fp8(
            T.vec(2, T.bf16), fx.Int32(word).ir_value(), scale.ir_value(), half
        )
        for word in (low, high)
        for half in (False, True)
    ]
    return _joined(pairs)


def _joined(pairs: list) -> fx.Vector:
    words = [fx.Vector(pair, (2,), fx.BFloat16).bitcast(fx.Int32)[0] for pair in pairs]
    return fx.Vector.from_elements(words, fx.Int32).bitcast(fx.BFloat16)


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


def multiply(a: fx.Vector, b: fx.Vector, acc: fx.Vector) -> fx.Vector:
    """acc + A B: 16 rows by 16 columns by 32, bf16."""
    result = fx.rocdl.mfma_f32_16x16x32_bf16(
        T.vec(4, T.f32), [a.ir_value(), b.ir_value(), acc.ir_value(), 0, 0, 0]
    )
    return fx.Vector(result, (4,), fx.Float32)


def query_operands(rows: WordRows | PlainRows, row: fx.Int32, lane: fx.Int32) -> list[fx.Vector]:
    """The lane's operands of a whole row, for 32 columns an operation."""
    return rows.load([Piece(row, div(lane, 16) * 8 + k) for k in range(0, rows.columns, 32)])


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
        Piece(s.row, s.number * STEP + s.weight.k_of(lane, operation), s.wanted)
        for s in steps
        for operation in range(4)
    ]
    columns = source.load(pieces)
    for i, s in enumerate(steps):
        operands = [s.weight.operands(tile) for tile in fetched[i]]
        for operation in range(4):
            column = columns[4 * i + operation]
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
