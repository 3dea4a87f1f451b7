"""What is in a cache and why: `aiter_manifest.json` beside the artifacts.

Written last and in one step, so a manifest that is there describes a build that ended; builds
of several tables, or of several versions, share one cache and one manifest. Until then each
finished artifact is a line of a journal, from which a build that was killed goes on.

    contexts    what one run's artifacts have in common: versions, target, environment, the
                digest of the kernels' sources, the linker, the parts of FlyDSL's key
    artifacts   by file: its fingerprint, its context, the launches it serves, the build key's
                fields, the table rows that asked for it

The linker is recorded, since its version is written into the code object and so two linkers give
different bytes for one kernel. It is not compared by a check: the instructions are the same,
FlyDSL's key leaves it out, and the host that checks needs no linker.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from .artifacts import FileRecord

MANIFEST = "aiter_manifest.json"
JOURNAL = ".aiter_journal.jsonl"
FORMAT = 1

_COMMON_PARTS = ("target", "backend", "flydsl", "toolchain")
_KERNELS = Path(__file__).resolve().parents[2] / "ops" / "flydsl" / "kernels"


class ManifestError(ValueError):
    """A manifest that is there but cannot be used; the message names it and the remedy."""


@dataclass(frozen=True)
class Artifact:
    """One file of the cache. key: the build key's fields; launches: `launch_id` of each."""

    record: FileRecord
    gfx: str
    function: str
    builder: str
    key: dict[str, str]
    launches: tuple[str, ...]
    rows: tuple[str, ...]
    context: str
    cpu_s: float


@dataclass(frozen=True)
class Manifest:
    """Artifacts by file and contexts by their digest."""

    artifacts: dict[str, Artifact] = field(default_factory=dict)
    contexts: dict[str, dict[str, str]] = field(default_factory=dict)

    def of_launch(self, gfx: str, launch: str) -> list[Artifact]:
        """Artifacts built for that launch, of whatever version of the kernels."""
        return self._by_launch.get((gfx, launch), [])

    @cached_property
    def _by_launch(self) -> dict[tuple[str, str], list[Artifact]]:
        index: dict[tuple[str, str], list[Artifact]] = {}
        for artifact in self.artifacts.values():
            for launch in artifact.launches:
                index.setdefault((artifact.gfx, launch), []).append(artifact)
        return index


# ---------------------------------------------------------------- what identifies a launch


def launch_id(launch: Any) -> str:
    """A launch as text, equal in every process for equal launches."""
    build = launch.build
    return f"{build.module}:{build.qualname} {build.key!r} ({', '.join(launch.signature)})"


def key_fields(key: object, prefix: str = "") -> dict[str, str]:
    """A build key's fields by dotted name, nested dataclasses flattened, values as text."""
    found: dict[str, str] = {}
    for item in dataclasses.fields(key):  # type: ignore[arg-type]
        value = getattr(key, item.name)
        if dataclasses.is_dataclass(value):
            found |= key_fields(value, f"{prefix}{item.name}.")
        else:
            found[prefix + item.name] = value.name if isinstance(value, Enum) else str(value)
    return found


def sources_digest(folder: Path = _KERNELS) -> str:
    """One digest of every Python file of the kernels."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def common_parts(parts: dict[str, str]) -> dict[str, str]:
    """Of an artifact key's parts those that every launch of one run has in common."""
    return {
        name: value
        for name, value in parts.items()
        if name in _COMMON_PARTS or name.startswith("env.")
    }


def context_id(context: dict[str, str]) -> str:
    """The name a context goes by."""
    return hashlib.sha256(json.dumps(context, sort_keys=True).encode()).hexdigest()[:16]


# ---------------------------------------------------------------- merging


def merge(old: Manifest, new: Manifest, tables: Iterable[str]) -> Manifest:
    """`old` with the artifacts of a build of `tables` added.

    Rows of those tables that no longer ask for an artifact are dropped from it. The artifact
    itself stays listed: it is sound, and another table may ask for it again.
    """
    prefixes = tuple(f"{table}:" for table in tables)
    merged: dict[str, Artifact] = {}
    for file, artifact in old.artifacts.items():
        rows = tuple(row for row in artifact.rows if not row.startswith(prefixes))
        merged[file] = dataclasses.replace(artifact, rows=rows)
    for file, artifact in new.artifacts.items():
        held = merged.get(file)
        merged[file] = artifact if held is None else joined(held, artifact)
    used = {artifact.context for artifact in merged.values()}
    contexts = {**old.contexts, **new.contexts}
    return Manifest(merged, {name: contexts[name] for name in sorted(used)})


