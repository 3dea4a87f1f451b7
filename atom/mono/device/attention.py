"""Paged decode attention over chosen blocks of keys, grouped queries.

    out[t, h, :] = softmax over keys j of (sm_scale * q[t, h] . k[j]) times v[j]

for the keys j <= position of the blocks chosen for token t and h's kv head. A block is a cache
page of PAGE keys, a wave takes a quarter of one at a time with a running maximum. A task is a
token, a kv head and one of `splits` shares of the quarters; the waves' results meet in LDS and,
where there are several splits, theirs in words of a second stage:

    attention         parts [token, kv head, split, head of the group, HEAD_DIM + 2] f32: sums,
                      then their maximum and denominator
    merge_attention   a wave a (token, head): out

In a wave keys are rows and the query heads of the group columns, up to 16. Scores of a quarter
are two 16 x 16 tiles; row r of tile t is key 8 (r div 4) + 4 t + r mod 4, so lane l, g = l div 16,
holds keys 8 g ... 8 g + 7 of head l mod 16, which is what it needs as second operand of the
product with v: probabilities never leave their lane, and v, stored by dimension, is one load.

Keys and values are widened to bf16; their caches' scales multiply the scores and the result. Cells
beyond the position may hold anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import flydsl.expr as fx

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
    uniform,
)
from atom.mono.plan.execution import THREADS, WAVES

from .caches import HEAD_DIM, PAGE, Caches
from .cta import Cta
from .matvec import WordRows, multiply, query_operands, zero_tile
from .sync import Run, Words, acquire, poll_runs

_KEYS = 32  # of a quarter
QUARTERS = PAGE // _KEYS
_DIM_TILES = HEAD_DIM // 16
_HEADS = 16  # columns
_LOWEST = -3.0e38  # above the maximum of no keys at all, whose factor is then 0
PART_WORDS = HEAD_DIM + 2
_STATE_FLOATS = _HEADS * (HEAD_DIM + 2)  # a wave's sums, then its maxima, then its denominators
ATTENTION_BYTES = 4 * WAVES * _STATE_FLOATS  # LDS


@dataclass(frozen=True)
class AttentionShape:
    """`heads` query heads of a rank, `group` of them to a kv head."""

    heads: int
    group: int
    blocks: int  # most blocks a token and kv head has
    sm_scale: float
    splits: int = 1


class ChosenBlocks(TraceObject):
    """The blocks of each (token, kv head): i32 [tokens, kv heads, count], -1 for none.

    Read from words of this kernel, or from `address`, which an earlier kernel wrote.
    """

    def __init__(self, count: int, words: Words | None, address: fx.Int64 | None) -> None:
        self.count, self.words, self.address = count, words, address

    def block(self, task: fx.Int32, i: fx.Int32) -> fx.Int32:
        index = task * self.count + i
        if self.words is not None:
            return self.words.poll(index)
        return global_pointer(fx.Int32, self.address)[index]


class _State(TraceObject):
    """A wave's running softmax, in registers."""

    def __init__(self) -> None:
        self.maximum = fx.make_rmem_tensor(1, fx.Float32)
        self.total = fx.make_rmem_tensor(1, fx.Float32)
        self.sums = fx.make_rmem_tensor((4, _DIM_TILES), fx.Float32)

    def clear(self) -> None:
        self.maximum.fill(-math.inf)
        self.total.fill(0.0)
        self.sums.fill(0.0)


@traced
def await_inserted(cta: Cta, inserted: Words, count: int) -> None:
    """Wait until `count` heads are in the caches, and see them."""
    for i in range(cta.lane, fx.Int32(count), fx.Int32(LANES)):
        inserted.poll(fx.Int32(i))
    acquire()


