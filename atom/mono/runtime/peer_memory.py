"""One buffer a rank, which every rank can address.

Where the memory comes from is behind `PeerAllocator`: HIP's interprocess handles on devices, plain
memory of one process for tests, in which ranks are threads of an emulator.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from aiter.jit.utils.flydsl_private import runtime_library
from atom.mono.device.step_begin import FENCE_BYTES, FENCE_SLOTS, ZERO_ALIGN
from atom.mono.plan.execution import round_up

from .consensus import Group, MonoUnsupported, bind_agreed


class PeerAllocator(Protocol):
    """Memory that all ranks of a group address; `rank` is this one, of `npes`."""

    rank: int
    npes: int

    def allocate(self, nbytes: int) -> tuple[int, ...]:
        """`nbytes` zeroed bytes on every rank: their addresses, in rank order, as this rank sees
        them. Collective. Raises MonoUnsupported on every rank if any cannot."""
        ...

    def release(self, addresses: Sequence[int]) -> None:
        """Give back what `allocate` returned. Not collective."""
        ...


@dataclass(frozen=True)
class PeerPart:
    """The last `bytes` bytes of data of every rank's buffer, up to the fence.

    `addresses` is an int64 tensor with where they start on each rank, for kernels.
    """

    addresses: torch.Tensor
    bytes: int
    rank: int


class PeerBuffer:
    """`bytes` bytes of data on every rank, with the fence's epochs behind them.

    `bytes` is rounded up to what step-begin zeroes at once. Kernels are given a `part` of it.
    """

    def __init__(self, allocator: PeerAllocator, nbytes: int, device: torch.device) -> None:
        if allocator.npes > FENCE_SLOTS:
            raise MonoUnsupported(f"a fence holds {FENCE_SLOTS} ranks, not {allocator.npes}")
        self.bytes = round_up(nbytes, ZERO_ALIGN)
        self.rank, self.npes, self.device = allocator.rank, allocator.npes, device
        self._allocator = allocator
        self._addresses: tuple[int, ...] | None = allocator.allocate(self.bytes + FENCE_BYTES)

    @property
    def addresses(self) -> tuple[int, ...]:
        """The buffers' addresses in rank order. Raises RuntimeError once closed."""
        if self._addresses is None:
            raise RuntimeError("the peer buffer is closed")
        return self._addresses

    def part(self, nbytes: int) -> PeerPart:
        """`nbytes` of the data, which end at the fence wherever they begin.

        So all parts have the one fence, and a narrow step zeroes no more than it uses. Raises
        ValueError for more bytes than there are.
        """
        used = round_up(nbytes, ZERO_ALIGN)
        if used > self.bytes:
            raise ValueError(f"{nbytes} bytes of a peer buffer of {self.bytes}")
        starts = [address + self.bytes - used for address in self.addresses]
        table = torch.tensor(starts, dtype=torch.int64, device=self.device)
        return PeerPart(table, used, self.rank)

    def close(self) -> None:
        """Give the memory back; a second call does nothing. No kernel may be using it."""
        addresses, self._addresses = self._addresses, None
        if addresses is not None:
            self._allocator.release(addresses)


# ---------------------------------------------------------------- one process


class InProcessHeap:
    """Peer memory of ranks that share one address space, on the CPU.

    The n-th allocation of every rank belongs together; whoever comes first makes all of it, so no
    rank waits. `on_allocate` sees every tensor, for an emulator to allow access to it.
    """

    def __init__(
        self, npes: int, on_allocate: Callable[[torch.Tensor], Any] = lambda tensor: None
    ) -> None:
        self.npes = npes
        self._on_allocate = on_allocate
        self._tensors: list[list[torch.Tensor]] = []
        self._next = [0] * npes

    def allocator(self, rank: int) -> PeerAllocator:
        """The heap as `rank` sees it."""
        return _InProcess(self, rank)

    def take(self, rank: int, nbytes: int) -> tuple[int, ...]:
        """The next allocation of `rank`."""
        index, self._next[rank] = self._next[rank], self._next[rank] + 1
        if index == len(self._tensors):
            made = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(self.npes)]
            for tensor in made:
                self._on_allocate(tensor)
            self._tensors.append(made)
        tensors = self._tensors[index]
        if tensors[0].numel() != nbytes:
            raise MonoUnsupported(
                f"rank {rank} wants {nbytes} bytes of peer memory, another {tensors[0].numel()}"
            )
        return tuple(tensor.data_ptr() for tensor in tensors)


