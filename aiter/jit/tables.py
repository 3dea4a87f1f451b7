"""Tuned tables as text: read, check, merge. A cell leaves as it came in.

Nothing here turns a cell into a number except to compare: an integer column with a blank
cell keeps its "64", and a file that says "64.0" keeps that. Of rows with one key the fastest
wins, and the merge writes no file: it returns what it dropped. Imports neither torch nor pandas.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiter.jit.utils.chip_info import TargetError, gfx_from_cu_num

_BLANK = frozenset({"", "nan", "none", "null"})


class TableError(ValueError):
    """A table, a row or a cell that cannot be used; names file, line, column and remedy."""

    def __init__(
        self, path: Path, problem: str, remedy: str, *, line: int = 0, column: str = ""
    ) -> None:
        place = f"{path}:{line}" if line else str(path)
        where = f"{place}, column {column}" if column else place
        super().__init__(f"{where}: {problem}; {remedy}")
        self.path = path
        self.line = line
        self.column = column


@dataclass(frozen=True)
class Source:
    """Where a row stands: shown as ``file:line``, line 1 being the header."""

    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class RawRow:
    """A row's cells by column, as written. A cell the row lacks is absent."""

    cells: Mapping[str, str]
    source: Source

    def text(self, column: str) -> str:
        """The stripped cell; "" if it is absent, blank, or the word nan, none or null."""
        cell = self.cells.get(column, "").strip()
        return "" if cell.lower() in _BLANK else cell

    def integer(self, column: str, default: int | None = None, low: int | None = None) -> int:
        """The cell as an integer; "256.0" is one. Blank gives ``default``, if there is one.

        Raises TableError naming file, line and column, for a number below ``low`` too.
        """
        text = self.text(column)
        if not text and default is not None:
            return default
        value = _number(text)
        if value is None or not value.is_integer():
            raise self.error(f"{text!r} is not an integer", column)
        if low is not None and value < low:
            raise self.error(f"{text} is below {low}", column)
        return int(value)

    def error(self, problem: str, column: str = "", remedy: str = "correct the cell") -> TableError:
        """A TableError about this row."""
        return TableError(self.source.path, problem, remedy, line=self.source.line, column=column)


@dataclass(frozen=True)
class Defect:
    """Something odd that was tolerated."""

    source: Source
    problem: str

    def __str__(self) -> str:
        return f"{self.source}: {self.problem}"


@dataclass(frozen=True)
class Conflict:
    """Two rows with one key: which was kept and which was dropped."""

    kept: RawRow
    dropped: RawRow

    def __str__(self) -> str:
        return f"{self.dropped.source}: same key as {self.kept.source}, which is faster or first"


@dataclass(frozen=True)
class RawTable:
    """Columns, rows, and what was tolerated or dropped to get there."""

    columns: tuple[str, ...]
    rows: tuple[RawRow, ...]
    defects: tuple[Defect, ...] = ()
    conflicts: tuple[Conflict, ...] = ()


# ---------------------------------------------------------------- reading


