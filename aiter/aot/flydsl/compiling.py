"""One launch: compile it into the cache, or trace it for its key. Runs in a worker process.

Both functions take and return plain values, so that any `concurrent.futures.Executor` of
processes can run them. They change this process's environment while they run: not for threads.
"""

from __future__ import annotations

import importlib
import resource
from dataclasses import dataclass
from pathlib import Path

from flydsl.compiler.jit_function import JitFunction

from aiter import env
from aiter.jit.utils.backend import ArtifactKey
from aiter.jit.utils.chip_info import GFX_LDS_BYTES, Target, pinned
from aiter.ops.flydsl.kernels.resources import launcher_resources
from aiter.ops.flydsl.kernels.tensor_shim import (
    BuildRef,
    Launch,
    artifact_of,
    compile_artifact,
    rebuild,
)

from .artifacts import (
    STAGING,
    TEMPORARY,
    ArtifactError,
    CacheFullError,
    FileRecord,
    free_bytes,
    install,
    require_artifact,
)

# What would keep FlyDSL from writing its cache file.
_WRITES_NOTHING = (
    "FLYDSL_RUNTIME_RUN_ONLY",
    "FLYDSL_RUNTIME_ENABLE_CACHE",
    "FLYDSL_DUMP_IR",
    "FLYDSL_DEBUG_DUMP_ASM",
)
_NEARLY_FULL = 1 << 16  # bytes free at which a failed write is taken to be for want of room


@dataclass(frozen=True)
class CompileTask:
    """Make `launch` for `gfx` be in `cache`. rocm: a toolkit's root, to compile with."""

    gfx: str
    launch: Launch
    cache: Path
    rocm: Path


@dataclass(frozen=True)
class Compiled:
    """A launch's artifact. found: it was in the staging folder, from an earlier build or launch.

    cpu_s: CPU seconds of this task, its linker's included.
    """

    record: FileRecord
    found: bool
    cpu_s: float


@dataclass(frozen=True)
class TraceTask:
    """Ask for the key of `launch` on `gfx`."""

    gfx: str
    launch: Launch


@dataclass(frozen=True)
class Traced:
    """A launch's key, and the file, relative to a cache, where its artifact belongs."""

    file: str
    key: ArtifactKey
    cpu_s: float


def compile_launch(task: CompileTask) -> Compiled:
    """Trace `task.launch` and compile it, unless its artifact is in the staging folder.

    Raises CacheFullError, ArtifactError, also for a kernel that could not start, ToolkitError,
    DeviceLibraryError, and what building and compiling raise. LLVM may abort the process.
    """
    began = cpu_seconds()
    staging = task.cache / STAGING
    overlay = {
        env.FLYDSL_RUNTIME_CACHE_DIR.name: str(staging),
        env.ROCM_PATH.name: str(task.rocm),
        # LLVM's temporary files go where a later build removes them, if this one is killed.
        "TMPDIR": str(staging / TEMPORARY),
        **dict.fromkeys(_WRITES_NOTHING),
    }
    try:
        with pinned(Target.of(task.gfx)), env.overlay(overlay):
            launcher = _fresh(task.launch.build)
            compile_artifact(launcher)
        _require_launchable(launcher, task.gfx)
        file, found = _outcome(launcher)
        data = _staged(staging / file)
        require_artifact(data, launcher.func.__name__, task.gfx)
        record = install(task.cache, file, data)
    except Exception as error:
        if free_bytes(task.cache) < _NEARLY_FULL:
            raise CacheFullError(
                f"{task.cache}: the cache folder is full; make room, or name another with "
                "--cache-dir; the next run goes on where this one stopped"
            ) from error
        raise
    return Compiled(record, found, cpu_seconds() - began)


def trace_launch(task: TraceTask) -> Traced:
    """The key of `task.launch`. Compiles nothing, writes nothing and needs no linker."""
    began = cpu_seconds()
    with pinned(Target.of(task.gfx)):
        key = artifact_of(_fresh(task.launch.build))
    return Traced(_file(key), key, cpu_seconds() - began)


def cpu_seconds() -> float:
    """CPU seconds this process and its finished children have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _require_launchable(launcher: JitFunction, gfx: str) -> None:
    """Raise ArtifactError for a kernel that no workgroup can start: LLVM makes those too."""
    limit = GFX_LDS_BYTES.get(gfx)
    for kernel in launcher_resources(launcher):
        if limit is not None and kernel.lds_bytes > limit:
            raise ArtifactError(
                f"{kernel.kernel} needs {kernel.lds_bytes} bytes of LDS, a workgroup of {gfx} has "
                f"{limit}"
            )


def _file(key: ArtifactKey) -> str:
    return key.path(Path()).as_posix()


def _fresh(ref: BuildRef) -> JitFunction:
    """A launcher that has compiled nothing yet.

    One that `rebuild` retains also retains its artifacts in memory, and would not write them
    into another cache folder.
    """
    builder = getattr(importlib.import_module(ref.module), ref.qualname)
    build = getattr(builder, "__wrapped__", None)
    return rebuild(ref) if build is None else build(ref.key)


def _outcome(launcher: JitFunction) -> tuple[str, bool]:
    """(file in FlyDSL's cache, whether it was there before) of a fresh launcher's one call."""
    manager = launcher.cache_manager
    if manager is None or len(manager.memory_cache) != 1:
        raise ArtifactError("FlyDSL did not use its disk cache")
    (key,) = manager.memory_cache
    return f"{launcher.func.__name__}/{key}.pkl", manager.cache_info().hits > 0


def _staged(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        # FlyDSL only logs that it could not write.
        raise ArtifactError("FlyDSL compiled the launch but did not write it") from None
