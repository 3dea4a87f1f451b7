"""How MoE kernels name routes and walk over work items."""

from __future__ import annotations

import flydsl.expr as fx

from .device import div, mod

# A sorted entry: token in the low 24 bits, slot in its top-k in the high 8.
SLOT_SHIFT = 24
TOKEN_MASK = (1 << SLOT_SHIFT) - 1

XCDS = 8  # a gfx9 package deals consecutive workgroups out to eight dies with an L2 each


def item_to_block(
    item: fx.Int32, m_blocks: fx.Int32, n_blocks: int, xcd_group: int
) -> tuple[fx.Int32, fx.Int32]:
    """(m block, n block) of a work item.

    Plain order walks the columns of one row block. With `xcd_group` > 0 the items of a die
    are consecutive in an order that walks `xcd_group` row blocks down before it moves to the
    next columns, so that a die's L2 sees the same weights again.
    """
    if xcd_group == 0:
        return div(item, n_blocks), mod(item, n_blocks)
    items = m_blocks * n_blocks
    whole = div(items, XCDS)
    extra = items - whole * XCDS
    die, turn = mod(item, XCDS), div(item, XCDS)
    item = die * whole + fx.min(die, extra) + turn
    group = div(item, xcd_group * n_blocks)
    first = group * xcd_group
    height = fx.min(m_blocks - first, fx.Int32(xcd_group))
    within = item - group * (xcd_group * n_blocks)
    column = fx.Int32(fx.Uint32(within) // fx.Uint32(height))
    return first + within - column * height, column
