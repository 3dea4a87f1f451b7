"""Small FlyDSL kernels, some of them broken on purpose. Addresses arrive as ``fx.Int64``."""

from __future__ import annotations

from dataclasses import dataclass

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr.typing import T

THREADS = 256


def pointer(dtype: type, address: fx.Int64) -> fx.Pointer:
    """A plain pointer to global memory."""
    space = fx.AddressSpace.Global
    kind = fx.PointerType.get(dtype.ir_type, address_space=space, alignment=dtype.width // 8)
    return fx.inttoptr(kind, address)


def buffer(dtype: type, address: fx.Int64, num_bytes: int) -> fx.Pointer:
    """A pointer whose accesses beyond ``num_bytes`` read zero and are dropped."""
    return fx.rocdl.make_buffer_ptr(pointer(dtype, address), num_records_bytes=fx.Int64(num_bytes))


def make_reverse(barrier: bool, lds_words: int = THREADS, threads: int = THREADS):
    """Reverses each run of ``threads`` words through LDS; without ``barrier`` it is a race."""

    @flyc.kernel(known_block_size=[threads, 1, 1])
    def reverse(out: fx.Int64, x: fx.Int64):
        thread = fx.Int32(fx.thread_idx.x)
        at = fx.Int32(fx.block_idx.x) * threads + thread
        lds = fx.SharedAllocator().allocate(fx.Array[fx.Int32, lds_words, 16]).peek().ptr
        lds[thread] = pointer(fx.Int32, x)[at]
        if fx.const_expr(barrier):
            fx.gpu.barrier()
        pointer(fx.Int32, out)[at] = lds[threads - 1 - thread]

    @flyc.jit
    def launch_reverse(out: fx.Int64, x: fx.Int64, blocks: fx.Int32, stream: fx.Stream):
        reverse(out, x).launch(grid=(blocks, 1, 1), block=(threads, 1, 1), stream=stream)

    return launch_reverse


def make_staged_sum(steps: int, wait: int | None):
    """Sums ``steps`` tiles of 64 x 16 bytes, staged through two LDS buffers by async copies.

    ``wait``: how many async groups may be outstanding when a tile is read; 0 is right, more is a
    race, None does not wait at all.
    """
    tile = 64 * 16

    @flyc.kernel(known_block_size=[64, 1, 1])
    def staged_sum(out: fx.Int64, x: fx.Int64):
        lane = fx.Int32(fx.thread_idx.x)
        source = buffer(fx.Uint8, x, steps * tile)
        lds = fx.SharedAllocator().allocate(fx.Array[fx.Uint8, 2 * tile, 16]).peek().ptr
        copy = fx.make_copy_atom(fx.rocdl.cdna4.BufferLoadAsyncLDS128b(), fx.Uint8)
        total = fx.Int32(0)
        for step in fx.range_constexpr(steps):
            there = lds + (step % 2) * tile
            fx.copy(
                copy,
                fx.make_view(source + step * tile + lane * 16, fx.make_layout(16, 1)),
                fx.make_view(there, fx.make_layout(16, 1)),
            )
            fx.rocdl.asyncmark()
            if fx.const_expr(wait is not None):
                fx.rocdl.wait_asyncmark(wait)
            total = total + fx.recast_iter(fx.Int32, there)[lane]
        pointer(fx.Int32, out)[lane] = total

    @flyc.jit
    def launch_staged_sum(out: fx.Int64, x: fx.Int64, stream: fx.Stream):
        staged_sum(out, x).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    return launch_staged_sum


def make_vmcnt_copy(vmcnt: int):
    """Two buffer-to-LDS copies then a read of both; right only for ``vmcnt`` 0."""

    @flyc.kernel(known_block_size=[64, 1, 1])
    def vmcnt_copy(out: fx.Int64, x: fx.Int64):
        lane = fx.Int32(fx.thread_idx.x)
        source = fx.rocdl.get_buffer_rsrc(buffer(fx.Int32, x, 512))
        lds = fx.SharedAllocator().allocate(fx.Array[fx.Int32, 128, 16]).peek().ptr
        zero = fx.Int32(0).ir_value()
        for half in fx.range_constexpr(2):
            offset = (lane * 4 + half * 256).ir_value()
            fx.rocdl.raw_ptr_buffer_load_lds(
                source,
                (lds + half * 64).llvm_ptr,
                fx.Int32(4).ir_value(),
                offset,
                zero,
                zero,
                aux=0,
            )
        fx.rocdl.s_waitcnt(vmcnt=vmcnt)
        pointer(fx.Int32, out)[lane] = lds[lane] + lds[64 + lane]

    @flyc.jit
    def launch_vmcnt_copy(out: fx.Int64, x: fx.Int64, stream: fx.Stream):
        vmcnt_copy(out, x).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    return launch_vmcnt_copy


def make_buffer_copy(num_bytes: int):
    """out[i] = x[i] for 64 words through buffers of ``num_bytes``."""

    @flyc.kernel(known_block_size=[64, 1, 1])
    def buffer_copy(out: fx.Int64, x: fx.Int64):
        lane = fx.Int32(fx.thread_idx.x)
        zero = fx.Int32(0).ir_value()
        source = fx.rocdl.get_buffer_rsrc(buffer(fx.Int32, x, num_bytes))
        target = fx.rocdl.get_buffer_rsrc(buffer(fx.Int32, out, num_bytes))
        value = fx.rocdl.raw_ptr_buffer_load(T.i32, source, (lane * 4).ir_value(), zero)
        fx.rocdl.raw_ptr_buffer_store(value, target, (lane * 4).ir_value(), zero)

    @flyc.jit
    def launch_buffer_copy(out: fx.Int64, x: fx.Int64, stream: fx.Stream):
        buffer_copy(out, x).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    return launch_buffer_copy


def make_collatz():
    """out[i] = steps of i + 1 to reach 1: every lane loops its own number of times."""

    @flyc.kernel(known_block_size=[THREADS, 1, 1])
    def collatz(out: fx.Int64):
        thread = fx.Int32(fx.thread_idx.x)
        number = thread + 1
        steps = fx.Int32(0)
        while number != 1:
            odd = number % 2
            if odd == 1:  # noqa: SIM108  a device branch
                number = number * 3 + 1
            else:
                number = number // 2
            steps = steps + 1
        pointer(fx.Int32, out)[thread] = steps

    @flyc.jit
    def launch_collatz(out: fx.Int64, stream: fx.Stream):
        collatz(out).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    return launch_collatz


def make_tickets():
    """Each lane takes a ticket from a counter and writes its thread number there."""

    @flyc.kernel(known_block_size=[THREADS, 1, 1])
    def tickets(counter: fx.Int64, out: fx.Int64):
        thread = fx.Int32(fx.block_idx.x) * THREADS + fx.Int32(fx.thread_idx.x)
        mine = fx.Int32(fx.atomic_add(pointer(fx.Int32, counter), fx.Int32(1)))
        pointer(fx.Int32, out)[mine] = thread

    @flyc.jit
    def launch_tickets(counter: fx.Int64, out: fx.Int64, blocks: fx.Int32, stream: fx.Stream):
        tickets(counter, out).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)

    return launch_tickets


