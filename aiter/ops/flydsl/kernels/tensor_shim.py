"""The only place in the tree that starts a kernel, and what identifies the code it starts.

A launcher is made by a builder, `build(key) -> JitFunction`, decorated with `kernel_builder`.
The key, a frozen dataclass, is everything that decides the code; equal keys give the same
launcher object. `BuildRef` names builder and key without holding either the launcher or a
tensor, so it crosses process boundaries and any process can `rebuild` the launcher from it.

`_run_compiled(launcher, *args)` does one of four things, tested in this order:

    replay or emulation    the installed interceptor receives the launch; nothing is compiled
    compile-only, cold     compile and persist; nothing is launched or retained
    compile-only, warm     nothing
    cold                   under a lock compile and execute once, retain the compiled function
    warm                   dispatch the retained function with this call's arguments

Retained functions belong to one launcher and one device. Arguments are positional in the
launcher's own order, the stream included. Slots are addresses and numbers:

    i64      an address: a tensor, an integer, or None for a null pointer
    i32      an integer, signed or unsigned
    f32      a float
    stream   None for the default stream, an integer handle, or an object with `cuda_stream`
"""

from __future__ import annotations

import functools
import importlib
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
import torch
from flydsl.compiler.jit_argument import resolve_signature
from flydsl.compiler.jit_function import JitFunction

from aiter import env
from aiter.jit.utils.backend import ArtifactKey, artifact_key, own_launch
from aiter.jit.utils.toolkit import toolkit_env

_SLOT_NAMES = {fx.Int64: "i64", fx.Int32: "i32", fx.Float32: "f32", fx.Stream: "stream"}
_I32_RANGE = (-(1 << 31), (1 << 32) - 1)
_I64_RANGE = (-(1 << 63), (1 << 64) - 1)

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
    """Cache `build` on its key and mark the launcher with the `BuildRef` that makes it again."""

    @functools.cache
    def cached(key: Any) -> JitFunction:
        launcher = build(key)
        if not isinstance(launcher, JitFunction):
            raise TypeError(f"{build.__qualname__} must return a @flyc.jit launcher")
        launcher.build_ref = BuildRef(build.__module__, build.__qualname__, key)
        return launcher

    return functools.wraps(build)(cached)


def rebuild(ref: BuildRef) -> JitFunction:
    """The launcher that `ref` names, built in this process. Raises ImportError, AttributeError."""
    return getattr(importlib.import_module(ref.module), ref.qualname)(ref.key)


def launch_of(launcher: JitFunction) -> Launch:
    """What `launcher` would be compiled as. Raises TypeError if no builder made it."""
    ref = getattr(launcher, "build_ref", None)
    if ref is None:
        raise TypeError(f"{_name(launcher)} was not made by a @kernel_builder")
    return Launch(ref, tuple(slot for _, slot in _slots(launcher)))


def placeholder_args(launcher: JitFunction) -> list[Any]:
    """Arguments that compile `launcher` without naming memory: zeros and the default stream."""
    zero = {"i64": 0, "i32": 0, "f32": 0.0, "stream": None}
    return [zero[slot] for _, slot in _slots(launcher)]


# ---------------------------------------------------------------- compiling without starting


def compile_artifact(launcher: JitFunction) -> None:
    """Compile `launcher` for the pinned target into the cache, or find it there.

    Raises DeviceLibraryError for a kernel that needs one, ToolkitError without a linker and
    FlyDSL's DSLCompileError. LLVM may abort the process instead: call it in a worker.
    """
    with toolkit_env(), own_launch(), env.overlay({"COMPILE_ONLY": "1"}):
        launcher(*_jit_args(launcher))


def artifact_of(launcher: JitFunction) -> ArtifactKey:
    """The cache file `launcher` has for the pinned target, found by tracing alone."""
    with own_launch():
        return artifact_key(launcher, tuple(_jit_args(launcher)))


def _jit_args(launcher: JitFunction) -> list[Any]:
    return [*placeholder_args(launcher)[:-1], fx.Stream(None)]


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
    try:
        yield
    finally:
        _mode.interceptor = outer


# ---------------------------------------------------------------- argument slots


def _name(launcher: JitFunction) -> str:
    return getattr(launcher.func, "__name__", repr(launcher))


