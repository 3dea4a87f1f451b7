"""Choice of the key blocks that a token attends to.

    score[t, g, b] = max over index heads h of group g and keys j <= position of block b of
                     index_q[t, h] . index_k[j]

A block is a cache page of PAGE keys. A cache's scale orders all blocks alike and is left out of
the scores. A token with at most `topk` blocks attends to all of them and nothing is scored.
Otherwise the first `init` and the last `local` blocks are chosen and the rest of `topk` by score,
of equal scores the earlier block.

    index_scores   a wave a block: keys are rows and the group's index heads columns
    select_blocks  a workgroup a (token, kv head): a thread keeps the best of the blocks i with
                   i mod 512 = its number, and each round takes the best of all threads
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import flydsl.expr as fx

from aiter.ops.flydsl.kernels.device import LANES, div, global_pointer, load_word, mod, traced
from atom.mono.plan.execution import THREADS, WAVES

from .caches import PAGE, Plane
from .cta import Cta
from .matvec import WordRows, multiply, query_operands, zero_tile
from .sync import Run, Words, poll_runs

_NONE = -math.inf  # a block already chosen
_LOWEST = -3.0e38  # what a score that is no number counts as
_FORCED = math.inf
_AT_ONCE = 4  # scores that a thread waits for at once


@dataclass(frozen=True)
class SelectShape:
    """Blocks chosen for each of a rank's kv heads, each of `group` index heads."""

    kv_heads: int
    group: int
    topk: int
    init: int
    local: int
    max_blocks: int

    @property
    def lds_bytes(self) -> int:
        """LDS of `select_blocks`: every block's score, then a best of each wave."""
        return 4 * self.max_blocks + 8 * WAVES


def _blocks_of(positions: fx.Int64, token: fx.Int32) -> fx.Int32:
    return div(load_word(positions, token), PAGE) + 1


@traced
def index_scores(
    cta: Cta,
    shape: SelectShape,
    tokens: int,
    queries: WordRows,
    index: Plane,
    positions: fx.Int64,
    block_table: fx.Int64,
    table_stride: fx.Int32,
    scores: Words,
) -> None:
    """Stage: scores [tokens, kv heads, max_blocks] f32 words of the tokens that need them.

    queries: rows [tokens * kv heads * group, HEAD_DIM]. The index cache must be visible already.
    """
    row = mod(cta.lane, 16)
    for task in range(fx.Int32(0), fx.Int32(tokens * shape.kv_heads)):
        token = div(fx.Int32(task), shape.kv_heads)
        blocks = _blocks_of(positions, token)
        position = load_word(positions, token)
        wanted = (blocks > shape.topk).select(blocks, fx.Int32(0))
        for block in range(cta.worker, wanted, fx.Int32(cta.waves)):
            query_row = fx.Int32(task) * shape.group + fx.min(row, fx.Int32(shape.group - 1))
            page = load_word(block_table, token * table_stride + fx.Int32(block))
            query = query_operands(queries, query_row, cta.lane, index.fmt)
            last = position - fx.Int32(block) * PAGE
            best = _best_key(index, index.page(page), query, last, cta.lane)
            if cta.lane == 0:
                scores.push_float(fx.Int32(task) * shape.max_blocks + fx.Int32(block), best)


