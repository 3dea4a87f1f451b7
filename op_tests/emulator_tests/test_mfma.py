"""Matrix operations against a scalar reference that knows only the ISA manuals' tables."""

from __future__ import annotations

import numpy as np
import pytest

from .scalar import decode_float, random_codes
from .snippets import apply_operation

pytestmark = pytest.mark.emulated

WAVES = 2


def _matrix(raw: np.ndarray, fmt: str, rows: int, depth: int, place) -> np.ndarray:
    """One wave's operand, rows x depth, from raw registers; ``place(lane, i)`` is (row, k)."""
    values = np.full((rows, depth), np.nan)
    for lane in range(64):
        for i, number in enumerate(decode_float(raw[lane], fmt)[: rows * depth // 64]):
            values[place(lane, i)] = number
    return values


def _result_place(size: int, lane: int, i: int) -> tuple[int, int]:
    if size == 16:
        return 4 * (lane // 16) + i, lane % 16
    return 8 * (i // 4) + 4 * (lane // 32) + i % 4, lane % 32


def _expected(a: np.ndarray, b: np.ndarray, c: np.ndarray, size: int) -> np.ndarray:
    """Result registers of one wave: (64, size * size / 64)."""
    out = np.zeros((64, size * size // 64))
    for lane in range(64):
        for i in range(out.shape[1]):
            m, n = _result_place(size, lane, i)
            out[lane, i] = c[lane, i] + sum(
                float(x) * float(y) for x, y in zip(a[m], b[n], strict=True)
            )
    return out


PLAIN = [
    ("gfx950", "f32.16x16x32.bf16", "bf16", "vector<8xbf16>"),
    ("gfx950", "f32.16x16x32.f16", "f16", "vector<8xf16>"),
    ("gfx950", "f32.32x32x16.bf16", "bf16", "vector<8xbf16>"),
    ("gfx950", "f32.32x32x16.f16", "f16", "vector<8xf16>"),
    ("gfx942", "f32.16x16x16bf16.1k", "bf16", "vector<4xi16>"),
    ("gfx942", "f32.16x16x16f16", "f16", "vector<4xf16>"),
    ("gfx942", "f32.32x32x8bf16.1k", "bf16", "vector<4xi16>"),
    ("gfx942", "f32.32x32x8f16", "f16", "vector<4xf16>"),
    ("gfx942", "f32.16x16x4f32", "f32", "f32"),
    ("gfx942", "f32.16x16x32.fp8.fp8", "e4m3fnuz", "i64"),
    ("gfx942", "f32.16x16x32.bf8.bf8", "e5m2fnuz", "i64"),
    ("gfx942", "f32.32x32x16.fp8.fp8", "e4m3fnuz", "i64"),
    ("gfx950", "f32.16x16x32.fp8.fp8", "e4m3", "i64"),
    ("gfx950", "f32.16x16x32.bf8.bf8", "e5m2", "i64"),
    ("gfx950", "f32.32x32x16.fp8.fp8", "e4m3", "i64"),
    ("gfx942", "i32.16x16x32.i8", "i8", "i64"),
    ("gfx942", "i32.32x32x16.i8", "i8", "i64"),
    ("gfx950", "i32.16x16x64.i8", "i8", "vector<4xi32>"),
    ("gfx950", "i32.32x32x32.i8", "i8", "vector<4xi32>"),
]


@pytest.mark.parametrize(
    ("arch", "form", "fmt", "kind"), PLAIN, ids=[f"{p[0]}-{p[1]}" for p in PLAIN]
)
def test_mfma_matches_the_scalar_reference(arch: str, form: str, fmt: str, kind: str) -> None:
    rng = np.random.default_rng(1)
    size = int(form.split(".")[1].split("x")[0])
    integer = form.startswith("i32")
    count = size * size // 64
    operands = [(kind, random_codes(rng, fmt, WAVES * 64, kind)) for _ in range(2)]
    c = rng.integers(-9, 9, (WAVES * 64, count)).astype(np.int32 if integer else np.float32)
    element = "i32" if integer else "f32"
    operands.append((f"vector<{count}x{element}>", c.view(np.uint8)))
    types = f"({kind}, {kind}, vector<{count}x{element}>) -> vector<{count}x{element}>"
    text = f"rocdl.mfma.{form} {{0}}, {{1}}, {{2}}, 0, 0, none : {types}"
    got = apply_operation(arch, text, operands, f"vector<{count}x{element}>", WAVES)
    got = got.view(c.dtype).astype(np.float64)
    depth = len(decode_float(operands[0][1][0], fmt)) * 64 // size
    each = depth * size // 64

    def place(lane: int, i: int) -> tuple[int, int]:
        return lane % size, each * (lane // size) + i

    for wave in range(WAVES):
        rows = slice(64 * wave, 64 * wave + 64)
        a, b = (_matrix(raw[rows], fmt, size, depth, place) for _, raw in operands[:2])
        np.testing.assert_allclose(got[rows], _expected(a, b, c[rows], size), rtol=1e-5, atol=1e-4)


FORMATS = {
    "fp8_e4m3": ("e4m3", "vector<8xi32>"),
    "fp8_e5m2": ("e5m2", "vector<8xi32>"),
    "fp6_e2m3": ("e2m3", "vector<6xi32>"),
    "fp6_e3m2": ("e3m2", "vector<6xi32>"),
    "fp4_e2m1": ("e2m1", "vector<4xi32>"),
}
PAIRS = [(name, name) for name in FORMATS] + [("fp8_e4m3", "fp4_e2m1"), ("fp4_e2m1", "fp8_e5m2")]


def _scaled_place(name: str, size: int):
    groups = 64 // size

    def runs(lane: int, i: int) -> tuple[int, int]:
        return lane % size, 16 * ((i // 16) * groups + lane // size) + i % 16

    def straight(lane: int, i: int) -> tuple[int, int]:
        return lane % size, 32 * (lane // size) + i

    return runs if name.startswith("fp8") else straight


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize(("left", "right"), PAIRS)
@pytest.mark.parametrize("select", [(0, 0), (1, 3), (2, 1)])
def test_scaled_mfma_matches_the_scalar_reference(
    size: int, left: str, right: str, select: tuple[int, int]
) -> None:
    rng = np.random.default_rng(2)
    depth, count = 2048 // size, size * size // 64
    raws = [random_codes(rng, FORMATS[n][0], WAVES * 64, FORMATS[n][1]) for n in (left, right)]
    c = rng.integers(-9, 9, (WAVES * 64, count)).astype(np.float32)
    # Every lane and byte differs, so a wrong lane or a wrong byte is a wrong result.
    scales = [rng.integers(118, 136, (WAVES * 64, 4)).astype(np.uint8) for _ in range(2)]
    kinds = [FORMATS[left][1], FORMATS[right][1], f"vector<{count}xf32>", "i32", "i32"]
    text = (
        f"rocdl.mfma.scale.f32.{size}x{size}x{depth}.f8f6f4 {{0}}, {{1}}, {{2}}, {left}, {right}, "
        f"{select[0]}, {{3}}, {select[1]}, {{4}} : ({', '.join(kinds)}) -> vector<{count}xf32>"
    )
    operands = list(zip(kinds, [*raws, c.view(np.uint8), *scales], strict=True))
    got = apply_operation("gfx950", text, operands, kinds[2], WAVES).view(np.float32)
    for wave in range(WAVES):
        rows = slice(64 * wave, 64 * wave + 64)
        sides = []
        for name, raw, scale, byte in zip((left, right), raws, scales, select, strict=True):
            place = _scaled_place(name, size)
            values = _matrix(raw[rows], FORMATS[name][0], size, depth, place)
            for row in range(size):
                for block in range(depth // 32):
                    code = int(scale[rows][size * block + row, byte])
                    values[row, 32 * block : 32 * block + 32] *= 2.0 ** (code - 127)
            sides.append(values)
        want = _expected(*sides, c[rows], size)
        np.testing.assert_allclose(got[rows], want, rtol=2e-5, atol=1e-4 * np.abs(want).max())


def test_scale_255_is_nan() -> None:
    ones = np.full((64, 16), 0x22, np.uint8)
    c = np.zeros((64, 16), np.uint8)
    scale = np.full((64, 4), 127, np.uint8)
    broken = scale.copy()
    broken[5, 0] = 255  # row 5 of K block 0
    kinds = ["vector<4xi32>", "vector<4xi32>", "vector<4xf32>", "i32", "i32"]
    text = (
        "rocdl.mfma.scale.f32.16x16x128.f8f6f4 {0}, {1}, {2}, fp4_e2m1, fp4_e2m1, 0, {3}, 0, {4}"
        f" : ({', '.join(kinds)}) -> vector<4xf32>"
    )
    operands = list(zip(kinds, [ones, ones, c, broken, scale], strict=True))
    got = apply_operation("gfx950", text, operands, kinds[2], 1).view(np.float32)
    bad = {
        _result_place(16, lane, i)[0] for lane, i in zip(*np.nonzero(np.isnan(got)), strict=True)
    }
    assert bad == {5}
    assert (got[~np.isnan(got)] == 128).all()
