"""The launch path: Python builtins that FlyDSL's own LLVM compiles.

`fast_path` makes the one builtin that `_run_compiled` is; a `HostEntry` the part of one launcher.
Together they take a call's arguments straight from the interpreter, store each in its slot,
release the GIL and call the launcher's lowered host function, which starts the kernels; then the
first error that FlyDSL's runtime recorded meanwhile is the call's. There is no buffer to share
between threads: the slots are on the stack. Every call that is not of the common kind is left
to Python, with nothing launched.

Why machine code: a call through ctypes takes as long as a whole launch does here, and filling
slots from Python several times as long (`benchmarks/dispatch.py`). The compiler is the one every
FlyDSL process has, so there is nothing to build when the package is installed.

What each slot takes here; anything else is for `launch_args` to convert or to explain:

    i64      int, None (a null pointer), a plain torch tensor
    i32      int, signed or unsigned
    f32      float
    tensor   a plain torch tensor of the compiled type and layout, or a `launch_args.Described`
    stream   int, None, an object whose `cuda_stream` is an int

Tensors are read through DLPack's exchange table, one C call for address, type and layout, where
torch has it (2.10 on); the tensors of an older torch take the slower way. All that is used of
CPython is its public C API, save that an object's type is read from its head.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

from aiter.jit.utils.flydsl_private import HostCode, HostModule, TensorAbi

from .host_code import launch_code, run_code

NOT_LOADED = HostModule.NOT_LOADED

# The mapping behind os.environ: one look sees every later change, without the encoding that
# os.environ.get does on each call.
ENVIRON: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
COMPILE_ONLY = b"COMPILE_ONLY"
# Where a warm launcher has the address of its part.
ADDRESS = "_launch_address"

_METH_FASTCALL, _METH_KEYWORDS = 0x0080, 0x0002
_held = ctypes.c_int64(0)


class _MethodDef(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


_new_builtin = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p
)(("PyCFunction_NewEx", ctypes.pythonapi))


def _builtin(
    code: HostCode, function: str, flags: int, name: str, doc: str | None = None
) -> Callable[..., Any]:
    """`function` of `code` as a Python builtin; keeps the code for as long as it lives."""
    encoded = None if doc is None else doc.encode()
    address = code.address(f"aiter_{function}_address")
    method = _MethodDef(name.encode(), address, flags, encoded)
    return _new_builtin(ctypes.addressof(method), (code, method), None)


def hold(on: bool) -> None:
    """Have every call of the fast path left to Python, or no longer."""
    _held.value = on


def fast_path(
    name: str, slow: Callable[..., None], failed: Callable[[Any, int], None], doc: str
) -> Callable[..., None]:
    """A builtin `name(exe, *args)` that launches a warm `exe`, one with an ADDRESS.

    Every other call it makes one of `slow`, with the same arguments: while `hold` is on, while
    COMPILE_ONLY is set to whatever value, for a cold `exe`, and for arguments that its part of
    the launch path does not take. `failed(exe, status)` is called when the driver refused.
    """
    code = HostCode(run_code(ctypes.addressof(_held), ENVIRON, COMPILE_ONLY, ADDRESS, slow, failed))
    # The machine code borrows the functions.
    code.keep = (slow, failed)
    return _builtin(code, "run", _METH_FASTCALL | _METH_KEYWORDS, name, doc)


class HostEntry:
    """The launch path of one compiled launcher, for all threads and devices.

    `slots` are the kinds of the launcher's parameters, `tensors` the compiled layout of each
    tensor among them and None for the others. `address` is where the fast path finds it;
    `launch(*args)` is the same for Python: 0, a status of FlyDSL's runtime or the driver, or
    REFUSED for arguments it does not take.
    """

    def __init__(
        self,
        artifact: Any,
        name: str,
        slots: tuple[str, ...],
        tensors: tuple[TensorAbi | None, ...],
    ) -> None:
        self.tensors = tensors
        self._module = HostModule(artifact, lambda types: launch_code(name, slots, tensors, types))
        self.address = self._module.address("aiter_raw_address")
        self.launch: Callable[..., int] = _builtin(self._module, "launch", _METH_FASTCALL, name)

    def load(self) -> int:
        """Load the device code on the current device, once; the driver's status."""
        return self._module.load()

    def unload(self) -> int:
        """Unload it from every device; the driver's status."""
        return self._module.unload()
