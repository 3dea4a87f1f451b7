"""Enumerations of the MoE interface, with parsers for the cells of tuned tables.

Plain Python: importable without torch. Enums cross a custom op's schema as integers.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Self


class _Cell:
    """Mixin: parse a table cell such as ``ActivationType.Silu`` (the class prefix is optional)."""

    @classmethod
    def parse(cls, cell: str) -> Self:
        """Return the member that ``cell`` names; case counts for neither part.

        Raises ValueError naming the cell and the members there are.
        """
        text = cell.strip()
        prefix, dot, name = text.rpartition(".")
        members = {member.name.lower(): member for member in cls}  # type: ignore[attr-defined]
        known_prefix = not dot or prefix.rpartition(".")[2].lower() == cls.__name__.lower()
        if known_prefix and name.lower() in members:
            return members[name.lower()]
        names = ", ".join(member.name for member in cls)  # type: ignore[attr-defined]
        raise ValueError(f"{cell!r} is no {cls.__name__}; expected one of {names}")

    @property
    def cell(self) -> str:
        """The spelling tuned tables use, e.g. ``QuantType.per_1x32``."""
        return f"{type(self).__name__}.{self.name}"  # type: ignore[attr-defined]


class ActivationType(_Cell, IntEnum):
    """Activation between the two expert GEMMs. ``No`` applies none."""

    No = -1
    Silu = 0
    Gelu = 1
    Swiglu = 2
    Situv2 = 3


class QuantType(_Cell, IntEnum):
    """Granularity of the scales: ``per_1x32`` is MX (one e8m0 scale per 32 elements of K)."""

    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5


class GateMode(_Cell, Enum):
    """How the gate and up halves of w1 are laid out along its 2I rows.

    ``SEPARATED``: all gate rows, then all up rows. ``INTERLEAVE``: the two alternate.
    ``MOCK_GATE_ONLY``: the gate half alone is multiplied and stands in for both.
    """

    SEPARATED = "separated"
    INTERLEAVE = "interleave"
    MOCK_GATE_ONLY = "mock_gate_only"
