"""Peer memory that lives as long as its owner."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .peer_memory import PeerAllocator, PeerBuffer


def owned_peer_buffer(
    owner: Any, allocator: PeerAllocator, nbytes: int, device: torch.device
) -> tuple[PeerBuffer, weakref.finalize]:
    """A buffer that is given back when `owner` is collected, or when the finalizer is called.

    Collective, as allocating is. Not at the interpreter's exit: the driver may be gone by then, and
    takes the memory back by itself.
    """
    buffer = PeerBuffer(allocator, nbytes, device)
    finalizer = weakref.finalize(owner, buffer.close)
    finalizer.atexit = False
    return buffer, finalizer
