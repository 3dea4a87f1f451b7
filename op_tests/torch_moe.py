"""Torch references of the MoE path, in plain float arithmetic.

Nothing here shares code or method with the kernels: block scales come from frexp in f64 and
elements from a nearest-value search, layouts are not involved at all. The kernels' results are
compared with what these functions make of the same quantised operands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

BLOCK = 32
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MAX = {"fp4": 6.0, "fp8": 448.0}


@dataclass(frozen=True)
class MxTensor:
    """Quantised rows: codes [..., K], fp4 [..., K / 2] bytes; e8m0 scales [..., K / 32]."""

    fmt: str
    data: torch.Tensor
    scale: torch.Tensor

    def dequantised(self) -> torch.Tensor:
        """f32 values [..., K]."""
        elements = unpack_fp4(self.data) if self.fmt == "fp4" else decode_fp8(self.data)
        factor = torch.exp2(self.scale.to(torch.float64) - 127)
        factor = torch.where(self.scale == 255, math.nan, factor)
        wide = elements.to(torch.float64).unflatten(-1, (-1, BLOCK)) * factor.unsqueeze(-1)
        return wide.flatten(-2).to(torch.float32)


def decode_fp8(codes: torch.Tensor) -> torch.Tensor:
    """e4m3 bytes to f32."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """e2m1 pairs, even element in the low nibble, to f32 [..., 2 K]."""
    table = torch.tensor([*FP4_VALUES, *(-v for v in FP4_VALUES)])
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return table[nibbles.long()]


def pack_fp4(values: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 of f32 values, ties to the even code, two a byte."""
    table = torch.tensor(FP4_VALUES, dtype=torch.float64)
    distance = (values.abs().to(torch.float64).clamp(max=6.0).unsqueeze(-1) - table).abs()
    best = distance.min(-1, keepdim=True).values
    candidates = distance == best
    # Of two equally near codes take the even one.
    codes = torch.arange(8)
    preference = torch.where(candidates, (codes % 2) * 8 + codes, 100)
    code = codes[preference.min(-1).indices] | (torch.signbit(values).long() << 3)
    pairs = code.unflatten(-1, (-1, 2))
    return (pairs[..., 0] | (pairs[..., 1] << 4)).to(torch.uint8)


def mx_quantise(x: torch.Tensor, fmt: str) -> MxTensor:
    """Quantise rows [..., K] by the RoundUp rule: the smallest power of two that keeps every
    element within the format."""
    blocks = x.to(torch.float64).unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    mantissa, exponent = torch.frexp(amax / _MAX[fmt])
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)  # an exact power of two
    byte = (exponent + 127).clamp(0, 254)
    byte = torch.where(amax == 0, 0, byte)
    byte = torch.where(torch.isfinite(amax), byte, 255).to(torch.uint8)
    scaled = blocks / torch.exp2(byte.to(torch.float64) - 127).unsqueeze(-1)
    scaled = scaled.flatten(-2).to(torch.float32)
    if fmt == "fp4":
        return MxTensor(fmt, pack_fp4(scaled), byte)
    codes = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return MxTensor(fmt, codes, byte)


@dataclass(frozen=True)
class Activation:
    """A gated activation: `kind` with its clamp and betas, as `aiter.fused_moe` documents them."""

    kind: str = "silu"
    limit: float | None = None
    beta: float = 1.0
    linear_beta: float = 1.0

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.kind == "gelu":
            return torch.nn.functional.gelu(gate) * up
        if self.kind == "situv2":
            bounded = self.beta * torch.tanh(gate / self.beta) * torch.sigmoid(gate)
            return bounded * self.linear_beta * torch.tanh(up / self.linear_beta)
        limit = self.limit
        if self.kind == "swiglu":
            limit = limit or 7.0
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if self.kind == "swiglu":
            return gate * torch.sigmoid(1.702 * gate) * (up + 1)
        return gate * torch.sigmoid(gate) * up


def moe_reference(
    a: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    requant: str | None,
    activation: Activation | None = None,
    bias1: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    weight_in_stage1: bool = False,
    bf16_between: bool = False,
) -> torch.Tensor:
    """Fused MoE on f32 operands: a [M, D], w1 [E, 2 I, D], w2 [E, D, I], ids and weights [M, k].

    Stage 1's result is quantised to `requant` in between, with `bf16_between` after rounding
    to bf16. Ids outside 0..E-1 are served nowhere. Returns [M, D] f32.
    """
    activation = activation or Activation()
    inter = w2.shape[2]
    out = torch.zeros(a.shape[0], w2.shape[1])
    for expert in range(w1.shape[0]):
        tokens, slots = (topk_ids == expert).nonzero(as_tuple=True)
        if tokens.numel() == 0:
            continue
        weights = topk_weights[tokens, slots, None]
        both = a[tokens] @ w1[expert].T
        if bias1 is not None:
            both = both + bias1[expert]
        hidden = activation(both[:, :inter], both[:, inter:])
        if weight_in_stage1:
            hidden = hidden * weights
        if bf16_between:
            hidden = hidden.to(torch.bfloat16).float()
        if requant is not None:
            hidden = mx_quantise(hidden, requant).dequantised()
        rows = hidden @ w2[expert].T
        if bias2 is not None:
            rows = rows + bias2[expert]
        out.index_add_(0, tokens, rows if weight_in_stage1 else rows * weights)
    return out


def relative_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want|; infinite where `got` is not finite."""
    got, want = got.to(torch.float64), want.to(torch.float64)
    if not torch.isfinite(got).all():
        return math.inf
    return ((got - want).norm() / want.norm().clamp(min=1e-30)).item()


def sort_reference(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, experts: int, block_m: int, real: int
) -> dict[str, torch.Tensor]:
    """The routing sort by a Python loop: ids, weights, owners, route rows and totals."""
    tokens, topk = topk_ids.shape
    ids, weights, owners = [], [], []
    rows = torch.full((tokens * topk,), -1, dtype=torch.int32)
    for expert in range(experts):
        count = 0
        for token in range(real):
            for slot in range(topk):
                if topk_ids[token, slot] == expert:
                    rows[token * topk + slot] = len(ids)
                    ids.append(token | slot << 24)
                    weights.append(float(topk_weights[token, slot]))
                    count += 1
        padding = -count % block_m
        ids += [tokens | topk << 24] * padding
        weights += [0.0] * padding
        owners += [expert] * ((count + padding) // block_m)
    return {
        "sorted_ids": torch.tensor(ids, dtype=torch.int32),
        "sorted_weights": torch.tensor(weights),
        "expert_ids": torch.tensor(owners, dtype=torch.int32),
        "num_valid": torch.tensor([len(ids), real], dtype=torch.int32),
        "route_rows": rows,
    }
