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
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiter import env
from aiter.jit.utils.toolkit import ToolkitError, find_toolkit

from . import report
from .artifacts import build_lock
from .common import BuildError, LaunchRequest, UsageError, prepare_process
from .limits import WorkerLimit, worker_limit
from .manifest import sources_digest
from .pool import WorkerPool, share_with_workers
from .report import Log, Timing
from .rows import Selection, select_rows

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from .check import CheckResult
    from .engine import BuildOptions, BuildResult
    from .replay import ArchReplay


def main(argv: Sequence[str] | None = None, executor: Executor | None = None) -> int:
    """Run the command line; returns the exit code.

    executor: where to compile instead of in worker processes of this machine; see
    `engine.BuildOptions`.
    """
    options = _parse(argv)
    try:
        return _run(options, executor)
    except (UsageError, ToolkitError, env.EnvError) as error:
        return _stop(options, 2, str(error))
    except BuildError as error:
        return _stop(options, 1, str(error))
    except KeyboardInterrupt:
        goes_on = "; the next run goes on where this one stopped" if options.builds else ""
        return _stop(options, 130, f"interrupted{goes_on}")
    except BrokenPipeError:
        # Whoever read the output has seen enough; keep the interpreter from telling of it too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _stop(options: _Options, code: int, message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    if options.json:
        print(json.dumps({"exit": code, "error": message}))
    return code


@dataclass(frozen=True)
class _Options:
    csv: tuple[Path, ...]
    archs: tuple[str, ...]
    jobs: int | None
    check: bool
    list: bool
    json: bool
    show_config: bool
    exhaustive: bool
    max_tokens: int | None
    cache: Path

    @property
    def builds(self) -> bool:
        return not (self.check or self.list)


