"""Number formats decoded one element at a time, from their definitions."""

from __future__ import annotations

import struct

import numpy as np

from op_tests.emulator.lltypes import parse_type

# exponent bits, mantissa bits, bias
_SMALL = {
    "e4m3": (4, 3, 7),
    "e5m2": (5, 2, 15),
    "e4m3fnuz": (4, 3, 8),
    "e5m2fnuz": (5, 2, 16),
    "e2m3": (2, 3, 1),
    "e3m2": (3, 2, 3),
    "e2m1": (2, 1, 1),
}


def small_float(code: int, fmt: str) -> float:
    """The number an 8, 6 or 4 bit code stands for."""
    exponent_bits, mantissa_bits, bias = _SMALL[fmt]
    width = 1 + exponent_bits + mantissa_bits
    sign = -1.0 if code >> (width - 1) else 1.0
    exponent = (code >> mantissa_bits) % (1 << exponent_bits)
    mantissa = code % (1 << mantissa_bits)
    if fmt.endswith("fnuz") and code == 0x80:
        return float("nan")
    if fmt == "e5m2" and exponent == 31:
        return float("nan") if mantissa else sign * float("inf")
    if fmt == "e4m3" and exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa / (1 << mantissa_bits) * 2.0 ** (1 - bias)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def decode_float(raw: np.ndarray, fmt: str) -> list[float]:
    """Elements of one lane's registers, ``raw`` uint8, in register order."""
    data = bytes(raw)
    if fmt == "bf16":
        halves = struct.unpack(f"<{len(data) // 2}H", data)
        return [struct.unpack("<f", struct.pack("<I", h << 16))[0] for h in halves]
    if fmt in ("f16", "f32", "i8"):
        letter, size = {"f16": ("e", 2), "f32": ("f", 4), "i8": ("b", 1)}[fmt]
        return [float(x) for x in struct.unpack(f"<{len(data) // size}{letter}", data)]
    exponent_bits, mantissa_bits, _ = _SMALL[fmt]
    width = 1 + exponent_bits + mantissa_bits
    whole = int.from_bytes(data, "little")
    codes = [(whole >> (width * n)) % (1 << width) for n in range(len(data) * 8 // width)]
    return [small_float(code, fmt) for code in codes]


def random_codes(rng: np.random.Generator, fmt: str, lanes: int, kind: str) -> np.ndarray:
    """Raw operand registers ``(lanes, size)`` uint8 with finite, moderate numbers in ``fmt``."""
    size = parse_type(kind).size
    if fmt == "bf16":
        values = rng.standard_normal((lanes, size // 2)).astype(np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    if fmt in ("f16", "f32"):
        dtype = np.float16 if fmt == "f16" else np.float32
        width = np.dtype(dtype).itemsize
        return rng.standard_normal((lanes, size // width)).astype(dtype).view(np.uint8)
    raw = rng.integers(0, 256, (lanes, size)).astype(np.uint8)
    if fmt in ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz"):
        raw &= 0xBF  # the top exponent bit clear: no NaN, no infinity, no huge numbers
        raw[raw == 0x80] = 0
    return raw
