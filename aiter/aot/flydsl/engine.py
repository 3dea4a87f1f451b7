"""Distinct launches into a cache and its manifest: the part that knows nothing of MoE.

Launches of all architectures share one pool, the longest first, so that no worker is left with
a long one at the end. Nothing is compiled twice: what the manifest, or the journal of a build
that was killed, says is there and intact is found again, and of two launches with different
build keys but the same code the second finds the first one's artifact. Either costs a trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, as_completed, wait
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from aiter.jit.utils.toolkit import Toolkit

from . import manifest
from .artifacts import build_lock, seed
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
    """What a build did.

    reused: artifacts of earlier builds; shared: launches with the code of another launch, which
    has the artifact. compile_cpu_s: sum over artifacts built; cpu_s: of the whole phase.
    """

    built: int = 0
    reused: int = 0
    shared: int = 0
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
        with build_lock(options.cache, log):
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
    intact = seed(options.cache, (artifact.record for artifact in before.artifacts.values()))
    names = {gfx: manifest.context_id(context) for gfx, context in contexts.items()}
    by_name = {names[gfx]: context for gfx, context in contexts.items()}
    made: dict[str, Artifact] = {}
    tasks = _longest_first(requests, before, options)
    with (
        closing(Journal(options.cache, by_name)) as journal,
        closing(_run(list(tasks), options)) as run,
    ):
        for done in run:
            request, compiled = tasks[done.task], done.result
            result.retried += done.attempts - 1
            if compiled is None:
                _fail(request, done.failure, result, log)
                continue
            file = compiled.record.file
            artifact = _artifact(request, compiled, names[request.gfx])
            if not compiled.found:
                result.built += 1
                result.compile_cpu_s += compiled.cpu_s
            elif file in intact and file not in made:
                result.reused += 1
            else:
                result.shared += 1
            if file in intact:
                # What compiled it is not this run.
                held = before.artifacts[file]
                artifact = replace(artifact, context=held.context, cpu_s=held.cpu_s)
            made[file] = manifest.joined(made[file], artifact) if file in made else artifact
            journal.add(made[file])
    new = Manifest(made, {**before.contexts, **by_name})
    manifest.write(options.cache, manifest.merge(before, new, options.tables))


def _fail(
    request: LaunchRequest,
    failure: Failure | None,
    result: BuildResult,
    log: Callable[[str], None],
) -> None:
    assert failure is not None
    if failure.error in _ENDS_THE_BUILD:
        raise UsageError(failure.message)
    log(f"[FAIL] {request.gfx} {request.launch.build}: {failure}")
    result.failures.append(KernelFailure(request, failure))


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
        launch = request.launch
        task = CompileTask(request.gfx, launch, options.cache, options.toolkit.root)
        # What one took before orders those that were built; for the rest the tile stands in.
        known = before.of_launch(request.gfx, launch_id(launch))
        seconds = max((artifact.cpu_s for artifact in known), default=0.0)
        tasks.append((seconds or _guessed_seconds(launch.build.key), task, request))
    tasks.sort(key=lambda item: -item[0])
    return {task: request for _, task, request in tasks}


def _guessed_seconds(key: object) -> float:
    """Compile time grows with the unrolled tile; good enough to put the long ones first."""
    tile = getattr(key, "tile", None)
    area = getattr(tile, "tile_m", 0) * getattr(tile, "rows", 0)
    return 0.2 + area / 50_000


def _artifact(request: LaunchRequest, compiled: Compiled, context: str) -> Artifact:
    build = request.launch.build
    return Artifact(
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
    try:
        for future in as_completed(futures):
            error = future.exception()
            failure = None if error is None else failure_of(error)
            yield Done(futures[future], None if failure else future.result(), failure, 1)
    finally:
        # What still runs when the build ends early must not outlive its hold on the cache.
        wait([future for future in futures if not future.cancel()])