@traced
def attention(
    cta: Cta,
    shape: AttentionShape,
    tokens: int,
    queries: WordRows,
    caches: Caches,
    chosen: ChosenBlocks,
    positions: fx.Int64,
    block_table: fx.Int64,
    table_stride: fx.Int32,
    out: Words,
) -> None:
    """Stage: from queries [tokens * heads, HEAD_DIM] either out [tokens, heads * HEAD_DIM] bf16
    pairs or, with several splits, the parts that `merge_attention` takes.

    What the caches hold must be visible already. Uses `ATTENTION_BYTES` of LDS.
    """
    kv_heads, splits = shape.heads // shape.group, shape.splits
    state = _State()
    score_scale = caches.k.scale() * (shape.sm_scale * math.log2(math.e))
    value_scale = caches.v.scale()
    for task in range(cta.block, fx.Int32(tokens * kv_heads * splits), fx.Int32(cta.blocks)):
        row, split = div(fx.Int32(task), splits), mod(fx.Int32(task), splits)
        token, kv_head = div(row, kv_heads), mod(row, kv_heads)
        position = load_word(positions, token)
        column = fx.min(mod(cta.lane, 16), fx.Int32(shape.group - 1))
        query_row = token * shape.heads + kv_head * shape.group + column
        query = query_operands(queries, query_row, cta.lane, caches.k.fmt)
        state.clear()
        first = split * WAVES + cta.wave
        for unit in range(first, fx.Int32(shape.blocks * QUARTERS), fx.Int32(WAVES * splits)):
            block = uniform(chosen.block(row, div(fx.Int32(unit), QUARTERS)))
            start = mod(fx.Int32(unit), QUARTERS) * _KEYS
            if (block >= 0) & (block * PAGE + start <= position):
                page = load_word(block_table, token * table_stride + block)
                quarter = Quarter(caches, page, kv_head, start)
                last = position - block * PAGE - start
                _add_keys(state, query, quarter, score_scale, last, cta.lane)
        if fx.const_expr(splits == 1):
            first_head = token * shape.heads + kv_head * shape.group
            _combine(cta, shape, state, value_scale, first_head, out)
        else:
            _combine(cta, shape, state, value_scale, fx.Int32(task) * shape.group, out)


@dataclass(frozen=True)
class Quarter:
    """The keys from `start` on of a head's page."""

    caches: Caches
    page: fx.Int32
    head: fx.Int32
    start: fx.Int32


