"""First half of a dense layer: what comes before its attention, which is an ordinary kernel.

norm1   normed rows of h_in
qkv     QKV projection
heads   per-head norm and rotary embedding; q to q_out, k and v into the caches
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from aiter.ops.flydsl.kernels.device import global_pointer
from aiter.ops.flydsl.kernels.tensor_shim import kernel_builder
from atom.mono.device.caches import HEAD_DIM, Caches
from atom.mono.device.cta import Cta
from atom.mono.device.heads import HeadInputs, finish_heads
from atom.mono.device.launch import persistent_kernel, persistent_launcher
from atom.mono.device.matvec import TILE_BYTES
from atom.mono.device.rms_norm import rms_norm

from ..builds import DensePreBuild
from ..layout import scratch_layout
from .parts import Regions, head_counts, project_qkv


@kernel_builder
def build_dense_pre(key: DensePreBuild) -> flyc.JitFunction:
    """Launcher (`builds.DENSE_PRE_ABI`, stream)."""
    shape, layout = key.shape, scratch_layout(key.shape)
    counts = head_counts(shape, indexed=False)

    @persistent_kernel(key.symbol)
    def m3_dense_pre(
        norm_w: fx.Int64,
        qkv_w: fx.Int64,
        qkv_s: fx.Int64,
        q_norm_w: fx.Int64,
        k_norm_w: fx.Int64,
        cos_sin: fx.Int64,
        k_cache: fx.Int64,
        v_cache: fx.Int64,
        cache_scales: fx.Int64,
        q_out: fx.Int64,
        scratch: fx.Int64,
        layer: fx.Int32,
        diag: fx.Int64,
        stamps: fx.Int64,
        h_in: fx.Int64,
        positions: fx.Int64,
        slots: fx.Int64,
    ):
        cta = Cta(shape.blocks, TILE_BYTES)
        regions = Regions(shape, layout, scratch, layer, diag, stamps)
        hidden, tokens = shape.dims.hidden, shape.tokens

        regions.enter(cta, "norm1")
        rms_norm(cta, h_in, norm_w, hidden, tokens, shape.eps, regions.words("normed1"))
        project_qkv(cta, regions, key.attn_format, qkv_w, qkv_s, shape.qkv_rows)

        def store_q(token: fx.Int32, head: fx.Int32, lane: fx.Int32, pair: fx.Int32) -> None:
            row = token * shape.heads + head
            global_pointer(fx.Int32, q_out)[row * (HEAD_DIM // 2) + lane] = pair

        regions.enter(cta, "heads")
        inputs = HeadInputs(q_norm_w, k_norm_w, q_norm_w, k_norm_w, cos_sin, positions, slots)
        finish_heads(
            cta,
            counts,
            tokens,
            shape.eps,
            regions.words("qkv"),
            shape.qkv_rows,
            inputs,
            Caches(shape.kv_heads, key.kv_format, k_cache, v_cache, cache_scales),
            store_q,
            None,
            None,
        )
        regions.leave(cta)

    return persistent_launcher(m3_dense_pre, key.symbol, shape.blocks)
