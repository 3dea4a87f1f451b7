"""From a kernel name and a request to the build keys of the MX stages.

A name is a set of parameters of one pair of kernels. What a parameter becomes:

    tile m x n x k   the workgroup's tile. n counts output columns, in stage 1 with interleaved
                     gate and up weight rows, two for each column. Halved, or 128 for n of
                     stage 1, where the shape is no multiple of it.
    w                waves a SIMD, as far as the tile's registers allow without copies; often none
    bnt              cache policy of the weight loads
    xcd              row blocks that a die's consecutive workgroups walk over
    kw               groups of waves that split K
    fp4, fp8         stage 1 quantises its own result; otherwise a launch of its own does
    sbm              no effect: the sort block is the row's block_m
    persist, cumul   the size of stage 2's grid, which is no part of its code
    async            no effect: activations always arrive by asynchronous copies

Each function raises NotImplementedError with the reason where the kernels cannot serve the
request with that name.
"""

from __future__ import annotations

from aiter.ops.enum import ActivationType, GateMode, QuantType
from aiter.ops.flydsl.kernel_names import Moe1Name, Moe2Name
from aiter.ops.flydsl.kernels.moe_stage1 import Stage1Key
from aiter.ops.flydsl.kernels.moe_stage2 import Stage2Key
from aiter.ops.flydsl.kernels.mx_gemm import CHUNK, FORMATS, LANES, MxTile

from .request import FP4, FP8, MoeRequest
from .sizes import stage2_epilogue

_FORMAT = {FP4: "fp4", FP8: "fp8"}
_ACTIVATION = {ActivationType.Silu: "silu"}


def unsupported(request: MoeRequest) -> str | None:
    """Why the MX kernels cannot serve `request` at all, None if they can."""
    checks = (
        (request.target.gfx == "gfx950", f"no MX kernels for {request.target.gfx}"),
        (request.quant_type == QuantType.per_1x32, f"no kernels for {request.quant_type.cell}"),
        (
            (request.a_dtype, request.w_dtype) == (FP8, FP4),
            f"no kernels for {request.a_dtype} activations with {request.w_dtype} weights",
        ),
        (request.dtype == "bfloat16", f"no kernels with {request.dtype} output"),
        (request.activation in _ACTIVATION, f"no kernels for {request.activation.cell}"),
        (request.use_g1u1, "w1 has no up half"),
        (request.shuffled, "the weights are not shuffled"),
        (not request.doweight_stage1, "route weights in stage 1 are not supported"),
        (request.caller.bias == "none", "expert biases are not supported"),
        (not request.expert_parallel, "expert masks are not supported"),
        (not (request.hidden_pad or request.intermediate_pad), "padding is not supported"),
        (not request.given_scales, "activations quantised by the caller are not supported"),
        (
            request.caller.gate_mode != GateMode.MOCK_GATE_ONLY,
            "gate-only weights are not supported",
        ),
        (request.model_dim % 256 == 0, f"model_dim {request.model_dim} is no multiple of 256"),
        (request.inter_dim % 128 == 0, f"inter_dim {request.inter_dim} is no multiple of 128"),
    )
    return next((reason for good, reason in checks if not good), None)


def _check_formats(request: MoeRequest, name: Moe1Name | Moe2Name) -> None:
    if (name.a_dtype, name.w_dtype) != (_FORMAT[request.a_dtype], _FORMAT[request.w_dtype]):
        raise NotImplementedError(
            f"the kernel is for {name.a_dtype} activations with {name.w_dtype} weights"
        )


