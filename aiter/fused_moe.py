"""Fused mixture of experts: every token through its top-k experts' gated two-layer network.

    out[t] = sum over slots s of weight[t, s] * (act(x[t] @ W1[e]^T) @ W2[e]^T), e = ids[t, s]

`fused_moe` is the public entry. It calls the custom operator `fused_moe_`, one node for
torch.compile, whose body is `_fused_moe_impl`: plain Python that turns the call into a
`MoeRequest`, the request into a `Plan` and the plan into launches. The ahead-of-time build
calls `_fused_moe_impl` on FakeTensors and records the launches.
"""

from __future__ import annotations

import functools
import math

import torch

from aiter import env
from aiter.jit.core import AITER_CONFIGS, load_fmoe
from aiter.jit.utils.chip_info import get_target
from aiter.jit.utils.torch_guard import torch_compile_guard
from aiter.ops.enum import ActivationType, GateMode, QuantType
from aiter.ops.flydsl.moe.execute import Scalars, execute
from aiter.ops.flydsl.moe.request import CallerVariant, request_of
from aiter.ops.flydsl.moe.selection import Selector
from aiter.ops.flydsl.moe.tensors import checked_tensors
from aiter.ops.flydsl.moe.tiers import get_padded_M

__all__ = ["fused_moe", "get_padded_M"]

SWIGLU_LIMIT = 7.0


def fused_moe(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_mask: torch.Tensor | None = None,
    activation: ActivationType = ActivationType.Silu,
    quant_type: QuantType = QuantType.No,
    doweight_stage1: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_size_M: int | None = None,
    num_local_tokens: torch.Tensor | None = None,
    moe_sorting_dispatch_policy: int = 0,
    dtype: torch.dtype | None = None,
    hidden_pad: int = 0,
    intermediate_pad: int = 0,
    bias1: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    splitk: int = 0,
    swiglu_limit: float | None = None,
    beta: float | None = None,
    linear_beta: float | None = None,
    gate_mode: str = "separated",
    shared_w1: torch.Tensor | None = None,
    shared_w2: torch.Tensor | None = None,
    shared_w1_scale: torch.Tensor | None = None,
    shared_w2_scale: torch.Tensor | None = None,
    shared_expert_id: int = -1,
    stage2_scatter: object | None = None,
    quant_dtype_a: torch.dtype | None = None,
) -> torch.Tensor:
    """Mixture of experts on one device.

    Args:
        hidden_states: [M, D] bf16.
        w1: [E, 2 I, D] gate and up rows, w2: [E, D, I], shuffled (`aiter.ops.shuffle`); 4-bit
            types count their last dimension in packed units.
        topk_weight, topk_ids: [M, k] f32 and i32; a route to an id that is no expert's adds
            nothing.
        expert_mask: [experts of all ranks] i32, 1 where the expert is of this rank.
        w1_scale, w2_scale: e8m0 block scales, shuffled, for `QuantType.per_1x32`.
        block_size_M: rows of a sort block, instead of the tuned one.
        num_local_tokens: [1] i32 on the device: only the first that many rows are real.
        dtype: of the result, default that of hidden_states.
        bias1: [E, 2 I] f32, gate and up in two halves; bias2: [E, D] f32.
        hidden_pad, intermediate_pad: columns at the end of D and I that are zero padding; of bf16
            activations hidden_pad is a multiple of 8.
        swiglu_limit: clamp of the activation's operands; None or 0 for none, for SwiGLU 7.
        beta, linear_beta: of SiTUv2; None is 1.
        gate_mode: layout of w1's rows: "separated" halves, "interleave" by 16 rows.
        quant_dtype_a: type to quantise activations to, instead of the weights' usual partner;
            bf16 for none.
        moe_sorting_dispatch_policy, splitk: accepted for callers of old; they change nothing.

    Returns [M, D] of `dtype`. Rows from num_local_tokens on are unspecified.

    Raises NotImplementedError, with the reason, for a combination no kernel serves, and
    ValueError for tensors of shapes, types or devices that do not agree, and for weights or
    scales that are not contiguous.
    """
    given = {
        "shared_w1": shared_w1,
        "shared_w2": shared_w2,
        "shared_w1_scale": shared_w1_scale,
        "shared_w2_scale": shared_w2_scale,
        "stage2_scatter": stage2_scatter,
    }
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not supported")
    return fused_moe_(
        hidden_states,
        w1,
        w2,
        topk_weight,
        topk_ids,
        expert_mask,
        int(activation),
        int(quant_type),
        doweight_stage1,
        w1_scale,
        w2_scale,
        a1_scale,
        a2_scale,
        -1 if block_size_M is None else block_size_M,
        num_local_tokens,
        dtype,
        hidden_pad,
        intermediate_pad,
        bias1,
        bias2,
        swiglu_limit,
        beta,
        linear_beta,
        GateMode(gate_mode).value,
        quant_dtype_a,
    )


