"""Every rank addresses every rank's buffer; without a device it is refused with the reason."""

from __future__ import annotations

import gc

import pytest
import torch

from atom.mono.device.step_begin import FENCE_BYTES, FENCE_SLOTS, ZERO_ALIGN
from atom.mono.runtime.consensus import MonoUnsupported
from atom.mono.runtime.lifecycle import owned_peer_buffer
from atom.mono.runtime.peer_memory import HipIpcAllocator, InProcessHeap, PeerBuffer
from op_tests.mono.runtime.fake_hip import FakeHip

CPU = torch.device("cpu")


def test_ranks_of_one_process_see_the_same_addresses():
    heap = InProcessHeap(3)
    buffers = [PeerBuffer(heap.allocator(rank), 100, CPU) for rank in range(3)]
    tables = [buffer.addresses for buffer in buffers]
    assert tables[0] == tables[1] == tables[2]
    assert len(set(tables[0])) == 3
    assert [buffer.part(100).addresses.tolist() for buffer in buffers] == [list(tables[0])] * 3
    assert [buffer.part(16).rank for buffer in buffers] == [0, 1, 2]


def test_the_buffer_holds_whole_zeroing_units_and_then_the_fence():
    seen: list[torch.Tensor] = []
    buffer = PeerBuffer(InProcessHeap(2, seen.append).allocator(1), 100, CPU)
    assert buffer.bytes == 112
    assert buffer.bytes % ZERO_ALIGN == 0
    assert [tensor.numel() for tensor in seen] == [112 + FENCE_BYTES] * 2
    assert not any(tensor.any() for tensor in seen)


def test_a_part_ends_where_the_fence_begins():
    buffer = PeerBuffer(InProcessHeap(2).allocator(1), 100, CPU)
    part = buffer.part(40)
    assert (part.bytes, part.rank) == (48, 1)
    assert part.addresses.tolist() == [address + 112 - 48 for address in buffer.addresses]
    with pytest.raises(ValueError, match="113 bytes of a peer buffer of 112"):
        buffer.part(113)


def test_each_allocation_of_a_rank_belongs_to_the_same_of_the_others():
    heap = InProcessHeap(2)
    first = [heap.allocator(0).allocate(16), heap.allocator(0).allocate(32)]
    assert [heap.allocator(1).allocate(16), heap.allocator(1).allocate(32)] == first


def test_ranks_that_want_different_sizes_are_refused():
    heap = InProcessHeap(2)
    heap.allocator(0).allocate(16)
    with pytest.raises(MonoUnsupported, match="rank 1 wants 32 bytes of peer memory, another 16"):
        heap.allocator(1).allocate(32)


def test_more_ranks_than_a_fence_holds_are_refused():
    with pytest.raises(MonoUnsupported, match=f"holds {FENCE_SLOTS} ranks, not 9"):
        PeerBuffer(InProcessHeap(9).allocator(0), 16, CPU)


class Owner:
    pass


class Releases(InProcessHeap):
    """A heap whose one rank counts what it gives back."""

    def __init__(self) -> None:
        super().__init__(1)
        self.rank = 0
        self.released: list[tuple[int, ...]] = []

    def allocate(self, nbytes: int) -> tuple[int, ...]:
        return self.take(0, nbytes)

    def release(self, addresses) -> None:
        self.released.append(tuple(addresses))


def test_a_buffer_is_given_back_once():
    allocator = Releases()
    buffer = PeerBuffer(allocator, 16, CPU)
    (address,) = buffer.addresses
    buffer.close()
    buffer.close()
    assert allocator.released == [(address,)]
    with pytest.raises(RuntimeError, match="closed"):
        _ = buffer.addresses


def test_a_buffer_lives_as_long_as_its_owner():
    allocator, owner = Releases(), Owner()
    buffer, finalizer = owned_peer_buffer(owner, allocator, 16, CPU)
    assert not finalizer.atexit
    gc.collect()
    assert allocator.released == []
    (address,) = buffer.addresses
    del owner
    gc.collect()
    assert allocator.released == [(address,)]
    assert not finalizer.alive
    buffer.close()
    assert len(allocator.released) == 1


# ---------------------------------------------------------------- HIP


def test_without_a_device_ipc_memory_is_refused_with_the_reason():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(MonoUnsupported, match="peer memory needs a GPU, and torch sees none"):
        HipIpcAllocator(None)


def test_a_single_rank_takes_uncached_zeroed_memory_and_no_handle():
    hip = FakeHip()
    buffer = PeerBuffer(HipIpcAllocator(None, hip), 32, CPU)
    assert hip.memory[0].raw == bytes(32 + FENCE_BYTES)
    buffer.close()
    assert hip.calls == ["hipExtMallocWithFlags", "hipMemset", "hipDeviceSynchronize", "hipFree"]


def test_a_driver_that_refuses_is_a_refusal_and_leaks_nothing():
    hip = FakeHip(fails="hipMemset")
    with pytest.raises(MonoUnsupported, match="hipMemset failed with HIP error 2"):
        PeerBuffer(HipIpcAllocator(None, hip), 32, CPU)
    assert hip.calls[-1] == "hipFree"
