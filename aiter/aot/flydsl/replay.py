"""Replay the runtime for every row, caller and token count that can matter; write down launches.

Runs in one process per architecture, which is told its target by the environment. A row's default
caller must be served somewhere: refused at some token counts it is [REFUSED], refused at all of
them [FAIL]. Other callers may be refused, [SKIP]. NotImplementedError is the runtime's one way to
refuse; any other exception fails the row.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from aiter import env
from aiter.fused_moe import _fused_moe_impl
from aiter.jit.utils.chip_info import Target, get_target
from aiter.ops.flydsl.kernels.tensor_shim import Launch, artifact_of, rebuild
from aiter.ops.flydsl.moe.request import CallerVariant, caller_variants
from aiter.ops.flydsl.moe.selection import mixed_row_launches
from aiter.ops.flydsl.moe.tiers import MAX_TOKENS, served_range

from .common import LaunchRequest, replay_env
from .dry_run import Recorder, dry_run
from .manifest import common_parts
from .ranges import Survey, survey
from .recipe import Call, CallerTensors
from .rows import ArchRows, ScopedRow

OK, SKIP, REFUSED, BISECT, FAIL = "OK", "SKIP", "REFUSED", "BISECT", "FAIL"
STATUSES = (OK, SKIP, REFUSED, BISECT, FAIL)


@dataclass(frozen=True)
class ReplayTask:
    """Rows to replay. max_tokens: highest M; exhaustive: every M of every range; with_key_parts:
    also trace one launch, for the parts of the key that all have in common."""

    arch: ArchRows
    tables: tuple[Path, ...]
    max_tokens: int = MAX_TOKENS
    exhaustive: bool = False
    with_key_parts: bool = False


@dataclass(frozen=True)
class Event:
    """Something to log. row: file:line; caller: a variant's label, "; " between several, or ""."""

    status: str
    row: str
    caller: str
    text: str

    def __str__(self) -> str:
        caller = f" ({self.caller})" if self.caller else ""
        return f"[{self.status}] {self.row}{caller}: {self.text}"


@dataclass
class ArchReplay:
    """What one architecture's rows ask for.

    jobs: replays by status. common_parts: of FlyDSL's key, "" when not asked for. cpu_s: of the
    replays alone. notes: what the runtime logged, such as rows it passes over.
    """

    gfx: str
    rows: int = 0
    requests: list[LaunchRequest] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    jobs: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATUSES, 0))
    notes: list[str] = field(default_factory=list)
    common_parts: dict[str, str] = field(default_factory=dict)
    cpu_s: float = 0.0

    @property
    def job_count(self) -> int:
        """Replays made."""
        return sum(self.jobs.values())

    @property
    def failed(self) -> bool:
        """Whether any row failed."""
        return any(event.status == FAIL for event in self.events)


@dataclass(frozen=True)
class _Answer:
    """What the runtime said to one call. Two are equal that ask for the same launches.

    status: OK, REFUSED or FAIL. launches: in the order made; of a mixed row those made here,
    even if its own FlyDSL stage is refused. reason: of a refusal or an error; it may name M, so
    it is not compared.
    """

    status: str
    asked: frozenset[Launch] = frozenset()
    launches: tuple[Launch, ...] = field(default=(), compare=False)
    reason: str = field(default="", compare=False)


def replay_arch(task: ReplayTask) -> ArchReplay:
    """Replay `task` in this process, which becomes one of that architecture for good."""
    gfx = task.arch.gfx
    os.environ.update(replay_env(gfx))
    os.environ[env.AITER_CONFIG_FMOE.name] = ":".join(map(str, task.tables))
    target = get_target()
    if target.gfx != gfx:
        raise RuntimeError(f"this process replays {gfx}, but its target is {target.gfx}")
    replayer = _Replayer(task)
    with _messages() as notes:
        began = time.process_time()
        replayer.run()
        replayer.result.cpu_s = time.process_time() - began
    result = replayer.result
    result.notes = _few(notes)
    result.requests = replayer.requests()
    if task.with_key_parts and result.requests:
        launcher = rebuild(result.requests[0].launch.build)
        result.common_parts = common_parts(artifact_of(launcher).parts)
    return result


