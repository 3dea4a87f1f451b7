"""Ranks share one address space and advance in turns."""

from __future__ import annotations

import pytest
import torch

from op_tests.emulator import EmulationError, emulated

from . import sample_kernels as samples

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("order", ["lockstep", "random"])
def test_ranks_may_wait_for_each_other(order: str) -> None:
    """Four ranks of two workgroups relay a flag from the last rank to the first."""
    flags = torch.zeros(9, dtype=torch.int32)
    relay = samples.make_relay(True)

    def rank(number: int) -> int:
        relay(flags.data_ptr(), 2 * number, 7, 2, None)
        return number

    with emulated("gfx950", order=order) as emu:
        emu.register(flags)
        results = emu.run_ranks([lambda n=n: rank(n) for n in range(4)])
    assert results == [0, 1, 2, 3]
    assert flags[:8].eq(1).all()


def test_ranks_see_each_others_earlier_launches() -> None:
    """Rank 0 waits for what rank 1 sets in its second launch."""
    flags = torch.zeros(4, dtype=torch.int32)
    relay = samples.make_relay(True)

    def first() -> None:
        relay(flags.data_ptr(), 0, 3, 1, None)

    def second() -> None:
        relay(flags.data_ptr(), 3, 3, 1, None)
        flags[3] = 0  # host code runs between a rank's launches
        relay(flags.data_ptr(), 1, 1, 1, None)

    with emulated("gfx950") as emu:
        emu.register(flags)
        emu.run_ranks([first, second])
    assert flags.tolist() == [1, 1, 0, 0]


def test_a_rank_that_is_never_served_is_a_deadlock() -> None:
    flags = torch.zeros(4, dtype=torch.int32)
    relay = samples.make_relay(True)
    with emulated("gfx950", spin_limit=500) as emu:
        emu.register(flags)
        with pytest.raises(EmulationError, match="no progress"):
            emu.run_ranks(
                [
                    lambda: relay(flags.data_ptr(), 0, 3, 1, None),
                    lambda: relay(flags.data_ptr(), 2, 2, 1, None),
                ]
            )


def test_an_error_in_one_rank_stops_the_others() -> None:
    flags = torch.zeros(4, dtype=torch.int32)
    relay = samples.make_relay(True)

    def broken() -> None:
        raise ValueError("host code failed")

    with emulated("gfx950") as emu:
        emu.register(flags)
        with pytest.raises(ValueError, match="host code failed"):
            emu.run_ranks([lambda: relay(flags.data_ptr(), 0, 3, 1, None), broken])
