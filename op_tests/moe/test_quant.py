"""Quantisation kernels, byte for byte against a reference in f64."""

import pytest
import torch

from aiter.ops.flydsl.kernels.moe_reduce import ReduceKey, build_reduce
from aiter.ops.flydsl.kernels.mx_quant_rows import QuantKey, build_quant_rows
from aiter.ops.flydsl.kernels.tensor_shim import _run_compiled
from aiter.ops.flydsl.moe.sizes import scale_words
from aiter.ops.shuffle import shuffle_scale
from op_tests.moe.cases import spread
from op_tests.torch_moe import mx_quantise, relative_l2

pytestmark = pytest.mark.emulated


def sorted_scales(scale: torch.Tensor, capacity: int) -> torch.Tensor:
    """The bytes of `capacity` sorted rows' scales as the main loop reads them, [rows, blocks]
    given in natural order; rows not given are 0."""
    padded = torch.zeros(-(-capacity // 32) * 32, scale.shape[1], dtype=torch.uint8)
    padded[: scale.shape[0]] = scale
    return shuffle_scale(padded).view(-1)[: 4 * scale_words(capacity, 32 * scale.shape[1])]


def places_of(row: int, capacity: int, columns: int) -> torch.Tensor:
    """Which bytes hold the scales of sorted row `row`."""
    marks = torch.zeros(capacity, columns // 32, dtype=torch.uint8)
    marks[row] = 1
    return sorted_scales(marks, capacity) == 1


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
@pytest.mark.parametrize("columns", [256, 2304])
def test_a_token_is_quantised_once_and_scaled_at_each_of_its_rows(emulate, fmt, columns):
    g = torch.Generator().manual_seed(0)
    tokens, topk, capacity = 3, 2, 96
    x = spread(tokens, columns, generator=g).to(torch.bfloat16)
    x[1, 32:64] = 0
    x[2, :32] = torch.tensor([448.0, 6.0, -7.0, 1.75] * 8)
    rows = torch.tensor([4, 70, 17, 33, -1, 95], dtype=torch.int32)
    want = mx_quantise(x.float(), fmt)
    q = torch.zeros_like(want.data)
    scale = torch.full((scale_words(capacity, columns),), 0x01010101, dtype=torch.int32)
    emulate("gfx950")
    key = QuantKey(columns, fmt, topk)
    _run_compiled(build_quant_rows(key), q, scale, x, rows, tokens, columns, None)

    assert torch.equal(q, want.data)
    natural = torch.ones(capacity, columns // 32, dtype=torch.uint8)
    for route, row in enumerate(rows.tolist()):
        if row >= 0:
            natural[row] = want.scale[route // topk]
    assert torch.equal(scale.view(torch.uint8), sorted_scales(natural, capacity))


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_only_the_rows_in_use_are_quantised(emulate, fmt):
    g = torch.Generator().manual_seed(1)
    x = spread(64, 384, generator=g).to(torch.bfloat16)
    want = mx_quantise(x.float(), fmt)
    q = torch.zeros_like(want.data)
    scale = torch.zeros(scale_words(64, 384), dtype=torch.int32)
    used = torch.tensor([32, 0], dtype=torch.int32)
    emulate("gfx950")
    _run_compiled(build_quant_rows(QuantKey(384, fmt, None)), q, scale, x, used, 64, 384, None)
    assert torch.equal(q[:32], want.data[:32])
    assert (q[32:] == 0).all()
    for row in (0, 1, 31):
        held = sorted_scales(want.scale, 64)
        places = places_of(row, 64, 384)
        assert torch.equal(scale.view(torch.uint8)[places], held[places])
    assert (scale.view(torch.uint8)[places_of(40, 64, 384)] == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_block_that_is_not_finite_gets_the_nan_scale(emulate, value):
    x = torch.ones(1, 256, dtype=torch.bfloat16)
    x[0, 40] = value
    scale = torch.zeros(scale_words(32, 256), dtype=torch.int32)
    emulate("gfx950")
    q = torch.zeros(1, 256, dtype=torch.uint8)
    rows = torch.zeros(1, dtype=torch.int32)
    _run_compiled(build_quant_rows(QuantKey(256, "fp8", 1)), q, scale, x, rows, 1, 256, None)
    row = scale.view(torch.uint8)[places_of(0, 32, 256)]
    assert sorted(row.tolist()).count(255) == 1
    assert set(row.tolist()) == {255, mx_quantise(torch.ones(1, 32), "fp8").scale.item()}


def test_reduce_adds_the_slots_of_a_token_in_f32(emulate):
    g = torch.Generator().manual_seed(2)
    x = torch.randn(5 * 3, 2304, generator=g).to(torch.bfloat16)
    y = torch.empty(5, 2304, dtype=torch.bfloat16)
    emulate("gfx950")
    _run_compiled(
        build_reduce(ReduceKey(2304, 3)), y, x, torch.arange(15, dtype=torch.int32), 5, None
    )
    want = x.float().view(5, 3, 2304).sum(1)
    assert relative_l2(y.float(), want) < 3e-3
    assert torch.equal(y, want.to(torch.bfloat16))


def test_reduce_leaves_out_routes_that_went_nowhere(emulate):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(4 * 2, 512, generator=g).to(torch.bfloat16)
    rows = torch.tensor([3, -1, -1, 0, -1, -1, 7, 8], dtype=torch.int32)
    x[rows < 0] = float("nan")
    y = torch.empty(4, 512, dtype=torch.bfloat16)
    emulate("gfx950")
    _run_compiled(build_reduce(ReduceKey(512, 2)), y, x, rows, 4, None)
    want = torch.where(rows[:, None] >= 0, x.float(), 0.0).view(4, 2, 512).sum(1)
    assert torch.equal(y, want.to(torch.bfloat16))


def test_padding_columns_count_as_zero(emulate):
    x = torch.ones(1, 256, dtype=torch.bfloat16)
    x[0, 250:] = float("nan")
    q = torch.full((1, 256), 9, dtype=torch.uint8)
    scale = torch.zeros(scale_words(32, 256), dtype=torch.int32)
    rows = torch.zeros(1, dtype=torch.int32)
    emulate("gfx950")
    _run_compiled(build_quant_rows(QuantKey(256, "fp8", 1)), q, scale, x, rows, 1, 250, None)
    assert (q[0, 250:] == 0).all()
    assert 255 not in scale.view(torch.uint8)[places_of(0, 32, 256)].tolist()
