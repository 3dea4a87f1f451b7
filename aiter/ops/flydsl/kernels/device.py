"""Device-side vocabulary that the kernel families share.

Addresses arrive as `fx.Int64`; `global_*` make typed pointers of them, `load_word` reads one
wave-uniform word. Indices are non-negative, so division and remainder by a constant are done
unsigned (`div`, `mod`), which spares the sign fix-up of signed division.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.compiler.ast_rewriter import ASTRewriter
from flydsl.expr.typing import T, as_ir_value

LANES = 64
CHUNK = 16  # bytes a lane moves at once
# Rows are multiples of 512 bytes, so that a buffer of 32-bit offsets ends below this.
BEYOND = -256

# Applied to a function outside a kernel's body it gives `for` and `if` on device values their
# device meaning there too.
traced = ASTRewriter.transform


class TraceObject:
    """A Python object that device control flow leaves alone: it carries no loop-carried values.

    FlyDSL treats a name whose methods are called in a device loop or branch as loop state; an
    object whose device state lives in register memory has none to carry.
    """

    def __extract_to_ir_values__(self) -> list:
        return []

    def __get_ir_types__(self) -> list:
        return []

    @classmethod
    def __construct_from_ir_values__(cls, values: list, exemplar: TraceObject) -> TraceObject:
        return exemplar


def uniform(value: fx.Int32) -> fx.Int32:
    """`value`, which every lane of the wave holds alike, as a scalar."""
    return fx.Int32(fx.rocdl.readfirstlane(T.i32, value))


def div(value: fx.Int32, by: int) -> fx.Int32:
    """value div by, for value >= 0."""
    return fx.Int32(fx.Uint32(value) // fx.Uint32(by))


def mod(value: fx.Int32, by: int) -> fx.Int32:
    """value mod by, for value >= 0."""
    return fx.Int32(fx.Uint32(value) % fx.Uint32(by))


def shift_right(value: fx.Int32, bits: fx.Int32 | int) -> fx.Int32:
    """`value` as an unsigned word shifted right."""
    return fx.Int32(fx.Uint32(value) >> fx.Uint32(bits))


def thread_in_wave() -> tuple[fx.Int32, fx.Int32]:
    """(wave of the workgroup, uniform; lane of the wave)."""
    thread = fx.Int32(fx.thread_idx.x)
    return uniform(div(thread, LANES)), mod(thread, LANES)


def global_pointer(
    dtype: type[fx.Numeric], address: fx.Int64, alignment: int | None = None
) -> fx.Pointer:
    """`address` as a plain pointer to `dtype`."""
    space = fx.AddressSpace.Global
    alignment = alignment or dtype.width // 8
    return fx.inttoptr(
        fx.PointerType.get(dtype.ir_type, address_space=space, alignment=alignment), address
    )


def global_buffer(
    dtype: type[fx.Numeric], address: fx.Int64, num_bytes: fx.Int64 | int, alignment: int
) -> fx.Pointer:
    """A bounds-checked pointer: loads beyond `num_bytes` give zero, stores there are dropped."""
    pointer = global_pointer(dtype, address, alignment)
    return fx.rocdl.make_buffer_ptr(pointer, num_records_bytes=fx.Int64(num_bytes))


def store_bits(buffer: fx.Pointer, offset: fx.Int32, value: fx.Numeric | fx.Vector) -> None:
    """Store `value` at `offset` bytes of a bounds-checked buffer; beyond its end is dropped."""
    if isinstance(value, fx.Vector) and value.numel == 1:
        value = value[0]  # code generation knows no buffer store of a vector of one
    rsrc = fx.rocdl.get_buffer_rsrc(buffer)
    zero = fx.Int32(0).ir_value()
    fx.rocdl.raw_ptr_buffer_store(as_ir_value(value), rsrc, fx.Int32(offset).ir_value(), zero)


def add_bits(buffer: fx.Pointer, offset: fx.Int32, value: fx.Vector) -> None:
    """Add `value`, two bf16, atomically at `offset` bytes of a bounds-checked buffer."""
    rsrc = fx.rocdl.get_buffer_rsrc(buffer)
    zero = fx.Int32(0).ir_value()
    fx.rocdl.raw_ptr_buffer_atomic_fadd(as_ir_value(value), rsrc, fx.Int32(offset).ir_value(), zero)


def load_word(address: fx.Int64, index: fx.Int32 | int) -> fx.Int32:
    """The i32 at `index` words from `address`, both wave-uniform, as a scalar."""
    return uniform(global_pointer(fx.Int32, address)[fx.Int32(index)])


def shared_bytes(num_bytes: int) -> fx.Pointer:
    """`num_bytes` of LDS, aligned so that a swizzled layout may start there."""
    return fx.SharedAllocator().allocate(fx.Array[fx.Uint8, num_bytes, 1024]).peek().ptr


def exp2(value: fx.Float32) -> fx.Float32:
    """2^value by the native instruction (about one ulp; denormal results flush)."""
    return fx.Float32(fx.rocdl.exp2(T.f32, value.ir_value()))


def reciprocal(value: fx.Float32) -> fx.Float32:
    """1 / value by the native instruction (about one ulp)."""
    return fx.Float32(fx.rocdl.rcp(T.f32, value.ir_value()))


def hinted(launcher: flyc.JitFunction, waves_per_eu: int | None) -> flyc.JitFunction:
    """`launcher`, asking the register allocator for that many waves on a SIMD."""
    if waves_per_eu is None:
        return launcher
    return flyc.compile[{"waves_per_eu": waves_per_eu}](launcher)
