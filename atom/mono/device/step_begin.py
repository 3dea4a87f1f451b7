"""Step begin: zero this rank's mailboxes, then wait until every rank has.

    grid `blocks` x 512 threads
    all        zero this rank's peer data, [0, fence_off) of its peer buffer; raise a flag
    workgroup 0, wave 0
               wait for all flags; write the new epoch into this rank's slot at the tail of every
               rank's peer buffer; wait until all slots of its own tail have reached the epoch
    others     zero the scratch buffers

No rank pushes into another's buffer before that one is zeroed, because its kernels start after
this one. Peers' earlier pushes cannot arrive late: a step consumes every word it is sent.

    peers      [tp] i64 addresses of the ranks' buffers
    tail       FENCE_SLOTS i64 at `fence_off`: last epoch of each rank; zeroed once by its owner
    state      STATE_BYTES of i32, zeroed once: epoch, then MISSING_SLOTS words where a debug build
               leaves the absent ranks' last epoch + 1 (0: present), then flags from FLAGS_AT on
    s0, s1     scratch buffers of n0, n1 bytes, multiples of ZERO_ALIGN; 0 bytes for none

A normal collective cannot stand in for the fence: it may be skipped while a graph is captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import flydsl.compiler as flyc
import flydsl.expr as fx

from aiter.ops.flydsl.kernels.device import global_pointer, traced
from aiter.ops.flydsl.kernels.tensor_shim import kernel_builder
from atom.mono.plan.execution import BLOCKS, THREADS
from atom.mono.plan.trace import Space

from .cta import Cta
from .launch import persistent_kernel, persistent_launcher
from .sync import acquire, release

FENCE_SLOTS = 8
MISSING_SLOTS = 8
FLAGS_AT = 16  # i32 words from the start of state
ZERO_ALIGN = 16
MAX_SCRATCH = 2
FENCE_BYTES = 8 * FENCE_SLOTS
STATE_BYTES = 4 * (FLAGS_AT + BLOCKS)
STEP_BEGIN_ABI = ("s0", "n0", "s1", "n1", "peers", "fence_off", "rank", "state")
_RELAXED = fx.AtomicOrdering.Monotonic
_AGENT = fx.rocdl.SyncScope.Agent


@dataclass(frozen=True)
class StepBeginBuild:
    """`debug` builds give up after `polls` tries and leave who is missing in `state`."""

    tp: int
    debug: bool
    blocks: int = BLOCKS
    polls: int = 10_000_000

    def __post_init__(self) -> None:
        if not 1 <= self.tp <= FENCE_SLOTS or not 1 <= self.blocks <= BLOCKS:
            raise ValueError(f"{self}: 1 to {FENCE_SLOTS} ranks, 1 to {BLOCKS} workgroups")

    @property
    def symbol(self) -> str:
        """The name that a profiler shows."""
        return f"step_begin_tp{self.tp}" + ("_debug" if self.debug else "")


@kernel_builder
def build_step_begin(key: StepBeginBuild) -> flyc.JitFunction:
    """Launcher (STEP_BEGIN_ABI, stream)."""

    @persistent_kernel(key.symbol)
    def step_begin(
        s0: fx.Int64,
        n0: fx.Int64,
        s1: fx.Int64,
        n1: fx.Int64,
        peers: fx.Int64,
        fence_off: fx.Int64,
        rank: fx.Int32,
        state: fx.Int64,
    ):
        cta = Cta(key.blocks, 16)
        epoch = _load(global_pointer(fx.Int32, state), _AGENT) + 1
        own = global_pointer(fx.Int64, peers)[rank]
        _zero(cta, own, fence_off)
        release(Space.PEER)
        fx.gpu.barrier()
        flags = global_pointer(fx.Int32, state) + FLAGS_AT
        if cta.thread == 0:
            _store(flags + cta.block, epoch, _AGENT)
        if (cta.block == 0) & (cta.wave == 0):
            _fence(key, cta, state, peers, own, fence_off, rank, epoch)
        if fx.const_expr(key.blocks == 1):
            fx.gpu.barrier()
        if (cta.block != 0) | (key.blocks == 1):
            _zero(cta, s0, n0, skip_first=key.blocks > 1)
            _zero(cta, s1, n1, skip_first=key.blocks > 1)

    return persistent_launcher(step_begin, key.symbol, key.blocks)


def _load(at: fx.Pointer, scope: str | None) -> fx.Numeric:
    return fx.generic_load(at, memory_order=_RELAXED, syncscope=scope)


def _store(at: fx.Pointer, value: fx.Numeric, scope: str | None) -> None:
    fx.generic_store(at, value, memory_order=_RELAXED, syncscope=scope)


@traced
def _zero(cta: Cta, base: fx.Int64, size: fx.Int64, skip_first: bool = False) -> None:
    """Zero `size` bytes with all workgroups, or all but the first."""
    skipped = 1 if skip_first else 0
    first = (cta.block - skipped) * THREADS + cta.thread
    chunks = fx.Int32(fx.Uint64(size) // fx.Uint64(ZERO_ALIGN))
    for i in range(first, chunks, fx.Int32((cta.blocks - skipped) * THREADS)):
        at = global_pointer(fx.Int32, base + fx.Int64(i) * ZERO_ALIGN, ZERO_ALIGN)
        fx.generic_store(at, fx.Vector.filled(4, 0, fx.Int32))


@traced
def _fence(
    key: StepBeginBuild,
    cta: Cta,
    state: fx.Int64,
    peers: fx.Int64,
    own: fx.Int64,
    fence_off: fx.Int64,
    rank: fx.Int32,
    epoch: fx.Int32,
) -> None:
    words = global_pointer(fx.Int32, state)
    for block in range(cta.lane, fx.Int32(key.blocks), fx.Int32(64)):
        flag = _load(words + (FLAGS_AT + fx.Int32(block)), _AGENT)
        while flag != epoch:
            fx.rocdl.s_sleep(1)
            flag = _load(words + (FLAGS_AT + fx.Int32(block)), _AGENT)
    acquire()
    release(Space.PEER)
    lane = cta.lane
    if lane < key.tp:
        there = global_pointer(fx.Int64, peers)[lane] + fence_off
        _store(global_pointer(fx.Int64, there) + rank, fx.Int64(epoch), None)
        slot = global_pointer(fx.Int64, own + fence_off) + lane
        seen = fx.Int32(_load(slot, None))
        if fx.const_expr(key.debug):
            tries = fx.Int32(0)
            while (seen - epoch < 0) & (tries < key.polls):
                fx.rocdl.s_sleep(1)
                seen = fx.Int32(_load(slot, None))
                tries = tries + 1
            words[lane + 1] = (seen - epoch < 0).select(seen + 1, fx.Int32(0))
        else:
            while seen - epoch < 0:
                fx.rocdl.s_sleep(1)
                seen = fx.Int32(_load(slot, None))
    acquire(Space.PEER)
    if lane == 0:
        words[0] = epoch
