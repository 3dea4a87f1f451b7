"""From a kernel name and a request to the build keys of the MX stages.

A name is a set of parameters of one pair of kernels, whatever its family: `stage1_name` and
`stage2_name` bring every family to the parameters of the generic one. What they become:

    tile m x n x k   the workgroup's tile. n counts output columns, in stage 1 with interleaved
                     gate and up weight rows, two for each column. 128 columns, or 128 of k, where
                     the shape is no multiple of it; 128 columns in stage 1 where gate and
                     up of more would not fit the registers.
    w                waves a SIMD, as far as the tile's registers allow without copies; often none
    bnt, nt          cache policy of the weight loads
    xcd              row blocks that a die's consecutive workgroups walk over
    kw               groups of waves that split K
    kb               workgroups that split K; go: each takes rows of gate or of up only
    fp4, fp8         stage 1 quantises its own result; otherwise a launch of its own does, but
                     for bf16 activations, which nothing quantises
    persist, cumul   the size of stage 2's grid, which is no part of its code

and what has no effect, as `ignored` says of a name:

    sbm              the sort block is the row's block_m
    async            activations always arrive by asynchronous copies
    f16in            activations are quantised, and routes sorted, by launches of their own
    f4out, cshuffle  route rows are bf16, staged in LDS
    bf16lds, sp      output tiles are always staged as bf16; xcd orders workgroups

Each key function raises NotImplementedError with the reason where the kernels cannot serve the
request with that name.
"""

from __future__ import annotations

from typing import Any, TypeVar

from aiter.ops.enum import ActivationType, GateMode, QuantType
from aiter.ops.flydsl.kernel_names import (
    KernelName,
    Moe1Name,
    Moe2LayoutName,
    Moe2Name,
    MxmoeG1Name,
    MxmoeG2Name,
)
from aiter.ops.flydsl.kernels.device import CHUNK, LANES
from aiter.ops.flydsl.kernels.moe_activate import ActivateKey
from aiter.ops.flydsl.kernels.moe_sort import MAX_EXPERTS
from aiter.ops.flydsl.kernels.moe_stage1 import Stage1Key
from aiter.ops.flydsl.kernels.moe_stage2 import Stage2Key
from aiter.ops.flydsl.kernels.mx_tile import FORMATS, MxTile

from .request import BF16, FP4, FP8, MoeRequest
from .sizes import stage2_epilogue

T = TypeVar("T")

FORMAT = {FP4: "fp4", FP8: "fp8", BF16: "bf16"}
_FLAVOURS = ((FP4, FP4), (FP8, FP4), (FP8, FP8), (BF16, FP4))  # activations, weights
# bf16 of the 16 bytes that stage 1 fetches or leaves out.
_PAD_UNIT = CHUNK // 2
# Stage 1's outputs of a workgroup whose gate and up accumulators fit four waves' registers.
_MOST_OUTPUTS = 128 * 128
_ACTIVATION = {
    ActivationType.Silu: "silu",
    ActivationType.Gelu: "gelu",
    ActivationType.Swiglu: "swiglu",
    ActivationType.Situv2: "situv2",
}


def unsupported(request: MoeRequest) -> str | None:
    """Why the MX kernels cannot serve `request` at all, None if they can."""
    checks = (
        (request.target.gfx == "gfx950", f"no MX kernels for {request.target.gfx}"),
        (request.quant_type == QuantType.per_1x32, f"no kernels for {request.quant_type.cell}"),
        (
            (request.a_dtype, request.w_dtype) in _FLAVOURS,
            f"no kernels for {request.a_dtype} activations with {request.w_dtype} weights",
        ),
        (request.dtype == "bfloat16", f"no kernels with {request.dtype} output"),
        (request.activation in _ACTIVATION, f"no kernels for {request.activation.cell}"),
        (request.use_g1u1, "w1 has no up half"),
        (request.shuffled, "the weights are not shuffled"),
        (request.caller.bias in ("none", "both", "stage1"), "a bias on stage 2 alone"),
        (not request.given_scales, "activations quantised by the caller are not supported"),
        (
            request.caller.gate_mode != GateMode.MOCK_GATE_ONLY,
            "gate-only weights are not supported",
        ),
        (
            request.experts <= MAX_EXPERTS,
            f"{request.experts} experts, the sort takes {MAX_EXPERTS}",
        ),
        (1 <= request.topk <= 17, f"top-{request.topk}"),
        (request.model_dim % 256 == 0, f"model_dim {request.model_dim} is no multiple of 256"),
        (request.inter_dim % 128 == 0, f"inter_dim {request.inter_dim} is no multiple of 128"),
        (
            0 <= request.hidden_pad < request.model_dim
            and 0 <= request.intermediate_pad < request.inter_dim,
            "padding beyond the dimension",
        ),
        (
            request.a_dtype != BF16 or request.hidden_pad % _PAD_UNIT == 0,
            f"bf16 activations padded by {request.hidden_pad} columns, no multiple of {_PAD_UNIT}",
        ),
    )
    return next((reason for good, reason in checks if not good), None)