def _fused_moe_fake(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_mask: torch.Tensor | None,
    activation: int,
    quant_type: int,
    doweight_stage1: bool,
    w1_scale: torch.Tensor | None,
    w2_scale: torch.Tensor | None,
    a1_scale: torch.Tensor | None,
    a2_scale: torch.Tensor | None,
    block_size_M: int,
    num_local_tokens: torch.Tensor | None,
    dtype: torch.dtype | None,
    hidden_pad: int,
    intermediate_pad: int,
    bias1: torch.Tensor | None,
    bias2: torch.Tensor | None,
    swiglu_limit: float | None,
    beta: float | None,
    linear_beta: float | None,
    gate_mode: str,
    quant_dtype_a: torch.dtype | None,
) -> torch.Tensor:
    return hidden_states.new_empty(
        hidden_states.shape[0], w2.shape[1], dtype=dtype or hidden_states.dtype
    )


@torch_compile_guard(gen_fake=_fused_moe_fake)
def fused_moe_(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_mask: torch.Tensor | None,
    activation: int,
    quant_type: int,
    doweight_stage1: bool,
    w1_scale: torch.Tensor | None,
    w2_scale: torch.Tensor | None,
    a1_scale: torch.Tensor | None,
    a2_scale: torch.Tensor | None,
    block_size_M: int,
    num_local_tokens: torch.Tensor | None,
    dtype: torch.dtype | None,
    hidden_pad: int,
    intermediate_pad: int,
    bias1: torch.Tensor | None,
    bias2: torch.Tensor | None,
    swiglu_limit: float | None,
    beta: float | None,
    linear_beta: float | None,
    gate_mode: str,
    quant_dtype_a: torch.dtype | None,
) -> torch.Tensor:
    """`fused_moe` as an operator: enums as their values, block_size_M -1 for None."""
    # A caller may hold tensors of another device than the current one.
    with torch.cuda.device_of(hidden_states):
        return _fused_moe_impl(
            hidden_states,
            w1,
            w2,
            topk_weight,
            topk_ids,
            expert_mask,
            ActivationType(activation),
            QuantType(quant_type),
            doweight_stage1,
            w1_scale,
            w2_scale,
            a1_scale,
            a2_scale,
            None if block_size_M == -1 else block_size_M,
            num_local_tokens,
            dtype=dtype,
            hidden_pad=hidden_pad,
            intermediate_pad=intermediate_pad,
            bias1=bias1,
            bias2=bias2,
            swiglu_limit=swiglu_limit,
            beta=beta,
            linear_beta=linear_beta,
            gate_mode=gate_mode,
            _q_dtype_a=quant_dtype_a,
        )


def _fused_moe_impl(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_mask: torch.Tensor | None = None,
    activation: ActivationType = ActivationType.Silu,
    quant_type: QuantType = QuantType.No,
    doweight_stage1: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_size_M: int | None = None,
    num_local_tokens: torch.Tensor | None = None,
    moe_sorting_dispatch_policy: int = 0,
    dtype: torch.dtype | None = None,
    hidden_pad: int = 0,
    intermediate_pad: int = 0,
    bias1: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    splitk: int = 0,
    swiglu_limit: float | None = None,
    beta: float | None = None,
    linear_beta: float | None = None,
    gate_mode: str = "separated",
    *,
    _q_dtype_a: torch.dtype | None = None,
) -> torch.Tensor:
    """`fused_moe` in plain Python. `_q_dtype_a` pins the type of quantised activations."""
    if bias1 is None:
        bias = "none" if bias2 is None else "stage2"
    else:
        bias = "stage1" if bias2 is None else "both"
    request = request_of(
        hidden_states,
        w1,
        w2,
        topk_ids,
        target=get_target(),
        activation=activation,
        quant_type=quant_type,
        doweight_stage1=doweight_stage1,
        dtype=dtype,
        caller=CallerVariant(
            gate_mode=GateMode(gate_mode),
            bias=bias,
            local_tokens=num_local_tokens is not None,
            expert_parallel=expert_mask is not None,
        ),
        block_m=block_size_M,
        a_dtype=_q_dtype_a,
        hidden_pad=hidden_pad,
        intermediate_pad=intermediate_pad,
        given_scales=a1_scale is not None or a2_scale is not None,
    )
    plan = _selector(env.AITER_CONFIG_FMOE.get()).plan(request)
    tensors = checked_tensors(
        request,
        x=hidden_states,
        w1=w1,
        w2=w2,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        topk_ids=topk_ids,
        topk_weights=topk_weight,
        num_local_tokens=num_local_tokens,
        expert_mask=expert_mask,
        bias1=bias1,
        bias2=bias2,
    )
    default_limit = SWIGLU_LIMIT if activation == ActivationType.Swiglu else math.inf
    scalars = Scalars(
        limit=swiglu_limit or default_limit,
        beta=1.0 if beta is None else beta,
        linear_beta=1.0 if linear_beta is None else linear_beta,
    )
    return execute(plan, request, tensors, scalars)


@functools.lru_cache(maxsize=8)
def _selector(override: tuple[str, ...]) -> Selector:
    """Plans from the tables in force, which `override` names if any; they are read once."""
    return Selector(load_fmoe(AITER_CONFIGS.fmoe))
