"""MoE stage 2: one expert's down projection over a block of sorted rows (gfx950, MX formats).

    y[r, :] = weight[r] * (a2[r, :] @ W2[expert(r)]^T + bias[expert(r), :])

for sorted rows r, added into out[token(r), :] (`atomic`) or stored at out[token(r) * topk +
slot(r), :] (`reduce`, summed later by `moe_reduce`).

    a2            (sorted rows, inter_dim) fp8, fp4 or bf16, in sorted order
    a2_scale      e8m0 words (sorted rows / 32, inter_dim / 256, 64); none of bf16
    w2            (experts, model_dim, inter_dim) preshuffled, w2_scale likewise
    sorted_ids    (sorted rows) i32: token in the low 24 bits, slot in the high 8; padding has
                  token = `tokens`
    sorted_weights (sorted rows) f32
    expert_ids    (sorted rows / sort_block_m) i32
    num_valid     (2) i32: padded number of sorted rows, tokens
    bias          (experts, model_dim) f32
    out           (tokens, model_dim) or (tokens * topk, model_dim) bf16

A work item is tile_m sorted rows by tile.rows columns. Workgroups take items
`item, item + groups, ...`: a grid that covers all items and a persistent one, which fits the
machine and walks over them, run the same code. The accumulators pass through LDS once, so that
a wave stores or adds whole rows of consecutive columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr.typing import T

from .device import (
    BEYOND,
    CHUNK,
    LANES,
    add_bits,
    div,
    global_buffer,
    global_pointer,
    hinted,
    load_word,
    mod,
    shared_bytes,
    shift_right,
    store_bits,
    thread_in_wave,
    traced,
)
from .moe_routes import SLOT_SHIFT, TOKEN_MASK, item_to_block
from .mx_gemm import MxLoop, MxOperands
from .mx_tile import LDS_BYTES, MxTile
from .tensor_shim import kernel_builder

_ROWS_AT_ONCE = 4  # of a wave on their way from LDS to memory


@dataclass(frozen=True)
class Stage2Key:
    """Everything that decides stage 2's code."""

    model_dim: int
    inter_dim: int
    topk: int
    tile: MxTile
    sort_block_m: int
    epilogue: str  # "atomic" | "reduce"
    bias: bool
    weighted: bool
    w_cache: int  # cache policy of weight loads: 0 cached, 2 non-temporal
    xcd_group: int
    waves_per_eu: int | None

    def __post_init__(self) -> None:
        if self.tile.rows not in (2 * LANES, 4 * LANES, 8 * LANES):
            raise ValueError(f"{self}: a lane takes 2, 4 or 8 columns of a row")
        if self.lds_bytes > LDS_BYTES:
            raise ValueError(f"{self}: needs {self.lds_bytes} bytes of LDS, of {LDS_BYTES}")

    @property
    def steps(self) -> int:
        """K steps."""
        return self.inter_dim // self.tile.tile_k

    @property
    def n_blocks(self) -> int:
        return self.model_dim // self.tile.rows

    @property
    def row_pitch(self) -> int:
        """Bytes of an output row in LDS: 16 more than its columns, to spread rows over banks."""
        return 2 * self.tile.rows + CHUNK

    @property
    def lds_bytes(self) -> int:
        return max(self.tile.lds_bytes, self.tile.tile_m * self.row_pitch)


