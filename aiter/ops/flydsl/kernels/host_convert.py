"""From Python objects to a launcher's slots, in the LLVM dialect; see `host_entry`.

Addresses of this process's objects are written into the text, so it is made anew in each: types
that are looked for, None, a name and torch's function, all of which live as long as it does.
"""

from __future__ import annotations

import ctypes

import torch

from aiter.jit.utils.flydsl_private import TensorAbi

from .launch_args import DLPACK_TYPES, Described

_STREAM_HANDLE = "cuda_stream"


def _exchange_function() -> int:
    """Address of torch's `int (PyObject *, DLTensor *)`, 0 if it has none."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return 0
    pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    table = pointer_of(capsule, b"dlpack_exchange_api")
    # {version, previous table, allocate, to owned, from owned, to unowned, current stream}
    major, function = ctypes.c_uint32.from_address(table).value, table + 5 * 8
    return ctypes.c_void_p.from_address(function).value or 0 if major == 1 else 0


# aiter_<slot>(object, out) stores the value of a slot at out and answers 0, or 1 for an object it
# does not take. The declarations serve `host_code` too.
_CONVERSIONS = """
llvm.func @PyErr_Clear()
llvm.func @PyEval_SaveThread() -> !llvm.ptr
llvm.func @PyEval_RestoreThread(!llvm.ptr)
llvm.func @PyBytes_AsString(!llvm.ptr) -> !llvm.ptr
llvm.func @PyFloat_AsDouble(!llvm.ptr) -> f64
llvm.func @PyLong_AsLongLongAndOverflow(!llvm.ptr, !llvm.ptr) -> i64
llvm.func @PyLong_FromLong(i64) -> !llvm.ptr
llvm.func @PyObject_GetAttr(!llvm.ptr, !llvm.ptr) -> !llvm.ptr
llvm.func @Py_DecRef(!llvm.ptr)
llvm.func @flydslRuntimeTakeError() -> i32

llvm.func internal @aiter_is(%o: !llvm.ptr, %type: i64) -> i1 {{
  %place = llvm.getelementptr %o[{type_offset}] : (!llvm.ptr) -> !llvm.ptr, i8
  %found = llvm.load %place : !llvm.ptr -> i64
  %same = llvm.icmp "eq" %found, %type : i64
  llvm.return %same : i1
}}

llvm.func internal @aiter_integer(%o: !llvm.ptr, %out: !llvm.ptr) -> i32 {{
  %one = llvm.mlir.constant(1 : i32) : i32
  %overflow = llvm.alloca %one x i32 : (i32) -> !llvm.ptr
  %type = llvm.mlir.constant({int_type} : i64) : i64
  %is = llvm.call @aiter_is(%o, %type) : (!llvm.ptr, i64) -> i1
  llvm.cond_br %is, ^integer, ^other
^integer:
  %value = llvm.call @PyLong_AsLongLongAndOverflow(%o, %overflow)
      : (!llvm.ptr, !llvm.ptr) -> i64
  llvm.store %value, %out : i64, !llvm.ptr
  %status = llvm.load %overflow : !llvm.ptr -> i32
  llvm.return %status : i32
^other:
  llvm.return %one : i32
}}

llvm.func internal @aiter_integer_or_none(%o: !llvm.ptr, %out: !llvm.ptr) -> i32 {{
  %zero = llvm.mlir.constant(0 : i32) : i32
  %null = llvm.mlir.constant(0 : i64) : i64
  %none = llvm.mlir.constant({none} : i64) : i64
  %bits = llvm.ptrtoint %o : !llvm.ptr to i64
  %is = llvm.icmp "eq" %bits, %none : i64
  llvm.cond_br %is, ^none, ^other
^none:
  llvm.store %null, %out : i64, !llvm.ptr
  llvm.return %zero : i32
^other:
  %status = llvm.call @aiter_integer(%o, %out) : (!llvm.ptr, !llvm.ptr) -> i32
  llvm.return %status : i32
}}

