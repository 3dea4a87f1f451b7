"""Recording, on a CPU, of how the stages of a kernel hand over to one another.

Tracing a kernel runs its Python body once, in program order. Device helpers call `enter_stage`
where a stage begins, and `note` wherever they emit a push into a region or a poll of one; both do
nothing unless a `recording` is open in the calling thread. `check` judges what was recorded.

    with recording() as record:
        artifact_of(launcher)          # traces, lowers nothing
    check(record, decls)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum


class Space(StrEnum):
    """Where a region lies, which is also how far its accesses must reach."""

    SCRATCH = "scratch"  # this rank's memory, at device scope
    PEER = "peer"  # memory that ranks write into each other, at system scope


class Kind(StrEnum):
    """What a stage does to a region."""

    PUSH = "push"
    POLL = "poll"


@dataclass(frozen=True)
class HandOff:
    """One push or poll that a stage's code holds; `region` is None when the address had no name."""

    stage: str
    region: str | None
    space: Space
    kind: Kind


@dataclass
class Record:
    """Stages in the order they were entered, and their hand-offs in program order."""

    stages: list[str] = field(default_factory=list)
    hand_offs: list[HandOff] = field(default_factory=list)


_current: ContextVar[Record | None] = ContextVar("mono_record", default=None)


@contextmanager
def recording() -> Iterator[Record]:
    """Record what the calling thread traces until exit. Recordings do not nest."""
    if _current.get() is not None:
        raise RuntimeError("hand-offs are already being recorded")
    record = Record()
    token = _current.set(record)
    try:
        yield record
    finally:
        _current.reset(token)


def enter_stage(name: str) -> None:
    """What is traced from here on belongs to stage `name`."""
    record = _current.get()
    if record is not None:
        record.stages.append(name)


def note(region: str, space: Space | str, kind: Kind | str) -> None:
    """The current stage pushes into, or polls, `region`, at the scope that `space` takes.

    Raises RuntimeError before any stage was entered.
    """
    _note(region, Space(space), Kind(kind))


def note_unnamed(space: Space | str, kind: Kind | str) -> None:
    """The same for an address that belongs to no named region."""
    _note(None, Space(space), Kind(kind))


def _note(region: str | None, space: Space, kind: Kind) -> None:
    record = _current.get()
    if record is None:
        return
    if not record.stages:
        raise RuntimeError(f"a {kind} of {region or 'an unnamed address'} outside of any stage")
    record.hand_offs.append(HandOff(record.stages[-1], region, space, kind))
