"""Which token counts are asked, and what is concluded from the answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiter.aot.flydsl.ranges import survey


def counted(answer: Callable[[int], str]) -> tuple[Callable[[int], str], list[int]]:
    asked: list[int] = []

    def ask(tokens: int) -> str:
        asked.append(tokens)
        return answer(tokens)

    return ask, asked


def test_ends_that_agree_are_asked_once_each_and_nothing_between():
    ask, asked = counted(lambda m: "a")
    found = survey(17, 32, ask)
    assert asked == [17, 32]
    assert found.probes == ()
    assert [str(regime) for regime in found.regimes] == ["M=17..32"]


def test_a_range_of_one_token_count_is_asked_once():
    ask, asked = counted(str)
    found = survey(1, 1, ask)
    assert asked == [1]
    assert str(found.regimes[0]) == "M=1"


@given(
    low=st.integers(1, 500),
    length=st.integers(1, 4000),
    cuts=st.sets(st.integers(1, 4000), max_size=5),
)
def test_every_change_of_a_function_without_repeats_is_found(low, length, cuts):
    high = low + length
    step = lambda m: sum(m - low >= cut for cut in cuts)
    ask, asked = counted(step)
    found = survey(low, high, ask)
    assert len(asked) == len(set(asked))
    for tokens in range(low, high + 1):
        assert found.answer(tokens) == step(tokens)
    assert found.regimes[0].low == low
    assert found.regimes[-1].high == high


def test_three_regimes_in_one_bucket_are_all_found():
    split = lambda m: 7 if m < 1300 else 4 if m < 1301 else 0
    found = survey(1025, 2048, split)
    assert [(r.low, r.high, r.answer) for r in found.regimes] == [
        (1025, 1299, 7),
        (1300, 1300, 4),
        (1301, 2048, 0),
    ]


def test_a_regime_between_two_equal_ends_is_not_looked_for():
    """The documented limit, which an exhaustive replay covers."""
    ask, asked = counted(lambda m: "b" if 40 <= m <= 50 else "a")
    found = survey(33, 64, ask)
    assert asked == [33, 64]
    assert found.answer(45) == "a"


def test_equal_ends_within_a_halved_interval_hide_what_is_between_them():
    answers = lambda m: "c" if m == 64 else "b" if m == 37 else "a"
    assert survey(33, 64, answers).answer(37) == "a"


def test_a_token_count_outside_the_range_has_no_answer():
    with pytest.raises(ValueError, match="outside"):
        survey(1, 2, str).answer(3)
