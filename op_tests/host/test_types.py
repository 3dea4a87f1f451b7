"""Element types and enumerations, and the table cells that name them."""

from __future__ import annotations

import pytest
import torch

from aiter.jit.tuned import DTYPE_NAMES
from aiter.jit.utils.chip_info import Target, pinned
from aiter.ops.enum import ActivationType, GateMode, QuantType
from aiter.utility import dtypes


def test_fp8_is_a_function_of_the_target():
    assert dtypes.fp8(Target.of("gfx942")) is torch.float8_e4m3fnuz
    assert dtypes.fp8(Target.of("gfx950")) is torch.float8_e4m3fn
    assert dtypes.fp8(Target.of("gfx1250")) is torch.float8_e4m3fn
    with pinned(Target.of("gfx942")):
        assert dtypes.fp8() is torch.float8_e4m3fnuz


@pytest.mark.parametrize(
    ("cell", "dtype"),
    [
        ("torch.bfloat16", torch.bfloat16),
        (" torch.float8_e4m3fn ", torch.float8_e4m3fn),
        ("torch.float8_e4m3fnuz", torch.float8_e4m3fnuz),
        ("torch.float4_e2m1fn_x2", torch.float4_e2m1fn_x2),
        ("torch.int4", torch.uint8),
        ("int8", torch.int8),
        ("fp8_e8m0", torch.float8_e8m0fnu),
    ],
)
def test_dtype_cells_parse(cell: str, dtype: torch.dtype):
    assert dtypes.parse(cell) is dtype


def test_every_dtype_a_table_may_hold_is_known_to_torch_code():
    for name in DTYPE_NAMES:
        assert isinstance(dtypes.parse(f"torch.{name}"), torch.dtype)


def test_unknown_dtypes_are_named():
    with pytest.raises(ValueError, match=r"'torch\.float7' is not a dtype"):
        dtypes.parse("torch.float7")


@pytest.mark.parametrize("member", [*ActivationType, *QuantType, *GateMode])
def test_enum_cells_round_trip(member: ActivationType | QuantType | GateMode):
    assert type(member).parse(member.cell) is member
    assert type(member).parse(member.name.lower()) is member


@pytest.mark.parametrize("cell", ["QuantType.Silu", "QuantType.No", "ActivationType.Relu", "", "."])
def test_cells_of_another_enum_are_refused(cell: str):
    with pytest.raises(ValueError, match="is no ActivationType; expected one of No, Silu"):
        ActivationType.parse(cell)


def test_public_values_do_not_move():
    assert GateMode("separated") is GateMode.SEPARATED
    assert [q.name for q in QuantType] == [
        "No",
        "per_Tensor",
        "per_Token",
        "per_1x32",
        "per_1x128",
        "per_128x128",
    ]
