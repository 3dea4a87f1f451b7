"""MX block quantisation on the device: e8m0 scales and element conversion (gfx950).

A block is 32 consecutive elements of a row. With a = max |x| the scale byte is the RoundUp
rule: the exponent of a / max, plus one if any mantissa bit of the quotient is set, where max
is 448 for fp8 (e4m3) and 6 for fp4 (e2m1). Both are 1.75 resp. 1.5 times a power of two, so
the quotient's mantissa is zero or not according to a's mantissa alone: adding what lifts
mantissas beyond max's into the exponent field gives the byte without a division. Infinite and
NaN blocks get 255. Elements are x / scale, rounded to nearest even.

A scale byte of (row, block b) lies in the words that the main loop loads (`mx_gemm`):

    word (row / 32, b / 8, b mod 4, row mod 16), byte 2 (b mod 8 / 4) + (row mod 32) / 16
"""

from __future__ import annotations

import flydsl.expr as fx
from flydsl._mlir.dialects import rocdl as raw_rocdl
from flydsl.expr.typing import T

from .device import LANES, div, mod, shift_right

# format -> (added to amax's bits, subtracted from its exponent)
_ROUND_UP = {"fp8": (0x1FFFFF, 8), "fp4": (0x3FFFFF, 2)}
_INFINITY = 0x7F800000


def scale_byte(amax: fx.Float32, fmt: str) -> fx.Int32:
    """The e8m0 byte of a block whose largest magnitude is `amax`."""
    lift, exponent = _ROUND_UP[fmt]
    bits = amax.bitcast(fx.Int32)
    byte = fx.max(shift_right(bits + lift, 23) - exponent, fx.Int32(0))
    return (bits >= _INFINITY).select(fx.Int32(255), byte)


def scale_value(byte: fx.Int32) -> fx.Float32:
    """2^(byte - 127); 2^-127 is a denormal f32."""
    return fx.max(byte << 23, fx.Int32(1 << 22)).bitcast(fx.Float32)


def pack(values: list[fx.Float32], scale: fx.Float32, fmt: str) -> fx.Int32:
    """Four (fp8) or eight (fp4) values over `scale`, packed into a word, first value lowest."""
    if fmt == "fp4":
        word = fx.Int32(0).ir_value()
        for i in range(len(values) // 2):
            low, high = values[2 * i].ir_value(), values[2 * i + 1].ir_value()
            word = raw_rocdl.cvt_scalef32_pk_fp4_f32(T.i32, word, low, high, scale.ir_value(), i)
        return fx.Int32(word)
    halves = fx.Vector.filled(2, 0, fx.Int16).ir_value()
    for i in range(2):
        low, high = values[2 * i].ir_value(), values[2 * i + 1].ir_value()
        halves = raw_rocdl.cvt_scalef32_pk_fp8_f32(
            T.vec(2, T.i16), halves, low, high, scale.ir_value(), bool(i)
        )
    return fx.Vector(halves, (2,), fx.Int16).bitcast(fx.Int32)[0]


def scale_offset(row: fx.Int32, block: fx.Int32, row_words: int) -> fx.Int32:
    """Byte offset of (row, block)'s scale; `row_words` are the words of 32 rows."""
    word = div(row, 32) * row_words + div(block, 8) * LANES + mod(block, 4) * 16 + mod(row, 16)
    return word * 4 + mod(div(block, 4), 2) * 2 + mod(div(row, 16), 2)
