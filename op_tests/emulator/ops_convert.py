"""Conversions between floats and packed low precision formats."""

from __future__ import annotations

import re

import numpy as np

from .code import Decoder, Run, handles
from .formats import Format, format_named, pack, unpack
from .lltypes import Type, f32_to_bf16, from_bytes, to_bytes
from .ops_arith import as_float, as_kind
from .program import Inst

_LOW = ("fp8", "bf8", "fp6", "bf6", "fp4")


def f32_exponent_scale(scale: np.ndarray) -> np.ndarray:
    """The power of two a scalef32 conversion uses: the exponent of its f32 scale, as float64."""
    code = (np.ascontiguousarray(scale).view(np.uint32) >> 23) & 0xFF
    return np.where(code == 255, np.nan, np.ldexp(1.0, code.astype(np.int64) - 127))


def _saturates(s: object) -> bool:
    return s.fp16_overflow


def _insert(old: np.ndarray, new: np.ndarray, at: int) -> np.ndarray:
    """Bytes ``new`` (rows, k) put over ``old`` (rows, size) from byte ``at``."""
    rows = max(len(old), len(new))
    result = np.empty((rows, old.shape[1]), np.uint8)
    result[:] = old
    result[:, at : at + new.shape[1]] = new
    return result


def _sources(v: list, args: tuple[int, ...], kinds: tuple[Type, ...]) -> np.ndarray:
    """Float operands side by side: scalars become one column each, vectors their elements."""
    parts = [as_float(v[a], k) for a, k in zip(args, kinds, strict=True)]
    parts = [p[:, None] if p.ndim == 1 else p for p in parts]
    rows = max(len(p) for p in parts)
    return np.concatenate([np.broadcast_to(p, (rows, p.shape[1])) for p in parts], axis=1)


@handles("rocdl.cvt.pk.fp8.f32", "rocdl.cvt.pk.bf8.f32")
def to_pair(d: Decoder, inst: Inst) -> Run:
    """(a, b, old): two f32 into the low or high half of old."""
    low = format_named(inst.name.split(".")[3], d.arch)
    r, at = inst.results[0], 2 * int(inst.attrs["wordSel"])
    old, kind = inst.args[2], inst.result_types[0]

    def run(v: list, s: object) -> None:
        values = _sources(v, inst.args[:2], inst.arg_types[:2])
        codes = low.encode(values, _saturates(s))
        v[r] = from_bytes(_insert(to_bytes(v[old], kind), codes, at), kind)

    return run


@handles("rocdl.cvt.pk.f32.fp8", "rocdl.cvt.pk.f32.bf8")
def from_pair(d: Decoder, inst: Inst) -> Run:
    low = format_named(inst.name.split(".")[4], d.arch)
    a, r, at = inst.args[0], inst.results[0], 2 * int(inst.attrs["wordSel"])

    def run(v: list, s: object) -> None:
        v[r] = low.decode(to_bytes(v[a], inst.arg_types[0])[:, at : at + 2])

    return run


@handles("rocdl.cvt.f32.fp8", "rocdl.cvt.f32.bf8")
def from_one(d: Decoder, inst: Inst) -> Run:
    low = format_named(inst.name.split(".")[3], d.arch)
    a, r, at = inst.args[0], inst.results[0], int(inst.attrs["byteSel"])

    def run(v: list, s: object) -> None:
        v[r] = low.decode(to_bytes(v[a], inst.arg_types[0])[:, at])

    return run


@handles("rocdl.cvt.scalef32.*")
def scaled(d: Decoder, inst: Inst) -> Run:
    """value / scale into a low format, or value * scale out of one; scale is a power of two."""
    match = re.fullmatch(r"rocdl\.cvt\.scalef32\.(?:pk(\d*)\.)?(\w+)\.(\w+)", inst.name)
    if not match:
        raise NotImplementedError("stochastic rounding")
    count, target, source = match.groups()
    if target in _LOW:
        return _scaled_to(d, inst, format_named(target, d.arch), count == "")
    return _scaled_from(d, inst, format_named(source, d.arch), count)


