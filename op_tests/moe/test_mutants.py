"""Kernels broken on purpose: the emulator must tell each from the real one.

A mutant changes one thing while a kernel is traced: leaves out one barrier or one wait, swaps
one stride, drops one scale selection. It is killed if a run differs from the reference or the
emulator reports an error, in any of a few random orders of waves.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import flydsl.expr as fx
import pytest
import torch

from aiter.jit.utils.chip_info import pinned
from aiter.ops.flydsl.kernels import (
    moe_activate,
    moe_reduce,
    moe_sort,
    moe_stage1,
    moe_stage2,
    mx_gemm,
    mx_quant_rows,
)
from aiter.ops.flydsl.kernels.mx_tile import MxTile
from op_tests.emulator import EmulationError, emulated
from op_tests.moe.cases import GFX950, MoeCase, routing
from op_tests.moe.test_mx_family import A4W4, A16W4, selector_of
from op_tests.moe.test_sort import check, run_sort
from op_tests.torch_moe import relative_l2

pytestmark = [pytest.mark.emulated, pytest.mark.slow]
fused_moe_module = importlib.import_module("aiter.fused_moe")

TOLERANCE = 1e-2
SEEDS = (1, 2, 3)
BUILDERS = {
    "quant": mx_quant_rows.build_quant_rows,
    "stage1": moe_stage1.build_stage1,
    "activate": moe_activate.build_activate,
    "stage2": moe_stage2.build_stage2,
    "reduce": moe_reduce.build_reduce,
}

# What reaches every barrier of the stages: K split over waves and over workgroups, tiles of
# several waves, and a grid of fewer workgroups than items.
PLANS = {
    "k_waves": (
        ("fp8", "fp4"),
        "flydsl_moe1_afp8_wfp4_bf16_t32x64x256_kw2_fp8",
        "flydsl_moe2_afp8_wfp4_bf16_t32x128x128_reduce",
    ),
    "k_batch": (
        ("fp4", "fp4"),
        f"flydsl_moe1_{A4W4}_t32x64x256_kb2_fp4",
        f"flydsl_moe2_{A4W4}_t16x128x256_atomic_sbm32",
    ),
    "bf16": (
        ("bf16", "fp4"),
        f"flydsl_moe1_{A16W4}_t32x64x128_kw2",
        f"flydsl_moe2_{A16W4}_t32x128x128_atomic",
    ),
}


def case(plan: str) -> MoeCase:
    return MoeCase.random(70, 1024, 256, 4, 2, "skewed", *PLANS[plan][0])


@contextmanager
def rebuilt(builders: dict[str, Callable] = BUILDERS) -> Iterator[None]:
    """Trace kernels anew inside, and forget them afterwards."""
    for build in builders.values():
        build.cache_clear()
    try:
        yield
    finally:
        for build in builders.values():
            build.cache_clear()


def survives(monkeypatch: pytest.MonkeyPatch, plan: str) -> bool:
    """Whether the kernels as they are now still give the reference in every order tried."""
    moe = case(plan)
    want = moe.reference()
    # Few workgroups: each takes several items, so that one item can spoil the next one's LDS.
    monkeypatch.setattr("aiter.ops.flydsl.moe.selection.stage2_groups", lambda *args: 3)
    selector = selector_of(moe, *PLANS[plan][1:], 32, "separated")
    monkeypatch.setattr(fused_moe_module, "_selector", lambda paths: selector)
    with rebuilt():
        for seed in SEEDS:
            try:
                with pinned(GFX950), emulated(GFX950, order="random", seed=seed):
                    out = moe.run("separated")
            except EmulationError:
                return False
            if not relative_l2(out, want) < TOLERANCE:
                return False
    return True


def traced_calls(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, plan: str) -> int:
    """How often tracing the plan's kernels calls `owner.name`."""
    # The sort, which has a test of its own, is traced here and not again.
    assert survives(monkeypatch, plan)
    calls = []
    original = getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *a, **k: (calls.append(1), original(*a, **k))[1])
        assert survives(patch, plan)
    return len(calls)


def without_call(owner: object, name: str, left_out: int) -> Callable:
    """`owner.name` that does nothing the `left_out`-th time it is called."""
    original = getattr(owner, name)
    count = iter(range(1 << 30))

    def call(*args, **options):
        if next(count) != left_out:
            return original(*args, **options)
        return None

    return call


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("owner", "name"), [(fx.gpu, "barrier"), (fx.rocdl, "wait_asyncmark")], ids=["barrier", "wait"]
)
def test_every_barrier_and_wait_is_needed(monkeypatch, plan, owner, name):
    total = traced_calls(monkeypatch, owner, name, plan)
    assert total
    alive = []
    for left_out in range(total):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, without_call(owner, name, left_out))
            if survives(patch, plan):
                alive.append(left_out)
    print(f"{plan} {name}: {total - len(alive)} of {total} mutants killed, alive {alive}")
    assert not alive


def _swapped_scale_offset(row, block, row_words):
    from aiter.ops.flydsl.kernels.mx_quant import scale_offset

    return scale_offset(row ^ 16, block, row_words)


def _unswizzled_rows(self, real=mx_gemm.MxLoop.a_chunk_rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx_gemm, "swizzled", lambda offset, row_bytes: offset)
        return real(self)


