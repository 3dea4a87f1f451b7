"""From a FlyDSL launcher and its arguments to a :class:`Program` and host argument values.

This is the one file that uses private parts of FlyDSL: tracing, the pass list and argument slots.
Everything is lowered by FlyDSL's own pipeline up to, not including, ``gpu-module-to-binary``, so no
linker, HIP or device bitcode is needed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import weakref
from contextlib import contextmanager
from importlib.metadata import version

import numpy as np
import torch

from .lltypes import Type, from_bytes
from .program import Program, read_program

SUPPORTED_FLYDSL = ("0.5.0",)
_programs: dict[tuple[str, str], Program] = {}
_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _flydsl():
    """The private modules, or an error that names what to do."""
    found = version("flydsl")
    if found.split("+")[0] not in SUPPORTED_FLYDSL:
        raise RuntimeError(
            f"the emulator reads private parts of FlyDSL and was written for "
            f"{', '.join(SUPPORTED_FLYDSL)}, but {found} is installed; check "
            f"op_tests/emulator/lowering.py against it, then add it to SUPPORTED_FLYDSL"
        )
    from flydsl._mlir import ir
    from flydsl.compiler import jit_executor, jit_function

    return ir, jit_function, jit_executor


@contextmanager
def flydsl_arch(arch: str):
    """Pin FlyDSL's target to ``arch`` and restore the environment afterwards."""
    names = ("FLYDSL_GPU_ARCH", "ARCH")
    saved = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, arch))
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def jit_calls(handler):
    """While active, a call of any JitFunction runs ``handler(jit_function, args, kwargs)``.

    Calls made while FlyDSL traces (a jit function called by another) are left alone.
    """
    ir, jit, _ = _flydsl()
    original = jit.JitFunction._compile_or_execute

    def execute(self, args, kwargs, *, execute, return_compiled=False):
        if ir.Context.current is not None or not execute:
            return original(self, args, kwargs, execute=execute, return_compiled=return_compiled)
        handler(self, args, kwargs)
        return _Replay(self, handler, kwargs) if return_compiled else None

    jit.JitFunction._compile_or_execute = execute
    try:
        yield
    finally:
        jit.JitFunction._compile_or_execute = original


class _Replay:
    """What ``flyc.compile`` returns under emulation: a positional callable."""

    def __init__(self, launcher, handler, kwargs) -> None:
        self._launcher, self._handler, self._kwargs = launcher, handler, kwargs

    def __call__(self, *args) -> None:
        self._handler(self._launcher, args, self._kwargs)


def bind(launcher, args, kwargs) -> tuple[object, dict, object]:
    """The launcher's bound ``self`` (or None), its bound arguments by name and its signature."""
    bound_self, args = launcher._split_self(args)
    bound = launcher._sig.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound_self, bound, launcher._sig


def lower(launcher, args, kwargs, arch: str) -> tuple[Program, list[object]]:
    """The launcher's program for ``arch``, and the values of its host function's arguments.

    Lowered programs are kept per launcher, arch and argument kinds for the life of the process.
    """
    _, jit, executor = _flydsl()
    bound_self, bound, sig = bind(launcher, args, kwargs)
    quick = _quick_key(bound.arguments, sig)
    launcher._resolve_arguments(bound.arguments)
    values = tuple(bound.arguments.values())
    known = _known.setdefault(launcher, {})
    key = None if quick is None else (arch, id(bound_self), _hints(launcher), quick)
    program = known.get(key) if key else None
    if program is None:
        program = _lower(launcher, bound, bound_self, sig, arch)
        if key:
            known[key] = program
    specs = jit._build_call_spec(sig, values)
    storages, _ = executor.build_abi_storage([ctype for _, ctype, _ in specs])
    for (index, _, fill), storage in zip(specs, storages, strict=True):
        if fill is not None:
            fill(values[index], storage)
    kinds = program.host.arg_types
    if len(kinds) != len(storages):
        raise RuntimeError(
            f"{program.host.name} takes {len(kinds)} arguments but FlyDSL packs {len(storages)}"
        )
    return program, [_decode(s, k) for s, k in zip(storages, kinds, strict=True)]


def _hints(launcher) -> str:
    return repr(sorted(launcher._effective_compile_hints().items(), key=lambda kv: kv[0]))


def _quick_key(arguments: dict, sig) -> tuple | None:
    """What of the arguments can change the traced code; None where that is not known."""
    from flydsl.compiler.jit_argument import is_type_param_annotation
    from flydsl.expr.typing import Constexpr

    key = []
    for name, value in arguments.items():
        note = sig.parameters[name].annotation
        if Constexpr.is_constexpr_annotation(note) or is_type_param_annotation(note):
            try:
                hash(value)
            except TypeError:
                return None
            key.append((type(value), value))
        elif isinstance(value, torch.Tensor):
            key.append((value.dtype, value.shape, value.stride()))
        elif value is None or isinstance(value, (bool, int, float)):
            key.append(type(value))
        elif getattr(note, "_is_stream_param", False):
            key.append("stream")
        else:
            return None
    return tuple(key)


def _lower(launcher, bound, bound_self, sig, arch: str) -> Program:
    ir, jit, _ = _flydsl()
    from flydsl.compiler.jit_function import CompilationContext

    hints = launcher._effective_compile_hints()
    backend = jit.get_backend()
    if backend.target.arch != arch:
        raise RuntimeError(f"FlyDSL targets {backend.target.arch} where {arch} was asked for")
    with jit._create_mlir_context() as context, CompilationContext.compile_hints(hints):
        traced = launcher._trace(context, sig, bound, bound_self, execute=False)
        _, config = jit.MlirCompiler.prepare(
            traced.module, backend=backend, compile_hints=hints, link_libs=None
        )
        text = traced.module.operation.get_asm(enable_debug_info=True, assume_verified=True)
        entry = launcher.func.__name__
        digest = hashlib.sha256(text.encode()).hexdigest()
        if (arch, digest) not in _programs:
            module = ir.Module.parse(text)
            passes = [f for f in config.fragments if not f.startswith("gpu-module-to-binary")]
            jit._run_pipeline(module, passes, verifier=False, print_after_all=False)
            _programs[arch, digest] = read_program(module, ir, arch, entry)
        return _programs[arch, digest]


def _decode(storage, kind: Type) -> object:
    """A host argument's value from its ctypes storage, as a uniform value."""
    raw = np.frombuffer(ctypes.string_at(ctypes.addressof(storage), kind.size), np.uint8)
    return _split(raw, kind)


def _split(raw: np.ndarray, kind: Type) -> object:
    if kind.kind == "struct":
        offsets = kind.offsets()
        return tuple(
            _split(raw[o : o + f.size], f) for o, f in zip(offsets, kind.fields, strict=False)
        )
    return from_bytes(raw.reshape(1, -1).copy(), kind)


def parse_program(text: str, arch: str, entry: str) -> Program:
    """A :class:`Program` from the text of an already lowered module."""
    ir, jit, _ = _flydsl()
    with jit._create_mlir_context():
        return read_program(ir.Module.parse(text), ir, arch, entry)
