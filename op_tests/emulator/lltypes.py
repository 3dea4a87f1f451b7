"""LLVM dialect types and how their values are held.

A value of a scalar type is a numpy array of shape ``(lanes,)``; a vector of n elements has shape
``(lanes, n)``; a struct or array is a tuple of values. ``lanes`` is one for a value that is the
same in every lane. Integers are held signed (i1 as bool), pointers as int64, and bf16 as its
uint16 bits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import numpy as np

_SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64, 128: np.dtype("V16")}
_UNSIGNED = {np.dtype(f"i{n}"): np.dtype(f"u{n}") for n in (1, 2, 4, 8)}
_FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": np.uint16}
_BITS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}


@dataclass(frozen=True)
class Type:
    """One LLVM dialect type. ``kind``: int, float, ptr, vector, struct, array or void."""

    kind: str
    bits: int = 0
    name: str = ""
    space: int = 0
    count: int = 0
    fields: tuple[Type, ...] = ()
    packed: bool = False

    @property
    def scalar(self) -> Type:
        """The element type of a vector, else the type itself."""
        return self.fields[0] if self.kind == "vector" else self

    @property
    def is_bf16(self) -> bool:
        return self.scalar.name == "bf16"

    @property
    def dtype(self) -> np.dtype:
        """The numpy dtype of one element."""
        element = self.scalar
        if element.kind == "int":
            if element.bits == 1:
                return np.dtype(bool)
            if element.bits in _SIGNED:
                return np.dtype(_SIGNED[element.bits])
        elif element.kind == "float":
            return np.dtype(_FLOATS[element.name])
        elif element.kind == "ptr":
            return np.dtype(np.int64)
        raise NotImplementedError(f"the emulator has no representation for type {self}")

    @property
    def size(self) -> int:
        """Bytes in memory, without trailing padding."""
        if self.kind == "vector":
            return (self.fields[0].bits * self.count + 7) // 8
        if self.kind == "array":
            return self.count * self.fields[0].size
        if self.kind == "struct":
            return self.offsets()[-1]
        if self.kind == "ptr":
            return 4 if self.space in (2, 3, 5, 6) else 16 if self.space == 8 else 8
        return (self.bits + 7) // 8

    @property
    def align(self) -> int:
        if self.kind == "struct":
            return 1 if self.packed else max((f.align for f in self.fields), default=1)
        if self.kind == "array":
            return self.fields[0].align
        return 1 << max(self.size - 1, 0).bit_length()

    def offsets(self) -> list[int]:
        """Byte offset of every field of a struct, and its whole size last."""
        result, at = [], 0
        for field in self.fields:
            if not self.packed:
                at = -(-at // field.align) * field.align
            result.append(at)
            at += field.size
        if not self.packed:
            at = -(-at // self.align) * self.align
        return [*result, at]

    def __str__(self) -> str:
        if self.kind == "vector":
            return f"vector<{self.count}x{self.fields[0]}>"
        if self.kind in ("struct", "array"):
            return f"{self.kind}<{self.count}x({', '.join(map(str, self.fields))})>"
        return self.name or f"{self.kind}<{self.space}>"


def integer(bits: int) -> Type:
    return Type("int", bits=bits, name=f"i{bits}")


def _split(text: str) -> list[str]:
    """Split at top-level commas."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "<(") - (char in ">)")
        if char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    parts.append(text[start:])
    return [p.strip() for p in parts if p.strip()]


@cache
def parse_type(text: str) -> Type:
    """Parse a type as MLIR prints it; ``!llvm.`` prefixes are optional."""
    text = text.strip().removeprefix("!llvm.")
    if re.fullmatch(r"i\d+", text):
        return integer(int(text[1:]))
    if text == "index":
        return integer(64)
    if text in _FLOATS:
        return Type("float", bits=_BITS[text], name=text)
    if text == "ptr":
        return Type("ptr", bits=64)
    if text in ("void", "token"):
        return Type("void", name=text)
    if match := re.fullmatch(r"ptr<(\d+)>", text):
        return Type("ptr", bits=64, space=int(match[1]))
    if match := re.fullmatch(r"vector<(\d+)\s*x\s*(.+)>", text):
        return Type("vector", count=int(match[1]), fields=(parse_type(match[2]),))
    if match := re.fullmatch(r"array<(\d+)\s*x\s*(.+)>", text):
        return Type("array", count=int(match[1]), fields=(parse_type(match[2]),))
    if match := re.fullmatch(r"struct<(packed\s*)?\((.*)\)>", text, re.S):
        fields = tuple(parse_type(p) for p in _split(match[2]))
        return Type("struct", count=len(fields), fields=fields, packed=bool(match[1]))
    raise NotImplementedError(f"the emulator does not know type {text!r}")


def unsigned(values: np.ndarray) -> np.ndarray:
    """The same bits as an unsigned integer array."""
    return values.view(_UNSIGNED[values.dtype]) if values.dtype in _UNSIGNED else values


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """uint16 bf16 bits to float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 to uint16 bf16 bits, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def to_bytes(values: np.ndarray, kind: Type) -> np.ndarray:
    """``(lanes, size)`` uint8 of a scalar or vector value, as memory holds it."""
    if kind.scalar.kind == "ptr":
        values = values.astype(f"i{kind.scalar.size}")
    if kind.scalar.bits == 1 and kind.kind == "vector":
        return np.packbits(values, axis=1, bitorder="little")
    flat = np.ascontiguousarray(values).reshape(len(values), -1)
    return flat.view(np.uint8)


def from_bytes(raw: np.ndarray, kind: Type) -> np.ndarray:
    """Inverse of :func:`to_bytes`; ``raw`` is ``(lanes, size)`` uint8, contiguous."""
    if kind.scalar.kind == "ptr":
        return raw.view(f"i{kind.scalar.size}").astype(np.int64)[:, 0]
    if kind.scalar.bits == 1:
        if kind.kind != "vector":
            return (raw[:, 0] & 1).astype(bool)
        return np.unpackbits(raw, axis=1, bitorder="little")[:, : kind.count].astype(bool)
    values = np.ascontiguousarray(raw).view(kind.dtype)
    return values if kind.kind == "vector" else values[:, 0]
