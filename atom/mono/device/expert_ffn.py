"""The FFN of the active experts: gate and up projections, activation, down projection.

    a[t, s, :] = bf16(weight(t, s) * act(Wg[e] x[t], Wu[e] x[t]))     e the expert in slot s of t
    y[t, :] = sum over slots s of Wd[e] a[t, s, :]
    act(g, u) = g' * sigmoid(1.702 g') * (u' + 1)     g' = min(g, limit), u' = clamp(u, -limit, limit)

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
from .matvec import STEP, TILE, TILE_BYTES, Emit, Weight, WordRows, add_step, finish_tiles, multiply, zero_tile
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
        for step in range(cta.wave, fx.Int32(weight.steps), fx.Int32(WAVES)):
            gate_rows = expert.load(tile, fx.Int32(step), cta.lane)
            up_rows = expert.load(tile + tiles, fx.Int32(step), cta.lane)
            gates, ups = _add_both(expert, gate_rows, up_rows, x, column, step, cta, gates, ups)
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


def _add_both(
    expert: Weight,
    gate_rows: list[fx.Vector],
    up_rows: list[fx.Vector],
    x: WordRows,
    column: fx.Int32,
    step: fx.Int32,
    cta: Cta,
    gates: fx.Vector,
    ups: fx.Vector,
) -> tuple[fx.Vector, fx.Vector]:
    """One step of both tiles on the same elements of x."""
    for operation in range(4):
        operand = x.load8(column, fx.Int32(step) * STEP + expert.k_of(cta.lane, operation))
        gates = multiply(gate_rows[operation], operand, gates)
        ups = multiply(up_rows[operation], operand, ups)
    return gates, ups


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
    steps = uniform(active.count()) * weight.steps
    for tile in range(cta.block, fx.Int32(shape.hidden // TILE), fx.Int32(cta.blocks)):
        acc = zero_tile()
        for work in range(cta.wave, steps, fx.Int32(WAVES)):
            entry, step = div(fx.Int32(work), weight.steps), mod(fx.Int32(work), weight.steps)
            expert = weight.of_expert(uniform(active.expert(entry)))
            slot = active.slot(entry, column)
            row = column * shape.slots + fx.max(slot, fx.Int32(0))
            acc = add_step(expert, fx.Int32(tile), step, rows, row, cta.lane, acc, slot >= 0)
        ((low, high),) = finish_tiles(cta, [acc])
        token = mod(cta.thread, 16)
        if (cta.thread < TILE // 2 * TILE) & (token < tokens):
            emit(fx.Int32(tile) * TILE + div(cta.thread, 16) * 2, token, low, high)
