"""The memory that a step's kernels hand over through, made ready for every step."""

from __future__ import annotations

import torch
from flydsl.compiler.jit_function import JitFunction

from atom.mono.device.step_begin import (
    MAX_SCRATCH,
    MISSING_SLOTS,
    STATE_BYTES,
    ZERO_ALIGN,
    StepBeginBuild,
    build_step_begin,
)

from .abi import KernelAbi
from .compile import KernelResources, launcher_resources
from .peer_memory import PeerBuffer
from .step_begin import ABI, StepBegin


class StepMailboxes:
    """A rank's peer buffer and its scratch, at most two tensors.

    Words carry the number of the layer that wrote them, so one zeroing a step is enough for all
    layers. `build` is that of step-begin; a debug build notes ranks that do not come. Steps of
    different widths share the fence: their epochs count on, whichever width comes next. Raises
    ValueError for memory that step-begin cannot zero.
    """

    def __init__(self, build: StepBeginBuild, peers: PeerBuffer, *scratch: torch.Tensor) -> None:
        if build.tp != peers.npes:
            raise ValueError(f"step-begin of {build.tp} ranks over memory of {peers.npes}")
        if len(scratch) > MAX_SCRATCH:
            raise ValueError(f"step-begin zeroes {MAX_SCRATCH} scratch buffers, not {len(scratch)}")
        for tensor in scratch:
            if not tensor.is_contiguous():
                raise ValueError(f"step-begin zeroes contiguous scratch, not {tensor.stride()}")
        self.build, self.peers, self.scratch = build, peers, scratch
        self._launcher = build_step_begin(build)
        # Step-begin's own words.
        self.state = torch.zeros(STATE_BYTES // 4, dtype=torch.int32, device=peers.device)

    @property
    def kernels(self) -> list[tuple[JitFunction, KernelAbi]]:
        """The launcher to compile before the first step, with its ABI."""
        return [(self._launcher, ABI)]

    @property
    def resources(self) -> tuple[KernelResources, ...]:
        """What step-begin takes of a compute unit. Raises RuntimeError before it is compiled."""
        return launcher_resources(self._launcher)

    def of_width(self, peer_bytes: int, *scratch_bytes: int) -> StepBegin:
        """What opens the steps of a width that uses so much of the peer buffers and of each
        scratch tensor; the rest is left alone. Raises ValueError for more than there is, and for
        bytes that are no whole units of what is zeroed at once."""
        parts = []
        for tensor, nbytes in zip(self.scratch, scratch_bytes, strict=True):
            if nbytes > tensor.nbytes or nbytes % ZERO_ALIGN:
                raise ValueError(
                    f"{nbytes} bytes of a scratch of {tensor.nbytes}, in units of {ZERO_ALIGN}"
                )
            parts.append(tensor.view(torch.uint8)[:nbytes])
        return StepBegin(self._launcher, self.peers.part(peer_bytes), parts, self.state)

    def missing_ranks(self) -> dict[int, int]:
        """Ranks that did not come to the last step, each with the last epoch it reached.

        Empty but for a debug build; otherwise a step without a rank does not end. Waits for the
        device.
        """
        words = self.state[1 : 1 + MISSING_SLOTS].tolist()
        return {rank: word - 1 for rank, word in enumerate(words) if word}
