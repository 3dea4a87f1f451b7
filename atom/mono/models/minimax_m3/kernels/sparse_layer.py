"""A whole sparse layer in one launch.

    norm1          normed rows of h_in
    qkv            QKV projection, the index heads' with it
    heads          per-head norm and rotary embedding; k, v and index k into the caches
    index_scores   score of every block of every token
    select         blocks to attend to, also kept for layers that reuse them
    attention      over the chosen blocks
    merge          what several workgroups attended to for one token, where they share it
    o_proj, reduce_attn, router, routing, experts, gate_up, down, reduce_ffn      `parts`

A layer that reuses the last selection has no index heads and skips the scores and the choice.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from aiter.ops.flydsl.kernels.tensor_shim import kernel_builder
from atom.mono.device.attention import (
    ATTENTION_BYTES,
    AttentionShape,
    ChosenBlocks,
    attention,
    await_inserted,
    merge_attention,
)
from atom.mono.device.block_select import SelectShape, index_scores, select_blocks
from atom.mono.device.caches import HEAD_DIM, Caches
from atom.mono.device.cta import Cta
from atom.mono.device.expert_ffn import FfnShape
from atom.mono.device.heads import HeadInputs, finish_heads
from atom.mono.device.launch import persistent_kernel, persistent_launcher
from atom.mono.device.matvec import WordRows
from atom.mono.device.rms_norm import rms_norm
from atom.mono.device.routing import RouteShape

from ..builds import SparseBuild
from ..layout import scratch_layout
from .parts import PostInputs, Regions, finish_layer, head_counts, project_qkv


@kernel_builder
def build_sparse_layer(key: SparseBuild) -> flyc.JitFunction:
    """Launcher (`builds.SPARSE_ABI`, stream)."""
    shape, layout = key.shape, scratch_layout(key.shape, key)
    dims, tokens = shape.dims, shape.tokens
    counts = head_counts(shape, indexed=key.select)
    chooser = SelectShape(
        shape.kv_heads,
        shape.index_group,
        key.index_topk,
        key.init_blocks,
        key.local_blocks,
        key.max_blocks,
    )
    splits = key.attention_splits
    attending = AttentionShape(shape.heads, shape.group, key.index_topk, key.sm_scale, splits)
    ffn = FfnShape(
        RouteShape(tokens, dims.experts, dims.topk), dims.hidden, shape.inter, key.swiglu_limit
    )
    lds_bytes = max(ATTENTION_BYTES, ffn.lds_bytes, chooser.lds_bytes if key.select else 0)

    @persistent_kernel(key.symbol)
    def m3_sparse_layer(
        norm1_w: fx.Int64,
        qkv_w: fx.Int64,
        qkv_s: fx.Int64,
        q_norm_w: fx.Int64,
        k_norm_w: fx.Int64,
        iq_norm_w: fx.Int64,
        ik_norm_w: fx.Int64,
        cos_sin: fx.Int64,
        k_cache: fx.Int64,
        v_cache: fx.Int64,
        index_cache: fx.Int64,
        cache_scales: fx.Int64,
        selection: fx.Int64,
        o_w: fx.Int64,
        o_s: fx.Int64,
        norm2_w: fx.Int64,
        router_w: fx.Int64,
        router_bias: fx.Int64,
        gate_up_w: fx.Int64,
        gate_up_s: fx.Int64,
        down_w: fx.Int64,
        down_s: fx.Int64,
        scratch: fx.Int64,
        peers: fx.Int64,
        rank: fx.Int32,
        layer: fx.Int32,
        diag: fx.Int64,
        stamps: fx.Int64,
        h_out: fx.Int64,
        h_in: fx.Int64,
        positions: fx.Int64,
        slots: fx.Int64,
        block_table: fx.Int64,
        table_stride: fx.Int32,
    ):
        cta = Cta(shape.blocks, lds_bytes)
        regions = Regions(shape, layout, scratch, layer, diag, stamps)

        regions.enter(cta, "norm1")
        rms_norm(cta, h_in, norm1_w, dims.hidden, tokens, shape.eps, regions.words("normed1"))
        project_qkv(cta, regions, key.attn_format, qkv_w, qkv_s, key.qkv_rows)

        queries, index_queries = regions.words("q"), regions.words("index_q")
        inserted = regions.words("inserted")

        def store_q(token: fx.Int32, head: fx.Int32, lane: fx.Int32, pair: fx.Int32) -> None:
            row = token * counts.q + head
            queries.push(row * (HEAD_DIM // 2) + lane, pair)

        def store_index_q(token: fx.Int32, head: fx.Int32, lane: fx.Int32, pair: fx.Int32) -> None:
            row = token * counts.index_q + head
            index_queries.push(row * (HEAD_DIM // 2) + lane, pair)

        regions.enter(cta, "heads")
        caches = Caches(
            shape.kv_heads,
            key.kv_format,
            k_cache,
            v_cache,
            cache_scales,
            key.index_format,
            index_cache,
        )
        finish_heads(
            cta,
            counts,
            tokens,
            shape.eps,
            regions.words("qkv"),
            key.qkv_rows,
            HeadInputs(q_norm_w, k_norm_w, iq_norm_w, ik_norm_w, cos_sin, positions, slots),
            caches,
            store_q,
            store_index_q if key.select else None,
            inserted,
        )

        regions.enter(cta, "index_scores" if key.select else "attention")
        await_inserted(cta, inserted, tokens * counts.inserted)
        chosen = ChosenBlocks(key.index_topk, None, selection)
        if fx.const_expr(key.select):
            scores, selected = regions.words("block_scores"), regions.words("selected")
            index_rows = WordRows(index_queries, HEAD_DIM)
            index_scores(
                cta,
                chooser,
                tokens,
                index_rows,
                caches.index,
                positions,
                block_table,
                table_stride,
                scores,
            )
            regions.enter(cta, "select")
            select_blocks(cta, chooser, tokens, positions, scores, selected, selection)
            chosen = ChosenBlocks(key.index_topk, selected, None)
            regions.enter(cta, "attention")
        attended = regions.words("attended")
        parts = regions.words("attn_parts") if splits > 1 else attended
        attention(
            cta,
            attending,
            tokens,
            WordRows(queries, HEAD_DIM),
            caches,
            chosen,
            positions,
            block_table,
            table_stride,
            parts,
        )
        if fx.const_expr(splits > 1):
            regions.enter(cta, "merge")
            merge_attention(cta, attending, tokens, parts, caches, attended)

        finish_layer(
            cta,
            regions,
            key.attn_format,
            key.ffn_format,
            ffn,
            WordRows(attended, shape.heads * HEAD_DIM),
            PostInputs(
                h_in=h_in,
                o_w=o_w,
                o_s=o_s,
                norm_w=norm2_w,
                gate_up_w=gate_up_w,
                gate_up_s=gate_up_s,
                down_w=down_w,
                down_s=down_s,
                h_out=h_out,
                peers=peers,
                rank=rank,
                router_w=router_w,
                router_bias=router_bias,
                slots=slots,
            ),
            key.route_scale,
            key.shared_weight,
        )

    return persistent_launcher(m3_sparse_layer, key.symbol, shape.blocks)
