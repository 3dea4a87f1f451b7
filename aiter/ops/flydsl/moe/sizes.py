"""Everything of a plan that depends on the number of tokens, as pure functions."""

from __future__ import annotations

from aiter.ops.flydsl.kernels.moe_sort import CHUNK_ROUTES
from aiter.ops.flydsl.kernels.mx_tile import MxTile, scale_row_words

# What 32-bit offsets of a buffer can reach.
BUFFER_BYTES = (1 << 32) - 1
# Row blocks from which a grid that is not persistent lets a workgroup take four work items.
MANY_BLOCKS = 256


def sort_capacity(tokens: int, topk: int, experts: int, block_m: int) -> int:
    """Sorted rows that any routing of `tokens` tokens fits in, in whole blocks.

    Every expert with a route may leave all but one row of its last block unused. Few tokens reach
    few experts, and grids are as large as this.
    """
    routes = tokens * topk
    return (routes + min(routes, experts) * (block_m - 1)) // block_m * block_m


def sort_chunks(tokens: int, topk: int) -> int:
    """Chunks of routes that the sort works on; one needs a single launch."""
    return max(1, -(-tokens * topk // CHUNK_ROUTES))


def scale_words(rows: int, columns: int) -> int:
    """32-bit words of the scales of `rows` sorted rows of `columns` elements."""
    return -(-rows // 32) * scale_row_words(columns)


def stage2_epilogue(tuned: str, tokens: int, topk: int, model_dim: int, force_reduce: bool) -> str:
    """ "atomic" or "reduce": what stage 2 tuned for `tuned` does at `tokens`.

    An output beyond 32-bit offsets is reduced, not accumulated. Raises NotImplementedError
    where the rows to reduce are beyond them.
    """
    row_bytes = 2 * model_dim
    reduce = tuned == "reduce" or force_reduce or tokens * row_bytes > BUFFER_BYTES
    if not reduce:
        return "atomic"
    if tokens * topk * row_bytes > BUFFER_BYTES:
        raise NotImplementedError("stage 2 would reduce route rows beyond 32-bit offsets")
    return "reduce"


def stage2_groups(
    items: int, m_blocks: int, tile: MxTile, persist: bool, cu_num: int, per_cu: int | None
) -> int:
    """Workgroups of stage 2 for `items` work items in `m_blocks` row blocks.

    A persistent grid has `per_cu` workgroups a compute unit, or as many as are resident. Other
    grids have one for each item, or for four of them where there are many row blocks.
    """
    if persist:
        return max(1, min(items, cu_num * (per_cu or tile.resident_groups())))
    return max(1, -(-items // 4) if m_blocks > MANY_BLOCKS else items)