MUTANTS = {
    "weight scale select": (
        "k_waves",
        MxTile,
        "w_scale_of",
        lambda self, n: (n // 4 * 2 + n % 2, 0),
    ),
    "activation scale select": (
        "k_waves",
        mx_gemm.MxLoop,
        "_mfma",
        lambda self, w, a, real=mx_gemm.MxLoop._mfma: real(self, w, a & 2),
    ),
    "k block of the weight scale": (
        "k_waves",
        mx_gemm.MxLoop,
        "_mfma",
        lambda self, w, a, real=mx_gemm.MxLoop._mfma: real(self, w & 1, a),
    ),
    "swizzle of the fetch": ("k_waves", mx_gemm.MxLoop, "a_chunk_rows", _unswizzled_rows),
    "swizzle of the fetch of bf16": ("bf16", mx_gemm.MxLoop, "a_chunk_rows", _unswizzled_rows),
    "chunks of bf16": ("bf16", mx_gemm, "fetched_byte", lambda tile, byte: byte),
    "scale of widened weights": (
        "bf16",
        mx_gemm,
        "widen_fp4",
        lambda word, scale, real=mx_gemm.widen_fp4: real(word, fx.Float32(1.0)),
    ),
    "tile of a widened weight's scale": (
        "bf16",
        mx_gemm.MxLoop,
        "_w_scale_value",
        lambda self, n, block, words, real=mx_gemm.MxLoop._w_scale_value: real(
            self, n ^ 1, block, words
        ),
    ),
    "half of a widened weight's scale": (
        "bf16",
        MxTile,
        "w_scale_of",
        lambda self, n: (n // 4 * 2 + n % 2, 0),
    ),
    "step of a widened weight's scale": (
        "bf16",
        mx_gemm.MxLoop,
        "_w_scale_value",
        lambda self, n, block, words, real=mx_gemm.MxLoop._w_scale_value: real(
            self, n, block ^ 1, words
        ),
    ),
    "scale rows of stage 1": ("k_waves", moe_stage1, "scale_offset", _swapped_scale_offset),
    "scale rows of the quantisation": (
        "k_waves",
        mx_quant_rows,
        "scale_offset",
        _swapped_scale_offset,
    ),
    "amax of a block": (
        "k_waves",
        moe_stage1,
        "_block_amax",
        lambda values: fx.math.absf(values[0]),
    ),
    "output row pitch": (
        "k_waves",
        moe_stage2.Stage2Key,
        "row_pitch",
        property(lambda self: self.tile.rows),
    ),
    "columns of the products": (
        "k_batch",
        moe_activate,
        "_eight",
        lambda base, column, real=moe_activate._eight: real(base, column ^ 8),
    ),
    "run of the reduction": ("k_waves", moe_reduce, "mod", lambda value, by: value ^ 1),
    "slot of a route": ("k_waves", moe_stage2, "SLOT_SHIFT", 23),
    "token of a route": ("k_waves", moe_stage1, "TOKEN_MASK", 0xFFFFFE),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_stride_or_select_shows(monkeypatch, mutant):
    plan, owner, name, replacement = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, replacement)
    assert not survives(monkeypatch, plan)


def test_padding_that_is_not_left_out_shows(monkeypatch):
    real = mx_gemm.MxOperands.of_block
    moe = MoeCase.random(6, 512, 128, 3, 2, "even", "bf16", "fp4")
    moe.w1.data[..., -16:] = 0
    moe.x[:, -32:] = float("nan")
    for mutant in (False, True):
        if mutant:
            monkeypatch.setattr(
                mx_gemm.MxOperands,
                "of_block",
                lambda *args, **options: real(*args, **(options | {"a_left": []})),
            )
        with rebuilt(), pinned(GFX950), emulated(GFX950):
            out = moe.run("separated", hidden_pad=32)
        assert torch.isfinite(out).all() != mutant


def test_the_real_kernels_survive(monkeypatch):
    for plan in PLANS:
        assert survives(monkeypatch, plan)


def sort_survives() -> bool:
    """Whether the sort as it is now agrees with the reference, with experts in every wave."""
    experts, block_m = 250, 16
    g = torch.Generator().manual_seed(8)
    ids = routing(96, 4, experts, "even", g)
    weights = torch.rand(96, 4, generator=g)
    with rebuilt({"sort": moe_sort.build_sort}):
        for seed in range(16):
            try:
                with emulated(GFX950, order="random", seed=seed):
                    result = run_sort(ids, weights, experts, block_m)
                check(result, ids, weights, experts, block_m, 96)
            except (EmulationError, AssertionError):
                return False
    return True


def test_every_barrier_of_the_sort_is_needed(monkeypatch):
    calls = []
    original = fx.gpu.barrier
    with monkeypatch.context() as patch:
        patch.setattr(fx.gpu, "barrier", lambda: (calls.append(1), original())[1])
        assert sort_survives()
    total = len(calls)
    alive = []
    for left_out in range(total):
        with monkeypatch.context() as patch:
            patch.setattr(fx.gpu, "barrier", without_call(fx.gpu, "barrier", left_out))
            if sort_survives():
                alive.append(left_out)
    print(f"sort barrier: {total - len(alive)} of {total} mutants killed, alive {alive}")
    assert not alive
