"""What the command lines of all kinds of kernels share: options, phases and exit codes.

A kind says which launches there are to be (`Kind`); here they are listed, checked or built.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from aiter import env
from aiter.jit.utils.toolkit import Toolkit, ToolkitError, find_toolkit

from . import report
from .artifacts import build_lock
from .common import BuildError, LaunchRequest, UsageError, prepare_process
from .limits import WorkerLimit, worker_limit
from .pool import share_with_workers
from .report import Log, Timing

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from .check import CheckResult
    from .engine import BuildResult

S = TypeVar("S")
EPILOG = "Exit codes: 0 good, 1 failures or misses, 2 usage or environment, 130 interrupted."


@dataclass(frozen=True)
class Options:
    """The options that every kind has; `mode` is build, check, list or show_config."""

    jobs: int | None
    json: bool
    cache_dir: Path | None
    mode: str

    @property
    def cache(self) -> Path:
        """The cache folder. Raises EnvError."""
        return (self.cache_dir or env.FLYDSL_RUNTIME_CACHE_DIR.get()).absolute()

    @property
    def builds(self) -> bool:
        """Whether the run compiles."""
        return self.mode == "build"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `Options`."""
    add = parser.add_argument
    add("--jobs", type=positive, metavar="N", help="workers at once, instead of AITER_MAX_JOBS")
    add("--cache-dir", metavar="DIR", help="instead of FLYDSL_RUNTIME_CACHE_DIR")
    add("--json", action="store_true", help="result as JSON on stdout, log on stderr")
    parser.set_defaults(mode="build")
    mode = parser.add_mutually_exclusive_group()
    for name, meaning in (
        ("check", "compile nothing, fail on a missing artifact"),
        ("list", "print the launches, compile nothing"),
        ("show-config", "print the settings in effect"),
    ):
        value = name.replace("-", "_")
        mode.add_argument(f"--{name}", dest="mode", action="store_const", const=value, help=meaning)


