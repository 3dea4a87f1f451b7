"""Compile the stub. Imports neither torch nor FlyDSL."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SONAME = "libamdhip64.so.7"
_HERE = Path(__file__).parent
_SOURCES = ("hip_stub.c", "hip_stub_elf.c")


class StubError(RuntimeError):
    """The stub cannot be built here."""


def build(folder: Path) -> Path:
    """Build the stub driver in `folder`; the library's path. Raises StubError."""
    compiler = shutil.which("gcc")
    if not sys.platform.startswith("linux") or compiler is None:
        raise StubError("the recording driver needs gcc on Linux")
    library = folder / SONAME
    command = [
        compiler,
        "-std=gnu11",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unused-parameter",
        "-shared",
        "-fPIC",
        "-pthread",
        f"-Wl,-soname,{SONAME}",
        f"-Wl,--version-script={_HERE / 'hip_stub.map'}",
        "-o",
        str(library),
        *(str(_HERE / source) for source in _SOURCES),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise StubError(f"gcc refused the recording driver:\n{result.stderr}")
    return library
