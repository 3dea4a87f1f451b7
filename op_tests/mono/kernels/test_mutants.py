"""Stages with one barrier left out, or one wait: the emulator must tell each from the real one.

A mutant is killed if its stage's own test fails, or the emulator reports an error, in one of a
few random orders of waves.
"""

from __future__ import annotations

from collections.abc import Callable

import flydsl.expr as fx
import pytest

from atom.mono.device import attention, sync
from op_tests.emulator import EmulationError, emulated

from . import test_attention, test_experts, test_layers, test_matvec, test_norm

pytestmark = [pytest.mark.emulated, pytest.mark.slow]
SEEDS = range(1, 8)

# Every stage with barriers, with more tasks than workgroups so that one task can spoil the next.
STAGES: dict[str, list[Callable]] = {
    "matvec": [
        lambda e: test_matvec.test_products_match_torch(e, "bf16", 128, 1152, 4, False, "random")
    ],
    "norm": [lambda e: test_norm.test_rows_are_normed(e, 1408, 5)],
    "attention": [
        lambda e: test_attention.test_attention_over_chosen_blocks(e, 4, 2, 9, 1, "random", "fp8")
    ],
    "select": [
        lambda e: test_attention.test_blocks_are_chosen_by_index_score(
            e, 1, 1, 4, 1, 1, 20000, "random", "bf16"
        )
    ],
    # Many entries of the table of active experts, and workgroups without gate and up tasks.
    "experts": [
        lambda e: test_experts.test_experts_of_every_routing(
            e, 16, 8, 1, 128, 128, "bf16", "even", 3, "random"
        ),
        lambda e: test_experts.test_experts_of_every_routing(
            e, 1, 4, 1, 384, 128, "bf16", "even", 18, "random"
        ),
    ],
}


def survives(stage: Callable) -> bool:
    """Whether the stage's test passes in every order tried."""
    for seed in SEEDS:
        with emulated("gfx950", order="random", seed=seed) as emu:
            try:
                stage(lambda *_args, emu=emu, **_options: emu)
            except (AssertionError, EmulationError):
                return False
    return True


@pytest.mark.parametrize("name", STAGES)
def test_every_barrier_of_a_stage_is_needed(monkeypatch, name):
    calls = []
    barrier = fx.gpu.barrier
    with monkeypatch.context() as patch:
        patch.setattr(fx.gpu, "barrier", lambda: (calls.append(1), barrier())[1])
        with emulated("gfx950", order="random") as emu:
            STAGES[name][0](lambda *_args, **_options: emu)
    assert calls
    alive = []
    for left_out in range(len(calls)):
        with monkeypatch.context() as patch:
            # Each seed traces the stage anew, so the count starts again with it.
            patch.setattr(fx.gpu, "barrier", _every_trace_without(barrier, left_out, len(calls)))
            if all(survives(stage) for stage in STAGES[name]):
                alive.append(left_out)
    assert not alive


def _every_trace_without(barrier: Callable, left_out: int, each: int) -> Callable:
    count = iter(range(1 << 30))
    return lambda: None if next(count) % each == left_out else barrier()


def test_words_must_be_waited_for(monkeypatch):
    """A reader that takes a word whatever its tag computes with zeros."""
    monkeypatch.setattr(sync, "_any_missing", lambda *_args: fx.Int32(0))
    assert not survives(
        lambda e: test_norm.test_all_ranks_reduce_to_the_same_bits(e, 2, "random", 3, 1152)
    )


def test_a_score_beyond_the_position_must_be_masked(monkeypatch):
    """Without its limit the attention sees keys that come after the token."""
    add = attention._add_keys
    monkeypatch.setattr(
        attention,
        "_add_keys",
        lambda state, query, quarter, scale, last, lane: add(
            state, query, quarter, scale, last + 1, lane
        ),
    )
    assert not survives(STAGES["attention"][0])


def test_a_step_must_zero_the_mailboxes(monkeypatch):
    """Without zeroing, a step takes the last one's words for its own."""
    monkeypatch.setattr(test_layers.Rank, "begin", lambda self: None)
    assert not survives(test_layers.test_a_step_is_not_fooled_by_what_the_last_one_left)