def joined(held: Artifact, artifact: Artifact) -> Artifact:
    """`artifact` with the rows and launches of `held` as well, which is the same file.

    It took as long to compile as whichever of the two was compiled.
    """
    rows = {*held.rows, *artifact.rows}
    launches = {*held.launches, *artifact.launches}
    return dataclasses.replace(artifact, rows=tuple(sorted(rows)), launches=tuple(sorted(launches)))


# ---------------------------------------------------------------- on disk


def read(cache: Path) -> Manifest | None:
    """The manifest of `cache`, None if it has none. Raises ManifestError."""
    path = cache / MANIFEST
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise ManifestError(f"{path}: format {data['format']}, not {FORMAT}; build anew")
        artifacts = {file: _artifact(file, entry) for file, entry in data["artifacts"].items()}
        manifest = Manifest(artifacts, data["contexts"])
        missing = {a.context for a in artifacts.values()} - manifest.contexts.keys()
        if missing:
            raise KeyError(f"context {min(missing)}")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read ({error.strerror})") from None
    except ManifestError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(
            f"{path}: not a manifest ({type(error).__name__}: {error}); remove it and build anew"
        ) from None
    return manifest


def write(cache: Path, manifest: Manifest) -> None:
    """Replace the manifest of `cache` in one step and drop the journal. Raises OSError."""
    data = {
        "format": FORMAT,
        "contexts": manifest.contexts,
        "artifacts": {f: _entry(a) for f, a in sorted(manifest.artifacts.items())},
    }
    with tempfile.NamedTemporaryFile(
        "w", dir=cache, prefix=f".{MANIFEST}.", suffix=".tmp", delete=False
    ) as draft:
        try:
            json.dump(data, draft, indent=1, sort_keys=True)
            draft.flush()
            os.fsync(draft.fileno())
            os.chmod(draft.name, 0o644)
            os.replace(draft.name, cache / MANIFEST)
        except BaseException:
            os.unlink(draft.name)
            raise
    with suppress(FileNotFoundError):
        (cache / JOURNAL).unlink()


def _entry(artifact: Artifact) -> dict[str, Any]:
    entry = asdict(artifact)
    record = entry.pop("record")
    return {**entry, "size": record["size"], "sha256": record["sha256"]}


def _artifact(file: str, entry: dict[str, Any]) -> Artifact:
    return Artifact(
        record=FileRecord(file, entry["size"], entry["sha256"]),
        gfx=entry["gfx"],
        function=entry["function"],
        builder=entry["builder"],
        key=dict(entry["key"]),
        launches=tuple(entry["launches"]),
        rows=tuple(entry["rows"]),
        context=entry["context"],
        cpu_s=entry["cpu_s"],
    )


# ---------------------------------------------------------------- the journal


class Journal:
    """Appends finished artifacts beside the cache, one line each."""

    def __init__(self, cache: Path, contexts: dict[str, dict[str, str]]) -> None:
        self._file = (cache / JOURNAL).open("a", encoding="utf-8")
        self._write({"contexts": contexts})

    def add(self, artifact: Artifact) -> None:
        """Record `artifact`, so that a build that is killed from now on need not repeat it."""
        self._write({"file": artifact.record.file, **_entry(artifact)})

    def _write(self, value: dict[str, Any]) -> None:
        # The newline before sets a line apart from one that a killed build left unfinished.
        self._file.write("\n" + json.dumps(value))
        self._file.flush()

    def close(self) -> None:
        """Close the file; it stays until a manifest takes its place."""
        self._file.close()


def read_journal(cache: Path) -> Manifest:
    """What the journal of `cache` holds; lines that are not whole are left out."""
    try:
        lines = (cache / JOURNAL).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return Manifest()
    artifacts: dict[str, Artifact] = {}
    contexts: dict[str, dict[str, str]] = {}
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            value = json.loads(line)
            if "contexts" in value:
                contexts |= value["contexts"]
            else:
                artifact = _artifact(value["file"], value)
                artifacts[artifact.record.file] = artifact
    known = {file: a for file, a in artifacts.items() if a.context in contexts}
    return Manifest(known, contexts)
