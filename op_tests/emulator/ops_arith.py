"""Integer and floating point arithmetic, comparisons and math functions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .code import Decoder, Run, handles
from .lltypes import Type, bf16_to_f32, f32_to_bf16, unsigned
from .program import Inst

Array = np.ndarray
Op2 = Callable[[Array, Array], Array]


def trunc_div(a: Array, b: Array) -> Array:
    """Signed division towards zero; division by zero gives 0."""
    q = a // b
    return q + ((a % b != 0) & ((a < 0) != (b < 0))).astype(a.dtype)


def _unsigned_op(op: Op2) -> Op2:
    return lambda a, b: op(unsigned(a), unsigned(b)).view(a.dtype)


def _saturate(op: Op2, signed: bool) -> Op2:
    def run(a: Array, b: Array) -> Array:
        wide = np.int64 if a.dtype.itemsize < 8 else object
        kind = a.dtype if signed else unsigned(a).dtype
        info = np.iinfo(kind)
        exact = op(a.view(kind).astype(wide), b.view(kind).astype(wide))
        return np.clip(exact, info.min, info.max).astype(kind).view(a.dtype)

    return run


def _shift(op: Op2, is_unsigned: bool) -> Op2:
    def run(a: Array, b: Array) -> Array:
        bits = a.dtype.itemsize * 8
        amount = unsigned(b)
        left = unsigned(a) if is_unsigned else a
        # What LLVM calls poison must still not differ from one run to the next.
        result = op(left, np.minimum(amount, bits - 1).astype(left.dtype))
        return np.where(amount < bits, result, 0).astype(left.dtype).view(a.dtype)

    return run


def _fshl(a: Array, b: Array, c: Array, left: bool) -> Array:
    bits = a.dtype.itemsize * 8
    kind = unsigned(a).dtype
    amount = unsigned(c) % kind.type(bits)
    if not left:
        amount = (kind.type(bits) - amount) % kind.type(bits) + kind.type(0)
        whole = unsigned(c) % kind.type(bits) == 0
        result = np.where(whole, unsigned(b), _join(a, b, amount, bits, kind))
    else:
        result = np.where(amount == 0, unsigned(a), _join(a, b, amount, bits, kind))
    return result.astype(kind).view(a.dtype)


def _join(a: Array, b: Array, amount: Array, bits: int, kind) -> Array:
    safe = np.where(amount == 0, kind.type(1), amount)
    return (unsigned(a) << safe) | (unsigned(b) >> (kind.type(bits) - safe))


_INT2: dict[str, Op2] = {
    "llvm.add": np.add,
    "llvm.sub": np.subtract,
    "llvm.mul": np.multiply,
    "llvm.and": np.bitwise_and,
    "llvm.or": np.bitwise_or,
    "llvm.xor": np.bitwise_xor,
    "llvm.sdiv": trunc_div,
    "llvm.srem": np.fmod,
    "llvm.udiv": _unsigned_op(np.floor_divide),
    "llvm.urem": _unsigned_op(np.remainder),
    "llvm.shl": _shift(np.left_shift, False),
    "llvm.lshr": _shift(np.right_shift, True),
    "llvm.ashr": _shift(np.right_shift, False),
    "llvm.intr.smax": np.maximum,
    "llvm.intr.smin": np.minimum,
    "llvm.intr.umax": _unsigned_op(np.maximum),
    "llvm.intr.umin": _unsigned_op(np.minimum),
    "llvm.intr.uadd.sat": _saturate(np.add, False),
    "llvm.intr.usub.sat": _saturate(np.subtract, False),
    "llvm.intr.sadd.sat": _saturate(np.add, True),
    "llvm.intr.ssub.sat": _saturate(np.subtract, True),
}
_BOOL2: dict[str, Op2] = {
    "llvm.add": np.logical_xor,
    "llvm.sub": np.logical_xor,
    "llvm.mul": np.logical_and,
    "llvm.intr.umax": np.logical_or,
    "llvm.intr.umin": np.logical_and,
    "llvm.intr.smax": np.logical_and,
    "llvm.intr.smin": np.logical_or,
}


@handles(*_INT2)
def int_binary(d: Decoder, inst: Inst) -> Run:
    kind = inst.result_types[0]
    if kind.scalar.bits > 64:
        raise NotImplementedError(f"arithmetic on {kind}")
    op = _INT2[inst.name]
    if kind.scalar.bits == 1:
        op = _BOOL2.get(inst.name, op)
    a, b = inst.args
    r = inst.results[0]

    def run(v: list, s: object) -> None:
        v[r] = op(v[a], v[b])

    return run


def _overflow(op: Op2, signed: bool) -> Callable[[Array, Array], tuple[Array, Array]]:
    def run(a: Array, b: Array) -> tuple[Array, Array]:
        kind = a.dtype if signed else unsigned(a).dtype
        exact = op(a.view(kind).astype(object), b.view(kind).astype(object))
        info = np.iinfo(kind)
        return op(a, b), ((exact < info.min) | (exact > info.max)).astype(bool)

    return run


_WITH_OVERFLOW = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


@handles(*(f"llvm.intr.{s}{n}.with.overflow" for n in _WITH_OVERFLOW for s in "us"))
def with_overflow(d: Decoder, inst: Inst) -> Run:
    name = inst.name.split(".")[2]
    op = _overflow(_WITH_OVERFLOW[name[1:]], name[0] == "s")
    a, b = inst.args
    r = inst.results[0]

    def run(v: list, s: object) -> None:
        v[r] = op(v[a], v[b])

    return run


def as_float(values: Array, kind: Type) -> Array:
    """A float operand as something numpy computes with: bf16 as float32."""
    return bf16_to_f32(values) if kind.is_bf16 else values


def as_kind(values: Array, kind: Type) -> Array:
    """A computed float as the representation of ``kind``."""
    return f32_to_bf16(values.astype(np.float32)) if kind.is_bf16 else values.astype(kind.dtype)


def elementwise(inst: Inst, op: Callable[..., Array]) -> Run:
    """``result = op(operands)`` on floats of one type."""
    kind, args, r = inst.result_types[0], inst.args, inst.results[0]
    if kind.is_bf16:

        def run(v: list, s: object) -> None:
            v[r] = f32_to_bf16(op(*(bf16_to_f32(v[x]) for x in args)))

    elif len(args) == 1:
        (a,) = args

        def run(v: list, s: object) -> None:
            v[r] = op(v[a])

    elif len(args) == 2:
        a, b = args

        def run(v: list, s: object) -> None:
            v[r] = op(v[a], v[b])

    else:

        def run(v: list, s: object) -> None:
            v[r] = op(*(v[x] for x in args))

    return run


def fma(a: Array, b: Array, c: Array) -> Array:
    """One rounding for f16 and f32; f64 rounds twice."""
    if a.dtype == np.float64:
        return a * b + c
    wide = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    return wide.astype(a.dtype)


def _med3(a: Array, b: Array, c: Array) -> Array:
    middle = np.fmax(np.fmin(a, b), np.fmin(np.fmax(a, b), c))
    lowest = np.fmin(np.fmin(a, b), c)
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), lowest, middle)


def _native(op: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda a: op(a.astype(np.float64)).astype(a.dtype)


_TURN = 2 * np.pi
_FLOAT: dict[str, Callable[..., Array]] = {
    "llvm.fadd": np.add,
    "llvm.fsub": np.subtract,
    "llvm.fmul": np.multiply,
    "llvm.fdiv": np.divide,
    "llvm.frem": np.fmod,
    "llvm.fneg": np.negative,
    "llvm.intr.maxnum": np.fmax,
    "llvm.intr.minnum": np.fmin,
    "llvm.intr.maximumnum": np.fmax,
    "llvm.intr.minimumnum": np.fmin,
    "llvm.intr.maximum": np.maximum,
    "llvm.intr.minimum": np.minimum,
    "llvm.intr.copysign": np.copysign,
    "llvm.intr.fabs": np.abs,
    "llvm.intr.sqrt": np.sqrt,
    "llvm.intr.exp": _native(np.exp),
    "llvm.intr.exp2": _native(np.exp2),
    "llvm.intr.log": _native(np.log),
    "llvm.intr.log2": _native(np.log2),
    "llvm.intr.log10": _native(np.log10),
    "llvm.intr.sin": _native(np.sin),
    "llvm.intr.cos": _native(np.cos),
    "llvm.intr.tanh": _native(np.tanh),
    "llvm.intr.pow": np.power,
    "llvm.intr.floor": np.floor,
    "llvm.intr.ceil": np.ceil,
    "llvm.intr.trunc": np.trunc,
    "llvm.intr.rint": np.rint,
    "llvm.intr.nearbyint": np.rint,
    "llvm.intr.roundeven": np.rint,
    "llvm.intr.round": lambda a: np.copysign(np.floor(np.abs(a) + a.dtype.type(0.5)), a),
    "llvm.intr.fma": fma,
    "llvm.intr.fmuladd": fma,
    "rocdl.fmed3": _med3,
    "rocdl.exp2": _native(np.exp2),
    "rocdl.exp": _native(np.exp2),
    "rocdl.log": _native(np.log2),
    "rocdl.rcp": lambda a: a.dtype.type(1) / a,
    "rocdl.rsq": _native(lambda a: 1 / np.sqrt(a)),
    "rocdl.sqrt": np.sqrt,
    "rocdl.sin": _native(lambda a: np.sin(a * _TURN)),
    "rocdl.cos": _native(lambda a: np.cos(a * _TURN)),
    "rocdl.tanh": _native(np.tanh),
}
_LIBRARY_NAMES = {"fabs": "fabs", "fmax": "maxnum", "fmin": "minnum", "rsqrt": "rsq"}


def float_function(name: str) -> Callable[..., Array] | None:
    """The function of a C library name such as exp2, or None."""
    name = _LIBRARY_NAMES.get(name, name)
    return _FLOAT.get(f"llvm.intr.{name}") or _FLOAT.get(f"rocdl.{name}")


_INTRINSICS = {
    "llvm.amdgcn.exp2": "rocdl.exp2",
    "llvm.amdgcn.log": "rocdl.log",
    "llvm.amdgcn.rcp": "rocdl.rcp",
    "llvm.amdgcn.rsq": "rocdl.rsq",
    "llvm.amdgcn.sqrt": "rocdl.sqrt",
    "llvm.amdgcn.fmed3": "rocdl.fmed3",
    "llvm.amdgcn.tanh": "rocdl.tanh",
}


@handles(*_FLOAT)
def float_op(d: Decoder, inst: Inst) -> Run:
    return elementwise(inst, _FLOAT[inst.name])


@handles(*(f"{name}*" for name in _INTRINSICS))
def float_intrinsic(d: Decoder, inst: Inst) -> Run:
    base = ".".join(inst.name.split(".")[:3])
    return elementwise(inst, _FLOAT[_INTRINSICS[base]])


_ICMP: list[tuple[Op2, bool]] = [
    (np.equal, False),
    (np.not_equal, False),
    (np.less, False),
    (np.less_equal, False),
    (np.greater, False),
    (np.greater_equal, False),
    (np.less, True),
    (np.less_equal, True),
    (np.greater, True),
    (np.greater_equal, True),
]


@handles("llvm.icmp")
def icmp(d: Decoder, inst: Inst) -> Run:
    op, is_unsigned = _ICMP[inst.attrs["predicate"]]
    a, b = inst.args
    r = inst.results[0]
    if inst.arg_types[0].scalar.bits == 1 and 2 <= inst.attrs["predicate"] <= 5:
        raise NotImplementedError("signed comparison of i1")

    def run(v: list, s: object) -> None:
        v[r] = op(v[a], v[b])

    def run_unsigned(v: list, s: object) -> None:
        v[r] = op(unsigned(v[a]), unsigned(v[b]))

    return run_unsigned if is_unsigned else run


def _ordered(op: Op2) -> Op2:
    return lambda a, b: op(a, b) & ~(np.isnan(a) | np.isnan(b))


def _unordered(op: Op2) -> Op2:
    return lambda a, b: op(a, b) | np.isnan(a) | np.isnan(b)


_COMPARE = [np.equal, np.greater, np.greater_equal, np.less, np.less_equal, np.not_equal]
_FCMP: list[Op2] = [
    lambda a, b: np.zeros(np.broadcast(a, b).shape, bool),
    *(_ordered(op) for op in _COMPARE),
    lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    *(_unordered(op) for op in _COMPARE),
    lambda a, b: np.isnan(a) | np.isnan(b),
    lambda a, b: np.ones(np.broadcast(a, b).shape, bool),
]


@handles("llvm.fcmp")
def fcmp(d: Decoder, inst: Inst) -> Run:
    op = _FCMP[inst.attrs["predicate"]]
    a, b = inst.args
    r, kind = inst.results[0], inst.arg_types[0]

    def run(v: list, s: object) -> None:
        v[r] = op(as_float(v[a], kind), as_float(v[b], kind))

    return run


def _bits(a: Array) -> Array:
    """``(..., bits)`` of an integer array, least significant first."""
    raw = np.ascontiguousarray(a)[..., None].view(np.uint8)
    return np.unpackbits(raw, axis=-1, bitorder="little")


def _leading_zeros(a: Array) -> Array:
    bits = _bits(a)[..., ::-1]
    return np.where(bits.any(-1), bits.argmax(-1), bits.shape[-1])


def _trailing_zeros(a: Array) -> Array:
    bits = _bits(a)
    return np.where(bits.any(-1), bits.argmax(-1), bits.shape[-1])


def _reverse(a: Array) -> Array:
    packed = np.packbits(_bits(a)[..., ::-1], axis=-1, bitorder="little")
    return packed.view(a.dtype)[..., 0]


_INT1: dict[str, Callable[[Array], Array]] = {
    "llvm.intr.ctpop": lambda a: _bits(a).sum(-1),
    "llvm.intr.ctlz": _leading_zeros,
    "llvm.intr.cttz": _trailing_zeros,
    "llvm.intr.bitreverse": _reverse,
    "llvm.intr.bswap": lambda a: a.byteswap(),
    "llvm.intr.abs": np.abs,
}


@handles(*_INT1)
def int_unary(d: Decoder, inst: Inst) -> Run:
    op, a, r = _INT1[inst.name], inst.args[0], inst.results[0]
    dtype = inst.result_types[0].dtype

    def run(v: list, s: object) -> None:
        v[r] = op(v[a]).astype(dtype)

    return run


@handles("llvm.intr.fshl", "llvm.intr.fshr")
def funnel_shift(d: Decoder, inst: Inst) -> Run:
    left = inst.name.endswith("l")
    a, b, c = inst.args
    r = inst.results[0]

    def run(v: list, s: object) -> None:
        v[r] = _fshl(v[a], v[b], v[c], left)

    return run


@handles("llvm.amdgcn.perm")
def perm(d: Decoder, inst: Inst) -> Run:
    """v_perm_b32: bytes of {a, b} (b the low half) chosen by the selector's bytes."""
    a, b, c = inst.args
    r = inst.results[0]

    def run(v: list, s: object) -> None:
        high, low, select = np.broadcast_arrays(v[a], v[b], v[c])
        data = np.stack([low, high], -1).view(np.uint8)
        choice = np.ascontiguousarray(select)[:, None].view(np.uint8)
        got = np.take_along_axis(data, np.minimum(choice, 7).astype(np.int64), 1)
        got = np.where(choice == 0x0C, 0, np.where(choice >= 0x0D, 0xFF, got))
        if ((choice >= 8) & (choice <= 0x0B)).any():
            raise NotImplementedError("v_perm sign selectors")
        v[r] = got.astype(np.uint8).view(np.int32)[:, 0]

    return run


_REDUCE: dict[str, Op2] = {
    "add": np.add,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "smax": np.maximum,
    "smin": np.minimum,
    "umax": _unsigned_op(np.maximum),
    "umin": _unsigned_op(np.minimum),
    "fmax": np.fmax,
    "fmin": np.fmin,
    "fmaximum": np.maximum,
    "fminimum": np.minimum,
    "fadd": np.add,
    "fmul": np.multiply,
}


@handles("llvm.intr.vector.reduce.*")
def vector_reduce(d: Decoder, inst: Inst) -> Run:
    """Element by element in order; fadd and fmul begin with their first operand."""
    op, r = _REDUCE[inst.name.rsplit(".", 1)[1]], inst.results[0]
    *start, a = inst.args
    kind = inst.arg_types[-1]

    def run(v: list, s: object) -> None:
        values = as_float(v[a], kind)
        columns = [values[:, n] for n in range(kind.count)]
        if start:
            columns.insert(0, as_float(v[start[0]], kind))
        total = columns[0]
        for column in columns[1:]:
            total = op(total, column)
        v[r] = as_kind(total, kind) if kind.is_bf16 else total

    return run
