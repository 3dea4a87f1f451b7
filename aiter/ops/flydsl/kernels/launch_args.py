"""What a launcher takes, and a call's arguments in the one form that always fits.

The launch path proper (`host_entry`) takes plain integers, floats, None and tensors and hands
everything else back. This module then either brings the arguments into that plain form or says
which one is wrong, by launcher, position and value. It is never on the path of a good call.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import flydsl.expr as fx
import torch
from flydsl.compiler.jit_argument import resolve_signature
from flydsl.compiler.jit_function import JitFunction
from torch._subclasses import FakeTensor

from aiter.jit.utils.flydsl_private import TensorAbi

_SLOT_NAMES = {
    fx.Int64: "i64",
    fx.Int32: "i32",
    fx.Float32: "f32",
    fx.Tensor: "tensor",
    fx.Stream: "stream",
}
_ZEROS = {"i64": 0, "i32": 0, "f32": 0.0, "stream": None}
_I32_RANGE = (-(1 << 31), (1 << 32) - 1)
_I64_RANGE = (-(1 << 63), (1 << 64) - 1)

# DLPack's code and bits of the element types FlyDSL's tensors can have.
DLPACK_TYPES = {
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bool: (6, 8),
    torch.uint8: (1, 8),
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.float8_e4m3fn: (10, 8),
    torch.float8_e4m3fnuz: (11, 8),
    torch.float8_e5m2: (12, 8),
    torch.float8_e5m2fnuz: (13, 8),
}


def name_of(launcher: JitFunction) -> str:
    """The launcher's function name, for messages."""
    return getattr(launcher.func, "__name__", repr(launcher))


def slots_of(launcher: JitFunction) -> tuple[tuple[str, str], ...]:
    """(parameter, slot kind) of a launcher in order. Raises TypeError for any other ABI."""
    cached = launcher.__dict__.get("_abi_slots")
    if cached is not None:
        return cached
    slots = []
    for parameter in resolve_signature(launcher.func).parameters.values():
        kind = _SLOT_NAMES.get(parameter.annotation)
        if kind is None:
            raise TypeError(
                f"{name_of(launcher)}: parameter {parameter.name!r} is {parameter.annotation!r}; a "
                "launcher takes fx.Int64, fx.Int32, fx.Float32, fx.Tensor and one fx.Stream"
            )
        slots.append((parameter.name, kind))
    if [kind for _, kind in slots].count("stream") != 1:
        raise TypeError(f"{name_of(launcher)}: one parameter, and no other, must be the stream")
    launcher._abi_slots = tuple(slots)
    return launcher._abi_slots


def stream_of(launcher: JitFunction, args: Sequence[Any]) -> Any:
    """The stream among `args`, which are one for every parameter."""
    return args[_stream_at(launcher)]


def with_stream(launcher: JitFunction, args: Sequence[Any], stream: Any) -> tuple[Any, ...]:
    """`args` with another stream."""
    at = _stream_at(launcher)
    return (*args[:at], stream, *args[at + 1 :])


def _stream_at(launcher: JitFunction) -> int:
    return next(i for i, (_, kind) in enumerate(slots_of(launcher)) if kind == "stream")


def zeros(launcher: JitFunction) -> list[Any]:
    """Arguments that name no memory. Raises TypeError where a tensor's type is needed."""
    for name, slot in slots_of(launcher):
        if slot == "tensor":
            raise TypeError(f"{name_of(launcher)}: nothing stands in for the tensor {name!r}")
    return [_ZEROS[slot] for _, slot in slots_of(launcher)]


def check_count(launcher: JitFunction, args: Sequence[Any], keywords: dict[str, Any]) -> None:
    """Raise TypeError unless there is one positional argument for every parameter."""
    slots = slots_of(launcher)
    if len(args) == len(slots) and not keywords:
        return
    names = ", ".join(name for name, _ in slots)
    if keywords:
        given = ", ".join(f"{name}={value!r}" for name, value in keywords.items())
        raise TypeError(
            f"{name_of(launcher)} takes positional arguments only ({names}), not {given}"
        )
    problem = (
        f"argument {len(args)} ({slots[len(args)][0]}) is missing"
        if len(args) < len(slots)
        else f"argument {len(slots)} is {args[len(slots)]!r}"
    )
    raise TypeError(
        f"{name_of(launcher)} takes {len(slots)} arguments ({names}), got {len(args)}: {problem}"
    )


