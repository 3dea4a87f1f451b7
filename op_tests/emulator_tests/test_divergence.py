"""Lanes that part and meet again."""

from __future__ import annotations

import pytest
import torch

from .snippets import module_text, run_module

pytestmark = pytest.mark.emulated

# Lane l leaves the loop after l % 7 + 1 rounds; %square is loaded in the loop and used after it.
_LOOP = """
      %tid = rocdl.workitem.id.x : i32
      %zero = llvm.mlir.constant(0 : i32) : i32
      %one = llvm.mlir.constant(1 : i32) : i32
      %seven = llvm.mlir.constant(7 : i32) : i32
      %true = llvm.mlir.constant(true) : i1
      %rest = llvm.urem %tid, %seven : i32
      %rounds = llvm.add %rest, %one : i32
      llvm.br ^head(%zero : i32)
    ^head(%n: i32):
      %next = llvm.add %n, %one : i32
      %entry = llvm.getelementptr %arg2[%next] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
      %square = llvm.load %entry : !llvm.ptr<1> -> i32
      %more = llvm.icmp "slt" %next, %rounds : i32
      {branch}
    ^body:
      llvm.br ^head(%next : i32)
    ^after:
      %bits = rocdl.ballot %true : i64
      %p = llvm.getelementptr %arg0[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
      llvm.store %square, %p : i32, !llvm.ptr<1>
      %q = llvm.getelementptr %arg1[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i64
      llvm.store %bits, %q : i64, !llvm.ptr<1>"""
_STAY_FIRST = "llvm.cond_br %more, ^body, ^after"
_LEAVE_FIRST = """%done = llvm.xor %more, %true : i1
      llvm.cond_br %done, ^after, ^body"""


@pytest.mark.parametrize("branch", [_STAY_FIRST, _LEAVE_FIRST])
@pytest.mark.parametrize("order", ["lockstep", "random"])
def test_lanes_leave_a_loop_with_their_own_values_and_meet_after_it(
    branch: str, order: str
) -> None:
    squares, bits = torch.zeros(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int64)
    table = torch.arange(8, dtype=torch.int32) ** 2
    text = module_text(_LOOP.format(branch=branch), 3, 128)
    run_module("gfx950", text, [squares, bits, table], order=order)
    assert squares.tolist() == [(lane % 7 + 1) ** 2 for lane in range(128)]
    assert bits.eq(-1).all(), "every lane of a wave takes part in the ballot after the loop"


def test_exchange_ignores_inactive_lanes() -> None:
    """Odd lanes alone: what an even lane would have sent stays the old value, or reads as zero."""
    body = """
      %tid = rocdl.workitem.id.x : i32
      %one = llvm.mlir.constant(1 : i32) : i32
      %four = llvm.mlir.constant(4 : i32) : i32
      %old = llvm.mlir.constant(-9 : i32) : i32
      %ctl = llvm.mlir.constant(177 : i32) : i32
      %all = llvm.mlir.constant(15 : i32) : i32
      %false = llvm.mlir.constant(false) : i1
      %odd = llvm.and %tid, %one : i32
      %mine = llvm.icmp "eq" %odd, %one : i32
      llvm.cond_br %mine, ^odd, ^end
    ^odd:
      %dpp = llvm.call_intrinsic "llvm.amdgcn.update.dpp.i32"(%old, %tid, %ctl, %all, %all, %false)
        : (i32, i32, i32, i32, i32, i1) -> i32
      %left = llvm.sub %tid, %one : i32
      %index = llvm.mul %left, %four : i32
      %got = rocdl.ds_bpermute %index, %tid : (i32, i32) -> i32
      %first = rocdl.readfirstlane %tid : i32
      %p = llvm.getelementptr %arg0[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, vector<3xi32>
      %three = llvm.mlir.poison : vector<4xi32>
      %zero = llvm.mlir.constant(0 : i32) : i32
      %two = llvm.mlir.constant(2 : i32) : i32
      %a = llvm.insertelement %dpp, %three[%zero : i32] : vector<4xi32>
      %b = llvm.insertelement %got, %a[%one : i32] : vector<4xi32>
      %c = llvm.insertelement %first, %b[%two : i32] : vector<4xi32>
      %to = llvm.getelementptr %arg0[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, vector<4xi32>
      llvm.store %c, %to : vector<4xi32>, !llvm.ptr<1>
      llvm.br ^end
    ^end:"""
    out = torch.full((128, 4), -1, dtype=torch.int32)
    run_module("gfx950", module_text(body, 1, 128), [out])
    for lane in range(128):
        want = [-9, 0, (lane & ~63) + 1] if lane % 2 else [-1, -1, -1]
        assert out[lane, :3].tolist() == want


def test_waves_of_a_workgroup_may_reach_different_barriers() -> None:
    """A producer wave and a consumer wave, each with barriers of its own, alternate ten times."""
    body = """
      %tid = rocdl.workitem.id.x : i32
      %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
      %zero = llvm.mlir.constant(0 : i32) : i32
      %one = llvm.mlir.constant(1 : i32) : i32
      %ten = llvm.mlir.constant(10 : i32) : i32
      %wave = llvm.mlir.constant(64 : i32) : i32
      %producer = llvm.icmp "ult" %tid, %wave : i32
      llvm.cond_br %producer, ^make(%zero : i32), ^take(%zero, %zero : i32, i32)
    ^make(%i: i32):
      %ni = llvm.add %i, %one : i32
      llvm.store %ni, %lds : i32, !llvm.ptr<3>
      rocdl.s.barrier
      rocdl.s.barrier
      %mi = llvm.icmp "slt" %ni, %ten : i32
      llvm.cond_br %mi, ^make(%ni : i32), ^end
    ^take(%j: i32, %sum: i32):
      rocdl.s.barrier
      %word = llvm.load %lds : !llvm.ptr<3> -> i32
      %more = llvm.add %sum, %word : i32
      rocdl.s.barrier
      %nj = llvm.add %j, %one : i32
      %mj = llvm.icmp "slt" %nj, %ten : i32
      llvm.cond_br %mj, ^take(%nj, %more : i32, i32), ^write
    ^write:
      %at = llvm.sub %tid, %wave : i32
      %p = llvm.getelementptr %arg0[%at] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
      llvm.store %more, %p : i32, !llvm.ptr<1>
      llvm.br ^end
    ^end:"""
    for order in ("lockstep", "random"):
        out = torch.zeros(64, dtype=torch.int32)
        run_module("gfx950", module_text(body, 1, 128, lds=16), [out], order=order)
        assert out.eq(55).all()
