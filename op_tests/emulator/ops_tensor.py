"""Tensor data mover and asynchronous copies of gfx1250.

A descriptor is five vectors of i32; group 0 holds addresses, group 1 the configuration, the two
innermost dimensions and the first strides, groups 2 and 3 the outer dimensions, or row numbers when
gathering. Dimension 0 is contiguous; elements are 1, 2, 4 or 8 bytes. What lies outside the tensor
reads as zero and is not written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .code import Decoder, Run, handles
from .machine import Batch
from .memory import MemoryFault
from .program import Inst


@dataclass(frozen=True)
class Transfer:
    """One wave's transfer: per element, its bytes in global memory and in LDS.

    ``inside`` says which elements are inside the tensor.
    """

    element: int
    addresses: np.ndarray
    offsets: np.ndarray
    inside: np.ndarray


def _field(words: np.ndarray, low: int, bits: int) -> int:
    """``bits`` bits of a descriptor group from bit ``low``."""
    whole = int.from_bytes(np.ascontiguousarray(words).tobytes(), "little")
    return (whole >> low) & ((1 << bits) - 1)


def read_descriptor(groups: list[np.ndarray], load: bool, place: int) -> Transfer | None:
    """Decode one wave's descriptor; None if it is disabled.

    ``load``: to LDS. ``place``: the workgroup's number in its cluster.
    """
    g0, g1, g2, g3 = groups[:4]
    if not _field(g0, 0, 2):
        return None
    gather, wide_index = _field(g0, 31, 1), _field(g0, 30, 1)
    lds, base = _field(g0, 32, 32), _field(g0, 64, 57)
    element = 1 << _field(g1, 16, 2)
    mask = _field(g1, 0, 16)
    if mask and not mask >> place & 1:
        raise MemoryFault(f"multicast mask {mask:#x} leaves out workgroup {place} of the cluster")
    if _field(g1, 18, 1):
        raise NotImplementedError("tensor transfers that arrive on a barrier")
    if _field(g1, 19, 1) and not gather:
        raise NotImplementedError("iterated tensor transfers")
    tile = [_field(g1, 112, 16), _field(g1, 128, 16), _field(g1, 144, 16)]
    extent = [_field(g1, 48, 32), _field(g1, 80, 32)]
    strides = [1, _field(g1, 160, 48), _field(g1, 208, 48)]
    if gather:
        words = np.concatenate([g2, g3])
        kind = np.uint32 if wide_index else np.uint16
        rows = np.ascontiguousarray(words).view(kind)[: tile[1]].astype(np.int64)
        counts = [tile[0], len(rows)]
        index = [np.arange(tile[0]), rows]
    else:
        tile += [_field(g2, 112, 16), _field(g3, 80, 16)]
        extent += [_field(g2, 0, 32), _field(g2, 32, 32), _field(g3, 48, 32)]
        strides += [_field(g2, 64, 48), _field(g3, 0, 48)]
        rank = max((n + 1 for n in range(5) if tile[n]), default=0)
        counts = [max(t, 1) for t in tile[:rank]]
        index = [np.arange(n) for n in counts]
    at, inside = np.zeros(1, np.int64), np.ones(1, bool)
    for number, stride, size in reversed(list(zip(index, strides, extent, strict=False))):
        at = (at[:, None] + number * stride).reshape(-1)
        inside = (inside[:, None] & (number < size)).reshape(-1)
    offsets = np.arange(len(at), dtype=np.int64) * element
    if load and _field(g1, 20, 1):
        interval = 4 << (_field(g1, 22, 3) + 1)
        offsets += offsets // interval * (4 * (_field(g1, 25, 7) + 1))
    return Transfer(element, base + at * element, lds + offsets, inside)


def _widened(t: Transfer, wide: int) -> Transfer:
    """The same in units of ``wide`` bytes where every unit is contiguous and of one kind."""
    ratio = wide // t.element
    if ratio < 2 or len(t.addresses) % ratio:
        return t
    at, to, ok = (x.reshape(-1, ratio) for x in (t.addresses, t.offsets, t.inside))
    step = np.arange(ratio) * t.element
    same = (at == at[:, :1] + step).all() and (to == to[:, :1] + step).all()
    if not same or (ok != ok[:, :1]).any():
        return t
    return Transfer(wide, at[:, 0], to[:, 0], ok[:, 0])


def _run(s: Batch, wave: int, groups: list[np.ndarray], load: bool) -> None:
    grid, owner = s.group.grid, int(s.wave_owner[wave])
    place = int(grid.cluster_of(s.group.ids[owner : owner + 1])[1][0])
    try:
        found = read_descriptor(groups, load, place)
        if found is None:
            return
        t = _widened(found, 16)
        t = _widened(found, 4) if t is found else t
        owners = np.full(len(t.offsets), owner)
        stats = s.group.stats
        if load:
            data = np.zeros((len(t.offsets), t.element), np.uint8)
            if t.inside.any():
                data[t.inside] = s.group.memory.load(t.addresses[t.inside], t.element)
            s.group.lds.store(owners, t.offsets, data)
            grid.changes += 1
            stats.read_bytes += int(t.inside.sum()) * t.element
            stats.lds_write_bytes += data.size
        elif t.inside.any():
            keep = t.inside
            data = s.group.lds.load(owners[keep], t.offsets[keep], t.element)
            s.group.memory.store(t.addresses[keep], data)
            stats.write_bytes += data.size
            stats.lds_read_bytes += data.size
    except MemoryFault as fault:
        fault.lane = wave * s.width
        raise


@handles("rocdl.tensor.load.to.lds", "rocdl.tensor.store.from.lds")
def tensor_transfer(d: Decoder, inst: Inst) -> Run:
    """One transfer a wave, whatever its lanes' mask; descriptors are wave-uniform."""
    load = "load" in inst.name
    args = inst.args[:5]

    def run(v: list, s: object) -> None:
        first = s.first_active()
        groups = [s.spread(v[a])[first] for a in args]

        def land(lanes: np.ndarray) -> None:
            for wave in np.flatnonzero(lanes.reshape(s.count, s.width).any(axis=1)):
                _run(s, int(wave), [g[wave] for g in groups], load)

        s.copies.issue("tensor", land)

    return run


@handles("rocdl.global.load.async.to.lds.*", "rocdl.cluster.load.async.to.lds.*")
def async_to_lds(d: Decoder, inst: Inst) -> Run:
    """Every lane copies to its own LDS address. A cluster mask only merges equal requests."""
    source, target = inst.args[:2]
    size = int(inst.name.rsplit("b", 1)[1]) // 8
    offset, where = int(inst.attrs.get("offset", 0)), inst.where

    def run(v: list, s: object) -> None:
        at, to = s.spread(v[source]) + offset, s.spread(v[target]) + offset

        def land(lanes: np.ndarray) -> None:
            s.store(3, to, s.load(1, at, size, where))

        s.copies.issue("async", land)

    return run


@handles("rocdl.global.store.async.from.lds.*")
def async_from_lds(d: Decoder, inst: Inst) -> Run:
    target, source = inst.args[:2]
    size = int(inst.name.rsplit("b", 1)[1]) // 8
    offset = int(inst.attrs.get("offset", 0))

    def run(v: list, s: object) -> None:
        to, at = s.spread(v[target]) + offset, s.spread(v[source]) + offset

        def land(lanes: np.ndarray) -> None:
            s.store(1, to, s.load(3, at, size))

        s.copies.issue("async", land)

    return run
