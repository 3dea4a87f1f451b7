"""Rows of fused-MoE tables as typed values, and the lookup the runtime does on them.

Cells are parsed once, here; a cell that does not parse raises TableError with file, line and
column. Element types stay names (``float8_e4m3fn``), so that reading a table needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TypeVar

from aiter.jit.tables import (
    Conflict,
    Defect,
    RawRow,
    RawTable,
    Source,
    fill_gfx,
    merge_tables,
    microseconds,
    read_table,
)
from aiter.ops.enum import ActivationType, QuantType

T = TypeVar("T")

# Names of the element types a table may hold; aiter.utility.dtypes.parse knows each.
DTYPE_NAMES = frozenset(
    {"bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e4m3fnuz"}
    | {"float4_e2m1fn_x2", "int8", "int4", "uint8"}
)

# Columns of other families' tables.
_OTHER_FAMILIES = {
    "shared_expert_id": "MoE with a shared expert of its own precision",
    "max_m": "the grouped MoE of gfx1250",
}

# Rows marked as a substitute for kernels that were missing when they were tuned.
FALLBACK_TAG = "flydsl_fallback"


@dataclass(frozen=True)
class TunedKey:
    """What a row was tuned for. ``act_type`` is None only in the activation wildcard.

    Dimensions count elements, not packed units. ``topk`` leaves out a fake expert slot that
    callers append under expert parallelism.
    """

    gfx: str
    cu_num: int
    token: int
    model_dim: int
    inter_dim: int
    expert: int
    topk: int
    act_type: ActivationType | None
    dtype: str
    q_dtype_a: str
    q_dtype_w: str
    q_type: QuantType
    use_g1u1: bool
    doweight_stage1: bool


# The architecture may be left to the number of compute units.
REQUIRED_COLUMNS = (
    *(f.name for f in fields(TunedKey) if f.name != "gfx"),
    *("block_m", "kernelName1", "kernelName2"),
)


@dataclass(frozen=True)
class TunedRow:
    """One tuned row. ``kernel2`` is "" on one-stage rows; ``us`` is None where not measured.

    block_m: sort block in rows. ksplit: split of K of CK and cktile kernels. run_1stage:
    ``kernel1`` is an ASM kernel that does both stages.
    """

    key: TunedKey
    block_m: int
    ksplit: int
    run_1stage: bool
    kernel1: str
    kernel2: str
    us: float | None
    tag: str
    source: Source


@dataclass(frozen=True)
class FmoeTable:
    """All rows in table order, one a key, with lookup by key."""

    rows: tuple[TunedRow, ...]
    defects: tuple[Defect, ...]
    conflicts: tuple[Conflict, ...]
    _by_key: dict[TunedKey, TunedRow] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for row in self.rows:
            self._by_key[row.key] = row
            # The activation wildcard: of the rows that differ in nothing else, the first.
            self._by_key.setdefault(replace(row.key, act_type=None), row)

    def lookup(self, key: TunedKey) -> TunedRow | None:
        """The row of exactly ``key``, else the first of the same shape with any activation."""
        return self._by_key.get(key) or self._by_key.get(replace(key, act_type=None))


def load_fmoe(paths: Iterable[Path]) -> FmoeTable:
    """Read, merge and type the fused-MoE tables at ``paths``; none give a table of no rows.

    Rows tagged ``flydsl_fallback`` are left out. Raises TableError.
    """
    tables = [
        _without_fallback(fill_gfx(read_table(path, REQUIRED_COLUMNS, _OTHER_FAMILIES)))
        for path in paths
    ]
    merged = merge_tables(tables, _parse_key)
    rows = tuple(map(parse_row, merged.rows))
    return FmoeTable(rows, merged.defects, merged.conflicts)


def _without_fallback(table: RawTable) -> RawTable:
    rows = tuple(row for row in table.rows if row.text("_tag") != FALLBACK_TAG)
    return replace(table, rows=rows)


def parse_row(row: RawRow) -> TunedRow:
    """Type one row that has a ``gfx`` cell. Raises TableError."""
    us = microseconds(row)
    return TunedRow(
        key=_parse_key(row),
        block_m=row.integer("block_m", low=1),
        ksplit=row.integer("ksplit", 0),
        run_1stage=_flag(row, "run_1stage", 0),
        kernel1=row.text("kernelName1"),
        kernel2=row.text("kernelName2"),
        us=us if us != float("inf") else None,
        tag=row.text("_tag"),
        source=row.source,
    )


def _parse_key(row: RawRow) -> TunedKey:
    return TunedKey(
        gfx=row.text("gfx"),
        cu_num=row.integer("cu_num", low=1),
        token=row.integer("token", low=1),
        model_dim=row.integer("model_dim", low=1),
        inter_dim=row.integer("inter_dim", low=1),
        expert=row.integer("expert", low=1),
        topk=row.integer("topk", low=1),
        act_type=_parsed(row, "act_type", ActivationType.parse),
        dtype=_parsed(row, "dtype", _dtype),
        q_dtype_a=_parsed(row, "q_dtype_a", _dtype),
        q_dtype_w=_parsed(row, "q_dtype_w", _dtype),
        q_type=_parsed(row, "q_type", QuantType.parse),
        use_g1u1=_flag(row, "use_g1u1"),
        doweight_stage1=_flag(row, "doweight_stage1"),
    )


def _parsed(row: RawRow, column: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(row.text(column))
    except ValueError as error:
        raise row.error(str(error), column) from None


def _dtype(cell: str) -> str:
    name = cell.removeprefix("torch.")
    if name not in DTYPE_NAMES:
        known = ", ".join(sorted(DTYPE_NAMES))
        raise ValueError(f"{cell!r} is not an element type; expected torch. and one of {known}")
    return name


def _flag(row: RawRow, column: str, default: int | None = None) -> bool:
    text = row.text(column).lower()
    if text in ("true", "false"):
        return text == "true"
    value = row.integer(column, default)
    if value not in (0, 1):
        raise row.error(f"{value} is not 0 or 1", column)
    return bool(value)