def positive(text: str) -> int:
    """A whole number from 1 on, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a number from 1 on")
    return number


def options_of(given: argparse.Namespace) -> Options:
    """The common options among `given`."""
    cache_dir = Path(given.cache_dir).expanduser() if given.cache_dir else None
    return Options(jobs=given.jobs, json=given.json, cache_dir=cache_dir, mode=given.mode)


@dataclass
class Wanted:
    """The launches that a kind asks for, and what is to be said of them.

    contexts: by architecture, what the artifacts of a build have in common besides what is the
    same for every kind; `sources` is the digest of the kernels' sources. labels: what the rows of
    the requests begin with, file or deployment; a build replaces all rows of those.
    """

    requests: list[LaunchRequest]
    contexts: dict[str, dict[str, str]]
    sources: str
    labels: tuple[str, ...]
    lines: list[str] = field(default_factory=list)
    launch_lines: list[str] = field(default_factory=list)
    document: dict[str, Any] = field(default_factory=dict)
    good: bool = True


@dataclass(frozen=True)
class Kind(Generic[S]):
    """A family of kernels that is built ahead of time.

    read: what the command line selects; raises UsageError. preload: import what its workers need.
    collect: the launches of a selection. show: lines for --show-config.
    """

    read: Callable[[Log], S]
    preload: Callable[[], None]
    collect: Callable[[S, WorkerLimit, Log], Wanted]
    show: Callable[[S], list[str]]


def run(kind: Kind[S], options: Options, executor: Executor | None = None) -> int:
    """Do what `options` say for `kind`; the exit code.

    executor: where to compile instead of in worker processes of this machine; see
    `engine.BuildOptions`.
    """
    try:
        return _run(kind, options, executor)
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


def _stop(options: Options, code: int, message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    if options.json:
        print(json.dumps({"exit": code, "error": message}))
    return code


def _run(kind: Kind[S], options: Options, executor: Executor | None) -> int:
    wall = time.monotonic()
    log = Log(options.json)
    if options.mode == "show_config":
        return _show_config(kind, options, log)
    prepare_process()
    for setting in env.REGISTRY.values():
        if setting.is_set():
            setting.get()  # whoever reads it later is not the first to find that it does not parse
    selected = kind.read(log)
    limit = worker_limit(options.jobs)
    toolkit = None
    if options.builds:
        toolkit = find_toolkit()
        with build_lock(options.cache, log):
            pass  # says at once, not after the replay, that the folder will not do
        log(f"linker: {toolkit.describe()}")
    log(f"workers: {limit.workers}, by {limit.reason}")

    import_cpu_s = _import_for_workers(kind.preload)
    wanted = kind.collect(selected, limit, log)
    good, lines, document = wanted.good, list(wanted.lines), dict(wanted.document)
    if options.mode == "list":
        for line in wanted.launch_lines:
            log(line)
    elif options.mode == "check":
        found = _check(wanted, options, limit, log)
        good = good and not found.misses
        lines += report.check_lines(options.cache, found)
        document["check"] = report.check_json(found)
    elif wanted.requests:
        assert toolkit is not None
        made = _build(wanted, options, toolkit, limit, executor, log)
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


def _import_for_workers(preload: Callable[[], None]) -> float:
    """Import once what every worker needs; CPU seconds from the start of the process to there."""
    try:
        Path.home()
    except RuntimeError:
        # FlyDSL asks for it when it is imported.
        raise UsageError("this user has no home folder; set HOME to one") from None
    try:
        from . import check, engine  # noqa: F401

        preload()
    except ImportError as error:
        raise UsageError(f"{error}; install this project with its dependencies") from None
    share_with_workers()
    return _cpu_seconds()


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _context(sources: str) -> dict[str, str]:
    """What every artifact of this run depends on, besides the parts of FlyDSL's key."""
    return {
        "kernel sources": sources,
        **{f"env.{name}": value for name, value in env.code_values().items()},
    }


def _check(wanted: Wanted, options: Options, limit: WorkerLimit, log: Log) -> CheckResult:
    from .check import check

    timeout = env.AITER_FLYDSL_AOT_TIMEOUT.get()
    context = _context(wanted.sources)
    found = check(wanted.requests, context, options.cache, limit.workers, timeout)
    if found.unusable:
        log(f"[MISS] every launch: {found.unusable}")
    else:
        for miss in found.misses:
            log(str(miss))
    return found


def _build(
    wanted: Wanted,
    options: Options,
    toolkit: Toolkit,
    limit: WorkerLimit,
    executor: Executor | None,
    log: Log,
) -> BuildResult:
    from .engine import BuildOptions, build

    common = {
        **_context(wanted.sources),
        "aiter": _own_version(),
        "torch": version("torch"),
        "linker": f"LLD {toolkit.linker.version}",
    }
    return build(
        wanted.requests,
        {gfx: {**parts, **common} for gfx, parts in wanted.contexts.items()},
        BuildOptions(
            cache=options.cache,
            toolkit=toolkit,
            workers=limit.workers,
            timeout=env.AITER_FLYDSL_AOT_TIMEOUT.get(),
            retries=env.AITER_FLYDSL_AOT_MAX_RETRIES.get(),
            tables=wanted.labels,
            executor=executor,
        ),
        log,
    )


def _own_version() -> str:
    try:
        return version("aiter")
    except PackageNotFoundError:
        return "not installed"


def _show_config(kind: Kind[S], options: Options, log: Log) -> int:
    print(env.render_table())
    print()
    limit = worker_limit(options.jobs)
    try:
        linker = find_toolkit().describe()
    except ToolkitError as error:
        linker = f"none: {error}"
    print(f"cache     {options.cache}\nworkers   {limit.workers}, by {limit.reason}")
    print(f"linker    {linker}")
    for line in kind.show(kind.read(log)):
        print(line)
    return 0
