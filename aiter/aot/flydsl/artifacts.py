"""What a well-formed artifact is, and how one gets into the cache.

FlyDSL's artifact is the pickle of one `CompiledArtifact`. Unpickling runs whatever the file
names, so a file is judged here by a reader that admits nothing but that class and builds no
instance of it.

Workers compile into a staging folder that lies in the cache and that FlyDSL takes for its cache.
A finished artifact is judged and goes into the cache by one rename, so that a process killed at
any moment leaves no half-written one there; what it left in the staging folder is known to be
garbage once no build holds the lock. The staging folder begins with links to what earlier builds
recorded and is intact: FlyDSL then finds it there, and trusts nothing else.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import pickle
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .common import UsageError

STAGING = ".aiter_staging"
TEMPORARY = ".tmp"  # in the staging folder, for what compilers leave
_LOCK = ".aiter_build.lock"
_MIN_FREE = 1 << 20  # bytes; an artifact is a few thousand
_STALE_SECONDS = 600.0


class ArtifactError(ValueError):
    """A file is not an artifact FlyDSL can load."""


class CacheFullError(OSError):
    """No room, or no permission, to write into the cache folder."""


@dataclass(frozen=True)
class FileRecord:
    """A file of the cache, relative to it, and its contents' fingerprint. size in bytes."""

    file: str
    size: int
    sha256: str

    def damage(self, cache: Path) -> str | None:
        """How the file differs from this record, None if it does not."""
        try:
            data = (cache / self.file).read_bytes()
        except FileNotFoundError:
            return "the file is missing"
        except OSError as error:
            return f"the file cannot be read ({error.strerror})"
        if len(data) != self.size:
            return f"the file has {len(data)} bytes, the manifest says {self.size}"
        found = hashlib.sha256(data).hexdigest()
        if found != self.sha256:
            return f"the contents are not what was built ({found[:12]}, not {self.sha256[:12]})"
        return None


# ---------------------------------------------------------------- reading


class _Opaque:
    """Stands in for a CompiledArtifact: keeps its state, runs nothing."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if (module, name) == ("flydsl.compiler.jit_executor", "CompiledArtifact"):
            return _Opaque
        raise ArtifactError(f"the file names {module}.{name}, which no artifact does")


def require_artifact(data: bytes, function_name: str, gfx: str) -> None:
    """Check that `data` is one artifact of `function_name` for `gfx`. Raises ArtifactError."""
    try:
        loaded = _Reader(io.BytesIO(data)).load()
        state = loaded.state
        text = zlib.decompress(state["ir_zlib"]).decode()
        entry, extra = state["entry"], (state["processor_refs"], state["link_libs"])
    except ArtifactError:
        raise
    except Exception as error:
        raise ArtifactError(f"not an artifact ({type(error).__name__}: {error})") from None
    if entry != function_name:
        raise ArtifactError(f"an artifact of {entry}, not of {function_name}")
    if any(extra):
        raise ArtifactError(f"the artifact loads other code: {extra}")
    if "gpu.binary" not in text or gfx not in text:
        raise ArtifactError(f"the artifact holds no {gfx} binary")


# ---------------------------------------------------------------- writing


@contextmanager
def build_lock(cache: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Own `cache` for building, after whoever does so now; removes what killed builds left.

    log: is told when that takes waiting. Raises UsageError for a folder that cannot be written or
    is full.
    """
    with ExitStack() as leaving:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            lock = os.open(cache / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            leaving.callback(os.close, lock)
            _take(lock, cache, log)
            leaving.callback(shutil.rmtree, cache / STAGING, ignore_errors=True)
            _sweep(cache)
            _require_room(cache)
            (cache / STAGING / TEMPORARY).mkdir(parents=True)
        except OSError as error:
            raise UsageError(
                f"{cache}: the cache folder cannot be written ({error.strerror}); name another "
                "with --cache-dir or FLYDSL_RUNTIME_CACHE_DIR"
            ) from None
        yield


def _take(lock: int, cache: Path, log: Callable[[str], None]) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log(f"[NOTE] {cache}: waiting for another build into it to end")
        fcntl.flock(lock, fcntl.LOCK_EX)


def _require_room(cache: Path) -> None:
    free = free_bytes(cache)
    if free < _MIN_FREE:
        raise UsageError(
            f"{cache}: the cache folder is full ({free} bytes are free, {_MIN_FREE} are needed "
            "to begin); make room, or name another with --cache-dir"
        )


def free_bytes(folder: Path) -> int:
    """Bytes an unprivileged process may still write below `folder`."""
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


def _sweep(cache: Path) -> None:
    shutil.rmtree(cache / STAGING, ignore_errors=True)
    for draft in cache.glob(".aiter_*.tmp"):
        draft.unlink(missing_ok=True)
    for stray in cache.glob("*/.*.pkl.*.tmp"):
        # FlyDSL's own unfinished writes; a young one may belong to a process that runs now.
        try:
            if time.time() - stray.stat().st_mtime > _STALE_SECONDS:
                stray.unlink()
        except OSError:
            continue


def seed(cache: Path, records: Iterable[FileRecord]) -> set[str]:
    """Link what is recorded and intact into the staging folder; returns the names of its files.

    Raises OSError.
    """
    intact = set()
    for record in records:
        if record.damage(cache) is None:
            staged = cache / STAGING / record.file
            staged.parent.mkdir(exist_ok=True)
            try:
                os.link(cache / record.file, staged)
            except OSError:  # a file system without links
                shutil.copyfile(cache / record.file, staged)
            intact.add(record.file)
    return intact


def install(cache: Path, file: str, data: bytes) -> FileRecord:
    """Put `data` into `cache` as `file`, unless it is there already. Raises OSError.

    It becomes readable to all: FlyDSL writes 0600, and whoever serves is often another user.
    For a cache that is read-only to them FlyDSL also needs the lock file to be there and open
    to all.
    """
    record = FileRecord(file, len(data), hashlib.sha256(data).hexdigest())
    if record.damage(cache) is None:
        return record
    final = cache / file
    final.parent.mkdir(exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=cache / STAGING)
    with open(handle, "wb") as output:
        output.write(data)
        os.fchmod(handle, 0o644)
        output.flush()
        os.fsync(handle)
    os.replace(draft, final)
    lock = final.with_suffix(".lock")
    if not lock.exists():
        lock.touch()
        lock.chmod(0o666)
    return record
