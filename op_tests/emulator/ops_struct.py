"""Values built from others: structs, vectors, casts, selects, thread and block numbers."""

from __future__ import annotations

import time

import numpy as np

from .code import Decoder, Run, handles, poison_value, zero_value
from .lltypes import from_bytes, to_bytes, unsigned
from .memory import LDS_APERTURE, PRIVATE_APERTURE
from .ops_arith import as_float, as_kind
from .program import Inst


@handles("llvm.mlir.poison", "llvm.mlir.undef")
def poison(d: Decoder, inst: Inst) -> None:
    d.template[inst.results[0]] = poison_value(inst.result_types[0])


@handles("llvm.mlir.zero")
def zero(d: Decoder, inst: Inst) -> None:
    d.template[inst.results[0]] = zero_value(inst.result_types[0])


@handles("llvm.freeze", "llvm.intr.expect", "llvm.intr.ssa.copy")
def copy(d: Decoder, inst: Inst) -> Run:
    a, r = inst.args[0], inst.results[0]

    def run(v: list, s: object) -> None:
        v[r] = v[a]

    return run


@handles("llvm.extractvalue")
def extract_value(d: Decoder, inst: Inst) -> Run:
    a, r, path = inst.args[0], inst.results[0], inst.attrs["position"]

    def run(v: list, s: object) -> None:
        value = v[a]
        for field in path:
            value = value[field]
        v[r] = value

    return run


def _replaced(value: tuple, path: list[int], new: object) -> object:
    if not path:
        return new
    head = path[0]
    return (*value[:head], _replaced(value[head], path[1:], new), *value[head + 1 :])


@handles("llvm.insertvalue")
def insert_value(d: Decoder, inst: Inst) -> Run:
    (a, b), r, path = inst.args, inst.results[0], inst.attrs["position"]

    def run(v: list, s: object) -> None:
        v[r] = _replaced(v[a], path, v[b])

    return run


@handles("llvm.extractelement")
def extract_element(d: Decoder, inst: Inst) -> Run:
    (a, i), r = inst.args, inst.results[0]
    fixed = d.constant(i)
    if fixed is not None:

        def run(v: list, s: object) -> None:
            v[r] = v[a][:, fixed]

    else:

        def run(v: list, s: object) -> None:
            value, index = v[a], v[i]
            if len(index) == 1:
                v[r] = value[:, int(index[0])]
            else:
                value = s.spread(value)
                v[r] = np.take_along_axis(value, index[:, None] % value.shape[1], 1)[:, 0]

    return run


@handles("llvm.insertelement")
def insert_element(d: Decoder, inst: Inst) -> Run:
    (a, b, i), r = inst.args, inst.results[0]

    def run(v: list, s: object) -> None:
        value, new, index = v[a], v[b], v[i]
        rows = max(len(value), len(new), len(index))
        result = np.empty((rows, value.shape[1]), value.dtype)
        result[:] = value
        if len(index) == 1:
            result[:, int(index[0])] = new
        else:
            np.put_along_axis(result, index[:, None] % result.shape[1], new[:, None], 1)
        v[r] = result

    return run


@handles("llvm.shufflevector")
def shuffle_vector(d: Decoder, inst: Inst) -> Run:
    (a, b), r = inst.args, inst.results[0]
    mask = np.array(inst.attrs["mask"])
    size = inst.arg_types[0].count

    def run(v: list, s: object) -> None:
        left, right = v[a], v[b]
        if (mask < size).all():
            v[r] = left[:, mask]
            return
        rows = max(len(left), len(right))
        both = np.empty((rows, left.shape[1] + right.shape[1]), left.dtype)
        both[:, : left.shape[1]] = left
        both[:, left.shape[1] :] = right
        v[r] = both[:, mask]

    return run


@handles("llvm.bitcast")
def bitcast(d: Decoder, inst: Inst) -> Run:
    a, r = inst.args[0], inst.results[0]
    source, target = inst.arg_types[0], inst.result_types[0]
    simple = source.kind == target.kind and source.scalar.bits == target.scalar.bits
    if simple and "ptr" not in (source.scalar.kind, target.scalar.kind):
        dtype = target.dtype

        def run(v: list, s: object) -> None:
            v[r] = np.ascontiguousarray(v[a]).view(dtype)

    else:

        def run(v: list, s: object) -> None:
            v[r] = from_bytes(to_bytes(v[a], source), target)

    return run


