"""Matrix multiply-accumulate: MFMA of gfx94x and gfx950.

Fragment layouts (wave of 64, lane l, register element i), from the public ISA manuals:

* 16x16: A row / B column ``l % 16``; C element i is row ``4 * (l // 16) + i``, column ``l % 16``.
* 32x32: A row / B column ``l % 32``; C element i is row ``8 * (i // 4) + 4 * (l // 32) + i % 4``.
* K: lane group g holds n consecutive elements from ``n * g``. The 8-bit operands of the scaled
  forms are held in two runs of 16 instead: run c of group g starts at ``16 * (c * groups + g)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .code import Decoder, Run, handles
from .formats import e8m0, format_named, unpack
from .lltypes import Type, bf16_to_f32, to_bytes
from .program import Inst

Fragment = Callable[[object, np.ndarray], np.ndarray]


def accumulate(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``c + a @ b^T`` for ``(waves, M, K)`` and ``(waves, N, K)``."""
    return np.matmul(a, b.transpose(0, 2, 1)) + c


def rows_by_group(s: object, values: np.ndarray, rows: int) -> np.ndarray:
    """``(waves, rows, K)`` from ``(lanes, n)``: K runs through the lane groups in turn."""
    groups = s.width // rows
    split = values.reshape(s.count, groups, rows, -1)
    return split.transpose(0, 2, 1, 3).reshape(s.count, rows, -1)


def rows_by_run(s: object, values: np.ndarray, rows: int) -> np.ndarray:
    """The same for operands held as runs of 16 that alternate between lane groups."""
    groups = s.width // rows
    split = values.reshape(s.count, groups, rows, -1, 16)
    return split.transpose(0, 2, 3, 1, 4).reshape(s.count, rows, -1)


def accumulators(s: object, values: np.ndarray, size: int) -> np.ndarray:
    """``(waves, size, size)`` from C registers ``(lanes, size * size / 64)``."""
    groups = 64 // size
    split = s.spread(values).reshape(s.count, groups, size, -1, 4)
    return split.transpose(0, 3, 1, 4, 2).reshape(s.count, size, size)


def registers(values: np.ndarray, size: int) -> np.ndarray:
    """Inverse of :func:`accumulators`."""
    groups = 64 // size
    split = values.reshape(len(values), -1, groups, 4, size)
    return split.transpose(0, 2, 4, 1, 3).reshape(len(values) * 64, -1)


def element_decoder(d: Decoder, name: str, kind: Type) -> Callable[[np.ndarray], np.ndarray]:
    """From an operand's registers to ``(lanes, n)`` numbers."""
    if name in ("bf16", "bf16.1k"):
        return lambda x: bf16_to_f32(np.ascontiguousarray(x).view(np.uint16).reshape(len(x), -1))
    if name in ("f16", "f32", "f64"):
        wide = np.float64 if name == "f64" else np.float32
        return lambda x: x.astype(wide).reshape(len(x), -1)
    if name in ("i8",):
        return lambda x: to_bytes(x, kind).view(np.int8).astype(np.float64)
    low = format_named(name, d.arch)
    return lambda x: low.decode(to_bytes(x, kind))


_SHAPE = re.compile(r"rocdl\.mfma\.(f32|f64|i32)\.(\d+)x(\d+)x(\d+)\.?(.+)")