def _slots(launcher: JitFunction) -> tuple[tuple[str, str], ...]:
    """(parameter, slot kind) of a launcher in order. Raises TypeError for any other ABI."""
    cached = launcher.__dict__.get("_abi_slots")
    if cached is not None:
        return cached
    slots = []
    for parameter in resolve_signature(launcher.func).parameters.values():
        kind = _SLOT_NAMES.get(parameter.annotation)
        if kind is None:
            raise TypeError(
                f"{_name(launcher)}: parameter {parameter.name!r} is {parameter.annotation!r}; "
                "a launcher takes fx.Int64, fx.Int32, fx.Float32 and a trailing fx.Stream"
            )
        slots.append((parameter.name, kind))
    if not slots or slots[-1][1] != "stream" or any(kind == "stream" for _, kind in slots[:-1]):
        raise TypeError(f"{_name(launcher)}: the last parameter, and no other, must be the stream")
    launcher._abi_slots = tuple(slots)
    return launcher._abi_slots


def _checked_int(launcher: JitFunction, position: int, value: object, bits: tuple[int, int]) -> int:
    name = _slots(launcher)[position][0]
    try:
        number = value.__index__()  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        raise TypeError(
            f"{_name(launcher)}: argument {position} ({name}) is {value!r}, not an integer"
        ) from None
    if not bits[0] <= number <= bits[1]:
        raise OverflowError(
            f"{_name(launcher)}: argument {position} ({name}) = {number} does not fit its slot"
        )
    return number


def _pack(launcher: JitFunction, args: tuple[Any, ...]) -> list[Any]:
    """`args` as the integers, floats and stream of the launcher's ABI.

    Raises TypeError and OverflowError naming launcher, position and value.
    """
    packed = []
    for position, ((name, slot), value) in enumerate(zip(_slots(launcher), args, strict=True)):
        if slot == "i64":
            if value is None:
                value = 0
            elif isinstance(value, torch.Tensor):
                value = value.data_ptr()
            value = _checked_int(launcher, position, value, _I64_RANGE)
        elif slot == "i32":
            value = _checked_int(launcher, position, value, _I32_RANGE)
            value = value - (1 << 32) if value >= 1 << 31 else value
        elif slot == "f32":
            try:
                value = struct.unpack("f", struct.pack("f", value))[0]
            except (struct.error, OverflowError):
                raise TypeError(
                    f"{_name(launcher)}: argument {position} ({name}) is {value!r}, "
                    "not a finite-range f32"
                ) from None
        elif value is not None and not isinstance(value, int) and not hasattr(value, "cuda_stream"):
            raise TypeError(
                f"{_name(launcher)}: the stream is {value!r}; pass None, a handle or an object "
                "with cuda_stream"
            )
        packed.append(value)
    return packed


def _check_count(launcher: JitFunction, args: tuple[Any, ...]) -> None:
    slots = _slots(launcher)
    if len(args) != len(slots):
        names = ", ".join(name for name, _ in slots)
        raise TypeError(
            f"{_name(launcher)} takes {len(slots)} arguments ({names}), got {len(args)}"
        )


# ---------------------------------------------------------------- dispatch


class _Retained:
    """Per-launcher state: the compiled function of each device and the lock of first calls."""

    __slots__ = ("functions", "lock")

    def __init__(self) -> None:
        self.functions: dict[int, Callable[..., Any]] = {}
        self.lock = threading.Lock()


_attach_lock = threading.Lock()
# The mapping behind os.environ: one dictionary read sees every later change, without the
# encoding that os.environ.get does on each call.
_environ = os.environ._data  # type: ignore[attr-defined]
_FALSE = (None, b"", b"0", b"false", b"False", b"no", b"off")


def _retained(launcher: JitFunction) -> _Retained:
    state = launcher.__dict__.get("_retained")
    if state is None:
        with _attach_lock:
            state = launcher.__dict__.setdefault("_retained", _Retained())
    return state


def _current_device() -> int:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0


def _run_compiled(exe: JitFunction, *args: Any) -> None:
    """Start `exe` with positional `args`, the stream last. See the module docstring.

    Raises TypeError or OverflowError before anything is launched when the arguments do not
    fit, and DriverError when the driver refuses the launch.
    """
    _check_count(exe, args)
    if _mode.interceptor is not None:
        _mode.interceptor(exe, args)
        return
    packed = _pack(exe, args)
    state = _retained(exe)
    device = _current_device()
    compile_only = _environ.get(b"COMPILE_ONLY") not in _FALSE
    function = state.functions.get(device)
    if function is not None:
        if not compile_only:
            function(*packed)
        return
    with state.lock:
        function = state.functions.get(device)
        if function is None:
            function = _first_call(exe, packed)
            if function is not None:
                state.functions[device] = function
            return
    if not compile_only:
        function(*packed)


def _first_call(exe: JitFunction, packed: list[Any]) -> Callable[..., Any] | None:
    """Compile and execute once; None in compile-only mode, where only the cache is filled."""
    with toolkit_env(), own_launch():
        return flyc.compile(exe, *packed)
