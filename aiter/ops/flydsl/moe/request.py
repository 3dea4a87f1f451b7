"""What the host knows of a fused-MoE call, and what of it a tuned row leaves to the caller.

`MoeRequest` is built from the call's tensors in one place and is all that selection sees.
`CALLER_DIMENSIONS` declares its caller-side fields with the values that reach other code, from
which the ahead-of-time build enumerates the callers of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from aiter import env
from aiter.jit.tuned import TunedKey, TunedRow
from aiter.jit.utils.chip_info import Target
from aiter.ops.enum import ActivationType, GateMode, QuantType
from aiter.ops.flydsl.kernel_names import Moe1Name, MxmoeG1Name, is_flydsl, parse

from .tiers import get_padded_M

FP4, FP8, BF16 = "float4_e2m1fn_x2", "float8_e4m3fn", "bfloat16"
_PACKED_FP4 = (torch.float4_e2m1fn_x2, torch.uint8)


@dataclass(frozen=True)
class Policy:
    """Environment variables that change which kernels a request gets."""

    bypass_tables: bool
    use_heuristics: bool
    force_reduce: bool

    @classmethod
    def from_env(cls) -> Policy:
        return cls(
            bypass_tables=env.AITER_BYPASS_TUNE_CONFIG.get(),
            use_heuristics=env.AITER_FLYDSL_FORCE.get(),
            force_reduce=env.AITER_FLYDSL_FORCE_REDUCE.get(),
        )


@dataclass(frozen=True)
class CallerVariant:
    """The caller's choices that a tuned row does not fix. See `CALLER_DIMENSIONS`.

    bias: "none", on "both" stages or on "stage1" only.
    local_tokens: the number of real tokens is on the device (callers behind an EP dispatch).
    expert_parallel: the caller's experts are those of a mask over all ranks'; it appends a slot
        to the top-k that no rank serves.
    """

    gate_mode: GateMode
    bias: str = "none"
    local_tokens: bool = False
    expert_parallel: bool = False

    @property
    def label(self) -> str:
        """Short text for logs: the layout and what is not the default."""
        parts = [self.gate_mode.value]
        if self.bias != "none":
            parts.append(f"bias={self.bias}")
        if self.local_tokens:
            parts.append("local_tokens")
        if self.expert_parallel:
            parts.append("expert_parallel")
        return " ".join(parts)


@dataclass(frozen=True)
class MoeRequest:
    """A call without its tensors. Dimensions count elements; dtypes are names without torch."""

    target: Target
    policy: Policy
    tokens: int
    model_dim: int
    inter_dim: int
    experts: int
    topk: int
    dtype: str
    a_dtype: str
    w_dtype: str
    activation: ActivationType
    quant_type: QuantType
    use_g1u1: bool
    doweight_stage1: bool
    shuffled: bool
    caller: CallerVariant
    block_m: int | None = None
    hidden_pad: int = 0
    intermediate_pad: int = 0
    given_scales: bool = False  # the caller quantised the activations

    def tuned_key(self) -> TunedKey:
        """The key of the row that is tuned for this request."""
        return TunedKey(
            gfx=self.target.gfx,
            cu_num=self.target.cu_num,
            token=get_padded_M(self.tokens),
            model_dim=self.model_dim,
            inter_dim=self.inter_dim,
            expert=self.experts,
            topk=self.topk - self.caller.expert_parallel,
            act_type=self.activation,
            dtype=self.dtype,
            q_dtype_a=self.a_dtype,
            q_dtype_w=self.w_dtype,
            q_type=self.quant_type,
            use_g1u1=self.use_g1u1,
            doweight_stage1=self.doweight_stage1,
        )


def _gate_modes(row: TunedRow) -> tuple[GateMode, ...]:
    """The layout its stage 1 reads, or both; where that is no FlyDSL kernel, interleaved for fp8
    activations as their loaders do, separated for others."""
    name = parse(row.kernel1) if is_flydsl(row.kernel1) else None
    if isinstance(name, MxmoeG1Name):
        return GateMode.SEPARATED, GateMode.INTERLEAVE
    fp8 = row.key.q_dtype_a == FP8
    if isinstance(name, Moe1Name):
        fp8 = name.gate_mode == GateMode.INTERLEAVE
    return (GateMode.INTERLEAVE if fp8 else GateMode.SEPARATED,)


def _bias(row: TunedRow) -> tuple[str, ...]:
    """Only SwiGLU models with fp4 weights, the GPT-OSS path, carry expert biases."""
    biased = row.key.act_type == ActivationType.Swiglu and row.key.q_dtype_w == FP4
    return ("none", "both", "stage1") if biased else ("none",)


def _local_tokens(row: TunedRow) -> tuple[bool, ...]:
    """The sort is other code when it reads the number of tokens from the device."""
    return (False, True)


def _expert_parallel(row: TunedRow) -> tuple[bool, ...]:
    """The sort and the reduction are other code with a mask, and top-k has one slot more."""
    return (False, True)


# Field of CallerVariant -> the values of it that lead to other code for a row, default first.
CALLER_DIMENSIONS: dict[str, Callable[[TunedRow], tuple]] = {
    "gate_mode": _gate_modes,
    "bias": _bias,
    "local_tokens": _local_tokens,
    "expert_parallel": _expert_parallel,
}


def caller_variants(row: TunedRow) -> tuple[CallerVariant, ...]:
    """Every caller of `row` that the declaration tells apart, the default one first."""
    names = [field.name for field in fields(CallerVariant)]
    values = (CALLER_DIMENSIONS[name](row) for name in names)
    return tuple(
        CallerVariant(**dict(zip(names, choice, strict=True)))
        for choice in itertools.product(*values)
    )


def activation_dtype(
    w_dtype: str,
    activation: ActivationType,
    gate_mode: GateMode,
    tokens: int,
    gfx: str,
    pinned: torch.dtype | None,
) -> str:
    """The type activations are quantised to, `pinned` by the caller or from the weights' type."""
    if pinned is not None:
        return FP4 if pinned == torch.uint8 else dtype_name(pinned)
    if w_dtype == "int4":
        return BF16
    if w_dtype == FP8:
        return FP8
    if w_dtype != FP4:
        return BF16
    if activation == ActivationType.Situv2:
        if env.AITER_SITUV2_A8W4.get():
            return FP8
        return FP4 if env.AITER_SITUV2_A4W4.get() else BF16
    if activation == ActivationType.Swiglu and gate_mode == GateMode.SEPARATED:
        return BF16 if tokens < env.GPTOSS_SWIGLU_MXFP4_BF16_BOUND.get() else FP4
    if activation == ActivationType.Swiglu or gate_mode == GateMode.INTERLEAVE:
        few = tokens < env.AITER_BF16_FP8_MOE_BOUND.get()
        return BF16 if gfx != "gfx950" or few else FP8
    return FP4


