"""The FFN of the active experts: gate and up projections, activation, down projection.

    a[t, s, :] = bf16(weight(t, s) * act(Wg[e] x[t], Wu[e] x[t]))     e the expert in slot s of t
    y[t, :] = sum over slots s of Wd[e] a[t, s, :]
    act(g, u) = g' * sigmoid(1.702 g') * (u' + 1)
    g' = min(g, limit)      u' = clamp(u, -limit, limit)

An expert is visited once for all tokens that take it. Gate and up: a task is 16 gate rows and the
16 up rows that belong to them. Down: a task is 16 rows of y; the waves of a workgroup share out
the 128-element steps of all active experts, a token's column being zero where it does not take
the expert. A dense FFN is the same with the shared expert alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import flydsl.expr as fx

from aiter.ops.flydsl.kernels.device import div, mod, traced, uniform
from atom.mono.plan.execution import WAVES

from .cta import Cta
from .matvec import (
    AHEAD,
    TILE,
    TILE_BYTES,
    Emit,
    Step,
    Weight,
    WordRows,
    add_steps,
    finish_tiles,
    next_steps,
    steps_ahead,
    zero_tile,
)
from .routing import ActiveExperts, RouteShape, sigmoid
from .sync import Words

FFN_BYTES = 2 * TILE_BYTES  # LDS, below the table of active experts
_ALPHA = 1.702


@dataclass(frozen=True)
class FfnShape:
    """A rank's part of the experts."""

    route: RouteShape
    hidden: int
    inter: int
    limit: float

    @property
    def slots(self) -> int:
        return self.route.topk + 1

    @property
    def lds_bytes(self) -> int:
        return FFN_BYTES + ActiveExperts.lds_bytes(self.route)


def swiglu(gate: fx.Float32, up: fx.Float32, limit: float) -> fx.Float32:
    """The clamped gated activation."""
    gate = fx.min(gate, fx.Float32(limit))
    up = fx.max(fx.min(up, fx.Float32(limit)), fx.Float32(-limit))
    return gate * sigmoid(gate * _ALPHA) * (up + 1.0)


@traced
def gate_up(
    cta: Cta,
    shape: FfnShape,
    active: ActiveExperts,
    weight: Weight,
    x: WordRows,
    activated: Words,
) -> None:
    """Stage: activated [tokens, slots, inter] bf16 pairs of x [tokens, hidden].

    weight: one expert's [2 * inter, hidden] of a stack. Uses `FFN_BYTES` of LDS.
    """
    tokens = shape.route.tokens
    column = fx.min(mod(cta.lane, 16), fx.Int32(tokens - 1))
    tiles = shape.inter // TILE
    for task in range(cta.block, uniform(active.count()) * tiles, fx.Int32(cta.blocks)):
        entry, tile = div(fx.Int32(task), tiles), mod(fx.Int32(task), tiles)
        expert = weight.of_expert(uniform(active.expert(entry)))
        gates = zero_tile()
        ups = zero_tile()
        for first in range(cta.wave, fx.Int32(weight.steps), fx.Int32(WAVES * steps_ahead(weight))):
            steps = next_steps(expert, [tile, tile + tiles], fx.Int32(first), column)
            gates, ups = add_steps(steps, x, cta.lane, [gates, ups])
        (g_low, g_high), (u_low, u_high) = finish_tiles(cta, [gates, ups])
        token = mod(cta.thread, 16)
        if (cta.thread < TILE // 2 * TILE) & (token < tokens):
            slot = active.slot(entry, token)
            if slot >= 0:
                by = active.weight(token, slot)
                row = tile * (TILE // 2) + div(cta.thread, 16)
                activated.push_pair(
                    (token * shape.slots + slot) * (shape.inter // 2) + row,
                    swiglu(g_low, u_low, shape.limit) * by,
                    swiglu(g_high, u_high, shape.limit) * by,
                )


def _down_steps(
    shape: FfnShape,
    active: ActiveExperts,
    weight: Weight,
    tile: fx.Int32,
    first: fx.Int32,
    count: fx.Int32,
    column: fx.Int32,
) -> list[Step]:
    """A wave's next steps of all active experts, numbered expert by expert up to `count`."""
    if not shape.route.topk:
        return next_steps(weight, [tile], first, column)
    steps = []
    for i in range(AHEAD[weight.fmt]):
        work = fx.min(first + i * WAVES, count - 1)
        entry = div(work, weight.steps)
        slot = active.slot(entry, column)
        steps.append(
            Step(
                weight.of_expert(uniform(active.expert(entry))),
                [tile],
                mod(work, weight.steps),
                column * shape.slots + fx.max(slot, fx.Int32(0)),
                (slot >= 0) & (first + i * WAVES < count),
            )
        )
    return steps


@traced
def down(
    cta: Cta,
    shape: FfnShape,
    active: ActiveExperts,
    weight: Weight,
    activated: Words,
    emit: Emit,
) -> None:
    """Stage: `emit` the rows of y. weight: one expert's [hidden, inter] of a stack.

    Uses `FFN_BYTES` of LDS.
    """
    tokens = shape.route.tokens
    column = fx.min(mod(cta.lane, 16), fx.Int32(tokens - 1))
    rows = WordRows(activated, shape.inter)
    count = uniform(active.count()) * weight.steps
    ahead = AHEAD[weight.fmt] if shape.route.topk else steps_ahead(weight)
    for tile in range(cta.block, fx.Int32(shape.hidden // TILE), fx.Int32(cta.blocks)):
        acc = zero_tile()
        for first in range(cta.wave, count, fx.Int32(WAVES * ahead)):
            steps = _down_steps(
                shape, active, weight, fx.Int32(tile), fx.Int32(first), count, column
            )
            (acc,) = add_steps(steps, rows, cta.lane, [acc])
        ((low, high),) = finish_tiles(cta, [acc])
        token = mod(cta.thread, 16)
        if (cta.thread < TILE // 2 * TILE) & (token < tokens):
            emit(fx.Int32(tile) * TILE + div(cta.thread, 16) * 2, token, low, high)
