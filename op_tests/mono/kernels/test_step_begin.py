"""Step begin: zeroing, the fence between ranks, and the report of an absent one."""

from __future__ import annotations

import pytest
import torch

from aiter.ops.flydsl.kernels.tensor_shim import _run_compiled
from atom.mono.device.step_begin import (
    FENCE_BYTES,
    STATE_BYTES,
    StepBeginBuild,
    build_step_begin,
)

pytestmark = pytest.mark.emulated
DATA = 4096


class Rank:
    """One rank's buffers, full of ones where they must become zero."""

    def __init__(self) -> None:
        self.peer = torch.ones(DATA + FENCE_BYTES, dtype=torch.uint8)
        self.peer[DATA:] = 0
        self.scratch = [torch.ones(n, dtype=torch.uint8) for n in (9264, 80)]
        self.state = torch.zeros(STATE_BYTES // 4, dtype=torch.int32)

    def begin(self, build: StepBeginBuild, table: torch.Tensor, rank: int) -> None:
        a, b = self.scratch
        _run_compiled(
            build_step_begin(build),
            *(a, a.numel() - 16, b, b.numel() - 16, table, DATA, rank, self.state, None),
        )


def begin_all(emu, build: StepBeginBuild, ranks: list[Rank], steps: int) -> None:
    table = torch.tensor([r.peer.data_ptr() for r in ranks], dtype=torch.int64)
    for r in ranks:
        emu.register(r.peer)

    def run(number: int) -> None:
        for _ in range(steps):
            ranks[number].begin(build, table, number)

    emu.run_ranks([lambda n=n: run(n) for n in range(build.tp)])


@pytest.mark.parametrize(
    ("tp", "blocks", "order"),
    [(1, 1, "lockstep"), (2, 3, "lockstep"), (4, 3, "lockstep"), (2, 3, "random")],
)
def test_mailboxes_are_zeroed_and_ranks_reach_the_same_epoch(emulate, tp, blocks, order):
    emu = emulate("gfx950", order=order, poison=True)
    ranks = [Rank() for _ in range(tp)]
    begin_all(emu, StepBeginBuild(tp, False, blocks), ranks, 2)
    for r in ranks:
        assert (r.peer[:DATA] == 0).all()
        assert r.peer[DATA:].view(torch.int64).tolist() == [2] * tp + [0] * (8 - tp)
        for scratch in r.scratch:
            assert (scratch[:-16] == 0).all()
            assert (scratch[-16:] == 1).all()
        assert r.state[0] == 2


def test_an_absent_rank_is_reported_by_a_debug_build(emulate):
    emu = emulate("gfx950")
    build = StepBeginBuild(3, True, 2, polls=20)
    ranks = [Rank() for _ in range(3)]
    begin_all(emu, build, ranks, 1)
    assert ranks[0].state[1:9].tolist() == [0] * 8
    table = torch.tensor([r.peer.data_ptr() for r in ranks], dtype=torch.int64)
    emu.run_ranks([lambda n=n: ranks[n].begin(build, table, n) for n in (0, 2)])
    assert ranks[0].state[1:9].tolist() == [0, 2, 0, 0, 0, 0, 0, 0]
    assert ranks[2].state[1:9].tolist() == [0, 2, 0, 0, 0, 0, 0, 0]