def _few(notes: list[str]) -> list[str]:
    """Of notes that differ in a large number only, such as a size that follows M, the first."""
    kept: dict[str, str] = {}
    for note in notes:
        kept.setdefault(re.sub(r"\d{7,}", "", note), note)
    return list(kept.values())


@contextmanager
def _messages() -> Iterator[list[str]]:
    """What the runtime logs meanwhile, each message once."""
    found: dict[str, None] = {}

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found[record.getMessage()] = None

    logger, handler, kept = logging.getLogger("aiter"), Keep(), []
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield kept
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        kept.extend(found)


class _Replayer:
    def __init__(self, task: ReplayTask) -> None:
        self._task = task
        self.result = ArchReplay(task.arch.gfx)
        self._rows_of: dict[Launch, dict[str, None]] = {}

    def requests(self) -> list[LaunchRequest]:
        """Every distinct launch, in the order first asked for, with the rows that asked."""
        gfx = self._task.arch.gfx
        return [LaunchRequest(gfx, launch, tuple(rows)) for launch, rows in self._rows_of.items()]

    def run(self) -> None:
        by_target: dict[Target, list[ScopedRow]] = {}
        for scoped in self._task.arch.rows:
            key = scoped.row.key
            by_target.setdefault(Target(key.gfx, key.cu_num), []).append(scoped)
        for target, rows in by_target.items():
            with dry_run(target) as recorder:
                calls = CallerTensors()
                for scoped in rows:
                    self.result.rows += 1
                    _RowReplay(self, scoped, target, recorder, calls).run(self._task)

    def count(self, status: str, jobs: int) -> None:
        self.result.jobs[status] += jobs

    def say(self, status: str, scoped: ScopedRow, caller: str, text: str) -> None:
        self.result.events.append(Event(status, str(scoped.row.source), caller, text))

    def ask_for(self, launch: Launch, row: str) -> None:
        self._rows_of.setdefault(launch, {})[row] = None


