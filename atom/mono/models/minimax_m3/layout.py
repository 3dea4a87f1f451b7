"""Regions of scratch and of the peer buffer that a step's layer kernels hand over through.

Both buffers are made of mailbox words of 8 bytes, a 32-bit value and a 32-bit tag; scratch also
holds one plain region. A step uses one width, zeroes both buffers at its start and tags what a
layer writes with `layer + 1`, so the layers of a step share all regions.

`writer` names the stage that writes a region. `space` is "scratch" (device scope), "peer"
(system scope; written by every rank, into its own part) or "own" (the reader wrote it itself).
"""

from __future__ import annotations

from dataclasses import dataclass

from .builds import HEAD_DIM, LayerShape, SparseBuild

WORD = 8
_ALIGN = 256


@dataclass(frozen=True)
class Region:
    """`bytes` at `offset` of a buffer."""

    name: str
    space: str
    writer: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Layout:
    """A buffer's regions, in ascending offsets without overlap; `bytes` is the buffer's size."""

    regions: tuple[Region, ...]
    bytes: int

    def __getitem__(self, name: str) -> Region:
        for region in self.regions:
            if region.name == name:
                return region
        raise KeyError(name)


def _laid_out(entries: list[tuple[str, str, str, int]]) -> Layout:
    regions, offset = [], 0
    for name, space, writer, size in entries:
        regions.append(Region(name, space, writer, offset, size))
        offset += -(-size // _ALIGN) * _ALIGN
    return Layout(tuple(regions), offset)


def scratch_layout(shape: LayerShape, sparse: SparseBuild | None = None) -> Layout:
    """Scratch of the dense kernels of `shape`, and with `sparse` of that layer's too.

    Dense regions come first and are the same with and without `sparse`, whose `select` does not
    matter: one buffer serves all kernels of a width.
    """
    t, hidden = shape.tokens, shape.dims.hidden
    rows = shape.qkv_rows + shape.index_rows
    inter = max(shape.dense_inter, (shape.dims.topk + 1) * shape.inter)
    entries = [
        ("normed1", "scratch", "norm1", t * hidden // 2 * WORD),
        ("qkv", "scratch", "qkv", t * rows * WORD),
        ("mid", "own", "reduce_attn", t * hidden * 2),
        ("normed2", "scratch", "reduce_attn", t * hidden // 2 * WORD),
        ("activated", "scratch", "gate_up", t * inter // 2 * WORD),
    ]
    if sparse is not None:
        kv = shape.kv_heads
        entries += [
            ("q", "scratch", "heads", t * shape.heads * HEAD_DIM // 2 * WORD),
            ("index_q", "scratch", "heads", t * kv * shape.index_group * HEAD_DIM // 2 * WORD),
            ("inserted", "scratch", "heads", t * (2 * kv + 1) * WORD),
            ("block_scores", "scratch", "index_scores", t * kv * sparse.max_blocks * WORD),
            ("selected", "scratch", "select", t * kv * sparse.index_topk * WORD),
            ("attended", "scratch", "attention", t * shape.heads * HEAD_DIM // 2 * WORD),
            ("logits", "scratch", "router", t * -(-shape.dims.experts // 16) * 16 * WORD),
            ("route_ids", "scratch", "routing", t * shape.dims.topk * WORD),
            ("route_weights", "scratch", "routing", t * shape.dims.topk * WORD),
        ]
    return _laid_out(entries)


def peer_layout(shape: LayerShape) -> Layout:
    """A rank's peer buffer: partial sums of each rank [tp, tokens, hidden], f32 words."""
    size = shape.tp * shape.tokens * shape.dims.hidden * WORD
    return _laid_out([("attn_sums", "peer", "o_proj", size), ("ffn_sums", "peer", "down", size)])
