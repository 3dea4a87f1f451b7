"""The hand-offs of every kernel of a width, checked by tracing; nothing is compiled."""

from __future__ import annotations

from atom.mono.plan.check import ContractError
from atom.mono.plan.trace import Record
from atom.mono.runtime.compile import check_traced

from .config import Config
from .execution import Builders, width_kernels
from .layout import hand_offs


def check_width(config: Config, rows: int, builders: Builders) -> dict[str, Record]:
    """What each kernel of width `rows` hands over, by launcher, once all keep their contract.

    A kernel's regions are those its build declares (`layout.hand_offs`). Raises ContractError with
    the violations of all kernels.
    """
    records: dict[str, Record] = {}
    violations: list[str] = []
    for launcher, abi in width_kernels(config, rows, builders).pairs():
        build = launcher.build_ref.key
        name = launcher.func.__name__ + ("" if getattr(build, "select", True) else " (reusing)")
        try:
            records[name] = check_traced(launcher, abi, hand_offs(build))
        except ContractError as error:
            violations += [f"{name}: {line}" for line in error.violations]
    if violations:
        raise ContractError(violations)
    return records
