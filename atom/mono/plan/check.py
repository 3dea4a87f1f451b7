"""The contract between the stages of a kernel, checked on what `trace` recorded.

All workgroups run the stages in one order and wait by polling, so an order in which some poll
cannot be satisfied is a hang, and two writers or too narrow a scope are wrong numbers now and
then. None of it shows in a compile. `check` finds them from the recorded order alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .trace import HandOff, Kind, Record, Space


@dataclass(frozen=True)
class RegionDecl:
    """A region that stages hand over through.

    `writer` is the one stage that pushes into it. An `exchange` is written into every rank's
    memory and polled by its own writer, which waits there for the other ranks' parts.
    """

    name: str
    space: Space
    writer: str
    exchange: bool = False


class ContractError(Exception):
    """The stages of a kernel break their contract; `violations` has one line each."""

    def __init__(self, violations: Iterable[str]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(self.violations))


def check(record: Record, decls: Iterable[RegionDecl]) -> None:
    """Raise ContractError with every violation by `record` of the contract `decls` state."""
    declared: dict[str, RegionDecl] = {}
    violations = []
    for decl in decls:
        if decl.name in declared:
            violations.append(f"{decl.name} is declared twice")
        declared[decl.name] = decl
    violations += _unknown(record.hand_offs, declared)
    for decl in declared.values():
        violations += _region(decl, record)
    if violations:
        raise ContractError(dict.fromkeys(violations))


def _unknown(hand_offs: list[HandOff], declared: dict[str, RegionDecl]) -> Iterator[str]:
    for event in hand_offs:
        if event.region is None:
            yield f"stage {event.stage}: {event.kind} of an unnamed {event.space} address"
        elif event.region not in declared:
            yield f"stage {event.stage}: {event.kind} of {event.region}, which is not declared"


def _region(decl: RegionDecl, record: Record) -> Iterator[str]:
    events = [event for event in record.hand_offs if event.region == decl.name]
    if not events:
        yield f"{decl.name} is declared, but no stage uses it"
        return
    if decl.writer not in record.stages:
        yield f"{decl.name}: its writer, stage {decl.writer}, never runs"
    elif not any(event.stage == decl.writer and event.kind is Kind.PUSH for event in events):
        yield f"{decl.name}: its writer, stage {decl.writer}, never pushes into it"
    pushed = False
    for event in events:
        if event.space is not decl.space:
            yield (
                f"{decl.name} is {decl.space} memory, but stage {event.stage} makes its "
                f"{event.kind} as for {event.space}"
            )
        if event.kind is Kind.PUSH:
            pushed = True
            if event.stage != decl.writer:
                yield (
                    f"{decl.name} has two writers: stage {event.stage} pushes into it, "
                    f"{decl.writer} is declared"
                )
        else:
            yield from _poll(decl, event, pushed)


def _poll(decl: RegionDecl, event: HandOff, pushed: bool) -> Iterator[str]:
    own = event.stage == decl.writer
    if own and not decl.exchange:
        yield f"{decl.name}: stage {event.stage} polls what it pushes itself; it is no exchange"
    elif own and not pushed:
        yield f"{decl.name}: stage {event.stage} polls the exchange before pushing its own part"
    elif not pushed:
        yield (
            f"{decl.name}: stage {event.stage} waits for stage {decl.writer}, which no workgroup "
            "reaches before: a deadlock"
        )
