"""The launch that opens a step: zero the mailboxes and fence the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aiter.ops.flydsl.kernels.tensor_shim import _run_compiled
from atom.mono.device.step_begin import (
    MAX_SCRATCH,
    STATE_BYTES,
    STEP_BEGIN_ABI,
    ZERO_ALIGN,
    StepBeginBuild,
    build_step_begin,
)

from .abi import KernelAbi
from .peer_memory import PeerBuffer

ABI = KernelAbi(STEP_BEGIN_ABI)


class StepBegin:
    """`build`'s launcher with its memory.

    `scratch` are contiguous tensors on the device of `peers`, zeroed at every launch. `state`,
    int32 words on that device, is the kernel's own (`atom.mono.device.step_begin`). The memory is
    fixed, so all arguments but the stream are packed once. Raises ValueError for scratch that
    cannot be zeroed in whole units.
    """

    def __init__(
        self, build: StepBeginBuild, peers: PeerBuffer, scratch: Sequence[torch.Tensor]
    ) -> None:
        if len(scratch) > MAX_SCRATCH:
            raise ValueError(f"step-begin zeroes {MAX_SCRATCH} scratch buffers, not {len(scratch)}")
        for tensor in scratch:
            if tensor.nbytes % ZERO_ALIGN or not tensor.is_contiguous():
                raise ValueError(
                    f"scratch of {tensor.nbytes} bytes, strides {tensor.stride()}: step-begin "
                    f"zeroes contiguous memory in units of {ZERO_ALIGN} bytes"
                )
        self.launcher = build_step_begin(build)
        self.state = torch.zeros(STATE_BYTES // 4, dtype=torch.int32, device=peers.addresses.device)
        self._held = tuple(scratch)
        spans = [(tensor.data_ptr(), tensor.nbytes) for tensor in scratch]
        (s0, n0), (s1, n1) = [*spans, *[(0, 0)] * (MAX_SCRATCH - len(spans))]
        self._args = ABI.pack(
            {
                "s0": s0,
                "n0": n0,
                "s1": s1,
                "n1": n1,
                "peers": peers.addresses.data_ptr(),
                "fence_off": peers.fence_offset,
                "rank": peers.rank,
                "state": self.state.data_ptr(),
            }
        )

    def __call__(self, stream: int | None) -> None:
        """Launch it on `stream`."""
        _run_compiled(self.launcher, *self._args, stream)