@kernel_builder
def build_stage2(key: Stage2Key) -> flyc.JitFunction:
    """Launcher (out, a2, w2, a2_scale, w2_scale, sorted_ids, expert_ids, sorted_weights,
    num_valid, bias, tokens, groups, stream); `groups` is the grid, of any size from 1 up."""
    tile = key.tile

    @flyc.kernel(known_block_size=[tile.threads, 1, 1])
    def moe_stage2(
        out: fx.Int64,
        a2: fx.Int64,
        w2: fx.Int64,
        a2_scale: fx.Int64,
        w2_scale: fx.Int64,
        sorted_ids: fx.Int64,
        expert_ids: fx.Int64,
        sorted_weights: fx.Int64,
        num_valid: fx.Int64,
        bias: fx.Int64,
        tokens: fx.Int32,
        groups: fx.Int32,
    ):
        wave, lane = thread_in_wave()
        lds = shared_bytes(key.lds_bytes)
        loop = MxLoop(tile, lds, wave, lane, key.w_cache)
        m_blocks = div(load_word(num_valid, 0), tile.tile_m)
        items = m_blocks * key.n_blocks
        for item in range(fx.Int32(fx.block_idx.x), items, groups):
            m_block, n_block = item_to_block(item, m_blocks, key.n_blocks, key.xcd_group)
            row0 = m_block * tile.tile_m
            expert = load_word(expert_ids, div(row0, key.sort_block_m))
            weights = _route_weights(key, sorted_weights, row0, lane)
            loop.run(
                _operands(key, loop, row0, n_block, expert, a2, w2, a2_scale, w2_scale), key.steps
            )
            fx.gpu.barrier()
            _tile_to_lds(key, loop, lds, weights, _biases(key, loop, n_block, expert, bias))
            fx.gpu.barrier()
            _lds_to_rows(key, lds, wave, lane, row0, n_block, sorted_ids, tokens, out)
            fx.gpu.barrier()

    @flyc.jit
    def launch_moe_stage2(
        out: fx.Int64,
        a2: fx.Int64,
        w2: fx.Int64,
        a2_scale: fx.Int64,
        w2_scale: fx.Int64,
        sorted_ids: fx.Int64,
        expert_ids: fx.Int64,
        sorted_weights: fx.Int64,
        num_valid: fx.Int64,
        bias: fx.Int64,
        tokens: fx.Int32,
        groups: fx.Int32,
        stream: fx.Stream,
    ):
        moe_stage2(
            out,
            a2,
            w2,
            a2_scale,
            w2_scale,
            sorted_ids,
            expert_ids,
            sorted_weights,
            num_valid,
            bias,
            tokens,
            groups,
        ).launch(grid=(groups, 1, 1), block=(tile.threads, 1, 1), stream=stream)

    return hinted(launch_moe_stage2, key.waves_per_eu)


