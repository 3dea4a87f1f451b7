"""The emulator's fragment tables against the thread-value layouts of FlyDSL's own atoms."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx
import numpy as np
import pytest

from op_tests.emulator import emulated
from op_tests.emulator.ops_matrix import accumulators as mfma_accumulators
from op_tests.emulator.ops_matrix import rows_by_group, rows_by_run
from op_tests.emulator.ops_wmma import accumulators as wmma_accumulators
from op_tests.emulator.ops_wmma import by_runs

pytestmark = pytest.mark.emulated


def _numbers(text: str) -> object:
    """Nested tuples of integers."""
    return ast.literal_eval(text)


def _offsets(shape: object, stride: object) -> np.ndarray:
    """Offsets of a layout, first mode fastest, as a flat array."""
    if isinstance(shape, int):
        return np.arange(shape) * stride
    total = np.zeros(1, np.int64)
    for one, step in zip(shape, stride, strict=True):
        part = _offsets(one, step)
        total = (part[:, None] + total[None, :]).reshape(-1)
    return total


def _thread_values(text: str) -> np.ndarray:
    """(threads, values) offsets of a printed layout ``!fly.layout<(T,V):(t,v)>``."""
    shape, stride = re.search(r"<(.*):(.*)>", text).groups()
    (threads, values), (by_thread, by_value) = _numbers(shape), _numbers(stride)
    return _offsets(threads, by_thread)[:, None] + _offsets(values, by_value)[None, :]


def _layouts(arch: str, atom: Callable[[], object]) -> list[np.ndarray]:
    """(threads, values) offsets of A, B and C; an operand's offset is row + rows * column."""
    found: list[np.ndarray] = []

    @flyc.kernel(known_block_size=[64, 1, 1])
    def nothing(a: fx.Int64):
        pass

    @flyc.jit
    def launch_nothing(a: fx.Int64, stream: fx.Stream):
        tiled = fx.make_tiled_mma(fx.make_mma_atom(atom()), fx.make_layout((1, 1, 1), (0, 0, 0)))
        for layout in (tiled.tv_layout_A_tiled, tiled.tv_layout_B_tiled, tiled.tv_layout_C_tiled):
            found.append(_thread_values(str(layout.type)))
        nothing(a).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    with emulated(arch):
        launch_nothing(0, None)
    return found


def _wave(width: int) -> SimpleNamespace:
    return SimpleNamespace(count=1, width=width, spread=lambda x: x)


def _check(arrange: Callable[[np.ndarray], np.ndarray], layout: np.ndarray) -> None:
    """``arrange`` must put the value that the layout calls offset o at row + rows * column = o."""
    placed = arrange(layout.astype(np.float64))[0]
    rows = placed.shape[0]
    assert np.array_equal(placed, np.arange(rows)[:, None] + rows * np.arange(placed.shape[1]))


MFMA = [
    ("gfx942", 16, lambda: fx.rocdl.MFMA(16, 16, 16, fx.BFloat16)),
    ("gfx942", 32, lambda: fx.rocdl.MFMA(32, 32, 8, fx.Float16)),
    ("gfx942", 16, lambda: fx.rocdl.MFMA(16, 16, 32, fx.Float8E4M3FNUZ)),
    ("gfx950", 16, lambda: fx.rocdl.MFMA(16, 16, 32, fx.BFloat16)),
    ("gfx950", 32, lambda: fx.rocdl.MFMA(32, 32, 16, fx.BFloat16)),
    ("gfx950", 16, lambda: fx.rocdl.cdna4.MFMA_Scale(16, 16, 128, fx.Float4E2M1FN)),
    ("gfx950", 32, lambda: fx.rocdl.cdna4.MFMA_Scale(32, 32, 64, fx.Float4E2M1FN)),
]


@pytest.mark.parametrize("number", range(len(MFMA)))
def test_mfma_fragments_are_those_of_the_atom(number: int) -> None:
    arch, size, atom = MFMA[number]
    a, b, c = _layouts(arch, atom)
    wave = _wave(64)
    _check(lambda x: rows_by_group(wave, x, size), a)
    _check(lambda x: rows_by_group(wave, x, size), b)
    _check(lambda x: mfma_accumulators(wave, x, size), c)


@pytest.mark.parametrize(("size", "depth"), [(16, 128), (32, 64)])
def test_scaled_8_bit_operands_only_reorder_k_within_the_atom(size: int, depth: int) -> None:
    """The atom gives a lane 32 consecutive k; the hardware's two runs of 16 reorder k, no more."""
    a, b, _ = _layouts(
        "gfx950", lambda: fx.rocdl.cdna4.MFMA_Scale(size, size, depth, fx.Float8E4M3FN)
    )
    assert np.array_equal(a, b)
    placed = rows_by_run(_wave(64), a.astype(np.float64), size)[0]
    columns = placed // size
    assert (placed % size == np.arange(size)[:, None]).all()
    assert (columns == columns[:1]).all()
    assert sorted(columns[0]) == list(range(depth))


WMMA = [
    (8, lambda: fx.rocdl.WMMA(16, 16, 32, fx.BFloat16)),
    (2, lambda: fx.rocdl.WMMA(16, 16, 4, fx.Float32)),
    (8, lambda: fx.rocdl.WMMA(16, 16, 64, fx.Float8E4M3FN)),
    (32, lambda: fx.rocdl.cdna5.WMMAScale(16, 16, 128, fx.Float6E2M3FN)),
    (32, lambda: fx.rocdl.cdna5.WMMAScale(16, 16, 128, fx.Float4E2M1FN)),
]


@pytest.mark.parametrize("number", range(len(WMMA)))
def test_wmma_fragments_are_those_of_the_atom(number: int) -> None:
    run, atom = WMMA[number]
    a, b, c = _layouts("gfx1250", atom)
    wave = _wave(32)
    _check(lambda x: by_runs(wave, x, run), a)
    _check(lambda x: by_runs(wave, x, run), b)
    _check(lambda x: wmma_accumulators(wave, x), c)
