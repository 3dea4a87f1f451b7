"""Finish stage 1 where K was split over workgroups: add the parts, activate, requantise.

    h[r, :] = act(sum over b of products[r, b, :inter_dim] + bias, the same of the other half)

    products (sorted rows, k_batch, 2 inter_dim) f32, gate and up in two halves
    bias     (experts, 2 inter_dim) f32
    out      (sorted rows, inter_dim) fp8, fp4 with scales as `moe_stage1`'s, or bf16

A workgroup is a sorted row, a lane takes eight columns at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import flydsl.compiler as flyc
import flydsl.expr as fx

from .activations import ActivationScalars, gated
from .device import CHUNK, LANES, div, global_buffer, global_pointer, load_word, store_bits, traced
from .mx_quant_rows import ELEMENTS, store_eight
from .mx_tile import FORMATS, scale_row_words
from .tensor_shim import kernel_builder


@dataclass(frozen=True)
class ActivateKey:
    """Everything that decides the code."""

    inter_dim: int
    k_batch: int
    sort_block_m: int
    activation: str
    bias: bool
    weighted: bool
    requant: str | None

    @property
    def threads(self) -> int:
        return min(256, -(-self.inter_dim // (ELEMENTS * LANES)) * LANES)

    @property
    def out_row_bytes(self) -> int:
        if self.requant is None:
            return 2 * self.inter_dim
        return FORMATS[self.requant].row_bytes(self.inter_dim)


@kernel_builder
def build_activate(key: ActivateKey) -> flyc.JitFunction:
    """Launcher (out, out_scale, products, expert_ids, sorted_weights, num_valid, bias, rows,
    limit, beta, linear_beta, stream); `rows` is the capacity in sorted rows."""

    @flyc.kernel(known_block_size=[key.threads, 1, 1])
    def moe_activate(
        out: fx.Int64,
        out_scale: fx.Int64,
        products: fx.Int64,
        expert_ids: fx.Int64,
        sorted_weights: fx.Int64,
        num_valid: fx.Int64,
        bias: fx.Int64,
        limit: fx.Float32,
        beta: fx.Float32,
        linear_beta: fx.Float32,
    ):
        row = fx.Int32(fx.block_idx.x)
        if row < load_word(num_valid, 0):
            expert = load_word(expert_ids, div(row, key.sort_block_m))
            scalars = ActivationScalars(limit, beta, linear_beta)
            _finish(key, row, expert, scalars, products, sorted_weights, bias, out, out_scale)

    @flyc.jit
    def launch_moe_activate(
        out: fx.Int64,
        out_scale: fx.Int64,
        products: fx.Int64,
        expert_ids: fx.Int64,
        sorted_weights: fx.Int64,
        num_valid: fx.Int64,
        bias: fx.Int64,
        rows: fx.Int32,
        limit: fx.Float32,
        beta: fx.Float32,
        linear_beta: fx.Float32,
        stream: fx.Stream,
    ):
        moe_activate(
            out,
            out_scale,
            products,
            expert_ids,
            sorted_weights,
            num_valid,
            bias,
            limit,
            beta,
            linear_beta,
        ).launch(grid=(rows, 1, 1), block=(key.threads, 1, 1), stream=stream)

    return launch_moe_activate


def _eight(base: fx.Int64, column: fx.Int32) -> list[fx.Float32]:
    """Eight f32 from `column` of the row at `base`."""
    values = []
    for half in range(2):
        at = global_pointer(fx.Float32, base + fx.Int64(column + 4 * half) * 4, CHUNK)
        four = fx.generic_load(at, count=4)
        values += [four[i] for i in range(4)]
    return values


@traced
def _finish(
    key: ActivateKey,
    row: fx.Int32,
    expert: fx.Int32,
    scalars: ActivationScalars,
    products: fx.Int64,
    sorted_weights: fx.Int64,
    bias: fx.Int64,
    out: fx.Int64,
    out_scale: fx.Int64,
) -> None:
    row_bytes = key.out_row_bytes
    target = global_buffer(fx.Uint8, out + fx.Int64(row) * row_bytes, row_bytes, CHUNK)
    scales = global_pointer(fx.Uint8, out_scale)
    scale_row = scale_row_words(key.inter_dim)
    part_bytes = 8 * key.inter_dim
    row_base = products + fx.Int64(row) * (part_bytes * key.k_batch)
    weight = fx.Float32(1.0)
    if fx.const_expr(key.weighted):
        weight = global_pointer(fx.Float32, sorted_weights)[row]
    thread = fx.Int32(fx.thread_idx.x)
    for chunk in range(thread, fx.Int32(key.inter_dim // ELEMENTS), fx.Int32(key.threads)):
        column = chunk * ELEMENTS
        halves = []
        for half in fx.range_constexpr(2):
            total = _eight(row_base, column + half * key.inter_dim)
            for part in fx.range_constexpr(1, key.k_batch):
                more = _eight(row_base + part * part_bytes, column + half * key.inter_dim)
                total = [x + y for x, y in zip(total, more, strict=True)]
            if fx.const_expr(key.bias):
                expert_bias = bias + fx.Int64(expert) * part_bytes
                more = _eight(expert_bias, column + half * key.inter_dim)
                total = [x + y for x, y in zip(total, more, strict=True)]
            halves.append(total)
        values = [
            gated(key.activation, gate, up, scalars) * weight
            for gate, up in zip(halves[0], halves[1], strict=True)
        ]
        if fx.const_expr(key.requant is None):
            vector = fx.Vector.from_elements(values, fx.Float32).to(fx.BFloat16)
            store_bits(target, chunk * CHUNK, vector.bitcast(fx.Int32))
        else:
            store_eight(values, key.requant, chunk, target, scales, [row], scale_row)
