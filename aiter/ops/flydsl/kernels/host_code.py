"""The launch path's functions, in the LLVM dialect: what `host_entry` has compiled."""

from __future__ import annotations

from aiter.jit.utils.flydsl_private import HostModule, TensorAbi

from .host_convert import conversions, layout_bytes, tensor_code

REFUSED = -1000


def launch_code(
    name: str, slots: tuple[str, ...], tensors: tuple[TensorAbi | None, ...], types: list[str]
) -> str:
    """The launch path of launcher `name`, whose lowered function takes `types`.

    aiter_raw(args, count) takes `count` objects and returns 0, REFUSED, or a status;
    aiter_launch is the same as a METH_FASTCALL function that returns an int.
    """
    helpers, allocate, convert, arguments = [], [], [], []
    remaining = iter(types)

    def argument(place: str, size: int) -> None:
        allocate.append(f"  %{place}_size = llvm.mlir.constant({size} : i32) : i32")
        allocate.append(
            f"  %{place} = llvm.alloca %{place}_size x i8 {{alignment = 8 : i64}} "
            ": (i32) -> !llvm.ptr"
        )
        arguments.append((place, next(remaining)))

    refused = ["%count_bad"]
    for i, (slot, abi) in enumerate(zip(slots, tensors, strict=True)):
        convert.append(
            f"  %p{i} = llvm.getelementptr %args[{i}] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr"
        )
        convert.append(f"  %o{i} = llvm.load %p{i} : !llvm.ptr -> !llvm.ptr")
        argument(f"a{i}", 8)
        if abi is None:
            call = f"@aiter_{slot}(%o{i}, %a{i}) : (!llvm.ptr, !llvm.ptr)"
        else:
            helpers.append(tensor_code(f"aiter_tensor{i}", abi))
            varying = layout_bytes(abi)
            layout = f"a{i}"
            if varying:
                layout = f"l{i}"
                argument(layout, varying)
            call = f"@aiter_tensor{i}(%o{i}, %a{i}, %{layout}) : (!llvm.ptr, !llvm.ptr, !llvm.ptr)"
        convert.append(f"  %s{i} = llvm.call {call} -> i32")
        convert.append(f"  %r{i} = llvm.or {refused[-1]}, %s{i} : i32")
        refused.append(f"%r{i}")
    loads = [
        f"  %v_{place} = llvm.load %{place} {{alignment = 1 : i64}} : !llvm.ptr -> {kind}"
        for place, kind in arguments
    ]
    values = ", ".join(f"%v_{place}" for place, _ in arguments)
    kinds = ", ".join(kind for _, kind in arguments)
    newline = "\n"
    return f"""{conversions()}{"".join(helpers)}
llvm.func @{name}({kinds})

llvm.func @aiter_raw(%args: !llvm.ptr, %count: i64) -> i64 {{
{newline.join(allocate)}
  %zero = llvm.mlir.constant(0 : i32) : i32
  %refused = llvm.mlir.constant({REFUSED} : i64) : i64
  %takes = llvm.mlir.constant({len(slots)} : i64) : i64
  %count_differs = llvm.icmp "ne" %count, %takes : i64
  %count_bad = llvm.zext %count_differs : i1 to i32
  llvm.cond_br %count_differs, ^done(%refused : i64), ^convert
^convert:
{newline.join(convert)}
  %good = llvm.icmp "eq" {refused[-1]}, %zero : i32
  llvm.cond_br %good, ^start, ^done(%refused : i64)
^start:
{newline.join(loads)}
  %thread = llvm.call @PyEval_SaveThread() : () -> !llvm.ptr
  %stale = llvm.call @flydslRuntimeTakeError() : () -> i32
  llvm.call @{name}({values}) : ({kinds}) -> ()
  %status = llvm.call @flydslRuntimeTakeError() : () -> i32
  llvm.call @PyEval_RestoreThread(%thread) : (!llvm.ptr) -> ()
  %wide = llvm.sext %status : i32 to i64
  llvm.br ^done(%wide : i64)
^done(%result: i64):
  llvm.return %result : i64
}}

llvm.func @aiter_launch(%self: !llvm.ptr, %args: !llvm.ptr, %count: i64) -> !llvm.ptr {{
  %status = llvm.call @aiter_raw(%args, %count) : (!llvm.ptr, i64) -> i64
  %object = llvm.call @PyLong_FromLong(%status) : (i64) -> !llvm.ptr
  llvm.return %object : !llvm.ptr
}}
{_address_code("raw")}{_address_code("launch")}"""