@handles("rocdl.mfma.*")
def mfma(d: Decoder, inst: Inst) -> Run:
    """One block of M = N = 16 or 32; operands (a, b, c)."""
    match = _SHAPE.fullmatch(inst.name)
    if not match:
        raise NotImplementedError("this matrix form")
    result, size, _, depth, names = match.groups()
    size, depth = int(size), int(depth)
    names = names.split(".") if names not in ("bf16.1k",) else [names]
    kinds = inst.arg_types
    per_lane = size * depth // 64
    if size not in (16, 32) or result == "f64" or per_lane < 1 or "xf32" in names:
        raise NotImplementedError("this matrix form")
    if any(inst.attrs.get(n, 0) not in (0, "none") for n in ("cbsz", "abid", "blgp")):
        raise NotImplementedError("broadcast modifiers of MFMA")
    left = element_decoder(d, names[0], kinds[0])
    right = element_decoder(d, names[-1], kinds[1])
    (a, b, c), r = inst.args[:3], inst.results[0]
    probe = kinds[0].size * 8 // {"f32": 32, "bf16": 16, "bf16.1k": 16, "f16": 16}.get(names[0], 8)
    if probe != per_lane:
        raise NotImplementedError("forms of several blocks")

    def run(v: list, s: object) -> None:
        x = rows_by_group(s, left(s.spread(v[a])), size)
        y = rows_by_group(s, right(s.spread(v[b])), size)
        start = accumulators(s, v[c], size)
        if result == "i32":
            total = np.matmul(x, y.transpose(0, 2, 1)).astype(np.int64) + start
            v[r] = registers(total.astype(np.int32), size)
        else:
            v[r] = registers(accumulate(x, y, start), size)

    return run


_MATRIX_FORMATS = {
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "bf8",
    "fp6_e2m3": "fp6",
    "fp6_e3m2": "bf6",
    "fp4_e2m1": "fp4",
}


def scaled_operand(d: Decoder, text: object, kind: Type) -> Callable[[np.ndarray], np.ndarray]:
    """``(lanes, n)`` float32 of a scaled operand's registers, in register order."""
    low = format_named(_MATRIX_FORMATS[str(text)], d.arch)
    elements = 32 if d.width == 64 else 128 if kind.size == 64 and low.bits == 4 else 64
    size = elements * low.bits // 8
    if low.bits == 4:
        code = np.arange(256)
        pairs = np.stack([low.values[code & 15], low.values[code >> 4]], -1).view(np.uint64)[:, 0]

        def run(x: np.ndarray) -> np.ndarray:
            return pairs[to_bytes(x, kind)[:, :size]].view(np.float32)

        return run

    return lambda x: low.decode(unpack(np.ascontiguousarray(to_bytes(x, kind)[:, :size]), low.bits))


def block_scales(s: object, scale: np.ndarray, select: int, rows: int) -> np.ndarray:
    """``(waves, rows, blocks)`` float32: lane ``rows * block + row`` holds a block's e8m0 byte."""
    code = (s.spread(scale) >> (8 * select)) & 255
    return e8m0(code).reshape(s.count, -1, rows).transpose(0, 2, 1)


@handles("rocdl.mfma.scale.*")
def mfma_scale(d: Decoder, inst: Inst) -> Run:
    """Scaled MFMA: every 32 elements of K of a row have an e8m0 scale; op_sel picks its byte."""
    size = int(re.search(r"\.(\d+)x", inst.name)[1])
    a, b, c, scale_a, scale_b = inst.args
    r = inst.results[0]
    left = scaled_operand(d, inst.attrs["cbsz"], inst.arg_types[0])
    right = scaled_operand(d, inst.attrs["blgp"], inst.arg_types[1])
    select_a, select_b = int(inst.attrs.get("opselA", 0)), int(inst.attrs.get("opselB", 0))
    arrange_a = rows_by_run if "fp8" in str(inst.attrs["cbsz"]) else rows_by_group
    arrange_b = rows_by_run if "fp8" in str(inst.attrs["blgp"]) else rows_by_group

    def operand(s, value, decode, arrange, scale, select) -> np.ndarray:
        numbers = arrange(s, decode(s.spread(value)), size)
        by = block_scales(s, scale, select, size)
        blocks = numbers.reshape(s.count, size, by.shape[2], 32)
        return (blocks * by[..., None]).reshape(s.count, size, -1)

    def run(v: list, s: object) -> None:
        x = operand(s, v[a], left, arrange_a, v[scale_a], select_a)
        y = operand(s, v[b], right, arrange_b, v[scale_b], select_b)
        v[r] = registers(accumulate(x, y, accumulators(s, v[c], size)), size)

    return run
