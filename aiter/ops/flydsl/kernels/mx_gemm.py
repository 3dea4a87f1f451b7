"""The main loop both MoE stages share: MFMA over MX blocks (gfx950).

    acc[n, m] += sum over k of  w[n, k] * 2^(sw[n, k/32] - 127) * a[m, k] * 2^(sa[m, k/32] - 127)

`w` are weight rows and `a` activation rows, either fp8 (e4m3) or fp4 (e2m1, two a byte), `sw`
and `sa` their e8m0 block scales: one scaled MFMA for 128 of k. With bf16 activations, which have
no scales, fp4 weights are widened to bf16 in registers and 128 of k are four MFMA. Weights are
the matrix unit's first operand, so a lane ends with four consecutive weight rows (output columns)
of one activation row:

    acc[i, nt, mt] of lane l:  weight row 16 nt + 4 (l div 16) + i,  activation row 16 mt + l mod 16

Layouts, in bytes, `g = l div 16`:

    weights      (N/16, K/128, runs, 64 lanes, 16)   runs = 1 for fp4, 2 for fp8: `shuffle_weight`
    scales       (rows/32, K/256, 64 lanes, 4)       byte 2 (k/128 mod 2) + half: `shuffle_scale`
    activations  (M, K) row-major in memory; in LDS (2 buffers, tile_m, tile_k) with the 16-byte
                 chunks of a row permuted by the row so that a column of rows meets every bank;
                 of bf16 also so that a lane finds its elements (`fetched_byte`)

    prologue     A(0) -> LDS, W(0) and scales(0) -> registers
    loop         wait A(k); barrier; start A(k+1), W(k+1), scales(k+1); MFMA over step k
    last step    the same without the prefetch

One barrier a step is enough: a wave passes it only after every wave has finished reading the
buffer that is filled next. A wave that has its activations to itself needs none. Weights never
touch LDS: each wave owns its weight rows, and its 16 bytes a lane arrive in operand order.
With `k_waves` > 1 groups of waves take consecutive parts of K, each with LDS buffers of its own,
and `reduce_k_waves` adds their results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import flydsl.expr as fx

from .device import (
    BEYOND,
    CHUNK,
    LANES,
    TraceObject,
    div,
    global_buffer,
    mod,
    shift_right,
    traced,
)
from .mx_quant import scale_value
from .mx_tile import (
    MFMA_K,
    SCALE_WORD_K,
    MxTile,
    fetched_byte,
    scale_row_words,
    swizzle_of,
    swizzled,
)
from .mx_widen import multiply, widen_fp4


@dataclass(frozen=True)
class MxOperands:
    """Where one wave finds its operands. Offsets are bytes, for scales 32-bit words.

    a: bytes of the activations; a_chunks: per-lane offset of the 16 bytes that each of the
        wave's loads of a tile fetches at k = 0; a_left: how many bytes from there on the row
        has, where what lies beyond is not zero, else empty
    w: bytes of the expert's weights; w_tiles: uniform offset of each 16-row tile at k = 0
    a_scale, w_scale: words; a_scale_rows, w_scale_rows: uniform offset of each 32 rows' words
    a_scale_shift: bits to shift an activation word so that the tile's first 16 rows are half 0
    """

    a: fx.Pointer
    a_chunks: list[fx.Int32]
    a_left: list[fx.Int32]
    w: fx.Pointer
    w_tiles: list[fx.Int32]
    a_scale: fx.Pointer
    a_scale_rows: list[fx.Int32]
    w_scale: fx.Pointer
    w_scale_rows: list[fx.Int32]
    a_scale_shift: fx.Int32 | None

    @classmethod
    def of_block(
        cls,
        tile: MxTile,
        *,
        k_dim: int,
        w_rows: int,
        row0: fx.Int32,
        expert: fx.Int32,
        a: fx.Pointer,
        a_chunks: list[fx.Int32],
        a_left: list[fx.Int32],
        a_scale: fx.Int64,
        w: fx.Int64,
        w_scale: fx.Int64,
        w_tiles: list[fx.Int32],
        w_words: list[fx.Int32],
    ) -> MxOperands:
        """Operands of the sorted rows from `row0` on and an expert's weights [w_rows, k_dim].

        a_scale, w, w_scale are addresses of all sorted rows' scales and of all experts; w_tiles
        numbers this wave's 16-row tiles, w_words the 32-row groups whose scales they have.
        """
        w_row = tile.w.row_bytes(k_dim)
        scale_row = scale_row_words(k_dim)
        w_bytes, w_scale_bytes = w_rows * w_row, 4 * (w_rows // 32) * scale_row
        # 64-bit bases at the row block and at the expert keep every offset within 32 bits.
        a_scale_row0 = a_scale + fx.Int64(div(row0, 32)) * (4 * scale_row)
        w_scale_expert = w_scale + fx.Int64(expert) * w_scale_bytes
        return cls(
            a=a,
            a_chunks=a_chunks,
            a_left=a_left,
            w=global_buffer(fx.Uint8, w + fx.Int64(expert) * w_bytes, w_bytes, CHUNK),
            w_tiles=[number * (16 * w_row) for number in w_tiles],
            a_scale=global_buffer(fx.Int32, a_scale_row0, 4 * scale_row * tile.a_scale_words, 4),
            a_scale_rows=[fx.Int32(i * scale_row) for i in range(tile.a_scale_words)],
            w_scale=global_buffer(fx.Int32, w_scale_expert, w_scale_bytes, 4),
            w_scale_rows=[number * scale_row for number in w_words],
            a_scale_shift=mod(div(row0, 16), 2) * 8 if tile.tile_m % 32 else None,
        )


class MxLoop(TraceObject):
    """One wave's main loop: LDS buffers, register stages and accumulators.

    `lds` points to `tile.lds_bytes` of LDS, `wave` is the wave's number in the workgroup.
    """

    def __init__(self, tile: MxTile, lds: fx.Pointer, wave: fx.Int32, lane: fx.Int32, w_cache: int):
        self.tile = tile
        self.lane = lane
        self.wave_n = mod(wave, tile.n_waves)
        self.wave_k = div(wave, tile.n_waves)
        self.lds = lds
        self.group_lds = lds + self.wave_k * (2 * tile.stage_bytes)
        # A lane's addresses as far as the swizzle tells them apart; the rest are constants.
        first = mod(lane, 16) * tile.a_row_bytes + div(lane, 16) * CHUNK
        self.a_runs = [
            self.group_lds + swizzled(first + group * (4 * CHUNK), tile.a_row_bytes)
            for group in range((1 << swizzle_of(tile.a_row_bytes)[0]) // 4)
        ]
        self.acc = fx.make_rmem_tensor((4, tile.n_tiles, tile.m_tiles), fx.Float32)
        self.w_frag = fx.make_rmem_tensor(
            (CHUNK * tile.w.runs, tile.n_tiles, tile.k_blocks, tile.w_stages), fx.Uint8
        )
        self.w_scale = fx.make_rmem_tensor((1, tile.n_tiles // 2, 2), fx.Int32)
        if tile.a_scale_words:
            self.a_scale = fx.make_rmem_tensor((1, tile.a_scale_words, 2), fx.Int32)
        self.load_w = fx.make_copy_atom(fx.rocdl.BufferCopy128b(w_cache), fx.Uint8)
        self.load_scale = fx.make_copy_atom(fx.rocdl.BufferCopy32b(), fx.Int32)
        self.load_lds = fx.make_copy_atom(fx.UniversalCopy128b(), fx.Uint8)
        self.stage_a = fx.make_copy_atom(fx.rocdl.cdna4.BufferLoadAsyncLDS128b(), fx.Uint8)
        self.operands: MxOperands | None = None

    def a_chunk_rows(self) -> list[tuple[fx.Int32, fx.Int32]]:
        """(tile row, byte of its part of K) that this lane fetches in each load of a tile.

        LDS is filled linearly by the hardware, so the permutation that spreads rows over banks
        is applied to what a lane fetches.
        """
        tile = self.tile
        loads = tile.stage_bytes // (CHUNK * LANES * tile.n_waves)
        result = []
        for i in range(loads):
            filled = (self.wave_n + i * tile.n_waves) * (CHUNK * LANES) + self.lane * CHUNK
            source = swizzled(filled, tile.a_row_bytes)
            byte = fetched_byte(tile, mod(source, tile.a_row_bytes))
            result.append((div(source, tile.a_row_bytes), byte))
        return result

    @traced
    def run(self, operands: MxOperands, steps: int, first: fx.Int32 | int = 0) -> None:
        """Clear the accumulators and add this wave's `steps` steps of K into them.

        `first` is the workgroup's first step, where workgroups split K.

        Two steps an iteration, so that the register stage is known at compile time.
        """
        self.operands = operands
        self.acc.fill(0)
        first = first + self.wave_k * steps
        self._fetch_a(first, 0)
        for block in range(self.tile.k_blocks):
            self._fetch_w(first, block, 0)
        self._fetch_scales(first, 0)
        pairs = (steps - 1) // 2
        if fx.const_expr(pairs > 0):
            for pair in range(fx.Int32(0), fx.Int32(pairs)):
                self._step(first + pair * 2, 0, True)
                self._step(first + pair * 2 + 1, 1, True)
        for i in fx.range_constexpr(2 * pairs, steps):
            self._step(first + i, i % 2, i + 1 < steps)

    def _step(self, k: fx.Int32, stage: int, prefetch: bool) -> None:
        """Multiply step `k`, waiting in `stage`, and fetch step k + 1 into the other stage."""
        fx.rocdl.wait_asyncmark(0)
        if self.tile.n_waves > 1:
            fx.gpu.barrier()
        if prefetch:
            self._fetch_a(k + 1, 1 - stage)
            if self.tile.w_stages == 2:
                for block in range(self.tile.k_blocks):
                    self._fetch_w(k + 1, block, 1 - stage)
            self._fetch_scales(k + 1, 1 - stage)
        for block, multiply_block in enumerate(self._multiplications(k, stage)):
            multiply_block()
            if prefetch and self.tile.w_stages == 1:
                # The block's registers are free for the next step only now.
                fx.rocdl.sched_barrier(0)
                self._fetch_w(k + 1, block, 0)
        # Operands of the next step wait for its barrier: fetched earlier they only cost registers.
        fx.rocdl.sched_barrier(0)

    def _fetch_a(self, k: fx.Int32, stage: int) -> None:
        tile, op = self.tile, self.operands
        for i, offset in enumerate(op.a_chunks):
            filled = (self.wave_n + i * tile.n_waves) * (CHUNK * LANES) + stage * tile.stage_bytes
            step = k * tile.a_row_bytes
            if op.a_left:
                # Together with the step, so that the sum does not wrap around.
                offset = (step < op.a_left[i]).select(offset, fx.Int32(BEYOND) - step)
            fx.copy(
                self.stage_a,
                fx.make_view(op.a + offset, fx.make_layout(CHUNK, 1)),
                fx.make_view(self.group_lds + filled, fx.make_layout(CHUNK, 1)),
                soffset=step,
            )
        fx.rocdl.asyncmark()

    def _fetch_w(self, k: fx.Int32, block: int, stage: int) -> None:
        tile, op = self.tile, self.operands
        block_bytes = CHUNK * LANES * tile.w.runs
        for n, offset in enumerate(op.w_tiles):
            frag = fx.get_iter(self.w_frag[None, n, block, stage])
            for run in range(tile.w.runs):
                at = op.w + (self.lane * CHUNK + block * block_bytes + run * CHUNK * LANES)
                fx.copy(
                    self.load_w,
                    fx.make_view(at, fx.make_layout(CHUNK, 1)),
                    fx.make_view(frag + run * CHUNK, fx.make_layout(CHUNK, 1)),
                    soffset=offset + k * (tile.k_blocks * block_bytes),
                )

    def _fetch_scales(self, k: fx.Int32, stage: int) -> None:
        tile, op = self.tile, self.operands
        word = div(k * tile.tile_k, SCALE_WORD_K) * LANES
        scaled = [(op.w_scale, op.w_scale_rows, self.w_scale)]
        if tile.a_scale_words:
            scaled.append((op.a_scale, op.a_scale_rows, self.a_scale))
        for words, rows, frag in scaled:
            for i, row in enumerate(rows):
                fx.copy(
                    self.load_scale,
                    fx.make_view(words + self.lane, fx.make_layout(1, 1)),
                    frag[None, i, stage],
                    soffset=row + word,
                )

    def _multiplications(self, k: fx.Int32, stage: int) -> list[Callable[[], None]]:
        """Step `k`'s MFMA, one function a 128-wide block of k."""
        tile, op = self.tile, self.operands
        w_words = [self.w_scale[None, i, stage].load()[0] for i in range(tile.n_tiles // 2)]
        a_words = [self.a_scale[None, i, stage].load()[0] for i in range(tile.a_scale_words)]
        if op.a_scale_shift is not None:
            a_words = [shift_right(word, op.a_scale_shift) for word in a_words]
        if tile.k_blocks == 1:
            half = mod(k, 2) * 16
            w_words = [shift_right(word, half) for word in w_words]
            a_words = [shift_right(word, half) for word in a_words]
        if tile.widened:
            multiply_block = partial(self._multiply_widened, stage, w_words)
        else:
            multiply_block = partial(self._multiply, stage, w_words, a_words)
        return [partial(multiply_block, block) for block in range(tile.k_blocks)]

    def _multiply(
        self, stage: int, w_words: list[fx.Int32], a_words: list[fx.Int32], block: int
    ) -> None:
        tile = self.tile
        for m in range(tile.m_tiles):
            a_frag = self._load_a(m, block, stage)
            for n in range(tile.n_tiles):
                acc = self.acc[None, n, m]
                word, half = tile.w_scale_of(n)
                fx.gemm(
                    self._mfma(2 * block + half, 2 * block + m % 2),
                    acc,
                    self.w_frag[None, n, block, stage % tile.w_stages],
                    a_frag,
                    acc,
                    scale_a=w_words[word],
                    scale_b=a_words[m // 2],
                )

    def _multiply_widened(self, stage: int, w_words: list[fx.Int32], block: int) -> None:
        """Operation by operation, so that few activations and few widened weights are held."""
        tile = self.tile
        scales = [self._w_scale_value(n, block, w_words) for n in range(tile.n_tiles)]
        for run in range(tile.a.runs):
            rows = [self._load_run(m, block, run, stage) for m in range(tile.m_tiles)]
            for n in range(tile.n_tiles):
                words = self.w_frag[None, n, block, stage % tile.w_stages].load().bitcast(fx.Int32)
                weights = widen_fp4(words[run], scales[n])
                for m, row in enumerate(rows):
                    acc = self.acc[None, n, m]
                    acc.store(multiply(weights, row, acc.load()))

    def _w_scale_value(self, n: int, block: int, w_words: list[fx.Int32]) -> fx.Float32:
        """The scale of a lane's 32 elements of weight tile `n`."""
        word, half = self.tile.w_scale_of(n)
        return scale_value(shift_right(w_words[word], 8 * (2 * block + half)) & 255)

    def _load_run(self, m: int, block: int, run: int, stage: int) -> fx.Vector:
        """A lane's eight bf16 of an operation."""
        frag = fx.make_rmem_tensor(CHUNK, fx.Uint8)
        self._copy_run(m, block, run, stage, frag)
        return frag.load().bitcast(fx.BFloat16)

    def _load_a(self, m: int, block: int, stage: int) -> fx.Tensor:
        """A lane's operand: 16-byte run r holds the chunk 4 r + l div 16 of the block."""
        runs = self.tile.a.runs
        frag = fx.make_rmem_tensor(CHUNK * runs, fx.Uint8)
        for run in range(runs):
            at = fx.make_view(fx.get_iter(frag) + run * CHUNK, fx.make_layout(CHUNK, 1))
            self._copy_run(m, block, run, stage, at)
        return frag

    def _copy_run(self, m: int, block: int, run: int, stage: int, to: fx.Tensor) -> None:
        tile, groups = self.tile, len(self.a_runs)
        beyond, group = divmod(block * tile.a.runs + run, groups)
        offset = stage * tile.stage_bytes + m * 16 * tile.a_row_bytes + beyond * groups * 4 * CHUNK
        at = fx.make_view(self.a_runs[group] + offset, fx.make_layout(CHUNK, 1))
        fx.copy(self.load_lds, at, to)

    def _mfma(self, w_select: int, a_select: int) -> fx.MmaAtom:
        op = fx.rocdl.cdna4.MFMA_Scale(
            16,
            16,
            MFMA_K,
            self.tile.w.element(),
            self.tile.a.element(),
            opsel_a=w_select,
            opsel_b=a_select,
        )
        return fx.make_mma_atom(op)

    def reduce_k_waves(self) -> None:
        """Add the accumulators of all K groups, through LDS; every group ends with the sum.

        Waves may still read LDS when it returns.
        """
        tile = self.tile
        if tile.k_waves == 1:
            return
        fx.gpu.barrier()
        vectors = tile.n_tiles * tile.m_tiles
        wave_words = 4 * LANES * vectors
        layout = fx.make_layout(
            (4, LANES, vectors, tile.n_waves, tile.k_waves),
            (1, 4, 4 * LANES, wave_words, wave_words * tile.n_waves),
        )
        partial = fx.make_view(fx.recast_iter(fx.Float32, self.lds), layout)
        move = fx.make_copy_atom(fx.UniversalCopy128b(), fx.Float32)
        acc = fx.make_view(fx.get_iter(self.acc), fx.make_layout((4, vectors), (1, 4)))
        for i in range(vectors):
            fx.copy(move, acc[None, i], partial[None, self.lane, i, self.wave_n, self.wave_k])
        fx.gpu.barrier()
        for i in range(vectors):
            total = None
            for group in range(tile.k_waves):
                part = partial[None, self.lane, i, self.wave_n, group].load()
                total = part if total is None else total + part
            acc[None, i].store(total)
