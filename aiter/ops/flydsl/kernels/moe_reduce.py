"""Route reduce: add the rows that stage 2 left for a token's slots.

    y[t, :] = sum over s of x[t * topk + s, :]

    x (tokens * topk, model_dim) bf16, y (tokens, model_dim) bf16, summed in f32, slots in order
    route_rows (tokens * topk) i32: a route with -1 has no row in x

A workgroup takes a run of one token's columns, eight a lane.
"""

from __future__ import annotations

from dataclasses import dataclass

import flydsl.compiler as flyc
import flydsl.expr as fx

from .device import CHUNK, LANES, div, global_buffer, load_word, mod
from .tensor_shim import kernel_builder

COLUMNS = 8  # a lane's


@dataclass(frozen=True)
class ReduceKey:
    """Everything that decides the code of the reduction."""

    model_dim: int
    topk: int

    def __post_init__(self) -> None:
        if self.model_dim % COLUMNS:
            raise ValueError(f"{self}: model_dim is a multiple of {COLUMNS}")

    @property
    def threads(self) -> int:
        return min(256, -(-self.model_dim // (COLUMNS * LANES)) * LANES)

    @property
    def groups(self) -> int:
        """Workgroups of a token."""
        return -(-self.model_dim // (COLUMNS * self.threads))


@kernel_builder
def build_reduce(key: ReduceKey) -> flyc.JitFunction:
    """Launcher (y, x, route_rows, tokens, stream)."""
    row_bytes = 2 * key.model_dim

    @flyc.kernel(known_block_size=[key.threads, 1, 1])
    def moe_reduce(y: fx.Int64, x: fx.Int64, route_rows: fx.Int64):
        token = div(fx.Int32(fx.block_idx.x), key.groups)
        run = mod(fx.Int32(fx.block_idx.x), key.groups)
        offset = (run * key.threads + fx.Int32(fx.thread_idx.x)) * CHUNK
        load = fx.make_copy_atom(fx.rocdl.BufferCopy128b(), fx.Uint8)
        rows = []
        for slot in fx.range_constexpr(key.topk):
            base = x + (fx.Int64(token) * key.topk + slot) * row_bytes
            # A buffer of no bytes reads as zeros.
            routed = load_word(route_rows, token * key.topk + slot) >= 0
            held = routed.select(fx.Int64(row_bytes), fx.Int64(0))
            source = global_buffer(fx.Uint8, base, held, CHUNK)
            raw = fx.make_rmem_tensor(CHUNK, fx.Uint8)
            fx.copy(load, fx.make_view(source + offset, fx.make_layout(CHUNK, 1)), raw)
            rows.append(raw)
        total = rows[0].load().bitcast(fx.BFloat16).to(fx.Float32)
        for slot in fx.range_constexpr(1, key.topk):
            total = total + rows[slot].load().bitcast(fx.BFloat16).to(fx.Float32)
        target = global_buffer(fx.Uint8, y + fx.Int64(token) * row_bytes, row_bytes, CHUNK)
        out = fx.make_rmem_tensor(CHUNK, fx.Uint8)
        out.store(total.to(fx.BFloat16).bitcast(fx.Uint8))
        fx.copy(load, out, fx.make_view(target + offset, fx.make_layout(CHUNK, 1)))

    @flyc.jit
    def launch_moe_reduce(
        y: fx.Int64, x: fx.Int64, route_rows: fx.Int64, tokens: fx.Int32, stream: fx.Stream
    ):
        moe_reduce(y, x, route_rows).launch(
            grid=(tokens * key.groups, 1, 1), block=(key.threads, 1, 1), stream=stream
        )

    return launch_moe_reduce