def _operands(
    key: Stage2Key,
    loop: MxLoop,
    row0: fx.Int32,
    n_block: fx.Int32,
    expert: fx.Int32,
    a2: fx.Int64,
    w2: fx.Int64,
    a2_scale: fx.Int64,
    w2_scale: fx.Int64,
) -> MxOperands:
    tile = key.tile
    a_row = tile.a.row_bytes(key.inter_dim)
    tile0 = n_block * (tile.rows // 16) + loop.wave_n * tile.n_tiles
    return MxOperands.of_block(
        tile,
        k_dim=key.inter_dim,
        w_rows=key.model_dim,
        row0=row0,
        expert=expert,
        a=global_buffer(fx.Uint8, a2 + fx.Int64(row0) * a_row, tile.tile_m * a_row, CHUNK),
        a_chunks=[row * a_row + byte for row, byte in loop.a_chunk_rows()],
        a_left=[],
        a_scale=a2_scale,
        w=w2,
        w_scale=w2_scale,
        w_tiles=[tile0 + n for n in range(tile.n_tiles)],
        w_words=[div(tile0, 2) + i for i in range(tile.n_tiles // 2)],
    )


def _route_weights(
    key: Stage2Key, sorted_weights: fx.Int64, row0: fx.Int32, lane: fx.Int32
) -> list[fx.Float32]:
    """The route weight of the row this lane holds in each row tile."""
    if not key.weighted:
        return []
    pointer = global_pointer(fx.Float32, sorted_weights)
    return [pointer[row0 + m * 16 + mod(lane, 16)] for m in range(key.tile.m_tiles)]


def _bf16_rows(key: Stage2Key, lds: fx.Pointer, columns: int) -> fx.Tensor:
    """The output tile in LDS as (row, column of a run, run of `columns` columns)."""
    pitch = key.row_pitch // 2
    layout = fx.make_layout(
        (key.tile.tile_m, columns, key.tile.rows // columns), (pitch, 1, columns)
    )
    return fx.make_view(fx.recast_iter(fx.BFloat16, lds), layout)


def _biases(
    key: Stage2Key, loop: MxLoop, n_block: fx.Int32, expert: fx.Int32, bias: fx.Int64
) -> list[fx.Vector]:
    """The bias of the lane's four columns of each weight tile; none without a bias."""
    if not key.bias:
        return []
    tile0 = n_block * (key.tile.rows // 16) + loop.wave_n * key.tile.n_tiles
    column = tile0 * 16 + div(loop.lane, 16) * 4
    expert_bias = bias + fx.Int64(expert) * (4 * key.model_dim)
    return [
        fx.generic_load(
            global_pointer(fx.Float32, expert_bias + fx.Int64(column + n * 16) * 4, CHUNK), count=4
        )
        for n in range(key.tile.n_tiles)
    ]


def _tile_to_lds(
    key: Stage2Key,
    loop: MxLoop,
    lds: fx.Pointer,
    weights: list[fx.Float32],
    biases: list[fx.Vector],
) -> None:
    """Bias and weight the accumulators and lay them out as bf16 rows."""
    tile = key.tile
    store = fx.make_copy_atom(fx.UniversalCopy64b(), fx.BFloat16)
    rows = _bf16_rows(key, lds, 4)
    column0 = loop.wave_n * (tile.n_tiles * 4) + div(loop.lane, 16)
    for m in range(tile.m_tiles):
        row = m * 16 + mod(loop.lane, 16)
        for n in range(tile.n_tiles):
            values = loop.acc[None, n, m].load()
            if biases:
                values = values + biases[n]
            if weights:
                values = values * weights[m]
            packed = fx.make_rmem_tensor(4, fx.BFloat16)
            packed.store(values.to(fx.BFloat16))
            fx.copy(store, packed, rows[row, None, column0 + n * 4])


@traced
def _lds_to_rows(
    key: Stage2Key,
    lds: fx.Pointer,
    wave: fx.Int32,
    lane: fx.Int32,
    row0: fx.Int32,
    n_block: fx.Int32,
    sorted_ids: fx.Int64,
    tokens: fx.Int32,
    out: fx.Int64,
) -> None:
    """Each wave takes whole rows, four at a time: a lane has rows / 64 consecutive columns.

    Padding rows get an offset beyond the buffer, which drops what they would store.
    """
    tile = key.tile
    columns = tile.rows // LANES
    waves = tile.threads // LANES
    slots = key.topk if key.epilogue == "reduce" else 1
    rows = _bf16_rows(key, lds, columns)
    row_bytes = 2 * key.model_dim
    target = global_buffer(fx.Uint8, out, fx.Int64(tokens) * (slots * row_bytes), 2 * columns)
    ids = global_pointer(fx.Int32, sorted_ids)
    routes = [
        ids[row0 + 64 * i + fx.min(lane, fx.Int32(min(tile.tile_m, LANES) - 1))]
        for i in range(-(-tile.tile_m // LANES))
    ]
    column_offset = (n_block * tile.rows + lane * columns) * 2
    for first in range(wave, fx.Int32(tile.tile_m), fx.Int32(waves * _ROWS_AT_ONCE)):
        for i in fx.range_constexpr(_ROWS_AT_ONCE):
            row = fx.Int32(first) + i * waves
            route = _route(routes, row)
            token = route & TOKEN_MASK
            out_row = token
            if fx.const_expr(key.epilogue == "reduce"):
                out_row = token * slots + shift_right(route, SLOT_SHIFT)
            offset = out_row * row_bytes + column_offset
            offset = (token < tokens).select(offset, fx.Int32(BEYOND))
            values = rows[row, None, lane].load()
            if fx.const_expr(key.epilogue == "reduce"):
                store_bits(target, offset, values.bitcast(fx.Int32))
            else:
                for pair in fx.range_constexpr(columns // 2):
                    both = fx.Vector.from_elements(
                        [values[2 * pair], values[2 * pair + 1]], fx.BFloat16
                    )
                    add_bits(target, offset + 4 * pair, both)


def _route(routes: list[fx.Int32], row: fx.Int32) -> fx.Int32:
    """The sorted id of tile row `row` (uniform) out of the lanes that hold them."""
    found = [fx.Int32(fx.rocdl.readlane(T.i32, held, mod(row, LANES))) for held in routes]
    return found[0] if len(found) == 1 else (row < LANES).select(found[0], found[1])
