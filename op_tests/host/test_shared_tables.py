"""The host code against real tuned tables, which are not part of this repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiter.jit.core import load_fmoe, read_table, to_csv
from aiter.ops.flydsl.kernel_names import backend_of, format_name, is_flydsl, parse
from op_tests.host.shared_tables import TABLES, needs_tables

pytestmark = needs_tables

FMOE = [path for path in TABLES if "_tuned_fmoe" in path.name]


def _names(path: Path) -> set[str]:
    rows = read_table(path).rows
    return {row.text(column) for row in rows for column in ("kernelName1", "kernelName2")}


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_flydsl_name_round_trips_and_every_other_has_an_owner(path: Path):
    names = _names(path)
    flydsl = {name for name in names if is_flydsl(name)}
    assert flydsl
    assert [name for name in flydsl if format_name(parse(name)) != name] == []
    others = {backend_of(name) for name in names - flydsl}
    assert others <= {"none", "opus", "ck", "cktile", "asm"}


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_reading_and_writing_changes_no_cell(path: Path):
    table = read_table(path)
    written = to_csv(table).splitlines()
    short = {defect.source.line for defect in table.defects}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        got = written[number - 1]
        assert got == line or (number in short and got.startswith(line))


@pytest.mark.parametrize("path", FMOE, ids=lambda path: path.stem)
def test_every_row_types_and_finds_itself(path: Path):
    table = load_fmoe([path])
    assert len(table.rows) == len(read_table(path).rows)
    assert all(table.lookup(row.key) is row for row in table.rows)


def test_stage_1_tiles_equal_the_sort_block():
    rows = [row for row in load_fmoe(FMOE).rows if row.kernel1.startswith("flydsl_moe1")]
    assert len(rows) > 300
    assert [str(row.source) for row in rows if parse(row.kernel1).tile_m != row.block_m] == []