def _add_keys(
    state: _State,
    query: list[fx.Vector],
    quarter: Quarter,
    score_scale: fx.Float32,
    last: fx.Int32,
    lane: fx.Int32,
) -> None:
    """Add a quarter of a block to the running softmax; `last` >= 0 is the last key that counts."""
    g, row = div(lane, 16), mod(lane, 16)
    k, v = quarter.caches.k, quarter.caches.v
    keys, values = k.page(quarter.page, quarter.head), v.page(quarter.page, quarter.head)
    scores = []
    for tile in range(_KEYS // 16):
        acc = zero_tile()
        key = quarter.start + div(row, 4) * 8 + mod(row, 4) + 4 * tile
        for operand, column in zip(k.row_operands(keys, key, lane), query, strict=True):
            acc = multiply(operand, column, acc)
        for i in range(4):
            seen = g * 8 + (4 * tile + i) <= last
            scores.append(seen.select(acc[i] * score_scale, fx.Float32(-math.inf)))
    highest = scores[0]
    for score in scores[1:]:
        highest = fx.max(highest, score)
    for distance in (16, 32):
        highest = fx.max(highest, fx.gpu.shuffle_xor(highest, distance, LANES))
    old = state.maximum.load()[0]
    maximum = fx.max(old, highest)
    keep = exp2(old - maximum)
    weights = [exp2(score - maximum) for score in scores]
    total = state.total.load()[0] * keep
    for weight in weights:
        total = total + weight
    state.maximum.store(fx.Vector.from_elements([maximum], fx.Float32))
    state.total.store(fx.Vector.from_elements([total], fx.Float32))
    probabilities = fx.Vector.from_elements(weights, fx.Float32).to(fx.BFloat16)
    # A cell beyond the last key may hold a NaN, which a probability of zero would not hide.
    counted = v.first_of_eight(last - g * 8 + 1)
    for tile in range(_DIM_TILES):
        operand = v.eight(values, row + 16 * tile, quarter.start + g * 8, counted)
        acc = state.sums[None, tile].load() * keep
        state.sums[None, tile].store(multiply(operand, probabilities, acc))


@traced
def _combine(
    cta: Cta,
    shape: AttentionShape,
    state: _State,
    value_scale: fx.Float32,
    first_head: fx.Int32,
    out: Words,
) -> None:
    """Merge the waves' softmaxes and push the group's rows, of which `first_head` is the first."""
    lds = cta.lds_floats()
    g, column = div(cta.lane, 16), mod(cta.lane, 16)
    own = lds + cta.wave * _STATE_FLOATS
    for tile in fx.range_constexpr(_DIM_TILES):
        at = own + (column * HEAD_DIM + g * 4 + 16 * tile)
        fx.make_view(at, fx.make_layout(4, 1)).store(state.sums[None, tile].load())
    total = state.total.load()[0]
    for i in fx.range_constexpr(2):
        total = total + fx.gpu.shuffle_xor(total, 16 << i, LANES)
    if g == 0:
        own[_HEADS * HEAD_DIM + column] = state.maximum.load()[0]
        own[_HEADS * (HEAD_DIM + 1) + column] = total
    fx.gpu.barrier()
    pairs = shape.group * HEAD_DIM // 2
    for i in range(cta.thread, fx.Int32(pairs), fx.Int32(THREADS)):
        head, pair = div(fx.Int32(i), HEAD_DIM // 2), mod(fx.Int32(i), HEAD_DIM // 2)
        parts = []
        for wave in fx.range_constexpr(WAVES):
            part = lds + wave * _STATE_FLOATS
            sums = part + (head * HEAD_DIM + pair * 2)
            parts.append(
                (
                    part[_HEADS * HEAD_DIM + head],
                    part[_HEADS * (HEAD_DIM + 1) + head],
                    sums[fx.Int32(0)],
                    sums[fx.Int32(1)],
                )
            )
        highest, total, low, high = _merged(parts)
        if fx.const_expr(shape.splits == 1):
            by = reciprocal(total) * value_scale
            out.push_pair((first_head + head) * (HEAD_DIM // 2) + pair, low * by, high * by)
        else:
            index = (first_head + head) * PART_WORDS
            out.push_float(index + pair * 2, low)
            out.push_float(index + pair * 2 + 1, high)
            if pair == 0:
                out.push_float(index + HEAD_DIM, highest)
                out.push_float(index + HEAD_DIM + 1, total)
    fx.gpu.barrier()


def _merged(
    parts: list[tuple[fx.Float32, fx.Float32, fx.Float32, fx.Float32]],
) -> tuple[fx.Float32, fx.Float32, fx.Float32, fx.Float32]:
    """Softmaxes as (maximum, denominator, two sums) put together, in order."""
    highest = fx.Float32(_LOWEST)
    for maximum, *_ in parts:
        highest = fx.max(highest, maximum)
    total, low, high = fx.Float32(0.0), fx.Float32(0.0), fx.Float32(0.0)
    for maximum, denominator, a, b in parts:
        factor = exp2(maximum - highest)
        total = total + denominator * factor
        low = low + a * factor
        high = high + b * factor
    return highest, total, low, high


@traced
def merge_attention(
    cta: Cta, shape: AttentionShape, tokens: int, parts: Words, caches: Caches, out: Words
) -> None:
    """Stage: out [tokens, heads * HEAD_DIM] bf16 pairs from the parts of several splits."""
    value_scale = caches.v.scale()
    for task in range(cta.worker, fx.Int32(tokens * shape.heads), fx.Int32(cta.waves)):
        group, head = div(fx.Int32(task), shape.group), mod(fx.Int32(task), shape.group)
        runs = []
        for split in fx.range_constexpr(shape.splits):
            row = (group * shape.splits + split) * shape.group + head
            runs.append(Run(parts, row * PART_WORDS + cta.lane * 2))
            runs.append(Run(parts, row * PART_WORDS + HEAD_DIM))
        found = [[v.bitcast(fx.Float32) for v in values] for values in poll_runs(runs, 2)]
        _, total, low, high = _merged(
            [(*found[2 * i + 1], *found[2 * i]) for i in range(shape.splits)]
        )
        by = reciprocal(total) * value_scale
        out.push_pair(fx.Int32(task) * (HEAD_DIM // 2) + cta.lane, low * by, high * by)
