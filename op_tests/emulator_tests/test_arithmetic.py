"""Integer and float operations against Python's own arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from .snippets import apply_operation

pytestmark = pytest.mark.emulated

LANES = 128
EDGES = [0, 1, -1, 2, 7, 31, 32, 63, -(1 << 31), (1 << 31) - 1]


def _words(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    words = rng.integers(-(1 << 31), 1 << 31, LANES, dtype=np.int64)
    words[: len(EDGES)] = EDGES
    words[64:96] >>= 25
    rng.shuffle(words)
    return words.astype(np.int32)


def _signed(value: int, bits: int = 32) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _u(value: int) -> int:
    return value & 0xFFFFFFFF


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


INTEGER: dict[str, tuple[Callable[[int, int], int], Callable[[int, int], bool]]] = {
    "llvm.add {0}, {1} : i32": (lambda a, b: a + b, lambda a, b: True),
    "llvm.mul {0}, {1} : i32": (lambda a, b: a * b, lambda a, b: True),
    "llvm.sdiv {0}, {1} : i32": (_quotient, lambda a, b: b not in (0, -1)),
    "llvm.srem {0}, {1} : i32": (
        lambda a, b: a - b * _quotient(a, b),
        lambda a, b: b not in (0, -1),
    ),
    "llvm.udiv {0}, {1} : i32": (lambda a, b: _u(a) // _u(b), lambda a, b: b != 0),
    "llvm.urem {0}, {1} : i32": (lambda a, b: _u(a) % _u(b), lambda a, b: b != 0),
    "llvm.shl {0}, {1} : i32": (lambda a, b: a << b, lambda a, b: 0 <= b < 32),
    "llvm.lshr {0}, {1} : i32": (lambda a, b: _u(a) >> b, lambda a, b: 0 <= b < 32),
    "llvm.ashr {0}, {1} : i32": (lambda a, b: a >> b, lambda a, b: 0 <= b < 32),
    "llvm.intr.umax({0}, {1}) : (i32, i32) -> i32": (
        lambda a, b: max(_u(a), _u(b)),
        lambda a, b: True,
    ),
    "llvm.intr.smin({0}, {1}) : (i32, i32) -> i32": (min, lambda a, b: True),
    "llvm.intr.usub.sat({0}, {1}) : (i32, i32) -> i32": (
        lambda a, b: max(_u(a) - _u(b), 0),
        lambda a, b: True,
    ),
    "llvm.intr.fshr({0}, {1}, {1}) : (i32, i32, i32) -> i32": (
        lambda a, b: ((_u(a) << 32 | _u(b)) >> (_u(b) % 32)),
        lambda a, b: True,
    ),
    "llvm.intr.fshl({0}, {1}, {1}) : (i32, i32, i32) -> i32": (
        lambda a, b: ((_u(a) << 32 | _u(b)) << (_u(b) % 32)) >> 32,
        lambda a, b: True,
    ),
}


@pytest.mark.parametrize("text", INTEGER, ids=[t.split(" ")[0].split("(")[0] for t in INTEGER])
def test_integer_operations(text: str) -> None:
    function, defined = INTEGER[text]
    a, b = _words(1), _words(2)
    operands = [("i32", x[:, None].view(np.uint8)) for x in (a, b)]
    got = apply_operation("gfx950", text, operands, "i32").view(np.int32)[:, 0]
    for x, y, r in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        if defined(x, y):
            assert r == _signed(function(x, y)), (x, y)


@pytest.mark.parametrize("predicate", ["slt", "sge", "ult", "uge", "ugt", "eq"])
def test_comparisons_respect_signedness(predicate: str) -> None:
    a, b = _words(3), _words(4)
    b[::5] = a[::5]
    operands = [("i32", x[:, None].view(np.uint8)) for x in (a, b)]
    text = "llvm.zext %c : i1 to i32"
    before = f'%c = llvm.icmp "{predicate}" {{0}}, {{1}} : i32\n%r'
    got = apply_operation("gfx950", text, operands, "i32", before=before).view(np.int32)[:, 0]
    sign = _u if predicate[0] == "u" else int
    compare = {
        "lt": int.__lt__,
        "ge": int.__ge__,
        "gt": int.__gt__,
        "eq": int.__eq__,
        "q": int.__eq__,
    }
    function = compare[predicate[1:]]
    assert got.tolist() == [
        int(function(sign(x), sign(y))) for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]


def _floats(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(LANES).astype(np.float32)
    values[:6] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0]
    rng.shuffle(values)
    return values


def _run_float(
    text: str, *values: np.ndarray, before: str = "%r", result: str = "f32"
) -> np.ndarray:
    operands = [("f32", x[:, None].view(np.uint8)) for x in values]
    return apply_operation("gfx950", text, operands, result, before=before)


@pytest.mark.parametrize(("name", "pick"), [("maxnum", max), ("minnum", min)])
def test_maxnum_and_minnum_ignore_nan(name: str, pick: Callable) -> None:
    a, b = _floats(5), _floats(6)
    got = _run_float(f"llvm.intr.{name}({{0}}, {{1}}) : (f32, f32) -> f32", a, b).view(np.float32)
    for x, y, r in zip(a.tolist(), b.tolist(), got[:, 0].tolist(), strict=True):
        if math.isnan(x) or math.isnan(y):
            other = y if math.isnan(x) else x
            assert r == other or (math.isnan(r) and math.isnan(other))
        else:
            assert r == pick(x, y)


@pytest.mark.parametrize("predicate", ["olt", "ult", "une", "one", "ord", "uno", "oge"])
def test_float_comparisons_treat_nan_as_the_predicate_says(predicate: str) -> None:
    a, b = _floats(7), _floats(8)
    b[::4] = a[::4]
    before = f'%c = llvm.fcmp "{predicate}" {{0}}, {{1}} : f32\n%r'
    got = _run_float("llvm.zext %c : i1 to i32", a, b, before=before, result="i32").view(np.int32)
    plain = {"lt": float.__lt__, "ne": float.__ne__, "ge": float.__ge__}
    for x, y, r in zip(a.tolist(), b.tolist(), got[:, 0].tolist(), strict=True):
        unordered = math.isnan(x) or math.isnan(y)
        if predicate in ("ord", "uno"):
            want = unordered == (predicate == "uno")
        else:
            want = predicate[0] == "u" if unordered else plain[predicate[1:]](x, y)
        assert r == int(want), (x, y)


def test_bf16_rounds_to_nearest_even_and_keeps_nan() -> None:
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7FC00001, 0xFF800001], np.uint32
    )
    values = np.resize(bits, LANES).view(np.float32)
    got = _run_float("llvm.fptrunc {0} : f32 to bf16", values, result="bf16").view(np.uint16)[:6, 0]
    assert got[:4].tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80]
    assert all((int(g) & 0x7F80) == 0x7F80 and int(g) & 0x7F for g in got[4:])


def test_float_to_integer_saturates() -> None:
    values = np.resize(np.array([3e9, -3e9, np.nan, 1.9, -1.9, 2147483520.0], np.float32), LANES)
    got = _run_float("llvm.fptosi {0} : f32 to i32", values, result="i32").view(np.int32)[:6, 0]
    assert got.tolist() == [(1 << 31) - 1, -(1 << 31), 0, 1, -1, 2147483520]


def test_fma_rounds_once() -> None:
    a = np.full(LANES, 1 + 2.0**-12, np.float32)
    c = np.full(LANES, -1 - 2.0**-11, np.float32)
    got = _run_float("llvm.intr.fma({0}, {0}, {1}) : (f32, f32, f32) -> f32", a, c).view(np.float32)
    assert (got == np.float32(2.0**-24)).all()


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("llvm.intr.ctpop({0}) : (i32) -> i32", lambda x: bin(_u(x)).count("1")),
        (
            '"llvm.intr.ctlz"({0}) <{{is_zero_poison = false}}> : (i32) -> i32',
            lambda x: 32 - _u(x).bit_length(),
        ),
        (
            '"llvm.intr.cttz"({0}) <{{is_zero_poison = false}}> : (i32) -> i32',
            lambda x: 32 if x == 0 else (x & -x).bit_length() - 1,
        ),
        ("llvm.intr.bitreverse({0}) : (i32) -> i32", lambda x: int(f"{_u(x):032b}"[::-1], 2)),
    ],
)
def test_bit_counts(text: str, function: Callable[[int], int]) -> None:
    a = _words(9)
    got = apply_operation("gfx950", text, [("i32", a[:, None].view(np.uint8))], "i32")
    assert got.view(np.int32)[:, 0].tolist() == [_signed(function(x)) for x in a.tolist()]
