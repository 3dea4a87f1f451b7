"""Operands of the emulated MoE tests: random, with scales that differ in every block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from aiter.fused_moe import fused_moe
from aiter.jit.utils.chip_info import Target
from aiter.ops.enum import QuantType
from aiter.ops.shuffle import shuffle_scale, shuffle_weight
from op_tests.torch_moe import MxTensor, moe_reference, mx_quantise

_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp4": torch.uint8}
GFX950 = Target.of("gfx950")


def spread(*shape: int, generator: torch.Generator, size: float = 1.0) -> torch.Tensor:
    """Normal values whose 32-blocks along the last dimension differ by powers of two."""
    x = torch.randn(*shape, generator=generator)
    powers = torch.randint(-3, 3, (*shape[:-1], shape[-1] // 32), generator=generator)
    return x * torch.exp2(powers.float()).repeat_interleave(32, -1) * size


def routing(
    tokens: int, topk: int, experts: int, kind: str, generator: torch.Generator
) -> torch.Tensor:
    """Expert ids [M, k]: "even" random; "skewed" mostly low ids; "idle" none for expert 1;
    "one" every token to the same experts."""
    if kind == "one":
        return torch.arange(topk, dtype=torch.int32).expand(tokens, topk).contiguous()
    weights = torch.ones(experts)
    if kind == "skewed":
        weights = 0.5 ** torch.arange(experts).float()
    if kind == "idle":
        weights[1] = 0
    ids = torch.multinomial(weights.expand(tokens, -1), topk, generator=generator)
    return ids.to(torch.int32)


@dataclass(frozen=True)
class MoeCase:
    """One fused-MoE call and its reference."""

    x: torch.Tensor
    w1: MxTensor
    w2: MxTensor
    ids: torch.Tensor
    weights: torch.Tensor
    a_format: str

    @classmethod
    def random(
        cls,
        tokens: int,
        model_dim: int,
        inter_dim: int,
        experts: int,
        topk: int,
        kind: str = "even",
        a_format: str = "fp8",
        w_format: str = "fp4",
        seed: int = 0,
    ) -> MoeCase:
        g = torch.Generator().manual_seed(seed)
        return cls(
            x=spread(tokens, model_dim, generator=g).to(torch.bfloat16),
            w1=mx_quantise(
                spread(experts, 2 * inter_dim, model_dim, generator=g, size=0.05), w_format
            ),
            w2=mx_quantise(spread(experts, model_dim, inter_dim, generator=g, size=0.05), w_format),
            ids=routing(tokens, topk, experts, kind, g),
            weights=torch.rand(tokens, topk, generator=g),
            a_format=a_format,
        )

    def reference(self, ids: torch.Tensor | None = None, **options: object) -> torch.Tensor:
        """What `moe_reference` makes of the case; `ids` are the local ones under a mask."""
        return moe_reference(
            self._activations(),
            self.w1.dequantised(),
            self.w2.dequantised(),
            self.ids if ids is None else ids,
            self.weights,
            None if self.a_format == "bf16" else self.a_format,
            **({"bf16_between": self.a_format == "bf16"} | options),
        )

    def _activations(self) -> torch.Tensor:
        x = self.x.float()
        return x if self.a_format == "bf16" else mx_quantise(x, self.a_format).dequantised()

    def arguments(self, gate_mode: str = "interleave") -> dict[str, Any]:
        """What `fused_moe` takes for the case, in the layouts that `gate_mode` asks for."""
        interleave = gate_mode == "interleave"
        experts, rows, _ = self.w1.data.shape
        layout = {"is_guinterleave": interleave, "gate_up": interleave}
        return {
            "hidden_states": self.x,
            "w1": shuffle_weight(_typed(self.w1), **layout),
            "w2": shuffle_weight(_typed(self.w2)),
            "topk_weight": self.weights,
            "topk_ids": self.ids,
            "quant_type": QuantType.per_1x32,
            "w1_scale": shuffle_scale(
                self.w1.scale.view(experts * rows, -1), experts=experts, **layout
            ),
            "w2_scale": shuffle_scale(self.w2.scale.flatten(0, 1)),
            "gate_mode": gate_mode,
            "quant_dtype_a": _DTYPES[self.a_format],
        }

    def run(self, gate_mode: str = "interleave", **options: object) -> torch.Tensor:
        """`fused_moe` on the case's operands."""
        return fused_moe(**(self.arguments(gate_mode) | options))


def _typed(weight: MxTensor) -> torch.Tensor:
    """fp8 bytes as fp8; fp4 pairs stay bytes."""
    return weight.data.view(torch.float8_e4m3fn) if weight.fmt == "fp8" else weight.data
