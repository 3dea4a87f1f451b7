"""What the layer kernels have in common: regions and stages by name, and a layer's second half.

o_proj        partial sums of the output projection to every rank
reduce_attn   mid = h_in + their sum; norm2
...           routing, where the layer has experts
gate_up, down the FFN; partial sums to every rank
reduce_ffn    h_out = mid + their sum
"""

from __future__ import annotations

from dataclasses import dataclass

import flydsl.expr as fx

from aiter.ops.flydsl.kernels.device import TraceObject
from atom.mono.device.all_reduce import Exchange
from atom.mono.device.caches import HEAD_DIM
from atom.mono.device.cta import Cta
from atom.mono.device.expert_ffn import FFN_BYTES, FfnShape, down, gate_up
from atom.mono.device.heads import HeadCounts
from atom.mono.device.matvec import PlainRows, Weight, WordRows, matvec
from atom.mono.device.rms_norm import reduce_norm, reduce_rows
from atom.mono.device.routing import ActiveExperts, route_tokens
from atom.mono.device.stamps import Stamps
from atom.mono.device.sync import Waits, Words
from atom.mono.plan.layout import Layout
from atom.mono.plan.trace import Space, enter_stage

from ..builds import LayerShape
from ..layout import peer_layout


class Regions(TraceObject):
    """A launch's mailbox words, by region name, and its stages."""

    def __init__(
        self,
        shape: LayerShape,
        layout: Layout,
        scratch: fx.Int64,
        layer: fx.Int32,
        diag: fx.Int64,
        stamps: fx.Int64,
    ) -> None:
        self.shape, self.layout, self.scratch = shape, layout, scratch
        self.tag = layer + 1
        self.waits = Waits(diag, shape.debug, shape.polls)
        self._stamps = Stamps(stamps, shape.timeline)

    def enter(self, cta: Cta, stage: str) -> None:
        """What is traced from here on is `stage`."""
        enter_stage(stage)
        self._stamps.mark(cta)

    def leave(self, cta: Cta) -> None:
        """The last stage ends here."""
        self._stamps.mark(cta)

    def words(self, name: str) -> Words:
        return Words(name, Space.SCRATCH, self.address(name), self.tag, self.waits)

    def address(self, name: str) -> fx.Int64:
        return self.scratch + self.layout[name].offset

    def exchange(self, name: str, peers: fx.Int64, rank: fx.Int32) -> Exchange:
        return Exchange(
            name,
            peers,
            peer_layout(self.shape)[name].offset,
            rank,
            self.shape.tp,
            self.shape.tokens,
            self.shape.dims.hidden,
            self.tag,
            self.waits,
        )


def head_counts(shape: LayerShape, indexed: bool) -> HeadCounts:
    """The heads of a rank's QKV rows."""
    index_q = shape.kv_heads * shape.index_group if indexed else 0
    return HeadCounts(shape.heads, shape.kv_heads, index_q, shape.dims.rotary)


def project_qkv(
    cta: Cta, regions: Regions, fmt: str, data: fx.Int64, scale: fx.Int64, rows: int
) -> None:
    """Stage "qkv": f32 words [tokens, rows] of the normed rows."""
    regions.enter(cta, "qkv")
    hidden = regions.shape.dims.hidden
    qkv = regions.words("qkv")

    def emit(row: fx.Int32, token: fx.Int32, low: fx.Float32, high: fx.Float32) -> None:
        qkv.push_float(token * rows + row, low)
        qkv.push_float(token * rows + row + 1, high)

    weight = Weight(fmt, data, scale, rows, hidden)
    source = WordRows(regions.words("normed1"), hidden)
    matvec(cta, weight, source, regions.shape.tokens, emit)


@dataclass(frozen=True)
class PostInputs:
    """Addresses of the second half of a layer, by their names in the ABI; with experts a
    router, and the slots that tell which rows are padding."""

    h_in: fx.Int64
    o_w: fx.Int64
    o_s: fx.Int64
    norm_w: fx.Int64
    gate_up_w: fx.Int64
    gate_up_s: fx.Int64
    down_w: fx.Int64
    down_s: fx.Int64
    h_out: fx.Int64
    peers: fx.Int64
    rank: fx.Int32
    router_w: fx.Int64 | None = None
    router_bias: fx.Int64 | None = None
    slots: fx.Int64 | None = None


def finish_layer(
    cta: Cta,
    regions: Regions,
    attn_format: str,
    ffn_format: str,
    ffn: FfnShape,
    attended: PlainRows | WordRows,
    given: PostInputs,
    route_scale: float = 1.0,
    shared_weight: float = 1.0,
) -> None:
    """The stages from the output projection to h_out."""
    shape, tokens, hidden = regions.shape, regions.shape.tokens, regions.shape.dims.hidden
    attn_sums = regions.exchange("attn_sums", given.peers, given.rank)
    ffn_sums = regions.exchange("ffn_sums", given.peers, given.rank)
    normed = regions.words("normed2")

    regions.enter(cta, "o_proj")
    o_proj = Weight(attn_format, given.o_w, given.o_s, hidden, shape.heads * HEAD_DIM)
    matvec(cta, o_proj, attended, tokens, attn_sums.push)

    regions.enter(cta, "reduce_attn")
    mid = regions.address("mid")
    eps = shape.eps
    reduce_norm(cta, attn_sums, given.h_in, given.norm_w, hidden, tokens, eps, mid, normed)

    active = ActiveExperts(cta, ffn.route, shared_weight, FFN_BYTES)
    if ffn.route.topk:
        _route(cta, regions, ffn, normed, given, route_scale)
        regions.enter(cta, "experts")
        active.build(regions.words("route_ids"), regions.words("route_weights"))

    regions.enter(cta, "gate_up")
    both = Weight(ffn_format, given.gate_up_w, given.gate_up_s, 2 * ffn.inter, hidden)
    activated = regions.words("activated")
    gate_up(cta, ffn, active, both, WordRows(normed, hidden), activated)

    regions.enter(cta, "down")
    last = Weight(ffn_format, given.down_w, given.down_s, hidden, ffn.inter)
    down(cta, ffn, active, last, activated, ffn_sums.push)

    regions.enter(cta, "reduce_ffn")
    reduce_rows(cta, ffn_sums, mid, hidden, tokens, given.h_out)
    regions.leave(cta)


def _route(
    cta: Cta,
    regions: Regions,
    ffn: FfnShape,
    normed: Words,
    given: PostInputs,
    route_scale: float,
) -> None:
    hidden, rows = ffn.hidden, -(-ffn.route.experts // 16) * 16
    logits = regions.words("logits")

    def emit(row: fx.Int32, token: fx.Int32, low: fx.Float32, high: fx.Float32) -> None:
        logits.push_float(token * rows + row, low)
        logits.push_float(token * rows + row + 1, high)

    regions.enter(cta, "router")
    # bf16 weights have no scales.
    router = Weight("bf16", given.router_w, given.router_w, rows, hidden)
    matvec(cta, router, WordRows(normed, hidden), ffn.route.tokens, emit)

    regions.enter(cta, "routing")
    ids, weights = regions.words("route_ids"), regions.words("route_weights")
    route_tokens(
        cta, ffn.route, logits, rows, given.router_bias, route_scale, given.slots, ids, weights
    )
