"""Missing waits and barriers must show, and correct kernels must pass in every order."""

from __future__ import annotations

import pytest
import torch

from op_tests.emulator import EmulationError, emulated

from . import sample_kernels as samples

pytestmark = pytest.mark.emulated

ORDERS = [("lockstep", 0), ("random", 0), ("random", 1), ("random", 2)]


def _reverse(barrier: bool, order: str, seed: int) -> bool:
    x = torch.arange(4 * samples.THREADS, dtype=torch.int32)
    out = torch.zeros_like(x)
    with emulated("gfx950", order=order, seed=seed) as emu:
        emu.register(x)
        emu.register(out)
        samples.make_reverse(barrier)(out.data_ptr(), x.data_ptr(), 4, None)
    return torch.equal(out, x.view(4, -1).flip(1).reshape(-1))


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_a_kernel_with_its_barrier_passes(order: str, seed: int) -> None:
    assert _reverse(True, order, seed)


@pytest.mark.parametrize("seed", range(4))
def test_a_missing_barrier_fails_in_random_order(seed: int) -> None:
    assert not _reverse(False, "random", seed)


def test_lock_step_hides_a_missing_barrier() -> None:
    """Why every kernel needs a test in random order."""
    assert _reverse(False, "lockstep", 0)


def _staged_sum(wait: int | None, order: str, seed: int) -> bool:
    steps = 4
    x = torch.arange(steps * 256, dtype=torch.int32).view(steps, 256)
    out = torch.zeros(64, dtype=torch.int32)
    with emulated("gfx950", order=order, seed=seed):
        samples.make_staged_sum(steps, wait)(out, x, None)
    return torch.equal(out, x[:, :64].sum(0, dtype=torch.int32))


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_async_copies_with_their_wait_pass(order: str, seed: int) -> None:
    assert _staged_sum(0, order, seed)


@pytest.mark.parametrize("wait", [None, 1])
def test_a_missing_or_short_async_wait_fails_in_random_order(wait: int | None) -> None:
    assert not any(_staged_sum(wait, "random", seed) for seed in range(3))


def _vmcnt_copy(vmcnt: int, order: str, seed: int) -> bool:
    x = torch.arange(1, 129, dtype=torch.int32)
    out = torch.zeros(64, dtype=torch.int32)
    with emulated("gfx942", order=order, seed=seed):
        samples.make_vmcnt_copy(vmcnt)(out, x, None)
    return torch.equal(out, x[:64] + x[64:])


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_copies_awaited_by_vmcnt_pass(order: str, seed: int) -> None:
    assert _vmcnt_copy(0, order, seed)


def test_a_vmcnt_that_leaves_one_copy_out_fails() -> None:
    assert not any(_vmcnt_copy(1, "random", seed) for seed in range(3))


def test_random_order_repeats_with_its_seed() -> None:
    def run(seed: int) -> torch.Tensor:
        counter, out = torch.zeros(1, dtype=torch.int32), torch.zeros(512, dtype=torch.int32)
        with emulated("gfx950", order="random", seed=seed):
            samples.make_tickets()(counter, out, 2, None)
        return out

    assert torch.equal(run(5), run(5))
    assert not torch.equal(run(5), run(6))


@pytest.mark.parametrize("order", ["lockstep", "random"])
def test_an_atomic_returns_what_was_there(order: str) -> None:
    counter = torch.zeros(1, dtype=torch.int32)
    out = torch.full((1024,), -1, dtype=torch.int32)
    with emulated("gfx950", order=order):
        samples.make_tickets()(counter, out, 4, None)
    assert counter.item() == 1024
    assert torch.equal(out.sort().values, torch.arange(1024, dtype=torch.int32))


@pytest.mark.parametrize("order", ["lockstep", "random"])
def test_lanes_that_loop_differently_keep_their_own_values(order: str) -> None:
    def steps(n: int) -> int:
        count = 0
        while n != 1:
            n, count = (3 * n + 1 if n % 2 else n // 2), count + 1
        return count

    out = torch.zeros(samples.THREADS, dtype=torch.int32)
    with emulated("gfx950", order=order):
        samples.make_collatz()(out, None)
    assert out.tolist() == [steps(n + 1) for n in range(samples.THREADS)]


@pytest.mark.parametrize("order", ["lockstep", "random"])
@pytest.mark.parametrize("sleep", [True, False])
def test_spinning_workgroups_let_later_ones_run(order: str, sleep: bool) -> None:
    blocks = 100  # more than one batch of workgroups
    flags = torch.zeros(blocks + 1, dtype=torch.int32)
    with emulated("gfx950", order=order):
        samples.make_relay(sleep)(flags, 0, blocks - 1, blocks, None)
    assert flags[:blocks].eq(1).all()


def test_a_deadlock_says_who_waits_for_what() -> None:
    flags = torch.zeros(4, dtype=torch.int32)
    with emulated("gfx950", spin_limit=500), pytest.raises(EmulationError) as caught:
        samples.make_relay(True)(flags, 0, 3, 2, None)
    text = str(caught.value)
    assert "relay" in text
    assert "no progress" in text
    assert "workgroup (1, 0, 0) wave 0 spins on a load of byte 8 of tensor (4,) int32" in text
    assert "sample_kernels.py" in text
