"""Build, or check, every fused-MoE kernel that tuned tables ask for: no GPU, no ROCm.

    python -m aiter.aot.flydsl.moe                    the shipped tables, every architecture
    python -m aiter.aot.flydsl.moe --csv t.csv        another table; may be repeated
    python -m aiter.aot.flydsl.moe --check            compile nothing; fail on what is missing
    python -m aiter.aot.flydsl.moe --list             compile nothing; print the launches

Exit codes: 0 all good; 1 a row, a kernel or an artifact failed; 2 the run could not be made, one
sentence says why; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import command, report
from .command import Kind, Options, Wanted
from .common import BuildError
from .limits import WorkerLimit
from .manifest import sources_digest
from .pool import WorkerPool
from .report import Log
from .rows import Selection, select_rows

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from .replay import ArchReplay


def main(argv: Sequence[str] | None = None, executor: Executor | None = None) -> int:
    """Run the command line; returns the exit code. executor: as of `command.run`."""
    rows, options = _parse(argv)
    kind = Kind(
        read=lambda log: select_rows(rows.csv, rows.archs),
        preload=_preload,
        collect=lambda selection, limit, log: _collect(selection, rows, options, limit, log),
        show=_settings,
    )
    return command.run(kind, options, executor)


@dataclass(frozen=True)
class _Rows:
    """Which rows to replay, and at which token counts."""

    csv: tuple[Path, ...]
    archs: tuple[str, ...]
    exhaustive: bool
    max_tokens: int | None


def _parse(argv: Sequence[str] | None) -> tuple[_Rows, Options]:
    parser = argparse.ArgumentParser(
        prog="python -m aiter.aot.flydsl.moe",
        description="Compile every fused-MoE kernel that tuned tables ask for.",
        epilog=command.EPILOG,
    )
    add = parser.add_argument
    add("--csv", action="append", default=[], metavar="FILE", help="a table; may be repeated")
    add("--arch", action="append", default=[], metavar="GFX", help="e.g. gfx950; list or repeat")
    add("--max-tokens", type=command.positive, metavar="M", help="replay no more tokens than these")
    add("--exhaustive", action="store_true", help="replay every token count; slow")
    command.add_options(parser)
    given = parser.parse_args(argv)
    rows = _Rows(
        csv=tuple(Path(path).expanduser() for path in given.csv),
        archs=tuple(gfx for text in given.arch for gfx in text.replace(";", ",").split(",") if gfx),
        exhaustive=given.exhaustive,
        max_tokens=given.max_tokens,
    )
    return rows, command.options_of(given)


def _preload() -> None:
    from . import dry_run, replay  # noqa: F401

    dry_run.preload()


def _collect(
    selection: Selection, rows: _Rows, options: Options, limit: WorkerLimit, log: Log
) -> Wanted:
    log.notes(selection.notes)
    replays = _replay(selection, rows, options, limit)
    for replay in replays:
        for line in report.event_lines(replay):
            log(line)
        log.notes(replay.notes)
    requests = [request for replay in replays for request in replay.requests]
    if not requests:
        log("[FAIL] no row asks for any launch")
    return Wanted(
        requests=requests,
        contexts={replay.gfx: replay.common_parts for replay in replays},
        sources=sources_digest(),
        labels=tuple(map(str, selection.tables)),
        lines=report.replay_lines(selection, replays),
        launch_lines=report.launch_lines(replays),
        document={"archs": report.replay_json(selection, replays)},
        good=bool(requests) and not any(replay.failed for replay in replays),
    )


def _replay(
    selection: Selection, rows: _Rows, options: Options, limit: WorkerLimit
) -> list[ArchReplay]:
    from .replay import ReplayTask, replay_arch

    tasks = [
        ReplayTask(
            arch=arch,
            tables=selection.tables,
            exhaustive=rows.exhaustive,
            with_key_parts=options.builds,
            **({} if rows.max_tokens is None else {"max_tokens": rows.max_tokens}),
        )
        for arch in selection.archs
    ]
    found = {}
    workers = min(limit.workers, len(tasks))
    with WorkerPool(replay_arch, workers, tasks_per_worker=1) as pool:
        for done in pool.run(tasks):
            if done.failure is not None:
                print(done.failure.detail, file=sys.stderr, end="")
                raise BuildError(f"the replay of {done.task.arch.gfx} ended: {done.failure}")
            found[done.task.arch.gfx] = done.result
    return [found[arch.gfx] for arch in selection.archs]


def _settings(selection: Selection) -> list[str]:
    tables = [f"table     {path}" for path in selection.tables]
    return [*tables, *(f"arch      {arch.gfx}: {len(arch.rows)} rows" for arch in selection.archs)]


if __name__ == "__main__":
    sys.exit(main())