class _RowReplay:
    """All callers of one row."""

    def __init__(
        self,
        replayer: _Replayer,
        scoped: ScopedRow,
        target: Target,
        recorder: Recorder,
        calls: CallerTensors,
    ) -> None:
        self._replayer = replayer
        self._scoped = scoped
        self._target = target
        self._recorder = recorder
        self._calls = calls
        self._passed: list[str] = []
        self._launches: set[Launch] = set()

    def run(self, task: ReplayTask) -> None:
        row = self._scoped.row
        served = served_range(row.key.token, task.max_tokens, self._scoped.highest)
        if served is None:
            reach = f"no token count up to {task.max_tokens} reaches"
            self._say(SKIP, "", f"{reach} a row of token {row.key.token}")
            return
        for number, variant in enumerate(caller_variants(row)):
            self._run_caller(variant, number == 0, served, task.exhaustive)
        problem = self._unmatched(served[0]) if self._passed else ""
        if problem:
            self._say(FAIL, "", problem)
        elif self._passed:
            tokens = f"M={served[0]}" if served[0] == served[1] else f"M={served[0]}..{served[1]}"
            callers = "; ".join(self._passed)
            self._say(OK, callers, f"{tokens}, {len(self._launches)} launches")

    def _say(self, status: str, caller: str, text: str) -> None:
        self._replayer.say(status, self._scoped, caller, text)

    def _unmatched(self, tokens: int) -> str:
        """How the key the runtime looks up differs from the row's; "" if it does not."""
        row = self._scoped.row
        call = self._calls.call(row, caller_variants(row)[0], tokens)
        found = call.request(self._target).tuned_key()
        names = [n for n in vars(found) if getattr(found, n) != getattr(row.key, n)]
        pairs = (f"{n} {getattr(found, n)}, not {getattr(row.key, n)}" for n in names)
        return (
            f"no call matches this row: the runtime looks for {'; '.join(pairs)}" if names else ""
        )

    def _run_caller(
        self, variant: CallerVariant, default: bool, served: tuple[int, int], exhaustive: bool
    ) -> None:
        answers: dict[int, _Answer] = {}

        def ask(tokens: int) -> _Answer:
            answer = answers[tokens] = self._ask(variant, tokens)
            return answer

        found = survey(*served, ask)
        if exhaustive:
            self._exhaust(variant, served, found, answers)
        row = str(self._scoped.row.source)
        for launch in dict.fromkeys(x for answer in answers.values() for x in answer.launches):
            self._replayer.ask_for(launch, row)
            self._launches.add(launch)
        self._judge(variant, default, found, answers)

    def _exhaust(
        self,
        variant: CallerVariant,
        served: tuple[int, int],
        found: Survey[_Answer],
        answers: dict[int, _Answer],
    ) -> None:
        """Ask at every token count that the survey left out, and compare with what it said."""
        for regime in found.regimes:
            other = []
            for tokens in range(regime.low, regime.high + 1):
                if tokens not in answers:
                    answers[tokens] = self._ask(variant, tokens)
                    if answers[tokens] != regime.answer:
                        other.append(tokens)
            if other:
                text = f"{len(other)} token counts in {regime}, the first {other[0]}, ask for "
                self._say(FAIL, variant.label, text + "launches that bisecting did not find")

    def _judge(
        self,
        variant: CallerVariant,
        default: bool,
        found: Survey[_Answer],
        answers: dict[int, _Answer],
    ) -> None:
        label, probes = variant.label, set(found.probes)
        held = {answer.status for answer in answers.values()}
        of_default = REFUSED if OK in held else FAIL
        refusal = of_default if default else SKIP
        for tokens, answer in answers.items():
            if answer.status == REFUSED:
                self._replayer.count(refusal, 1)
            elif answer.status == OK and tokens in probes:
                self._replayer.count(BISECT, 1)
            else:
                self._replayer.count(answer.status, 1)
        for regime in found.regimes:
            if regime.answer.status == FAIL:
                self._say(FAIL, label, f"{regime}: {regime.answer.reason}")
            elif regime.answer.status == REFUSED:
                self._say(refusal, label, f"{regime}: {regime.answer.reason}")
        if found.probes:
            parts = "; ".join(f"{r} {len(r.answer.asked)} launches" for r in found.regimes)
            self._say(BISECT, label, f"{len(found.probes)} probes: {parts}")
        if OK in held and FAIL not in held:
            self._passed.append(label)

    def _ask(self, variant: CallerVariant, tokens: int) -> _Answer:
        self._recorder.take()  # what a call that failed midway left
        try:
            call = self._calls.call(self._scoped.row, variant, tokens)
            _fused_moe_impl(**call.arguments)
            launches = self._recorder.take()
            if not launches:
                return _Answer(FAIL, reason="the runtime made no launch")
        except NotImplementedError as refusal:
            return _Answer(REFUSED, reason=str(refusal))
        except Exception as error:
            return _Answer(FAIL, reason=_described(error))
        answer = _Answer(OK, frozenset(launches), launches)
        return self._with_own_stage(call, answer) if self._scoped.mixed else answer

    def _with_own_stage(self, call: Call, served: _Answer) -> _Answer:
        """`served` and the FlyDSL stage of a row whose other stage is another backend's."""
        try:
            stage = mixed_row_launches(call.request(self._target), self._scoped.row)
        except NotImplementedError as refusal:
            return replace(served, status=REFUSED, reason=f"the row's FlyDSL stage: {refusal}")
        except Exception as error:
            return replace(served, status=FAIL, reason=_described(error))
        launches = served.launches + stage
        return replace(served, asked=frozenset(launches), launches=launches)


def _described(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
