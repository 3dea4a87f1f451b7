"""The log, the summary and the JSON document of a run."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from .manifest import launch_id
from .rows import Selection

if TYPE_CHECKING:
    from .check import CheckResult
    from .engine import BuildResult
    from .replay import ArchReplay

_NOTES_SHOWN = 20
_SHOWN = 3  # of rows, or callers, on one line


class Log:
    """Lines for people: to standard output, or beside it where that carries JSON."""

    def __init__(self, json: bool) -> None:
        self._stream: TextIO = sys.stderr if json else sys.stdout

    def __call__(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def notes(self, notes: Sequence[str]) -> None:
        """Things tolerated; a table of many defects does not drown the rest."""
        for note in notes[:_NOTES_SHOWN]:
            self(f"[NOTE] {note}")
        if len(notes) > _NOTES_SHOWN:
            self(f"[NOTE] and {len(notes) - _NOTES_SHOWN} more like these")


@dataclass(frozen=True)
class Timing:
    """Seconds of a whole run: on the clock, of CPU, and of that for start and imports."""

    wall_s: float
    cpu_s: float
    import_cpu_s: float


def rows_text(rows: Sequence[str]) -> str:
    """The first few of the rows that ask for something, and how many more there are."""
    return _few(rows, ", ")


def _few(names: Sequence[str], separator: str) -> str:
    more = len(names) - _SHOWN
    return separator.join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def event_lines(replay: ArchReplay) -> list[str]:
    """The log of a replay; what is to be said of several callers of a row is said once.

    Of many callers a few are named; the JSON document names all.
    """
    callers: dict[tuple[str, str, str], list[str]] = {}
    for event in replay.events:
        of_line = callers.setdefault((event.status, event.row, event.text), [])
        of_line += event.caller.split("; ") if event.caller else []
    lines = []
    for (status, row, text), names in callers.items():
        who = f" ({_few(names, '; ')})" if names else ""
        lines.append(f"[{status}] {row}{who}: {text}")
    return lines


def replay_lines(selection: Selection, replays: Sequence[ArchReplay]) -> list[str]:
    """A paragraph an architecture: what was replayed, what came of it, what was left out."""
    lines = []
    for arch, replay in zip(selection.archs, replays, strict=True):
        outcomes = ", ".join(f"{n} {status}" for status, n in replay.jobs.items() if n) or "none"
        each = 1000 * replay.cpu_s / max(1, replay.job_count)
        lines.append(
            f"{arch.gfx}: {replay.rows} rows, {replay.job_count} jobs ({outcomes}), "
            f"{len(replay.requests)} distinct launches; replay {replay.cpu_s:.2f} s CPU, "
            f"{each:.2f} ms a job"
        )
        mixed = Counter(scoped.foreign for scoped in arch.rows if scoped.mixed)
        if mixed:
            parts = ", ".join(f"{what}: {n}" for what, n in sorted(mixed.items()))
            lines.append(
                f"  {mixed.total()} rows have one stage of another backend ({parts}); "
                "of these the FlyDSL stage is included"
            )
        if arch.out_of_scope:
            parts = ", ".join(f"{backend} {n}" for backend, n in arch.out_of_scope)
            total = sum(n for _, n in arch.out_of_scope)
            lines.append(f"  out of scope: {total} rows of other backends ({parts})")
        if replay.notes:
            lines.append(f"  {len(replay.notes)} notes of the runtime, such as rows passed over")
    return lines


def build_lines(cache: Path, result: BuildResult) -> list[str]:
    """What became of the artifacts."""
    line = (
        f"{cache}: {result.built} artifacts built, {result.reused} reused, "
        f"{len(result.failures)} failed"
    )
    if result.shared:
        line += f"; {result.shared} launches have the code of another, though not its build key"
    if result.retried:
        line += f", {result.retried} retries"
    if result.built:
        line += f"; {result.compile_cpu_s / result.built:.2f} s CPU an artifact"
    return [line]


def check_lines(cache: Path, result: CheckResult) -> list[str]:
    """What the cache has and lacks."""
    return [f"{cache}: {result.hits} launches served, {len(result.misses)} missing or damaged"]


def timing_line(timing: Timing, workers: int) -> str:
    """The last line of a summary."""
    return (
        f"{timing.wall_s:.1f} s, CPU {timing.cpu_s:.1f} s of which imports "
        f"{timing.import_cpu_s:.1f} s, at most {workers} workers"
    )


def launch_lines(replays: Sequence[ArchReplay]) -> list[str]:
    """Every distinct launch with the rows that ask for it."""
    return [
        f"{request.gfx} {request.launch.build} <- {rows_text(request.rows)}"
        for replay in replays
        for request in replay.requests
    ]


# ---------------------------------------------------------------- JSON


def replay_json(selection: Selection, replays: Sequence[ArchReplay]) -> dict[str, Any]:
    """The replay's part of the JSON document, by architecture."""
    return {
        arch.gfx: {
            "rows": replay.rows,
            "jobs": replay.jobs,
            "replay_cpu_s": replay.cpu_s,
            "mixed_rows": {str(s.row.source): s.foreign for s in arch.rows if s.mixed},
            "out_of_scope": dict(arch.out_of_scope),
            "events": [vars(event) for event in replay.events],
            "notes": replay.notes,
            "launches": [
                {"launch": launch_id(r.launch), "rows": list(r.rows)} for r in replay.requests
            ],
        }
        for arch, replay in zip(selection.archs, replays, strict=True)
    }


def build_json(result: BuildResult) -> dict[str, Any]:
    """The build's part of the JSON document."""
    return {
        "built": result.built,
        "reused": result.reused,
        "shared": result.shared,
        "retried": result.retried,
        "compile_cpu_s": result.compile_cpu_s,
        "cpu_s": result.cpu_s,
        "wall_s": result.wall_s,
        "failures": [
            {
                "gfx": item.request.gfx,
                "launch": launch_id(item.request.launch),
                "rows": list(item.request.rows),
                **vars(item.failure),
            }
            for item in result.failures
        ],
    }


def check_json(result: CheckResult) -> dict[str, Any]:
    """The check's part of the JSON document."""
    return {
        "hits": result.hits,
        "trace_cpu_s": result.trace_cpu_s,
        "cpu_s": result.cpu_s,
        "misses": [
            {
                "gfx": miss.request.gfx,
                "launch": launch_id(miss.request.launch),
                "rows": list(miss.request.rows),
                "file": miss.file,
                "problem": miss.problem,
                "difference": miss.difference,
            }
            for miss in result.misses
        ],
    }
