"""Top-k routing of tokens to experts, and the list of experts that a width has to visit.

    score = sigmoid(logit)      chosen: the topk highest score + bias, of equals the lower id
    weight = route_scale * score / sum of the chosen scores

A wave is a token; lane l holds experts l, l + 64, ... The ids and weights are words
[tokens, topk]. A token whose slot is negative is padding: its ids are -1, so that no expert is
visited for it. Every workgroup makes of the ids the table of active experts it needs, in LDS.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import flydsl.expr as fx
from flydsl.expr.typing import T

from aiter.ops.flydsl.kernels.device import (
    LANES,
    TraceObject,
    div,
    exp2,
    global_pointer,
    load_word,
    mod,
    reciprocal,
    traced,
)
from atom.mono.plan.execution import THREADS

from .block_select import best_of
from .cta import Cta
from .sync import Run, Words, poll_runs

_NONE = -math.inf
_LOWEST = -3.0e38  # what a score that is no number counts as


@dataclass(frozen=True)
class RouteShape:
    """`topk` of `experts` for each of `tokens`; topk 0 is a dense FFN."""

    tokens: int
    experts: int
    topk: int

    def __post_init__(self) -> None:
        if self.routes > LANES:
            raise ValueError(f"{self}: a wave holds {LANES} routes")

    @property
    def routes(self) -> int:
        return self.tokens * self.topk

    @property
    def most(self) -> int:
        """Most experts that are active, the shared one included."""
        return min(self.routes, self.experts) + 1


def sigmoid(x: fx.Float32) -> fx.Float32:
    """1 / (1 + e^-x)."""
    return reciprocal(exp2(x * -math.log2(math.e)) + 1.0)


@traced
def route_tokens(
    cta: Cta,
    shape: RouteShape,
    logits: Words,
    row_words: int,
    bias: fx.Int64,
    route_scale: float,
    slots: fx.Int64,
    ids: Words,
    weights: Words,
) -> None:
    """Stage: choose experts from `logits` [tokens, row_words] f32 words; bias [experts] f32,
    slots [tokens] i32."""
    for token in range(cta.worker, fx.Int32(shape.tokens), fx.Int32(cta.waves)):
        padding = load_word(slots, fx.Int32(token)) < 0
        scores, ranked = _scores(cta.lane, shape, logits, fx.Int32(token) * row_words, bias)
        chosen, chosen_scores, total = _choose(shape, cta.lane, scores, ranked)
        factor = reciprocal(total) * route_scale
        for i in fx.range_constexpr(shape.topk):
            if cta.lane == i:
                index = fx.Int32(token) * shape.topk + i
                ids.push(index, padding.select(fx.Int32(-1), chosen[i]))
                weights.push_float(index, chosen_scores[i] * factor)


def _scores(
    lane: fx.Int32, shape: RouteShape, logits: Words, first: fx.Int32, bias: fx.Int64
) -> tuple[list[fx.Float32], list[fx.Float32]]:
    """Score and biased score of the lane's experts; the latter is -inf where there is none."""
    experts = [lane + i * LANES for i in range(-(-shape.experts // LANES))]
    known = [fx.min(expert, fx.Int32(shape.experts - 1)) for expert in experts]
    # Before the wait, so that they are there when the logits are.
    added = [global_pointer(fx.Float32, bias)[at] for at in known]
    polled = poll_runs([Run(logits, first + at) for at in known], 1)
    scores, ranked = [], []
    for expert, more, (logit,) in zip(experts, added, polled, strict=True):
        score = sigmoid(logit.bitcast(fx.Float32))
        biased = score + more
        biased = (biased > _LOWEST).select(biased, fx.Float32(_LOWEST))
        scores.append(score)
        ranked.append((expert < shape.experts).select(biased, fx.Float32(_NONE)))
    return scores, ranked


def _choose(
    shape: RouteShape, lane: fx.Int32, scores: list[fx.Float32], ranked: list[fx.Float32]
) -> tuple[list[fx.Int32], list[fx.Float32], fx.Float32]:
    """Ids and scores of the best `topk`, the same in every lane, and the sum of the scores."""
    chosen, chosen_scores, total = [], [], fx.Float32(0.0)
    for _ in range(shape.topk):
        best, found, score = ranked[0], lane, scores[0]
        for i in range(1, len(ranked)):
            better = ranked[i] > best
            found = better.select(lane + i * LANES, found)
            score = better.select(scores[i], score)
            best = better.select(ranked[i], best)
        _, expert = best_of(best, found, LANES)
        owner = mod(expert, LANES)
        score = fx.gpu.shuffle(score, owner, LANES, "idx")
        chosen.append(expert)
        chosen_scores.append(score)
        total = total + score
        ranked = [
            (expert == lane + i * LANES).select(fx.Float32(_NONE), value)
            for i, value in enumerate(ranked)
        ]
    return chosen, chosen_scores, total


class ActiveExperts(TraceObject):
    """The experts that some token of the width takes, in LDS from byte `offset` on.

    Entry i < count - 1 is a routed expert, in the order of the first route to it; routes to -1 are
    none. Entry count - 1 is the shared one, id `experts`, which every token takes as slot `topk`.
    """

    def __init__(self, cta: Cta, shape: RouteShape, shared_weight: float, offset: int) -> None:
        self.cta, self.shape, self.shared_weight = cta, shape, shared_weight
        words = cta.lds_words(offset)
        self._count = words
        self._routes = words + 4  # expert of each route
        self._weights = fx.recast_iter(fx.Float32, self._routes + shape.routes)
        self._experts = words + (4 + 2 * shape.routes)
        self._slots = self._experts + shape.most

    @staticmethod
    def lds_bytes(shape: RouteShape) -> int:
        return 4 * (4 + 2 * shape.routes + shape.most * (1 + shape.tokens))

    @traced
    def build(self, ids: Words | None, weights: Words | None) -> None:
        """Stage: every workgroup fills its own table."""
        if fx.const_expr(self.shape.topk > 0):
            self._build(ids, weights)

    @traced
    def _build(self, ids: Words, weights: Words) -> None:
        shape, thread = self.shape, self.cta.thread
        if thread < shape.routes:
            (expert,), (weight,) = poll_runs([Run(ids, thread), Run(weights, thread)], 1)
            self._routes[thread] = expert
            self._weights[thread] = weight.bitcast(fx.Float32)
        # A wave has a lane for every route, so the first one lists what it stored itself.
        if self.cta.wave == 0:
            self._list(self.cta.lane)
        fx.gpu.barrier()
        count = self._count[fx.Int32(0)]
        for entry in range(thread, count * shape.tokens, fx.Int32(THREADS)):
            active, token = div(fx.Int32(entry), shape.tokens), mod(fx.Int32(entry), shape.tokens)
            expert = self._experts[active]
            slot = (active == count - 1).select(fx.Int32(shape.topk), fx.Int32(-1))
            for i in fx.range_constexpr(shape.topk):
                taken = self._routes[token * shape.topk + i] == expert
                slot = taken.select(fx.Int32(i), slot)
            self._slots[fx.Int32(entry)] = slot
        fx.gpu.barrier()

    @traced
    def _list(self, lane: fx.Int32) -> None:
        shape = self.shape
        own = self._routes[fx.min(lane, fx.Int32(shape.routes - 1))]
        earliest = fx.Int32(LANES)
        for i in fx.range_constexpr(shape.routes):
            route = shape.routes - 1 - i
            same = fx.Int32(fx.rocdl.readlane(T.i32, own, route)) == own
            earliest = same.select(fx.Int32(route), earliest)
        first = (earliest == lane) & (own >= 0)
        mask = fx.Int64(fx.rocdl.ballot(T.i64, first))
        low, high = fx.Int32(mask), fx.Int32(fx.Uint64(mask) >> fx.Uint64(32))
        before = fx.Int32(
            fx.rocdl.mbcnt_hi(
                T.i32,
                high.ir_value(),
                fx.rocdl.mbcnt_lo(T.i32, low.ir_value(), fx.Int32(0).ir_value()),
            )
        )
        if first:
            self._experts[before] = own
        # Lanes beyond the routes see them all.
        total = before + first.select(fx.Int32(1), fx.Int32(0))
        if lane == LANES - 1:
            self._experts[total] = fx.Int32(shape.experts)
            self._count[fx.Int32(0)] = total + 1

    def count(self) -> fx.Int32:
        """How many experts are active, in every lane."""
        return self._count[fx.Int32(0)] if self.shape.topk else fx.Int32(1)

    def expert(self, active: fx.Int32) -> fx.Int32:
        """The id of an active expert."""
        return self._experts[active] if self.shape.topk else fx.Int32(0)

    def slot(self, active: fx.Int32, token: fx.Int32) -> fx.Int32:
        """The slot in which `token` takes an active expert, -1 if it does not."""
        if not self.shape.topk:
            return fx.Int32(0)
        return self._slots[active * self.shape.tokens + token]

    def weight(self, token: fx.Int32, slot: fx.Int32) -> fx.Float32:
        """The weight of a slot >= 0."""
        shared = fx.Float32(self.shared_weight)
        if not self.shape.topk:
            return shared
        route = token * self.shape.topk + fx.min(slot, fx.Int32(self.shape.topk - 1))
        return (slot == self.shape.topk).select(shared, self._weights[route])
