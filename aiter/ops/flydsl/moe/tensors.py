"""The tensors of a call, checked for what the kernels take for granted: they get bare addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aiter.ops.flydsl.kernels.moe_sort import MAX_GLOBAL_EXPERTS

from .request import MoeRequest
from .sizes import scale_words


@dataclass(frozen=True)
class MoeTensors:
    """A call's tensors. x [M, D] bf16; w1 [E, 2 I, D], w2 [E, D, I] and their e8m0 scales,
    shuffled; topk_ids, topk_weights [M, k] i32, f32; num_local_tokens [1] i32, expert_mask
    [experts of all ranks] i32, bias1 [E, 2 I] and bias2 [E, D] f32, each or None."""

    x: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    w1_scale: torch.Tensor
    w2_scale: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    num_local_tokens: torch.Tensor | None
    expert_mask: torch.Tensor | None
    bias1: torch.Tensor | None
    bias2: torch.Tensor | None


def checked_tensors(
    request: MoeRequest,
    *,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w1_scale: torch.Tensor | None,
    w2_scale: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    num_local_tokens: torch.Tensor | None,
    expert_mask: torch.Tensor | None,
    bias1: torch.Tensor | None,
    bias2: torch.Tensor | None,
) -> MoeTensors:
    """The tensors of `request` in row-major order, all on the device of `x`.

    What a call brings anew is copied where it lies otherwise; weights and scales, which would be
    copied at each call, are refused. Raises ValueError for a type, shape, device or order that
    the kernels would misread.
    """
    device, experts = x.device, request.experts
    routes = (request.tokens, request.topk)
    for name, weight in (("w1", w1), ("w2", w2)):
        _require_device(name, weight, device)
        _require_order(name, weight, "shuffle_weight")
    hidden, inter = request.model_dim, request.inter_dim
    return MoeTensors(
        x=_dense("hidden_states", x, torch.bfloat16, (request.tokens, hidden), device),
        w1=w1,
        w2=w2,
        w1_scale=_scale("w1_scale", w1_scale, experts, 2 * inter, hidden, device),
        w2_scale=_scale("w2_scale", w2_scale, experts, hidden, inter, device),
        topk_ids=_dense("topk_ids", topk_ids, torch.int32, routes, device),
        topk_weights=_dense("topk_weight", topk_weights, torch.float32, routes, device),
        num_local_tokens=_local_tokens(num_local_tokens, device),
        expert_mask=_mask(expert_mask, experts, device),
        bias1=_bias("bias1", bias1, (experts, 2 * inter), device),
        bias2=_bias("bias2", bias2, (experts, hidden), device),
    )


def _dense(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
) -> torch.Tensor:
    if tensor.dtype != dtype or tensor.shape != shape:
        raise ValueError(f"{name} is {_told(tensor)}, not {dtype} {shape}")
    _require_device(name, tensor, device)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _bias(
    name: str, bias: torch.Tensor | None, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor | None:
    return None if bias is None else _dense(name, bias, torch.float32, shape, device)


def _local_tokens(count: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    if count is None:
        return None
    if count.dtype != torch.int32 or count.numel() != 1:
        raise ValueError(f"num_local_tokens is {_told(count)}, not one torch.int32")
    _require_device("num_local_tokens", count, device)
    return count


def _mask(mask: torch.Tensor | None, experts: int, device: torch.device) -> torch.Tensor | None:
    if mask is None:
        return None
    fits = mask.dim() == 1 and experts <= mask.shape[0] <= MAX_GLOBAL_EXPERTS
    if mask.dtype != torch.int32 or not fits:
        raise ValueError(
            f"expert_mask is {_told(mask)}, not torch.int32 of {experts} to {MAX_GLOBAL_EXPERTS} "
            "experts, those of all ranks"
        )
    return _dense("expert_mask", mask, torch.int32, mask.shape, device)


def _scale(
    name: str,
    scale: torch.Tensor | None,
    experts: int,
    rows: int,
    columns: int,
    device: torch.device,
) -> torch.Tensor:
    """`scale` of `experts` weights of `rows` rows of `columns` elements."""
    if scale is None:
        raise ValueError(f"MX weights need {name}")
    needed = 4 * scale_words(experts * rows, columns)
    if scale.dtype not in (torch.float8_e8m0fnu, torch.uint8) or scale.numel() < needed:
        raise ValueError(
            f"{name} is {_told(scale)}; {experts} experts of {rows} rows of {columns} elements "
            f"need {needed} bytes of e8m0: shuffle it with shuffle_scale"
        )
    _require_device(name, scale, device)
    _require_order(name, scale, "shuffle_scale")
    return scale


def _require_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, hidden_states is on {device}")


def _require_order(name: str, tensor: torch.Tensor, maker: str) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}: pass what "
            f"{maker} returned, not a view that is not contiguous"
        )


def _told(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"