@handles("llvm.select")
def select(d: Decoder, inst: Inst) -> Run:
    (c, a, b), r = inst.args, inst.results[0]
    wide = inst.result_types[0].kind == "vector" and inst.arg_types[0].kind != "vector"

    def choose(condition: np.ndarray, yes: object, no: object) -> object:
        if isinstance(yes, tuple):
            return tuple(choose(condition, y, n) for y, n in zip(yes, no, strict=True))
        return np.where(condition[:, None] if wide else condition, yes, no)

    def run(v: list, s: object) -> None:
        condition = v[c]
        if condition.size == 1:
            v[r] = v[a] if condition.reshape(-1)[0] else v[b]
        else:
            v[r] = choose(condition, v[a], v[b])

    return run


@handles("llvm.trunc", "llvm.zext", "llvm.sext")
def resize(d: Decoder, inst: Inst) -> Run:
    a, r = inst.args[0], inst.results[0]
    source, target = inst.arg_types[0].scalar, inst.result_types[0].scalar
    dtype = inst.result_types[0].dtype
    if source.bits > 64:
        width = dtype.itemsize

        def run(v: list, s: object) -> None:
            raw = np.ascontiguousarray(v[a]).view(np.uint8).reshape(-1, 16)
            v[r] = np.ascontiguousarray(raw[:, :width]).view(dtype)[:, 0]

    elif target.bits > 64:
        raise NotImplementedError(f"{inst.name} to {target}")
    elif inst.name == "llvm.trunc" and target.bits == 1:

        def run(v: list, s: object) -> None:
            v[r] = (v[a] & 1).astype(bool)

    elif inst.name == "llvm.zext" and source.bits > 1:

        def run(v: list, s: object) -> None:
            v[r] = unsigned(v[a]).astype(dtype)

    elif inst.name == "llvm.sext" and source.bits == 1:

        def run(v: list, s: object) -> None:
            v[r] = -(v[a].astype(dtype))

    else:

        def run(v: list, s: object) -> None:
            v[r] = v[a].astype(dtype)

    return run


@handles("llvm.fptrunc", "llvm.fpext")
def float_resize(d: Decoder, inst: Inst) -> Run:
    a, r, source, target = inst.args[0], inst.results[0], inst.arg_types[0], inst.result_types[0]

    def run(v: list, s: object) -> None:
        v[r] = as_kind(as_float(v[a], source), target)

    return run


@handles("llvm.sitofp", "llvm.uitofp")
def int_to_float(d: Decoder, inst: Inst) -> Run:
    a, r, target = inst.args[0], inst.results[0], inst.result_types[0]
    is_unsigned = inst.name == "llvm.uitofp"

    def run(v: list, s: object) -> None:
        value = unsigned(v[a]) if is_unsigned else v[a]
        if value.dtype == bool and not is_unsigned:
            value = -(value.astype(np.int8))
        v[r] = as_kind(value.astype(np.float32) if target.is_bf16 else value, target)

    return run


@handles("llvm.fptosi", "llvm.fptoui", "llvm.intr.fptosi.sat", "llvm.intr.fptoui.sat")
def float_to_int(d: Decoder, inst: Inst) -> Run:
    """Saturates, NaN to 0, as v_cvt does (LLVM leaves it open for the plain form)."""
    a, r, source, target = inst.args[0], inst.results[0], inst.arg_types[0], inst.result_types[0]
    dtype = target.dtype if "fptosi" in inst.name else np.dtype(f"u{target.dtype.itemsize}")
    info = np.iinfo(dtype)

    def run(v: list, s: object) -> None:
        value = np.trunc(as_float(v[a], source).astype(np.float64))
        value = np.where(np.isnan(value), 0, value)
        inside = np.clip(value, float(info.min), float(info.max))
        top = value >= float(info.max)
        result = np.where(top, 0, inside).astype(dtype)
        v[r] = np.where(top, info.max, result).astype(dtype).view(target.dtype)

    return run


@handles("llvm.inttoptr", "llvm.ptrtoint")
def pointer_cast(d: Decoder, inst: Inst) -> Run:
    a, r = inst.args[0], inst.results[0]
    source, target = inst.arg_types[0], inst.result_types[0]
    if source.space == 8 and target.bits == 128:

        def run(v: list, s: object) -> None:
            v[r] = resource_words(v[a]).view("V16")[:, 0]

        return run
    if 8 in (source.space, target.space):
        raise NotImplementedError(f"cast from {source} to {target}")

    def run(v: list, s: object) -> None:
        value = v[a]
        if source.kind == "int" and source.bits < 64:
            value = unsigned(value)
        v[r] = value.astype(target.dtype)

    return run