def stage1_name(name: KernelName, request: MoeRequest) -> Moe1Name:
    """The generic parameters of a stage 1 name of any family."""
    if isinstance(name, Moe1Name):
        return name
    if not isinstance(name, MxmoeG1Name):
        raise NotImplementedError(f"{type(name).__name__} is no stage 1 of the MX kernels")
    interleaved = request.caller.gate_mode == GateMode.INTERLEAVE
    return Moe1Name(
        a_dtype=name.a_dtype,
        w_dtype="fp4",
        out_dtype="bf16",
        tile_m=name.tile_m,
        # These names count weight rows, gate and up together.
        tile_n=name.tile_n if interleaved else name.tile_n // 2,
        tile_k=name.tile_k,
        b_nt=2 if name.nt else 0,
        gate_mode=request.caller.gate_mode,
        xcd_swizzle=name.xcd_swizzle,
        requant=name.a_dtype,
    )


def stage2_name(name: KernelName) -> Moe2Name:
    """The generic parameters of a stage 2 name of any family."""
    if isinstance(name, Moe2Name):
        return name
    if isinstance(name, MxmoeG2Name):
        w_dtype, epilogue, persist = "fp4", name.epilogue, False
    elif isinstance(name, Moe2LayoutName):
        w_dtype, epilogue, persist = name.w_dtype, name.epilogue, name.persist
    else:
        raise NotImplementedError(f"{type(name).__name__} is no stage 2 of the MX kernels")
    return Moe2Name(
        a_dtype=name.a_dtype,
        w_dtype=w_dtype,
        out_dtype="bf16",
        tile_m=name.tile_m,
        tile_n=name.tile_n,
        tile_k=name.tile_k,
        epilogue="atomic" if epilogue == "atomic" else "reduce",
        b_nt=2 if name.nt else 0,
        persist=persist,
    )


def ignored(name: KernelName) -> tuple[str, ...]:
    """The parameters of `name` that have no effect here, in words."""
    said = {
        "sort_block_m": "sbm: the sort block is the row's block_m",
        "async_copy": "async: activations always arrive by asynchronous copies",
        "inline_quant": "f16in: activations are quantised by a launch of their own",
        "bf16_lds": "bf16lds: output tiles are always staged as bf16",
        "spatial_partition": "sp: workgroups are not ordered by partitions",
    }
    notes = [text for field, text in said.items() if getattr(name, field, None)]
    if getattr(name, "epilogue", "") in ("f4out", "cshuffle"):
        notes.append(f"{name.epilogue}: route rows are bf16, staged in LDS")
    return tuple(notes)


def _check_formats(request: MoeRequest, name: Moe1Name | Moe2Name) -> None:
    if (name.a_dtype, name.w_dtype) != (FORMAT[request.a_dtype], FORMAT[request.w_dtype]):
        raise NotImplementedError(
            f"the kernel is for {name.a_dtype} activations with {name.w_dtype} weights"
        )


