"""Loads, stores, addresses, atomics and buffer accesses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .code import Decoder, Run, handles
from .lltypes import Type, from_bytes, parse_type, to_bytes, unsigned
from .machine import pointee_size
from .ops_arith import as_float, as_kind
from .ops_struct import resource_from_words
from .program import Inst

_DYNAMIC = -(1 << 31)


def decode_bytes(raw: np.ndarray, kind: Type) -> object:
    """A value of any type from its bytes, ``(lanes, size)`` uint8."""
    if kind.kind in ("struct", "array"):
        inner = kind.fields if kind.kind == "struct" else kind.fields * kind.count
        size = inner[0].size if kind.kind == "array" else 0
        starts = kind.offsets() if kind.kind == "struct" else [size * n for n in range(kind.count)]
        return tuple(
            decode_bytes(np.ascontiguousarray(raw[:, o : o + f.size]), f)
            for o, f in zip(starts, inner, strict=False)
        )
    return from_bytes(raw, kind)


@handles("llvm.load")
def load(d: Decoder, inst: Inst) -> Run:
    p, r, kind = inst.args[0], inst.results[0], inst.result_types[0]
    space, size, where = inst.arg_types[0].space, kind.size, inst.where

    def run(v: list, s: object) -> None:
        s.copies.count("vm" if space != 3 else "ds", -(-size // 16))
        v[r] = decode_bytes(s.load(space, v[p], size, where), kind)

    return run


@handles("llvm.store")
def store(d: Decoder, inst: Inst) -> Run:
    value, p = inst.args
    kind, space = inst.arg_types[0], inst.arg_types[1].space
    if kind.kind in ("struct", "array"):
        raise NotImplementedError(f"store of {kind}")
    size = kind.size

    def run(v: list, s: object) -> None:
        s.copies.count("vm" if space != 3 else "ds", -(-size // 16))
        s.store(space, v[p], to_bytes(v[value], kind))

    return run


@handles("llvm.getelementptr")
def get_element_ptr(d: Decoder, inst: Inst) -> Run:
    base, *dynamic = inst.args
    r = inst.results[0]
    kind = parse_type(str(inst.attrs["elem_type"]))
    fixed, terms = 0, []
    slots = iter(dynamic)
    for depth, index in enumerate(inst.attrs["rawConstantIndices"]):
        if depth and kind.kind == "struct":
            fixed += kind.offsets()[index]
            kind = kind.fields[index]
            continue
        if depth:
            kind = kind.fields[0]
        scale = pointee_size(kind)
        if index == _DYNAMIC:
            slot = next(slots)
            known = d.constant(slot)
            if known is None:
                terms.append((slot, scale))
            else:
                fixed += known * scale
        else:
            fixed += index * scale

    if not terms:

        def run(v: list, s: object) -> None:
            v[r] = v[base] + fixed

    else:

        def run(v: list, s: object) -> None:
            at = v[base]
            for slot, scale in terms:
                at = at + v[slot].astype(np.int64) * scale
            v[r] = at + fixed if fixed else at

    return run


@handles("llvm.mlir.addressof")
def address_of(d: Decoder, inst: Inst) -> None:
    name = str(inst.attrs["global_name"]).lstrip("@")
    if name not in d.program.globals or inst.result_types[0].space != 3:
        raise NotImplementedError(f"address of global {name}")
    d.template[inst.results[0]] = np.array([d.program.globals[name].offset], np.int64)


@handles("llvm.alloca")
def alloca(d: Decoder, inst: Inst) -> Run:
    r, kind = inst.results[0], parse_type(str(inst.attrs["elem_type"]))
    size = -(-d.number(inst.args[0], inst) * pointee_size(kind) // 16) * 16
    offset = d.private_bytes
    d.private_bytes += size
    if d.private_bytes > 1 << 14:
        raise NotImplementedError("more than 16 KiB of scratch a lane")

    def run(v: list, s: object) -> None:
        v[r] = np.array([offset], np.int64)

    return run


# ---- atomics -----------------------------------------------------------------------------------

Combine = Callable[[np.ndarray, np.ndarray], np.ndarray]
_FETCH: dict[int, Combine] = {
    0: lambda a, b: b,
    1: np.add,
    2: np.subtract,
    3: np.bitwise_and,
    4: lambda a, b: ~(a & b),
    5: np.bitwise_or,
    6: np.bitwise_xor,
    7: np.maximum,
    8: np.minimum,
    9: lambda a, b: np.maximum(unsigned(a), unsigned(b)).view(a.dtype),
    10: lambda a, b: np.minimum(unsigned(a), unsigned(b)).view(a.dtype),
    11: np.add,
    12: np.subtract,
    13: np.fmax,
    14: np.fmin,
    15: lambda a, b: np.where(unsigned(a) >= unsigned(b), 0, a + 1).astype(a.dtype),
    16: lambda a, b: np.where((a == 0) | (unsigned(a) > unsigned(b)), b, a - 1).astype(a.dtype),
}


def fetch(s: object, space: int, at: np.ndarray, kind: Type, op: Combine, value: object) -> object:
    """``old = *at; *at = op(old, value)`` in the active lanes; returns old."""
    value = s.spread(value)

    def update(old: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        before = as_float(from_bytes(old, kind), kind)
        after = op(before, as_float(value[lanes], kind))
        return to_bytes(as_kind(after, kind) if kind.scalar.kind == "float" else after, kind)

    return from_bytes(s.atomic(space, at, kind.size, update), kind)


@handles("llvm.atomicrmw")
def atomic_rmw(d: Decoder, inst: Inst) -> Run:
    (p, value), r = inst.args, inst.results[0]
    kind, space, number = inst.arg_types[1], inst.arg_types[0].space, inst.attrs["bin_op"]
    if number not in _FETCH:
        raise NotImplementedError(f"atomicrmw operation {number}")
    op = _FETCH[number]

    def run(v: list, s: object) -> None:
        s.copies.count("vm" if space != 3 else "ds")
        v[r] = fetch(s, space, v[p], kind, op, v[value])

    return run


@handles("llvm.cmpxchg")
def compare_exchange(d: Decoder, inst: Inst) -> Run:
    (p, compare, value), r = inst.args, inst.results[0]
    kind, space = inst.arg_types[1], inst.arg_types[0].space

    def run(v: list, s: object) -> None:
        expected, new = (to_bytes(s.spread(v[x]), kind) for x in (compare, value))

        def update(old: np.ndarray, lanes: np.ndarray) -> np.ndarray:
            same = (old == expected[lanes]).all(axis=1)
            return np.where(same[:, None], new[lanes], old)

        old = s.atomic(space, v[p], kind.size, update)
        v[r] = (from_bytes(old, kind), (old == expected).all(axis=1))

    return run


# ---- buffers -----------------------------------------------------------------------------------


@handles("rocdl.make.buffer.rsrc", "llvm.amdgcn.make.buffer.rsrc*")
def make_buffer(d: Decoder, inst: Inst) -> Run:
    """A buffer resource is held as (base, stride, bytes, flags)."""
    args, r = inst.args, inst.results[0]
    if d.constant(args[1]) != 0:
        raise NotImplementedError("buffers with a stride")

    def run(v: list, s: object) -> None:
        base, stride, size, flags = (v[a] for a in args)
        size = unsigned(size).astype(np.int64) if size.dtype.itemsize < 8 else size
        v[r] = (base, stride, size, flags)

    return run


def buffer_offset(v: list, voffset: int, soffset: int) -> np.ndarray:
    """Byte offset of a buffer access: both parts are unsigned 32 bit, and the sum does not wrap."""
    return unsigned(v[voffset]).astype(np.int64) + unsigned(v[soffset]).astype(np.int64)


def buffer_lanes(resource: tuple, offset: np.ndarray, size: int) -> tuple:
    """Addresses, and which 4-byte (or smaller) parts are inside: ``(lanes, parts)`` bool."""
    base, _, limit, _ = resource
    part = min(size, 4)
    ends = offset[:, None] + np.arange(part, size + 1, part)
    rows = max(len(base), len(ends))
    inside = np.broadcast_to(ends <= limit[:, None], (max(rows, len(limit)), size // part))
    return base + offset, inside


def buffer_load(
    s: object, resource: tuple, offset: np.ndarray, size: int, where: str
) -> np.ndarray:
    """``(lanes, size)`` uint8; parts beyond the buffer's end read as zero."""
    at, inside = buffer_lanes(resource, offset, size)
    if len(at) == 1 and len(inside) == 1 and inside.all():
        return s.load(1, at, size, where)
    at, inside = s.spread(at), s.spread(inside)
    saved = s.mask
    good = inside.all(axis=1)
    wanted = s.mask_array
    if (good | ~wanted).all():
        return s.load(1, at, size, where)
    result = np.zeros((s.n, size), np.uint8)
    part = size // inside.shape[1]
    for number in range(inside.shape[1]):
        lanes = wanted & inside[:, number]
        if lanes.any():
            s.set_mask(lanes)
            got = s.load(1, at + number * part, part, where)
            result[lanes, number * part : (number + 1) * part] = got[lanes]
    s.set_mask(saved)
    return result


