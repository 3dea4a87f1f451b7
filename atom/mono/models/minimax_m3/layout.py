"""Regions of scratch and of the peer buffer that a step's layer kernels hand over through.

Both buffers are made of mailbox words of 8 bytes, a 32-bit value and a 32-bit tag; "mid" alone is
plain memory, which the thread that wrote it reads. A step uses one width, zeroes both buffers at
its start and tags what a layer writes with `layer + 1`, so all layers of a step share the
regions. Words of a peer region are numbered [rank that wrote][token][column].
"""

from __future__ import annotations

from atom.mono.plan.check import RegionDecl
from atom.mono.plan.layout import Layout
from atom.mono.plan.trace import Space

from .builds import HEAD_DIM, DensePostBuild, DensePreBuild, LayerShape, SparseBuild

WORD = 8  # bytes
PART_WORDS = HEAD_DIM + 2  # of a head's attention over a part of its keys


def scratch_layout(shape: LayerShape, sparse: SparseBuild | None = None) -> Layout:
    """Scratch of the dense kernels of `shape`, and with `sparse` of that layer's too.

    Dense regions come first and are the same with and without `sparse`, whose `select` does not
    matter: one buffer serves all kernels of a width.
    """
    t, d, kv = shape.tokens, shape.dims, shape.kv_heads
    inter = max(shape.dense_inter, (d.topk + 1) * shape.inter)
    layout = Layout(Space.SCRATCH)
    layout.place("normed1", t * d.hidden // 2 * WORD)
    layout.place("qkv", t * (shape.qkv_rows + shape.index_rows) * WORD)
    layout.place("mid", t * d.hidden * 2)
    layout.place("normed2", t * d.hidden // 2 * WORD)
    layout.place("activated", t * inter // 2 * WORD)
    if sparse is not None:
        layout.place("q", t * shape.heads * HEAD_DIM // 2 * WORD)
        layout.place("index_q", t * kv * shape.index_group * HEAD_DIM // 2 * WORD)
        layout.place("inserted", t * (2 * kv + 1) * WORD)
        layout.place("block_scores", t * kv * sparse.max_blocks * WORD)
        layout.place("selected", t * kv * sparse.index_topk * WORD)
        splits = sparse.attention_splits
        if splits > 1:
            words = t * shape.heads * splits * PART_WORDS
            layout.place("attn_parts", words * WORD)
        layout.place("attended", t * shape.heads * HEAD_DIM // 2 * WORD)
        layout.place("logits", t * -(-d.experts // 16) * 16 * WORD)
        layout.place("route_ids", t * d.topk * WORD)
        layout.place("route_weights", t * d.topk * WORD)
    return layout


def peer_layout(shape: LayerShape) -> Layout:
    """A rank's peer buffer: partial sums of every rank, f32 words [tp, tokens, hidden]."""
    size = shape.tp * shape.tokens * shape.dims.hidden * WORD
    layout = Layout(Space.PEER)
    layout.place("attn_sums", size)
    layout.place("ffn_sums", size)
    return layout


_POST_WRITERS = {"normed2": "reduce_attn", "activated": "gate_up"}
_FULL_WRITERS = {"index_q": "heads", "block_scores": "index_scores", "selected": "select"}
_SPARSE_WRITERS = {
    "normed1": "norm1",
    "qkv": "qkv",
    "q": "heads",
    "inserted": "heads",
    "attended": "attention",
    "logits": "router",
    "route_ids": "routing",
    "route_weights": "routing",
}
_PEER_WRITERS = {"attn_sums": "o_proj", "ffn_sums": "down"}


def hand_offs(build: DensePreBuild | DensePostBuild | SparseBuild) -> tuple[RegionDecl, ...]:
    """The regions that the kernel of `build` hands over through, each with its writing stage."""
    peer: dict[str, str] = _PEER_WRITERS
    if isinstance(build, DensePreBuild):
        scratch, peer = {"normed1": "norm1", "qkv": "qkv"}, {}
    elif isinstance(build, DensePostBuild):
        scratch = _POST_WRITERS
    else:
        scratch = _SPARSE_WRITERS | _POST_WRITERS | (_FULL_WRITERS if build.select else {})
        if build.attention_splits > 1:
            scratch = scratch | {"attn_parts": "attention", "attended": "merge"}
    return (
        *(RegionDecl(name, Space.SCRATCH, writer) for name, writer in scratch.items()),
        *(RegionDecl(name, Space.PEER, writer) for name, writer in peer.items()),
    )
