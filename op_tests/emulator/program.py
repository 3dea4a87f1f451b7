"""A lowered MLIR module read into plain Python data.

After reading, nothing here refers to MLIR objects: contexts may be freed, and threads may share it.
SSA values become slot numbers of one list per function.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from .lltypes import Type, parse_type


@dataclass(frozen=True)
class Inst:
    """One operation; ``llvm.call_intrinsic`` goes by the intrinsic's name."""

    name: str
    args: tuple[int, ...]
    arg_types: tuple[Type, ...]
    results: tuple[int, ...]
    result_types: tuple[Type, ...]
    attrs: dict[str, object]
    where: str
    successors: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def attr(self, name: str, default: object = None) -> object:
        return self.attrs.get(name, default)


@dataclass
class Block:
    params: tuple[int, ...]
    insts: list[Inst]


@dataclass
class Function:
    """``blocks`` are in an order in which a loop's blocks come before what follows the loop."""

    name: str
    blocks: list[Block]
    arg_types: tuple[Type, ...]
    slots: int
    attrs: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class SharedGlobal:
    """An LDS global: its byte offset in the workgroup's allocation."""

    offset: int
    size: int


@dataclass
class Program:
    """``host`` is the launcher, ``kernels`` its device code, ``globals`` their LDS variables."""

    arch: str
    host: Function
    kernels: dict[str, Function]
    globals: dict[str, SharedGlobal]
    lds_bytes: int


_ENUM = re.compile(r"#rocdl<\w+ (.+)>$|#llvm\.\w+<(.+)>$")


def _attribute(text: str) -> object:
    """An attribute's value from its printed form: int, float, bool, str or a list of int."""
    if match := re.fullmatch(r"(-?\d+)( : \w+)?", text):
        return int(match[1])
    if text in ("true", "false"):
        return text == "true"
    if text == "unit":
        return True
    if match := re.fullmatch(r"array<i\d+(?:: (.*))?>", text):
        return [int(v) for v in (match[1] or "").split(",") if v.strip()]
    if match := _ENUM.fullmatch(text):
        return match[1] or match[2]
    return text[1:-1] if text[:1] == '"' else text


def _constant(op, ir, kind: Type) -> object:
    """The numpy value of an ``llvm.mlir.constant``."""
    value = op.attributes["value"]
    text = str(value)
    if isinstance(value, (ir.IntegerAttr, ir.BoolAttr)) or text in ("true", "false"):
        number = (text == "true") if text in ("true", "false") else int(text.split(" : ")[0])
        if kind.scalar.bits > 64:
            raw = (number & ((1 << 128) - 1)).to_bytes(16, "little")
            return np.frombuffer(raw, "V16")
        if kind.dtype == bool:
            return np.array([number & 1], bool)
        bits = kind.scalar.bits
        return np.array(
            [(number + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))], kind.dtype
        )
    if isinstance(value, ir.FloatAttr):
        return _float(float(value.value), kind).reshape(1)
    if isinstance(value, ir.DenseElementsAttr):
        items = re.search(r"<(.*)>\s*:", text, re.S)[1].strip("[]").split(",")
        parsed = [_item(i.strip(), kind) for i in items]
        return np.array(parsed * (kind.count if len(parsed) == 1 else 1), kind.dtype)[None]
    raise NotImplementedError(f"constant {text[:80]}")


def _float(number: float, kind: Type) -> np.ndarray:
    from .lltypes import f32_to_bf16

    return f32_to_bf16(np.float32(number)) if kind.is_bf16 else np.asarray(number, kind.dtype)


def _item(text: str, kind: Type) -> object:
    if kind.scalar.kind == "int":
        number = {"true": 1, "false": 0}.get(text)
        number = int(text, 0) if number is None else number
        bits = kind.scalar.bits
        half = 1 << (bits - 1)
        return bool(number) if bits == 1 else (number + half) % (1 << bits) - half
    if text.startswith("0x"):
        return np.array(int(text, 16), f"u{kind.scalar.bits // 8}").view(kind.dtype)
    return _float(float(text), kind)


