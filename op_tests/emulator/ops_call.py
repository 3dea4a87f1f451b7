"""Calls of the AMD device library, which the emulator needs no bitcode for."""

from __future__ import annotations

import re

import numpy as np

from .code import Decoder, Run, handles
from .ops_arith import elementwise, float_function
from .program import Inst

_OCKL = {"__ockl_get_num_groups": "grid", "__ockl_get_local_size": "block"}


@handles("llvm.call")
def call(d: Decoder, inst: Inst) -> Run:
    """Math functions and the launch geometry FlyDSL asks for."""
    name = str(inst.attrs.get("callee", "")).lstrip("@")
    if match := re.fullmatch(r"__ocml_(?:native_)?(\w+)_f(?:16|32|64)", name):
        function = float_function(match[1])
        if function is not None:
            return elementwise(inst, function)
    if name not in _OCKL:
        raise NotImplementedError(f"call of {name}")
    field, a, r = _OCKL[name], inst.args[0], inst.results[0]

    def run(v: list, s: object) -> None:
        sizes = getattr(s.group.grid.geometry, field)
        v[r] = np.array([sizes[int(v[a][0])]], np.int64)

    return run
