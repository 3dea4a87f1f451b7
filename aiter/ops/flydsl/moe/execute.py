"""Run a plan: allocate what lies between the launches and make them in order."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aiter.ops.flydsl.kernels.moe_activate import build_activate
from aiter.ops.flydsl.kernels.moe_reduce import build_reduce
from aiter.ops.flydsl.kernels.moe_sort import build_sort
from aiter.ops.flydsl.kernels.moe_stage1 import build_stage1
from aiter.ops.flydsl.kernels.moe_stage2 import build_stage2
from aiter.ops.flydsl.kernels.mx_quant_rows import build_quant_rows
from aiter.ops.flydsl.kernels.mx_tile import FORMATS
from aiter.ops.flydsl.kernels.tensor_shim import _run_compiled

from .request import MoeRequest
from .selection import Plan
from .sizes import scale_words, sort_chunks
from .tensors import MoeTensors

_ZERO_BYTES = 16  # what the sort's zeroing stores at once


@dataclass(frozen=True)
class Scalars:
    """Runtime scalars of the activation: its clamp, infinite for none, and situv2's betas."""

    limit: float
    beta: float
    linear_beta: float


@dataclass(frozen=True)
class _Sorted:
    ids: torch.Tensor
    weights: torch.Tensor
    experts: torch.Tensor
    num_valid: torch.Tensor
    route_rows: torch.Tensor


def execute(plan: Plan, request: MoeRequest, tensors: MoeTensors, scalars: Scalars) -> torch.Tensor:
    """The result [M, D] bf16 of `plan` on `tensors`, on the current stream of their device."""
    x = tensors.x
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else None
    tokens, device = request.tokens, x.device
    out = torch.empty(tokens, request.model_dim, dtype=torch.bfloat16, device=device)
    if tokens == 0:
        return out
    routes = _sort(plan, request, tensors, out, stream)

    stage1, stage2 = plan.stage1, plan.stage2
    used = request.model_dim - request.hidden_pad
    rows, scale = x, None
    if plan.quant is not None:
        rows = _bytes(tokens, FORMATS[plan.quant.fmt].row_bytes(request.model_dim), device)
        scale = _scales(plan.capacity, request.model_dim, device)
        _run_compiled(
            build_quant_rows(plan.quant),
            rows,
            scale,
            x,
            routes.route_rows,
            tokens,
            used,
            stream,
        )
    hidden, hidden_scale = _bytes(plan.capacity, stage1.out_row_bytes, device), None
    if not stage2.tile.widened:
        hidden_scale = _scales(plan.capacity, request.inter_dim, device)
    _run_compiled(
        build_stage1(stage1),
        hidden,
        hidden_scale,
        rows,
        tensors.w1,
        scale,
        tensors.w1_scale,
        routes.ids,
        routes.experts,
        routes.weights,
        routes.num_valid,
        tensors.bias1 if stage1.bias else None,
        tokens,
        used,
        plan.stage1_groups,
        scalars.limit,
        scalars.beta,
        scalars.linear_beta,
        stream,
    )
    if plan.activate is not None:
        products = hidden
        hidden = _bytes(plan.capacity, plan.activate.out_row_bytes, device)
        _run_compiled(
            build_activate(plan.activate),
            hidden,
            hidden_scale,
            products,
            routes.experts,
            routes.weights,
            routes.num_valid,
            tensors.bias1 if plan.activate.bias else None,
            plan.capacity,
            scalars.limit,
            scalars.beta,
            scalars.linear_beta,
            stream,
        )
    if plan.requant is not None:
        rows = _bytes(plan.capacity, FORMATS[plan.requant.fmt].row_bytes(request.inter_dim), device)
        _run_compiled(
            build_quant_rows(plan.requant),
            rows,
            hidden_scale,
            hidden,
            routes.num_valid,
            plan.capacity,
            request.inter_dim - request.intermediate_pad,
            stream,
        )
        hidden = rows
    target = out
    if plan.reduce is not None:
        target = torch.empty(
            tokens * request.topk, request.model_dim, dtype=torch.bfloat16, device=device
        )
    _run_compiled(
        build_stage2(stage2),
        target,
        hidden,
        tensors.w2,
        hidden_scale,
        tensors.w2_scale,
        routes.ids,
        routes.experts,
        routes.weights,
        routes.num_valid,
        tensors.bias2 if stage2.bias else None,
        tokens,
        plan.stage2_groups,
        stream,
    )
    if plan.reduce is not None:
        _run_compiled(build_reduce(plan.reduce), out, target, routes.route_rows, tokens, stream)
    return out


def _sort(
    plan: Plan, request: MoeRequest, tensors: MoeTensors, out: torch.Tensor, stream: int | None
) -> _Sorted:
    """Sort the routes; where stage 2 accumulates, clear `out` along the way."""
    device = out.device
    ints = {"dtype": torch.int32, "device": device}
    routes = request.tokens * request.topk
    chunks = sort_chunks(request.tokens, request.topk)
    result = _Sorted(
        ids=torch.empty(plan.capacity, **ints),
        weights=torch.empty(plan.capacity, dtype=torch.float32, device=device),
        experts=torch.empty(plan.capacity // plan.stage1.sort_block_m, **ints),
        num_valid=torch.empty(2, **ints),
        route_rows=torch.empty(routes, **ints),
    )
    counts = torch.empty(chunks * plan.sort[0].threads, **ints) if chunks > 1 else None
    zero = out if plan.reduce is None else None
    mask = tensors.expert_mask
    for key in plan.sort:
        _run_compiled(
            build_sort(key),
            tensors.topk_ids,
            tensors.topk_weights,
            result.ids,
            result.weights,
            result.experts,
            result.num_valid,
            result.route_rows,
            counts,
            tensors.num_local_tokens,
            mask,
            zero,
            request.tokens,
            chunks,
            mask.shape[0] if mask is not None else 0,
            request.experts,
            request.tokens * request.model_dim * 2 // _ZERO_BYTES if zero is not None else 0,
            stream,
        )
    return result


def _bytes(rows: int, row_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(rows, row_bytes, dtype=torch.uint8, device=device)


def _scales(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.empty(scale_words(rows, columns), dtype=torch.int32, device=device)
