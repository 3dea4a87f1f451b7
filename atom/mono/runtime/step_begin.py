"""The launch that opens a step: zero the mailboxes and fence the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from flydsl.compiler.jit_function import JitFunction

from aiter.ops.flydsl.kernels.tensor_shim import _run_compiled
from atom.mono.device.step_begin import MAX_SCRATCH, STEP_BEGIN_ABI

from .abi import KernelAbi
from .peer_memory import PeerPart

ABI = KernelAbi(STEP_BEGIN_ABI)


class StepBegin:
    """Step-begin of one width: `launcher` with the memory that its steps hand over through.

    `peers` and `scratch`, at most two tensors, are what the width uses of both; they are zeroed at
    every launch. `state`, int32 words, is the kernel's own (`atom.mono.device.step_begin`). The
    memory is fixed, so all arguments but the stream are packed once.
    """

    def __init__(
        self,
        launcher: JitFunction,
        peers: PeerPart,
        scratch: Sequence[torch.Tensor],
        state: torch.Tensor,
    ) -> None:
        self.peers = peers
        self._launcher, self._held = launcher, (*scratch, state)
        spans = [(tensor.data_ptr(), tensor.nbytes) for tensor in scratch]
        (s0, n0), (s1, n1) = [*spans, *[(0, 0)] * (MAX_SCRATCH - len(spans))]
        self._args = ABI.pack(
            {
                "s0": s0,
                "n0": n0,
                "s1": s1,
                "n1": n1,
                "peers": peers.addresses.data_ptr(),
                "fence_off": peers.bytes,
                "rank": peers.rank,
                "state": state.data_ptr(),
            }
        )

    def __call__(self, stream: int | None) -> None:
        """Launch it on `stream`."""
        _run_compiled(self._launcher, *self._args, stream)