def plain_args(launcher: JitFunction, args: Sequence[Any]) -> list[Any]:
    """`args` as signed integers, floats, tensors and a stream handle, None for the default stream.

    Raises TypeError and OverflowError naming launcher, position and value.
    """
    return [
        _PLAIN[slot](f"{name_of(launcher)}: argument {position} ({name})", value)
        for position, ((name, slot), value) in enumerate(zip(slots_of(launcher), args, strict=True))
    ]


def _integer(where: str, value: Any, low: int, high: int) -> int:
    try:
        number = value.__index__()
    except (AttributeError, TypeError):
        raise TypeError(f"{where} is {value!r}, not an integer") from None
    if not low <= number <= high:
        raise OverflowError(f"{where} = {number} does not fit its slot")
    # The unsigned half of the range is the same bits as a negative number.
    return number - (high + 1) if number > high // 2 else number


def _tensor(where: str, value: Any) -> Any:
    # FlyDSL's own wrappers fix a tensor's layout at the first call and pass as tensors later.
    tensor = getattr(value, "torch_tensor", value)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{where} is {value!r}, not a tensor")
    return value


def _live(where: str, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        raise TypeError(f"{where} is a {type(tensor).__name__} without memory: {tensor!r}")
    return tensor


def _address(where: str, value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, torch.Tensor):
        return _live(where, value).data_ptr()
    return _integer(where, value, *_I64_RANGE)


def _float(where: str, value: Any) -> float:
    # Little-endian, because the native format turns a number that is too large into infinity.
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except (struct.error, OverflowError):
        raise TypeError(f"{where} is {value!r}, not a finite-range f32") from None


def _stream(where: str, value: Any) -> int | None:
    handle = getattr(value, "cuda_stream", value)
    if handle is None or isinstance(handle, int):
        return handle
    raise TypeError(
        f"{where}: the stream is {value!r}; pass None, a handle or an object with cuda_stream"
    )


_PLAIN = {
    "i64": _address,
    "i32": lambda where, value: _integer(where, value, *_I32_RANGE),
    "f32": _float,
    "tensor": _tensor,
    "stream": _stream,
}


# ---------------------------------------------------------------- tensors, described in full


class _DLTensor(ctypes.Structure):
    """DLPack's description of a tensor; `host_entry` reads it at these offsets."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class Described(bytes):
    """A `_DLTensor` as bytes, for tensors torch does not describe itself: `host_entry` takes it."""

    dims: tuple[Any, Any]


def described(
    launcher: JitFunction, plain: list[Any], abis: tuple[TensorAbi | None, ...]
) -> list[Any]:
    """`plain` with each tensor checked against the layout it was compiled for, and described.

    `abis` has the compiled layout of each tensor argument, None for the others. Raises TypeError
    naming launcher, position and value.
    """
    result = list(plain)
    for position, abi in enumerate(abis):
        if abi is not None:
            name = slots_of(launcher)[position][0]
            where = f"{name_of(launcher)}: argument {position} ({name})"
            result[position] = _describe(where, plain[position], abi)
    return result


def _describe(where: str, value: Any, abi: TensorAbi) -> Described:
    tensor = _live(where, getattr(value, "torch_tensor", value))
    shape, strides = tuple(tensor.shape), tensor.stride()
    for what, found, compiled in (
        ("type", tensor.dtype, abi.dtype),
        ("rank", len(shape), len(abi.shape)),
    ):
        if found != compiled:
            raise TypeError(f"{where} has {what} {found}, the launcher was compiled for {compiled}")
    limit = 1 << (63 if abi.wide_strides else 31)
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        fixed_size, fixed_stride = abi.shape[dim], abi.strides[dim]
        if fixed_size not in (None, size) or (size > 1 and fixed_stride not in (None, stride)):
            raise TypeError(
                f"{where} has shape {shape} and strides {strides}, the launcher was compiled for "
                f"{abi.shape} and {abi.strides} (None: any)"
            )
        if size >= 1 << 31 or (fixed_stride is None and stride >= limit):
            raise OverflowError(f"{where} of shape {shape} does not fit the launcher's indices")
    code, bits = DLPACK_TYPES[tensor.dtype]
    dims = ctypes.c_int64 * max(1, len(shape))
    sizes, steps = dims(*shape), dims(*strides)
    described = Described(
        _DLTensor(
            tensor.data_ptr(),
            0,
            0,
            len(shape),
            code,
            bits,
            1,
            *map(ctypes.addressof, (sizes, steps)),
            0,
        )
    )
    described.dims = (sizes, steps)
    return described
