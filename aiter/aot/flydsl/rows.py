"""From tuned tables to the rows to replay. Text and plain Python: imports no torch.

A row is `full` when both of its kernels are FlyDSL's, `mixed` when one is, and out of scope when
none is. Whatever cannot be read is refused here, before anything is started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aiter import env
from aiter.jit.core import AITER_CONFIGS, FmoeTable, RawRow, TableError, TunedRow, load_fmoe
from aiter.jit.utils.chip_info import GFX_CU_NUM_MAP
from aiter.ops.flydsl.kernel_names import KernelNameError, backend_of, is_flydsl, parse
from aiter.ops.flydsl.moe.tiers import TIERS

from .common import UsageError

FLYDSL = "flydsl"


@dataclass(frozen=True)
class ScopedRow:
    """A row with at least one FlyDSL kernel.

    backends: of stage 1 and stage 2. highest: no row of its key is tuned at a higher tier.
    """

    row: TunedRow
    backends: tuple[str, str]
    highest: bool

    @property
    def mixed(self) -> bool:
        return set(self.backends) != {FLYDSL}

    @property
    def foreign(self) -> str:
        """What of a mixed row is not FlyDSL's, e.g. "stage 2 ck"; "" for a full row."""
        return " ".join(
            f"stage {stage} {name}" for stage, name in enumerate(self.backends, 1) if name != FLYDSL
        )


@dataclass(frozen=True)
class ArchRows:
    """The rows of one architecture in scope, and how many are not, by their backends."""

    gfx: str
    rows: tuple[ScopedRow, ...]
    out_of_scope: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Selection:
    """What one run works on. `notes`: defects tolerated and duplicates dropped in the tables."""

    tables: tuple[Path, ...]
    archs: tuple[ArchRows, ...]
    notes: tuple[str, ...]


def select_rows(csv: Sequence[Path], archs: Sequence[str]) -> Selection:
    """The rows of the tables `csv`, or of the shipped ones, for the named architectures.

    With no `archs`, those of GPU_ARCHS that some row has; with that unset or "native", all that
    the rows have. Raises UsageError for anything that leaves no sound work to do.
    """
    _require_known(archs, "--arch")
    tables = _tables(csv)
    try:
        table = load_fmoe(tables)
        in_scope, out_of_scope = _split(table)
    except TableError as error:
        raise UsageError(str(error)) from None
    _require_flydsl(tables, in_scope, table, each=bool(csv))
    chosen = _chosen_archs(archs, {scoped.row.key.gfx for scoped in in_scope}, tables)
    return Selection(
        tables=tables,
        archs=tuple(
            ArchRows(
                gfx,
                tuple(scoped for scoped in in_scope if scoped.row.key.gfx == gfx),
                tuple(sorted(out_of_scope.get(gfx, Counter()).items())),
            )
            for gfx in chosen
        ),
        notes=tuple(map(str, (*table.defects, *table.conflicts))),
    )


def _tables(csv: Sequence[Path]) -> tuple[Path, ...]:
    # Resolved: rows go by them in a cache that builds from other folders may share.
    tables = tuple(path.resolve() for path in csv or AITER_CONFIGS.fmoe)
    if not tables:
        raise UsageError("no tuned table is shipped; name one with --csv")
    for path in tables:
        # The runtime under replay is told of the tables through a colon-separated variable.
        if ":" in str(path):
            raise UsageError(f"{path}: a colon in a table's path; rename or copy the file")
    return tuple(dict.fromkeys(tables))


def _split(table: FmoeTable) -> tuple[list[ScopedRow], dict[str, Counter[str]]]:
    in_scope: list[ScopedRow] = []
    out_of_scope: dict[str, Counter[str]] = {}
    for row in table.rows:
        backends = (_backend(row, row.kernel1, 1), _backend(row, row.kernel2, 2))
        if FLYDSL in backends:
            _require_known_gfx(row)
            above = table.lookup(replace(row.key, token=TIERS[1]))
            in_scope.append(ScopedRow(row, backends, above is None))
        else:
            named = "+".join(dict.fromkeys(name for name in backends if name != "none"))
            counts = out_of_scope.setdefault(row.key.gfx, Counter())
            counts[named or "no kernel named"] += 1
    return in_scope, out_of_scope


def _require_known_gfx(row: TunedRow) -> None:
    if row.key.gfx not in GFX_CU_NUM_MAP:
        raise TableError(
            row.source.path,
            f"{row.key.gfx!r} is not a known architecture",
            f"give one of {', '.join(sorted(GFX_CU_NUM_MAP))}",
            line=row.source.line,
            column="gfx",
        )


def _backend(row: TunedRow, name: str, stage: int) -> str:
    try:
        backend = backend_of(name)
        if backend == FLYDSL:
            parse(name)
    except KernelNameError as error:
        raise TableError(
            row.source.path,
            str(error),
            "correct the name, or remove the row",
            line=row.source.line,
            column=f"kernelName{stage}",
        ) from None
    return backend


def _require_flydsl(
    tables: tuple[Path, ...], in_scope: list[ScopedRow], table: FmoeTable, *, each: bool
) -> None:
    """Every table named by hand, or any of the shipped ones, must have a FlyDSL row."""
    having = {scoped.row.source.path for scoped in in_scope}
    # A table whose FlyDSL rows all gave way to faster ones of another table has had its say.
    dropped = [conflict.dropped for conflict in table.conflicts]
    having |= {row.source.path for row in dropped if any(map(is_flydsl, _names(row)))}
    lacking = [path for path in tables if path not in having]
    if lacking and (each or not in_scope):
        raise UsageError(
            f"{lacking[0]}: no row names a FlyDSL kernel, so there is nothing to build; "
            "leave the table out"
        )


def _names(row: RawRow) -> tuple[str, str]:
    return row.text("kernelName1"), row.text("kernelName2")


def _chosen_archs(named: Sequence[str], present: set[str], tables: Iterable[Path]) -> list[str]:
    where = ", ".join(map(str, tables))
    have = ", ".join(sorted(present)) or "none"
    if named:
        lacking = [gfx for gfx in named if gfx not in present]
        if lacking:
            raise UsageError(
                f"--arch {lacking[0]}: no FlyDSL row of {where} is for it; rows are for {have}"
            )
        return sorted(set(named))
    wanted = [gfx for gfx in env.GPU_ARCHS.get() if gfx != "native"]
    _require_known(wanted, env.GPU_ARCHS.name)
    if not wanted:
        return sorted(present)
    chosen = sorted(present.intersection(wanted))
    if not chosen:
        raise UsageError(
            f"{env.GPU_ARCHS.name}={';'.join(wanted)}: no FlyDSL row of {where} is for any of "
            f"them; rows are for {have}"
        )
    return chosen


def _require_known(archs: Iterable[str], where: str) -> None:
    for gfx in archs:
        if gfx not in GFX_CU_NUM_MAP:
            known = ", ".join(sorted(GFX_CU_NUM_MAP))
            raise UsageError(f"{where} {gfx}: not a known architecture; known are {known}")