class _InProcess:
    def __init__(self, heap: InProcessHeap, rank: int) -> None:
        self.rank, self.npes = rank, heap.npes
        self._heap = heap

    def allocate(self, nbytes: int) -> tuple[int, ...]:
        return self._heap.take(self.rank, nbytes)

    def release(self, addresses: Sequence[int]) -> None:
        """The memory lives as long as the heap: other ranks may still write into it."""


# ---------------------------------------------------------------- devices

_UNCACHED = 0x3  # hipDeviceMallocUncached
_LAZY_PEER_ACCESS = 0x1  # hipIpcMemLazyEnablePeerAccess


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


class HipIpcAllocator:
    """Uncached device memory of every rank, opened by the others through HIP's IPC handles.

    Uncached, because a rank's poll must see what a peer's device wrote. The memory is on the
    current device. Handles travel over `group`, the CPU group of the ranks. Raises MonoUnsupported
    where there is no device; `driver`, the HIP library, is for tests to replace.
    """

    def __init__(self, group: Group, driver: Any = None) -> None:
        self.rank = 0 if group is None else dist.get_rank(group)
        self.npes = 1 if group is None else dist.get_world_size(group)
        self._group = group
        self._hip = bind_agreed(lambda: driver or _hip(), group)

    def allocate(self, nbytes: int) -> tuple[int, ...]:
        own, handle = self._own_agreed(nbytes)
        if self._group is None:
            return (own,)
        offers: list[Any] = [None] * self.npes
        dist.all_gather_object(offers, (nbytes, bytes(handle)), group=self._group)
        opened: dict[int, int] = {self.rank: own}

        def open_all() -> tuple[int, ...]:
            sizes = sorted({size for size, _ in offers})
            if len(sizes) > 1:
                shown = ", ".join(map(str, sizes))
                raise MonoUnsupported(f"ranks want peer memory of different sizes: {shown}")
            for rank, (_, raw) in enumerate(offers):
                if rank != self.rank:
                    opened[rank] = self._open(raw)
            return tuple(opened[rank] for rank in range(self.npes))

        try:
            return bind_agreed(open_all, self._group)
        except Exception:
            self._close(opened)
            raise

    def release(self, addresses: Sequence[int]) -> None:
        self._close(dict(enumerate(addresses)))

    def _own_agreed(self, nbytes: int) -> tuple[int, _Handle]:
        made: list[tuple[int, _Handle]] = []
        try:
            bind_agreed(lambda: made.append(self._own(nbytes)), self._group)
        except Exception:
            if made:
                self._close({self.rank: made[0][0]})
            raise
        return made[0]

    def _own(self, nbytes: int) -> tuple[int, _Handle]:
        address, handle = ctypes.c_void_p(), _Handle()
        self._do("hipExtMallocWithFlags", ctypes.byref(address), ctypes.c_size_t(nbytes), _UNCACHED)
        try:
            # Peers poll it as soon as they have its handle.
            self._do("hipMemset", address, 0, ctypes.c_size_t(nbytes))
            self._do("hipDeviceSynchronize")
            if self._group is not None:
                self._do("hipIpcGetMemHandle", ctypes.byref(handle), address)
        except Exception:
            self._hip.hipFree(address)
            raise
        return address.value or 0, handle

    def _open(self, raw: bytes) -> int:
        address, handle = ctypes.c_void_p(), _Handle.from_buffer_copy(raw)
        self._do("hipIpcOpenMemHandle", ctypes.byref(address), handle, _LAZY_PEER_ACCESS)
        return address.value or 0

    def _close(self, addresses: dict[int, int]) -> None:
        for rank, address in addresses.items():
            if rank == self.rank:
                self._hip.hipFree(ctypes.c_void_p(address))
            else:
                self._hip.hipIpcCloseMemHandle(ctypes.c_void_p(address))

    def _do(self, function: str, *args: Any) -> None:
        status = getattr(self._hip, function)(*args)
        if status:
            raise MonoUnsupported(f"peer memory: {function} failed with HIP error {status}")


def _hip() -> Any:
    if not torch.cuda.is_available():
        raise MonoUnsupported("peer memory needs a GPU, and torch sees none")
    try:
        return runtime_library()
    except OSError as error:
        raise MonoUnsupported(f"peer memory needs the HIP driver: {error}") from None
