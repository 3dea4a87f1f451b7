"""Torch reference of the MiniMax-M3 decode layers, in f32 with the kernels' roundings to bf16.

Matrices are plain [N, K], caches natural [pages, kv heads, PAGE, HEAD_DIM]; nothing is shared
with the kernels but the formulas their docstrings state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAGE = 128
HEAD_DIM = 128


def bf16(x: torch.Tensor) -> torch.Tensor:
    """Round f32 to bf16 and back."""
    return x.to(torch.bfloat16).float()


FP8_MAX = 448.0


def stored(x: torch.Tensor, fmt: str, scale: float) -> torch.Tensor:
    """f32 values as a cache holds them: bf16, or e4m3 over the cache's scale, saturated."""
    if fmt == "bf16":
        return x.to(torch.bfloat16)
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def held(x: torch.Tensor, scale: float) -> torch.Tensor:
    """What elements of a cache stand for, f32."""
    return x.float() * (1.0 if x.dtype == torch.bfloat16 else scale)


def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) * w over the last dimension."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * w.float()


def rotary(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [tokens, heads, dim]; cos_sin [positions, r], cosines first."""
    r = cos_sin.shape[1]
    cos, sin = cos_sin[positions.long()][:, None, :].chunk(2, -1)
    a, b, rest = x[..., : r // 2], x[..., r // 2 : r], x[..., r:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def cos_sin_table(positions: int, rotary_dim: int, base: float = 1e4) -> torch.Tensor:
    """[positions, rotary] f32."""
    inverse = base ** (-torch.arange(0, rotary_dim, 2).float() / rotary_dim)
    angle = torch.arange(positions)[:, None] * inverse
    return torch.cat([angle.cos(), angle.sin()], -1)


def paged_rows(
    cache: torch.Tensor, pages: torch.Tensor, count: int, scale: float = 1.0
) -> torch.Tensor:
    """The first `count` rows of a sequence out of [pages, PAGE, dim], as `held`."""
    return torch.cat([held(cache[page], scale) for page in pages.tolist()])[:count]


def block_scores(index_q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Best product of any of index_q [heads, dim] with each block of keys [count, dim]."""
    best = (keys @ index_q.T).amax(-1)
    padded = torch.nn.functional.pad(best, (0, -best.numel() % PAGE), value=-torch.inf)
    return padded.view(-1, PAGE).amax(-1)


def choose_blocks(scores: torch.Tensor, topk: int, init: int, local: int) -> list[int]:
    """The first `init`, the last `local` and the best others, `topk` in all; ascending."""
    count = scores.numel()
    if count <= topk:
        return list(range(count))
    forced = {*range(init), *range(count - local, count)}
    others = sorted(set(range(count)) - forced, key=lambda b: (-scores[b].item(), b))
    return sorted([*forced, *others][: max(topk, len(forced))])


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: list[int],
    scale: float,
) -> torch.Tensor:
    """Attention of q [heads, dim] over the given blocks of keys and values [count, dim]."""
    rows = torch.cat([torch.arange(b * PAGE, min((b + 1) * PAGE, keys.shape[0])) for b in blocks])
    weights = torch.softmax(q @ keys[rows].T * scale, -1)
    return weights @ values[rows]


def route(
    logits: torch.Tensor, bias: torch.Tensor, topk: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights [tokens, topk]: chosen by sigmoid + bias, weighted by the sigmoid's share."""
    scores = torch.sigmoid(logits)
    order = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices
    ids = order[:, :topk]
    chosen = scores.gather(1, ids)
    return ids, chosen / chosen.sum(-1, keepdim=True) * scale


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """swigluoai: gate * sigmoid(1.702 gate) * (up + 1), clamped."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


@dataclass(frozen=True)
class Experts:
    """Weights [experts + 1, ...] f32, the shared expert last."""

    gate_up: torch.Tensor
    down: torch.Tensor

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: float, limit: float
    ) -> torch.Tensor:
        """[tokens, hidden] f32 of x [tokens, hidden], the activations weighted and rounded."""
        out = torch.zeros(x.shape[0], self.down.shape[1])
        for t in range(x.shape[0]):
            slots = [*zip(ids[t].tolist(), weights[t].tolist(), strict=True)]
            for expert, weight in [*slots, (self.down.shape[0] - 1, shared)]:
                gate, up = (self.gate_up[expert] @ x[t]).chunk(2)
                out[t] += self.down[expert] @ bf16(swiglu(gate, up, limit) * weight)
        return out
