"""Step-begin is one launch that zeroes mailboxes, fences ranks, and names who did not come."""

from __future__ import annotations

import pytest
import torch

from atom.mono.device.step_begin import FENCE_BYTES, StepBeginBuild
from atom.mono.device.sync import DIAG_RECORDS, PEER_ID, WAITS
from atom.mono.runtime.debug import WaitGivenUp, diag_buffer, raise_if_given_up, region_namer
from atom.mono.runtime.mailboxes import StepMailboxes
from atom.mono.runtime.peer_memory import InProcessHeap, PeerBuffer
from atom.mono.runtime.step_begin import StepBegin
from op_tests.emulator import emulated
from op_tests.emulator.session import Emulator

CPU = torch.device("cpu")
BLOCKS = 3


def _rank(heap: InProcessHeap, rank: int, scratch: torch.Tensor, debug: bool) -> StepMailboxes:
    build = StepBeginBuild(heap.npes, debug, BLOCKS, polls=50)
    return StepMailboxes(build, PeerBuffer(heap.allocator(rank), 4096, CPU), scratch)


def _epochs(tensors: list[torch.Tensor]) -> list[list[int]]:
    return [t[-FENCE_BYTES:].view(torch.int64).tolist() for t in tensors]


def _opener(emu: Emulator, mailboxes: StepMailboxes, peer: int, scratch: int) -> StepBegin:
    begin = mailboxes.of_width(peer, scratch)
    for tensor in (begin.peers.addresses, mailboxes.state, *mailboxes.scratch):
        emu.register(tensor)
    return begin


@pytest.mark.emulated
def test_all_ranks_pass_the_fence_with_what_their_width_uses_zeroed():
    buffers: list[torch.Tensor] = []
    scratch = [torch.full((1024,), 7, dtype=torch.int32) for _ in range(2)]
    with emulated("gfx950") as emu:
        heap = InProcessHeap(2, lambda t: buffers.append(emu.register(t)))
        ranks = [_rank(heap, rank, scratch[rank], debug=False) for rank in range(2)]
        wide = [_opener(emu, mailboxes, 4096, 4096) for mailboxes in ranks]
        narrow = [_opener(emu, mailboxes, 1024, 512) for mailboxes in ranks]
        for step, (begin, peer, words) in enumerate(
            ((wide, 4096, 1024), (narrow, 1024, 128), (wide, 4096, 1024)), 1
        ):
            for tensor in buffers:
                tensor[:-FENCE_BYTES] = 9
            for tensor in scratch:
                tensor.fill_(7)
            emu.run_ranks([lambda b=b: b(None) for b in begin])
            for tensor in buffers:
                # A width's part of the data ends at the fence.
                assert not tensor[4096 - peer : -FENCE_BYTES].any()
                assert (tensor[: 4096 - peer] == 9).all()
            for tensor in scratch:
                assert not tensor[:words].any()
                assert (tensor[words:] == 7).all()
            assert _epochs(buffers) == [[step] * 2 + [0] * 6] * 2
    assert [m.missing_ranks() for m in ranks] == [{}, {}]


@pytest.mark.emulated
def test_a_rank_that_does_not_come_is_named_with_its_last_step():
    scratch = [torch.zeros(16, dtype=torch.int32) for _ in range(2)]
    with emulated("gfx950") as emu:
        heap = InProcessHeap(2, emu.register)
        ranks = [_rank(heap, rank, scratch[rank], debug=True) for rank in range(2)]
        begin = [_opener(emu, mailboxes, 4096, 64) for mailboxes in ranks]
        emu.run_ranks([lambda b=b: b(None) for b in begin])
        begin[0](None)
    assert ranks[0].missing_ranks() == {1: 1}
    with pytest.raises(WaitGivenUp, match="rank 1 did not come to the step, it was last seen at"):
        raise_if_given_up(diag_buffer(CPU), ranks[0].missing_ranks(), {})


def test_ranks_and_scratch_that_do_not_fit_are_refused():
    peers = PeerBuffer(InProcessHeap(2).allocator(0), 64, CPU)
    with pytest.raises(ValueError, match="step-begin of 4 ranks over memory of 2"):
        StepMailboxes(StepBeginBuild(4, False), peers)
    build = StepBeginBuild(2, False)
    with pytest.raises(ValueError, match="zeroes 2 scratch buffers, not 3"):
        StepMailboxes(build, peers, *[torch.zeros(16)] * 3)
    with pytest.raises(ValueError, match="contiguous"):
        StepMailboxes(build, peers, torch.zeros(8, 8).t())
    mailboxes = StepMailboxes(build, peers, torch.zeros(16))
    for nbytes in (20, 80):
        with pytest.raises(ValueError, match=f"{nbytes} bytes of a scratch of 64, in units of 16"):
            mailboxes.of_width(16, nbytes)
    with pytest.raises(ValueError, match="65 bytes of a peer buffer of 64"):
        mailboxes.of_width(65, 64)


@pytest.mark.compile
def test_the_real_grid_takes_no_scratch(gfx950):
    from atom.mono.runtime.compile import compile_kernels

    peers = PeerBuffer(InProcessHeap(4).allocator(0), 64, CPU)
    mailboxes = StepMailboxes(StepBeginBuild(4, False), peers, torch.zeros(16))
    compile_kernels(mailboxes.kernels)
    (resources,) = mailboxes.resources
    assert (resources.scratch_bytes, resources.spilled, resources.threads) == (0, 0, 512)


# ---------------------------------------------------------------- wait records in words


def _diag(*records: tuple[int, int, int, int]) -> torch.Tensor:
    diag = diag_buffer(CPU)
    diag[0] = len(records)
    for i, record in enumerate(records[:DIAG_RECORDS]):
        diag[4 + 4 * i : 8 + 4 * i] = torch.tensor(record, dtype=torch.int32)
    return diag


def test_waits_given_up_say_what_did_not_come_from_whom_and_in_which_layer():
    sums, qkv = WAITS.index("attn_sums"), WAITS.index("qkv")
    diag = _diag((sums + PEER_ID * 3, 40, 2, 1), (qkv, 7, 9, 0))
    with pytest.raises(WaitGivenUp) as error:
        raise_if_given_up(diag, {}, region_namer(["layer 0", "layer 1"]))
    assert str(error.value).splitlines()[1:] == [
        "  layer 1: attn_sums[40] of rank 2 did not come; it holds layer 0",
        "  tag 9: qkv[7] of this rank did not come; it holds nothing",
    ]
    assert error.value.missing == {2}


def test_waits_beyond_the_records_are_counted():
    with pytest.raises(WaitGivenUp, match="and 3 more waits"):
        raise_if_given_up(_diag(*[(0, 0, 1, 0)] * (DIAG_RECORDS + 3)), {}, {})


def test_records_are_raised_once():
    diag = _diag((0, 0, 1, 0))
    with pytest.raises(WaitGivenUp):
        raise_if_given_up(diag, {}, {})
    raise_if_given_up(diag, {}, {})