def dtype_name(dtype: torch.dtype) -> str:
    """`dtype` as tuned tables spell it."""
    return str(dtype).removeprefix("torch.")


def weight_dtype(w: torch.Tensor, quant_type: QuantType) -> str:
    """The element type of a weight; a byte tensor under MX scales holds fp4 pairs."""
    if w.dtype in _PACKED_FP4 and quant_type == QuantType.per_1x32:
        return FP4
    return dtype_name(w.dtype)


def request_of(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    target: Target,
    activation: ActivationType,
    quant_type: QuantType,
    doweight_stage1: bool,
    dtype: torch.dtype | None,
    caller: CallerVariant,
    block_m: int | None,
    a_dtype: torch.dtype | None,
    hidden_pad: int,
    intermediate_pad: int,
    given_scales: bool,
) -> MoeRequest:
    """The request of a call. Raises ValueError where its tensors do not agree."""
    if quant_type == QuantType.per_128x128:
        quant_type = QuantType.per_1x128
    if (hidden_states.dim(), w1.dim(), w2.dim(), topk_ids.dim()) != (2, 3, 3, 2):
        raise ValueError(
            f"hidden_states {tuple(hidden_states.shape)} and topk_ids {tuple(topk_ids.shape)} "
            f"are not of two dimensions, or w1 {tuple(w1.shape)} and w2 {tuple(w2.shape)} not of "
            "three"
        )
    tokens, model_dim = hidden_states.shape
    experts, w2_rows, w2_columns = w2.shape
    packing = model_dim // w1.shape[-1] if w1.shape[-1] else 0
    inter_dim = w2_columns * packing
    if (w1.shape[0], w2_rows) != (experts, model_dim) or packing * w1.shape[-1] != model_dim:
        raise ValueError(
            f"hidden_states {tuple(hidden_states.shape)}, w1 {tuple(w1.shape)} and w2 "
            f"{tuple(w2.shape)} do not agree on experts and model_dim"
        )
    if w1.shape[1] not in (inter_dim, 2 * inter_dim) or topk_ids.shape[0] != tokens:
        raise ValueError(
            f"w1 {tuple(w1.shape)} is neither inter_dim {inter_dim} nor twice that, or topk_ids "
            f"{tuple(topk_ids.shape)} are not of {tokens} tokens"
        )
    if block_m is not None and block_m < 1:
        raise ValueError(f"block_size_M is {block_m}, not a number of rows")
    w_dtype = weight_dtype(w1, quant_type)
    if weight_dtype(w2, quant_type) != w_dtype:
        raise ValueError(f"w1 is {w1.dtype}, w2 is {w2.dtype}")
    return MoeRequest(
        target=target,
        policy=Policy.from_env(),
        tokens=tokens,
        model_dim=model_dim,
        inter_dim=inter_dim,
        experts=experts,
        topk=topk_ids.shape[1],
        dtype=dtype_name(dtype or hidden_states.dtype),
        a_dtype=activation_dtype(
            w_dtype, activation, caller.gate_mode, tokens, target.gfx, a_dtype
        ),
        w_dtype=w_dtype,
        activation=activation,
        quant_type=quant_type,
        use_g1u1=w1.shape[1] == 2 * inter_dim,
        doweight_stage1=doweight_stage1,
        shuffled=getattr(w1, "is_shuffled", False) or getattr(w2, "is_shuffled", False),
        caller=caller,
        block_m=block_m,
        hidden_pad=hidden_pad,
        intermediate_pad=intermediate_pad,
        given_scales=given_scales,
    )
