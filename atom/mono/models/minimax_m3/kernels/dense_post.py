"""Second half of a dense layer: output projection, all-reduce, norm, dense FFN, all-reduce."""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from aiter.ops.flydsl.kernels.tensor_shim import kernel_builder
from atom.mono.device.caches import HEAD_DIM
from atom.mono.device.cta import Cta
from atom.mono.device.expert_ffn import FfnShape
from atom.mono.device.launch import persistent_kernel, persistent_launcher
from atom.mono.device.matvec import PlainRows
from atom.mono.device.routing import RouteShape

from ..builds import DensePostBuild
from ..layout import scratch_layout
from .parts import PostInputs, Regions, finish_layer


@kernel_builder
def build_dense_post(key: DensePostBuild) -> flyc.JitFunction:
    """Launcher (`builds.DENSE_POST_ABI`, stream)."""
    shape, layout = key.shape, scratch_layout(key.shape)
    ffn = FfnShape(
        RouteShape(shape.tokens, experts=0, topk=0),
        shape.dims.hidden,
        shape.dense_inter,
        key.swiglu_limit,
    )

    @persistent_kernel(key.symbol)
    def m3_dense_post(
        attn_in: fx.Int64,
        o_w: fx.Int64,
        o_s: fx.Int64,
        norm_w: fx.Int64,
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
    ):
        cta = Cta(shape.blocks, ffn.lds_bytes)
        finish_layer(
            cta,
            Regions(shape, layout, scratch, layer, diag, stamps),
            key.attn_format,
            key.ffn_format,
            ffn,
            PlainRows(attn_in, shape.heads * HEAD_DIM),
            PostInputs(
                h_in=h_in,
                o_w=o_w,
                o_s=o_s,
                norm_w=norm_w,
                gate_up_w=gate_up_w,
                gate_up_s=gate_up_s,
                down_w=down_w,
                down_s=down_s,
                h_out=h_out,
                peers=peers,
                rank=rank,
            ),
        )

    return persistent_launcher(m3_dense_post, key.symbol, shape.blocks)
