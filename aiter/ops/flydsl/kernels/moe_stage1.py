"""MoE stage 1: gate and up projection, activation, optional requantisation (gfx950, MX formats).

    h[r, :] = act(a[token(r), :] @ Wg[expert(r)]^T, a[token(r), :] @ Wu[expert(r)]^T)

for sorted rows r, with a bias added to both products first and the route's weight multiplied
last where the key says so. The result stays in sorted order, which is how stage 2 reads it: fp8
or fp4 with its e8m0 scales, made here from the f32 values, or bf16. With K split over
`k_batch` workgroups the products themselves are stored, and `moe_activate` does the rest.

    a             (tokens, model_dim) fp8, fp4 or bf16; columns of bf16 from `used`, a multiple of
                  8, on are padding and count as zero, whatever they hold
    a_scale       e8m0 words (sorted rows / 32, model_dim / 256, 64), in sorted order; none of bf16
    w1            (experts, 2 inter_dim, model_dim) preshuffled; gate and up in two halves
                  ("separated") or alternating by 16 rows ("interleave"); w1_scale likewise
    sorted_ids    (sorted rows) i32: token in the low 24 bits; padding has token = `tokens`
    expert_ids    (sorted rows / sort_block_m) i32
    sorted_weights (sorted rows) f32
    num_valid     (2) i32: padded number of sorted rows, tokens
    bias          (experts, 2 inter_dim) f32, gate and up in two halves
    out           (sorted rows, inter_dim) fp8, fp4 or bf16; or with k_batch > 1
                  (sorted rows, k_batch, 2 inter_dim) f32, gate and up in two halves
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

from .activations import ActivationScalars, gated
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
from .mx_gemm import MxLoop, MxOperands
from .mx_quant import pack, scale_byte, scale_offset, scale_value
from .mx_tile import FORMATS, MxTile, scale_row_words
from .tensor_shim import kernel_builder


@dataclass(frozen=True)
class Stage1Key:
    """Everything that decides stage 1's code."""

    model_dim: int
    inter_dim: int
    tile: MxTile
    sort_block_m: int
    activation: str
    bias: bool
    weighted: bool  # multiply by the route's weight here and not in stage 2
    requant: str | None  # "fp8" | "fp4" | None for bf16
    k_batch: int
    w_cache: int  # cache policy of weight loads: 0 cached, 2 non-temporal
    xcd_group: int
    waves_per_eu: int | None

    def __post_init__(self) -> None:
        if self.tile.n_tiles % 4 and not self.apart:
            raise ValueError(f"{self}: a wave takes gate and up of whole scale blocks")

    @property
    def steps(self) -> int:
        """K steps of one wave."""
        return self.model_dim // (self.tile.tile_k * self.tile.k_waves * self.k_batch)

    @property
    def apart(self) -> bool:
        """Whether a workgroup has rows of gate or of up only; then K is split."""
        return self.tile.pairing == "apart"

    @property
    def columns(self) -> int:
        """Output columns of a workgroup: half its weight rows, unless gate and up are apart."""
        return self.tile.rows if self.apart else self.tile.rows // 2

    @property
    def n_blocks(self) -> int:
        return (2 if self.apart else 1) * self.inter_dim // self.columns

    @property
    def groups_of_row_block(self) -> int:
        """Workgroups for tile_m rows."""
        return self.n_blocks * self.k_batch

    @property
    def out_row_bytes(self) -> int:
        if self.k_batch > 1:
            return 4 * 2 * self.inter_dim * self.k_batch
        if self.requant is None:
            return 2 * self.inter_dim
        return FORMATS[self.requant].row_bytes(self.inter_dim)


