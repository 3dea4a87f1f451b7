"""Second half of a dense layer: output projection, all-reduce, norm, dense FFN, all-reduce."""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from aiter.ops.flydsl.kernels.tensor_shim import kernel_builder
from atom.mono.device.cta import Cta
from atom.mono.device.expert_ffn import FfnShape
from atom.mono.device.heads import HEAD_DIM
from atom.mono.device.matvec import PlainRows
from atom.mono.device.routing import RouteShape
from atom.mono.plan.execution import THREADS

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

    @flyc.kernel(known_block_size=[THREADS, 1, 1])
    def m3_dense_post(
        h_in: fx.Int64,
        attn_in: fx.Int64,
        o_w: fx.Int64,
        o_s: fx.Int64,
        norm_w: fx.Int64,
        gate_up_w: fx.Int64,
        gate_up_s: fx.Int64,
        down_w: fx.Int64,
        down_s: fx.Int64,
        h_out: fx.Int64,
        scratch: fx.Int64,
        peers: fx.Int64,
        rank: fx.Int32,
        layer: fx.Int32,
        diag: fx.Int64,
    ):
        cta = Cta(shape.blocks, ffn.lds_bytes)
        finish_layer(
            cta,
            Regions(shape, layout, scratch, layer, diag),
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

    @flyc.jit
    def launch_m3_dense_post(
        h_in: fx.Int64,
        attn_in: fx.Int64,
        o_w: fx.Int64,
        o_s: fx.Int64,
        norm_w: fx.Int64,
        gate_up_w: fx.Int64,
        gate_up_s: fx.Int64,
        down_w: fx.Int64,
        down_s: fx.Int64,
        h_out: fx.Int64,
        scratch: fx.Int64,
        peers: fx.Int64,
        rank: fx.Int32,
        layer: fx.Int32,
        diag: fx.Int64,
        stream: fx.Stream,
    ):
        m3_dense_post(
            h_in,
            attn_in,
            o_w,
            o_s,
            norm_w,
            gate_up_w,
            gate_up_s,
            down_w,
            down_s,
            h_out,
            scratch,
            peers,
            rank,
            layer,
            diag,
        ).launch(grid=(shape.blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)

    return launch_m3_dense_post
