"""gfx1250 tensor data mover: strides, edges, padding, gathering, waits and clusters."""

from __future__ import annotations

import pytest
import torch

from op_tests.emulator import EmulationError

from .snippets import module_text, run_module

pytestmark = pytest.mark.emulated


def _vector(name: str, words: list[int | str]) -> str:
    """Text that builds ``%name``, a vector of i32 from constants and value names."""
    size = len(words)
    lines = [f"%{name}_0 = llvm.mlir.poison : vector<{size}xi32>"]
    for n, word in enumerate(words):
        value = word
        if isinstance(word, int):
            value = f"%{name}_w{n}"
            signed = word - (1 << 32) if word >> 31 else word
            lines.append(f"{value} = llvm.mlir.constant({signed} : i32) : i32")
        lines.append(f"%{name}_i{n} = llvm.mlir.constant({n} : i32) : i32")
        result = f"%{name}_{n + 1}" if n + 1 < size else f"%{name}"
        lines.append(
            f"{result} = llvm.insertelement {value}, %{name}_{n}[%{name}_i{n} : i32] "
            f": vector<{size}xi32>"
        )
    return "\n".join(lines)


def _descriptor(
    tile: tuple[int, int],
    extent: tuple[int, int],
    stride: int,
    size_code: int = 1,
    pad: tuple[int, int] | None = None,
    mask: int = 0,
    gather: list[int] | None = None,
) -> str:
    """Groups of a transfer between %arg0 and LDS byte 0; tile and extent are (rows, columns)."""
    word0 = mask | size_code << 16
    if pad:
        word0 |= 1 << 20 | pad[0] << 22 | pad[1] << 25
    first = 1 | (3 << 30 if gather else 0)
    group1 = [
        word0,
        (extent[1] & 0xFFFF) << 16,
        (extent[1] >> 16) | (extent[0] & 0xFFFF) << 16,
        (extent[0] >> 16) | tile[1] << 16,
        tile[0],
        stride,
        0,
        0,
    ]
    rows = (gather or []) + [0] * (8 - len(gather or []))
    address = """
      %whole = llvm.ptrtoint %arg0 : !llvm.ptr<1> to i64
      %c32 = llvm.mlir.constant(32 : i64) : i64
      %low = llvm.trunc %whole : i64 to i32
      %shifted = llvm.lshr %whole, %c32 : i64
      %high = llvm.trunc %shifted : i64 to i32"""
    return "\n".join(
        [
            address,
            _vector("g0", [first, 0, "%low", "%high"]),
            _vector("g1", group1),
            _vector("g2", rows[:4]),
            _vector("g3", rows[4:]),
            _vector("g4", [0] * 8),
        ]
    )


_OUT = """
      %tid = rocdl.workitem.id.x : i32
      %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
      %from = llvm.getelementptr %lds[%tid] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i32
      %to = llvm.getelementptr %arg1[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
      %word = llvm.load %from : !llvm.ptr<3> -> i32
      llvm.store %word, %to : i32, !llvm.ptr<1>"""
_LOAD = "rocdl.tensor.load.to.lds %g0, %g1, %g2, %g3, %g4, 0 : vector<4xi32>, vector<8xi32>"
_WAIT = "rocdl.s.wait.tensorcnt 0"


def _load(
    descriptor: str, x: torch.Tensor, words: int, wait: str = _WAIT, **options
) -> torch.Tensor:
    """The first ``words`` i32 of LDS after a transfer by one wave."""
    out = torch.full((words,), -1, dtype=torch.int32)
    body = "\n".join([descriptor, _LOAD, wait, _OUT])
    run_module("gfx1250", module_text(body, 2, words, lds=4 * words), [x, out], **options)
    return out


def _tile() -> torch.Tensor:
    return torch.arange(1, 16 * 40 + 1, dtype=torch.int16).view(16, 40)


@pytest.mark.parametrize("order", ["lockstep", "random"])
def test_a_strided_tile_is_packed(order: str) -> None:
    x = _tile()
    out = _load(_descriptor((4, 16), (16, 40), 40), x, 32, order=order)
    assert torch.equal(out.view(torch.int16).view(4, 16), x[:4, :16])


def test_what_lies_outside_the_tensor_is_zero() -> None:
    x = _tile()
    out = _load(_descriptor((4, 16), (3, 10), 40), x, 32).view(torch.int16).view(4, 16)
    want = torch.zeros(4, 16, dtype=torch.int16)
    want[:3, :10] = x[:3, :10]
    assert torch.equal(out, want)


def test_padding_spreads_rows() -> None:
    """Every 8 dwords (code 2) are followed by 2 dwords (code 1) that are not written."""
    x = _tile()
    out = _load(_descriptor((3, 16), (16, 40), 40, pad=(2, 1)), x, 32)
    rows = out[:30].view(3, 10)[:, :8].contiguous().view(torch.int16).view(3, 16)
    assert torch.equal(rows, x[:3, :16])


def test_gathered_rows_come_in_index_order() -> None:
    x = _tile()
    out = _load(_descriptor((3, 16), (16, 40), 40, gather=[9, 2, 15]), x, 32)
    assert torch.equal(out.view(torch.int16).view(-1, 16)[:3], x[[9, 2, 15], :16])


def test_gathered_rows_beyond_the_tensor_are_zero() -> None:
    x = _tile()
    out = _load(_descriptor((2, 16), (10, 40), 40, gather=[3, 10]), x, 32)
    got = out.view(torch.int16).view(-1, 16)
    assert torch.equal(got[0], x[3, :16])
    assert got[1].eq(0).all()


def test_a_missing_tensor_wait_fails_in_random_order() -> None:
    x = _tile()
    for seed in range(3):
        out = _load(_descriptor((4, 16), (16, 40), 40), x, 32, wait="", order="random", seed=seed)
        assert not torch.equal(out.view(torch.int16).view(4, 16), x[:4, :16])


def test_a_transfer_past_the_tensors_storage_is_an_error() -> None:
    with pytest.raises(EmulationError, match="rocdl.tensor.load.to.lds.*past the end of tensor"):
        _load(_descriptor((4, 16), (16, 40), 40), _tile()[:2].clone(), 32)


def test_a_store_writes_only_inside_the_tensor() -> None:
    y = torch.full((4, 20), -1, dtype=torch.int16)
    body = "\n".join(
        [
            """
      %tid = rocdl.workitem.id.x : i32
      %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
      %to = llvm.getelementptr %lds[%tid] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i32
      llvm.store %tid, %to : i32, !llvm.ptr<3>""",
            _descriptor((4, 16), (3, 10), 20),
            _LOAD.replace("load.to.lds", "store.from.lds"),
            _WAIT,
        ]
    )
    run_module("gfx1250", module_text(body, 1, 32, lds=128), [y])
    packed = torch.arange(32, dtype=torch.int32).view(torch.int16).view(4, 16)
    want = torch.full((4, 20), -1, dtype=torch.int16)
    want[:3, :10] = packed[:3, :10]
    assert torch.equal(y, want)
