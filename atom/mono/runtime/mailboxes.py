"""The memory that a step's kernels hand over through, made ready for every step."""

from __future__ import annotations

import torch
from flydsl.compiler.jit_function import JitFunction

from atom.mono.device.step_begin import MISSING_SLOTS, StepBeginBuild

from .abi import KernelAbi
from .compile import KernelResources, launcher_resources
from .peer_memory import PeerBuffer
from .step_begin import ABI, StepBegin


class StepMailboxes:
    """A rank's peer buffer and its scratch, at most two tensors.

    Words carry the number of the layer that wrote them, so one zeroing a step is enough for all
    layers. `build` is that of step-begin; a debug build notes ranks that do not come.
    """

    def __init__(self, build: StepBeginBuild, peers: PeerBuffer, *scratch: torch.Tensor) -> None:
        if build.tp != peers.npes:
            raise ValueError(f"step-begin of {build.tp} ranks over memory of {peers.npes}")
        self.build, self.peers, self.scratch = build, peers, scratch
        self._begin = StepBegin(build, peers, scratch)

    @property
    def kernels(self) -> list[tuple[JitFunction, KernelAbi]]:
        """The launcher to compile before the first step, with its ABI."""
        return [(self._begin.launcher, ABI)]

    @property
    def resources(self) -> tuple[KernelResources, ...]:
        """What step-begin takes of a compute unit. Raises RuntimeError before it is compiled."""
        return launcher_resources(self._begin.launcher)

    @property
    def state(self) -> torch.Tensor:
        """Step-begin's own words, int32."""
        return self._begin.state

    def begin_step(self, stream: int | None) -> None:
        """Zero this rank's mailboxes and wait, on the device, until every rank has."""
        self._begin(stream)

    def missing_ranks(self) -> dict[int, int]:
        """Ranks that did not come to the last step, each with the last epoch it reached.

        Empty but for a debug build; otherwise a step without a rank does not end. Waits for the
        device.
        """
        words = self.state[1 : 1 + MISSING_SLOTS].tolist()
        return {rank: word - 1 for rank, word in enumerate(words) if word}