def _waves(tile_m: int, a_row_bytes: int, rows: int, least_rows: int) -> int:
    """Waves that share a tile's weight rows.

    64 rows each, which reuse an activation operand four times and leave room for 128 activation
    rows in registers. Down to `least_rows` where a wave would make more than eight loads of the
    activation tile, whose addresses fill the scalar registers; more rows where the tile would
    not be a whole load of every wave.
    """
    loads = tile_m * a_row_bytes // (CHUNK * LANES)
    waves = max(1, rows // 64, min(loads // 8, rows // least_rows))
    while rows % (waves * 32) or loads % waves:
        waves -= 1
    return waves


def stage1_key(request: MoeRequest, name: Moe1Name, block_m: int) -> Stage1Key:
    """The build key of stage 1 with the parameters of `name` and sort blocks of `block_m`."""
    _check_formats(request, name)
    if name.gate_mode != request.caller.gate_mode:
        raise NotImplementedError(
            f"the kernel reads {name.gate_mode.value} weights, they are "
            f"{request.caller.gate_mode.value}"
        )
    if name.k_batch != 1:
        raise NotImplementedError("a grid split of K is not supported")
    interleaved = name.gate_mode == GateMode.INTERLEAVE
    columns = name.tile_n // 2 if interleaved else name.tile_n
    if columns % 32:
        raise NotImplementedError(f"{columns} columns are no whole scale blocks")
    if request.inter_dim % columns:
        columns = 128
    tile_k = name.tile_k
    if block_m % name.tile_m or request.inter_dim % columns:
        raise NotImplementedError(
            f"tile {name.tile_m}x{columns} does not divide blocks of {block_m} rows by "
            f"inter_dim {request.inter_dim}"
        )
    if request.model_dim % (tile_k * name.k_wave):
        raise NotImplementedError(
            f"model_dim {request.model_dim} does not split into {name.k_wave} parts of whole "
            f"steps of {tile_k}"
        )
    a = FORMATS[name.a_dtype]
    tile = MxTile(
        a_format=name.a_dtype,
        w_format=name.w_dtype,
        tile_m=name.tile_m,
        rows=2 * columns,
        tile_k=tile_k,
        n_waves=_waves(name.tile_m, a.row_bytes(tile_k), 2 * columns, 64),
        k_waves=name.k_wave,
        pairing="rows" if interleaved else "halves",
    )
    return Stage1Key(
        model_dim=request.model_dim,
        inter_dim=request.inter_dim,
        tile=tile,
        sort_block_m=block_m,
        activation=_ACTIVATION[request.activation],
        requant=name.requant,
        w_cache=name.b_nt,
        xcd_group=name.xcd_swizzle,
        waves_per_eu=tile.waves_per_eu(name.waves_per_eu),
    )


def stage2_key(request: MoeRequest, name: Moe2Name, block_m: int) -> Stage2Key:
    """The build key of stage 2 with the parameters of `name` and sort blocks of `block_m`."""
    _check_formats(request, name)
    tile_k = name.tile_k if request.inter_dim % name.tile_k == 0 else 128
    if block_m % name.tile_m or request.model_dim % name.tile_n or name.tile_n % LANES:
        raise NotImplementedError(
            f"tile {name.tile_m}x{name.tile_n} does not divide blocks of {block_m} rows by "
            f"model_dim {request.model_dim}"
        )
    a = FORMATS[name.a_dtype]
    tile = MxTile(
        a_format=name.a_dtype,
        w_format=name.w_dtype,
        tile_m=name.tile_m,
        rows=name.tile_n,
        tile_k=tile_k,
        n_waves=_waves(name.tile_m, a.row_bytes(tile_k), name.tile_n, 32),
    )
    epilogue = stage2_epilogue(
        name.epilogue,
        request.tokens,
        request.topk,
        request.model_dim,
        request.policy.force_reduce,
    )
    return Stage2Key(
        model_dim=request.model_dim,
        inter_dim=request.inter_dim,
        topk=request.topk,
        tile=tile,
        sort_block_m=block_m,
        epilogue=epilogue,
        weighted=not request.doweight_stage1,
        w_cache=name.b_nt,
        xcd_group=name.xcd_swizzle,
        waves_per_eu=tile.waves_per_eu(name.waves_per_eu),
    )
