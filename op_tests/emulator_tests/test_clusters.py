"""gfx1250 clusters: numbers within the cluster and the barrier across its workgroups."""

from __future__ import annotations

import pytest
import torch

from op_tests.emulator import EmulationError

from .snippets import module_text, run_module

pytestmark = pytest.mark.emulated

# Every workgroup publishes its number + 1 and reads its neighbour's in the cluster of four.
_EXCHANGE = """
      %tid = rocdl.workitem.id.x : i32
      %group = rocdl.workgroup.id.x : i32
      %mine = rocdl.cluster.workgroup.id.x : i32
      %one = llvm.mlir.constant(1 : i32) : i32
      %two = llvm.mlir.constant(2 : i32) : i32
      %four = llvm.mlir.constant(4 : i32) : i32
      %zero = llvm.mlir.constant(0 : i32) : i32
      %cluster = rocdl.cluster.id.x : i32
      %value = llvm.add %group, %one : i32
      %p = llvm.getelementptr %arg0[%group] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
      llvm.store %value, %p : i32, !llvm.ptr<1>
      {barrier}
      %next = llvm.add %mine, %one : i32
      %around = llvm.urem %next, %four : i32
      %base = llvm.mul %cluster, %four : i32
      %from = llvm.add %base, %around : i32
      %q = llvm.getelementptr %arg0[%from] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
      %got = llvm.load %q : !llvm.ptr<1> -> i32
      %r = llvm.getelementptr %arg1[%group] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
      llvm.store %got, %r : i32, !llvm.ptr<1>"""
_BARRIER = """rocdl.s.barrier.signal id = -1
      rocdl.s.barrier.wait id = -1
      %wave = rocdl.wave.id : i32
      %leader = llvm.icmp "eq" %wave, %zero : i32
      llvm.cond_br %leader, ^signal, ^all
    ^signal:
      rocdl.s.barrier.signal id = -3
      llvm.br ^all
    ^all:
      rocdl.s.barrier.wait id = -3"""


def _exchange(barrier: str, order: str, seed: int = 0) -> bool:
    cells, out = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    text = module_text(_EXCHANGE.format(barrier=barrier), 2, 64, grid=8, cluster=4)
    run_module("gfx1250", text, [cells, out], order=order, seed=seed)
    return out.tolist() == [2, 3, 4, 1, 6, 7, 8, 5]


@pytest.mark.parametrize(("order", "seed"), [("lockstep", 0), ("random", 0), ("random", 1)])
def test_a_cluster_barrier_orders_its_workgroups(order: str, seed: int) -> None:
    assert _exchange(_BARRIER, order, seed)


def test_a_missing_cluster_barrier_fails_in_random_order() -> None:
    assert sum(_exchange("", "random", seed) for seed in range(6)) < 4


def test_a_barrier_nobody_signals_is_a_deadlock() -> None:
    with pytest.raises(EmulationError, match="cluster barrier that has 0 of 4 signals"):
        _exchange("rocdl.s.barrier.wait id = -3", "lockstep")


def test_a_grid_must_be_whole_clusters() -> None:
    text = module_text("", 1, 32, grid=6, cluster=4)
    with pytest.raises(EmulationError, match="not whole clusters"):
        run_module("gfx1250", text, [torch.zeros(1)])