llvm.func internal @aiter_dltensor(%o: !llvm.ptr, %out: !llvm.ptr) -> i32 {{
  %zero = llvm.mlir.constant(0 : i32) : i32
  %one = llvm.mlir.constant(1 : i32) : i32
  %tensor = llvm.mlir.constant({tensor_type} : i64) : i64
  %parameter = llvm.mlir.constant({parameter_type} : i64) : i64
  %exchange = llvm.mlir.constant({exchange} : i64) : i64
  %null = llvm.mlir.constant(0 : i64) : i64
  %is_tensor = llvm.call @aiter_is(%o, %tensor) : (!llvm.ptr, i64) -> i1
  %is_parameter = llvm.call @aiter_is(%o, %parameter) : (!llvm.ptr, i64) -> i1
  %is = llvm.or %is_tensor, %is_parameter : i1
  %has = llvm.icmp "ne" %exchange, %null : i64
  %can = llvm.and %is, %has : i1
  llvm.cond_br %can, ^tensor, ^other
^tensor:
  %function = llvm.inttoptr %exchange : i64 to !llvm.ptr
  %status = llvm.call %function(%o, %out) : !llvm.ptr, (!llvm.ptr, !llvm.ptr) -> i32
  %failed = llvm.icmp "ne" %status, %zero : i32
  llvm.cond_br %failed, ^failed, ^good
^good:
  llvm.return %zero : i32
^failed:
  llvm.call @PyErr_Clear() : () -> ()
  llvm.br ^other
^other:
  llvm.return %one : i32
}}

llvm.func internal @aiter_data(%dl: !llvm.ptr) -> i64 {{
  %data = llvm.load %dl : !llvm.ptr -> i64
  %place = llvm.getelementptr %dl[40] : (!llvm.ptr) -> !llvm.ptr, i8
  %offset = llvm.load %place : !llvm.ptr -> i64
  %address = llvm.add %data, %offset : i64
  llvm.return %address : i64
}}

llvm.func internal @aiter_i64(%o: !llvm.ptr, %out: !llvm.ptr) -> i32 {{
  %zero = llvm.mlir.constant(0 : i32) : i32
  %size = llvm.mlir.constant(48 : i32) : i32
  %dl = llvm.alloca %size x i8 {{alignment = 8 : i64}} : (i32) -> !llvm.ptr
  %integer = llvm.call @aiter_integer_or_none(%o, %out) : (!llvm.ptr, !llvm.ptr) -> i32
  %is = llvm.icmp "eq" %integer, %zero : i32
  llvm.cond_br %is, ^done(%zero : i32), ^other
^other:
  %status = llvm.call @aiter_dltensor(%o, %dl) : (!llvm.ptr, !llvm.ptr) -> i32
  %good = llvm.icmp "eq" %status, %zero : i32
  llvm.cond_br %good, ^tensor, ^done(%status : i32)
^tensor:
  %address = llvm.call @aiter_data(%dl) : (!llvm.ptr) -> i64
  llvm.store %address, %out : i64, !llvm.ptr
  llvm.br ^done(%zero : i32)
^done(%result: i32):
  llvm.return %result : i32
}}

llvm.func internal @aiter_i32(%o: !llvm.ptr, %out: !llvm.ptr) -> i32 {{
  %one = llvm.mlir.constant(1 : i32) : i32
  %lowest = llvm.mlir.constant(-2147483648 : i64) : i64
  %span = llvm.mlir.constant(6442450943 : i64) : i64
  %wide = llvm.alloca %one x i64 : (i32) -> !llvm.ptr
  %status = llvm.call @aiter_integer(%o, %wide) : (!llvm.ptr, !llvm.ptr) -> i32
  %value = llvm.load %wide : !llvm.ptr -> i64
  %above = llvm.sub %value, %lowest : i64
  %outside = llvm.icmp "ugt" %above, %span : i64
  %bad = llvm.zext %outside : i1 to i32
  %narrow = llvm.trunc %value : i64 to i32
  llvm.store %narrow, %out : i32, !llvm.ptr
  %result = llvm.or %status, %bad : i32
  llvm.return %result : i32
}}