def _best_key(
    index: Plane, keys: fx.Int64, query: list[fx.Vector], last: fx.Int32, lane: fx.Int32
) -> fx.Float32:
    """The highest product of the queries with the keys up to `last` of a page."""
    g, row = div(lane, 16), mod(lane, 16)
    best = fx.Float32(_NONE)
    for tile in range(PAGE // 16):
        acc = zero_tile()
        operands = index.row_operands(keys, row + 16 * tile, lane)
        for operand, column in zip(operands, query, strict=True):
            acc = multiply(operand, column, acc)
        for i in range(4):
            key = g * 4 + (16 * tile + i)
            best = fx.max(best, (key <= last).select(acc[i], fx.Float32(_NONE)))
        if tile % 4 == 3:
            fx.rocdl.sched_barrier(0)  # or the compiler loads the whole page ahead
    distance = LANES // 2
    while distance:
        best = fx.max(best, fx.gpu.shuffle_xor(best, distance, LANES))
        distance //= 2
    return best


@traced
def select_blocks(
    cta: Cta,
    shape: SelectShape,
    tokens: int,
    positions: fx.Int64,
    scores: Words,
    selected: Words,
    kept: fx.Int64,
) -> None:
    """Stage: the chosen blocks as words `selected` and, for later layers, as i32 at `kept`, both
    [tokens, kv heads, topk]; -1 where there are fewer blocks. Uses `shape.lds_bytes` of LDS."""
    for task in range(cta.block, fx.Int32(tokens * shape.kv_heads), fx.Int32(cta.blocks)):
        blocks = _blocks_of(positions, div(fx.Int32(task), shape.kv_heads))
        if blocks <= shape.topk:
            if cta.thread < shape.topk:
                number = (cta.thread < blocks).select(cta.thread, fx.Int32(-1))
                _keep(fx.Int32(task) * shape.topk + cta.thread, number, selected, kept)
        else:
            _select(cta, shape, fx.Int32(task), blocks, scores, selected, kept)


def _keep(index: fx.Int32, block: fx.Int32, selected: Words, kept: fx.Int64) -> None:
    selected.push(index, block)
    global_pointer(fx.Int32, kept)[index] = block


@traced
def _select(
    cta: Cta,
    shape: SelectShape,
    task: fx.Int32,
    blocks: fx.Int32,
    scores: Words,
    selected: Words,
    kept: fx.Int64,
) -> None:
    held = cta.lds_floats()
    wave_best = held + shape.max_blocks
    wave_block = fx.recast_iter(fx.Int32, wave_best + WAVES)
    for first in range(cta.thread, blocks, fx.Int32(THREADS * _AT_ONCE)):
        numbers = [fx.Int32(first) + i * THREADS for i in range(_AT_ONCE)]
        polled = _polled_scores(shape, task, numbers, blocks, scores)
        for i in fx.range_constexpr(_AT_ONCE):
            if numbers[i] < blocks:
                forced = (numbers[i] < shape.init) | (numbers[i] >= blocks - shape.local)
                held[numbers[i]] = forced.select(fx.Float32(_FORCED), polled[i])
    best, block = _own_best(cta, held, blocks)
    for i in range(fx.Int32(0), fx.Int32(shape.topk)):
        top, top_block = best_of(best, block, LANES)
        if cta.lane == 0:
            wave_best[cta.wave] = top
            wave_block[cta.wave] = top_block
        fx.gpu.barrier()
        from_wave = mod(cta.lane, WAVES)
        top, top_block = best_of(wave_best[from_wave], wave_block[from_wave], WAVES)
        if cta.thread == 0:
            _keep(task * shape.topk + fx.Int32(i), top_block, selected, kept)
        if top_block == block:
            held[block] = fx.Float32(_NONE)
            best, block = _own_best(cta, held, blocks)
        fx.gpu.barrier()


def _polled_scores(
    shape: SelectShape,
    task: fx.Int32,
    numbers: list[fx.Int32],
    blocks: fx.Int32,
    scores: Words,
) -> list[fx.Float32]:
    """The scores of blocks by number, as far as there are so many."""
    base = task * shape.max_blocks
    runs = [Run(scores, base + fx.min(n, blocks - 1), n < blocks) for n in numbers]
    found = [values[0].bitcast(fx.Float32) for values in poll_runs(runs, 1)]
    return [(score > _LOWEST).select(score, fx.Float32(_LOWEST)) for score in found]


@traced
def _own_best(cta: Cta, held: fx.Pointer, blocks: fx.Int32) -> tuple[fx.Float32, fx.Int32]:
    """The best block of this thread's; block 2^30 with the lowest score if it has none left."""
    best = fx.Float32(_NONE)
    found = fx.Int32(1 << 30)
    for block in range(cta.thread, blocks, fx.Int32(THREADS)):
        score = held[fx.Int32(block)]
        better = score > best
        found = better.select(fx.Int32(block), found)
        best = better.select(score, best)
    return best, found


def best_of(value: fx.Float32, number: fx.Int32, lanes: int) -> tuple[fx.Float32, fx.Int32]:
    """The highest value over runs of `lanes` lanes, and its number; of equals the lower number."""
    distance = lanes // 2
    while distance:
        other = fx.gpu.shuffle_xor(value, distance, LANES)
        theirs = fx.gpu.shuffle_xor(number, distance, LANES)
        take = (other > value) | ((other == value) & (theirs < number))
        value = take.select(other, value)
        number = take.select(theirs, number)
        distance //= 2
    return value, number
