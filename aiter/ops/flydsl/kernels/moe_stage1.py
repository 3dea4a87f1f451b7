"""MoE stage 1: gate and up projection, activation, optional requantisation (gfx950, MX formats).

    h[r, :] = act(a[token(r), :] @ Wg[expert(r)]^T, a[token(r), :] @ Wu[expert(r)]^T)

for sorted rows r. The result stays in sorted order, which is how stage 2 reads it: fp8 or fp4
with its e8m0 scales, made here from the f32 values, or bf16.

    a             (tokens, model_dim) fp8 or fp4
    a_scale       e8m0 words (sorted rows / 32, model_dim / 256, 64), in sorted order
    w1            (experts, 2 inter_dim, model_dim) preshuffled; gate and up in two halves
                  ("separated") or alternating by 16 rows ("interleave"); w1_scale likewise
    sorted_ids    (sorted rows) i32: token in the low 24 bits; padding has token = `tokens`
    expert_ids    (sorted rows / sort_block_m) i32
    num_valid     (2) i32: padded number of sorted rows, tokens
    out           (sorted rows, inter_dim) fp8, fp4 or bf16
    out_scale     e8m0 words (sorted rows / 32, inter_dim / 256, 64)

A workgroup computes tile_m sorted rows by tile.rows weight rows, gate and up together, so half
as many columns. A lane ends with gate and up of the same four columns of one row; the 32
columns of a scale block lie in two such quadruples of four lanes, whose largest magnitude two
exchanges find.
"""

from __future__ import annotations

from dataclasses import dataclass

import flydsl.compiler as flyc
import flydsl.expr as fx

from .activations import gated
from .device import (
    CHUNK,
    LANES,
    div,
    global_buffer,
    global_pointer,
    hinted,
    load_word,
    mod,
    shared_bytes,
    store_bits,
    thread_in_wave,
)
from .moe_routes import TOKEN_MASK, item_to_block
from .mx_gemm import FORMATS, SCALE_WORD_K, MxLoop, MxOperands, MxTile
from .mx_quant import pack, scale_byte, scale_offset, scale_value
from .tensor_shim import kernel_builder


@dataclass(frozen=True)
class Stage1Key:
    """Everything that decides stage 1's code."""

    model_dim: int
    inter_dim: int
    tile: MxTile
    sort_block_m: int
    activation: str
    requant: str | None  # "fp8" | "fp4" | None for bf16
    w_cache: int  # cache policy of weight loads: 0 cached, 2 non-temporal
    xcd_group: int
    waves_per_eu: int | None

    @property
    def columns(self) -> int:
        """Output columns of a workgroup."""
        return self.tile.rows // 2

    @property
    def n_blocks(self) -> int:
        return self.inter_dim // self.columns

    @property
    def steps(self) -> int:
        """K steps of one wave."""
        return self.model_dim // self.tile.tile_k // self.tile.k_waves

    @property
    def out_row_bytes(self) -> int:
        return (
            FORMATS[self.requant].row_bytes(self.inter_dim) if self.requant else 2 * self.inter_dim
        )


@kernel_builder
def build_stage1(key: Stage1Key) -> flyc.JitFunction:
    """Launcher (out, out_scale, a, w1, a_scale, w1_scale, sorted_ids, expert_ids, num_valid,
    tokens, groups, limit, stream); `groups` covers every work item, `limit` is infinite for none.
    """
    tile = key.tile

    @flyc.kernel(known_block_size=[tile.threads, 1, 1])
    def moe_stage1(
        out: fx.Int64,
        out_scale: fx.Int64,
        a: fx.Int64,
        w1: fx.Int64,
        a_scale: fx.Int64,
        w1_scale: fx.Int64,
        sorted_ids: fx.Int64,
        expert_ids: fx.Int64,
        num_valid: fx.Int64,
        tokens: fx.Int32,
        limit: fx.Float32,
    ):
        wave, lane = thread_in_wave()
        lds = shared_bytes(tile.lds_bytes)
        loop = MxLoop(tile, lds, wave, lane, key.w_cache)
        m_blocks = div(load_word(num_valid, 0), tile.tile_m)
        item = fx.Int32(fx.block_idx.x)
        if item < m_blocks * key.n_blocks:
            m_block, n_block = item_to_block(item, m_blocks, key.n_blocks, key.xcd_group)
            row0 = m_block * tile.tile_m
            expert = load_word(expert_ids, div(row0, key.sort_block_m))
            operands = _operands(
                key, loop, row0, n_block, expert, tokens, a, w1, a_scale, w1_scale, sorted_ids
            )
            loop.run(operands, key.steps)
            loop.reduce_k_waves()
            if loop.wave_k == 0:
                _store(key, loop, row0, n_block, limit, out, out_scale)

    @flyc.jit
    def launch_moe_stage1(
        out: fx.Int64,
        out_scale: fx.Int64,
        a: fx.Int64,
        w1: fx.Int64,
        a_scale: fx.Int64,
        w1_scale: fx.Int64,
        sorted_ids: fx.Int64,
        expert_ids: fx.Int64,
        num_valid: fx.Int64,
        tokens: fx.Int32,
        groups: fx.Int32,
        limit: fx.Float32,
        stream: fx.Stream,
    ):
        moe_stage1(
            out,
            out_scale,
            a,
            w1,
            a_scale,
            w1_scale,
            sorted_ids,
            expert_ids,
            num_valid,
            tokens,
            limit,
        ).launch(grid=(groups, 1, 1), block=(tile.threads, 1, 1), stream=stream)

    return hinted(launch_moe_stage1, key.waves_per_eu)


