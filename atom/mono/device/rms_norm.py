"""RMS norm of rows, alone or after an all-reduce and the residual add.

    y = x * rsqrt(mean(x^2) + eps) * w          x, w bf16, f32 inside, y bf16 pairs in words

A task is a row. Thread i of a workgroup takes column pairs i, i + 512, ...
"""

from __future__ import annotations

import flydsl.expr as fx
from flydsl.expr.typing import T

from aiter.ops.flydsl.kernels.device import global_pointer, traced
from atom.mono.plan.execution import THREADS

from .all_reduce import Exchange
from .cta import Cta
from .sync import Words, float_pair, pair_floats


def rsqrt(value: fx.Float32) -> fx.Float32:
    """1 / sqrt(value) by the native instruction (about one ulp)."""
    return fx.Float32(fx.rocdl.rsq(T.f32, value.ir_value()))


def _columns(cta: Cta, hidden: int) -> list[tuple[fx.Int32, fx.Boolean]]:
    """(pair, whether there is one) of this thread; a pair that is not there is the last."""
    pairs = hidden // 2
    own = [cta.thread + i * THREADS for i in range(-(-pairs // THREADS))]
    return [(fx.min(p, fx.Int32(pairs - 1)), p < pairs) for p in own]


def _weights(weight: fx.Int64, columns: list[tuple[fx.Int32, fx.Boolean]]) -> list[fx.Int32]:
    """The norm's factors of this thread's columns, in pairs. Loaded before a stage waits: later
    they would be waited for a second time."""
    return [global_pointer(fx.Int32, weight)[pair] for pair, _ in columns]


def _row(address: fx.Int64, row: fx.Int32, hidden: int) -> fx.Pointer:
    """Row `row` of [rows, hidden] bf16 as words of two."""
    return global_pointer(fx.Int32, address + fx.Int64(row) * (2 * hidden))


@traced
def _norm(
    cta: Cta,
    values: list[tuple[fx.Float32, fx.Float32]],
    columns: list[tuple[fx.Int32, fx.Boolean]],
    row: fx.Int32,
    weights: list[fx.Int32],
    hidden: int,
    eps: float,
    out: Words,
) -> None:
    squares = fx.Float32(0.0)
    for i in fx.range_constexpr(len(values)):
        low, high = values[i]
        squares = squares + low * low + high * high
    factor = rsqrt(cta.sum(squares) * (1.0 / hidden) + eps)
    for i in fx.range_constexpr(len(values)):
        pair, there = columns[i]
        low, high = values[i]
        w_low, w_high = pair_floats(weights[i])
        if there:
            index = row * (hidden // 2) + pair
            out.push_pair(index, low * factor * w_low, high * factor * w_high)


@traced
def rms_norm(
    cta: Cta, x: fx.Int64, weight: fx.Int64, hidden: int, tokens: int, eps: float, out: Words
) -> None:
    """Stage: norm of the rows x [tokens, hidden] bf16 of an earlier kernel."""
    columns = _columns(cta, hidden)
    weights = _weights(weight, columns)
    for row in range(cta.block, fx.Int32(tokens), fx.Int32(cta.blocks)):
        words = _row(x, fx.Int32(row), hidden)
        values = [pair_floats(there.select(words[pair], fx.Int32(0))) for pair, there in columns]
        _norm(cta, values, columns, fx.Int32(row), weights, hidden, eps, out)


@traced
def reduce_norm(
    cta: Cta,
    sums: Exchange,
    residual: fx.Int64,
    weight: fx.Int64,
    hidden: int,
    tokens: int,
    eps: float,
    mid: fx.Int64,
    out: Words,
) -> None:
    """Stage: mid = bf16(residual + all-reduced sums), out = norm of mid.

    residual, mid [tokens, hidden] bf16; `reduce_rows` reads mid with the same threads.
    """
    columns = _columns(cta, hidden)
    weights = _weights(weight, columns)
    for row in range(cta.block, fx.Int32(tokens), fx.Int32(cta.blocks)):
        values = _reduced(sums, columns, fx.Int32(row), residual, mid, hidden)
        _norm(cta, values, columns, fx.Int32(row), weights, hidden, eps, out)


@traced
def reduce_rows(
    cta: Cta, sums: Exchange, residual: fx.Int64, hidden: int, tokens: int, out: fx.Int64
) -> None:
    """Stage: out = bf16(residual + all-reduced sums), both [tokens, hidden] bf16."""
    columns = _columns(cta, hidden)
    for row in range(cta.block, fx.Int32(tokens), fx.Int32(cta.blocks)):
        _reduced(sums, columns, fx.Int32(row), residual, out, hidden)


@traced
def _reduced(
    sums: Exchange,
    columns: list[tuple[fx.Int32, fx.Boolean]],
    row: fx.Int32,
    residual: fx.Int64,
    out: fx.Int64,
    hidden: int,
) -> list[tuple[fx.Float32, fx.Float32]]:
    """Store the row's sums with the residual; what was stored, 0 where there is no column."""
    source, target = _row(residual, row, hidden), _row(out, row, hidden)
    # Before the wait, so that the residual is there when the sums are.
    bases = [source[pair] for pair, _ in columns]
    totals = sums.sums([(pair * 2, there) for pair, there in columns], row)
    values = []
    for i in fx.range_constexpr(len(columns)):
        pair, there = columns[i]
        base_low, base_high = pair_floats(bases[i])
        low, high = totals[i]
        word = float_pair(base_low + low, base_high + high)
        if there:
            target[pair] = word
        values.append(pair_floats(there.select(word, fx.Int32(0))))
    return values