class _Reader:
    """Numbers the values of one function."""

    def __init__(self, ir) -> None:
        self.ir, self.slots = ir, {}

    def slot(self, value) -> int:
        return self.slots.setdefault(self.ir.Value.__hash__(value), len(self.slots))

    def inst(self, op, blocks: dict[int, int]) -> Inst:
        attrs = {name: _attribute(str(op.attributes[name])) for name in op.attributes}
        name = op.name
        if name == "llvm.call_intrinsic":
            name = attrs["intrin"]
        operands = list(op.operands)
        slots = tuple(self.slot(v) for v in operands)
        kinds = tuple(parse_type(str(v.type)) for v in operands)
        results = list(op.results)
        result_types = tuple(parse_type(str(v.type)) for v in results)
        if name == "llvm.mlir.constant":
            attrs["value"] = _constant(op, self.ir, result_types[0])
        successors = []
        if len(op.successors):
            counts = attrs.get("operandSegmentSizes")
            counts = counts[1:] if counts else [len(slots)]
            at = len(slots) - sum(counts)
            if name == "llvm.switch":
                attrs["case_values"] = _cases(op)
                widths = attrs["case_operand_segments"]
                counts = [counts[0], *widths]
            for block, count in zip(op.successors, counts, strict=True):
                successors.append((blocks[hash(block)], slots[at : at + count]))
                at += count
            kinds = kinds[: len(slots) - sum(counts)]
            slots = slots[: len(slots) - sum(counts)]
        result_slots = tuple(self.slot(v) for v in results)
        where = str(op.location)
        return Inst(name, slots, kinds, result_slots, result_types, attrs, where, tuple(successors))


def _cases(op) -> list[int]:
    if "case_values" not in op.attributes:
        return []
    text = re.search(r"<(.*)>\s*:", str(op.attributes["case_values"]), re.S)[1]
    return [int(v) for v in text.strip("[]").split(",")]


def _reachable(edges: list[list[int]]) -> list[int]:
    """For every block, the bit set of blocks it can reach."""
    reach = [sum(1 << s for s in out) for out in edges]
    changed = True
    while changed:
        changed = False
        for b, out in enumerate(edges):
            wider = reach[b]
            for s in out:
                wider |= reach[s]
            if wider != reach[b]:
                reach[b], changed = wider, True
    return reach


def block_order(edges: list[list[int]]) -> list[int]:
    """Reverse post-order from block 0 in which loop bodies come before loop exits."""
    reach, seen, post = _reachable(edges), {0}, []

    def visits(b: int):
        last_first = list(reversed(edges[b]))
        return iter(sorted(last_first, key=lambda s: bool(reach[s] >> b & 1)))

    stack = [(0, visits(0))]
    while stack:
        block, successors = stack[-1]
        for s in successors:
            if s not in seen:
                seen.add(s)
                stack.append((s, visits(s)))
                break
        else:
            post.append(block)
            stack.pop()
    return post[::-1]


def _function(op, ir) -> Function:
    from dataclasses import replace

    reader = _Reader(ir)
    raw = list(op.regions[0].blocks)
    numbers = {hash(block): n for n, block in enumerate(raw)}
    edges = []
    for block in raw:
        ops = list(block.operations)
        edges.append([numbers[hash(s)] for s in ops[-1].operation.successors])
    order = block_order(edges)
    position = {old: new for new, old in enumerate(order)}
    blocks, arg_types = [], ()
    for old in order:
        params = list(raw[old].arguments)
        if old == 0:
            arg_types = tuple(parse_type(str(p.type)) for p in params)
        slots = tuple(reader.slot(p) for p in params)
        insts = [reader.inst(o.operation, numbers) for o in raw[old].operations]
        last = insts[-1]
        moved = tuple((position[s], args) for s, args in last.successors)
        insts[-1] = replace(last, successors=moved)
        blocks.append(Block(slots, insts))
    attrs = {name: _attribute(str(op.attributes[name])) for name in op.attributes}
    return Function(str(attrs["sym_name"]), blocks, arg_types, len(reader.slots), attrs)


def read_program(module, ir, arch: str, entry: str) -> Program:
    """Read a module lowered to the LLVM and ROCDL dialects; its context must be entered."""
    host, kernels, shared, at = None, {}, {}, 0
    for top in module.body.operations:
        name = top.operation.name
        if name == "llvm.func" and _attribute(str(top.attributes["sym_name"])) == entry:
            host = _function(top.operation, ir)
        if name != "gpu.module":
            continue
        dynamic = []
        for op in top.regions[0].blocks[0].operations:
            if op.operation.name == "llvm.func" and len(op.regions[0].blocks):
                function = _function(op.operation, ir)
                kernels[function.name] = function
            elif op.operation.name == "llvm.mlir.global":
                symbol = str(_attribute(str(op.attributes["sym_name"])))
                kind = parse_type(str(op.attributes["global_type"]))
                align = 16
                if "alignment" in op.attributes:
                    align = int(_attribute(str(op.attributes["alignment"])))
                if kind.size == 0:
                    dynamic.append((symbol, align))
                    continue
                at = -(-at // align) * align
                shared[symbol] = SharedGlobal(at, kind.size)
                at += kind.size
        for symbol, align in dynamic:
            shared[symbol] = SharedGlobal(-(-at // align) * align, 0)
    if host is None:
        raise ValueError(f"the lowered module has no host function {entry!r}")
    return Program(arch, host, kernels, shared, at)