def _operands(
    key: Stage1Key,
    loop: MxLoop,
    row0: fx.Int32,
    n_block: fx.Int32,
    expert: fx.Int32,
    tokens: fx.Int32,
    a: fx.Int64,
    w1: fx.Int64,
    a_scale: fx.Int64,
    w1_scale: fx.Int64,
    sorted_ids: fx.Int64,
) -> MxOperands:
    tile = key.tile
    a_row = tile.a.row_bytes(key.model_dim)
    w_row = tile.w.row_bytes(key.model_dim)
    scale_row = -(-key.model_dim // SCALE_WORD_K) * LANES  # words of 32 rows
    w_bytes = 2 * key.inter_dim * w_row
    scale_bytes = 4 * (2 * key.inter_dim // 32) * scale_row
    a_scale_row0 = fx.Int64(div(row0, 32)) * (4 * scale_row)
    ids = global_pointer(fx.Int32, sorted_ids)
    # Padding rows have token = tokens and so lie just beyond the buffer: they read zeros.
    a_chunks = [(ids[row0 + row] & TOKEN_MASK) * a_row + byte for row, byte in loop.a_chunk_rows()]
    tile0 = n_block * (tile.rows // 16) + loop.wave_n * tile.n_tiles
    if tile.pairing == "rows":
        w_tiles = [tile0 + n for n in range(tile.n_tiles)]
        w_words = [div(tile0, 2) + i for i in range(tile.n_tiles // 2)]
    else:
        up_tile, up_word = key.inter_dim // 16, key.inter_dim // 32
        w_tiles = [div(tile0, 2) + n // 2 + n % 2 * up_tile for n in range(tile.n_tiles)]
        w_words = [div(tile0, 4) + i // 2 + i % 2 * up_word for i in range(tile.n_tiles // 2)]
    return MxOperands(
        a=global_buffer(fx.Uint8, a, fx.Int64(tokens) * a_row, CHUNK),
        a_chunks=a_chunks,
        w=global_buffer(fx.Uint8, w1 + fx.Int64(expert) * w_bytes, w_bytes, CHUNK),
        w_tiles=[t * (16 * w_row) for t in w_tiles],
        a_scale=global_buffer(
            fx.Int32, a_scale + a_scale_row0, 4 * scale_row * tile.a_scale_words, 4
        ),
        a_scale_rows=[fx.Int32(i * scale_row) for i in range(tile.a_scale_words)],
        w_scale=global_buffer(fx.Int32, w1_scale + fx.Int64(expert) * scale_bytes, scale_bytes, 4),
        w_scale_rows=[w * scale_row for w in w_words],
        a_scale_shift=mod(div(row0, 16), 2) * 8 if tile.tile_m % 32 else None,
    )


def _activated(
    key: Stage1Key, loop: MxLoop, m: int, pair: int, limit: fx.Float32
) -> list[fx.Float32]:
    """The lane's four columns of 16-column group `pair` in row tile `m`."""
    gate = loop.acc[None, 2 * pair, m].load()
    up = loop.acc[None, 2 * pair + 1, m].load()
    return [gated(key.activation, gate[i], up[i], limit) for i in range(4)]


def _store(
    key: Stage1Key,
    loop: MxLoop,
    row0: fx.Int32,
    n_block: fx.Int32,
    limit: fx.Float32,
    out: fx.Int64,
    out_scale: fx.Int64,
) -> None:
    tile = key.tile
    pairs = tile.n_tiles // 2
    group0 = n_block * (key.columns // 16) + loop.wave_n * pairs  # in 16 columns
    row_bytes = key.out_row_bytes
    target = global_buffer(
        fx.Uint8, out + fx.Int64(row0) * row_bytes, tile.tile_m * row_bytes, CHUNK
    )
    scale_row = -(-key.inter_dim // SCALE_WORD_K) * LANES  # words of 32 rows
    scale_row0 = fx.Int64(div(row0, 32)) * (4 * scale_row)
    scales = global_buffer(fx.Uint8, out_scale + scale_row0, 4 * scale_row * tile.a_scale_words, 4)
    first_row = mod(row0, 32) if tile.tile_m % 32 else fx.Int32(0)
    quad = div(loop.lane, 16)
    for m in range(tile.m_tiles):
        row = m * 16 + mod(loop.lane, 16)
        if key.requant is None:
            for pair in range(pairs):
                values = fx.Vector.from_elements(_activated(key, loop, m, pair, limit), fx.Float32)
                column = (group0 + pair) * 16 + quad * 4
                store_bits(
                    target, row * row_bytes + column * 2, values.to(fx.BFloat16).bitcast(fx.Int32)
                )
            continue
        for block in range(pairs // 2):
            quads = [_activated(key, loop, m, 2 * block + i, limit) for i in range(2)]
            byte = scale_byte(_block_amax(quads[0] + quads[1]), key.requant)
            scale = scale_value(byte)
            for i, values in enumerate(quads):
                column = (group0 + 2 * block + i) * 16 + quad * 4
                word = pack(values, scale, key.requant)
                if key.requant == "fp4":
                    store_bits(target, row * row_bytes + div(column, 2), fx.Int16(word))
                else:
                    store_bits(target, row * row_bytes + column, word)
            at = scale_offset(first_row + row, div(group0, 2) + block, scale_row)
            # The four quads of a row hold the same byte: one of them stores it.
            store_bits(scales, (quad == 0).select(at, fx.Int32(-1)), fx.Int8(byte))


def _block_amax(values: list[fx.Float32]) -> fx.Float32:
    """Largest magnitude over the lane's values and those of the three lanes with the same row."""
    amax = fx.math.absf(values[0])
    for value in values[1:]:
        amax = fx.max(amax, fx.math.absf(value))
    for distance in (16, 32):
        amax = fx.max(amax, fx.gpu.shuffle_xor(amax, distance, LANES))
    return amax
