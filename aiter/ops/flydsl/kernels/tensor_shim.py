"""The only place in the tree that starts a kernel, and what identifies the code it starts.

A launcher is made by a builder, `build(key) -> JitFunction`, decorated with `kernel_builder`.
The key, a frozen dataclass, is everything that decides the code; equal keys give the same
launcher object. `BuildRef` names builder and key without holding either the launcher or a
tensor, so it crosses process boundaries and any process can `rebuild` the launcher from it.

`_run_compiled(launcher, *args)` does one of these, tested in this order:

    replay or emulation    the installed interceptor receives the launch; nothing is compiled
    compile-only, cold     compile and persist; nothing is launched or retained
    compile-only, warm     nothing
    cold                   under a lock compile and execute once, retain the launch path
    warm                   launch with this call's arguments on the current device

What is retained belongs to one launcher and serves every thread and device; device code is
loaded on a device at the first launch there. Neither a first call nor a first call on a device
is possible while the stream is captured into a graph: warm up first. A warmed launcher keeps
the environment and the hints it was compiled with; changing its hints after that is an error.

Arguments are positional in the launcher's own order, the stream included:

    i64      an address: a tensor, an integer, or None for a null pointer
    i32      an integer, signed or unsigned
    f32      a float
    tensor   a torch tensor of the type, rank and unit stride of the first call's, or what
             flyc.from_torch_tensor made of one, which fixes its layout
    stream   None for the default stream, an integer handle, or an object with `cuda_stream`
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import flydsl.expr as fx
import torch
from flydsl.compiler.jit_function import JitFunction

from aiter.jit.utils.backend import ArtifactKey, artifact_key, own_launch
from aiter.jit.utils.flydsl_private import (
    compile_launcher,
    compiled_texts,
    runtime_library,
    tensor_abi,
)
from aiter.jit.utils.toolkit import toolkit_env, toolkit_env_if_any

from .host_entry import ADDRESS, COMPILE_ONLY, ENVIRON, NOT_LOADED, HostEntry, fast_path, hold
from .launch_args import (
    check_count,
    described,
    name_of,
    plain_args,
    slots_of,
    stream_of,
    with_stream,
    zeros,
)

Interceptor = Callable[[JitFunction, tuple[Any, ...]], None]


@dataclass(frozen=True)
class BuildRef:
    """A builder, by module and name, and the key it was called with."""

    module: str
    qualname: str
    key: object

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.qualname}({self.key})"


@dataclass(frozen=True)
class Launch:
    """A launch as the compiler sees it: what to build and the types it is called with."""

    build: BuildRef
    signature: tuple[str, ...]


class DriverError(RuntimeError):
    """The driver refused a launch; the message names launcher, build key and driver error."""


def kernel_builder(build: Callable[[Any], JitFunction]) -> Callable[[Any], JitFunction]:
    """Cache `build` on its key and mark the launcher with the `BuildRef` that makes it again.

    Equal keys give one launcher to all threads, since it holds what is loaded. `cache_clear()`
    of the result forgets them.
    """
    launchers: dict[Any, JitFunction] = {}
    lock = threading.RLock()

    @functools.wraps(build)
    def built(key: Any) -> JitFunction:
        launcher = launchers.get(key)
        if launcher is not None:
            return launcher
        with lock:
            if key not in launchers:
                launcher = build(key)
                if not isinstance(launcher, JitFunction):
                    raise TypeError(f"{build.__qualname__} must return a @flyc.jit launcher")
                launcher.build_ref = BuildRef(build.__module__, build.__qualname__, key)
                launchers[key] = launcher
            return launchers[key]

    built.cache_clear = launchers.clear  # type: ignore[attr-defined]
    return built


def rebuild(ref: BuildRef) -> JitFunction:
    """The launcher that `ref` names, built in this process. Raises ImportError, AttributeError."""
    return getattr(importlib.import_module(ref.module), ref.qualname)(ref.key)


def launch_of(launcher: JitFunction) -> Launch:
    """What `launcher` would be compiled as. Raises TypeError if no builder made it."""
    ref = getattr(launcher, "build_ref", None)
    if ref is None:
        raise TypeError(f"{name_of(launcher)} was not made by a @kernel_builder")
    return Launch(ref, tuple(slot for _, slot in slots_of(launcher)))


# ---------------------------------------------------------------- compiling without starting

# Compiling pins the architecture and the toolkit through the environment, and FlyDSL 0.5 crashes
# when first calls race, so one thread at a time is cold.
_cold = threading.RLock()


def compile_artifact(launcher: JitFunction) -> None:
    """Compile `launcher` for the pinned target into the cache, or find it there.

    Raises DeviceLibraryError for a kernel that needs one, ToolkitError without a linker and
    FlyDSL's DSLCompileError. LLVM may abort the process instead: call it in a worker.
    """
    with _cold, toolkit_env(), own_launch():
        compile_launcher(launcher, _jit_args(launcher, zeros(launcher)))


def artifact_of(launcher: JitFunction) -> ArtifactKey:
    """The cache file `launcher` has for the pinned target, found by tracing alone."""
    with own_launch():
        return artifact_key(launcher, _jit_args(launcher, zeros(launcher)))


def _jit_args(launcher: JitFunction, args: list[Any]) -> tuple[Any, ...]:
    """`args` as FlyDSL compiles them; it takes a stream of its own kind only."""
    return with_stream(launcher, args, fx.Stream(None))


# ---------------------------------------------------------------- interception


class _Mode:
    """What `_run_compiled` does with a launch, in the one place it looks."""

    __slots__ = ("interceptor",)

    def __init__(self) -> None:
        self.interceptor: Interceptor | None = None


_mode = _Mode()


@contextmanager
def intercepted(handler: Interceptor) -> Iterator[None]:
    """Hand every launch to `handler(launcher, args)` instead of compiling or starting it.

    Arguments are validated first and arrive as the caller gave them. Nested interceptors
    replace each other and are restored in reverse order on any exit.
    """
    outer = _mode.interceptor
    _mode.interceptor = handler
    hold(True)
    try:
        yield
    finally:
        _mode.interceptor = outer
        hold(outer is not None)


# ---------------------------------------------------------------- dispatch

_FALSE = (None, b"", b"0", b"false", b"False", b"no", b"off")


class _Warmed(JitFunction):
    """What a launcher becomes at its first launch: its hints can no longer be changed.

    `_entry` is its launch path and `_hints` what it was compiled with.
    """

    @property
    def compile_hints(self) -> Mapping[str, Any]:
        return self._hints

    @compile_hints.setter
    def compile_hints(self, hints: Mapping[str, Any]) -> None:
        if hints != self._hints:
            raise RuntimeError(
                f"{name_of(self)} was launched with the compile hints {dict(self._hints)}, which "
                f"cannot become {dict(hints)}: set them before, or build another launcher"
            )


def _run_slowly(exe: JitFunction, /, *args: Any, **keywords: Any) -> None:
    """`_run_compiled` in full; it comes here in every state but the common one."""
    check_count(exe, args, keywords)
    if _mode.interceptor is not None:
        _mode.interceptor(exe, args)
        return
    plain = plain_args(exe, args)
    if not isinstance(exe, _Warmed):
        with _cold:
            if not isinstance(exe, _Warmed):
                _first_call(exe, plain)
                return
    if ENVIRON.get(COMPILE_ONLY) in _FALSE:
        _launch(exe, exe._entry, plain)


def _first_call(exe: JitFunction, plain: list[Any]) -> None:
    """Compile, launch once and retain; in compile-only mode only fill the cache."""
    compile_only = ENVIRON.get(COMPILE_ONLY) not in _FALSE
    with toolkit_env_if_any(), own_launch():
        if not compile_only:
            _refuse_capture(exe, stream_of(exe, plain))
        artifact = compile_launcher(exe, _jit_args(exe, plain))
    if compile_only:
        return
    slots = tuple(slot for _, slot in slots_of(exe))
    tensors = tuple(
        tensor_abi(value) if slot == "tensor" else None
        for slot, value in zip(slots, plain, strict=True)
    )
    entry = HostEntry(artifact, name_of(exe), slots, tensors)
    try:
        _launch(exe, entry, plain)
    except BaseException:
        entry.unload()
        raise
    exe._entry = entry
    # Read-only, so that the hints cannot be edited in place either.
    exe._hints = MappingProxyType(dict(exe.compile_hints))
    exe.__class__ = _Warmed
    setattr(exe, ADDRESS, entry.address)


def _launch(exe: JitFunction, entry: HostEntry, plain: list[Any]) -> None:
    """Launch, after loading the device code where the current device has none yet."""
    args = described(exe, plain, entry.tensors)
    status = entry.launch(*args)
    if status == NOT_LOADED:
        with _cold:
            _refuse_capture(exe, stream_of(exe, args))
            _require_success(exe, entry.load(), "loading the code of")
        status = entry.launch(*args)
    _require_success(exe, status, "launching")


def _launch_failed(exe: JitFunction, status: int) -> None:
    _require_success(exe, status, "launching")


_run_compiled = fast_path(
    "_run_compiled",
    _run_slowly,
    _launch_failed,
    """_run_compiled(exe, /, *args)
