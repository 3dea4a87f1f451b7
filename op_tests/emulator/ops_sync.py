"""Barriers, waits, sleeps, hints, and copies from global memory to LDS."""

from __future__ import annotations

import numpy as np

from .code import Decoder, Run, breaks, handles
from .ops_memory import buffer_load, buffer_offset
from .program import Inst
from .scheduler import CLUSTER, WORKGROUP


@breaks("rocdl.s.barrier", "rocdl.barrier", "gpu.barrier", "llvm.amdgcn.s.barrier")
def barrier(d: Decoder, inst: Inst) -> tuple:
    return ("barrier", WORKGROUP)


def _barrier_id(d: Decoder, inst: Inst) -> int:
    number = inst.attrs.get("id")
    number = int(number) if number is not None else d.number(inst.args[0], inst)
    number = number - (1 << 32) if number >= 1 << 31 else number
    number = number - (1 << 16) if number >= 1 << 15 else number
    if number not in (WORKGROUP, CLUSTER):
        raise NotImplementedError(f"named barrier {number}")
    return number


@breaks("rocdl.s.barrier.signal", "llvm.amdgcn.s.barrier.signal")
def barrier_signal(d: Decoder, inst: Inst) -> tuple:
    return ("signal", _barrier_id(d, inst))


@breaks("rocdl.s.barrier.wait", "llvm.amdgcn.s.barrier.wait")
def barrier_wait(d: Decoder, inst: Inst) -> tuple:
    return ("wait", _barrier_id(d, inst))


@breaks("rocdl.s.sleep", "llvm.amdgcn.s.sleep")
def sleep(d: Decoder, inst: Inst) -> tuple:
    return ("sleep", 0)


@handles(
    "rocdl.sched.*",
    "rocdl.s.setprio",
    "rocdl.s.nop",
    "rocdl.iglp.opt",
    "rocdl.wave.barrier",
    "rocdl.s.wakeup.barrier",
    "rocdl.global.prefetch*",
    "rocdl.flat.prefetch*",
    "llvm.amdgcn.sched.*",
    "llvm.amdgcn.s.setprio*",
    "llvm.amdgcn.s.setreg",
    "llvm.amdgcn.wave.barrier",
    "llvm.amdgcn.iglp.opt",
    "llvm.amdgcn.s.prefetch*",
    "llvm.intr.assume",
    "llvm.intr.lifetime*",
    "llvm.fence",
)
def nothing(d: Decoder, inst: Inst) -> Run:
    """Orders or hints only: memory here is sequentially consistent."""

    def run(v: list, s: object) -> None:
        pass

    return run


# ---- waits -------------------------------------------------------------------------------------


def vmcnt(encoded: int) -> int:
    """The vector memory counter of an s_waitcnt immediate of gfx9."""
    return (encoded & 0xF) | ((encoded >> 14 & 3) << 4)


@handles("rocdl.s.waitcnt", "llvm.amdgcn.s.waitcnt")
def wait_count(d: Decoder, inst: Inst) -> Run:
    encoded = inst.attrs.get("bitfield")
    encoded = int(encoded) if encoded is not None else d.number(inst.args[0], inst)
    left = vmcnt(encoded)

    def run(v: list, s: object) -> None:
        if left < 63:
            s.copies.wait("vm", left)

    return run


_COUNTERS = {"asynccnt": "async", "tensorcnt": "tensor", "loadcnt": "vm"}


@handles("rocdl.s.wait.*", "llvm.amdgcn.s.wait.*")
def wait_counter(d: Decoder, inst: Inst) -> Run:
    counter = _COUNTERS.get(inst.name.rsplit(".", 1)[1])
    left = inst.attrs.get("count")
    left = int(left) if left is not None else d.number(inst.args[0], inst)

    def run(v: list, s: object) -> None:
        if counter is not None:
            s.copies.wait(counter, left)

    return run


@handles("rocdl.asyncmark")
def async_mark(d: Decoder, inst: Inst) -> Run:
    def run(v: list, s: object) -> None:
        s.copies.mark()

    return run


@handles("rocdl.wait.asyncmark")
def wait_async_mark(d: Decoder, inst: Inst) -> Run:
    left = int(next(iter(inst.attrs.values())))

    def run(v: list, s: object) -> None:
        s.copies.wait_marks(left)

    return run


# ---- copies to LDS -----------------------------------------------------------------------------


def lds_targets(s: object, pointer: np.ndarray, size: int, offset: int) -> np.ndarray:
    """Where each lane's bytes go: a wave writes one run, from its first active lane's pointer."""
    base = s.spread(pointer)[s.first_active()]
    return np.repeat(base, s.width) + offset + s.lane * size


@handles("rocdl.raw.ptr.buffer.load.lds", "rocdl.raw.ptr.buffer.load.async.lds")
def buffer_to_lds(d: Decoder, inst: Inst) -> Run:
    """Each wave writes one run of LDS; lanes beyond the buffer's end write zeros."""
    rsrc, pointer, size_slot, voffset, soffset, offset_slot = inst.args
    size, extra = d.number(size_slot, inst), d.number(offset_slot, inst)
    where = inst.where

    def run(v: list, s: object) -> None:
        resource = v[rsrc]
        offset = buffer_offset(v, voffset, soffset) + extra
        target = lds_targets(s, v[pointer], size, extra)

        def land(lanes: np.ndarray) -> None:
            data = buffer_load(s, resource, offset, size, where)
            s.store(3, target, data)

        s.copies.issue("vm", land)

    return run


@handles("rocdl.global.load.lds", "rocdl.global.load.async.lds", "rocdl.load.to.lds")
def global_to_lds(d: Decoder, inst: Inst) -> Run:
    source, pointer = inst.args[:2]
    size, extra = int(inst.attrs["size"]), int(inst.attrs.get("offset", 0))
    space, where = inst.arg_types[0].space, inst.where

    def run(v: list, s: object) -> None:
        at = s.spread(v[source] + extra)
        target = lds_targets(s, v[pointer], size, extra)

        def land(lanes: np.ndarray) -> None:
            s.store(3, target, s.load(space, at, size, where))

        s.copies.issue("vm", land)

    return run
