"""Matrix multiply-accumulate of gfx1250: WMMA and scaled WMMA, waves of 32.

Lane l, half ``h = l // 16``, register element i:

* A row / B column is ``l % 16``; C element i is row ``8 * h + i``, column ``l % 16``.
* K goes in runs that alternate between the halves: run c of half h starts at
  ``run * (2 * c + h)``. Runs are 8 elements (2 for f32); in the f8f6f4 forms 16 for 8-bit formats
  and 32 for the others.
* 32x16: lane l holds all of K of A row l, and C element i is row ``16 * h + i``.
* A scale register holds the e8m0 bytes of a row's K blocks, first block lowest. Row r's is in lane
  ``r``, or ``16 + r`` where the operand's scale type is row1.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .code import Decoder, Run, handles
from .formats import e8m0
from .lltypes import to_bytes
from .ops_arith import as_float, as_kind
from .ops_matrix import element_decoder, scaled_operand
from .program import Inst


def by_runs(s: object, values: np.ndarray, run: int) -> np.ndarray:
    """``(waves, 16, K)`` from ``(lanes, n)``."""
    split = values.reshape(s.count, 2, 16, -1, run)
    return split.transpose(0, 2, 3, 1, 4).reshape(s.count, 16, -1)


def accumulators(s: object, values: np.ndarray) -> np.ndarray:
    """``(waves, M, 16)`` from C registers ``(lanes, M / 2)``."""
    split = s.spread(values).reshape(s.count, 2, 16, -1)
    return split.transpose(0, 1, 3, 2).reshape(s.count, -1, 16)


def registers(values: np.ndarray) -> np.ndarray:
    """Inverse of :func:`accumulators`."""
    split = values.reshape(len(values), 2, -1, 16)
    return split.transpose(0, 1, 3, 2).reshape(len(values) * 32, -1)


def _refuse(inst: Inst, allowed: dict[str, tuple]) -> None:
    for name, values in allowed.items():
        if inst.attrs.get(name, values[0]) not in values:
            raise NotImplementedError(f"{name} = {inst.attrs[name]}")


_SHAPE = re.compile(r"rocdl\.wmma\.(f32|f16|bf16|bf16f32|i32)\.16x16x(\d+)\.(.+)")


@handles("rocdl.wmma.*")
def wmma(d: Decoder, inst: Inst) -> Run:
    match = _SHAPE.fullmatch(inst.name)
    if not match or (int(match[2]), match[3]) not in _KNOWN:
        raise NotImplementedError("this matrix form")
    _refuse(inst, {"modC": ("none", 0), "clamp": (False,)})
    left_name, _, right_name = match[3].partition("_")
    (a, b, c), r = inst.args[:3], inst.results[0]
    kind, source = inst.result_types[0], inst.arg_types[2]
    integer = match[1] == "i32"
    if integer:
        left, right = (_bytes(inst, n) for n in (0, 1))
    else:
        left = element_decoder(d, left_name, inst.arg_types[0])
        right = element_decoder(d, right_name or left_name, inst.arg_types[1])
    run_length = 2 if left_name == "f32" else 8

    def run(v: list, s: object) -> None:
        x = by_runs(s, left(s.spread(v[a])), run_length)
        y = by_runs(s, right(s.spread(v[b])), run_length)
        start = accumulators(s, as_float(v[c], source))
        product = np.matmul(x, y.transpose(0, 2, 1))
        total = (product.astype(np.int64) + start).astype(np.int32) if integer else product + start
        v[r] = as_kind(registers(total), kind)

    return run


_KNOWN = {
    (4, "f32"),
    (32, "bf16"),
    (32, "f16"),
    (64, "iu8"),
    *((k, f"{a}_{b}") for k in (64, 128) for a in ("fp8", "bf8") for b in ("fp8", "bf8")),
}


def _bytes(inst: Inst, operand: int) -> Callable[[np.ndarray], np.ndarray]:
    signed = bool(inst.attrs.get(("signA", "signB")[operand], False))
    dtype, kind = (np.int8 if signed else np.uint8), inst.arg_types[operand]
    return lambda x: to_bytes(x, kind).view(dtype).astype(np.float64)


def block_scales(s: object, scale: np.ndarray, second_row: bool, rows: int) -> np.ndarray:
    """``(waves, rows, blocks)`` float32 of a scale operand's registers (i32 or i64)."""
    code = np.ascontiguousarray(s.spread(scale))[:, None].view(np.uint8)
    lanes = code.reshape(s.count, 32, -1)
    first = 16 if second_row and rows == 16 else 0
    return e8m0(lanes[:, first : first + rows])


@handles("rocdl.wmma.scale.*", "rocdl.wmma.scale16.*")
def wmma_scale(d: Decoder, inst: Inst) -> Run:
    _refuse(inst, {"modC": ("none", 0), "fmtScaleA": ("e8", 0), "fmtScaleB": ("e8", 0)})
    rows = int(re.search(r"\.(\d+)x16x128", inst.name)[1])
    formats = [inst.attrs.get(n, "fp4_e2m1") for n in ("fmtA", "fmtB")]
    decoders = [scaled_operand(d, f, k) for f, k in zip(formats, inst.arg_types, strict=False)]
    second = [inst.attrs.get(n, "row0") == "row1" for n in ("scaleAType", "scaleBType")]
    r, sizes = inst.results[0], (rows, 16)

    def operand(v: list, s: object, n: int) -> np.ndarray:
        values = decoders[n](s.spread(v[inst.args[n]]))
        if sizes[n] == 32:
            numbers = values.reshape(s.count, 32, -1)
        else:
            numbers = by_runs(s, values, 16 if "fp8" in str(formats[n]) else 32)
        by = block_scales(s, v[inst.args[3 + n]], second[n], sizes[n])
        blocks = numbers.reshape(s.count, sizes[n], by.shape[2], -1)
        return (blocks * by[..., None]).reshape(s.count, sizes[n], -1)

    def run(v: list, s: object) -> None:
        x, y = operand(v, s, 0), operand(v, s, 1)
        start = accumulators(s, v[inst.args[2]])
        v[r] = registers(np.matmul(x, y.transpose(0, 2, 1)) + start)

    return run
