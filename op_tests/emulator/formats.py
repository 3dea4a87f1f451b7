"""Low precision floats: decoding tables and round-to-nearest-even encoders."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Format:
    """``fnuz``: no infinity, no negative zero, code 0x80 is the only NaN."""

    name: str
    bits: int
    exponent: int
    mantissa: int
    bias: int
    fnuz: bool = False
    infinity: bool = False  # IEEE style: the top exponent is infinity and NaN
    nan: bool = False  # the all-ones code is NaN

    @cached_property
    def values(self) -> np.ndarray:
        """float32 of every code."""
        code = np.arange(1 << self.bits)
        sign = np.where(code >> (self.bits - 1), -1.0, 1.0)
        exponent = (code >> self.mantissa) & ((1 << self.exponent) - 1)
        fraction = (code & ((1 << self.mantissa) - 1)) / (1 << self.mantissa)
        normal = (1 + fraction) * 2.0 ** (exponent - self.bias)
        value = sign * np.where(exponent == 0, fraction * 2.0 ** (1 - self.bias), normal)
        top = (1 << (self.bits - 1)) - 1
        if self.fnuz:
            value[1 << (self.bits - 1)] = np.nan
        elif self.infinity:
            special = exponent == (1 << self.exponent) - 1
            value[special] = np.where(fraction == 0, sign * np.inf, np.nan)[special]
        elif self.nan:
            value[(code & top) == top] = np.nan
        return value.astype(np.float32)

    @cached_property
    def positive(self) -> np.ndarray:
        """The finite values from 0 up, in code order."""
        half = self.values[: 1 << (self.bits - 1)]
        return half[np.isfinite(half)].astype(np.float64)

    @cached_property
    def overflow_code(self) -> int:
        """What too large a magnitude becomes, without its sign."""
        if self.fnuz:
            return 1 << (self.bits - 1)
        top = (1 << (self.bits - 1)) - 1
        if self.infinity:
            return top & ~((1 << self.mantissa) - 1)
        return top

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """float32 of uint8 codes."""
        return self.values[codes]

    def encode(self, values: np.ndarray, saturate: bool = False) -> np.ndarray:
        """uint8 codes of floats, to nearest even.

        Formats without NaN always saturate; the others overflow to infinity or NaN unless
        ``saturate``.
        """
        wide = np.abs(values.astype(np.float64))
        _, exponent = np.frexp(wide)
        step = np.ldexp(1.0, np.maximum(exponent - 1, 1 - self.bias) - self.mantissa)
        rounded = np.rint(wide / step) * step
        code = np.searchsorted(self.positive, rounded)
        largest = len(self.positive) - 1
        sign = np.signbit(values).astype(np.int64) << (self.bits - 1)
        limited = saturate or not (self.nan or self.infinity or self.fnuz)
        code = np.where(code > largest, largest if limited else self.overflow_code, code)
        nan = np.isnan(values)
        if nan.any():
            code = np.where(nan, self._nan_code, code)
        if self.fnuz:
            sign = np.where((code == 0) | (code == 1 << (self.bits - 1)), 0, sign)
        return (code | sign).astype(np.uint8)

    @property
    def _nan_code(self) -> int:
        if self.fnuz:
            return 1 << (self.bits - 1)
        return (1 << (self.bits - 1)) - 1


FP8 = Format("fp8", 8, 4, 3, 7, nan=True)
BF8 = Format("bf8", 8, 5, 2, 15, infinity=True)
FP8_FNUZ = Format("fp8_fnuz", 8, 4, 3, 8, fnuz=True)
BF8_FNUZ = Format("bf8_fnuz", 8, 5, 2, 16, fnuz=True)
FP6 = Format("fp6", 6, 2, 3, 1)
BF6 = Format("bf6", 6, 3, 2, 3)
FP4 = Format("fp4", 4, 2, 1, 1)
_BY_NAME = {f.name: f for f in (FP8, BF8, FP8_FNUZ, BF8_FNUZ, FP6, BF6, FP4)}


def format_named(name: str, arch: str) -> Format:
    """``fp8`` and ``bf8`` are the FNUZ kinds on gfx94x and OCP elsewhere."""
    if arch.startswith("gfx94") and name in ("fp8", "bf8"):
        name += "_fnuz"
    return _BY_NAME[name]


def unpack(raw: np.ndarray, bits: int) -> np.ndarray:
    """``(rows, 8 * size / bits)`` uint8 codes of ``(rows, size)`` uint8, low bits first."""
    if bits == 8:
        return raw
    if bits == 4:
        return np.stack([raw & 15, raw >> 4], -1).reshape(len(raw), -1)
    ones = np.unpackbits(raw, axis=1, bitorder="little").reshape(len(raw), -1, bits)
    return (ones << np.arange(bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Inverse of :func:`unpack`."""
    if bits == 8:
        return codes
    if bits == 4:
        return (codes[:, ::2] | (codes[:, 1::2] << 4)).astype(np.uint8)
    ones = (codes[:, :, None] >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(ones.reshape(len(codes), -1), axis=1, bitorder="little")


def e8m0(code: np.ndarray) -> np.ndarray:
    """float32 of e8m0 scale bytes: 2 ** (code - 127), 255 is NaN."""
    return _E8M0[code]


_E8M0 = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan))
_E8M0 = _E8M0.astype(np.float32)
