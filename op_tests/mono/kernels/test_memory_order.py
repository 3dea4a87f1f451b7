"""Orders and scopes of memory accesses in the lowered code.

The emulator's memory is sequentially consistent: no numbers show a fence that is missing or a
scope that is too narrow, on a device whose dies have a cache each.
"""

from __future__ import annotations

from dataclasses import replace

import flydsl.expr as fx
import pytest

from atom.mono.device.step_begin import STEP_BEGIN_ABI, StepBeginBuild, build_step_begin
from atom.mono.device.sync import Words
from atom.mono.models.minimax_m3.builds import (
    DENSE_PRE_ABI,
    SPARSE_ABI,
    DensePreBuild,
    LayerShape,
    SparseBuild,
)
from atom.mono.models.minimax_m3.kernels.dense_pre import build_dense_pre
from atom.mono.models.minimax_m3.kernels.sparse_layer import build_sparse_layer
from atom.mono.plan.trace import Space
from op_tests.emulator.lowering import flydsl_arch, lower

from .layers import DIMS
from .stages import ADDRESSES, stage_launcher

ORDERINGS = {0: "", 2: "relaxed", 4: "acquire", 5: "release"}


def accesses(launcher, arguments: int) -> list[str]:
    """The loads, stores, fences and barriers of a launcher's one kernel, in program order, each
    with its ordering and scope. Fences of one workgroup, a barrier's own, are left out."""
    with flydsl_arch("gfx950"):
        program, _ = lower(launcher, (0,) * arguments + (None,), {}, "gfx950")
    (kernel,) = program.kernels.values()
    found = []
    for inst in (inst for block in kernel.blocks for inst in block.insts):
        name = inst.name.rpartition(".")[2]
        scope = inst.attr("syncscope", "system")
        if name not in ("load", "store", "fence", "barrier") or scope == "workgroup":
            continue
        if name in ("load", "store") and "ptr<1>" not in map(str, inst.arg_types):
            continue
        ordering = ORDERINGS[inst.attr("ordering", 0)]
        found.append(f"{name} {ordering} {scope}" if ordering else name)
    return found


@pytest.mark.parametrize(("space", "scope"), [(Space.SCRATCH, "agent"), (Space.PEER, "system")])
def test_words_are_accessed_at_the_scope_of_their_space(space, scope):
    def body(cta, addresses, number, waits):
        words = Words("test", space, addresses[0], number, waits)
        words.push(cta.thread, words.poll(cta.thread) + fx.Int32(1))

    found = accesses(stage_launcher(body), ADDRESSES + 2)
    assert found == [*[f"load relaxed {scope}"] * 2, f"store relaxed {scope}"]


@pytest.mark.parametrize("select", [True, False])
def test_cache_inserts_are_released_before_they_are_told_of_and_acquired_before_they_are_read(
    select,
):
    key = SparseBuild(LayerShape(DIMS, 2, 4, blocks=2), select, max_blocks=64)
    found = accesses(build_sparse_layer(key), len(SPARSE_ABI))
    fences = [access for access in found if access.startswith("fence")]
    assert fences == ["fence release agent", "fence acquire agent"]
    release, acquire = (found.index(fence) for fence in fences)
    # The caches are the first that the kernel stores into otherwise than as words.
    inserts = [i for i, access in enumerate(found[:acquire]) if access == "store"]
    assert inserts
    assert max(inserts) < release
    assert found[release + 1] == "store relaxed agent"
    assert found[acquire - 1] == "load relaxed agent"
    reads = found[acquire:]
    assert reads.index("load") < reads.index("load relaxed system")


def test_step_begin_orders_zeroing_flags_and_epochs():
    found = accesses(build_step_begin(StepBeginBuild(4, False)), len(STEP_BEGIN_ABI))
    assert found == [
        "load relaxed agent",  # the epoch
        "load",
        "store",  # this rank's mailboxes
        "fence release system",
        "barrier",
        "store relaxed agent",  # this workgroup's flag
        *["load relaxed agent"] * 2,  # all flags
        "fence acquire agent",
        "fence release system",
        "load",
        "store relaxed system",  # this rank's epoch, to every rank
        *["load relaxed system"] * 2,
        "fence acquire system",
        "store",  # the epoch
        *["store"] * 2,  # scratch
    ]


def test_what_a_stage_needs_besides_is_on_its_way_before_it_waits():
    """A load behind a wait, or between stores, is one more trip to memory for the whole grid."""
    key = DensePreBuild(LayerShape(replace(DIMS, hidden=2048), 2, 4, blocks=2))
    found = accesses(build_dense_pre(key), len(DENSE_PRE_ABI))
    waits = [i for i, access in enumerate(found) if access == "load relaxed agent"]
    normed = [i for i, access in enumerate(found[: waits[0]]) if access == "store relaxed agent"]
    assert len(normed) == 2
    assert normed[1] == normed[0] + 1
    heads = found[waits[-1] + 1 :]
    assert "store" in heads
    assert "load" not in heads
