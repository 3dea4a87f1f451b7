"""RMS norm of rows, and the all-reduce that feeds it: the same bits on every rank."""

from __future__ import annotations

import flydsl.expr as fx
import pytest
import torch

from aiter.ops.flydsl.kernels.device import div, global_pointer, mod, traced
from atom.mono.device.all_reduce import Exchange
from atom.mono.device.rms_norm import reduce_norm, reduce_rows, rms_norm
from atom.mono.device.sync import DIAG_BYTES, Words, wait_records
from atom.mono.plan.trace import Space
from op_tests.mono import torch_m3
from op_tests.torch_moe import relative_l2

from .stages import empty_words, pairs_in, run_stage, stage_launcher

pytestmark = pytest.mark.emulated
EPS = 1e-5


@pytest.mark.parametrize(("hidden", "tokens"), [(1408, 5), (128, 1)])
def test_rows_are_normed(emulate, hidden, tokens):
    g = torch.Generator().manual_seed(hidden)
    x = (torch.randn(tokens, hidden, generator=g) * 3).to(torch.bfloat16)
    w = torch.randn(hidden, generator=g).to(torch.bfloat16)
    y = empty_words(tokens * hidden // 2)

    def body(cta, addresses, number, waits):
        out = Words("test", Space.SCRATCH, addresses[0], number, waits)
        rms_norm(cta, addresses[1], addresses[2], hidden, tokens, EPS, out)

    emulate("gfx950", order="random")
    run_stage(stage_launcher(body), [y, x, w], 4)
    want = torch_m3.rms_norm(x.float(), w, EPS)
    assert relative_l2(pairs_in(y, 4).float().view(tokens, hidden), want) < 3e-3


class Rank:
    """One rank's buffers of an all-reduce."""

    def __init__(self, tp: int, tokens: int, hidden: int, g: torch.Generator) -> None:
        self.partial = torch.randn(tokens, hidden, generator=g)
        self.peer = torch.zeros(2 * tp * tokens * hidden, 2, dtype=torch.int32)
        self.mid = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
        self.out = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
        self.normed = empty_words(tokens * hidden // 2)
        self.diag = torch.zeros(DIAG_BYTES // 4, dtype=torch.int32)


def all_reduce_launcher(tp: int, tokens: int, hidden: int, debug: bool = False):
    """Push partial sums twice, take them with a norm and without one."""
    pairs = hidden // 2
    offset = 8 * tp * tokens * hidden

    @traced
    def push_all(cta, partial, exchange):
        for i in range(
            cta.block * 512 + cta.thread, fx.Int32(tokens * pairs), fx.Int32(cta.blocks * 512)
        ):
            token, pair = div(fx.Int32(i), pairs), mod(fx.Int32(i), pairs)
            values = global_pointer(fx.Float32, partial) + (token * hidden + pair * 2)
            exchange.push(pair * 2, token, values[0], values[1])

    def body(cta, addresses, number, waits):
        partial, peers, residual, w, mid, normed, out, rank = addresses[:8]
        place = fx.Int32(rank)
        first, second = (
            Exchange(region, peers, at, place, tp, tokens, hidden, number, waits)
            for region, at in (("attn_sums", 0), ("ffn_sums", offset))
        )
        words = Words("test", Space.SCRATCH, normed, number, waits)
        push_all(cta, partial, first)
        reduce_norm(cta, first, residual, w, hidden, tokens, EPS, mid, words)
        push_all(cta, partial, second)
        reduce_rows(cta, second, mid, hidden, tokens, out)

    return stage_launcher(body, debug=debug, polls=30)


def run_all_reduce(
    emu, tp: int, present: list[int], debug: bool = False, tokens: int = 3, hidden: int = 1152
) -> tuple:
    g = torch.Generator().manual_seed(tp)
    ranks = [Rank(tp, tokens, hidden, g) for _ in range(tp)]
    residual = torch.randn(tokens, hidden, generator=g).to(torch.bfloat16)
    w = torch.randn(hidden, generator=g).to(torch.bfloat16)
    table = torch.tensor([r.peer.data_ptr() for r in ranks], dtype=torch.int64)
    for r in ranks:
        emu.register(r.peer)
    launcher = all_reduce_launcher(tp, tokens, hidden, debug)

    def run(number: int) -> None:
        r = ranks[number]
        given = [r.partial, table, residual, w, r.mid, r.normed, r.out, number]
        run_stage(launcher, given, 9, r.diag)

    emu.run_ranks([lambda n=n: run(n) for n in present])
    return ranks, residual, w


@pytest.mark.parametrize(
    ("tp", "order", "tokens", "hidden"),
    [
        (1, "lockstep", 3, 1152),
        (2, "random", 3, 1152),
        (4, "lockstep", 3, 1152),
        (4, "lockstep", 1, 6144),  # more sums a thread than it waits for at once
        (8, "lockstep", 1, 2304),
    ],
)
def test_all_ranks_reduce_to_the_same_bits(emulate, tp, order, tokens, hidden):
    emu = emulate("gfx950", order=order, poison=True)
    given = list(range(tp))
    ranks, residual, w = run_all_reduce(emu, tp, given, tokens=tokens, hidden=hidden)
    total = ranks[0].partial
    for r in ranks[1:]:
        total = total + r.partial
    mid = (residual.float() + total).to(torch.bfloat16)
    out = (mid.float() + total).to(torch.bfloat16)
    normed = torch_m3.rms_norm(mid.float(), w, EPS)
    for r in ranks:
        assert torch.equal(r.mid, mid)
        assert torch.equal(r.out, out)
        assert torch.equal(r.normed, ranks[0].normed)
    assert relative_l2(pairs_in(ranks[0].normed, 9).float().view_as(normed), normed) < 3e-3


def test_a_debug_build_names_the_rank_that_never_arrives(emulate):
    emu = emulate("gfx950")
    ranks, _, _ = run_all_reduce(emu, 3, [0, 2], True)
    for n in (0, 2):
        records = wait_records(ranks[n].diag.tolist())
        assert records[0].rank == 1
        assert records[0].region == "attn_sums"
        assert records[0].wanted == 9
        assert records[0].found == 0
        assert {r.rank for r in records} == {1}
