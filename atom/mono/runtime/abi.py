"""The names of a launcher's parameters, said once, and arguments in their order.

A kernel takes addresses, counts and bit patterns, up to a hundred of them; a wrong order is not an
error but garbage. So the names are declared once (`KernelAbi`), the kernel and its launcher are
checked against them when they are built, and arguments are packed by name.

Packing by name costs a dictionary, which a step cannot afford 64 times. `StepPack` does it once:
some names are bound when a runner is made, the rest come fresh with every step, and a launch
brings both into order in one C call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

STREAM = "stream"


@dataclass(frozen=True)
class KernelAbi:
    """The parameters of a kernel in order; its launcher has `stream` behind them."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice or STREAM in self.names:
            raise ValueError(f"not the parameters of a kernel: {', '.join(twice) or STREAM}")

    def check(self, kernel: Any, launcher: Any) -> None:
        """Raise TypeError unless `kernel` and `launcher` have exactly these parameters, in order.

        They are FlyDSL's own objects, the kernel as `@flyc.kernel` and the launcher as `@flyc.jit`
        made them.
        """
        _same("kernel", kernel, self.names)
        self.check_launcher(launcher)

    def check_launcher(self, launcher: Any) -> None:
        """The same for the launcher alone."""
        _same("launcher", launcher, (*self.names, STREAM))

    def pack(self, values: Mapping[str, Any]) -> list[Any]:
        """`values` in order. Raises TypeError unless exactly the declared names are given."""
        missing = [name for name in self.names if name not in values]
        unexpected = [name for name in values if name not in self.names]
        if missing or unexpected:
            raise TypeError(
                f"ABI mismatch: missing [{', '.join(missing)}], "
                f"unexpected [{', '.join(unexpected)}]"
            )
        return [values[name] for name in self.names]

    def zeros(self) -> list[int]:
        """Arguments that name no memory, for compiling."""
        return [0] * len(self.names)


class StepPack:
    """Arguments of which some are bound once and the others come with every step.

        pack = StepPack(abi, step=("hidden", "positions"))
        bound = pack.bind({"weight": ..., "eps": ...})
        _run_compiled(launcher, *pack.order((*bound, hidden, positions)), stream)

    `step` names the fresh ones, in the order in which a step gives them; names among them that
    this ABI does not have are passed over, so that all launchers of a step share one tuple.
    `order` brings what `bind` returned, followed by a step's values, into the launcher's order.
    """

    def __init__(self, abi: KernelAbi, step: Sequence[str]) -> None:
        self.abi = abi
        self.bound = tuple(name for name in abi.names if name not in step)
        given = (*self.bound, *step)
        places = [given.index(name) for name in abi.names]
        # Of a single place itemgetter makes a bare value.
        self.order: Callable[[tuple[Any, ...]], tuple[Any, ...]] = (
            itemgetter(*places) if len(places) > 1 else lambda values: (values[places[0]],)
        )

    def bind(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """The bound arguments. Raises TypeError unless exactly those names are given."""
        return tuple(KernelAbi(self.bound).pack(values))


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
