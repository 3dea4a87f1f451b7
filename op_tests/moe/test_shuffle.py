"""Layouts against their index maps, element by element."""

import pytest
import torch

from aiter.ops.shuffle import shuffle_scale, shuffle_weight


def numbered(*shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 37 % 251).to(torch.uint8).view(shape)


def test_plain_weights_follow_the_index_map():
    n_rows, k_bytes = 48, 96
    x = numbered(2, n_rows, k_bytes)
    out = shuffle_weight(x)
    assert out.is_shuffled
    flat = out.view(2, n_rows // 16, k_bytes // 32, 2, 16, 16)
    for n in range(n_rows):
        for k in range(k_bytes):
            assert flat[1, n // 16, k // 32, k % 32 // 16, n % 16, k % 16] == x[1, n, k]


def test_interleaved_weights_alternate_gate_and_up():
    n_rows, k_bytes = 64, 128
    x = numbered(2, n_rows, k_bytes)
    out = shuffle_weight(x, is_guinterleave=True, gate_up=True)
    flat = out.view(2, n_rows // 32, 2, k_bytes // 64, 4, 16, 16)
    half_rows = n_rows // 2
    for half in range(2):
        for n in range(half_rows):
            for k in range(0, k_bytes, 7):
                got = flat[1, n // 16, half, k // 64, k // 16 % 4, n % 16, k % 16]
                assert got == x[1, half * half_rows + n, k]


def test_plain_scales_follow_the_index_map_and_pad_with_one():
    x = numbered(300, 12)
    out = shuffle_scale(x)
    assert out.shape == (512, 16)
    flat = out.view(16, 2, 4, 16, 2, 2)
    for m in range(512):
        for n in range(16):
            got = flat[m // 32, n // 8, n % 4, m % 16, n % 8 // 4, m % 32 // 16]
            assert got == (x[m, n] if m < 300 and n < 12 else 0x7F)


def test_interleaved_scales_put_gate_and_up_of_a_row_side_by_side():
    experts, half_rows, columns = 2, 32, 8
    x = numbered(experts * 2 * half_rows, columns)
    out = shuffle_scale(x, experts=experts, is_guinterleave=True, gate_up=True)
    flat = out.view(experts, half_rows // 16, 1, 4, 16, 2, 2)
    for half in range(2):
        for m in range(half_rows):
            for n in range(columns):
                got = flat[1, m // 16, 0, n % 4, m % 16, n // 4, half]
                assert got == x[(2 + half) * half_rows + m, n]


def test_f32_scales_pass_unchanged():
    x = torch.rand(3, 5)
    assert shuffle_scale(x) is x


@pytest.mark.parametrize("shape", [(2, 24, 64), (2, 32, 48)])
def test_partial_tiles_are_refused(shape):
    with pytest.raises(ValueError, match="does not split"):
        shuffle_weight(numbered(*shape))
