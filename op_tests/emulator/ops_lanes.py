"""Data exchange between the lanes of a wave."""

from __future__ import annotations

import numpy as np

from .code import Decoder, Run, handles
from .lltypes import unsigned
from .program import Inst


def per_wave(s: object, value: np.ndarray, lane: np.ndarray) -> np.ndarray:
    """Every lane gets the value of lane index ``lane`` (one a wave, within the batch)."""
    return np.repeat(s.spread(value)[lane], s.width, axis=0)


@handles("rocdl.readfirstlane", "llvm.amdgcn.readfirstlane*")
def read_first_lane(d: Decoder, inst: Inst) -> Run:
    a, r = inst.args[0], inst.results[0]

    def run(v: list, s: object) -> None:
        value = v[a]
        v[r] = value if len(value) == 1 else per_wave(s, value, s.first_active())

    return run


@handles("rocdl.readlane", "llvm.amdgcn.readlane*")
def read_lane(d: Decoder, inst: Inst) -> Run:
    (a, b), r = inst.args, inst.results[0]

    def run(v: list, s: object) -> None:
        value = v[a]
        if len(value) == 1:
            v[r] = value
            return
        lane = s.spread(v[b])[s.first_active()] % s.width
        v[r] = per_wave(s, value, np.arange(s.count) * s.width + lane)

    return run


@handles("llvm.amdgcn.writelane*", "rocdl.writelane")
def write_lane(d: Decoder, inst: Inst) -> Run:
    (new, lane, old), r = inst.args, inst.results[0]

    def run(v: list, s: object) -> None:
        first = s.first_active()
        at = np.arange(s.count) * s.width + s.spread(v[lane])[first] % s.width
        result = s.spread(v[old]).copy()
        result[at] = s.spread(v[new])[first]
        v[r] = result

    return run


def fetch_lanes(s: object, value: np.ndarray, source: np.ndarray) -> np.ndarray:
    """``value`` of lane ``source`` (within the wave) for every lane; inactive sources give 0."""
    at = s.lane_wave * s.width + source
    result = s.spread(value)[at]
    if s.mask is not None:
        live = s.mask[at]
        result = np.where(live if result.ndim == 1 else live[:, None], result, 0)
        result = result.astype(value.dtype)
    return result


@handles("rocdl.ds_bpermute", "llvm.amdgcn.ds.bpermute*")
def backward_permute(d: Decoder, inst: Inst) -> Run:
    (index, a), r = inst.args, inst.results[0]

    def run(v: list, s: object) -> None:
        source = (s.spread(v[index]) >> 2) % s.width
        v[r] = fetch_lanes(s, v[a], source)

    return run


@handles("rocdl.ds_permute", "llvm.amdgcn.ds.permute*")
def forward_permute(d: Decoder, inst: Inst) -> Run:
    (index, a), r = inst.args, inst.results[0]

    def run(v: list, s: object) -> None:
        target = s.lane_wave * s.width + (s.spread(v[index]) >> 2) % s.width
        result = np.zeros(s.n, v[a].dtype)
        result[target[s.active]] = s.spread(v[a])[s.active]
        v[r] = result

    return run


def swizzle_source(offset: int, width: int) -> np.ndarray:
    """Source lane of every lane for ds_swizzle's immediate."""
    lane = np.arange(width)
    if offset & 0x8000:
        return (lane & ~3) | ((offset >> (2 * (lane & 3))) & 3)
    low = lane & 31
    and_mask, or_mask, xor_mask = offset & 31, (offset >> 5) & 31, (offset >> 10) & 31
    return (lane & ~31) | (((low & and_mask) | or_mask) ^ xor_mask)


@handles("rocdl.ds_swizzle", "llvm.amdgcn.ds.swizzle*")
def swizzle(d: Decoder, inst: Inst) -> Run:
    a, r = inst.args[0], inst.results[0]
    source = swizzle_source(d.number(inst.args[1], inst), d.width)

    def run(v: list, s: object) -> None:
        v[r] = fetch_lanes(s, v[a], source[s.lane])

    return run


def dpp_source(control: int, width: int) -> np.ndarray:
    """Source lane of every lane for a DPP control word; -1 where there is none."""
    lane = np.arange(width)
    row, at = lane & ~15, lane & 15
    if control <= 0xFF:
        return (lane & ~3) | ((control >> (2 * (lane & 3))) & 3)
    kind, count = control & ~15, control & 15
    if kind == 0x100 and count:
        source = np.where(at + count < 16, lane + count, -1)
    elif kind == 0x110 and count:
        source = np.where(at >= count, lane - count, -1)
    elif kind == 0x120 and count:
        source = row | ((at - count) & 15)
    elif kind == 0x150:
        source = row | count
    elif kind == 0x160:
        source = row | (at ^ count)
    elif control == 0x130:
        source = np.where(lane + 1 < width, lane + 1, -1)
    elif control == 0x134:
        source = (lane + 1) % width
    elif control == 0x138:
        source = lane - 1
    elif control == 0x13C:
        source = (lane - 1) % width
    elif control == 0x140:
        source = row | (15 - at)
    elif control == 0x141:
        source = (lane & ~7) | (7 - (lane & 7))
    elif control == 0x142:
        source = np.where(lane >= 16, row - 1, -1)
    elif control == 0x143:
        source = np.where(lane >= 32, 31, -1)
    else:
        raise NotImplementedError(f"DPP control {control:#x}")
    return source