--

Start `exe` with positional `args`, the stream among them. See the module's docstring.

Raises TypeError or OverflowError before anything is launched when the arguments do not fit,
DriverError when the driver refuses the launch, and RuntimeError for a first call while a
graph is captured.""",
)


# ---------------------------------------------------------------- the driver


_CAPTURE_IMPLICIT = 906  # hipErrorStreamCaptureImplicit


def _driver() -> ctypes.CDLL:
    """The driver's functions. Raises DriverError where there is none."""
    try:
        return runtime_library()
    except OSError as error:
        raise DriverError(f"there is no HIP driver to launch kernels with: {error}") from None


def _require_success(exe: JitFunction, status: int, doing: str) -> None:
    if status == 0:
        return
    driver = _driver()
    # It is reported here, so nobody's next check must find it again.
    driver.hipGetLastError()
    driver.hipGetErrorName.restype = ctypes.c_char_p
    error = (driver.hipGetErrorName(status) or b"?").decode()
    kernels = dict.fromkeys(
        re.findall(r"gpu\.launch_func[^@]*@\w+::@(\w+)", "".join(compiled_texts(exe)))
    )
    raise DriverError(
        f"{doing} {', '.join(kernels)} of {name_of(exe)} failed with {error} ({status}); built by "
        f"{getattr(exe, 'build_ref', 'no builder')}"
    )


def _refuse_capture(exe: JitFunction, stream: Any) -> None:
    """Raise RuntimeError if the stream is being captured: nothing can be compiled or loaded."""
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    driver, answer = _driver(), ctypes.c_int(0)
    error = driver.hipStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(answer))
    if error:
        driver.hipGetLastError()
    # The error for asking about the default stream while another one captures.
    if capturing or error == _CAPTURE_IMPLICIT or answer.value:
        raise RuntimeError(
            f"the first launch of {name_of(exe)} on this device came while a graph is captured, "
            "when nothing can be compiled or loaded; launch it once before capturing"
        )
