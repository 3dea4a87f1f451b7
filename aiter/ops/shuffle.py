"""Weight and scale layouts that the MoE kernels read, as permutations of bytes.

Loaders call these once per checkpoint. Every function takes the natural layout, experts first,
and returns a tensor of the same shape (scales: padded) whose memory is permuted; the index maps
stand with each function, `a / b` rounding down, outermost index first.

A shuffled weight carries the attribute `is_shuffled = True`, which views lose.
"""

from __future__ import annotations

import torch

SCALE_ROWS = 256
SCALE_COLUMNS = 8
_ONE = 0x7F  # the e8m0 byte of 1.0


def shuffle_weight(
    x: torch.Tensor,
    layout: tuple[int, int] = (16, 16),
    *,
    is_guinterleave: bool = False,
    gate_up: bool = False,
) -> torch.Tensor:
    """Order a weight so that one matrix operand of a wave is contiguous.

    Args:
        x: [experts, N, K] or [N, K]; 4-bit types count K in bytes.
        layout: (rows, bytes) of the contiguous piece of one lane group.
        is_guinterleave: use the layout of interleaved gate/up kernels.
        gate_up: with `is_guinterleave`, the rows are two halves, gate and up, and 16 rows of
            one alternate with 16 of the other.

    With R rows and B bytes a piece, per expert and byte (n, k), one-byte elements:
        plain        [n / R][k / 2B][k mod 2B / B][n mod R][k mod B]
        interleaved  [n / R][half][k / LB][k mod LB / B][n mod R][k mod B], L = 64 / R

    Raises ValueError where N or K is not a multiple of the tile.
    """
    rows, piece = layout
    data = _bytes(x)
    *lead, n, k = data.shape
    halves = 2 if gate_up else 1
    if gate_up and not is_guinterleave:
        raise ValueError("gate_up says how interleaved weights alternate: set is_guinterleave")
    across = 64 // rows if is_guinterleave else 2
    if n % (rows * halves) or k % (across * piece):
        raise ValueError(
            f"a weight of {n} rows of {k} bytes does not split into {rows * halves} rows "
            f"by {across * piece} bytes"
        )
    tiled = data.reshape(
        -1, halves, n // rows // halves, rows, k // (across * piece), across, piece
    )
    out = tiled.permute(0, 2, 1, 4, 5, 3, 6).contiguous().view(*lead, n, k).view(x.dtype)
    out.is_shuffled = True
    return out


def shuffle_scale(
    scale: torch.Tensor, *, experts: int = 1, is_guinterleave: bool = False, gate_up: bool = False
) -> torch.Tensor:
    """Order e8m0 block scales so that one 32-bit word a lane serves four scaled MFMAs.

    Args:
        scale: [experts * rows, columns] bytes (e8m0 or uint8), a column per 32 elements of K.
            f32 scales are returned as they are.
        experts: how many experts the rows hold; used with `gate_up`.
        is_guinterleave, gate_up: as for `shuffle_weight`.

    Returns [padded rows, padded columns], columns padded to 8 and, in the plain layout, rows to
    256, both with the byte of 1.0. Byte (m, n) goes to
        plain    [m / 32][n / 8][n mod 4][m mod 16][n mod 8 / 4][m mod 32 / 16]
        gate_up  [m / 16][n / 8][n mod 4][m mod 16][n mod 8 / 4][half], m counted in the half

    Raises ValueError where rows do not split into whole groups.
    """
    if scale.dtype == torch.float32:
        return scale
    data = _bytes(scale)
    rows, columns = data.shape
    row_pad = 0 if is_guinterleave else -rows % SCALE_ROWS
    data = torch.nn.functional.pad(data, (0, -columns % SCALE_COLUMNS, 0, row_pad), value=_ONE)
    rows, columns = data.shape
    if gate_up:
        if rows % (32 * experts):
            raise ValueError(f"{rows} rows are not {experts} experts of whole gate/up 16-row pairs")
        split = data.view(experts, 2, rows // experts // 32, 16, columns // 8, 2, 4)
        out = split.permute(0, 2, 4, 6, 3, 5, 1)
    else:
        if rows % 32:
            raise ValueError(f"{rows} rows do not split into groups of 32")
        out = data.view(rows // 32, 2, 16, columns // 8, 2, 4).permute(0, 3, 5, 2, 4, 1)
    return out.contiguous().view(rows, columns).view(scale.dtype)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.uint8 else x.contiguous().view(torch.uint8)
