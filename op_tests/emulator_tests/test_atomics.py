"""Atomics: colliding lanes, packed halves, returned values, LDS and buffers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from .snippets import module_text, run_module

pytestmark = pytest.mark.emulated

LANES = 128
_CELL = """
      %tid = rocdl.workitem.id.x : i32
      %cells = llvm.mlir.constant(4 : i32) : i32
      %cell = llvm.urem %tid, %cells : i32
      %from = llvm.getelementptr %arg0[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
      %word = llvm.load %from : !llvm.ptr<1> -> i32
      %to = llvm.getelementptr %arg1[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
      %at = llvm.getelementptr %arg2[%cell] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32"""


def _run(operation: str, x: torch.Tensor, cells: torch.Tensor, order: str) -> torch.Tensor:
    """Every lane applies ``operation`` (of %v at %at, giving %old) to one of four cells."""
    out = torch.zeros(LANES, dtype=torch.int32)
    body = _CELL + operation
    run_module("gfx950", module_text(body, 3, LANES), [x, out, cells], order=order)
    return out


@pytest.mark.parametrize("order", ["lockstep", "random"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_halves_are_added_separately(dtype: torch.dtype, order: str) -> None:
    name = "bf16" if dtype == torch.bfloat16 else "f16"
    x = torch.ones(LANES, 2, dtype=dtype)
    x[:, 1] = -2
    cells = torch.zeros(4, 2, dtype=dtype)
    kind = f"vector<2x{name}>"
    text = f"""
      %v = llvm.bitcast %word : i32 to {kind}
      %old = llvm.atomicrmw fadd %at, %v syncscope("agent") monotonic : !llvm.ptr<1>, {kind}
      %r = llvm.bitcast %old : {kind} to i32
      llvm.store %r, %to : i32, !llvm.ptr<1>"""
    out = _run(text, x, cells, order)
    assert cells.float().tolist() == [[32.0, -64.0]] * 4
    returned = out.view(dtype).view(LANES, 2).float()
    for cell in range(4):
        assert sorted(returned[cell::4, 0].tolist()) == [float(n) for n in range(32)]


@pytest.mark.parametrize("order", ["lockstep", "random"])
@pytest.mark.parametrize("name", ["umax", "min", "_xor", "xchg", "fadd"])
def test_colliding_lanes_act_one_after_another(name: str, order: str) -> None:
    rng = np.random.default_rng(1)
    values = rng.integers(-50, 50, LANES).astype(np.int32)
    x, cells = torch.from_numpy(values.copy()), torch.full((4,), 3, dtype=torch.int32)
    if name == "fadd":
        x, cells = x.float(), cells.float()
    kind = "f32" if name == "fadd" else "i32"
    text = f"""
      %v = llvm.bitcast %word : i32 to {kind}
      %old = llvm.atomicrmw {name} %at, %v monotonic : !llvm.ptr<1>, {kind}
      %r = llvm.bitcast %old : {kind} to i32
      llvm.store %r, %to : i32, !llvm.ptr<1>"""
    out = _run(text, x, cells, order)
    for cell in range(4):
        mine = values[cell::4].tolist()
        last = cells[cell].item()
        if name == "umax":
            assert last & 0xFFFFFFFF == max(v & 0xFFFFFFFF for v in [*mine, 3])
        elif name == "min":
            assert last == min([*mine, 3])
        elif name == "_xor":
            assert last == int(np.bitwise_xor.reduce([*mine, 3]))
        elif name == "fadd":
            assert last == 3 + sum(mine)
        else:
            # Every value is seen once: by the next lane, or at the end.
            assert sorted([*out[cell::4].tolist(), last]) == sorted([*mine, 3])


def test_compare_and_swap_succeeds_for_one_lane_of_a_cell() -> None:
    x = torch.arange(100, 100 + LANES, dtype=torch.int32)
    cells = torch.full((4,), 7, dtype=torch.int32)
    text = """
      %seven = llvm.mlir.constant(7 : i32) : i32
      %both = llvm.cmpxchg %at, %seven, %word acq_rel monotonic : !llvm.ptr<1>, i32
      %won = llvm.extractvalue %both[1] : !llvm.struct<(i32, i1)>
      %r = llvm.zext %won : i1 to i32
      llvm.store %r, %to : i32, !llvm.ptr<1>"""
    out = _run(text, x, cells, "random")
    for cell in range(4):
        assert out[cell::4].sum() == 1
        winner = cell + 4 * int(out[cell::4].argmax())
        assert cells[cell] == 100 + winner


def test_lds_atomics_belong_to_their_workgroup() -> None:
    body = """
      %tid = rocdl.workitem.id.x : i32
      %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
      %zero = llvm.mlir.constant(0 : i32) : i32
      %group = rocdl.workgroup.id.x : i32
      %one = llvm.mlir.constant(1 : i32) : i32
      %step = llvm.add %group, %one : i32
      llvm.store %zero, %lds : i32, !llvm.ptr<3>
      rocdl.s.barrier
      %old = llvm.atomicrmw add %lds, %step monotonic : !llvm.ptr<3>, i32
      rocdl.s.barrier
      %total = llvm.load %lds : !llvm.ptr<3> -> i32
      %to = llvm.getelementptr %arg0[%group] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
      llvm.store %total, %to : i32, !llvm.ptr<1>"""
    for order in ("lockstep", "random"):
        out = torch.zeros(5, dtype=torch.int32)
        run_module("gfx950", module_text(body, 1, LANES, grid=5, lds=16), [out], order=order)
        assert out.tolist() == [LANES * (g + 1) for g in range(5)]


def test_buffer_atomics_beyond_the_end_do_nothing() -> None:
    body = """
      %tid = rocdl.workitem.id.x : i32
      %zero16 = llvm.mlir.constant(0 : i16) : i16
      %zero = llvm.mlir.constant(0 : i32) : i32
      %flags = llvm.mlir.constant(159744 : i32) : i32
      %bytes = llvm.mlir.constant(8 : i64) : i64
      %rsrc = rocdl.make.buffer.rsrc %arg0, %zero16, %bytes, %flags : <1> to <8>
      %four = llvm.mlir.constant(4 : i32) : i32
      %cell = llvm.urem %tid, %four : i32
      %at = llvm.mul %cell, %four : i32
      %one = llvm.mlir.constant(1.0 : f32) : f32
      rocdl.raw.ptr.buffer.atomic.fadd %one, %rsrc, %at, %zero, 0 : f32"""
    out = torch.zeros(4)
    run_module("gfx950", module_text(body, 1, LANES), [out])
    assert out.tolist() == [32.0, 32.0, 0.0, 0.0]
