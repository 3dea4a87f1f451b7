"""When workgroups enter the stages of a launch, by the device's constant clock.

A launch has i64 [MARKS, blocks], zeroed before: row m is when each workgroup entered the launch's
stage m, and the row after the last stage is when it ended. The clock is one for the whole device.
"""

from __future__ import annotations

import flydsl.expr as fx
from flydsl._mlir.dialects import llvm
from flydsl.expr.typing import T

from aiter.ops.flydsl.kernels.device import TraceObject, global_pointer, traced

from .cta import Cta

MARKS = 24
TICKS_PER_US = 100


def stamps_bytes(blocks: int) -> int:
    """Bytes of a launch's stamps."""
    return 8 * MARKS * blocks


class Stamps(TraceObject):
    """A launch's stamps at `address`; nothing is written unless `enabled`."""

    def __init__(self, address: fx.Int64, enabled: bool) -> None:
        self._address, self._enabled, self._marks = address, enabled, 0

    def mark(self, cta: Cta) -> None:
        """The workgroup enters its next stage, or ends."""
        if not self._enabled:
            return
        if self._marks == MARKS:
            raise ValueError(f"a launch has more than {MARKS - 1} stages")
        _store(cta, self._address, self._marks * cta.blocks)
        self._marks += 1


@traced
def _store(cta: Cta, address: fx.Int64, first: int) -> None:
    if cta.thread == 0:
        global_pointer(fx.Int64, address)[cta.block + first] = _now()


def _now() -> fx.Int64:
    return fx.Int64(llvm.call_intrinsic(T.i64, "llvm.amdgcn.s.memrealtime", [], [], []))
