"""MX element formats, the tile a workgroup multiplies, and where its operands lie.

Plain decisions of the host: a tile knows the registers and the LDS it needs, and refuses what the
main loop (`mx_gemm`) cannot compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import flydsl.expr as fx

from aiter.jit.utils.chip_info import GFX_LDS_BYTES

from .device import CHUNK, LANES, shift_right

MFMA_K = 128
SCALE_BLOCK = 32
# A gfx950 SIMD's registers a lane, accumulation registers included, and a compute unit's LDS.
_REGISTERS = 512
LDS_BYTES = GFX_LDS_BYTES["gfx950"]
_MOST_THREADS = 1024
_TWO_WAVES = 240  # registers of a lane, by `MxTile.vgprs`, with which a SIMD holds two waves
SCALE_WORD_K = 256  # one 32-bit word a lane holds the scales of 32 rows x 256 k


@dataclass(frozen=True)
class MxFormat:
    """An element format: bits an element and 16-byte runs a lane holds of 128 elements of K."""

    name: str
    bits: int

    @property
    def runs(self) -> int:
        return self.bits // 4

    def row_bytes(self, elements: int) -> int:
        return elements * self.bits // 8

    def element(self) -> type[fx.Numeric]:
        return {4: fx.Float4E2M1FN, 8: fx.Float8E4M3FN, 16: fx.BFloat16}[self.bits]


# bf16, which has no block scales, is a format of activations alone.
FORMATS = {name: MxFormat(name, bits) for name, bits in (("bf16", 16), ("fp8", 8), ("fp4", 4))}


@dataclass(frozen=True)
class MxTile:
    """What one workgroup computes: `tile_m` activation rows x `rows` weight rows.

    `rows` counts weight rows, gate and up together in stage 1. A wave owns `rows / n_waves`
    of them and all activation rows; `k_waves` groups of waves split K.
    """

    a_format: str
    w_format: str
    tile_m: int
    rows: int
    tile_k: int
    n_waves: int
    k_waves: int = 1
    # Where a wave's even and odd 16-row tiles lie: "rows" one after the other; "halves" in two
    # halves of the weight, gate and up, whose 32-row scale words are then apart too; "apart" one
    # after the other, in a weight of two such halves.
    pairing: str = "rows"

    def __post_init__(self) -> None:
        wave_rows = self.rows // self.n_waves
        if wave_rows % 32 or wave_rows * self.n_waves != self.rows:
            raise ValueError(f"{self}: a wave takes multiples of 32 rows")
        # Scales come in words of 32 rows, of which a tile may begin in the middle only if it ends
        # with the word.
        if self.tile_m != 16 and self.tile_m % 32:
            raise ValueError(f"{self}: tile_m is 16 or a multiple of 32")
        if self.pairing == "halves" and wave_rows % 64:
            raise ValueError(f"{self}: a wave takes 32 rows of each half")
        if self.widened and self.w_format != "fp4":
            raise ValueError(f"{self}: bf16 activations go with fp4 weights")
        if self.tile_k not in (MFMA_K, 2 * MFMA_K):
            raise ValueError(f"{self}: tile_k is 128 or 256")
        if self.stage_bytes % (CHUNK * LANES * self.n_waves):
            raise ValueError(f"{self}: the activation tile does not fill whole wave loads")
        for needed, what, held in (
            (self.threads, "threads", _MOST_THREADS),
            (self.vgprs, "registers a lane", _REGISTERS),
            (self.lds_bytes, "bytes of LDS", LDS_BYTES),
        ):
            if needed > held:
                raise ValueError(f"{self}: needs {needed} {what}, there are {held}")

    @property
    def a(self) -> MxFormat:
        return FORMATS[self.a_format]

    @property
    def w(self) -> MxFormat:
        return FORMATS[self.w_format]

    @property
    def widened(self) -> bool:
        """Whether weights are widened to bf16 in registers and multiplied as such."""
        return self.a_format == "bf16"

    @property
    def threads(self) -> int:
        return LANES * self.n_waves * self.k_waves

    @property
    def m_tiles(self) -> int:
        return self.tile_m // 16

    @property
    def n_tiles(self) -> int:
        """16-row weight tiles of one wave."""
        return self.rows // self.n_waves // 16

    def w_scale_of(self, n: int) -> tuple[int, int]:
        """(word, half of its 32 rows) of weight tile `n` of a wave."""
        if self.pairing != "halves":
            return n // 2, n % 2
        return n // 4 * 2 + n % 2, n // 2 % 2

    @property
    def m_words(self) -> int:
        """Scale words of the tile's rows, one for 32."""
        return -(-self.m_tiles // 2)

    @property
    def a_scale_words(self) -> int:
        """Scale words a lane loads for the activation rows."""
        return 0 if self.widened else self.m_words

    @property
    def k_blocks(self) -> int:
        return self.tile_k // MFMA_K

    @property
    def a_row_bytes(self) -> int:
        return self.a.row_bytes(self.tile_k)

    @property
    def stage_bytes(self) -> int:
        """LDS of one activation tile."""
        return self.tile_m * self.a_row_bytes

    @property
    def acc_bytes(self) -> int:
        """LDS of one group of waves' accumulators."""
        return self.tile_m * self.rows * 4

    @property
    def lds_bytes(self) -> int:
        loop = 2 * self.stage_bytes * self.k_waves
        return max(loop, self.acc_bytes * self.k_waves if self.k_waves > 1 else 0)

    @property
    def w_stages(self) -> int:
        """Register stages of weights: two, so that loads are a whole step ahead, or one, refilled
        block by block, where two would leave a SIMD with a single wave."""
        return 2 if self._registers(2) <= _TWO_WAVES else 1

    @property
    def vgprs(self) -> int:
        """Registers a lane keeps through the loop: accumulators, weight stages, operands."""
        return self._registers(self.w_stages)

    def _registers(self, w_stages: int) -> int:
        acc = 4 * self.m_tiles * self.n_tiles
        weights = w_stages * self.n_tiles * self.k_blocks * 4 * self.w.runs
        scales = 2 * (self.n_tiles // 2 + self.a_scale_words)
        operands = 4 * self.a.runs * min(self.m_tiles, 4)
        if self.widened:
            # Two operations' activation runs and widened words, and a scale for each weight tile.
            operands = 2 * 4 * (self.m_tiles + 1) + self.n_tiles
        row_offsets = self.stage_bytes // (CHUNK * LANES * self.n_waves)
        row_offsets *= 2 if self.widened else 1  # offset and what is left of the row
        return acc + weights + scales + operands + row_offsets

    def resident_groups(self) -> int:
        """Workgroups a compute unit holds at once, by registers and LDS.

        A compute unit has four SIMDs.
        """
        waves = 4 * (_REGISTERS // self.vgprs)
        return max(1, min(waves * LANES // self.threads, LDS_BYTES // self.lds_bytes))

    def waves_per_eu(self, hint: int) -> int | None:
        """`hint` as far as the registers allow it; None where it has no effect.

        Asked for w waves, LLVM gives each half of its 512 / w registers for values and half for
        accumulation; a tile that needs more of the former has them copied to and fro.
        """
        allowed = min(hint, _REGISTERS // (2 * self.vgprs))
        return allowed if allowed > 1 else None


def scale_row_words(columns: int) -> int:
    """32-bit words of the scales of 32 rows of `columns` elements."""
    return -(-columns // SCALE_WORD_K) * LANES


def swizzle_of(row_bytes: int) -> tuple[int, int]:
    """(bits, shift) of the permutation of an LDS row's 16-byte chunks by the row.

    The low `bits` bits of a chunk's number are xored with those `shift` places above. Sixteen
    rows' chunks of one number then lie in sixteen different places of the 256 bytes that the
    banks hold; `shift` is beyond the chunk's own bits where a row is longer than that.
    """
    chunk_bits = (row_bytes // CHUNK).bit_length() - 1
    return min(chunk_bits, 4), max(chunk_bits, 4)


def swizzled(offset: fx.Int32, row_bytes: int) -> fx.Int32:
    """Where LDS layout `Swizzle(bits, 4, shift)` puts a linear byte offset; its own inverse."""
    bits, shift = swizzle_of(row_bytes)
    return offset ^ (shift_right(offset, shift) & (((1 << bits) - 1) << 4))


def fetched_byte(tile: MxTile, byte: fx.Int32) -> fx.Int32:
    """The byte of a row in memory that byte `byte` of its LDS row holds.

    A lane reads chunks l div 16, 4 + l div 16, ... of an LDS row's block. Those are the elements
    it multiplies as they lie in memory, but for bf16: operation j takes elements 32 g + 8 j and
    on, so chunks 4 j + g and 4 g + j of a block trade places.
    """
    if not tile.widened:
        return byte
    low = shift_right(byte, 2) & (3 << 4)
    return (byte & ~(15 << 4)) | low | ((byte & (3 << 4)) << 2)
