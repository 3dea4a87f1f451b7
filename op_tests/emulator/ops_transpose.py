"""Transposing LDS reads: ds_read_tr of gfx950 and ds_load_tr of gfx1250.

Lanes load rows of a small matrix with 16 columns and receive columns. Rows lie one after another
in lane order; 16-bit elements need 4 (gfx950, 8 bytes a lane) or 2 (gfx1250, 16 bytes) lanes a row.
Column ``l % 16`` goes to lane l. On gfx950 each 16 lanes hold a matrix of their own; on gfx1250 the
32 lanes hold one, and lane l gets its upper rows when ``l >= 16``.
"""

from __future__ import annotations

import re

import numpy as np

from .code import Decoder, Run, handles
from .formats import pack, unpack
from .lltypes import from_bytes
from .program import Inst


def transpose_sources(bits: int, elements: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """For lane l and result element j: the lane that loaded it and its place there."""
    lane = np.arange(width)[:, None]
    place = np.arange(elements)[None, :]
    column = lane % 16
    lanes_a_row = 16 // elements if elements < 16 else 1
    if width == 64:
        base, row = lane & ~15, place
    else:
        base, row = 0, (lane // 16) * elements + place
    source = base + row * lanes_a_row + column // elements
    return np.broadcast_to(source, (width, elements)), np.broadcast_to(
        column % elements, (width, elements)
    )


@handles("rocdl.ds.read.tr*", "rocdl.ds.load.tr*")
def transpose_load(d: Decoder, inst: Inst) -> Run:
    bits, total = (int(n) for n in re.search(r"tr(\d+)\.b(\d+)", inst.name).groups())
    p, r, kind = inst.args[0], inst.results[0], inst.result_types[0]
    size, elements = total // 8, total // bits
    source, place = transpose_sources(bits, elements, d.width)

    def run(v: list, s: object) -> None:
        raw = s.load(3, v[p], size)
        codes = np.ascontiguousarray(raw).view(np.uint16) if bits == 16 else unpack(raw, bits)
        rows = codes.reshape(s.count, s.width, elements)
        picked = rows[:, source, place].reshape(s.n, elements)
        data = np.ascontiguousarray(picked)
        data = data.view(np.uint8) if bits == 16 else pack(data, bits)
        v[r] = from_bytes(np.ascontiguousarray(data), kind)

    return run
