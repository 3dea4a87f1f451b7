"""Decoding: every operation becomes a closure ``run(v, s)`` once per kernel.

``v`` is the list of SSA values, ``s`` the :class:`~.machine.Batch`. A function is cut into segments
where lanes may part: at block ends, barriers and sleeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .lltypes import Type
from .program import Function, Inst, Program

Run = Callable[[list, object], None]
Handler = Callable[["Decoder", Inst], "Run | None"]
_HANDLERS: dict[str, Handler] = {}
_PREFIXES: list[tuple[str, Handler]] = []
_BREAKS: dict[str, Callable] = {}


class EmulationError(RuntimeError):
    """A kernel did something wrong or something the emulator does not know."""


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a decoder of operations; a name that ends in ``*`` matches any suffix."""

    def register(handler: Handler) -> Handler:
        for name in names:
            if name.endswith("*"):
                _PREFIXES.append((name[:-1], handler))
            else:
                _HANDLERS[name] = handler
        return handler

    return register


def breaks(*names: str) -> Callable:
    """Register an operation that may suspend waves: ``handler(decoder, inst)`` is (kind, id)."""

    def register(handler: Callable) -> Callable:
        for name in names:
            _BREAKS[name] = handler
        return handler

    return register


def _find(name: str) -> Handler | None:
    if name in _HANDLERS:
        return _HANDLERS[name]
    matches = [(p, h) for p, h in _PREFIXES if name.startswith(p)]
    return max(matches, key=lambda m: len(m[0]))[1] if matches else None


@dataclass
class Segment:
    """Operations without a break. ``end``: (kind, ...) as the scheduler reads it."""

    index: int
    ops: list[Run] = field(default_factory=list)
    insts: list[Inst] = field(default_factory=list)
    end: tuple = ()
    end_inst: Inst | None = None
    live_out: list[int] = field(default_factory=list)
    histogram: Counter = field(default_factory=Counter)
    executed: int = 0


@dataclass
class Code:
    """A decoded function: segment 0 is the entry, ``template`` the registers' initial content."""

    function: Function
    segments: list[Segment]
    template: list


class Decoder:
    """What handlers may ask while decoding."""

    def __init__(self, program: Program, function: Function) -> None:
        self.program, self.function = program, function
        self.arch = program.arch
        self.width = 32 if program.arch.startswith("gfx12") else 64
        self.template: list = [None] * function.slots
        self.private_bytes = 0

    def number(self, slot: int, inst: Inst) -> int:
        """The value of an operand that must be a constant."""
        value = self.template[slot]
        if value is None:
            raise EmulationError(
                f"{inst.name}: an immediate operand is not a constant\n  at {inst.where}"
            )
        return int(value[0])

    def constant(self, slot: int) -> int | None:
        value = self.template[slot]
        return None if value is None or isinstance(value, tuple) else int(value.reshape(-1)[0])

    def decode(self) -> Code:
        function = self.function
        entries: list[int] = []
        segments: list[Segment] = []
        for block in function.blocks:
            entries.append(len(segments))
            segment = Segment(len(segments))
            segments.append(segment)
            for inst in block.insts:
                if inst.name in _BREAKS:
                    segment.end = (*_BREAKS[inst.name](self, inst), len(segments))
                    segment.end_inst = inst
                    segment.histogram[inst.name] += 1
                    segment = Segment(len(segments))
                    segments.append(segment)
                elif inst is block.insts[-1]:
                    segment.end_inst = inst
                else:
                    self._decode_one(segment, inst)
        for segment in segments:
            if not segment.end:
                segment.end = self._terminator(segment.end_inst, entries)
        self._live_out(segments)
        return Code(function, segments, self.template)

    def _decode_one(self, segment: Segment, inst: Inst) -> None:
        if inst.name == "llvm.mlir.constant":
            self.template[inst.results[0]] = inst.attrs["value"]
            return
        handler = _find(inst.name)
        if handler is None:
            raise EmulationError(
                f"the emulator does not know operation {inst.name}, used in {self.function.name}"
                f"\n  at {inst.where}\n  {inst}"
            )
        try:
            run = handler(self, inst)
        except NotImplementedError as error:
            raise EmulationError(
                f"{inst.name} in {self.function.name}: {error}\n  at {inst.where}"
            ) from error
        if run is not None:
            segment.ops.append(run)
            segment.insts.append(inst)
            segment.histogram[inst.name] += 1

    def _terminator(self, inst: Inst, entries: list[int]) -> tuple:
        blocks = self.function.blocks

        def edge(number: int) -> tuple:
            block, args = inst.successors[number]
            moves = tuple(zip(args, blocks[block].params, strict=True))
            return entries[block], moves

        if inst.name == "llvm.br":
            return ("br", edge(0))
        if inst.name == "llvm.cond_br":
            return ("cond", inst.args[0], edge(0), edge(1))
        if inst.name == "llvm.switch":
            edges = [edge(n) for n in range(len(inst.successors))]
            return ("switch", inst.args[0], inst.attrs["case_values"], edges)
        if inst.name == "llvm.return":
            return ("return", inst.args)
        if inst.name == "llvm.unreachable":
            return ("unreachable",)
        raise EmulationError(f"the emulator does not know {inst.name}\n  at {inst.where}")

    def _live_out(self, segments: list[Segment]) -> None:
        """Which values of a segment another segment reads."""
        born: dict[int, int] = {}
        for segment in segments:
            for inst in segment.insts:
                for slot in inst.results:
                    born[slot] = segment.index
        crossing: set[int] = set()
        for segment in segments:
            reads = [slot for inst in segment.insts for slot in inst.args]
            if segment.end_inst is not None:
                reads += segment.end_inst.args
                reads += [slot for _, args in segment.end_inst.successors for slot in args]
            crossing.update(s for s in reads if born.get(s, segment.index) != segment.index)
        for slot in crossing:
            segments[born[slot]].live_out.append(slot)


def decode(program: Program, function: Function) -> Code:
    """Decode ``function`` with every operation module loaded."""
    from . import operations  # noqa: F401  registers the handlers

    return Decoder(program, function).decode()


def pick(mask: np.ndarray, new: object, old: object) -> object:
    """``new`` in the lanes of ``mask``, ``old`` elsewhere; tuples field by field."""
    if old is None or new is old:
        return new
    if isinstance(new, tuple):
        return tuple(pick(mask, n, o) for n, o in zip(new, old, strict=True))
    return np.where(mask if new.ndim == 1 else mask[:, None], new, old)


def poison_value(kind: Type) -> object:
    """All bits set: NaN as a float, -1 as an integer."""
    if kind.kind in ("struct", "array"):
        inner = kind.fields if kind.kind == "struct" else kind.fields * kind.count
        return tuple(poison_value(f) for f in inner)
    shape = (1, kind.count) if kind.kind == "vector" else (1,)
    raw = np.full((*shape, kind.dtype.itemsize), 0xFF, np.uint8)
    if kind.dtype == bool:
        return np.ones(shape, bool)
    return raw.view(kind.dtype).reshape(shape)


def zero_value(kind: Type) -> object:
    if kind.kind in ("struct", "array"):
        inner = kind.fields if kind.kind == "struct" else kind.fields * kind.count
        return tuple(zero_value(f) for f in inner)
    return np.zeros((1, kind.count) if kind.kind == "vector" else (1,), kind.dtype)
