"""Build keys, the launchers' argument order, the hand-off contract, and what real kernels take."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

from aiter.jit.utils import chip_info
from aiter.jit.utils.chip_info import Target
from aiter.ops.flydsl.kernels.resources import launcher_resources
from aiter.ops.flydsl.kernels.tensor_shim import artifact_of, compile_artifact, launch_of
from atom.mono.device import attention, caches, sync
from atom.mono.device.stamps import MARKS
from atom.mono.device.step_begin import STEP_BEGIN_ABI, StepBeginBuild, build_step_begin
from atom.mono.models.minimax_m3 import builds, layout
from atom.mono.models.minimax_m3.builds import (
    DENSE_POST_ABI,
    DENSE_PRE_ABI,
    I32_NAMES,
    MINIMAX_M3,
    SPARSE_ABI,
    WIDTHS,
    DensePostBuild,
    DensePreBuild,
    LayerShape,
    SparseBuild,
)
from atom.mono.models.minimax_m3.kernels.dense_post import build_dense_post
from atom.mono.models.minimax_m3.kernels.dense_pre import build_dense_pre
from atom.mono.models.minimax_m3.kernels.sparse_layer import build_sparse_layer
from atom.mono.models.minimax_m3.layout import hand_offs, peer_layout, scratch_layout
from atom.mono.plan.check import check
from atom.mono.plan.trace import recording

from .layers import DIMS

SMALL = LayerShape(DIMS, 2, 4, blocks=2)
KERNELS = {
    "dense_pre": (build_dense_pre, DensePreBuild(SMALL), DENSE_PRE_ABI),
    "dense_post": (build_dense_post, DensePostBuild(SMALL), DENSE_POST_ABI),
    "sparse": (build_sparse_layer, SparseBuild(SMALL, max_blocks=64), SPARSE_ABI),
    "sparse_shared": (
        build_sparse_layer,
        SparseBuild(replace(SMALL, blocks=32), max_blocks=64),
        SPARSE_ABI,
    ),
    "reuse": (build_sparse_layer, SparseBuild(SMALL, False, max_blocks=64), SPARSE_ABI),
}


@pytest.mark.parametrize("name", [*KERNELS, "step_begin"])
def test_launchers_take_the_abi_then_the_stream(name):
    build, key, abi = KERNELS.get(
        name, (build_step_begin, StepBeginBuild(2, False), STEP_BEGIN_ABI)
    )
    launcher = build(key)
    assert build(replace(key)) is launcher
    assert list(inspect.signature(launcher.func).parameters) == [*abi, "stream"]
    slots = ["i32" if n in I32_NAMES else "i64" for n in abi]
    assert list(launch_of(launcher).signature) == [*slots, "stream"]


@pytest.mark.parametrize("name", KERNELS)
def test_hand_offs_keep_their_contract(name):
    build, key, _ = KERNELS[name]
    with chip_info.pinned(Target.of("gfx950")), recording() as record:
        artifact_of(build(key))
    check(record, hand_offs(key))
    assert len(record.stages) < MARKS


def test_host_and_device_agree_on_sizes():
    assert (builds.HEAD_DIM, builds.PAGE) == (caches.HEAD_DIM, caches.PAGE)
    assert (builds.QUARTERS, layout.PART_WORDS) == (attention.QUARTERS, attention.PART_WORDS)
    assert layout.WORD == sync.WORD
    regions = [r.name for r in scratch_layout(SMALL, SparseBuild(SMALL)).regions]
    regions += [r.name for r in peer_layout(SMALL).regions]
    assert set(regions) - {"mid"} <= set(sync.WAITS)


def test_layouts_hold_their_regions_apart():
    sparse = SparseBuild(SMALL, max_blocks=64)
    dense, both = scratch_layout(SMALL), scratch_layout(SMALL, sparse)
    assert both.regions[: len(dense.regions)] == dense.regions
    for placed in (both, peer_layout(SMALL)):
        ends = [0] + [r.end for r in placed.regions]
        assert all(r.offset >= end for r, end in zip(placed.regions, ends, strict=False))
        assert placed.nbytes >= ends[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 200}, "multiple of 128"),
        ({"rotary": 24}, "rotary"),
        ({"heads": 128}, "at most 16 query heads"),
        ({"index_heads": 2}, "index heads"),
        ({"topk": 7}, "topk"),
    ],
)
def test_dimensions_no_kernel_serves_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(DIMS, **change)


def test_shapes_no_kernel_serves_are_refused():
    with pytest.raises(ValueError, match="1 to 16"):
        LayerShape(DIMS, 2, 17)
    with pytest.raises(ValueError, match="do not divide"):
        LayerShape(DIMS, 3, 1)
    with pytest.raises(ValueError, match="multiple of 128"):
        LayerShape(replace(DIMS, inter=256), 4, 1)
    with pytest.raises(ValueError, match="weight format 'int4' is none of"):
        DensePreBuild(SMALL, "int4")
    with pytest.raises(ValueError, match="cache format 'fp4' is none of"):
        SparseBuild(SMALL, index_format="fp4")
    with pytest.raises(ValueError, match="index_topk"):
        SparseBuild(SMALL, init_blocks=1, index_topk=1)
    with pytest.raises(ValueError, match="at most 512 blocks"):
        SparseBuild(SMALL, index_topk=513)


REAL = {
    "dense_pre": lambda s: build_dense_pre(DensePreBuild(s)),
    "dense_pre_fp8": lambda s: build_dense_pre(DensePreBuild(s, "fp8")),
    "dense_post": lambda s: build_dense_post(DensePostBuild(s)),
    "dense_post_fp4": lambda s: build_dense_post(DensePostBuild(s, "fp8", "fp4")),
    "sparse": lambda s: build_sparse_layer(SparseBuild(s)),
    "sparse_fp8": lambda s: build_sparse_layer(SparseBuild(s, True, "fp8", "fp8")),
    "sparse_bf16": lambda s: build_sparse_layer(
        SparseBuild(s, True, "fp4", "bf16", "bf16", "bf16")
    ),
    "reuse": lambda s: build_sparse_layer(SparseBuild(s, False)),
}


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize(
    ("tp", "tokens", "debug"),
    [
        *((4, tokens, debug) for tokens in WIDTHS for debug in (False, True)),
        *((tp, tokens, False) for tp in (1, 2) for tokens in (1, 16)),
    ],
)
def test_real_kernels_need_no_scratch(flydsl_cache, name, tp, tokens, debug):
    launcher = REAL[name](LayerShape(MINIMAX_M3, tp, tokens, debug=debug))
    with chip_info.pinned(Target.of("gfx950")):
        compile_artifact(launcher)
    (kernel,) = launcher_resources(launcher)
    # Scalar registers may spill into lanes of vector registers; that takes no scratch.
    assert (kernel.scratch_bytes, kernel.threads) == (0, 512)
    assert kernel.vgprs <= 256  # eight waves of a workgroup share a compute unit's registers
    assert kernel.lds_bytes <= 160 << 10


@pytest.mark.compile
def test_step_begin_needs_no_scratch(flydsl_cache):
    launcher = build_step_begin(StepBeginBuild(4, True))
    with chip_info.pinned(Target.of("gfx950")):
        compile_artifact(launcher)
    (kernel,) = launcher_resources(launcher)
    assert (kernel.scratch_bytes, kernel.spilled) == (0, 0)
