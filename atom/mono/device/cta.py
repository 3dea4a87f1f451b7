"""A workgroup's place in the grid and what its threads do together."""

from __future__ import annotations

import flydsl.expr as fx

from aiter.ops.flydsl.kernels.device import LANES, TraceObject, shared_bytes, thread_in_wave, traced
from atom.mono.plan.execution import THREADS, WAVES

_SUM_BYTES = 4 * WAVES


class Cta(TraceObject):
    """One workgroup of a persistent grid of `blocks`.

    `lds` points to `lds_bytes` that stages use in turn; a stage ends with a barrier if it used
    any. Tasks of a wave's are numbered so that neighbours go to different workgroups.
    """

    def __init__(self, blocks: int, lds_bytes: int) -> None:
        self.blocks = blocks
        self.block = fx.Int32(fx.block_idx.x)
        self.thread = fx.Int32(fx.thread_idx.x)
        self.wave, self.lane = thread_in_wave()
        self.waves = blocks * WAVES
        self.worker = self.wave * blocks + self.block
        self.lds = shared_bytes(lds_bytes + _SUM_BYTES)
        self._sums = self.lds + lds_bytes

    def lds_floats(self) -> fx.Pointer:
        """`lds` as f32."""
        return fx.recast_iter(fx.Float32, self.lds)

    def lds_words(self, offset: int = 0) -> fx.Pointer:
        """`lds` from byte `offset` on as i32."""
        return fx.recast_iter(fx.Int32, self.lds + offset)

    @traced
    def sum(self, value: fx.Float32) -> fx.Float32:
        """Sum of `value` over the workgroup's threads, the same bits in every thread."""
        sums = fx.recast_iter(fx.Float32, self._sums)
        total = wave_sum(value)
        if self.lane == 0:
            sums[self.wave] = total
        fx.gpu.barrier()
        result = sums[fx.Int32(0)]
        for wave in fx.range_constexpr(1, WAVES):
            result = result + sums[fx.Int32(wave)]
        fx.gpu.barrier()
        return result


def wave_sum(value: fx.Float32) -> fx.Float32:
    """Sum of `value` over the wave's lanes, in every lane."""
    distance = LANES // 2
    while distance:
        value = value + fx.gpu.shuffle_xor(value, distance, LANES)
        distance //= 2
    return value


__all__ = ["LANES", "THREADS", "WAVES", "Cta", "wave_sum"]
