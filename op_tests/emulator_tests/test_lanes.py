"""Lane exchange, transposing reads and number conversions, one operation at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from .scalar import small_float
from .snippets import apply_operation, module_text, run_module

pytestmark = pytest.mark.emulated

LANES = 128
VALUES = np.arange(1000, 1000 + LANES, dtype=np.int32)


def _i32(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.int32)[:, None].view(np.uint8)


def _apply(operation: str, *operands: np.ndarray, arch: str = "gfx950") -> list[int]:
    raw = apply_operation(arch, operation, [("i32", _i32(x)) for x in operands], "i32")
    return raw.view(np.int32)[:, 0].tolist()


def _moved(source) -> list[int]:
    """Expected values when lane l of every wave reads lane ``source(l)``; None gives -5."""
    result = []
    for lane in range(LANES):
        wave, inner = lane & ~63, lane & 63
        at = source(inner)
        result.append(-5 if at is None else 1000 + wave + at)
    return result


DPP = {
    "quad_perm [1,0,3,2]": (0xB1, lambda i: i ^ 1),
    "row_shl 1": (0x101, lambda i: i + 1 if i % 16 < 15 else None),
    "row_shr 4": (0x114, lambda i: i - 4 if i % 16 >= 4 else None),
    "row_ror 8": (0x128, lambda i: i ^ 8),
    "row_ror 1": (0x121, lambda i: (i & ~15) | ((i - 1) % 16)),
    "row_mirror": (0x140, lambda i: i ^ 15),
    "row_half_mirror": (0x141, lambda i: i ^ 7),
    "row_bcast 15": (0x142, lambda i: (i & ~15) - 1 if i >= 16 else None),
    "row_newbcast 3": (0x153, lambda i: (i & ~15) + 3),
    "wave_shr 1": (0x138, lambda i: i - 1 if i else None),
}


@pytest.mark.parametrize("name", DPP)
def test_dpp_moves_lanes(name: str) -> None:
    control, source = DPP[name]
    text = (
        f'llvm.call_intrinsic "llvm.amdgcn.update.dpp.i32"({{1}}, {{0}}, %c{control}, %c15, %c15, '
        f"%false) : (i32, i32, i32, i32, i32, i1) -> i32"
    )
    constants = (
        f"%c{control} = llvm.mlir.constant({control} : i32) : i32\n"
        "%c15 = llvm.mlir.constant(15 : i32) : i32\n"
        "%false = llvm.mlir.constant(false) : i1\n%r"
    )
    got = _with_constants(text, constants, VALUES, np.full(LANES, -5))
    assert got == _moved(source)


def _with_constants(text: str, constants: str, *operands: np.ndarray) -> list[int]:
    raw = apply_operation(
        "gfx950", text, [("i32", _i32(x)) for x in operands], "i32", before=constants
    )
    return raw.view(np.int32)[:, 0].tolist()


def test_dpp_row_and_bank_masks_keep_the_old_value() -> None:
    constants = (
        "%ctl = llvm.mlir.constant(177 : i32) : i32\n"
        "%rows = llvm.mlir.constant(5 : i32) : i32\n"
        "%banks = llvm.mlir.constant(3 : i32) : i32\n"
        "%bound = llvm.mlir.constant(true) : i1\n%r"
    )
    text = (
        'llvm.call_intrinsic "llvm.amdgcn.update.dpp.i32"({1}, {0}, %ctl, %rows, %banks, %bound) '
        ": (i32, i32, i32, i32, i32, i1) -> i32"
    )
    got = _with_constants(text, constants, VALUES, np.full(LANES, -5))
    kept = [(i // 16 % 4) in (0, 2) and (i // 4 % 4) in (0, 1) for i in range(LANES)]
    assert got == [1000 + (i ^ 1) if keep else -5 for i, keep in enumerate(kept)]


def test_bpermute_reads_any_lane_of_the_wave() -> None:
    index = np.array([(7 * i) % 64 * 4 for i in range(LANES)])
    got = _apply("rocdl.ds_bpermute {1}, {0} : (i32, i32) -> i32", VALUES, index)
    assert got == [1000 + (i & ~63) + (7 * i) % 64 for i in range(LANES)]


def test_readlane_and_readfirstlane() -> None:
    got = _apply("rocdl.readlane {0}, {1} : (i32, i32) -> i32", VALUES, np.full(LANES, 9))
    assert got == [1000 + (i & ~63) + 9 for i in range(LANES)]
    got = _apply("rocdl.readfirstlane {0} : i32", VALUES)
    assert got == [1000 + (i & ~63) for i in range(LANES)]


@pytest.mark.parametrize("size", [16, 32])
def test_permlane_swap_exchanges_odd_and_even_rows(size: int) -> None:
    other = VALUES + 5000
    types = "(i32, i32) -> !llvm.struct<(i32, i32)>"
    body = f"rocdl.permlane{size}.swap {{0}}, {{1}}, false, false : {types}"
    for field in (0, 1):
        text = f"llvm.extractvalue %both[{field}] : !llvm.struct<(i32, i32)>"
        before = f"%both = {body}\n%r"
        raw = apply_operation(
            "gfx950", text, [("i32", _i32(VALUES)), ("i32", _i32(other))], "i32", before=before
        )
        got = raw.view(np.int32)[:, 0]
        for lane in range(LANES):
            odd = lane // size % 2
            if field == 0:
                want = other[lane - size] if odd else VALUES[lane]
            else:
                want = other[lane] if odd else VALUES[lane + size]
            assert got[lane] == want, (lane, field)


def test_ballot_counts_only_active_lanes() -> None:
    body = """
      %tid = rocdl.workitem.id.x : i32
      %c3 = llvm.mlir.constant(3 : i32) : i32
      %c5 = llvm.mlir.constant(5 : i32) : i32
      %zero = llvm.mlir.constant(0 : i32) : i32
      %rem3 = llvm.urem %tid, %c3 : i32
      %three = llvm.icmp "eq" %rem3, %zero : i32
      %rem5 = llvm.urem %tid, %c5 : i32
      %five = llvm.icmp "eq" %rem5, %zero : i32
      llvm.cond_br %five, ^bb1, ^bb2
    ^bb1:
      %bits = rocdl.ballot %three : i64
      %p = llvm.getelementptr %arg0[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i64
      llvm.store %bits, %p : i64, !llvm.ptr<1>
      llvm.br ^bb2
    ^bb2:"""
    out = torch.zeros(128, dtype=torch.int64)
    run_module("gfx950", module_text(body, 1, 128), [out])
    for lane in range(128):
        base = lane & ~63
        bits = sum(1 << (i - base) for i in range(base, base + 64) if i % 15 == 0)
        want = bits if lane % 5 == 0 else 0
        assert out[lane].item() & ((1 << 64) - 1) == want


@pytest.mark.parametrize(
    ("arch", "form", "bits", "elements"),
    [
        ("gfx950", "read.tr16.b64", 16, 4),
        ("gfx950", "read.tr8.b64", 8, 8),
        ("gfx950", "read.tr4.b64", 4, 16),
        ("gfx1250", "load.tr16.b128", 16, 8),
        ("gfx1250", "load.tr8.b64", 8, 8),
        ("gfx1250", "load.tr4.b64", 4, 16),
    ],
)
def test_transposing_reads_give_each_lane_a_column(
    arch: str, form: str, bits: int, elements: int
) -> None:
    """LDS holds a row-major matrix of 16 columns; each lane's address is its 8 or 16 bytes."""
    width = 64 if arch == "gfx950" else 32
    size = bits * elements // 8
    group = 16 if width == 64 else 32
    rows = group * elements // 16
    rng = np.random.default_rng(6)
    matrix = rng.integers(0, 1 << bits, (width // group, rows, 16))
    flat = matrix.reshape(-1)
    if bits == 4:
        raw = (flat[::2] | (flat[1::2] << 4)).astype(np.uint8)
    else:
        raw = flat.astype(np.uint16 if bits == 16 else np.uint8).view(np.uint8)
    kind = {16: f"vector<{elements}xf16>"}.get(bits, "vector<2xi32>")
    item, words = f"!llvm.array<{size} x i8>", f"vector<{size // 4}xi32>"
    in_lds, in_global = "!llvm.ptr<3>", "!llvm.ptr<1>"
    body = f"""
      %tid = rocdl.workitem.id.x : i32
      %lds = llvm.mlir.addressof @lds : {in_lds}
      %from = llvm.getelementptr %arg0[%tid] : ({in_global}, i32) -> {in_global}, {item}
      %data = llvm.load %from : {in_global} -> {words}
      %to = llvm.getelementptr %lds[%tid] : ({in_lds}, i32) -> {in_lds}, {item}
      llvm.store %data, %to : {words}, {in_lds}
      %got = rocdl.ds.{form} %to : {in_lds} -> {kind}
      %out = llvm.getelementptr %arg1[%tid] : ({in_global}, i32) -> {in_global}, {item}
      llvm.store %got, %out : {kind}, {in_global}"""
    x, out = torch.from_numpy(raw.copy()), torch.zeros(width * size, dtype=torch.uint8)
    run_module(arch, module_text(body, 2, width, lds=width * size), [x, out])
    got = out.numpy().reshape(width, size)
    if bits == 16:
        codes = got.view(np.uint16)
    elif bits == 8:
        codes = got
    else:
        codes = np.stack([got & 15, got >> 4], -1).reshape(width, -1)
    for lane in range(width):
        first = 0 if width == 64 else elements * (lane // 16)
        column = matrix[lane // group, first : first + elements, lane % 16]
        assert codes[lane].tolist() == column.tolist(), lane


def _f32(values) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32)[:, None].view(np.uint8)


def _nearest(value: float, fmt: str, bits: int, largest: float) -> set[float]:
    """The representable numbers a correct rounding may give, by search over all codes."""
    numbers = [small_float(c, fmt) for c in range(1 << bits)]
    finite = [n for n in numbers if abs(n) <= largest]
    best = min(abs(n - value) for n in finite)
    return {n for n in finite if abs(n - value) == best}


@pytest.mark.parametrize(
    ("arch", "name", "fmt", "largest"),
    [
        ("gfx942", "fp8", "e4m3fnuz", 240.0),
        ("gfx942", "bf8", "e5m2fnuz", 57344.0),
        ("gfx950", "fp8", "e4m3", 448.0),
        ("gfx950", "bf8", "e5m2", 57344.0),
    ],
)
def test_conversion_to_8_bits_rounds_to_nearest_even(
    arch: str, name: str, fmt: str, largest: float
) -> None:
    rng = np.random.default_rng(7)
    a = (rng.standard_normal(LANES) * 2.0 ** rng.integers(-12, 7, LANES)).astype(np.float32)
    b = np.array([small_float(c, fmt) for c in range(LANES)], np.float32)
    b = np.where(np.isfinite(b), b, 0)
    b[:-1] = (b[:-1] + b[1:]) / 2  # ties
    operands = [("f32", _f32(a)), ("f32", _f32(b)), ("i32", _i32(np.full(LANES, 0x11223344)))]
    text = f"rocdl.cvt.pk.{name}.f32 {{0}}, {{1}} -> {{2}}[true] : i32"
    got = apply_operation(arch, text, operands, "i32")
    assert (got[:, :2] == [0x44, 0x33]).all()
    for lane in range(LANES):
        for value, code in ((float(a[lane]), got[lane, 2]), (float(b[lane]), got[lane, 3])):
            near = _nearest(value, fmt, 8, largest)
            number = small_float(int(code), fmt)
            assert number in near, (value, number, near)
            if len(near) == 2 and 0 not in near:
                assert code % 2 == 0, "ties go to the even code"


def test_out_of_range_conversions_to_8_bits() -> None:
    values = np.resize(np.array([1e6, -1e6, np.inf, np.nan, 448.0], np.float32), LANES)
    for arch, name, want in (
        ("gfx950", "fp8", [0x7F, 0xFF, 0x7F, 0x7F, 0x7E]),
        ("gfx950", "bf8", [0x7C, 0xFC, 0x7C, 0x7F, 0x5F]),
        ("gfx942", "fp8", [0x80, 0x80, 0x80, 0x80, 0x80]),
    ):
        operands = [("f32", _f32(values)), ("f32", _f32(values)), ("i32", _i32(np.zeros(LANES)))]
        text = f"rocdl.cvt.pk.{name}.f32 {{0}}, {{1}} -> {{2}}[false] : i32"
        got = apply_operation(arch, text, operands, "i32")[:, 0]
        assert got[:5].tolist() == want, (arch, name)


def test_scaled_conversion_to_fp4_divides_by_the_scale_and_keeps_other_bytes() -> None:
    rng = np.random.default_rng(8)
    a, b = (rng.uniform(-50, 50, LANES).astype(np.float32) for _ in range(2))
    scale = np.float32(2.0) ** rng.integers(-3, 5, LANES)
    operands = [("f32", _f32(a)), ("f32", _f32(b)), ("f32", _f32(scale))]
    operands.append(("i32", _i32(np.full(LANES, 0x55667788))))
    text = "rocdl.cvt.scalef32.pk.fp4.f32 {0}, {1}, {2} -> {3}[2] : i32"
    got = apply_operation("gfx950", text, operands, "i32")
    assert (got[:, [0, 1, 3]] == [0x88, 0x77, 0x55]).all()
    for lane in range(LANES):
        for value, code in ((a[lane], got[lane, 2] & 15), (b[lane], got[lane, 2] >> 4)):
            near = _nearest(float(value) / float(scale[lane]), "e2m1", 4, 6.0)
            assert small_float(int(code), "e2m1") in near


def test_scaled_conversion_from_fp4_multiplies_by_the_scale() -> None:
    rng = np.random.default_rng(9)
    raw = rng.integers(0, 256, (LANES, 4)).astype(np.uint8)
    scale = np.float32(2.0) ** rng.integers(-3, 5, LANES)
    operands = [("i32", raw), ("f32", _f32(scale))]
    for byte in range(4):
        text = f"rocdl.cvt.scalef32.pk.f32.fp4 {{0}}[{byte}], {{1}} : vector<2xf32>"
        got = apply_operation("gfx950", text, operands, "vector<2xf32>").view(np.float32)
        for lane in range(LANES):
            want = [
                small_float(int(c), "e2m1") for c in (raw[lane, byte] & 15, raw[lane, byte] >> 4)
            ]
            assert got[lane].tolist() == [w * float(scale[lane]) for w in want]
