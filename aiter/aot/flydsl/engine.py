"""Distinct launches into a cache and its manifest: the part that knows nothing of MoE.

Launches of all architectures share one pool, the longest first, so that no worker is left with
a long one at the end. What the manifest, or the journal of a build that was killed, says is
there and intact is not compiled again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from aiter.jit.utils.toolkit import Toolkit

from . import manifest
from .artifacts import build_lock
from .common import LaunchRequest, UsageError
from .compiling import Compiled, CompileTask, compile_launch, cpu_seconds
from .manifest import Artifact, Journal, Manifest, launch_id
from .pool import Done, Failure, WorkerPool, failure_of

# Failures of the machine, not of a kernel: no other kernel would fare better.
_ENDS_THE_BUILD = ("CacheFullError", "ToolkitError")


@dataclass(frozen=True)
class BuildOptions:
    """How to build. timeout: seconds a kernel may take; retries: of one whose worker died.

    executor: runs the tasks instead of the engine's own workers; must run them in processes that
    see the cache and the toolkit under the same paths. Deaths and timeouts are then its affair.
    """

    cache: Path
    toolkit: Toolkit
    workers: int
    timeout: float
    retries: int
    tables: tuple[str, ...] = ()
    executor: Executor | None = None


@dataclass(frozen=True)
class KernelFailure:
    """A launch that has no artifact, and who asked for it."""

    request: LaunchRequest
    failure: Failure


@dataclass
class BuildResult:
    """What a build did. compile_cpu_s: the sum over artifacts built; cpu_s: of the whole phase."""

    built: int = 0
    reused: int = 0
    failures: list[KernelFailure] = field(default_factory=list)
    retried: int = 0
    compile_cpu_s: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0


def build(
    requests: Sequence[LaunchRequest],
    contexts: dict[str, dict[str, str]],
    options: BuildOptions,
    log: Callable[[str], None],
) -> BuildResult:
    """Make the cache hold every launch of `requests`. contexts: by architecture.

    Raises UsageError when the cache folder cannot be used, at the start or later on.
    """
    wall, cpu = time.monotonic(), cpu_seconds()
    result = BuildResult()
    try:
        with build_lock(options.cache):
            _build(requests, contexts, options, log, result)
    except OSError as error:
        raise UsageError(
            f"{options.cache}: the cache folder cannot be written ({error.strerror}); make room, "
            "or name another with --cache-dir; the next run goes on where this one stopped"
        ) from error
    result.cpu_s, result.wall_s = cpu_seconds() - cpu, time.monotonic() - wall
    return result


def _build(
    requests: Sequence[LaunchRequest],
    contexts: dict[str, dict[str, str]],
    options: BuildOptions,
    log: Callable[[str], None],
    result: BuildResult,
) -> None:
    before = _recorded(options.cache, log)
    names = {gfx: manifest.context_id(context) for gfx, context in contexts.items()}
    by_name = {names[gfx]: context for gfx, context in contexts.items()}
    made: dict[str, Artifact] = {}
    tasks = _longest_first(requests, before, options)
    with closing(Journal(options.cache, by_name)) as journal:
        for done in _run(list(tasks), options):
            request = tasks[done.task]
            result.retried += done.attempts - 1
            if done.failure is not None:
                if done.failure.error in _ENDS_THE_BUILD:
                    raise UsageError(done.failure.message)
                log(f"[FAIL] {request.gfx} {request.launch.build}: {done.failure}")
                result.failures.append(KernelFailure(request, done.failure))
                continue
            artifact = _artifact(request, done.result, names[request.gfx], before)
            if done.result.reused:
                result.reused += 1
            else:
                result.built += 1
                result.compile_cpu_s += done.result.cpu_s
                journal.add(artifact)
            file = artifact.record.file
            made[file] = manifest.joined(made[file], artifact) if file in made else artifact
    new = Manifest(made, {**before.contexts, **by_name})
    manifest.write(options.cache, manifest.merge(before, new, options.tables))


def _recorded(cache: Path, log: Callable[[str], None]) -> Manifest:
    """What earlier builds recorded, one that was killed included."""
    try:
        finished = manifest.read(cache) or Manifest()
    except manifest.ManifestError as error:
        log(f"[NOTE] {error}; nothing in it is reused")
        finished = Manifest()
    return manifest.merge(finished, manifest.read_journal(cache), ())


def _longest_first(
    requests: Iterable[LaunchRequest], before: Manifest, options: BuildOptions
) -> dict[CompileTask, LaunchRequest]:
    tasks = []
    for request in requests:
        known = before.of_launch(request.gfx, launch_id(request.launch))
        task = CompileTask(
            gfx=request.gfx,
            launch=request.launch,
            cache=options.cache,
            rocm=options.toolkit.root,
            known=tuple(artifact.record for artifact in known),
        )
        # What one took before orders those that were built; for the rest the tile stands in.
        seconds = max((artifact.cpu_s for artifact in known), default=0.0)
        tasks.append((seconds or _guessed_seconds(request.launch.build.key), task, request))
    tasks.sort(key=lambda item: -item[0])
    return {task: request for _, task, request in tasks}


def _guessed_seconds(key: object) -> float:
    """Compile time grows with the unrolled tile; good enough to put the long ones first."""
    tile = getattr(key, "tile", None)
    area = getattr(tile, "tile_m", 0) * getattr(tile, "rows", 0)
    return 0.2 + area / 50_000


def _artifact(
    request: LaunchRequest, compiled: Compiled, context: str, before: Manifest
) -> Artifact:
    build = request.launch.build
    new = Artifact(
        record=compiled.record,
        gfx=request.gfx,
        function=compiled.record.file.partition("/")[0],
        builder=f"{build.module}:{build.qualname}",
        key=manifest.key_fields(build.key),
        launches=(launch_id(request.launch),),
        rows=request.rows,
        context=context,
        cpu_s=round(compiled.cpu_s, 3),
    )
    held = before.artifacts.get(compiled.record.file)
    if compiled.reused and held is not None:
        # Its context says what compiled it, which is not this run.
        return replace(new, context=held.context, cpu_s=held.cpu_s)
    return new


def _run(tasks: list[CompileTask], options: BuildOptions) -> Iterator[Done[CompileTask, Compiled]]:
    if options.executor is not None:
        yield from _run_elsewhere(tasks, options.executor)
        return
    with WorkerPool(
        compile_launch, options.workers, timeout=options.timeout, retries=options.retries
    ) as pool:
        yield from pool.run(tasks)


def _run_elsewhere(
    tasks: list[CompileTask], executor: Executor
) -> Iterator[Done[CompileTask, Compiled]]:
    futures = {executor.submit(compile_launch, task): task for task in tasks}
    for future in as_completed(futures):
        error = future.exception()
        failure = None if error is None else failure_of(error)
        yield Done(futures[future], None if failure else future.result(), failure, 1)
