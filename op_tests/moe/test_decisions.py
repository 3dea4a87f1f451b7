"""Pure decisions of the host side, by brute force where the domain allows it."""

import itertools
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiter.jit.tables import Source
from aiter.jit.tuned import FmoeTable, TunedRow
from aiter.jit.utils.chip_info import Target
from aiter.ops.enum import GateMode
from aiter.ops.flydsl.kernel_names import parse
from aiter.ops.flydsl.kernels.mx_tile import MxTile
from aiter.ops.flydsl.moe.request import CALLER_DIMENSIONS, FP4, FP8, CallerVariant, MoeRequest
from aiter.ops.flydsl.moe.selection import select
from aiter.ops.flydsl.moe.sizes import sort_capacity, stage2_epilogue, stage2_groups
from aiter.ops.flydsl.moe.stages import FORMAT, stage1_key, stage2_key, unsupported
from aiter.ops.flydsl.moe.tiers import MAX_TOKENS, get_padded_M, served_range
from op_tests.moe.stage_names import request_for


def test_served_ranges_partition_all_token_counts():
    cap = 140000
    tokens = [1 << i for i in range(16)] + [131072]
    covered = []
    for token in tokens:
        low, high = served_range(token, cap)
        assert all(get_padded_M(m) == token for m in (low, high, (low + high) // 2))
        covered.append((low, high))
    assert covered[0][0] == 1
    assert covered[-1][1] == cap
    for (_, high), (low, _) in itertools.pairwise(covered):
        assert low == high + 1


def test_every_token_count_of_small_buckets_maps_to_its_row():
    for m in range(1, 5000):
        low, high = served_range(get_padded_M(m))
        assert low <= m <= high


def test_the_row_of_the_lower_tier_serves_the_higher_one_where_that_has_none():
    assert served_range(32768, highest=True) == (16385, MAX_TOKENS)
    assert served_range(32768, 20000, highest=True) == (16385, 20000)
    assert served_range(131072, highest=True) == served_range(131072)
    assert served_range(16384, highest=True) == served_range(16384)


@pytest.mark.parametrize("token", [0, 3, 5, 6, 7, 40, 56, 65536])
def test_rows_at_other_tokens_are_unreachable(token):
    assert served_range(token) is None


def test_every_caller_field_declares_its_values():
    assert set(CALLER_DIMENSIONS) == {field.name for field in fields(CallerVariant)}


BF16_NAMES = (
    "flydsl_moe1_abf16_wfp4_bf16_t32x64x256",
    "flydsl_moe2_abf16_wfp4_bf16_t32x128x128_atomic",
)


def tables_of(request: MoeRequest, kernel1: str, kernel2: str) -> FmoeTable:
    """A table of one row, tuned for `request`."""
    row = TunedRow(
        key=request.tuned_key(),
        block_m=32,
        ksplit=0,
        run_1stage=False,
        kernel1=kernel1,
        kernel2=kernel2,
        us=None,
        tag="",
        source=Source(Path("tuned.csv"), 2),
    )
    return FmoeTable((row,), (), ())


@pytest.mark.parametrize(
    "name",
    [
        "flydsl_moe1_afp4_wfp4_bf16_t32x128x128_w3",
        "flydsl_moe1_abf16_wfp4_bf16_t32x128x128_w3",
        None,
    ],
)
def test_padding_changes_no_code(name):
    """Tuned rows do not say how much a caller pads, so what is built must serve any padding."""
    request = request_for(parse(name or "flydsl_moe1_afp4_wfp4_bf16_t32x64x256"), 3072, 3072)
    stage2 = f"flydsl_moe2_a{FORMAT[request.a_dtype]}_wfp4_bf16_t32x128x128_reduce"
    tables = tables_of(request, name, stage2) if name else FmoeTable((), (), ())
    plan = select(request, tables)
    assert (plan.source is not None) == (name is not None)
    padded = replace(request, hidden_pad=192, intermediate_pad=192)
    assert select(padded, tables) == plan


def test_bf16_activations_need_no_quantisation():
    request = request_for(parse(BF16_NAMES[0]), 3584, 384)
    for tables in (tables_of(request, *BF16_NAMES), FmoeTable((), (), ())):
        plan = select(request, tables)
        assert (plan.source is None) == (not tables.rows)
        assert plan.quant is None
        assert plan.requant is None
        assert plan.stage1.requant is None


def test_a_row_serves_requests_of_its_own_activation_type_only():
    """Where the type depends on the number of tokens, a row is passed by in silence."""
    request = request_for(parse(BF16_NAMES[0]), 3584, 384)
    tables = tables_of(request, *BF16_NAMES)
    assert select(request, tables).source is not None
    for a_dtype in (FP4, FP8):
        plan = select(replace(request, a_dtype=a_dtype), tables)
        assert plan.source is None
        assert not plan.reasons


def test_a_stage_1_that_quantises_does_not_go_with_a_stage_2_of_bf16():
    request = request_for(parse(BF16_NAMES[0]), 3584, 384)
    plan = select(request, tables_of(request, f"{BF16_NAMES[0]}_fp8", BF16_NAMES[1]))
    assert plan.source is None
    assert "stage 1 quantises to fp8, stage 2 reads bf16" in plan.reasons[0]


@pytest.mark.parametrize(("pad", "good"), [(0, True), (8, True), (192, True), (4, False)])
def test_bf16_activations_are_padded_by_whole_chunks(pad, good):
    request = replace(request_for(parse(BF16_NAMES[0]), 3584, 384), hidden_pad=pad)
    reason = unsupported(request)
    assert (reason is None) == good
    if not good:
        assert "no multiple of 8" in reason
    assert unsupported(replace(request, a_dtype=FP8)) is None


def test_labels_tell_variants_apart():
    labels = {
        CallerVariant(mode, bias, local).label
        for mode in GateMode
        for bias in ("none", "both", "stage1")
        for local in (False, True)
    }
    assert len(labels) == 18


def test_an_output_beyond_32_bits_is_reduced_and_a_route_buffer_beyond_them_refused():
    dim = 8192
    assert stage2_epilogue("atomic", 262143, 1, dim, False) == "atomic"
    assert stage2_epilogue("reduce", 26214, 10, dim, False) == "reduce"
    with pytest.raises(NotImplementedError, match="32-bit"):
        stage2_epilogue("reduce", 26215, 10, dim, False)
    with pytest.raises(NotImplementedError, match="32-bit"):
        stage2_epilogue("atomic", 262144, 10, dim, False)
    assert stage2_epilogue("atomic", 5, 10, dim, True) == "reduce"


@pytest.mark.parametrize("block_m", [1, 3, 16])
def test_the_sorted_rows_are_those_of_the_worst_routing(block_m):
    """Of all ways to deal a number of routes out to experts."""
    for routes, experts in itertools.product(range(7), range(1, 4)):
        deals = itertools.product(range(routes + 1), repeat=experts)
        rows = [
            sum(-(-count // block_m) * block_m for count in deal)
            for deal in deals
            if sum(deal) == routes
        ]
        assert sort_capacity(routes, 1, experts, block_m) == max(rows)


def test_one_token_takes_a_block_for_each_of_its_slots():
    assert sort_capacity(1, 8, 384, 32) == 8 * 32


def test_grids_cover_items_and_persistent_ones_fit_the_machine():
    tile = MxTile("fp8", "fp4", 32, 128, 256, 2)
    cu = Target.of("gfx950").cu_num
    assert stage2_groups(100, 10, tile, False, cu, None) == 100
    assert stage2_groups(1001, 257, tile, False, cu, None) == 251
    assert stage2_groups(100000, 300, tile, True, cu, 3) == 3 * cu
    assert stage2_groups(5, 1, tile, True, cu, 3) == 5


TILE_PARTS = st.sampled_from([1, 8, 16, 24, 32, 33, 48, 64, 96, 128, 192, 256, 320, 384, 512])
SUFFIXES = [
    ["", "_kb2", "_kb3", "_kb7"],
    ["", "_go", "_gui"],
    ["", "_kw2", "_kw3", "_kw8"],
    ["", "_fp4", "_fp8"],
]


@settings(max_examples=400)
@given(
    st.sampled_from(["afp4_wfp4", "afp8_wfp4", "afp8_wfp8", "abf16_wfp4"]),
    st.tuples(TILE_PARTS, TILE_PARTS, st.sampled_from([64, 128, 192, 256, 512])),
    st.sampled_from([16, 32, 48, 128, 256]),
    st.sampled_from([256, 768, 3072]),
    st.sampled_from([128, 384, 2048]),
    st.tuples(*map(st.sampled_from, SUFFIXES)),
)
def test_any_name_is_served_or_refused(types, tile, block_m, model_dim, inter_dim, suffixes):
    """A tuned name the kernels cannot serve must not end the call: others serve it then."""
    text = f"{types}_bf16_t{'x'.join(map(str, tile))}"
    with suppress(NotImplementedError):
        name = parse(f"flydsl_moe1_{text}{''.join(suffixes)}")
        key = stage1_key(request_for(name, model_dim, inter_dim), name, block_m)
        assert key.steps * key.tile.tile_k * key.tile.k_waves * key.k_batch == model_dim
        assert key.requant is None or key.tile.n_tiles % 4 == 0
    for epilogue in ("atomic", "reduce"):
        with suppress(NotImplementedError):
            name = parse(f"flydsl_moe2_{text}_{epilogue}")
            key = stage2_key(request_for(name, model_dim, inter_dim), name, block_m)
            assert key.steps * key.tile.tile_k == inter_dim
            assert key.lds_bytes <= 160 << 10


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("flydsl_moe1_afp4_wfp4_bf16_t16x64x512", "tile_k is 128 or 256"),
        ("flydsl_moe1_afp4_wfp4_bf16_t16x1x256_gui", "scale blocks"),
        ("flydsl_moe1_afp4_wfp4_bf16_t24x64x256", "tile_m is 16 or"),
        ("flydsl_moe1_afp8_wfp4_bf16_t128x128x256_kw3", "bytes of LDS"),
        ("flydsl_moe1_abf16_wfp4_bf16_t128x64x256_kw2", "bytes of LDS"),
        ("flydsl_moe2_abf16_wfp4_bf16_t192x256x256_reduce", "of LDS|registers"),
        ("flydsl_moe2_afp4_wfp4_bf16_t32x64x256_reduce", "2, 4 or 8 columns"),
        ("flydsl_moe2_afp4_wfp4_bf16_t32x192x256_atomic", "2, 4 or 8 columns"),
        ("flydsl_moe2_afp8_wfp4_bf16_t192x512x256_atomic", "of LDS|registers"),
    ],
)
def test_tiles_beyond_the_kernels_are_refused_with_the_reason(name, reason):
    kernel = parse(name)
    key = stage1_key if name.startswith("flydsl_moe1") else stage2_key
    with pytest.raises(NotImplementedError, match=reason):
        key(request_for(kernel, 3072, 768), kernel, 384)


@pytest.mark.parametrize(
    "bad",
    [
        ("fp8", "fp4", 24, 128, 256, 2),
        ("fp8", "fp4", 48, 128, 256, 2),
        ("fp8", "fp4", 32, 96, 256, 2),
        ("fp8", "fp4", 32, 128, 192, 2),
        ("fp4", "fp4", 16, 256, 128, 4),
        ("bf16", "fp8", 32, 128, 256, 2),
        ("bf16", "bf16", 32, 128, 256, 2),
    ],
)
def test_tiles_the_main_loop_cannot_compute_are_refused(bad):
    with pytest.raises(ValueError, match="MxTile"):
        MxTile(*bad)
