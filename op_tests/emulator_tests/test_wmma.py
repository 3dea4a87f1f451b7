"""gfx1250 matrix operations against a scalar reference."""

from __future__ import annotations

import numpy as np
import pytest

from .scalar import decode_float, random_codes
from .snippets import apply_operation

pytestmark = pytest.mark.emulated

WAVES = 3


def _row_k(lane: int, i: int, run: int) -> tuple[int, int]:
    return lane % 16, run * (2 * (i // run) + lane // 16) + i % run


def _matrix(raw: np.ndarray, fmt: str, rows: int, depth: int, run: int) -> np.ndarray:
    values = np.full((rows, depth), np.nan)
    for lane in range(32):
        for i, number in enumerate(decode_float(raw[lane], fmt)[: rows * depth // 32]):
            place = (lane, i) if rows == 32 else _row_k(lane, i, run)
            values[place] = number
    return values


def _expected(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    out = np.zeros(c.shape)
    for lane in range(32):
        for i in range(c.shape[1]):
            m, n = c.shape[1] * (lane // 16) + i, lane % 16
            out[lane, i] = c[lane, i] + sum(
                float(x) * float(y) for x, y in zip(a[m], b[n], strict=True)
            )
    return out


PLAIN = [
    ("f32.16x16x32.bf16", "bf16", "vector<16xbf16>", 8, "f32"),
    ("f32.16x16x32.f16", "f16", "vector<16xf16>", 8, "f32"),
    ("f32.16x16x4.f32", "f32", "vector<2xf32>", 2, "f32"),
    ("f32.16x16x64.fp8_fp8", "e4m3", "vector<8xi32>", 8, "f32"),
    ("f32.16x16x128.bf8_bf8", "e5m2", "vector<16xi32>", 8, "f32"),
    ("i32.16x16x64.iu8", "i8", "vector<8xi32>", 8, "i32"),
]


@pytest.mark.parametrize(
    ("form", "fmt", "kind", "run", "element"), PLAIN, ids=[p[0] for p in PLAIN]
)
def test_wmma_matches_the_scalar_reference(
    form: str, fmt: str, kind: str, run: int, element: str
) -> None:
    rng = np.random.default_rng(3)
    depth = int(form.split(".")[1].split("x")[2])
    raws = [random_codes(rng, fmt, WAVES * 32, kind) for _ in range(2)]
    c = rng.integers(-9, 9, (WAVES * 32, 8)).astype(np.int32 if element == "i32" else np.float32)
    result = f"vector<8x{element}>"
    text = f"rocdl.wmma.{form} {{0}}, {{1}}, {{2}}"
    text += " {{signA = true, signB = true}}" if element == "i32" else ", modC = none"
    text += f" : ({kind}, {kind}, {result}) -> {result}"
    operands = [(kind, raws[0]), (kind, raws[1]), (result, c.view(np.uint8))]
    got = apply_operation("gfx1250", text, operands, result, WAVES).view(c.dtype)
    for wave in range(WAVES):
        rows = slice(32 * wave, 32 * wave + 32)
        a, b = (_matrix(raw[rows], fmt, 16, depth, run) for raw in raws)
        np.testing.assert_allclose(got[rows], _expected(a, b, c[rows]), rtol=1e-5, atol=1e-3)


FORMATS = {
    "fp8_e4m3": ("e4m3", "vector<16xi32>", 16),
    "fp8_e5m2": ("e5m2", "vector<16xi32>", 16),
    "fp6_e2m3": ("e2m3", "vector<12xi32>", 32),
    "fp6_e3m2": ("e3m2", "vector<12xi32>", 32),
    "fp4_e2m1": ("e2m1", "vector<8xi32>", 32),
}
PAIRS = [(name, name) for name in FORMATS] + [("fp8_e4m3", "fp4_e2m1"), ("fp4_e2m1", "fp8_e5m2")]


def _scaled(values: np.ndarray, scale: np.ndarray, first: int) -> np.ndarray:
    block = values.shape[1] // scale.shape[1]
    for row in range(len(values)):
        for n in range(scale.shape[1]):
            factor = 2.0 ** (int(scale[first + row, n]) - 127)
            values[row, block * n : block * n + block] *= factor
    return values


@pytest.mark.parametrize(("left", "right"), PAIRS)
@pytest.mark.parametrize("second", [(0, 0), (1, 0), (0, 1)])
@pytest.mark.parametrize("blocks", [4, 8])
def test_scaled_wmma_matches_the_scalar_reference(
    left: str, right: str, second: tuple[int, int], blocks: int
) -> None:
    rng = np.random.default_rng(4)
    raws = [random_codes(rng, FORMATS[n][0], WAVES * 32, FORMATS[n][1]) for n in (left, right)]
    c = rng.integers(-9, 9, (WAVES * 32, 8)).astype(np.float32)
    scales = [rng.integers(118, 136, (WAVES * 32, blocks)).astype(np.uint8) for _ in range(2)]
    scale_kind = "i32" if blocks == 4 else "i64"
    kinds = [FORMATS[left][1], FORMATS[right][1], "vector<8xf32>", scale_kind, scale_kind]
    name = "scale" if blocks == 4 else "scale16"
    text = (
        f"rocdl.wmma.{name}.f32.16x16x128.f8f6f4 {{0}}, {{1}}, {{2}}, {{3}}, {{4}}, "
        f"fmtA = {left}, fmtB = {right}, modC = none, scaleAType = row{second[0]}, "
        f"fmtScaleA = e8, scaleBType = row{second[1]}, fmtScaleB = e8 "
        f": ({', '.join(kinds)}) -> vector<8xf32>"
    )
    operands = list(zip(kinds, [*raws, c.view(np.uint8), *scales], strict=True))
    got = apply_operation("gfx1250", text, operands, kinds[2], WAVES).view(np.float32)
    for wave in range(WAVES):
        rows = slice(32 * wave, 32 * wave + 32)
        sides = []
        for fmt, raw, scale, row in zip((left, right), raws, scales, second, strict=True):
            values = _matrix(raw[rows], FORMATS[fmt][0], 16, 128, FORMATS[fmt][2])
            sides.append(_scaled(values, scale[rows], 16 * row))
        want = _expected(*sides, c[rows])
        np.testing.assert_allclose(got[rows], want, rtol=2e-5, atol=1e-4 * np.abs(want).max())


def test_scaled_wmma_of_32_rows_matches_the_scalar_reference() -> None:
    rng = np.random.default_rng(5)
    kinds = ["vector<16xi32>", "vector<8xi32>", "vector<16xf32>", "i32", "i32"]
    raws = [random_codes(rng, "e2m1", WAVES * 32, kind) for kind in kinds[:2]]
    c = rng.integers(-9, 9, (WAVES * 32, 16)).astype(np.float32)
    scales = [rng.integers(118, 136, (WAVES * 32, 4)).astype(np.uint8) for _ in range(2)]
    text = (
        "rocdl.wmma.scale.f32.32x16x128.f4 {0}, {1}, {2}, {3}, {4}, modC = none, "
        "scaleAType = row0, fmtScaleA = e8, scaleBType = row1, fmtScaleB = e8 "
        f": ({', '.join(kinds)}) -> vector<16xf32>"
    )
    operands = list(zip(kinds, [*raws, c.view(np.uint8), *scales], strict=True))
    got = apply_operation("gfx1250", text, operands, kinds[2], WAVES).view(np.float32)
    for wave in range(WAVES):
        rows = slice(32 * wave, 32 * wave + 32)
        a = _scaled(_matrix(raws[0][rows], "e2m1", 32, 128, 32), scales[0][rows], 0)
        b = _scaled(_matrix(raws[1][rows], "e2m1", 16, 128, 32), scales[1][rows], 16)
        want = _expected(a, b, c[rows])
        np.testing.assert_allclose(got[rows], want, rtol=2e-5, atol=1e-4 * np.abs(want).max())
