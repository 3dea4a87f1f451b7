"""The names of a launcher's parameters, said once, and arguments in their order.

A kernel takes addresses, counts and bit patterns, up to a hundred of them; a wrong order is not an
error but garbage. So the names are declared once (`KernelAbi`), the kernel and its launcher are
checked against them when they are built, and arguments are packed by name.

Packing by name costs a dictionary, which a step cannot afford 64 times. So parameters that a step
brings stand behind those that are bound when a runner is made: those are packed once (`bind`),
and a launch joins two tuples.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STREAM = "stream"


@dataclass(frozen=True)
class KernelAbi:
    """The parameters of a kernel in order; its launcher has `stream` behind `names`.

    `step` are the last of `names`, those that a step brings. `keyword_names` come behind the
    stream in a launcher, which may give them defaults; a launch through `_run_compiled` gives all
    of them, by position: `_run_compiled(launcher, *packed, stream, *keyword_values)`.
    """

    names: tuple[str, ...]
    step: tuple[str, ...] = ()
    keyword_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        every = (*self.names, *self.keyword_names)
        twice = sorted({name for name in every if every.count(name) > 1})
        if twice or STREAM in every:
            raise ValueError(f"not the parameters of a kernel: {', '.join(twice) or STREAM}")
        if self.names[len(self.names) - len(self.step) :] != self.step:
            raise ValueError(f"a step's parameters {self.step} are not the last of {self.names}")

    def check(self, kernel: Any, launcher: Any) -> None:
        """Raise TypeError unless `kernel` and `launcher` have exactly these parameters, in order.

        They are FlyDSL's own objects, the kernel as `@flyc.kernel` and the launcher as `@flyc.jit`
        made them.
        """
        _same("kernel", kernel, (*self.names, *self.keyword_names))
        self.check_launcher(launcher)

    def check_launcher(self, launcher: Any) -> None:
        """The same for the launcher alone."""
        _same("launcher", launcher, (*self.names, STREAM, *self.keyword_names))

    def pack(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """`values` in order. Raises TypeError unless exactly `names` are given."""
        return _packed(self.names, values)

    def bind(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments before those of a step. Raises TypeError unless exactly those are given."""
        return _packed(self.names[: len(self.names) - len(self.step)], values)

    def zeros(self) -> tuple[int, ...]:
        """Arguments that name no memory, one for each of `names`."""
        return (0,) * len(self.names)


def _packed(names: tuple[str, ...], values: Mapping[str, Any]) -> tuple[Any, ...]:
    missing = [name for name in names if name not in values]
    unexpected = [name for name in values if name not in names]
    if missing or unexpected:
        raise TypeError(
            f"ABI mismatch: missing [{', '.join(missing)}], unexpected [{', '.join(unexpected)}]"
        )
    return tuple(values[name] for name in names)


def _same(what: str, made: Any, names: tuple[str, ...]) -> None:
    # What FlyDSL calls the Python function of a launcher and of a kernel.
    function = getattr(made, "func", None) or getattr(made, "_func", None)
    if function is None:
        raise TypeError(f"{made!r} is no {what} of FlyDSL's; keep the object its decorator made")
    found = tuple(inspect.signature(function).parameters)
    if found != names:
        wrong = next(
            (i for i, (a, b) in enumerate(zip(found, names, strict=False)) if a != b),
            min(len(found), len(names)),
        )
        at = lambda seq: seq[wrong] if wrong < len(seq) else "nothing"
        raise TypeError(
            f"{what} {function.__name__} does not have the declared ABI: parameter {wrong} is "
            f"{at(found)}, declared is {at(names)}"
        )
