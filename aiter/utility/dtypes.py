"""Element types by the names tables and callers use.

Sub-byte types come packed: ``fp4x2`` holds two e2m1 values in a byte and ``i4x2`` two int4
values, so a last dimension counts packed units. ``fp8_e8m0`` is the scale type of MX blocks.
"""

from __future__ import annotations

import torch

from aiter.jit.utils.chip_info import Target, get_target

fp64 = torch.float64
fp32 = torch.float32
fp16 = torch.float16
bf16 = torch.bfloat16
i64 = torch.int64
i32 = torch.int32
i16 = torch.int16
i8 = torch.int8
u32 = torch.uint32
u8 = torch.uint8
fp8_e4m3fn = torch.float8_e4m3fn
fp8_e4m3fnuz = torch.float8_e4m3fnuz
fp8_e8m0 = torch.float8_e8m0fnu
fp4x2 = torch.float4_e2m1fn_x2
# torch has no packed int4 for tensors; a byte holds two.
i4x2 = torch.uint8


def fp8(target: Target | None = None) -> torch.dtype:
    """The fp8 type of ``target``'s matrix units: e4m3fnuz on gfx942, e4m3fn elsewhere.

    None stands for :func:`aiter.jit.utils.chip_info.get_target`.
    """
    gfx = (target or get_target()).gfx
    return fp8_e4m3fnuz if gfx == "gfx942" else fp8_e4m3fn


_TORCH = [fp64, fp32, fp16, bf16, i64, i32, i16, i8, u32, u8, fp8_e4m3fn, fp8_e4m3fnuz]

_BY_NAME: dict[str, torch.dtype] = {
    **{str(dtype).removeprefix("torch."): dtype for dtype in [*_TORCH, fp8_e8m0, fp4x2]},
    "bf16": bf16,
    "fp16": fp16,
    "fp32": fp32,
    "fp4x2": fp4x2,
    "fp8_e8m0": fp8_e8m0,
    "i4x2": i4x2,
    "int4": i4x2,
}


def parse(cell: str) -> torch.dtype:
    """The dtype a table cell names, e.g. ``torch.float8_e4m3fn``; the prefix is optional.

    ``torch.int4`` gives ``i4x2``. Raises ValueError naming the cell.
    """
    name = cell.strip().removeprefix("torch.")
    try:
        return _BY_NAME[name]
    except KeyError:
        known = ", ".join(sorted(_BY_NAME))
        raise ValueError(f"{cell!r} is not a dtype this project knows: {known}") from None
