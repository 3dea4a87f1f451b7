"""FlyDSL's ROCm backend with a toolkit fingerprint that does not depend on the host.

FlyDSL puts a hash of the ROCm device bitcode into every artifact's cache key, because a
kernel that calls a device library (``__ocml_*``, ``__ockl_*``) has that bitcode linked in.
This project's kernels call none, so a cache built on a host with no ROCm must be found on
one that has it. Inside :func:`own_launch` the fingerprint is a constant, and a module that
references a device library after all is refused before device code is emitted. Outside,
FlyDSL behaves as it always does: a process may mix both kinds of launches.

Two kinds never share a cached value: FlyDSL keys its toolchain hash on the fingerprint, and
asks the backend for it at every compile.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiter import env
from aiter.jit.utils import flydsl_private
from aiter.jit.utils.chip_info import get_target, pinned
from aiter.jit.utils.flydsl_private import JitFunction

OWN_FINGERPRINT = "aiter:no-device-library"

_DEVICE_LIBRARY = re.compile(r"__oc(?:ml|kl|lc)_\w+")


class DeviceLibraryError(RuntimeError):
    """A kernel of this project references ROCm's device libraries."""


class _Scope(threading.local):
    depth = 0


_scope = _Scope()
_install_lock = threading.Lock()
_inspecting = False


def in_own_launch() -> bool:
    """Whether the calling thread is inside :func:`own_launch`."""
    return _scope.depth > 0


@contextmanager
def own_launch() -> Iterator[None]:
    """Mark what this thread compiles, or computes a key for, as this project's own.

    Enter it around the cold path only. Pins FlyDSL's architecture to ``get_target()``, since
    FlyDSL alone falls back to gfx942 when it cannot tell; raises TargetError if there is no
    target. Nests; leaves nothing behind on any exit.
    """
    install()
    with pinned(get_target()):
        _scope.depth += 1
        try:
            yield
        finally:
            _scope.depth -= 1


def install() -> None:
    """Register the backend with FlyDSL. Idempotent; :func:`own_launch` does it each time.

    Whatever class is registered for ``rocm`` at that moment is subclassed, so that an
    extension's backend keeps working, even one registered after the first call.
    """
    global _inspecting
    with _install_lock:
        if not _inspecting:
            flydsl_private.split_before_binary(in_own_launch, _refuse_device_library)
            _inspecting = True
        base = flydsl_private.registered_backend("rocm")
        if getattr(base, "aiter_own", False):
            return

        class OwnRocmBackend(base):  # type: ignore[misc, valid-type]
            aiter_own = True

            def toolkit_fingerprint(self) -> str:
                return OWN_FINGERPRINT if in_own_launch() else super().toolkit_fingerprint()

        flydsl_private.replace_backend("rocm", OwnRocmBackend)


def _refuse_device_library(module: Any) -> None:
    _refuse(flydsl_private.symbols_of(module))


def require_no_device_library(text: str) -> None:
    """Refuse MLIR or LLVM ``text`` that names a device library function.

    Raises DeviceLibraryError with the functions' names.
    """
    _refuse(_DEVICE_LIBRARY.findall(text))


def _refuse(names: Iterable[str]) -> None:
    found = sorted({name for name in names if _DEVICE_LIBRARY.fullmatch(name)})
    if found:
        raise DeviceLibraryError(
            f"the kernel calls ROCm's device library ({', '.join(found)}), so its code would "
            "depend on the ROCm installed; use exp2, log2, rcp and fma, which are native"
        )


# ---------------------------------------------------------------- cache keys


@dataclass(frozen=True)
class ArtifactKey:
    """Where FlyDSL will look for an artifact on disk, and why there.

    ``parts`` are the named ingredients of ``sha256``, long ones as their own digest; see
    :meth:`differs_from`.
    """

    function_name: str
    sha256: str
    parts: dict[str, str]

    def path(self, cache_dir: Path | None = None) -> Path:
        """The artifact's file below ``cache_dir``, by default FLYDSL_RUNTIME_CACHE_DIR."""
        root = cache_dir if cache_dir is not None else env.FLYDSL_RUNTIME_CACHE_DIR.get()
        return root / self.function_name / f"{self.sha256}.pkl"

    def differs_from(self, parts: dict[str, str]) -> dict[str, tuple[str, str]]:
        """The ingredients in which this key and ``parts`` disagree, as (mine, theirs)."""
        names = sorted(self.parts.keys() | parts.keys())
        pairs = {name: (self.parts.get(name, "-"), parts.get(name, "-")) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def artifact_key(launcher: JitFunction, args: tuple[Any, ...]) -> ArtifactKey:
    """The key FlyDSL will use for ``launcher(*args)`` as this project's own launch.

    Costs one trace and compiles nothing. ``args`` are what FlyDSL itself accepts, in the
    launcher's order; values of addresses and numbers do not reach the key, so zeros do.
    Raises TargetError, or what tracing raises.
    """
    with own_launch():
        traced = flydsl_private.trace(launcher, args)
    parts = {
        "function": traced.function_name,
        "target": traced.target,
        "backend": traced.backend,
        "pipeline": traced.pipeline,
        "llvm_options": traced.llvm_options,
        "link_libs": " ".join(traced.link_libs),
        "flydsl": flydsl_private.FLYDSL_VERSION,
        "toolchain": _digest(traced.toolchain),
        "mlir": _digest(traced.mlir),
        **{f"env.{name}": value for name, value in traced.env},
    }
    return ArtifactKey(traced.function_name, traced.disk_key, parts)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
