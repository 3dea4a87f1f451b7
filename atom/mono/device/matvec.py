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
from .sync import Words, beyond

TILE = 16  # rows of a task
STEP = 128  # elements of K that a wave takes at once
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

    def load(self, tile: fx.Int32, step: fx.Int32, lane: fx.Int32) -> list[fx.Vector]:
        """The lane's operands, bf16 x 8, of the operations of a step."""
        runs = {"bf16": 4, "fp8": 2, "fp4": 1}[self.fmt]
        step_bytes = runs * 16 * LANES
        base = self.data + (fx.Int64(tile) * self.steps + fx.Int64(step)) * step_bytes
        raw = [self._run(beyond(base + 16 * LANES * r, lane * 16)) for r in range(runs)]
        if self.fmt == "bf16":
            return [run.bitcast(fx.BFloat16) for run in raw]
        byte = mod(step, 2) * 2 + mod(tile, 2)
        row_words = self.scale_row_bytes // 4
        word0 = div(tile, 2) * row_words + div(step, 2) * LANES
        if self.fmt == "fp4":
            scale = self._scale(word0 + lane, byte)
            return [_widen_fp4(raw[0][j], scale) for j in range(4)]
        operands = []
        for run in range(2):
            block = 2 * run + div(lane, 32)
            scale = self._scale(word0 + block * 16 + mod(lane, 16), byte)
            operands += [_widen_fp8(raw[run][2 * h], raw[run][2 * h + 1], scale) for h in range(2)]
        return operands

    def _run(self, at: fx.Int64) -> fx.Vector:
        return fx.generic_load(global_pointer(fx.Int32, at, 16), count=4, nontemporal=True)

    def _scale(self, word: fx.Int32, byte: fx.Int32) -> fx.Float32:
        """2^(e8m0 - 127) of a byte of the scale words."""
        held = global_pointer(fx.Int32, beyond(self.scale, word * 4)).load()
        return ((shift_right(held, byte * 8) & 255) << 23).bitcast(fx.Float32)


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


class WordRows(TraceObject):
    """Rows of bf16 pairs in mailbox words."""

    def __init__(self, words: Words, columns: int) -> None:
        self.words, self.columns = words, columns

    def load8(self, row: fx.Int32, k: fx.Int32, wanted: fx.Boolean | None = None) -> fx.Vector:
        """Eight elements from column `k`, a multiple of 8; zeros in lanes not `wanted`."""
        index = row * (self.columns // 2) + shift_right(k, 1)
        values = self.words.poll_run(index, 4, wanted)
        return fx.Vector.from_elements(values, fx.Int32).bitcast(fx.BFloat16)


class PlainRows(TraceObject):
    """Rows of bf16 that an earlier kernel left in memory."""

    def __init__(self, address: fx.Int64, columns: int) -> None:
        self.address, self.columns = address, columns

    def load8(self, row: fx.Int32, k: fx.Int32, wanted: fx.Boolean | None = None) -> fx.Vector:
        """Eight elements from column `k`, a multiple of 8."""
        at = self.address + (fx.Int64(row) * self.columns + fx.Int64(k)) * 2
        return fx.generic_load(global_pointer(fx.Int32, at, 16), count=4).bitcast(fx.BFloat16)


def multiply(a: fx.Vector, b: fx.Vector, acc: fx.Vector) -> fx.Vector:
    """acc + A B: 16 rows by 16 columns by 32, bf16."""
    result = fx.rocdl.mfma_f32_16x16x32_bf16(
        T.vec(4, T.f32), [a.ir_value(), b.ir_value(), acc.ir_value(), 0, 0, 0]
    )
    return fx.Vector(result, (4,), fx.Float32)


def zero_tile() -> fx.Vector:
    return fx.Vector.filled(4, 0.0, fx.Float32)


def add_step(
    weight: Weight,
    tile: fx.Int32,
    step: fx.Int32,
    source: WordRows | PlainRows,
    row: fx.Int32,
    lane: fx.Int32,
    acc: fx.Vector,
    wanted: fx.Boolean | None = None,
) -> fx.Vector:
    """Add one step of K of a tile; `row` is the row of `source` that the lane's column is."""
    operands = weight.load(tile, step, lane)
    for operation in range(4):
        k = step * STEP + weight.k_of(lane, operation)
        acc = multiply(operands[operation], source.load8(row, k, wanted), acc)
    return acc


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
def matvec(
    cta: Cta, weight: Weight, source: WordRows | PlainRows, tokens: int, emit: Emit
) -> None:
    """Stage: `emit(row, token, y[row], y[row + 1])` once for every even row and token.

    Uses `TILE_BYTES` of LDS.
    """
    column = fx.min(mod(cta.lane, 16), fx.Int32(tokens - 1))
    for tile in range(cta.block, fx.Int32(weight.rows // TILE), fx.Int32(cta.blocks)):
        acc = zero_tile()
        for step in range(cta.wave, fx.Int32(weight.steps), fx.Int32(WAVES)):
            acc = add_step(weight, fx.Int32(tile), fx.Int32(step), source, column, cta.lane, acc)
        ((low, high),) = finish_tiles(cta, [acc])
        token = mod(cta.thread, 16)
        if (cta.thread < _PAIRS) & (token < tokens):
            emit(fx.Int32(tile) * TILE + div(cta.thread, 16) * 2, token, low, high)