def _scaled_to(d: Decoder, inst: Inst, low: Format, pair: bool) -> Run:
    r, kind = inst.results[0], inst.result_types[0]
    scale = inst.args[-1]
    values = slice(1, -1) if pair else slice(0, -1)
    half = int(inst.attrs.get("dstLoHiSel", 0)) * 2
    at = int(inst.attrs.get("dstSelIndex", half))

    def run(v: list, s: object) -> None:
        wide = _sources(v, inst.args[values], inst.arg_types[values]).astype(np.float64)
        by = f32_exponent_scale(v[scale])[:, None]
        codes = pack(low.encode(wide / by, _saturates(s)), low.bits)
        if pair:
            codes = _insert(to_bytes(v[inst.args[0]], kind), codes, at)
        v[r] = from_bytes(np.ascontiguousarray(codes), kind)

    return run


def _scaled_from(d: Decoder, inst: Inst, low: Format, count: str | None) -> Run:
    r, kind = inst.results[0], inst.result_types[0]
    merges = len(inst.args) == 3
    source, scale = inst.args[-2:]
    source_kind = inst.arg_types[-2]
    index = int(inst.attrs.get("srcSelIndex", 0))
    half = 2 * int(inst.attrs.get("srcLoHiSel", 0))
    high = int(inst.attrs.get("dstLoHiSel", 0))

    def run(v: list, s: object) -> None:
        raw = to_bytes(v[source], source_kind)
        if count is None:
            raw = raw[:, index : index + 1]
        elif count == "":
            width = 2 * low.bits // 8
            start = index if low.bits == 4 else half
            raw = raw[:, start : start + width]
        values = low.decode(unpack(np.ascontiguousarray(raw), low.bits)).astype(np.float64)
        values = (values * f32_exponent_scale(v[scale])[:, None]).astype(np.float32)
        if kind.kind != "vector":
            v[r] = as_kind(values[:, 0], kind)
        elif merges:
            old = v[inst.args[0]]
            result = np.empty((max(len(old), len(values)), kind.count), kind.dtype)
            result[:] = old
            result[:, high] = as_kind(values[:, 0], kind)
            v[r] = result
        else:
            v[r] = as_kind(values, kind)

    return run


@handles("rocdl.cvt.pkrtz", "llvm.amdgcn.cvt.pkrtz")
def pack_towards_zero(d: Decoder, inst: Inst) -> Run:
    r = inst.results[0]

    def run(v: list, s: object) -> None:
        values = _sources(v, inst.args, inst.arg_types)
        near = values.astype(np.float16)
        over = np.abs(near.astype(np.float32)) > np.abs(values)
        v[r] = np.where(over, np.nextafter(near, np.float16(0)), near).astype(np.float16)

    return run


@handles("llvm.inline_asm")
def inline_assembly(d: Decoder, inst: Inst) -> Run:
    """Only what FlyDSL itself emits."""
    text = str(inst.attrs["asm_string"])
    r = inst.results[0] if inst.results else -1
    if text.startswith("v_cvt_pk_bf16_f32 $0, $1, $2"):
        a, b = inst.args

        def run(v: list, s: object) -> None:
            low, high = np.broadcast_arrays(f32_to_bf16(v[a]), f32_to_bf16(v[b]))
            v[r] = np.stack([low, high], 1).view(np.int32)[:, 0]

        return run
    if text.startswith("v_cvt_off_f32_i4"):
        a = inst.args[0]
        byte = int(text[-1]) if "src0_sel:BYTE_" in text else 0

        def run(v: list, s: object) -> None:
            nibble = (v[a] >> (8 * byte)) & 15
            v[r] = ((nibble ^ 8) - 8).astype(np.float32) / np.float32(16)

        return run
    if text.strip() == "" or text.startswith(("s_nop", "s_setprio")):
        return lambda v, s: None
    raise NotImplementedError(f"inline assembly {text!r}")