@kernel_builder
def build_stage1(key: Stage1Key) -> flyc.JitFunction:
    """Launcher (out, out_scale, a, w1, a_scale, w1_scale, sorted_ids, expert_ids, sorted_weights,
    num_valid, bias, tokens, used, groups, limit, beta, linear_beta, stream); `used` is a number
    of columns, `groups` covers every work item, the scalars are those of `activations`."""
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
        sorted_weights: fx.Int64,
        num_valid: fx.Int64,
        bias: fx.Int64,
        tokens: fx.Int32,
        used: fx.Int32,
        limit: fx.Float32,
        beta: fx.Float32,
        linear_beta: fx.Float32,
    ):
        wave, lane = thread_in_wave()
        lds = shared_bytes(tile.lds_bytes)
        loop = MxLoop(tile, lds, wave, lane, key.w_cache)
        m_blocks = div(load_word(num_valid, 0), tile.tile_m)
        group = fx.Int32(fx.block_idx.x)
        if group < m_blocks * key.groups_of_row_block:
            batch = mod(group, key.k_batch)
            m_block, n_block = item_to_block(
                div(group, key.k_batch), m_blocks, key.n_blocks, key.xcd_group
            )
            row0 = m_block * tile.tile_m
            expert = load_word(expert_ids, div(row0, key.sort_block_m))
            rows = _Rows(a, a_scale, sorted_ids, tokens, used)
            operands = _operands(key, loop, row0, n_block, expert, rows, w1, w1_scale)
            loop.run(operands, key.steps, batch * (key.steps * tile.k_waves))
            loop.reduce_k_waves()
            if loop.wave_k == 0:
                if fx.const_expr(key.k_batch > 1):
                    _store_products(key, loop, row0, n_block, batch, out)
                else:
                    block = _Block(
                        row0=row0,
                        group0=n_block * (key.columns // 16) + loop.wave_n * (tile.n_tiles // 2),
                        expert=expert,
                        bias=bias,
                        weights=sorted_weights,
                        scalars=ActivationScalars(limit, beta, linear_beta),
                    )
                    _store(key, loop, block, out, out_scale)

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
        sorted_weights: fx.Int64,
        num_valid: fx.Int64,
        bias: fx.Int64,
        tokens: fx.Int32,
        used: fx.Int32,
        groups: fx.Int32,
        limit: fx.Float32,
        beta: fx.Float32,
        linear_beta: fx.Float32,
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
            sorted_weights,
            num_valid,
            bias,
            tokens,
            used,
            limit,
            beta,
            linear_beta,
        ).launch(grid=(groups, 1, 1), block=(tile.threads, 1, 1), stream=stream)

    return hinted(launch_moe_stage1, key.waves_per_eu)


@dataclass(frozen=True)
class _Rows:
    """The activations: their rows in the order of tokens, and the tokens of sorted rows."""

    a: fx.Int64
    a_scale: fx.Int64
    sorted_ids: fx.Int64
    tokens: fx.Int32
    used: fx.Int32