llvm.func internal @aiter_f32(%o: !llvm.ptr, %out: !llvm.ptr) -> i32 {{
  %one = llvm.mlir.constant(1 : i32) : i32
  %infinity = llvm.mlir.constant(0x7FF0000000000000 : f64) : f64
  %type = llvm.mlir.constant({float_type} : i64) : i64
  %is = llvm.call @aiter_is(%o, %type) : (!llvm.ptr, i64) -> i1
  llvm.cond_br %is, ^float, ^other
^float:
  %value = llvm.call @PyFloat_AsDouble(%o) : (!llvm.ptr) -> f64
  %narrow = llvm.fptrunc %value : f64 to f32
  llvm.store %narrow, %out : f32, !llvm.ptr
  %back = llvm.fpext %narrow : f32 to f64
  %before = llvm.intr.fabs(%value) : (f64) -> f64
  %after = llvm.intr.fabs(%back) : (f64) -> f64
  %was_finite = llvm.fcmp "olt" %before, %infinity : f64
  %is_infinite = llvm.fcmp "oeq" %after, %infinity : f64
  %overflow = llvm.and %was_finite, %is_infinite : i1
  %result = llvm.zext %overflow : i1 to i32
  llvm.return %result : i32
^other:
  llvm.return %one : i32
}}