def buffer_store(s: object, resource: tuple, offset: np.ndarray, data: np.ndarray) -> None:
    """Parts beyond the buffer's end are dropped."""
    size = data.shape[1]
    at, inside = buffer_lanes(resource, offset, size)
    at, inside, data = s.spread(at), s.spread(inside), s.spread(data)
    saved, wanted = s.mask, s.mask_array
    if (inside.all(axis=1) | ~wanted).all():
        s.store(1, at, data)
        return
    part = size // inside.shape[1]
    for number in range(inside.shape[1]):
        lanes = wanted & inside[:, number]
        if lanes.any():
            s.set_mask(lanes)
            s.store(1, at + number * part, data[:, number * part : (number + 1) * part])
    s.set_mask(saved)


@handles("rocdl.raw.ptr.buffer.load", "llvm.amdgcn.raw.ptr.buffer.load*")
def raw_buffer_load(d: Decoder, inst: Inst) -> Run:
    rsrc, voffset, soffset = inst.args[:3]
    r, kind, where = inst.results[0], inst.result_types[0], inst.where
    size = kind.size

    def run(v: list, s: object) -> None:
        s.copies.count("vm", -(-size // 16))
        offset = buffer_offset(v, voffset, soffset)
        v[r] = from_bytes(buffer_load(s, v[rsrc], offset, size, where), kind)

    return run


@handles("rocdl.ptr.s.buffer.load", "llvm.amdgcn.s.buffer.load*")
def scalar_buffer_load(d: Decoder, inst: Inst) -> Run:
    """A wave-uniform load; the intrinsic takes the resource as four words."""
    rsrc, offset = inst.args[:2]
    r, kind, where = inst.results[0], inst.result_types[0], inst.where
    words = inst.arg_types[0].kind == "vector"

    def run(v: list, s: object) -> None:
        resource = resource_from_words(v[rsrc]) if words else v[rsrc]
        at = unsigned(v[offset]).astype(np.int64)
        v[r] = from_bytes(buffer_load(s, resource, at, kind.size, where), kind)

    return run


@handles("rocdl.raw.ptr.buffer.store", "llvm.amdgcn.raw.ptr.buffer.store*")
def raw_buffer_store(d: Decoder, inst: Inst) -> Run:
    value, rsrc, voffset, soffset = inst.args[:4]
    kind = inst.arg_types[0]

    def run(v: list, s: object) -> None:
        s.copies.count("vm", -(-kind.size // 16))
        data = to_bytes(v[value], kind)
        buffer_store(s, v[rsrc], buffer_offset(v, voffset, soffset), data)

    return run


_BUFFER_FETCH = {"fadd": 11, "fmax": 13, "smax": 7, "umin": 10, "add": 1, "umax": 9, "smin": 8}


@handles("rocdl.raw.ptr.buffer.atomic.*", "llvm.amdgcn.raw.ptr.buffer.atomic.*")
def raw_buffer_atomic(d: Decoder, inst: Inst) -> Run:
    name = inst.name.split("atomic.")[1].split(".")[0]
    kind = inst.arg_types[0]
    if name not in _BUFFER_FETCH:
        raise NotImplementedError(f"buffer atomic {name}")
    op = _FETCH[_BUFFER_FETCH[name]]
    value, rsrc, voffset, soffset = inst.args[:4]

    def run(v: list, s: object) -> None:
        s.copies.count("vm")
        at, inside = buffer_lanes(v[rsrc], buffer_offset(v, voffset, soffset), kind.size)
        saved = s.mask
        lanes = s.mask_array & s.spread(inside).all(axis=1)
        old: object = np.zeros((s.n, kind.count) if kind.kind == "vector" else s.n, kind.dtype)
        if lanes.any():
            s.set_mask(lanes)
            old = fetch(s, 1, at, kind, op, v[value])
            s.set_mask(saved)
        if inst.results:
            v[inst.results[0]] = old

    return run