def resource_words(resource: tuple) -> np.ndarray:
    """A buffer resource as ``(lanes, 4)`` uint32: base low, base high, bytes, flags."""
    base, _, size, flags = (np.asarray(x) for x in resource)
    parts = [base, base >> 32, np.minimum(size, (1 << 32) - 1), flags]
    rows = max(len(p) for p in parts)
    words = [np.broadcast_to(p, rows).astype(np.int64).astype(np.uint32) for p in parts]
    return np.ascontiguousarray(np.stack(words, 1))


def resource_from_words(words: np.ndarray) -> tuple:
    """Inverse of :func:`resource_words`, from ``(lanes, 4)`` i32."""
    wide = unsigned(words).astype(np.int64)
    base = wide[:, 0] | ((wide[:, 1] & 0xFFFF) << 32)
    return base, np.zeros(1, np.int16), wide[:, 2], words[:, 3]


@handles("llvm.addrspacecast")
def address_space_cast(d: Decoder, inst: Inst) -> Run:
    a, r = inst.args[0], inst.results[0]
    bases = {0: 0, 1: 0, 4: 0, 3: LDS_APERTURE, 5: PRIVATE_APERTURE}
    source, target = inst.arg_types[0].space, inst.result_types[0].space
    if source not in bases or target not in bases:
        raise NotImplementedError(f"cast from address space {source} to {target}")
    shift = bases[source] - bases[target]

    def run(v: list, s: object) -> None:
        v[r] = v[a] + shift if shift else v[a]

    return run


def _axis(name: str) -> int:
    return "xyz".index(name[-1])


@handles("rocdl.workitem.id.*")
def work_item(d: Decoder, inst: Inst) -> Run:
    axis, r = _axis(inst.name), inst.results[0]

    def run(v: list, s: object) -> None:
        x, y, _ = s.group.grid.geometry.block
        linear = s.thread
        place = (linear % x, linear // x % y, linear // (x * y))[axis]
        v[r] = place.astype(np.int32)

    return run


def _uniform(per_lane: np.ndarray) -> np.ndarray:
    """One element when all are equal."""
    return per_lane[:1] if (per_lane == per_lane[0]).all() else per_lane


@handles("rocdl.workgroup.id.*")
def work_group(d: Decoder, inst: Inst) -> Run:
    axis, r = _axis(inst.name), inst.results[0]

    def run(v: list, s: object) -> None:
        x, y, _ = s.group.grid.geometry.grid
        ids = s.group.ids
        place = (ids % x, ids // x % y, ids // (x * y))[axis]
        v[r] = _uniform(place[s.owner].astype(np.int32))

    return run


@handles("rocdl.cluster.id.*", "rocdl.cluster.workgroup.id.*")
def cluster(d: Decoder, inst: Inst) -> Run:
    axis, r = _axis(inst.name), inst.results[0]
    within = ".workgroup." in inst.name

    def run(v: list, s: object) -> None:
        x, y, _ = s.group.grid.geometry.grid
        size = s.group.grid.geometry.cluster[axis]
        ids = s.group.ids
        place = (ids % x, ids // x % y, ids // (x * y))[axis]
        place = place % size if within else place // size
        v[r] = _uniform(place[s.owner].astype(np.int32))

    return run


@handles("rocdl.workgroup.dim.*", "rocdl.grid.dim.*")
def dimension(d: Decoder, inst: Inst) -> Run:
    axis, r, grid = _axis(inst.name), inst.results[0], "grid" in inst.name

    def run(v: list, s: object) -> None:
        geometry = s.group.grid.geometry
        v[r] = np.array([(geometry.grid if grid else geometry.block)[axis]], np.int32)

    return run


@handles("rocdl.wave.id", "llvm.amdgcn.wave.id")
def wave_id(d: Decoder, inst: Inst) -> Run:
    r = inst.results[0]

    def run(v: list, s: object) -> None:
        v[r] = (s.thread // s.width).astype(np.int32)

    return run


@handles("rocdl.wavefrontsize", "llvm.amdgcn.wavefrontsize")
def wave_size(d: Decoder, inst: Inst) -> None:
    d.template[inst.results[0]] = np.array([d.width], np.int32)


@handles("llvm.amdgcn.s.memrealtime")
def clock(d: Decoder, inst: Inst) -> Run:
    """The 100 MHz clock of the device: here the host's."""
    r = inst.results[0]

    def run(v: list, s: object) -> None:
        v[r] = np.array([time.perf_counter_ns() // 10], np.int64)

    return run