@handles("rocdl.update.dpp", "llvm.amdgcn.update.dpp*", "llvm.amdgcn.mov.dpp*")
def update_dpp(d: Decoder, inst: Inst) -> Run:
    r = inst.results[0]
    if "dppCtrl" in inst.attrs:
        old, a = inst.args
        control, rows, banks, bound = (
            int(inst.attrs.get(n, default))
            for n, default in (("dppCtrl", 0), ("rowMask", 15), ("bankMask", 15), ("boundCtrl", 0))
        )
    else:
        old, a = inst.args[:2] if "update" in inst.name else (None, inst.args[0])
        control, rows, banks, bound = (d.number(x, inst) for x in inst.args[-4:])
    source = dpp_source(control, d.width)
    lane = np.arange(d.width)
    enabled = ((rows >> (lane >> 4 & 3)) & 1 & (banks >> (lane >> 2 & 3)) & 1).astype(bool)

    def run(v: list, s: object) -> None:
        value = s.spread(v[a])
        fallback = np.zeros(s.n, value.dtype) if old is None else s.spread(v[old])
        there = source[s.lane] >= 0
        at = s.lane_wave * s.width + np.maximum(source, 0)[s.lane]
        if s.mask is not None:
            there = there & s.mask[at]
        missing = np.zeros(s.n, value.dtype) if bound else fallback
        moved = np.where(there, value[at], missing)
        v[r] = np.where(enabled[s.lane], moved, fallback)

    return run


@handles("rocdl.permlane32.swap", "rocdl.permlane16.swap", "llvm.amdgcn.permlane*.swap*")
def permlane_swap(d: Decoder, inst: Inst) -> Run:
    """Swaps odd rows of the first operand with even rows of the second; rows of 16 or 32 lanes."""
    (a, b), r = inst.args[:2], inst.results[0]
    size = 32 if "32" in inst.name.split("swap")[0] else 16

    def run(v: list, s: object) -> None:
        first, second = (s.spread(v[x]).reshape(s.count, -1, 2, size) for x in (a, b))
        left = np.stack([first[:, :, 0], second[:, :, 0]], 2).reshape(s.n)
        right = np.stack([first[:, :, 1], second[:, :, 1]], 2).reshape(s.n)
        v[r] = (left, right)

    return run


@handles("rocdl.permlanex16", "llvm.amdgcn.permlane16*", "llvm.amdgcn.permlanex16*")
def permlane(d: Decoder, inst: Inst) -> Run:
    """Lane i of a row reads the lane nibble i of the selectors names, in its or the other row."""
    _old, a, low, high = inst.args[:4]
    r, other = inst.results[0], "permlanex16" in inst.name

    def run(v: list, s: object) -> None:
        select = np.stack([s.spread(v[low]), s.spread(v[high])], 1)
        at = s.lane & 15
        nibble = (select[np.arange(s.n), at >> 3] >> (4 * (at & 7))) & 15
        row = (s.lane & ~15) ^ (16 if other else 0)
        v[r] = fetch_lanes(s, v[a], row | nibble)

    return run


@handles("rocdl.permlane16.var", "rocdl.permlanex16.var")
def permlane_var(d: Decoder, inst: Inst) -> Run:
    _, a, index = inst.args[:3]
    r, other = inst.results[0], "permlanex16" in inst.name

    def run(v: list, s: object) -> None:
        row = (s.lane & ~15) ^ (16 if other else 0)
        v[r] = fetch_lanes(s, v[a], row | (s.spread(v[index]) & 15))

    return run


def ballot_bits(s: object, predicate: np.ndarray) -> np.ndarray:
    """For every wave, the uint64 of active lanes for which ``predicate`` holds."""
    lanes = (s.spread(predicate) & s.mask_array).reshape(s.count, s.width)
    weights = np.uint64(1) << np.arange(s.width, dtype=np.uint64)
    return (lanes * weights).sum(axis=1, dtype=np.uint64)


@handles("rocdl.ballot", "llvm.amdgcn.ballot*")
def ballot(d: Decoder, inst: Inst) -> Run:
    a, r, dtype = inst.args[0], inst.results[0], inst.result_types[0].dtype

    def run(v: list, s: object) -> None:
        v[r] = np.repeat(ballot_bits(s, v[a]).astype(np.int64).astype(dtype), s.width)

    return run


@handles("rocdl.mbcnt.lo", "rocdl.mbcnt.hi", "llvm.amdgcn.mbcnt.lo", "llvm.amdgcn.mbcnt.hi")
def mask_bit_count(d: Decoder, inst: Inst) -> Run:
    """Bits of the mask below this lane, of its low or high 32 lanes, plus the second operand."""
    (a, b), r = inst.args, inst.results[0]
    high = "hi" in inst.name.split(".")

    def run(v: list, s: object) -> None:
        below = np.clip(s.lane - (32 if high else 0), 0, 32).astype(np.uint64)
        mask = ((np.uint64(1) << below) - np.uint64(1)) & unsigned(s.spread(v[a])).astype(np.uint64)
        bits = np.unpackbits(mask[:, None].view(np.uint8), axis=1).sum(axis=1)
        v[r] = v[b] + bits.astype(np.int32)

    return run