def _parse(argv: Sequence[str] | None) -> _Options:
    parser = argparse.ArgumentParser(
        prog="python -m aiter.aot.flydsl.moe",
        description="Compile every fused-MoE kernel that tuned tables ask for.",
        epilog="Exit codes: 0 good, 1 failures or misses, 2 usage or environment, 130 interrupted.",
    )
    add = parser.add_argument
    add("--csv", action="append", default=[], metavar="FILE", help="a table; may be repeated")
    add("--arch", action="append", default=[], metavar="GFX", help="e.g. gfx950; list or repeat")
    add("--jobs", type=int, metavar="N", help="workers at once, instead of AITER_MAX_JOBS")
    add("--cache-dir", metavar="DIR", help="instead of FLYDSL_RUNTIME_CACHE_DIR")
    add("--max-tokens", type=int, metavar="M", help="replay no more tokens than these")
    add("--exhaustive", action="store_true", help="replay every token count; slow")
    add("--json", action="store_true", help="result as JSON on stdout, log on stderr")
    mode = parser.add_mutually_exclusive_group()
    flag = mode.add_argument
    flag("--check", action="store_true", help="compile nothing, fail on a missing artifact")
    flag("--list", action="store_true", help="print the launches, compile nothing")
    flag("--show-config", action="store_true", help="print the settings in effect")
    given = parser.parse_args(argv)
    for name in ("jobs", "max_tokens"):
        value = getattr(given, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: give a number from 1 on")
    cache = Path(given.cache_dir).expanduser() if given.cache_dir else None
    return _Options(
        csv=tuple(Path(path).expanduser() for path in given.csv),
        archs=tuple(gfx for text in given.arch for gfx in text.replace(";", ",").split(",") if gfx),
        jobs=given.jobs,
        check=given.check,
        list=given.list,
        json=given.json,
        show_config=given.show_config,
        exhaustive=given.exhaustive,
        max_tokens=given.max_tokens,
        cache=(cache or env.FLYDSL_RUNTIME_CACHE_DIR.get()).absolute(),
    )


def _run(options: _Options, executor: Executor | None) -> int:
    wall = time.monotonic()
    log = Log(options.json)
    if options.show_config:
        return _show_config(options)
    for setting in env.REGISTRY.values():
        setting.get()  # whoever reads it later is not the first to find that it does not parse
    selection = select_rows(options.csv, options.archs)
    limit = worker_limit(options.jobs)
    toolkit = None
    if options.builds:
        toolkit = find_toolkit()
        with build_lock(options.cache, log):
            pass  # says at once, not after the replay, that the folder will not do
        log(f"linker: {toolkit.describe()}")
    log(f"workers: {limit.workers}, by {limit.reason}")
    log.notes(selection.notes)

    import_cpu_s = _import_for_workers()
    replays = _replay(selection, options, limit)
    for replay in replays:
        for line in report.event_lines(replay):
            log(line)
        log.notes(replay.notes)
    requests = [request for replay in replays for request in replay.requests]
    lines = report.replay_lines(selection, replays)
    document: dict[str, Any] = {"archs": report.replay_json(selection, replays)}
    good = not any(replay.failed for replay in replays)
    if not requests:
        log("[FAIL] no row asks for any launch")
        good = False
    if options.list:
        for line in report.launch_lines(replays):
            log(line)
    elif options.check:
        found = _check(requests, options, limit, log)
        good = good and not found.misses
        lines += report.check_lines(options.cache, found)
        document["check"] = report.check_json(found)
    elif requests:
        from .engine import BuildOptions

        assert toolkit is not None
        build_options = BuildOptions(
            cache=options.cache,
            toolkit=toolkit,
            workers=limit.workers,
            timeout=env.AITER_FLYDSL_AOT_TIMEOUT.get(),
            retries=env.AITER_FLYDSL_AOT_MAX_RETRIES.get(),
            tables=tuple(map(str, selection.tables)),
            executor=executor,
        )
        made = _build(requests, replays, build_options, log)
        good = good and not made.failures
        lines += report.build_lines(options.cache, made)
        document["build"] = report.build_json(made)
    timing = Timing(time.monotonic() - wall, _cpu_seconds(), import_cpu_s)
    for line in (*lines, report.timing_line(timing, limit.workers)):
        log(line)
    code = 0 if good else 1
    if options.json:
        document |= {"exit": code, "workers": limit.workers, **vars(timing)}
        print(json.dumps(document, indent=1))
    return code


# ---------------------------------------------------------------- the phases


def _import_for_workers() -> float:
    """Import once what every worker needs; CPU seconds from the start of the process to there."""
    prepare_process()
    try:
        from . import check, dry_run, engine, replay  # noqa: F401

        dry_run.preload()
    except ImportError as error:
        raise UsageError(f"{error}; install this project with its dependencies") from None
    share_with_workers()
    return _cpu_seconds()


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _replay(selection: Selection, options: _Options, limit: WorkerLimit) -> list[ArchReplay]:
    from .replay import ReplayTask, replay_arch

    tasks = [
        ReplayTask(
            arch=arch,
            tables=selection.tables,
            exhaustive=options.exhaustive,
            with_key_parts=options.builds,
            **({} if options.max_tokens is None else {"max_tokens": options.max_tokens}),
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


def _context() -> dict[str, str]:
    """What every artifact of this run depends on, besides the parts of FlyDSL's key."""
    return {
        "kernel sources": sources_digest(),
        **{f"env.{name}": value for name, value in env.code_values().items()},
    }


def _check(
    requests: list[LaunchRequest], options: _Options, limit: WorkerLimit, log: Log
) -> CheckResult:
    from .check import check

    timeout = env.AITER_FLYDSL_AOT_TIMEOUT.get()
    found = check(requests, _context(), options.cache, limit.workers, timeout)
    if found.unusable:
        log(f"[MISS] every launch: {found.unusable}")
    else:
        for miss in found.misses:
            log(str(miss))
    return found


def _build(
    requests: list[LaunchRequest], replays: list[ArchReplay], options: BuildOptions, log: Log
) -> BuildResult:
    from .engine import build

    common = {
        **_context(),
        "aiter": _own_version(),
        "torch": version("torch"),
        "linker": f"LLD {options.toolkit.linker.version}",
    }
    contexts = {replay.gfx: {**replay.common_parts, **common} for replay in replays}
    return build(requests, contexts, options, log)


def _own_version() -> str:
    try:
        return version("aiter")
    except PackageNotFoundError:
        return "not installed"


def _show_config(options: _Options) -> int:
    print(env.render_table())
    print()
    limit = worker_limit(options.jobs)
    try:
        linker = find_toolkit().describe()
    except ToolkitError as error:
        linker = f"none: {error}"
    print(f"cache     {options.cache}\nworkers   {limit.workers}, by {limit.reason}")
    print(f"linker    {linker}")
    selection = select_rows(options.csv, options.archs)
    for path in selection.tables:
        print(f"table     {path}")
    for arch in selection.archs:
        print(f"arch      {arch.gfx}: {len(arch.rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
