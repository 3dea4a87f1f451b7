"""Routing and the experts' FFN against torch."""

from __future__ import annotations

import pytest
import torch

from atom.mono.device.expert_ffn import FFN_BYTES, FfnShape, down, gate_up
from atom.mono.device.matvec import Weight, WordRows
from atom.mono.device.routing import ActiveExperts, RouteShape, route_tokens
from atom.mono.device.sync import Words
from atom.mono.plan.trace import Space
from op_tests.moe.cases import routing, spread
from op_tests.mono import torch_m3
from op_tests.torch_moe import relative_l2

from .stages import StoredWeight, empty_words, floats_in, run_stage, stage_launcher, words_of

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize(("experts", "topk", "order"), [(128, 4, "random"), (20, 3, "lockstep")])
def test_tokens_are_routed_by_biased_sigmoid(emulate, experts, topk, order):
    g = torch.Generator().manual_seed(experts)
    tokens, row = 11, -(-experts // 16) * 16
    logits = torch.randn(tokens, row, generator=g)
    logits[3, :experts] = 0.5  # all equal: the bias decides, and then the lower id
    bias = torch.randn(experts, generator=g).round(decimals=1) * 0.1
    slots = torch.arange(tokens, dtype=torch.int32)
    slots[[1, 7]] = -1
    ids, weights = empty_words(tokens * topk), empty_words(tokens * topk)
    shape = RouteShape(tokens, experts, topk)

    def body(cta, addresses, number, waits):
        words = [Words("test", Space.SCRATCH, a, number, waits) for a in addresses[:3]]
        route_tokens(cta, shape, words[0], row, addresses[3], 2.0, addresses[4], words[1], words[2])

    emulate("gfx950", order=order, poison=True)
    run_stage(stage_launcher(body), [words_of(logits, 6), ids, weights, bias, slots], 6)
    want_ids, want = torch_m3.route(logits[:, :experts], bias, topk, 2.0)
    want_ids[slots < 0] = -1
    assert torch.equal(ids[:, 0].view(tokens, topk).long(), want_ids)
    assert (ids[:, 1] == 6).all()
    assert relative_l2(floats_in(weights, 6).view(tokens, topk), want) < 1e-6


def ffn_launcher(shape: FfnShape, fmt: str, shared: float, blocks: int):
    """y [tokens, hidden] f32 words, from words of x and of the routes."""
    route, hidden, inter = shape.route, shape.hidden, shape.inter

    def body(cta, addresses, number, waits):
        y, x, ids, weights, act, gu, gu_s, dn, dn_s = addresses[:9]
        words = lambda a: Words("test", Space.SCRATCH, a, number, waits)
        active = ActiveExperts(cta, route, shared, FFN_BYTES)
        active.build(words(ids), words(weights))
        both = Weight(fmt, gu, gu_s, 2 * inter, hidden)
        gate_up(cta, shape, active, both, WordRows(words(x), hidden), words(act))

        def emit(row, token, low, high):
            out = words(y)
            out.push_float(token * hidden + row, low)
            out.push_float(token * hidden + row + 1, high)

        down(cta, shape, active, Weight(fmt, dn, dn_s, hidden, inter), words(act), emit)

    return stage_launcher(body, blocks, shape.lds_bytes)


@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "hidden", "inter", "fmt", "kind", "blocks", "order"),
    [
        (16, 6, 4, 256, 256, "fp4", "even", 3, "lockstep"),
        (3, 5, 2, 256, 384, "fp8", "skewed", 3, "random"),
        (1, 9, 4, 256, 384, "bf16", "even", 3, "lockstep"),
        (8, 6, 2, 256, 128, "fp4", "one", 3, "lockstep"),
        (5, 0, 0, 256, 384, "fp4", "dense", 3, "lockstep"),
        (1, 4, 1, 384, 128, "fp4", "even", 18, "random"),  # more workgroups than gate and up tasks
        (4, 6, 2, 256, 128, "fp4", "half padding", 3, "random"),
        (2, 6, 2, 256, 128, "fp8", "all padding", 3, "lockstep"),
    ],
)
def test_experts_of_every_routing(
    emulate, tokens, experts, topk, hidden, inter, fmt, kind, blocks, order
):
    g = torch.Generator().manual_seed(tokens + experts)
    shape = FfnShape(RouteShape(tokens, experts, topk), hidden, inter, 7.0)
    size = 0.3  # large enough to reach the limit
    weights = [
        StoredWeight.of(spread(experts + 1, n, k, generator=g, size=size), fmt)
        for n, k in ((2 * inter, hidden), (hidden, inter))
    ]
    x = torch.randn(tokens, hidden, generator=g).to(torch.bfloat16)
    ids = torch.zeros(tokens, 0, dtype=torch.int32)
    # Padding takes no routed expert, only the shared one.
    taken = torch.ones(tokens, topk + 1, dtype=torch.bool)
    padding = {"half padding": slice(1, None, 2), "all padding": slice(None)}.get(kind)
    if padding is not None:
        taken[padding, :topk] = False
    if topk:
        ids = routing(tokens, topk, experts, "even" if padding else kind, g)
        ids = ids.where(taken[:, :topk], -1)
    route = torch.rand(tokens, topk, generator=g)
    y, act = empty_words(tokens * hidden), empty_words(tokens * (topk + 1) * inter // 2)
    emulate("gfx950", order=order, poison=True)
    data = [t for w in weights for t in (w.data, w.scale)]
    given = [words_of(x, 8), words_of(ids, 8), words_of(route, 8), act]
    run_stage(ffn_launcher(shape, fmt, 0.75, blocks), [y, *given, *data], 8)
    assert torch.equal(
        act[:, 1].view(tokens, topk + 1, -1) == 8, taken[..., None].expand(-1, -1, inter // 2)
    )
    experts_of = torch_m3.Experts(weights[0].value, weights[1].value)
    want = experts_of(x.float(), ids.clamp(min=0), route * taken[:, :topk], 0.75, 7.0)
    assert relative_l2(floats_in(y, 8).view(tokens, hidden), want) < 1e-3


def test_too_many_routes_are_refused():
    with pytest.raises(ValueError, match="64 routes"):
        RouteShape(16, 128, 5)
