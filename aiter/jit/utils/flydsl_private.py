"""Every private name of FlyDSL 0.5 that this project touches, in one file.

FlyDSL has no public way to ask for a cache key without compiling, nor to look between its
passes. The names below were read in 0.5.0; another minor version may have moved them, so
importing this module under one fails with the remedy instead of half working.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

SUPPORTED = "0.5."


class FlydslVersionError(ImportError):
    """FlyDSL is missing, or of a version whose private names are not known."""


def require_version() -> str:
    """The installed FlyDSL version. Raises FlydslVersionError unless it is 0.5.*."""
    remedy = "run: pip install 'flydsl==0.5.*'"
    try:
        installed = version("flydsl")
    except PackageNotFoundError:
        raise FlydslVersionError(f"FlyDSL is not installed; {remedy}") from None
    if not installed.startswith(SUPPORTED):
        raise FlydslVersionError(
            f"FlyDSL {installed} is installed, but this project uses internals of 0.5.*; {remedy}"
        )
    return installed


FLYDSL_VERSION = require_version()

from flydsl.compiler import backends as _backends  # noqa: E402
from flydsl.compiler import jit_function as _jit  # noqa: E402
from flydsl.compiler.jit_function import JitFunction  # noqa: E402

__all__ = [
    "FLYDSL_VERSION",
    "FlydslVersionError",
    "JitFunction",
    "TracedModule",
    "registered_backend",
    "replace_backend",
    "require_version",
    "split_before_binary",
    "symbols_of",
    "trace",
]


def registered_backend(name: str) -> type:
    """The class FlyDSL compiles ``name`` with."""
    return _backends._get_backend_class(name)


def replace_backend(name: str, backend: type) -> None:
    """Register ``backend`` under ``name``, for targets FlyDSL has already resolved too."""
    _backends.register_backend(name, backend, force=True)
    _backends._make_backend.cache_clear()


def split_before_binary(applies: Callable[[], bool], inspect: Callable[[Any], None]) -> None:
    """Have ``inspect(module)`` called between lowering to LLVM and emitting device code.

    Installed for the whole process; ``applies()`` is asked at every compile. The passes run
    are the same ones in the same order, so that the code is byte-identical. FlyDSL does not
    come through here when it dumps IR, or with FLYDSL_COMPILE_LLVM_DIR.
    """
    run = _jit._run_pipeline

    def inspected(module: Any, fragments: list, *, verifier: bool, print_after_all: bool) -> None:
        if not applies():
            run(module, fragments, verifier=verifier, print_after_all=print_after_all)
            return
        run(module, fragments[:-1], verifier=verifier, print_after_all=print_after_all)
        inspect(module)
        run(module, fragments[-1:], verifier=verifier, print_after_all=print_after_all)

    _jit._run_pipeline = inspected


def symbols_of(module: Any) -> list[str]:
    """Names of the functions, declared or defined, in the GPU modules of an ``ir.Module``."""
    names = []
    for top in module.body.operations:
        if top.operation.name == "gpu.module":
            for op in top.regions[0].blocks[0].operations:
                if "sym_name" in op.attributes:
                    names.append(_jit.ir.StringAttr(op.attributes["sym_name"]).value)
    return names


@dataclass(frozen=True)
class TracedModule:
    """What FlyDSL derives a cache key from, and the key.

    ``disk_key`` is the stem of the artifact's file name. The rest are the key's ingredients
    as text; ``toolchain`` covers FlyDSL's sources, native libraries and toolkit fingerprint.
    """

    function_name: str
    disk_key: str
    target: str
    backend: str
    pipeline: str
    llvm_options: str
    env: tuple[tuple[str, str], ...]
    link_libs: tuple[str, ...]
    toolchain: str
    mlir: str


def trace(launcher: JitFunction, args: tuple[Any, ...]) -> TracedModule:
    """Trace ``launcher`` as a call with ``args`` would, lower nothing, and return its key.

    Mirrors the first half of ``JitFunction._compile_or_execute``. Needs no linker, no HIP
    and no writable cache. Raises what tracing raises; ValueError for a launcher whose
    artifacts never reach the disk.
    """
    bound_self, args = launcher._split_self(args)
    bound = launcher._sig.bind(*args)
    bound.apply_defaults()
    hints = launcher._effective_compile_hints()
    backend = _jit.get_backend()
    launcher._resolve_arguments(bound.arguments)
    with _jit._create_mlir_context() as context, _jit.CompilationContext.compile_hints(hints):
        traced = launcher._trace(context, launcher._sig, bound, bound_self, execute=False)
        text, config = _jit.MlirCompiler.prepare(
            traced.module, backend=backend, compile_hints=hints, link_libs=traced.link_libs
        )
    name = launcher.func.__name__
    if traced.post_load_processors:
        raise ValueError(f"{name} has post-load initializers, so FlyDSL never writes it to disk")
    artifact_key = _jit._artifact_cache_key(text, config, backend, link_libs=traced.link_libs)
    return TracedModule(
        function_name=name,
        disk_key=_jit._disk_cache_key(artifact_key),
        target=f"{backend.target.backend}:{backend.target.arch}:wave{backend.target.warp_size}",
        backend=backend.hash(),
        pipeline=",".join(config.fragments),
        llvm_options=repr(config.llvm_opts),
        env=tuple(_jit._cache_invalidating_env_values(backend.target)),
        link_libs=tuple(_jit._file_sha256(path) for path in traced.link_libs or ()),
        toolchain=_jit._flydsl_key(),
        mlir=text,
    )


def compiled_texts(launcher: JitFunction) -> tuple[str, ...]:
    """Final module texts of what ``launcher`` compiled or loaded in this process, oldest first."""
    return tuple(artifact.ir for artifact in launcher._mem_cache.values())