def _operands(
    key: Stage1Key,
    loop: MxLoop,
    row0: fx.Int32,
    n_block: fx.Int32,
    expert: fx.Int32,
    rows: _Rows,
    w1: fx.Int64,
    w1_scale: fx.Int64,
) -> MxOperands:
    tile = key.tile
    a_row = tile.a.row_bytes(key.model_dim)
    ids = global_pointer(fx.Int32, rows.sorted_ids)
    chunks = loop.a_chunk_rows()
    # Padding rows have token = tokens and so lie just beyond the buffer: they read zeros.
    a_chunks = [(ids[row0 + row] & TOKEN_MASK) * a_row + byte for row, byte in chunks]
    # What is quantised has zeros in the padding, the caller's own rows may have anything.
    a_left = [rows.used * 2 - byte for _, byte in chunks] if tile.widened else []
    tile0 = n_block * (tile.rows // 16) + loop.wave_n * tile.n_tiles
    if tile.pairing == "halves":
        up_tile, up_word = key.inter_dim // 16, key.inter_dim // 32
        w_tiles = [div(tile0, 2) + n // 2 + n % 2 * up_tile for n in range(tile.n_tiles)]
        w_words = [div(tile0, 4) + i // 2 + i % 2 * up_word for i in range(tile.n_tiles // 2)]
    else:
        w_tiles = [tile0 + n for n in range(tile.n_tiles)]
        w_words = [div(tile0, 2) + i for i in range(tile.n_tiles // 2)]
    return MxOperands.of_block(
        tile,
        k_dim=key.model_dim,
        w_rows=2 * key.inter_dim,
        row0=row0,
        expert=expert,
        a=global_buffer(fx.Uint8, rows.a, fx.Int64(rows.tokens) * a_row, CHUNK),
        a_chunks=a_chunks,
        a_left=a_left,
        a_scale=rows.a_scale,
        w=w1,
        w_scale=w1_scale,
        w_tiles=w_tiles,
        w_words=w_words,
    )


def _store_products(
    key: Stage1Key,
    loop: MxLoop,
    row0: fx.Int32,
    n_block: fx.Int32,
    batch: fx.Int32,
    out: fx.Int64,
) -> None:
    """Store the accumulators as this workgroup's part of the products."""
    tile = key.tile
    row_bytes = key.out_row_bytes
    target = global_buffer(
        fx.Uint8, out + fx.Int64(row0) * row_bytes, tile.tile_m * row_bytes, CHUNK
    )
    wave_groups = tile.n_tiles if key.apart else tile.n_tiles // 2
    group0 = n_block * (key.columns // 16) + loop.wave_n * wave_groups
    for m in range(tile.m_tiles):
        row = m * 16 + mod(loop.lane, 16)
        for n in range(tile.n_tiles):
            group, half = (group0 + n, 0) if key.apart else (group0 + n // 2, n % 2)
            column = group * 16 + div(loop.lane, 16) * 4 + half * key.inter_dim
            offset = row * row_bytes + (batch * (2 * key.inter_dim) + column) * 4
            store_bits(target, offset, loop.acc[None, n, m].load())


@dataclass(frozen=True)
class _Block:
    """What the epilogue needs: first row, first 16-column group, and what its formula reads."""

    row0: fx.Int32
    group0: fx.Int32
    expert: fx.Int32
    bias: fx.Int64
    weights: fx.Int64
    scalars: ActivationScalars


def _biases(key: Stage1Key, loop: MxLoop, block: _Block) -> list[fx.Vector]:
    """The bias of the lane's four columns of each weight tile; none without a bias."""
    if not key.bias:
        return []
    expert = block.bias + fx.Int64(block.expert) * (8 * key.inter_dim)
    result = []
    for n in range(loop.tile.n_tiles):
        column = (block.group0 + n // 2) * 16 + div(loop.lane, 16) * 4
        at = expert + fx.Int64(column + n % 2 * key.inter_dim) * 4
        result.append(fx.generic_load(global_pointer(fx.Float32, at, CHUNK), count=4))
    return result


def _activated(
    key: Stage1Key, loop: MxLoop, block: _Block, biases: list[fx.Vector], m: int
) -> list[list[fx.Float32]]:
    """The lane's four columns of each 16-column group in row tile `m`."""
    result = []
    weight = None
    if key.weighted:
        weights = global_pointer(fx.Float32, block.weights)
        weight = weights[block.row0 + m * 16 + mod(loop.lane, 16)]
    for pair in range(loop.tile.n_tiles // 2):
        gate = loop.acc[None, 2 * pair, m].load()
        up = loop.acc[None, 2 * pair + 1, m].load()
        if biases:
            gate, up = gate + biases[2 * pair], up + biases[2 * pair + 1]
        values = [gated(key.activation, gate[i], up[i], block.scalars) for i in range(4)]
        result.append(values if weight is None else [value * weight for value in values])
    return result


def _store(key: Stage1Key, loop: MxLoop, block: _Block, out: fx.Int64, out_scale: fx.Int64) -> None:
    tile = key.tile
    pairs = tile.n_tiles // 2
    row_bytes = key.out_row_bytes
    target = global_buffer(
        fx.Uint8, out + fx.Int64(block.row0) * row_bytes, tile.tile_m * row_bytes, CHUNK
    )
    scale_row = scale_row_words(key.inter_dim)
    scale_row0 = fx.Int64(div(block.row0, 32)) * (4 * scale_row)
    scales = global_buffer(fx.Uint8, out_scale + scale_row0, 4 * scale_row * tile.m_words, 4)
    first_row = mod(block.row0, 32) if tile.tile_m % 32 else fx.Int32(0)
    quad = div(loop.lane, 16)
    biases = _biases(key, loop, block)
    for m in range(tile.m_tiles):
        row = m * 16 + mod(loop.lane, 16)
        quads = _activated(key, loop, block, biases, m)
        if key.requant is None:
            for pair in range(pairs):
                values = fx.Vector.from_elements(quads[pair], fx.Float32).to(fx.BFloat16)
                column = (block.group0 + pair) * 16 + quad * 4
                store_bits(target, row * row_bytes + column * 2, values.bitcast(fx.Int32))
            continue
        for half in range(pairs // 2):
            both = quads[2 * half : 2 * half + 2]
            byte = scale_byte(_block_amax(both[0] + both[1]), key.requant)
            scale = scale_value(byte)
            for i, values in enumerate(both):
                column = (block.group0 + 2 * half + i) * 16 + quad * 4
                word = pack(values, scale, key.requant)
                if key.requant == "fp4":
                    store_bits(target, row * row_bytes + div(column, 2), fx.Int16(word))
                else:
                    store_bits(target, row * row_bytes + column, word)
            at = scale_offset(first_row + row, div(block.group0, 2) + half, scale_row)
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
