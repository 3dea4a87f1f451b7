"""The folder FlyDSL is told to treat as ROCm while this project compiles.

FlyDSL starts ``$ROCM_PATH/llvm/bin/ld.lld``. A ROCm that has it there is used as it is. For
any other linker a private folder of that layout is made, with the user's device bitcode
linked in so that other people's kernels still find it; the user's ROCm is never written to.
Imports neither torch nor FlyDSL.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aiter import env
from aiter.jit.utils.linker import Linker, ToolkitError, bitcode_of, find_linker, rocm_roots

__all__ = ["Toolkit", "ToolkitError", "find_toolkit", "toolkit_env", "toolkit_env_if_any"]


# The variables that decide which linker is found and where it is laid out.
_SEARCHED = (env.ROCM_PATH.name, "PATH", env.XDG_CACHE_HOME.name, "HOME")


@dataclass(frozen=True)
class Toolkit:
    """``root`` is what ROCM_PATH must be while compiling with ``linker``."""

    root: Path
    linker: Linker

    def env(self) -> dict[str, str]:
        """Variables to overlay on a process, or on the children, that compile."""
        return {env.ROCM_PATH.name: str(self.root)}

    def describe(self) -> str:
        """One line for a log: which linker, of which version, from where."""
        return f"LLD {self.linker.version} from {self.linker.origin} ({self.root})"


def find_toolkit() -> Toolkit:
    """Find a linker and lay it out if need be. Raises ToolkitError. Safe under concurrency."""
    linker = find_linker()
    if linker.in_place:
        return Toolkit(linker.rocm, linker)  # type: ignore[arg-type]
    return Toolkit(_lay_out(linker), linker)


@contextmanager
def toolkit_env() -> Iterator[Toolkit]:
    """:func:`find_toolkit`, with its variables set in this process until exit."""
    toolkit = find_toolkit()
    with env.overlay(toolkit.env()):
        yield toolkit


@contextmanager
def toolkit_env_if_any() -> Iterator[None]:
    """:func:`toolkit_env` for what may come from a cache and then needs no linker.

    Looks for a linker once per environment. Where there is none, ToolkitError is raised only if
    FlyDSL fails to compile something inside.
    """
    found = _remembered(tuple(os.environ.get(name) for name in _SEARCHED))
    if isinstance(found, Toolkit):
        with env.overlay(found.env()):
            yield
        return
    try:
        yield
    except Exception as error:
        from flydsl.compiler.diagnostics import DSLCompileError

        if isinstance(error, DSLCompileError):
            raise found from error
        raise


@functools.lru_cache(maxsize=8)
def _remembered(environment: tuple[str | None, ...]) -> Toolkit | ToolkitError:
    try:
        return find_toolkit()
    except ToolkitError as missing:
        return missing


def _user_bitcode(linker: Linker) -> Path | None:
    roots = [linker.rocm, *(root for _, root in rocm_roots())]
    return next((found for found in map(bitcode_of, roots) if found is not None), None)


def _lay_out(linker: Linker) -> Path:
    """The private folder of ``linker``, made now if it is not there.

    The name is a digest of everything in it, and it appears by one rename, so a folder that
    exists is complete and right whoever made it.
    """
    script = f'#!/bin/sh\nexec {shlex.join(linker.argv)} "$@"\n'
    bitcode = _user_bitcode(linker)
    digest = hashlib.sha256(f"{script}\0{linker.version}\0{bitcode}".encode()).hexdigest()[:16]
    parent = env.XDG_CACHE_HOME.get() / "aiter" / "toolkit"
    final = parent / digest
    lld = final / "llvm/bin/ld.lld"
    if os.access(lld, os.X_OK):
        return final
    try:
        parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{digest}.", dir=parent))
    except OSError as error:
        raise ToolkitError(
            f"no folder for the linker can be made in {parent} ({error.strerror}); set "
            f"{env.XDG_CACHE_HOME.name} to a writable folder"
        ) from None
    try:
        _fill(draft, script, bitcode)
        os.rename(draft, final)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        # Another process may have made the same folder meanwhile.
        if not os.access(lld, os.X_OK):
            raise ToolkitError(
                f"the linker cannot be laid out in {final} ({error.strerror}); remove that "
                f"folder, or set {env.XDG_CACHE_HOME.name} to a writable one"
            ) from None
    return final


def _fill(folder: Path, script: str, bitcode: Path | None) -> None:
    folder.chmod(0o755)
    lld = folder / "llvm/bin/ld.lld"
    lld.parent.mkdir(parents=True)
    lld.write_text(script)
    lld.chmod(0o755)
    (folder / "amdgcn").mkdir()
    if bitcode is None:
        (folder / "amdgcn/bitcode").mkdir()
    else:
        (folder / "amdgcn/bitcode").symlink_to(bitcode.resolve(), target_is_directory=True)
