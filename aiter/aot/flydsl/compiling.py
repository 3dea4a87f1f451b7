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
from aiter.jit.utils.chip_info import Target, pinned
from aiter.ops.flydsl.kernels.tensor_shim import (
    BuildRef,
    Launch,
    artifact_of,
    compile_artifact,
    rebuild,
)

from .artifacts import (
    ArtifactError,
    CacheFullError,
    FileRecord,
    free_bytes,
    install,
    require_artifact,
    staging_folder,
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
    """Make `launch` for `gfx` be in `cache`. rocm: a toolkit's root, to compile with.

    known: files of the cache that were built for this launch before. With none the launch is
    compiled without asking for its key first, which costs a trace.
    """

    gfx: str
    launch: Launch
    cache: Path
    rocm: Path
    known: tuple[FileRecord, ...] = ()


@dataclass(frozen=True)
class Compiled:
    """Where a launch's artifact is. cpu_s: CPU seconds of this task, its linker's included."""

    record: FileRecord
    reused: bool
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
    """Compile `task.launch`, unless its artifact is there intact.

    Raises CacheFullError, ArtifactError, ToolkitError, DeviceLibraryError, and what building
    and compiling raise. LLVM may abort the process.
    """
    began = cpu_seconds()
    with pinned(Target.of(task.gfx)):
        launcher = _fresh(task.launch.build)
        record = _intact(task, launcher)
        reused = record is not None
        if record is None:
            record = _compile(task, launcher)
    return Compiled(record, reused, cpu_seconds() - began)


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


def _file(key: ArtifactKey) -> str:
    return key.path(Path()).as_posix()


def _fresh(ref: BuildRef) -> JitFunction:
    """A launcher that has compiled nothing yet.

    One that `rebuild` retains also retains its artifacts in memory, and would not write them
    into a second cache.
    """
    builder = getattr(importlib.import_module(ref.module), ref.qualname)
    build = getattr(builder, "__wrapped__", None)
    return rebuild(ref) if build is None else build(ref.key)


def _intact(task: CompileTask, launcher: JitFunction) -> FileRecord | None:
    if not task.known:
        return None
    file = _file(artifact_of(launcher))
    record = next((record for record in task.known if record.file == file), None)
    return record if record is not None and record.damage(task.cache) is None else None


def _compile(task: CompileTask, launcher: JitFunction) -> FileRecord:
    with staging_folder(task.cache) as staging:
        # LLVM's temporary files go where a later build will remove them, if this one is killed.
        overlay = {
            env.FLYDSL_RUNTIME_CACHE_DIR.name: str(staging),
            env.ROCM_PATH.name: str(task.rocm),
            "TMPDIR": str(staging),
            **dict.fromkeys(_WRITES_NOTHING),
        }
        try:
            with env.overlay(overlay):
                compile_artifact(launcher)
            staged = _only_file(staging)
            require_artifact(staged.read_bytes(), staged.parent.name, task.gfx)
            return install(task.cache, staged)
        except Exception as error:
            if free_bytes(task.cache) < _NEARLY_FULL:
                raise CacheFullError(
                    f"{task.cache}: the cache folder is full; make room, or name another with "
                    "--cache-dir; the next run goes on where this one stopped"
                ) from error
            raise


def _only_file(staging: Path) -> Path:
    # FlyDSL only logs that it could not write.
    files = list(staging.glob("*/*.pkl"))
    if len(files) != 1:
        raise ArtifactError(f"compiling one launch wrote {len(files)} artifacts")
    return files[0]