llvm.func internal @aiter_stream(%o: !llvm.ptr, %out: !llvm.ptr) -> i32 {{
  %zero = llvm.mlir.constant(0 : i32) : i32
  %one = llvm.mlir.constant(1 : i32) : i32
  %name_bits = llvm.mlir.constant({stream_handle} : i64) : i64
  %null = llvm.mlir.zero : !llvm.ptr
  %integer = llvm.call @aiter_integer_or_none(%o, %out) : (!llvm.ptr, !llvm.ptr) -> i32
  %is = llvm.icmp "eq" %integer, %zero : i32
  llvm.cond_br %is, ^done(%zero : i32), ^object
^object:
  %name = llvm.inttoptr %name_bits : i64 to !llvm.ptr
  %handle = llvm.call @PyObject_GetAttr(%o, %name) : (!llvm.ptr, !llvm.ptr) -> !llvm.ptr
  %missing = llvm.icmp "eq" %handle, %null : !llvm.ptr
  llvm.cond_br %missing, ^missing, ^found
^missing:
  llvm.call @PyErr_Clear() : () -> ()
  llvm.br ^done(%one : i32)
^found:
  %status = llvm.call @aiter_integer_or_none(%handle, %out) : (!llvm.ptr, !llvm.ptr) -> i32
  llvm.call @Py_DecRef(%handle) : (!llvm.ptr) -> ()
  llvm.br ^done(%status : i32)
^done(%result: i32):
  llvm.return %result : i32
}}
"""

# The description of a tensor argument, from torch or as bytes, and its fixed part checked.
_TENSOR = """
llvm.func internal @{function}(%o: !llvm.ptr, %data: !llvm.ptr, %layout: !llvm.ptr) -> i32 {{
  %zero = llvm.mlir.constant(0 : i32) : i32
  %size = llvm.mlir.constant(48 : i32) : i32
  %own = llvm.alloca %size x i8 {{alignment = 8 : i64}} : (i32) -> !llvm.ptr
  %described = llvm.mlir.constant({described_type} : i64) : i64
  %is = llvm.call @aiter_is(%o, %described) : (!llvm.ptr, i64) -> i1
  llvm.cond_br %is, ^described, ^other
^described:
  %bytes = llvm.call @PyBytes_AsString(%o) : (!llvm.ptr) -> !llvm.ptr
  llvm.br ^read(%bytes : !llvm.ptr)
^other:
  %status = llvm.call @aiter_dltensor(%o, %own) : (!llvm.ptr, !llvm.ptr) -> i32
  %good = llvm.icmp "eq" %status, %zero : i32
  llvm.cond_br %good, ^read(%own : !llvm.ptr), ^done(%status : i32)
^read(%dl: !llvm.ptr):
  %address = llvm.call @aiter_data(%dl) : (!llvm.ptr) -> i64
  llvm.store %address, %data : i64, !llvm.ptr
  %kind_place = llvm.getelementptr %dl[16] : (!llvm.ptr) -> !llvm.ptr, i8
  %kind = llvm.load %kind_place : !llvm.ptr -> i64
  %kind_compiled = llvm.mlir.constant({kind} : i64) : i64
  %kind_differs = llvm.icmp "ne" %kind, %kind_compiled : i64
  %kind_bad = llvm.zext %kind_differs : i1 to i32
  llvm.cond_br %kind_differs, ^done(%kind_bad : i32), ^layout
^layout:
  %one = llvm.mlir.constant(1 : i64) : i64
  %shape_place = llvm.getelementptr %dl[24] : (!llvm.ptr) -> !llvm.ptr, i8
  %shape = llvm.load %shape_place : !llvm.ptr -> !llvm.ptr
  %strides_place = llvm.getelementptr %dl[32] : (!llvm.ptr) -> !llvm.ptr, i8
  %strides = llvm.load %strides_place : !llvm.ptr -> !llvm.ptr
{dims}
  llvm.br ^done({bad} : i32)
^done(%result: i32):
  llvm.return %result : i32
}}
"""


def tensor_code(function: str, abi: TensorAbi) -> str:
    """`function(object, data, layout)` for a tensor of the layout `abi`.

    Stores the address at data, and at layout, packed, the sizes and strides that may vary.
    """
    lines: list[str] = []
    bad = ["%kind_bad"]
    at = 0

    def check(name: str, condition: str) -> None:
        lines.append(f"  %{name}_wrong = {condition}")
        lines.append(f"  %{name}_wrong32 = llvm.zext %{name}_wrong : i1 to i32")
        lines.append(f"  %{name}_bad = llvm.or {bad[-1]}, %{name}_wrong32 : i32")
        bad.append(f"%{name}_bad")

    def store(name: str, wide: bool) -> None:
        nonlocal at
        value, kind = (f"%{name}", "i64") if wide else (f"%{name}_narrow", "i32")
        if not wide:
            lines.append(f"  {value} = llvm.trunc %{name} : i64 to i32")
            lines.append(f"  %{name}_limit = llvm.mlir.constant(2147483647 : i64) : i64")
            check(name, f'llvm.icmp "ugt" %{name}, %{name}_limit : i64')
        lines.append(
            f"  %{name}_slot = llvm.getelementptr %layout[{at}] : (!llvm.ptr) -> !llvm.ptr, i8"
        )
        lines.append(
            f"  llvm.store {value}, %{name}_slot {{alignment = 1 : i64}} : {kind}, !llvm.ptr"
        )
        at += 8 if wide else 4

    def load(array: str, dim: int) -> str:
        name = f"{array}_{dim}"
        lines.append(
            f"  %{name}_place = llvm.getelementptr %{array}[{dim}] : (!llvm.ptr) -> !llvm.ptr, i64"
        )
        lines.append(f"  %{name} = llvm.load %{name}_place : !llvm.ptr -> i64")
        return name

    def fixed(name: str, value: int) -> str:
        lines.append(f"  %{name}_compiled = llvm.mlir.constant({value} : i64) : i64")
        return f'llvm.icmp "ne" %{name}, %{name}_compiled : i64'

    # Packed: the sizes that may vary, then the strides.
    for dim, value in enumerate(abi.shape):
        name = load("shape", dim)
        if value is None:
            store(name, False)
        else:
            check(name, fixed(name, value))
    for dim, value in enumerate(abi.strides):
        name = load("strides", dim)
        if value is None:
            store(name, abi.wide_strides)
        else:
            # The stride of a dimension that has one element, or none, says nothing.
            lines.append(f"  %{name}_differs = {fixed(name, value)}")
            lines.append(f'  %{name}_counts = llvm.icmp "sgt" %shape_{dim}, %one : i64')
            check(name, f"llvm.and %{name}_differs, %{name}_counts : i1")
    code, bits = DLPACK_TYPES[abi.dtype]
    # Rank, and code, bits and lanes of the type, are one word of the description.
    kind = len(abi.shape) | code << 32 | bits << 40 | 1 << 48
    return _TENSOR.format(
        function=function,
        described_type=id(Described),
        kind=kind,
        dims="\n".join(lines),
        bad=bad[-1],
    )


def layout_bytes(abi: TensorAbi) -> int:
    """How many bytes `tensor_code` stores at layout."""
    return 4 * abi.shape.count(None) + (8 if abi.wide_strides else 4) * abi.strides.count(None)


def conversions() -> str:
    """The functions of `_CONVERSIONS`, for this process."""
    return _CONVERSIONS.format(
        type_offset=object.__basicsize__ - 8,
        int_type=id(int),
        float_type=id(float),
        tensor_type=id(torch.Tensor),
        parameter_type=id(torch.nn.Parameter),
        none=id(None),
        stream_handle=id(_STREAM_HANDLE),
        exchange=_exchange_function(),
    )
