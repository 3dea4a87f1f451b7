"""Tables that cannot be built from: each is one sentence that names file, line and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiter.aot.flydsl.common import UsageError
from aiter.aot.flydsl.rows import select_rows

from .samples import ROW, write_table

OPUS = "opus_moe1_afp8_wfp4_fp8_t64x256x256"
CK = "moe_ck2stages_gemm2_256x64x128x128"


def refusal(tables: list[Path], archs: tuple[str, ...] = ()) -> str:
    with pytest.raises(UsageError) as caught:
        select_rows(tables, archs)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture
def table(tmp_path) -> Path:
    return write_table(tmp_path / "t.csv", {}, {"token": "32"})


def test_rows_are_full_mixed_or_out_of_scope(tmp_path):
    table = write_table(
        tmp_path / "t.csv",
        {},
        {"token": "32", "kernelName2": CK},
        {"token": "64", "kernelName1": OPUS},
        {"token": "128", "kernelName1": OPUS, "kernelName2": CK},
        {"token": "256", "kernelName1": "_ZN5aiter4fmoeE", "kernelName2": "Null"},
    )
    (arch,) = select_rows([table], ()).archs
    assert [(s.mixed, s.foreign) for s in arch.rows] == [
        (False, ""),
        (True, "stage 2 ck"),
        (True, "stage 1 opus"),
    ]
    assert arch.out_of_scope == (("asm", 1), ("opus+ck", 1))


def test_a_missing_file(tmp_path):
    text = refusal([tmp_path / "absent.csv"])
    assert "absent.csv" in text
    assert "check the path" in text


def test_an_empty_file(tmp_path):
    (tmp_path / "t.csv").write_text("")
    assert "t.csv: the file is empty; give a CSV file" in refusal([tmp_path / "t.csv"])


def test_a_header_with_no_row(tmp_path):
    (tmp_path / "t.csv").write_text(",".join(ROW) + "\n")
    assert "a header but no row" in refusal([tmp_path / "t.csv"])


def test_a_table_without_a_flydsl_row(tmp_path, table):
    other = write_table(tmp_path / "ck.csv", {"kernelName1": OPUS, "kernelName2": CK})
    text = refusal([table, other])
    assert "ck.csv: no row names a FlyDSL kernel" in text
    assert "leave the table out" in text


def test_a_table_whose_rows_gave_way_to_faster_ones_is_not_refused(tmp_path):
    slow = write_table(tmp_path / "slow.csv", {"us": "9"})
    fast = write_table(tmp_path / "fast.csv", {"us": "5"})
    (arch,) = select_rows([slow, fast], ()).archs
    assert [s.row.source.path.name for s in arch.rows] == ["fast.csv"]


def test_a_cell_that_is_no_number(tmp_path):
    text = refusal([write_table(tmp_path / "t.csv", {}, {"token": "many"})])
    assert "t.csv:3, column token: 'many' is not an integer; correct the cell" in text


@pytest.mark.parametrize(
    ("column", "name"),
    [
        ("kernelName1", "flydsl_moe1_afp8_wfp4_bf16_t32x128x256_zz9"),
        ("kernelName2", "somebody_elses_kernel"),
    ],
)
def test_an_unknown_kernel_name(tmp_path, column, name):
    text = refusal([write_table(tmp_path / "t.csv", {column: name})])
    assert f"t.csv:2, column {column}" in text
    assert name in text
    assert "correct the name, or remove the row" in text


def test_a_row_of_an_unknown_architecture(tmp_path):
    text = refusal([write_table(tmp_path / "t.csv", {}, {"gfx": "gfx908", "token": "1"})])
    assert "t.csv:3, column gfx: 'gfx908' is not a known architecture" in text


def test_an_unknown_architecture_on_the_command_line(table):
    assert "--arch gfx999: not a known architecture" in refusal([table], ("gfx999",))


def test_an_unknown_architecture_in_the_environment(table, monkeypatch):
    monkeypatch.setenv("GPU_ARCHS", "gfx950;gfx999")
    assert "GPU_ARCHS gfx999: not a known architecture" in refusal([table])


def test_an_architecture_that_no_row_has(table, monkeypatch):
    text = refusal([table], ("gfx950", "gfx942"))
    assert "--arch gfx942" in text
    assert "t.csv" in text
    assert "rows are for gfx950" in text
    monkeypatch.setenv("GPU_ARCHS", "gfx942;gfx1250")
    assert "GPU_ARCHS=gfx942;gfx1250: no FlyDSL row" in refusal([table])


def test_gpu_archs_leaves_out_what_no_row_has(tmp_path, monkeypatch):
    table = write_table(tmp_path / "t.csv", {}, {"gfx": "gfx942", "cu_num": "304"})
    monkeypatch.setenv("GPU_ARCHS", "gfx1250;gfx950")
    assert [arch.gfx for arch in select_rows([table], ()).archs] == ["gfx950"]
    monkeypatch.setenv("GPU_ARCHS", "native")
    assert [arch.gfx for arch in select_rows([table], ()).archs] == ["gfx942", "gfx950"]
    assert [arch.gfx for arch in select_rows([table], ("gfx942",)).archs] == ["gfx942"]


def test_the_tables_of_the_environment_stand_in_for_the_shipped_ones(table, monkeypatch):
    monkeypatch.setenv("AITER_CONFIG_FMOE", str(table))
    assert select_rows([], ()).tables == (table,)


def test_no_table_at_all(monkeypatch):
    monkeypatch.setattr("aiter.jit.core.Configs.fmoe", property(lambda self: ()))
    assert "name one with --csv" in refusal([])


def test_a_table_whose_path_cannot_be_passed_on(tmp_path, monkeypatch):
    assert "a colon" in refusal([write_table(tmp_path / "a:b.csv", {})])
    (tmp_path / "a:b").mkdir()
    write_table(tmp_path / "a:b" / "t.csv", {})
    monkeypatch.chdir(tmp_path / "a:b")
    assert "a colon" in refusal([Path("t.csv")])


def test_a_table_is_the_same_however_its_path_is_given(table, monkeypatch):
    monkeypatch.chdir(table.parent)
    (table.parent / "d").mkdir()
    given = [Path(table.name), table, Path("d") / ".." / table.name]
    selection = select_rows(given, ())
    assert selection.tables == (table,)
    assert str(selection.archs[0].rows[0].row.source) == f"{table}:2"
    assert selection.notes == ()


def test_tolerated_defects_are_reported(tmp_path):
    table = write_table(tmp_path / "t.csv", {}, {"us": "9"}, {"us": "5"})
    lines = table.read_text().splitlines()
    table.write_text("\n".join([*lines, lines[1].rpartition(",")[0].replace(",16,", ",32,")]))
    notes = select_rows([table], ()).notes
    assert any("t.csv:5: the row is short" in note for note in notes)
    assert any("t.csv:3: same key as" in note for note in notes)
