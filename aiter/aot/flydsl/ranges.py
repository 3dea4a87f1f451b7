"""Which token counts of a row to replay: both ends of its range, and every change between.

What a row asks for is a step function of the number of tokens M. `survey` asks at both ends;
where the answers differ it halves the interval until each change lies between two neighbours.
An interval whose ends agree is taken to be uniform, so a range that goes A .. B .. A with both
A ends at asked points hides its B: that is what an exhaustive replay is for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

A = TypeVar("A", bound=Hashable)


@dataclass(frozen=True)
class Regime(Generic[A]):
    """Token counts `low` to `high`, both included, that give one answer."""

    low: int
    high: int
    answer: A

    def __str__(self) -> str:
        return f"M={self.low}" if self.low == self.high else f"M={self.low}..{self.high}"


@dataclass(frozen=True)
class Survey(Generic[A]):
    """`regimes` cover the range in order; `probes` are the token counts asked between its ends."""

    regimes: tuple[Regime[A], ...]
    probes: tuple[int, ...]

    def answer(self, tokens: int) -> A:
        """What the survey says of `tokens`. Raises ValueError outside the range."""
        for regime in self.regimes:
            if regime.low <= tokens <= regime.high:
                return regime.answer
        raise ValueError(f"{tokens} is outside the surveyed range")


def survey(low: int, high: int, ask: Callable[[int], A]) -> Survey[A]:
    """Ask at `low` and `high` and at every change between them, each token count once."""
    known = {m: ask(m) for m in dict.fromkeys((low, high))}
    ends = len(known)
    pending = [(low, high)]
    while pending:
        left, right = pending.pop()
        if known[left] == known[right] or right - left == 1:
            continue
        middle = (left + right) // 2
        known[middle] = ask(middle)
        pending += [(middle, right), (left, middle)]
    return Survey(_regimes(low, high, known), tuple(known)[ends:])


def _regimes(low: int, high: int, known: dict[int, A]) -> tuple[Regime[A], ...]:
    starts = [low]
    points = sorted(known)
    for left, right in pairwise(points):
        if known[left] != known[right]:
            starts.append(right)
    ends = [start - 1 for start in starts[1:]] + [high]
    return tuple(Regime(start, end, known[start]) for start, end in zip(starts, ends, strict=True))
