"""Find an ``ld.lld`` that links AMD GPU code objects. Looks only; changes nothing.

Searched in order: ROCM_PATH, /opt/rocm, an installed ROCm SDK wheel, the system, the
``ziglang`` wheel. Each candidate is run once to learn its version: code object v6, which
FlyDSL emits, needs LLD 17 or newer, and an older one fails only deep inside a compile.
Imports neither torch nor FlyDSL.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aiter import env

MIN_LLD = 17
SYSTEM_ROCM = Path("/opt/rocm")

_REMEDY = "install one with: pip install ziglang==0.14.1"
_LLD_DIRS = ("llvm/bin", "lib/llvm/bin")
_BITCODE_DIRS = ("amdgcn/bitcode", "lib/llvm/amdgcn/bitcode")
_SDK_PACKAGES = ("_rocm_sdk_core", "_rocm_sdk_devel", "rocm_sdk")
_NEWEST_LLD = 30  # of the versioned names, ld.lld-30 downwards, that are tried


class ToolkitError(RuntimeError):
    """No usable linker, or no place to put it; the message is one sentence with the remedy."""


@dataclass(frozen=True)
class Linker:
    """A linker that has been run: ``argv`` starts it, ``rocm`` is the ROCm root it is part of."""

    argv: tuple[str, ...]
    origin: str
    version: str
    rocm: Path | None = None

    @property
    def in_place(self) -> bool:
        """Whether FlyDSL finds it by itself, given ``rocm`` as ROCM_PATH."""
        return self.rocm is not None and self.argv == (str(self.rocm / "llvm/bin/ld.lld"),)


def find_linker() -> Linker:
    """The first usable linker. Raises ToolkitError naming the candidates that were refused."""
    refused = []
    for candidate in _candidates():
        version, reason = _probe(candidate.argv)
        if version is not None:
            return Linker(candidate.argv, candidate.origin, version, candidate.rocm)
        refused.append(f"{' '.join(candidate.argv)}: {reason}")
    looked = f" (refused {'; '.join(refused)})" if refused else ""
    raise ToolkitError(f"no ld.lld of version {MIN_LLD} or newer was found{looked}; {_REMEDY}")


def bitcode_of(rocm: Path | None) -> Path | None:
    """The device bitcode folder of a ROCm root, if it has one."""
    folders = [rocm / name for name in _BITCODE_DIRS] if rocm is not None else []
    return next((folder for folder in folders if folder.is_dir()), None)


def rocm_roots() -> list[tuple[str, Path]]:
    """(origin, root) of every ROCm there might be, in the order they are preferred."""
    roots = []
    named = env.ROCM_PATH.get()
    if named is not None:
        roots.append(("ROCM_PATH", named))
    roots.append((str(SYSTEM_ROCM), SYSTEM_ROCM))
    for package in _SDK_PACKAGES:
        roots.extend((f"the {package} wheel", folder) for folder in _package_folders(package))
    return roots


def _candidates() -> Iterator[Linker]:
    for origin, root in rocm_roots():
        for folder in _LLD_DIRS:
            path = root / folder / "ld.lld"
            if path.is_file():
                yield Linker((str(path),), origin, "", root)
    for name in ["ld.lld", *(f"ld.lld-{n}" for n in range(_NEWEST_LLD, MIN_LLD - 1, -1))]:
        found = shutil.which(name)
        if found:
            # Not the link's target: the driver behind it goes by the name it is called.
            yield Linker((os.path.abspath(found),), "the system", "")
    for folder in _package_folders("ziglang"):
        if (folder / "zig").is_file():
            yield Linker((str(folder / "zig"), "ld.lld"), "the ziglang wheel", "")


def _package_folders(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return []
    return [Path(folder) for folder in spec.submodule_search_locations]


def _probe(argv: tuple[str, ...]) -> tuple[str | None, str]:
    """(version, "") of a linker that will do, or (None, reason)."""
    try:
        run = subprocess.run(
            [*argv, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    found = re.search(r"\bLLD (\d+)(\.[\w.]+)?", run.stdout)
    if run.returncode or not found:
        return None, f"--version exited {run.returncode} and named no LLD"
    if int(found[1]) < MIN_LLD:
        return None, f"version {found[1]}"
    return found[1] + (found[2] or ""), ""
