"""Tuned tables as text: what is tolerated, what is refused, and a merge that changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiter.jit.core import Configs, TableError, load_fmoe, merge_tables, read_table, to_csv
from aiter.jit.tables import RawRow, RawTable, Source, microseconds
from aiter.jit.tuned import REQUIRED_COLUMNS
from aiter.ops.enum import ActivationType, QuantType

ROW = {
    "gfx": "gfx950",
    "cu_num": "256",
    "token": "64",
    "model_dim": "7168",
    "inter_dim": "512",
    "expert": "384",
    "topk": "6",
    "act_type": "ActivationType.Silu",
    "dtype": "torch.bfloat16",
    "q_dtype_a": "torch.float8_e4m3fn",
    "q_dtype_w": "torch.float4_e2m1fn_x2",
    "q_type": "QuantType.per_1x32",
    "use_g1u1": "1",
    "doweight_stage1": "0",
    "block_m": "32",
    "ksplit": "0",
    "kernelName1": "flydsl_moe1_afp8_wfp4_bf16_t32x64x256_w4_gui_kw4_fp8",
    "kernelName2": "flydsl_moe2_afp8_wfp4_bf16_t32x256x256_reduce_bnt2_persist",
    "us": "20.9291",
    "run_1stage": "0",
    "tflops": "6.31",
    "_tag": "",
}


def _csv(*rows: dict[str, str], columns: list[str] | None = None) -> str:
    columns = columns or list(rows[0])
    return "\n".join([",".join(columns), *(",".join(r.get(c, "") for c in columns) for r in rows)])


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def _table(*rows: dict[str, str], name: str = "a.csv") -> RawTable:
    raw = tuple(RawRow(row, Source(Path(name), i)) for i, row in enumerate(rows, 2))
    return RawTable(tuple(rows[0]), raw)


class TestReading:
    def test_cells_leave_as_they_came_in(self, tmp_path: Path):
        text = 'a,b,us\n 64 ,64.0,1e1\n"x,y",,007\n'
        table = read_table(_write(tmp_path / "t.csv", text))
        assert [dict(row.cells) for row in table.rows] == [
            {"a": " 64 ", "b": "64.0", "us": "1e1"},
            {"a": "x,y", "b": "", "us": "007"},
        ]
        assert to_csv(table) == text

    def test_rows_know_their_line_even_after_blank_ones(self, tmp_path: Path):
        table = read_table(_write(tmp_path / "t.csv", "a,b\n1,2\n\n , \n3,4\n"))
        assert [str(row.source) for row in table.rows] == [
            f"{tmp_path / 't.csv'}:{n}" for n in (2, 5)
        ]

    def test_a_byte_order_mark_and_dos_line_ends_are_tolerated(self, tmp_path: Path):
        table = read_table(_write(tmp_path / "t.csv", "\ufeffa,b\r\n1,2\r\n"))
        assert table.columns == ("a", "b")
        assert table.rows[0].cells == {"a": "1", "b": "2"}

    def test_a_short_row_is_kept_and_reported(self, tmp_path: Path):
        table = read_table(_write(tmp_path / "t.csv", "a,b,c\n1,2\n1,2,3\n"))
        assert table.rows[0].cells == {"a": "1", "b": "2"}
        assert table.rows[0].text("c") == ""
        (defect,) = table.defects
        assert str(defect).startswith(f"{tmp_path / 't.csv'}:2: the row is short: c read as blank")

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            (None, "there is no such file; check the path"),
            ("", "the file is empty; give a CSV file"),
            ("\n \n", "the file is empty; give a CSV file"),
            ("a,b\n", "there is a header but no row; add rows"),
            ("a,b\n1,2,3\n", ":2: 3 cells under 2 columns; remove the surplus cell"),
            ("a,b,a\n1,2,3\n", ":1: the header names 'a' twice; rename"),
            ("b,c\n1,2\n", "the header lacks a; give a table of this family"),
            ('a,b\n1,"2\n', ":2: not CSV"),
        ],
    )
    def test_bad_files_each_have_their_error_and_remedy(
        self, tmp_path: Path, text: str | None, problem: str
    ):
        path = tmp_path / "t.csv"
        if text is not None:
            _write(path, text)
        with pytest.raises(TableError) as error:
            read_table(path, required=["a"])
        assert str(path) in str(error.value)
        assert problem in str(error.value)

    def test_a_file_that_is_not_text_is_refused(self, tmp_path: Path):
        (tmp_path / "t.csv").write_bytes(b"a,b\n\xff\xfe,1\n")
        with pytest.raises(TableError, match="cannot be read"):
            read_table(tmp_path / "t.csv")

    @pytest.mark.parametrize("word", ["", " ", "nan", "NaN", "none", "None", "Null"])
    def test_blank_words_are_blank(self, word: str):
        row = RawRow({"a": word}, Source(Path("t.csv"), 2))
        assert row.text("a") == ""
        assert row.integer("a", 7) == 7
        with pytest.raises(TableError, match=r"t\.csv:2, column a: '' is not an integer"):
            row.integer("a")


def _k(row: RawRow) -> str:
    return row.text("k")


class TestMerging:
    def test_of_two_tables_the_faster_row_wins_and_the_other_is_reported(self):
        a = _table({"k": "256", "us": "2"})
        b = _table({"k": "256", "us": "1"}, name="b.csv")
        merged = merge_tables([a, b], _k)
        assert [row.cells["us"] for row in merged.rows] == ["1"]
        assert str(merged.conflicts[0]) == "a.csv:2: same key as b.csv:2, which is faster or first"

    def test_the_fastest_wins_on_numeric_us_with_unmeasured_last(self):
        times = ["", "nan", "0", "-1", "9.5", "10.2", "9.50"]
        merged = merge_tables([_table(*({"k": "1", "us": us} for us in times))], _k)
        assert [(row.cells["us"], row.source.line) for row in merged.rows] == [("9.5", 6)]
        assert len(merged.conflicts) == len(times) - 1

    def test_of_rows_not_measured_the_first_wins(self):
        merged = merge_tables([_table({"k": "1", "us": ""}, {"k": "1", "us": "nan"})], _k)
        assert merged.rows[0].source.line == 2

    def test_columns_are_the_union_with_new_ones_before_tflops(self):
        a = _table({"k": "1", "tflops": "3", "bw": "4"})
        b = _table({"gfx": "gfx950", "k": "2", "flat": "0", "tflops": "5"})
        merged = merge_tables([a, b], _k)
        assert merged.columns == ("k", "gfx", "flat", "tflops", "bw")
        assert to_csv(merged) == "k,gfx,flat,tflops,bw\n1,,,3,4\n2,gfx950,0,5,\n"

    def test_the_merge_changes_no_source(self, tmp_path: Path):
        paths = [
            _write(tmp_path / "a.csv", _csv(ROW, {**ROW, "us": "1"})),
            _write(tmp_path / "b.csv", _csv({**ROW, "us": "2", "token": "64.0"})),
        ]
        before = [path.read_bytes() for path in paths]
        table = load_fmoe(paths)
        assert [path.read_bytes() for path in paths] == before
        assert [(row.us, row.source.line) for row in table.rows] == [(1.0, 3)]
        assert len(table.conflicts) == 2

    cell = st.sampled_from(["", "1", "1.0", "2", "nan", "x", "64.0"])

    @given(st.lists(st.tuples(cell, cell), min_size=1, max_size=12), st.integers(0, 12))
    def test_every_row_is_kept_or_reported_and_no_cell_is_rewritten(
        self, cells: list[tuple[str, str]], cut: int
    ):
        rows = [{"k": k, "us": us} for k, us in cells]
        tables = [
            _table(*part, name=f"{i}") for i, part in enumerate([rows[:cut], rows[cut:]]) if part
        ]
        merged = merge_tables(tables, _k)
        everything = [row for table in tables for row in table.rows]
        dropped = [conflict.dropped for conflict in merged.conflicts]
        assert sorted(map(repr, [*merged.rows, *dropped])) == sorted(map(repr, everything))
        best = {_k(row): microseconds(row) for row in merged.rows}
        assert len(best) == len(merged.rows)
        assert all(best[_k(row)] <= microseconds(row) for row in everything)


class TestTypedRows:
    def _load(self, tmp_path: Path, *rows: dict[str, str], columns: list[str] | None = None):
        return load_fmoe([_write(tmp_path / "t.csv", _csv(*rows, columns=columns))])

    def test_cells_become_values_once(self, tmp_path: Path):
        (row,) = self._load(tmp_path, ROW).rows
        assert row.key.gfx == "gfx950"
        assert (row.key.cu_num, row.key.token, row.key.topk) == (256, 64, 6)
        assert row.key.act_type is ActivationType.Silu
        assert row.key.q_type is QuantType.per_1x32
        assert row.key.q_dtype_w == "float4_e2m1fn_x2"
        assert row.key.use_g1u1 is True
        assert row.key.doweight_stage1 is False
        assert (row.block_m, row.ksplit, row.run_1stage, row.us) == (32, 0, False, 20.9291)
        assert row.kernel1 == ROW["kernelName1"]
        assert str(row.source) == f"{tmp_path / 't.csv'}:2"

    def test_old_tables_get_their_architecture_from_the_cu_count(self, tmp_path: Path):
        columns = [c for c in ROW if c != "gfx"]
        table = self._load(tmp_path, ROW, {**ROW, "cu_num": "80"}, columns=columns)
        assert [row.key.gfx for row in table.rows] == ["gfx950", "gfx942"]
        with pytest.raises(TableError, match=r"t\.csv:2, column gfx: .*120.*add a gfx column"):
            self._load(tmp_path, {**ROW, "cu_num": "120"}, columns=columns)

    def test_defects_of_real_tables_are_tolerated(self, tmp_path: Path):
        odd = {**ROW, "kernelName2": "Null", "us": "nan", "ksplit": "", "run_1stage": "1.0"}
        (row,) = self._load(tmp_path, odd, columns=[c for c in ROW if c != "_tag"]).rows
        assert (row.kernel2, row.us, row.ksplit, row.run_1stage, row.tag) == ("", None, 0, True, "")

    def test_fallback_rows_are_left_out(self, tmp_path: Path):
        fallback = {**ROW, "us": "0.1", "_tag": "flydsl_fallback"}
        other = {**ROW, "token": "1", "_tag": "exact-m4096-a"}
        table = self._load(tmp_path, fallback, ROW, other)
        assert [row.source.line for row in table.rows] == [3, 4]
        assert table.conflicts == ()

    @pytest.mark.parametrize(
        ("column", "cell", "problem"),
        [
            ("token", "many", "'many' is not an integer"),
            ("token", "64.5", "'64.5' is not an integer"),
            ("block_m", "", "'' is not an integer"),
            ("expert", "inf", "'inf' is not an integer"),
            ("topk", "0", "0 is below 1"),
            ("model_dim", "-512", "-512 is below 1"),
            ("block_m", "0.0", "0.0 is below 1"),
            ("act_type", "ActivationType.Tanh", "is no ActivationType"),
            ("q_type", "per_2x2", "is no QuantType"),
            ("q_dtype_a", "torch.float7", "'torch.float7' is not an element type"),
            ("use_g1u1", "2", "2 is not 0 or 1"),
        ],
    )
    def test_a_bad_cell_names_file_line_and_column(
        self, tmp_path: Path, column: str, cell: str, problem: str
    ):
        with pytest.raises(TableError) as error:
            self._load(tmp_path, ROW, {**ROW, "token": "1", column: cell})
        assert f"{tmp_path / 't.csv'}:3, column {column}: " in str(error.value)
        assert problem in str(error.value)
        assert (error.value.line, error.value.column) == (3, column)

    @pytest.mark.parametrize("column", REQUIRED_COLUMNS)
    def test_a_missing_column_is_named(self, tmp_path: Path, column: str):
        with pytest.raises(TableError, match=f"the header lacks {column};"):
            self._load(tmp_path, ROW, columns=[c for c in ROW if c != column])

    def test_lookup_takes_the_exact_activation_then_the_first_of_any(self, tmp_path: Path):
        table = self._load(
            tmp_path,
            {**ROW, "act_type": "ActivationType.Swiglu", "block_m": "64"},
            {**ROW, "act_type": "ActivationType.Silu", "block_m": "32"},
        )
        key = table.rows[0].key
        by_activation = {
            activation: table.lookup(type(key)(**{**vars(key), "act_type": activation}))
            for activation in (ActivationType.Silu, ActivationType.Swiglu, ActivationType.Gelu)
        }
        assert [row.block_m for row in by_activation.values()] == [32, 64, 64]
        assert table.lookup(type(key)(**{**vars(key), "token": 128})) is None

    def test_keys_compare_by_value_however_they_are_spelled(self, tmp_path: Path):
        other = {"cu_num": "256.0", "act_type": "silu", "dtype": "bfloat16", "use_g1u1": "True"}
        assert all(ROW[column] != cell for column, cell in other.items())
        table = self._load(tmp_path, ROW, {**ROW, **other, "us": "0.5"})
        assert [row.us for row in table.rows] == [0.5]
        assert [conflict.dropped.source.line for conflict in table.conflicts] == [2]

    @pytest.mark.parametrize(
        ("column", "family"), [("shared_expert_id", "shared expert"), ("max_m", "grouped MoE")]
    )
    def test_a_table_of_another_family_is_named_as_such(
        self, tmp_path: Path, column: str, family: str
    ):
        row = {**ROW, column: "384"}
        del row["block_m"]
        with pytest.raises(TableError, match=f"{family}.* are not built yet"):
            self._load(tmp_path, row, columns=list(row))

    def test_no_tables_are_a_table_of_no_rows(self):
        assert load_fmoe([]).rows == ()


class TestConfigs:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "model_configs").mkdir()
        for name in (
            "tuned_fmoe.csv",
            "untuned_fmoe.csv",
            "tuned_grouped_fmoe.csv",
            "model_configs/b_fp4_tuned_fmoe.csv",
            "model_configs/a_fp8_tuned_fmoe_bf16.csv",
            "model_configs/a_fp8_untuned_fmoe.csv",
            "model_configs/a_tuned_fhmoe.csv",
            "model_configs/a_tuned_fmoe.md",
        ):
            (tmp_path / name).write_text("")
        return tmp_path

    def test_a_family_is_its_default_and_every_models_table(self, folder: Path):
        configs = Configs(folder)
        assert [path.name for path in configs.fmoe] == [
            "tuned_fmoe.csv",
            "a_fp8_tuned_fmoe_bf16.csv",
            "b_fp4_tuned_fmoe.csv",
        ]
        assert [path.name for path in configs.fhmoe] == ["a_tuned_fhmoe.csv"]
        assert [path.name for path in configs.grouped_fmoe] == ["tuned_grouped_fmoe.csv"]

    def test_a_variable_overrides_its_family_only(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv("AITER_CONFIG_FMOE", "/x/one.csv:/y/two.csv")
        configs = Configs(folder)
        assert configs.fmoe == (Path("/x/one.csv"), Path("/y/two.csv"))
        assert [path.name for path in configs.fhmoe] == ["a_tuned_fhmoe.csv"]
        with pytest.raises(TableError, match="/x/one.csv: there is no such file"):
            load_fmoe(configs.fmoe)

    def test_the_shipped_tables_are_clean(self):
        from aiter.jit.core import AITER_CONFIGS

        table = load_fmoe(AITER_CONFIGS.fmoe)
        assert [str(c) for c in (*table.conflicts, *table.defects)] == []
