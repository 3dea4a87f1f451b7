"""Launches against a cache and its manifest: what is missing, damaged or other than asked for.

Compiles nothing, writes nothing and needs no linker: each distinct launch is traced for its key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import manifest
from .common import LaunchRequest
from .compiling import Traced, TraceTask, cpu_seconds, trace_launch
from .manifest import Manifest, launch_id
from .pool import WorkerPool
from .report import rows_text

_DIGEST = re.compile("[0-9a-f]{64}")
_DIGEST_SHOWN = 12


@dataclass(frozen=True)
class Miss:
    """A launch the cache cannot serve: who asks for it, what is wrong, what differs."""

    request: LaunchRequest
    file: str
    problem: str
    difference: str

    def __str__(self) -> str:
        build = self.request.launch.build  # type: ignore[attr-defined]
        file = f" ({self.file})" if self.file else ""
        difference = f"; {self.difference}" if self.difference else ""
        rows = rows_text(self.request.rows)
        return f"[MISS] {rows}: {self.request.gfx} {build}: {self.problem}{file}{difference}"


@dataclass
class CheckResult:
    """What a check found.

    unusable: why nothing of the cache counts, "" if it does. trace_cpu_s: the sum over launches;
    cpu_s: of the whole phase.
    """

    hits: int = 0
    misses: list[Miss] = field(default_factory=list)
    unusable: str = ""
    trace_cpu_s: float = 0.0
    cpu_s: float = 0.0


def check(
    requests: Sequence[LaunchRequest],
    context: dict[str, str],
    cache: Path,
    workers: int,
    timeout: float,
) -> CheckResult:
    """Look for every launch of `requests` in `cache`. context: this run's, without key parts."""
    began = cpu_seconds()
    result = CheckResult()
    try:
        held = manifest.read(cache)
        unusable = f"{cache} has no {manifest.MANIFEST}; build the cache first"
    except manifest.ManifestError as error:
        held, unusable = None, str(error)
    if held is None:
        result.unusable = unusable
        result.misses = [Miss(request, "", unusable, "") for request in requests]
        return result
    tasks = {TraceTask(request.gfx, request.launch): request for request in requests}
    with WorkerPool(trace_launch, workers, timeout=timeout) as pool:
        for done in pool.run(tasks):
            request, traced = tasks[done.task], done.result
            if traced is None:
                problem = f"its key cannot be found: {done.failure}"
                result.misses.append(Miss(request, "", problem, ""))
                continue
            result.trace_cpu_s += traced.cpu_s
            miss = _miss(request, traced, context, held, cache)
            if miss is None:
                result.hits += 1
            else:
                result.misses.append(miss)
    result.cpu_s = cpu_seconds() - began
    return result


def _miss(
    request: LaunchRequest, traced: Traced, context: dict[str, str], held: Manifest, cache: Path
) -> Miss | None:
    listed = held.artifacts.get(traced.file)
    if listed is not None:
        damage = listed.record.damage(cache)
        return None if damage is None else Miss(request, traced.file, damage, "")
    problem = "no such artifact was built"
    if (cache / traced.file).exists():
        problem = "the file is there, but the manifest does not list it"
    return Miss(request, traced.file, problem, _difference(request, traced, context, held))


def _difference(
    request: LaunchRequest, traced: Traced, context: dict[str, str], held: Manifest
) -> str:
    """Which part of the key parts this launch from the nearest artifact of its function."""
    same_launch = held.of_launch(request.gfx, launch_id(request.launch))
    if same_launch:
        mine = {**context, **manifest.common_parts(traced.key.parts)}
        recorded = (held.contexts[artifact.context] for artifact in same_launch)
        others = [{name: built.get(name, "-") for name in mine} for built in recorded]
        shown = _shown(mine, _nearest(mine, others)) or "nothing that is recorded"
        return f"the artifact of this build key differs in {shown}"
    key = manifest.key_fields(request.launch.build.key)  # type: ignore[attr-defined]
    function = traced.key.function_name
    # A setting of the environment may be why the runtime asks for this key.
    settings = {name: value for name, value in context.items() if name.startswith("env.")}
    mine = {**key, "arch": request.gfx, **settings}
    artifacts = [a for a in held.artifacts.values() if a.function == function]
    if not artifacts:
        return f"no artifact of {function} was built"
    others = []
    for artifact in artifacts:
        then = held.contexts[artifact.context]
        set_then = {name: then.get(name, "-") for name in settings}
        others.append({**artifact.key, "arch": artifact.gfx, **set_then})
    nearest = _nearest(mine, others)
    return f"the nearest artifact of {function} differs in {_shown(mine, nearest) or 'its builder'}"


def _nearest(mine: dict[str, str], others: list[dict[str, str]]) -> dict[str, str]:
    return min(others, key=lambda other: len(_differing(mine, other)))


def _differing(mine: dict[str, str], theirs: dict[str, str]) -> list[str]:
    names = sorted(mine.keys() | theirs.keys())
    return [name for name in names if mine.get(name) != theirs.get(name)]


def _shown(mine: dict[str, str], theirs: dict[str, str]) -> str:
    short = lambda value: value[:_DIGEST_SHOWN] if _DIGEST.fullmatch(value) else value or "unset"
    return "; ".join(
        f"{name} {short(mine.get(name, '-'))}, built with {short(theirs.get(name, '-'))}"
        for name in _differing(mine, theirs)
    )