def run_code(
    held: int, environ: object, key: object, attribute: str, slow: object, failed: object
) -> str:
    """aiter_run(self, args, count, names), a METH_FASTCALL | METH_KEYWORDS function.

    It calls the function at the address that args[0] has as `attribute` with the other
    arguments, and returns None. It calls `slow` with its own arguments instead when the word at
    `held` is not zero, when `key` is in the dictionary `environ`, for keywords, without the
    attribute, and when nothing was launched; `failed(args[0], status)` when a launch failed.
    The addresses of all these objects are in the text, so they must outlive the code.
    """
    return f"""
llvm.func @PyDict_Contains(!llvm.ptr, !llvm.ptr) -> i32
llvm.func @PyErr_Clear()
llvm.func @PyLong_AsVoidPtr(!llvm.ptr) -> !llvm.ptr
llvm.func @PyLong_FromLong(i64) -> !llvm.ptr
llvm.func @PyObject_GetAttr(!llvm.ptr, !llvm.ptr) -> !llvm.ptr
llvm.func @PyObject_Vectorcall(!llvm.ptr, !llvm.ptr, i64, !llvm.ptr) -> !llvm.ptr
llvm.func @Py_DecRef(!llvm.ptr)
llvm.func @Py_IncRef(!llvm.ptr)

llvm.func @aiter_run(%self: !llvm.ptr, %args: !llvm.ptr, %count: i64, %names: !llvm.ptr)
    -> !llvm.ptr {{
  %null = llvm.mlir.zero : !llvm.ptr
  %zero = llvm.mlir.constant(0 : i64) : i64
  %one = llvm.mlir.constant(1 : i64) : i64
  %two = llvm.mlir.constant(2 : i64) : i64
  %pair = llvm.alloca %two x !llvm.ptr : (i64) -> !llvm.ptr
  %absent = llvm.mlir.constant(0 : i32) : i32
  {_object("held", held)}
  {_object("environ", id(environ))}
  {_object("key", id(key))}
  {_object("attribute", id(attribute))}
  {_object("slow", id(slow))}
  {_object("failed", id(failed))}
  {_object("none", id(None))}
  %positional = llvm.icmp "eq" %names, %null : !llvm.ptr
  %some = llvm.icmp "sge" %count, %one : i64
  %word = llvm.load volatile %held : !llvm.ptr -> i64
  %free = llvm.icmp "eq" %word, %zero : i64
  %contains = llvm.call @PyDict_Contains(%environ, %key) : (!llvm.ptr, !llvm.ptr) -> i32
  %unset = llvm.icmp "eq" %contains, %absent : i32
  %plain = llvm.and %positional, %some : i1
  %launching = llvm.and %free, %unset : i1
  %common = llvm.and %plain, %launching : i1
  llvm.cond_br %common, ^find, ^slow
^find:
  %exe = llvm.load %args : !llvm.ptr -> !llvm.ptr
  %address = llvm.call @PyObject_GetAttr(%exe, %attribute) : (!llvm.ptr, !llvm.ptr) -> !llvm.ptr
  %missing = llvm.icmp "eq" %address, %null : !llvm.ptr
  llvm.cond_br %missing, ^cold, ^warm
^cold:
  llvm.call @PyErr_Clear() : () -> ()
  llvm.br ^slow
^warm:
  %raw = llvm.call @PyLong_AsVoidPtr(%address) : (!llvm.ptr) -> !llvm.ptr
  llvm.call @Py_DecRef(%address) : (!llvm.ptr) -> ()
  %rest = llvm.getelementptr %args[1] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
  %others = llvm.sub %count, %one : i64
  %status = llvm.call %raw(%rest, %others) : !llvm.ptr, (!llvm.ptr, i64) -> i64
  %good = llvm.icmp "eq" %status, %zero : i64
  llvm.cond_br %good, ^launched, ^not
^launched:
  llvm.call @Py_IncRef(%none) : (!llvm.ptr) -> ()
  llvm.return %none : !llvm.ptr
^not:
  %refused = llvm.mlir.constant({REFUSED} : i64) : i64
  %not_loaded = llvm.mlir.constant({HostModule.NOT_LOADED} : i64) : i64
  %is_refused = llvm.icmp "eq" %status, %refused : i64
  %is_not_loaded = llvm.icmp "eq" %status, %not_loaded : i64
  %nothing = llvm.or %is_refused, %is_not_loaded : i1
  llvm.cond_br %nothing, ^slow, ^failed
^failed:
  %number = llvm.call @PyLong_FromLong(%status) : (i64) -> !llvm.ptr
  %second = llvm.getelementptr %pair[1] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
  llvm.store %exe, %pair : !llvm.ptr, !llvm.ptr
  llvm.store %number, %second : !llvm.ptr, !llvm.ptr
  %raised = llvm.call @PyObject_Vectorcall(%failed, %pair, %two, %null)
      : (!llvm.ptr, !llvm.ptr, i64, !llvm.ptr) -> !llvm.ptr
  llvm.call @Py_DecRef(%number) : (!llvm.ptr) -> ()
  llvm.return %raised : !llvm.ptr
^slow:
  %result = llvm.call @PyObject_Vectorcall(%slow, %args, %count, %names)
      : (!llvm.ptr, !llvm.ptr, i64, !llvm.ptr) -> !llvm.ptr
  llvm.return %result : !llvm.ptr
}}
{_address_code("run")}"""


def _object(name: str, address: int) -> str:
    return (
        f"%{name}_bits = llvm.mlir.constant({address} : i64) : i64\n"
        f"  %{name} = llvm.inttoptr %{name}_bits : i64 to !llvm.ptr"
    )


def _address_code(function: str) -> str:
    return f"""
llvm.func @aiter_{function}_address(%out: !llvm.ptr) {{
  %address = llvm.mlir.addressof @aiter_{function} : !llvm.ptr
  llvm.store %address, %out : !llvm.ptr, !llvm.ptr
  llvm.return
}}
"""