def read_table(
    path: Path, required: Iterable[str] = (), foreign: Mapping[str, str] | None = None
) -> RawTable:
    """Read one CSV file. ``required`` columns must be in its header; one of ``foreign`` tells a
    table of another family, which it names and which is refused.

    A row shorter than the header is kept and reported as a defect: real tables have rows
    that lack a trailing cell. A longer one is refused, since every cell after the surplus
    one would be misread. Raises TableError for a file that is missing, unreadable, empty or
    has no rows.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise TableError(path, "there is no such file", "check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(path, f"the file cannot be read ({error})", "check the file") from None
    if not text.strip():
        raise TableError(path, "the file is empty", "give a CSV file with a header and rows")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        lines = [(reader.line_num, cells) for cells in reader if any(map(str.strip, cells))]
    except csv.Error as error:
        raise TableError(
            path, f"not CSV ({error})", "quote cells in pairs", line=reader.line_num
        ) from None
    columns = _header(path, lines[0], required, foreign or {})
    if len(lines) == 1:
        raise TableError(path, "there is a header but no row", "add rows, or leave the file out")
    rows, defects = [], []
    for line, cells in lines[1:]:
        row = RawRow(dict(zip(columns, cells, strict=False)), Source(path, line))
        if len(cells) > len(columns):
            problem = f"{len(cells)} cells under {len(columns)} columns"
            raise row.error(problem, remedy="remove the surplus cell")
        if len(cells) < len(columns):
            absent = ", ".join(columns[len(cells) :])
            problem = f"the row is short: {absent} read as blank, cells before may be shifted"
            defects.append(Defect(row.source, problem))
        rows.append(row)
    return RawTable(columns, tuple(rows), tuple(defects))


def _header(
    path: Path,
    line: tuple[int, list[str]],
    required: Iterable[str],
    foreign: Mapping[str, str],
) -> tuple[str, ...]:
    columns = tuple(cell.strip() for cell in line[1])
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        problem = f"the header names {', '.join(map(repr, twice))} twice"
        raise TableError(path, problem, "rename one of the columns", line=line[0])
    for name, family in foreign.items():
        if name in columns:
            problem = f"its rows are of {family} (column {name}), whose kernels are not built yet"
            raise TableError(path, problem, "leave the table out", line=line[0])
    missing = [name for name in required if name not in columns]
    if missing:
        problem = f"the header lacks {', '.join(missing)}"
        raise TableError(path, problem, "give a table of this family", line=line[0])
    return columns


def fill_gfx(table: RawTable) -> RawTable:
    """Add the ``gfx`` cell that older tables leave to be told from ``cu_num``.

    Raises TableError for a CU count that tells no architecture.
    """
    rows = []
    for row in table.rows:
        if not row.text("gfx"):
            try:
                gfx = gfx_from_cu_num(row.integer("cu_num"))
            except TargetError as error:
                raise row.error(str(error), "gfx", "add a gfx column") from None
            row = RawRow({**row.cells, "gfx": gfx}, row.source)
        rows.append(row)
    columns = table.columns if "gfx" in table.columns else ("gfx", *table.columns)
    return RawTable(columns, tuple(rows), table.defects, table.conflicts)


# ---------------------------------------------------------------- merging


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def microseconds(row: RawRow, column: str = "us") -> float:
    """The measured time; infinity where it is blank, no number, zero or negative."""
    value = _number(row.text(column))
    return value if value is not None and value > 0 else math.inf


def merge_tables(tables: Sequence[RawTable], key: Callable[[RawRow], Hashable]) -> RawTable:
    """One table of all rows, with one row a ``key``: the fastest, or of equals the first.

    Columns are the union; those that a later table adds go before ``tflops``. Rows keep the
    order in which their key first appeared. Pure: no file and no argument changes.
    """
    best: dict[Hashable, RawRow] = {}
    conflicts = []
    for table in tables:
        for row in table.rows:
            its_key = key(row)
            held = best.setdefault(its_key, row)
            if held is not row:
                faster = microseconds(row) < microseconds(held)
                kept, dropped = (row, held) if faster else (held, row)
                best[its_key] = kept
                conflicts.append(Conflict(kept, dropped))
    return RawTable(
        _union([table.columns for table in tables]),
        tuple(best.values()),
        tuple(defect for table in tables for defect in table.defects),
        (*(conflict for table in tables for conflict in table.conflicts), *conflicts),
    )


def _union(headers: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    columns: list[str] = []
    for header in headers:
        added = [name for name in header if name not in columns]
        place = columns.index("tflops") if "tflops" in columns else len(columns)
        columns[place:place] = added
    return tuple(columns)


def to_csv(table: RawTable) -> str:
    """The table as CSV text, cells as they came in; absent cells are blank."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows([row.cells.get(name, "") for name in table.columns] for row in table.rows)
    return out.getvalue()
