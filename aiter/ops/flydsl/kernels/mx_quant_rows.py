"""Quantise bf16 rows to an MX format, with the scales where a stage's main loop reads them.

    q[r, :], e8m0[r, :] = mx(x[r, :])

"routes": rows are tokens. A token is quantised once and its scales are stored for each of its
sorted rows, `route_rows[token * topk + slot]`.
"rows": rows are sorted rows of stage 1's output, up to `num_valid[0]`.
Columns from `used` on are padding and count as zero, whatever they hold.

    x        (rows, columns) bf16
    q        (rows, columns) fp8 or fp4
    scale    e8m0 words (sorted rows / 32, columns / 256, 64), byte order of `mx_quant`

A workgroup is a row. A lane takes eight consecutive elements at a time, four lanes a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import flydsl.compiler as flyc
import flydsl.expr as fx

from .device import (
    CHUNK,
    LANES,
    div,
    global_buffer,
    global_pointer,
    load_word,
    mod,
    store_bits,
    traced,
)
from .mx_quant import pack, scale_byte, scale_offset, scale_value
from .mx_tile import FORMATS, scale_row_words
from .tensor_shim import kernel_builder

ELEMENTS = 8  # a lane's
_QUAD = 4  # lanes of a scale block


@dataclass(frozen=True)
class QuantKey:
    """Everything that decides the code of the quantisation."""

    columns: int
    fmt: str  # "fp8" | "fp4"
    topk: int | None  # "routes" with that many slots a token; None for "rows"

    def __post_init__(self) -> None:
        if self.columns % (ELEMENTS * _QUAD):
            raise ValueError(f"{self}: rows are whole blocks of 32")

    @property
    def threads(self) -> int:
        return min(256, -(-self.columns // (ELEMENTS * LANES)) * LANES)


@kernel_builder
def build_quant_rows(key: QuantKey) -> flyc.JitFunction:
    """Launcher (q, scale, x, rows_of, rows, used, stream): `rows_of` is route_rows or num_valid,
    `rows` the number of tokens or the capacity in sorted rows, `used` a number of columns."""
    row_bytes = FORMATS[key.fmt].row_bytes(key.columns)
    scale_row = scale_row_words(key.columns)

    @flyc.kernel(known_block_size=[key.threads, 1, 1])
    def mx_quant_rows(
        q: fx.Int64,
        scale: fx.Int64,
        x: fx.Int64,
        rows_of: fx.Int64,
        rows: fx.Int32,
        used: fx.Int32,
    ):
        row = fx.Int32(fx.block_idx.x)
        bound = rows
        if fx.const_expr(key.topk is None):
            bound = load_word(rows_of, 0)
        if row < bound:
            source = global_buffer(
                fx.Uint8, x + fx.Int64(row) * (2 * key.columns), 2 * key.columns, CHUNK
            )
            target = global_buffer(fx.Uint8, q + fx.Int64(row) * row_bytes, row_bytes, CHUNK)
            if fx.const_expr(key.topk is None):
                scale_rows = [row]
            else:
                scale_rows = [
                    load_word(rows_of, row * key.topk + slot)
                    for slot in fx.range_constexpr(key.topk)
                ]
            # A route that another rank serves has no row: -1.
            scales = global_pointer(fx.Uint8, scale)
            _quantise(key, used, source, target, scales, scale_rows, scale_row)

    @flyc.jit
    def launch_mx_quant_rows(
        q: fx.Int64,
        scale: fx.Int64,
        x: fx.Int64,
        rows_of: fx.Int64,
        rows: fx.Int32,
        used: fx.Int32,
        stream: fx.Stream,
    ):
        mx_quant_rows(q, scale, x, rows_of, rows, used).launch(
            grid=(rows, 1, 1), block=(key.threads, 1, 1), stream=stream
        )

    return launch_mx_quant_rows


@traced
def _quantise(
    key: QuantKey,
    used: fx.Int32,
    source: fx.Pointer,
    target: fx.Pointer,
    scales: fx.Pointer,
    scale_rows: list[fx.Int32],
    scale_row: int,
) -> None:
    load = fx.make_copy_atom(fx.rocdl.BufferCopy128b(), fx.Uint8)
    thread = fx.Int32(fx.thread_idx.x)
    for chunk in range(thread, fx.Int32(key.columns // ELEMENTS), fx.Int32(key.threads)):
        raw = fx.make_rmem_tensor(CHUNK, fx.Uint8)
        fx.copy(load, fx.make_view(source + chunk * CHUNK, fx.make_layout(CHUNK, 1)), raw)
        values = raw.load().bitcast(fx.BFloat16).to(fx.Float32)
        left = used - chunk * ELEMENTS
        values = [
            fx.Float32((left > i).select(values[i], fx.Float32(0.0))) for i in range(ELEMENTS)
        ]
        store_eight(values, key.fmt, chunk, target, scales, scale_rows, scale_row)


@traced
def store_eight(
    values: list[fx.Float32],
    fmt: str,
    chunk: fx.Int32,
    target: fx.Pointer,
    scales: fx.Pointer,
    scale_rows: list[fx.Int32],
    scale_row: int,
) -> None:
    """Quantise the eight elements of `chunk` of a row together with three neighbouring lanes'.

    `target` is the row's buffer; the block's scale goes to each of `scale_rows` that is one.
    """
    amax = fx.math.absf(values[0])
    for i in fx.range_constexpr(1, ELEMENTS):
        amax = fx.max(amax, fx.math.absf(values[i]))
    for distance in fx.range_constexpr(1, 3):
        amax = fx.max(amax, fx.gpu.shuffle_xor(amax, distance, LANES))
    byte = scale_byte(amax, fmt)
    divisor = scale_value(byte)
    if fx.const_expr(fmt == "fp4"):
        store_bits(target, chunk * 4, pack(values, divisor, "fp4"))
    else:
        words = [pack(values[4 * i : 4 * i + 4], divisor, "fp8") for i in range(2)]
        store_bits(target, chunk * 8, fx.Vector.from_elements(words, fx.Int32))
    if mod(chunk, _QUAD) == 0:
        for index in fx.range_constexpr(len(scale_rows)):
            if scale_rows[index] >= 0:
                at = scale_offset(scale_rows[index], div(chunk, _QUAD), scale_row)
                scales[at] = fx.Uint8(byte)
