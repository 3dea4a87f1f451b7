"""Ranks over a gloo group, three real processes: they agree, and exchange peer memory."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp

from atom.mono.runtime.compare import ResultsDiffer, require_same_on_all_ranks
from atom.mono.runtime.consensus import MonoUnsupported, bind_agreed, tp_agree, tp_same
from op_tests.mono.runtime.gloo_ranks import rank_main

RANKS = 3


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """Each rank's answers, in rank order."""
    folder = tmp_path_factory.mktemp("gloo")
    context = mp.get_context("spawn")
    results = context.Queue()
    mp.spawn(rank_main, args=(RANKS, str(folder), results), nprocs=RANKS, join=True)
    found = dict(results.get(timeout=10) for _ in range(RANKS))
    return [found[rank] for rank in range(RANKS)]


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ("all agree", True),
        ("last disagrees", False),
        ("none agrees", False),
        ("same", True),
        ("last differs", False),
        ("still in step", True),
    ],
)
def test_every_rank_gets_the_same_verdict(answers, scenario: str, expected: bool):
    assert [answer[scenario] for answer in answers] == [expected] * RANKS


def test_all_ranks_bind_when_all_can(answers):
    assert [answer["bound"] for answer in answers] == [f"bound {rank}" for rank in range(RANKS)]


@pytest.mark.parametrize(
    ("scenario", "own"),
    [
        ("last refuses", "MonoUnsupported: this rank has no scales"),
        ("last crashes", "KeyError: 'qkv_w'"),
    ],
)
def test_a_rank_raises_its_own_reason_and_the_others_refuse(answers, scenario: str, own: str):
    others = "MonoUnsupported: another rank refused; its log says why"
    assert [answer[scenario] for answer in answers] == [others] * (RANKS - 1) + [own]


def test_every_rank_opens_the_memory_of_the_others(answers):
    for rank, answer in enumerate(answers):
        assert answer["memory"] == ["own" if r == rank else "peer's" for r in range(RANKS)]


@pytest.mark.parametrize(
    ("scenario", "own", "others"),
    [
        # Every rank sees that sizes differ, before it opens anything.
        (
            "last has other sizes",
            "ranks want peer memory of different sizes: 32, 64; freed 1, closed 0",
            "ranks want peer memory of different sizes: 32, 64; freed 1, closed 0",
        ),
        (
            "last cannot allocate",
            "peer memory: hipExtMallocWithFlags failed with HIP error 2; freed 0, closed 0",
            "another rank refused; its log says why; freed 1, closed 0",
        ),
        (
            "last cannot open",
            "peer memory: hipIpcOpenMemHandle failed with HIP error 2; freed 1, closed 0",
            "another rank refused; its log says why; freed 1, closed 2",
        ),
    ],
)
def test_memory_that_one_rank_lacks_is_refused_by_all_and_given_back(
    answers, scenario: str, own: str, others: str
):
    assert [answer[scenario] for answer in answers] == [others] * (RANKS - 1) + [own]


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ("results are one", "one"),
        ("last result differs", "step: ranks [2] do not have the bits of rank 0"),
        (
            "last result is NaN",
            "step: rank 2 has 4 elements that are no numbers; "
            "ranks [2] do not have the bits of rank 0",
        ),
    ],
)
def test_every_rank_hears_whose_result_differs(answers, scenario: str, expected: str):
    assert [answer[scenario] for answer in answers] == [expected] * RANKS


def test_a_single_rank_agrees_with_itself():
    assert (tp_agree(True, None), tp_agree(False, None), tp_same("x", None)) == (True, False, True)
    assert bind_agreed(lambda: 5, None) == 5
    require_same_on_all_ranks(torch.zeros(3, dtype=torch.bfloat16), None, "step")
    with pytest.raises(ResultsDiffer, match="rank 0 has 1 elements that are no numbers"):
        require_same_on_all_ranks(torch.tensor([1, torch.inf]), None, "step")
    with pytest.raises(MonoUnsupported, match="own"):
        bind_agreed(lambda: (_ for _ in ()).throw(MonoUnsupported("own")), None)
