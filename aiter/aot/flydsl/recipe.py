"""What a caller of a tuned row passes to fused_moe, as FakeTensors.

A FakeTensor costs some fifty microseconds, several times that when its shape is new, so tensors
are made once for whatever they depend on: weights for a shape, activations for a token count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from aiter.jit.tuned import TunedKey, TunedRow
from aiter.jit.utils.chip_info import Target
from aiter.ops.enum import QuantType
from aiter.ops.flydsl.moe.request import CallerVariant, MoeRequest, request_of
from aiter.ops.shuffle import SCALE_COLUMNS, SCALE_ROWS
from aiter.utility import dtypes

from .dry_run import DEVICE

_KEPT = 4096  # tensors; more than the rows of one shape use
_SCALE_BLOCK = 32  # elements of K that share an MX scale
_INT4_IN_WORD = 8


@dataclass(frozen=True)
class Call:
    """Arguments of `_fused_moe_impl` for `row` as `variant` calls it with some tokens."""

    row: TunedRow
    variant: CallerVariant
    arguments: dict[str, Any]

    def request(self, target: Target) -> MoeRequest:
        """The request the runtime makes of this call."""
        given = self.arguments
        return request_of(
            given["hidden_states"],
            given["w1"],
            given["w2"],
            given["topk_ids"],
            target=target,
            activation=given["activation"],
            quant_type=given["quant_type"],
            doweight_stage1=given["doweight_stage1"],
            dtype=None,
            caller=self.variant,
            block_m=None,
            a_dtype=given["_q_dtype_a"],
            hidden_pad=0,
            intermediate_pad=0,
            given_scales=False,
        )


class CallerTensors:
    """Makes calls. Use one in one dry run: fake tensors belong to its mode."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Any] = {}

    def call(self, row: TunedRow, variant: CallerVariant, tokens: int) -> Call:
        """The call of `row` by `variant` with `tokens` tokens."""
        key = row.key
        act_type = key.act_type
        w1, w2 = self._weights(key)
        w1_scale, w2_scale = self._scales(key)
        # Callers behind an EP dispatch append a slot that no rank serves.
        slots = key.topk + variant.expert_parallel
        arguments: dict[str, Any] = {
            "hidden_states": self._tensor(tokens, key.model_dim, dtype=dtypes.parse(key.dtype)),
            "w1": w1,
            "w2": w2,
            "topk_weight": self._tensor(tokens, slots, dtype=dtypes.fp32),
            "topk_ids": self._tensor(tokens, slots, dtype=dtypes.i32),
            "activation": act_type,
            "quant_type": key.q_type,
            "doweight_stage1": key.doweight_stage1,
            "w1_scale": w1_scale,
            "w2_scale": w2_scale,
            "gate_mode": variant.gate_mode.value,
            # The row says what it quantises to; left to the runtime, it would depend on M.
            "_q_dtype_a": dtypes.parse(key.q_dtype_a),
        }
        if variant.bias in ("both", "stage1"):
            arguments["bias1"] = self._tensor(key.expert, _w1_rows(key), dtype=dtypes.fp32)
        if variant.bias == "both":
            arguments["bias2"] = self._tensor(key.expert, key.model_dim, dtype=dtypes.fp32)
        if variant.expert_parallel:
            # How many experts all ranks have together reaches no code.
            arguments["expert_mask"] = self._tensor(2 * key.expert, dtype=dtypes.i32)
        if variant.local_tokens:
            arguments["num_local_tokens"] = self._tensor(1, dtype=dtypes.i32)
        return Call(row, variant, arguments)

    def _weights(self, key: TunedKey) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, packing = _weight_type(key)
        names = ("weights", key.expert, key.model_dim, key.inter_dim, key.use_g1u1, dtype, packing)

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            w1 = _empty(key.expert, _w1_rows(key), key.model_dim // packing, dtype=dtype)
            w2 = _empty(key.expert, key.model_dim, key.inter_dim // packing, dtype=dtype)
            for weight in (w1, w2):
                weight.is_shuffled = True  # type: ignore[attr-defined]
            return w1, w2

        return self._once(names, make)

    def _scales(self, key: TunedKey) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if key.q_type != QuantType.per_1x32:
            return None, None
        return (
            self._scale(key.expert * _w1_rows(key), key.model_dim),
            self._scale(key.expert * key.model_dim, key.inter_dim),
        )

    def _scale(self, rows: int, elements: int) -> torch.Tensor:
        """The padded shape `shuffle_scale` returns."""
        columns = -(-elements // _SCALE_BLOCK)
        return self._tensor(
            -(-rows // SCALE_ROWS) * SCALE_ROWS,
            -(-columns // SCALE_COLUMNS) * SCALE_COLUMNS,
            dtype=dtypes.fp8_e8m0,
        )

    def _tensor(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return self._once(("tensor", shape, dtype), lambda: _empty(*shape, dtype=dtype))

    def _once(self, names: tuple[object, ...], make: Callable[[], Any]) -> Any:
        held = self._kept.get(names)
        if held is None:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            held = self._kept[names] = make()
        return held


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def _w1_rows(key: TunedKey) -> int:
    return 2 * key.inter_dim if key.use_g1u1 else key.inter_dim


def _weight_type(key: TunedKey) -> tuple[torch.dtype, int]:
    """(element type, logical elements in one) of the weights."""
    if key.q_dtype_w == "float4_e2m1fn_x2":
        return dtypes.fp4x2, 2
    if key.q_dtype_w == "int4":
        return dtypes.i32, _INT4_IN_WORD
    return dtypes.parse(key.q_dtype_w), 1