def _waves(tile_m: int, a_row_bytes: int, rows: int, least_rows: int, unit: int) -> int:
    """Waves that share a tile's weight rows.

    64 rows each, which reuse an activation operand four times and leave room for 128 activation
    rows in registers. Down to `least_rows` and four waves where one would make more than four
    loads of the activation tile, whose addresses fill the scalar registers, or hold 128 rows of
    it; more rows where the tile would not be a whole load of every wave, or a wave would not have
    a multiple of `unit` rows.
    """
    loads = tile_m * a_row_bytes // (CHUNK * LANES)
    waves = max(1, rows // 64, min(max(loads // 4, tile_m // 32), rows // least_rows, 4))
    while waves > 1 and (rows % (waves * unit) or loads % waves):
        waves -= 1
    return waves


def _served(kind: type[T], **fields: Any) -> T:
    """A tile or key of `kind`; what it refuses cannot be served."""
    try:
        return kind(**fields)
    except ValueError as error:
        raise NotImplementedError(str(error)) from None


def stage1_key(request: MoeRequest, any_name: KernelName, block_m: int) -> Stage1Key:
    """The build key of stage 1 with the parameters of a name and sort blocks of `block_m`."""
    name = stage1_name(any_name, request)
    _check_formats(request, name)
    split = name.k_batch > 1
    apart = split and name.gate_mode == GateMode.MOCK_GATE_ONLY
    layout = GateMode.SEPARATED if apart else name.gate_mode
    if layout != request.caller.gate_mode:
        raise NotImplementedError(
            f"the kernel reads {layout.value} weights, they are {request.caller.gate_mode.value}"
        )
    interleaved = layout == GateMode.INTERLEAVE
    columns = name.tile_n // 2 if interleaved else name.tile_n
    if columns == 0 or columns % 32:
        raise NotImplementedError(f"{columns} columns are no whole scale blocks")
    if request.inter_dim % columns or name.tile_m * columns > _MOST_OUTPUTS:
        columns = 128
    if block_m % name.tile_m or request.inter_dim % columns:
        raise NotImplementedError(
            f"tile {name.tile_m}x{columns} does not divide blocks of {block_m} rows by "
            f"inter_dim {request.inter_dim}"
        )
    parts = name.k_wave * name.k_batch
    if request.model_dim % (name.tile_k * parts):
        raise NotImplementedError(
            f"model_dim {request.model_dim} does not split into {parts} parts of whole steps of "
            f"{name.tile_k}"
        )
    rows = columns if apart else 2 * columns
    a_row_bytes = FORMATS[name.a_dtype].row_bytes(name.tile_k)
    tile = _served(
        MxTile,
        a_format=name.a_dtype,
        w_format=name.w_dtype,
        tile_m=name.tile_m,
        rows=rows,
        tile_k=name.tile_k,
        n_waves=_waves(name.tile_m, a_row_bytes, rows, 64, 32 if apart else 64),
        k_waves=name.k_wave,
        pairing="apart" if apart else "rows" if interleaved else "halves",
    )
    return _served(
        Stage1Key,
        model_dim=request.model_dim,
        inter_dim=request.inter_dim,
        tile=tile,
        sort_block_m=block_m,
        # Where K is split, these are `activate_key`'s.
        activation="none" if split else _ACTIVATION[request.activation],
        bias=request.caller.bias != "none" and not split,
        weighted=request.doweight_stage1 and not split,
        requant=None if split else name.requant,
        k_batch=name.k_batch,
        w_cache=name.b_nt,
        xcd_group=name.xcd_swizzle,
        waves_per_eu=tile.waves_per_eu(name.waves_per_eu),
    )


def activate_key(request: MoeRequest, stage1: Stage1Key) -> ActivateKey | None:
    """What finishes a stage 1 whose K is split over workgroups; None for others."""
    if stage1.k_batch == 1:
        return None
    return ActivateKey(
        inter_dim=request.inter_dim,
        k_batch=stage1.k_batch,
        sort_block_m=stage1.sort_block_m,
        activation=_ACTIVATION[request.activation],
        bias=request.caller.bias != "none",
        weighted=request.doweight_stage1,
        requant=None if stage1.tile.widened else stage1.tile.a_format,
    )


def stage2_key(request: MoeRequest, any_name: KernelName, block_m: int) -> Stage2Key:
    """The build key of stage 2 with the parameters of a name and sort blocks of `block_m`."""
    name = stage2_name(any_name)
    _check_formats(request, name)
    tile_k = name.tile_k if request.inter_dim % name.tile_k == 0 else 128
    if block_m % name.tile_m or request.model_dim % name.tile_n:
        raise NotImplementedError(
            f"tile {name.tile_m}x{name.tile_n} does not divide blocks of {block_m} rows by "
            f"model_dim {request.model_dim}"
        )
    a_row_bytes = FORMATS[name.a_dtype].row_bytes(tile_k)
    tile = _served(
        MxTile,
        a_format=name.a_dtype,
        w_format=name.w_dtype,
        tile_m=name.tile_m,
        rows=name.tile_n,
        tile_k=tile_k,
        n_waves=_waves(name.tile_m, a_row_bytes, name.tile_n, 32, 32),
    )
    epilogue = stage2_epilogue(
        name.epilogue,
        request.tokens,
        request.topk,
        request.model_dim,
        request.policy.force_reduce,
    )
    return _served(
        Stage2Key,
        model_dim=request.model_dim,
        inter_dim=request.inter_dim,
        topk=request.topk if epilogue == "reduce" else 0,
        tile=tile,
        sort_block_m=block_m,
        epilogue=epilogue,
        bias=request.caller.bias == "both",
        weighted=not request.doweight_stage1,
        w_cache=name.b_nt,
        xcd_group=name.xcd_swizzle,
        waves_per_eu=tile.waves_per_eu(name.waves_per_eu),
    )
