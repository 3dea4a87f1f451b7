"""Every private name of FlyDSL 0.5 that this project touches, in one file.

FlyDSL has no public way to ask for a cache key without compiling, nor to look between its
passes. The names below were read in 0.5.0; another minor version may have moved them, so
importing this module under one fails with the remedy instead of half working.
"""

from __future__ import annotations

import ctypes
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
from flydsl.compiler import jit_executor as _executor  # noqa: E402
from flydsl.compiler import jit_function as _jit  # noqa: E402
from flydsl.compiler.jit_argument import TorchTensorJitArg  # noqa: E402
from flydsl.compiler.jit_function import JitFunction  # noqa: E402

__all__ = [
    "FLYDSL_VERSION",
    "FlydslVersionError",
    "HostCode",
    "HostModule",
    "JitFunction",
    "TensorAbi",
    "TracedModule",
    "compile_launcher",
    "compiled_texts",
    "packed_entry",
    "registered_backend",
    "replace_backend",
    "require_version",
    "runtime_library",
    "split_before_binary",
    "symbols_of",
    "tensor_abi",
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


# ---------------------------------------------------------------- launching


@dataclass(frozen=True)
class TensorAbi:
    """How a tensor argument was compiled: one entry a dimension, None where it may vary.

    Sizes are i32 in the argument's slot, strides i64 if ``wide_strides`` else i32.
    """

    dtype: Any
    shape: tuple[int | None, ...]
    strides: tuple[int | None, ...]
    wide_strides: bool


def tensor_abi(value: Any) -> TensorAbi:
    """How FlyDSL compiles ``value``, a torch tensor or what ``flyc.from_torch_tensor`` makes of it.

    Raises RuntimeError for a tensor without a unit stride, which only the latter can pass.
    """
    argument = value if isinstance(value, TorchTensorJitArg) else TorchTensorJitArg(value)
    spec = argument._ensure_spec()
    either = lambda encoded: tuple(None if value < 0 else value for value in encoded)
    return TensorAbi(
        argument.dtype, either(spec.shape), either(spec.stride), not argument.use_32bit_stride
    )


def compile_launcher(launcher: JitFunction, args: tuple[Any, ...]) -> Any:
    """Compile ``launcher`` for ``args``, or find it in a cache; the artifact, never started.

    Raises what tracing and lowering raise, and RuntimeError while another launcher is traced.
    """
    if _jit.ir.Context.current is not None:
        name = launcher.func.__name__
        raise RuntimeError(f"{name} was started while another launcher is being traced")
    launcher._compile_only(*args)
    return launcher._last_compiled[1]


class HostCode:
    """Functions of the LLVM dialect as machine code, which may use what the process exports."""

    def __init__(self, text: str) -> None:
        # The engine uses the context to its end, so it is kept as long.
        self._context = _jit._create_mlir_context()
        with self._context:
            self._emit(_jit.ir.Module.parse(text), [])

    def _emit(self, module: Any, libraries: list[str]) -> None:
        module.operation.verify()
        self._engine = _executor.ExecutionEngine(module, opt_level=2, shared_libs=libraries)
        self._engine.initialize()

    def address(self, function: str) -> int:
        """The pointer that ``function(out: !llvm.ptr)`` stores to ``out``."""
        result = ctypes.c_void_p()
        self.call(function, ctypes.c_void_p(ctypes.addressof(result)))
        return result.value or 0

    def call(self, function: str, *cells: Any) -> None:
        """Call ``function`` with the values of ``cells``, the last its result if it has one."""
        addresses = (ctypes.c_void_p * len(cells))(*map(ctypes.addressof, cells))
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._engine.raw_lookup(function))(addresses)


class HostModule(HostCode):
    """An artifact's host code together with more of our own, as machine code.

    ``more`` writes functions of the LLVM dialect, given the types of the launcher's lowered
    parameters; they call the launcher under its own name. Device code is loaded per device by
    :meth:`load` and not before. A launch on a device that has none reports ``NOT_LOADED``
    through ``flydslRuntimeTakeError``. What is loaded stays so for the life of the process,
    because a captured graph may hold on to it; only :meth:`unload` takes it away.
    Raises RuntimeError for an artifact that only FlyDSL itself can start.
    """

    NOT_LOADED = -2

    def __init__(self, artifact: Any, more: Callable[[list[str]], str]) -> None:
        if (
            artifact._ktrace_traced
            or artifact._post_load_processors
            or artifact._uses_explicit_module
        ):
            raise RuntimeError(
                f"{artifact._entry} is compiled with ktrace or with initializers of its module, "
                "which only a call of the launcher itself provides"
            )
        self._context = _jit._create_mlir_context()
        with self._context:
            module = _jit.ir.Module.parse(artifact.ir)
            entry = _jit.ir.SymbolTable(module.operation)[artifact._entry]
            parameters = [str(a.type) for a in entry.regions[0].blocks[0].arguments]
            handler = _jit.ir.Attribute.parse('#fly.aot_module<"aiter", 0>')
            for op in module.body.operations:
                if op.operation.name == "gpu.binary":
                    op.operation.attributes["offloadingHandler"] = handler
            # A name of its own: an operation does not keep the module it came from.
            source = _jit.ir.Module.parse(more(parameters))
            for op in list(source.body.operations):
                if op.operation.attributes["sym_name"] != entry.attributes["sym_name"]:
                    module.body.append(op)
            self._emit(module, _executor._resolve_runtime_libs())
        self._status("aiter__module_init")

    def load(self) -> int:
        """Load the device code on the current device, once; the driver's status."""
        return self._status("aiter__module_load", ctypes.c_int32(-1))

    def unload(self) -> int:
        """Unload it from every device; the driver's status."""
        return self._status("aiter__module_unload")

    def _status(self, function: str, *args: Any) -> int:
        result = ctypes.c_int32(0)
        self.call(function, *args, result)
        return result.value


def runtime_library() -> ctypes.CDLL:
    """FlyDSL's runtime, through which the driver's functions are found too.

    Raises OSError without a driver, where FlyDSL itself would end the process.
    """
    return ctypes.CDLL(_executor._resolve_runtime_libs()[0])


def packed_entry(compiled: Any) -> tuple[int, int]:
    """Addresses of a called ``CompiledFunction``'s C entry and of its filled argument, to time.

    They are this thread's, and good for as long as ``compiled`` is kept.
    """
    state = compiled._call_state
    entry = ctypes.cast(state._func_exe, ctypes.c_void_p).value or 0
    return entry, ctypes.addressof(state._tls.packed)
