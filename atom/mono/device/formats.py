"""Elements of K as matrix operations take them: widened to bf16 from their format in memory.

A step is 128 elements of a row of K, four 16x16x32 operations. Lane l, g = l div 16, loads runs of
16 bytes, run r from byte 64 r + 16 g of the step on, and has in operation j eight elements:

    format   runs   elements of K in operation j
    bf16     4      32 j + 8 g + i
    fp8      2      64 (j div 2) + 16 g + 8 (j mod 2) + i
    fp4      1      32 g + 8 j + i

fp8 is e4m3, fp4 e2m1. Widening multiplies by a power of two and is exact.
"""

from __future__ import annotations

import flydsl.expr as fx
from flydsl._mlir.dialects import rocdl as raw_rocdl
from flydsl.expr.typing import T

from aiter.ops.flydsl.kernels.device import div
from aiter.ops.flydsl.kernels.mx_widen import joined, widen_fp4

STEP = 128  # elements of K
OPERATIONS = 4  # of a step
RUNS = {"bf16": 4, "fp8": 2, "fp4": 1}
BITS = {"bf16": 16, "fp8": 8, "fp4": 4}
FP8_MAX = 448.0


def column_of(fmt: str, lane: fx.Int32, operation: int) -> fx.Int32:
    """The first of the lane's eight elements of a step in an operation."""
    g = div(lane, 16)
    if fmt == "bf16":
        return g * 8 + 32 * operation
    if fmt == "fp8":
        return g * 16 + (64 * (operation // 2) + 8 * (operation % 2))
    return g * 32 + 8 * operation


def widened(fmt: str, runs: list[fx.Vector], scales: list[fx.Float32]) -> list[fx.Vector]:
    """The lane's operands of a step, bf16 x 8, of its runs, i32 x 4, times a scale for each run.

    bf16 has no scales. The scales are powers of two.
    """
    if fmt == "bf16":
        return [run.bitcast(fx.BFloat16) for run in runs]
    if fmt == "fp4":
        return [widen_fp4(runs[0][j], scales[0]) for j in range(OPERATIONS)]
    return [
        widen_fp8(run[2 * half], run[2 * half + 1], scale)
        for run, scale in zip(runs, scales, strict=True)
        for half in range(2)
    ]


def widen_fp8(low: fx.Int32, high: fx.Int32, scale: fx.Float32) -> fx.Vector:
    """Eight fp8, four in each word, times a power of two, as bf16."""
    pairs = [
        raw_rocdl.cvt_scalef32_pk_bf16_fp8(
            T.vec(2, T.bf16), fx.Int32(word).ir_value(), scale.ir_value(), half
        )
        for word in (low, high)
        for half in (False, True)
    ]
    return joined(pairs)


def fp8_pair(low: fx.Float32, high: fx.Float32) -> fx.Int32:
    """Two f32 rounded to fp8 in the low half of a word, the largest number where they are beyond
    it; what is no number stays so."""
    near = [_clamped(value).ir_value() for value in (low, high)]
    halves = raw_rocdl.cvt_scalef32_pk_fp8_f32(
        T.vec(2, T.i16),
        fx.Vector.filled(2, 0, fx.Int16).ir_value(),
        *near,
        fx.Float32(1.0).ir_value(),
        False,
    )
    return fx.Vector(halves, (2,), fx.Int16).bitcast(fx.Int32)[0]


def _clamped(value: fx.Float32) -> fx.Float32:
    near = fx.min(fx.max(value, fx.Float32(-FP8_MAX)), fx.Float32(FP8_MAX))
    return (value == value).select(near, value)
