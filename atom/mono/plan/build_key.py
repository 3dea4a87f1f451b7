"""What a build's key says about itself.

A key is a frozen dataclass of integers, floats, strings, booleans, enums and of dataclasses like
it: everything that decides the code of one kernel and nothing else.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

_SCALARS = (int, float, str, bool, Enum, type(None))


def key_tuple(key: Any, sources: str) -> tuple[Any, ...]:
    """(type, every field's value, `sources`): what ranks must have in common to run one kernel.

    `sources` is the digest of the kernel's source files. Raises TypeError for a key that is not a
    frozen dataclass of scalars and of such dataclasses: it could change under the cache that holds
    its launcher.
    """
    return (*_values(key), sources)


def _values(key: Any) -> tuple[Any, ...]:
    if not is_dataclass(key) or not type(key).__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(f"a build key is a frozen dataclass of scalars, not {key!r}")
    values = [getattr(key, f.name) for f in fields(key)]
    plain = [value if isinstance(value, _SCALARS) else _values(value) for value in values]
    return (type(key).__qualname__, *plain)


@cache
def source_digest(*paths: Path) -> str:
    """The first 16 hex digits of a SHA-256 over the .py files at or below `paths`.

    Names relative to each path count, so that moving code between files does. Raises
    FileNotFoundError for a path that holds none.
    """
    digest = hashlib.sha256()
    for path in paths:
        root = path if path.is_dir() else path.parent
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise FileNotFoundError(f"no Python source at {path}")
        for file in files:
            digest.update(f"{file.relative_to(root).as_posix()}\0".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]