def make_relay(sleep: bool):
    """Workgroup b waits for flag[b + offset + 1], then sets flag[b + offset]; the last starts.

    Ends only if later workgroups run while earlier ones spin.
    """

    @flyc.kernel(known_block_size=[64, 1, 1])
    def relay(flag: fx.Int64, offset: fx.Int32, last: fx.Int32):
        block = fx.Int32(fx.block_idx.x) + offset
        flags = pointer(fx.Int32, flag)
        if block != last:
            seen = flags[block + 1]
            while seen == 0:
                if fx.const_expr(sleep):
                    fx.rocdl.s_sleep(1)
                seen = flags[block + 1]
        if fx.Int32(fx.thread_idx.x) == 0:
            flags[block] = fx.Int32(1)

    @flyc.jit
    def launch_relay(
        flag: fx.Int64, offset: fx.Int32, last: fx.Int32, blocks: fx.Int32, stream: fx.Stream
    ):
        relay(flag, offset, last).launch(grid=(blocks, 1, 1), block=(64, 1, 1), stream=stream)

    return launch_relay


@dataclass(frozen=True)
class ReverseKey:
    """A build key as the project's kernels have them."""

    threads: int


def build_reverse(key: ReverseKey) -> flyc.JitFunction:
    """A correct reversal of runs of ``key.threads``."""
    return make_reverse(True, key.threads, key.threads)
