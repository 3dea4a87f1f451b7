"""Paged decode attention over chosen blocks of keys, grouped queries.

    out[t, h, :] = softmax over keys j of (sm_scale * q[t, h] . k[j]) times v[j]

for the keys j <= position of the blocks chosen for token t and h's kv head. A task is one token
and kv head: the waves of a workgroup take the chosen blocks in turn, each with its own running
maximum, and their results meet in LDS. A block is a cache page of PAGE keys.

In a wave keys are rows and the query heads of the group columns, up to 16. Scores of a block are
eight 16 x 16 tiles; lane l, g = l div 16, holds keys 16 tile + 4 g + i of head l mod 16, which is
what it needs as second operand of the product with v when operation j takes K in the order

    element 0..3: key 32 j + 4 g + i       element 4..7: key 32 j + 16 + 4 g + i

so probabilities never leave their lane. v is stored by dimension, its operand two 8-byte loads.
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

from .cta import Cta
from .heads import HEAD_DIM, PAGE, Caches
from .matvec import WordRows, multiply, query_operands, zero_tile
from .sync import Words, acquire, beyond

_KEY_TILES = PAGE // 16
_DIM_TILES = HEAD_DIM // 16
_TILES_AHEAD = 4
_HEADS = 16  # columns
_STATE_FLOATS = _HEADS * (HEAD_DIM + 2)  # a wave's sums, then its maxima, then its denominators
ATTENTION_BYTES = 4 * WAVES * _STATE_FLOATS  # LDS


@dataclass(frozen=True)
class AttentionShape:
    """`heads` query heads of a rank, `group` of them to a kv head."""

    heads: int
    group: int
    blocks: int  # most blocks a token and kv head has
    sm_scale: float


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
    """Stage: out [tokens, heads * HEAD_DIM] bf16 pairs, from queries [tokens * heads, HEAD_DIM].

    What the caches hold must be visible already. Uses `ATTENTION_BYTES` of LDS.
    """
    kv_heads = shape.heads // shape.group
    state = _State()
    for task in range(cta.block, fx.Int32(tokens * kv_heads), fx.Int32(cta.blocks)):
        token, kv_head = div(fx.Int32(task), kv_heads), mod(fx.Int32(task), kv_heads)
        position = load_word(positions, token)
        column = fx.min(mod(cta.lane, 16), fx.Int32(shape.group - 1))
        query_row = token * shape.heads + kv_head * shape.group + column
        query = query_operands(queries, query_row, cta.lane)
        state.clear()
        for i in range(cta.wave, fx.Int32(shape.blocks), fx.Int32(WAVES)):
            block = uniform(chosen.block(fx.Int32(task), fx.Int32(i)))
            if block >= 0:
                page = load_word(block_table, token * table_stride + block)
                _add_block(
                    shape,
                    state,
                    query,
                    caches.k_page(page, kv_head),
                    caches.v_page(page, kv_head),
                    position - block * PAGE,
                    cta.lane,
                )
        _combine(cta, shape, state, token * shape.heads + kv_head * shape.group, out)


def _add_block(
    shape: AttentionShape,
    state: _State,
    query: list[fx.Vector],
    keys: fx.Int64,
    values: fx.Int64,
    last: fx.Int32,
    lane: fx.Int32,
) -> None:
    """Add one block to the running softmax; `last` is the last key of it that counts."""
    g, row = div(lane, 16), mod(lane, 16)
    key_lane = (row * HEAD_DIM + g * 8) * 2
    value_lane = (row * PAGE + g * 4) * 2
    scores = []
    for tile in range(_KEY_TILES):
        acc = zero_tile()
        for j in range(HEAD_DIM // 32):
            at = beyond(keys + (16 * tile * HEAD_DIM + 32 * j) * 2, key_lane)
            operand = fx.generic_load(global_pointer(fx.Int32, at, 16), count=4)
            acc = multiply(operand.bitcast(fx.BFloat16), query[j], acc)
        for i in range(4):
            key = g * 4 + (16 * tile + i)
            score = acc[i] * (shape.sm_scale * math.log2(math.e))
            scores.append((key <= last).select(score, fx.Float32(-math.inf)))
        _end_tile(tile)
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
    operands = [
        fx.Vector.from_elements(weights[8 * j : 8 * j + 8], fx.Float32).to(fx.BFloat16)
        for j in range(PAGE // 32)
    ]
    for tile in range(_DIM_TILES):
        acc = state.sums[None, tile].load() * keep
        for j in range(PAGE // 32):
            base = values + (16 * tile * PAGE + 32 * j) * 2
            halves = [
                fx.generic_load(
                    global_pointer(fx.Int32, beyond(base + 32 * h, value_lane), 8), count=2
                )
                for h in range(2)
            ]
            words = [half[i] for half in halves for i in range(2)]
            operand = fx.Vector.from_elements(words, fx.Int32).bitcast(fx.BFloat16)
            acc = multiply(operand, operands[j], acc)
        state.sums[None, tile].store(acc)
        _end_tile(tile)


def _end_tile(tile: int) -> None:
    """Keep the compiler from loading a whole page ahead, which would cost it all registers."""
    if tile % _TILES_AHEAD == _TILES_AHEAD - 1:
        fx.rocdl.sched_barrier(0)


@traced
def _combine(
    cta: Cta, shape: AttentionShape, state: _State, first_head: fx.Int32, out: Words
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
        parts = [lds + wave * _STATE_FLOATS for wave in range(WAVES)]
        maxima = [part[_HEADS * HEAD_DIM + head] for part in parts]
        highest = maxima[0]
        for wave in fx.range_constexpr(1, WAVES):
            highest = fx.max(highest, maxima[wave])
        low = fx.Float32(0.0)
        high = fx.Float32(0.0)
        denominator = fx.Float32(0.0)
        for wave in fx.range_constexpr(WAVES):
            factor = exp2(maxima[wave] - highest)
            denominator = denominator + parts[wave][_HEADS * (HEAD_DIM + 1) + head] * factor
            low = low + parts[wave][head * HEAD_DIM + pair * 2] * factor
            high = high + parts[wave][head * HEAD_DIM + pair * 2 + 1] * factor
        by = reciprocal(denominator)
        out.push_pair((first_head + head) * (HEAD_DIM // 2) + pair, low * by, high * by)
    fx.gpu.barrier()
