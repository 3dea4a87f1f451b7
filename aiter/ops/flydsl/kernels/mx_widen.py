"""fp4 widened to bf16 in registers, and the bf16 matrix operation (gfx950).

Widening multiplies by a power of two and is exact within bf16's exponents.
"""

from __future__ import annotations

import flydsl.expr as fx
from flydsl._mlir.dialects import rocdl as raw_rocdl
from flydsl.expr.typing import T


def widen_fp4(word: fx.Int32, scale: fx.Float32) -> fx.Vector:
    """Eight fp4 times a power of two, as bf16."""
    pairs = [
        raw_rocdl.cvt_scalef32_pk_bf16_fp4(
            T.vec(2, T.bf16), fx.Int32(word).ir_value(), scale.ir_value(), i
        )
        for i in range(4)
    ]
    return joined(pairs)


def joined(pairs: list) -> fx.Vector:
    """Pairs of bf16 as one vector."""
    words = [fx.Vector(pair, (2,), fx.BFloat16).bitcast(fx.Int32)[0] for pair in pairs]
    return fx.Vector.from_elements(words, fx.Int32).bitcast(fx.BFloat16)


def multiply(a: fx.Vector, b: fx.Vector, acc: fx.Vector) -> fx.Vector:
    """acc + A B: 16 rows by 16 columns by 32, bf16."""
    result = fx.rocdl.mfma_f32_16x16x32_bf16(
        T.vec(4, T.f32), [a.ir_value(), b.ir_value(), acc.ir_value(), 0, 0, 0]
    )
    return fx.Vector(result, (4,), fx.Float32)
