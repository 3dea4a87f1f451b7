"""What happens to the heads of the QKV product: norm, rotary embedding, cache insert.

A wave takes one head of one token, two dimensions a lane, all in f32:

    q, k, index q, index k     x * rsqrt(mean(x^2) + eps) * w, then the rotary embedding
    v                          as it is

Of the first `rotary` dimensions i and i + rotary/2 are one pair turned by the position's angle:

    y[i] = x[i] cos[i] - x[i + r/2] sin[i]      y[i + r/2] = x[i + r/2] cos[i] + x[i] sin[i]

k, v and index k go to the paged `caches`. A token whose slot is negative is padding and enters no
cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import flydsl.expr as fx

from aiter.ops.flydsl.kernels.device import (
    LANES,
    div,
    global_pointer,
    load_word,
    mod,
    traced,
)

from .caches import HEAD_DIM, Caches, cell_of
from .cta import Cta, wave_sum
from .rms_norm import rsqrt
from .sync import Run, Words, float_pair, pair_floats, poll_runs, release


@dataclass(frozen=True)
class HeadCounts:
    """A rank's heads in the order of the QKV rows; with index heads one index k head follows."""

    q: int
    kv: int
    index_q: int
    rotary: int

    @property
    def total(self) -> int:
        return self.q + 2 * self.kv + (self.index_q + 1 if self.index_q else 0)

    @property
    def inserted(self) -> int:
        """Heads that enter a cache."""
        return 2 * self.kv + (1 if self.index_q else 0)


@dataclass(frozen=True)
class HeadInputs:
    """Addresses: norm factors [HEAD_DIM] bf16 of each kind, cos_sin [positions, rotary] f32,
    positions and slots [tokens] i32. Without index heads their norms are not read."""

    q_norm: fx.Int64
    k_norm: fx.Int64
    iq_norm: fx.Int64
    ik_norm: fx.Int64
    cos_sin: fx.Int64
    positions: fx.Int64
    slots: fx.Int64


# (token, head, lane, pair): what is done with a finished query head.
StoreQuery = Callable[[fx.Int32, fx.Int32, fx.Int32, fx.Int32], None]


def angles(
    lane: fx.Int32, rotary: int, cos_sin: fx.Int64, position: fx.Int32
) -> list[tuple[fx.Float32, fx.Float32]]:
    """(cos, sin) by which dimensions (2 lane, 2 lane + 1) are turned."""
    column = mod(lane, rotary // 4) * 2
    row = global_pointer(fx.Float32, cos_sin + fx.Int64(position) * (4 * rotary))
    return [(row[column + i], row[column + (rotary // 2 + i)]) for i in range(2)]


def rotate(
    low: fx.Float32,
    high: fx.Float32,
    lane: fx.Int32,
    rotary: int,
    by: list[tuple[fx.Float32, fx.Float32]],
) -> tuple[fx.Float32, fx.Float32]:
    """The rotary embedding of dimensions (2 lane, 2 lane + 1) by their `angles`."""
    half_lanes = rotary // 4  # lanes of half the rotary dimensions, a power of two
    sign = (lane < half_lanes).select(fx.Float32(-1.0), fx.Float32(1.0))
    turned = []
    for value, (cos, sin) in zip((low, high), by, strict=True):
        partner = fx.gpu.shuffle_xor(value, half_lanes, LANES)
        turned.append((lane < 2 * half_lanes).select(value * cos + sign * partner * sin, value))
    return turned[0], turned[1]


@traced
def finish_heads(
    cta: Cta,
    counts: HeadCounts,
    tokens: int,
    eps: float,
    qkv: Words,
    row_words: int,
    inputs: HeadInputs,
    caches: Caches,
    store_q: StoreQuery,
    store_index_q: StoreQuery | None,
    inserted: Words | None,
) -> None:
    """Stage: finish every head of `qkv` [tokens, row_words] f32 words.

    `inserted` [tokens, counts.inserted] words tell that a head is in its cache, where a later
    stage of the same kernel reads it.
    """
    mark = _marker(inserted)
    k_inverse, v_inverse = caches.k.inverse(), caches.v.inverse()
    index_inverse = caches.index.inverse() if counts.index_q else k_inverse
    for task in range(cta.worker, fx.Int32(tokens * counts.total), fx.Int32(cta.waves)):
        token, head = div(fx.Int32(task), counts.total), mod(fx.Int32(task), counts.total)
        kv_head = head - counts.q
        position, slot = load_word(inputs.positions, token), load_word(inputs.slots, token)
        page, place = cell_of(slot)
        # All that is loaded is on its way before the product is waited for.
        factors = _factors(counts, head, cta.lane, inputs)
        turn = angles(cta.lane, counts.rotary, inputs.cos_sin, position)
        run = Run(qkv, token * row_words + head * HEAD_DIM + cta.lane * 2)
        raw = [value.bitcast(fx.Float32) for value in poll_runs([run], 2)[0]]
        low, high = _normed(raw, eps, factors)
        low, high = rotate(low, high, cta.lane, counts.rotary, turn)
        pair = float_pair(low, high)
        if head < counts.q:
            store_q(token, head, cta.lane, pair)
        kept = slot >= 0
        if kept & (head >= counts.q) & (head < counts.q + counts.kv):
            base = caches.k.page(page, kv_head)
            caches.k.insert_row(base, place, cta.lane, (low, high), k_inverse)
        if kept & (head >= counts.q + counts.kv) & (head < counts.q + 2 * counts.kv):
            base = caches.v.page(page, kv_head - counts.kv)
            caches.v.insert_column(base, place, cta.lane, (raw[0], raw[1]), v_inverse)
        if fx.const_expr(counts.index_q > 0):
            if (head >= counts.q + 2 * counts.kv) & (head < counts.total - 1):
                store_index_q(token, head - (counts.q + 2 * counts.kv), cta.lane, pair)
            if kept & (head == counts.total - 1):
                base = caches.index.page(page)
                caches.index.insert_row(base, place, cta.lane, (low, high), index_inverse)
        if fx.const_expr(mark is not None):
            number = (head == counts.total - 1).select(fx.Int32(counts.inserted - 1), kv_head)
            if ((kv_head >= 0) & (kv_head < 2 * counts.kv)) | (head == counts.total - 1):
                release()
                if cta.lane == 0:
                    mark(token * counts.inserted + number)


def _marker(inserted: Words | None) -> Callable[[fx.Int32], None] | None:
    """What tells of an inserted head; a function, because device loops carry no None."""
    return None if inserted is None else lambda index: inserted.push(index, fx.Int32(1))


def _factors(
    counts: HeadCounts, head: fx.Int32, lane: fx.Int32, inputs: HeadInputs
) -> tuple[fx.Float32, fx.Float32]:
    """The norm factors of the lane's dimensions for the head's kind."""
    factors = (head < counts.q).select(inputs.q_norm, inputs.k_norm)
    if counts.index_q:
        is_index = head >= counts.q + 2 * counts.kv
        index = (head == counts.total - 1).select(inputs.ik_norm, inputs.iq_norm)
        factors = is_index.select(index, factors)
    return pair_floats(global_pointer(fx.Int32, factors)[lane])


def _normed(
    raw: list[fx.Float32], eps: float, factors: tuple[fx.Float32, fx.Float32]
) -> tuple[fx.Float32, fx.Float32]:
    """The head's norm."""
    squares = wave_sum(raw[0] * raw[0] + raw[1] * raw[1])
    scale = rsqrt(squares * (1.0 / HEAD_DIM) + eps)
    return raw[0] * scale * factors[0], raw[1] * scale * factors[1]
