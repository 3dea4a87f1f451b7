"""Mailbox words: how stages and ranks hand over.

A word is 8 bytes, the value in the low 32 bits and a tag in the high ones, written and read by
one access, so a reader that sees the tag it waits for has the value too and no fence is needed.
Words in scratch are accessed at device scope, words in peers' memory at system scope.

A debug build gives up after so many tries, or as soon as another wait has: it leaves a record and
goes on with whatever the word holds, so that the kernel ends. Records are i32:

    diag[0]                  waits given up (a wave may count several)
    diag[4 + 4 i ... ]       record i: wait id, first word of the run, tag wanted, tag found there

The wait id is a region's number in `WAITS`, plus `PEER_ID` and the absent rank for what a peer
sends: id = number + PEER_ID * (rank + 1).
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

import flydsl.expr as fx
from flydsl.expr.typing import T

from aiter.ops.flydsl.kernels.device import TraceObject, global_pointer, traced, uniform
from atom.mono.plan.trace import Kind, Space, note

WORD = 8  # bytes
DIAG_RECORDS = 63
DIAG_BYTES = 16 * (DIAG_RECORDS + 1)
PEER_ID = 256

# Names of wait ids, by number.
WAITS = (
    "normed1",
    "qkv",
    "normed2",
    "activated",
    "q",
    "index_q",
    "inserted",
    "block_scores",
    "selected",
    "attended",
    "logits",
    "route_ids",
    "route_weights",
    "attn_sums",
    "ffn_sums",
    "attn_parts",
    "test",
)

_RELAXED = fx.AtomicOrdering.Monotonic
_SCOPES = {Space.SCRATCH: fx.rocdl.SyncScope.Agent, Space.PEER: None}


@dataclass(frozen=True)
class WaitRecord:
    """A wait that a debug build gave up: `rank` is the absent rank, None within a rank."""

    region: str
    rank: int | None
    word: int
    wanted: int
    found: int

    def __str__(self) -> str:
        whom = "" if self.rank is None else f" from rank {self.rank}"
        return f"{self.region}[{self.word}]{whom}: tag {self.wanted} wanted, {self.found} found"


def wait_records(diag: list[int]) -> list[WaitRecord]:
    """What the i32 words of a diag buffer say."""
    records = []
    for i in range(min(diag[0], DIAG_RECORDS)):
        wait, word, wanted, found = diag[4 + 4 * i : 8 + 4 * i]
        rank = wait // PEER_ID - 1 if wait >= PEER_ID else None
        records.append(WaitRecord(WAITS[wait % PEER_ID], rank, word, wanted, found))
    return records


class Waits(TraceObject):
    """How long a kernel waits: without end, or in debug builds for `polls` tries."""

    def __init__(self, diag: fx.Int64, debug: bool, polls: int) -> None:
        self.diag, self.debug, self.polls = diag, debug, polls

    def given_up(self) -> fx.Int32:
        """How many waits have been given up so far, by anyone."""
        return fx.generic_load(
            global_pointer(fx.Int32, self.diag),
            memory_order=_RELAXED,
            syncscope=fx.rocdl.SyncScope.Agent,
        )

    @traced
    def record(self, wait: fx.Int32, word: fx.Int32, wanted: fx.Int32, found: fx.Int32) -> None:
        """Note a wait that was given up."""
        number = fx.atomic_add(
            global_pointer(fx.Int32, self.diag),
            fx.Int32(1),
            syncscope=fx.rocdl.SyncScope.Agent,
        )
        if number < DIAG_RECORDS:
            at = global_pointer(fx.Int32, self.diag + fx.Int64(number) * 16 + 16)
            at[0] = wait
            at[1] = word
            at[2] = wanted
            at[3] = found


def release(space: Space = Space.SCRATCH) -> None:
    """Make what this wave stored visible before any word it pushes from here on."""
    fx.memory_fence(syncscope=_SCOPES[space], ordering=fx.AtomicOrdering.Release)


def acquire(space: Space = Space.SCRATCH) -> None:
    """After a poll: see what was stored before the `release` of the word that was polled."""
    fx.memory_fence(syncscope=_SCOPES[space], ordering=fx.AtomicOrdering.Acquire)


def beyond(base: fx.Int64, offset: fx.Int32) -> fx.Int64:
    """The address `offset` >= 0 bytes from `base`, so written that a uniform base stays scalar."""
    return base + fx.Int64(fx.Uint64(fx.Uint32(offset)))


class Words(TraceObject):
    """The mailbox words of a region from `address` on, tagged `tag`.

    `rank` is set for the part of a peer region that this rank polls and that rank writes.
    """

    def __init__(
        self,
        region: str,
        space: Space,
        address: fx.Int64,
        tag: fx.Int32,
        waits: Waits,
        rank: int | None = None,
    ) -> None:
        self.region, self.space = region, space
        self.address, self.tag, self.waits = address, tag, waits
        self.wait_id = WAITS.index(region) + (0 if rank is None else PEER_ID * (rank + 1))

    def push(self, index: fx.Int32, value: fx.Int32) -> None:
        """Write the word at `index`."""
        note(self.region, self.space, Kind.PUSH)
        low = fx.Int64(fx.Uint64(fx.Uint32(value)))
        word = low | (fx.Int64(self.tag) << 32)
        fx.generic_store(
            global_pointer(fx.Int64, beyond(self.address, index * WORD)),
            word,
            memory_order=_RELAXED,
            syncscope=_SCOPES[self.space],
        )

    def push_float(self, index: fx.Int32, value: fx.Float32) -> None:
        """Write an f32."""
        self.push(index, value.bitcast(fx.Int32))

    def push_pair(self, index: fx.Int32, low: fx.Float32, high: fx.Float32) -> None:
        """Write two f32, rounded to bf16, as one word."""
        self.push(index, float_pair(low, high))

    def poll(self, index: fx.Int32) -> fx.Int32:
        """Wait for the word at `index` and return its value."""
        return poll_runs([Run(self, index)], 1)[0][0]


@dataclass(frozen=True)
class Run:
    """Words to wait for, from `index` on. Lanes that are not `wanted` get zeros without waiting;
    their index must still be one of the region's."""

    words: Words
    index: fx.Int32
    wanted: fx.Boolean | None = None


def poll_runs(runs: list[Run], count: int) -> list[list[fx.Int32]]:
    """Wait for `count` words of each of `runs` at once; their values.

    One wait for many words costs one trip to memory where many waits cost one each.
    """
    for run in runs:
        note(run.words.region, run.words.space, Kind.POLL)
    ats = [global_pointer(fx.Int64, beyond(r.words.address, r.index * WORD)) for r in runs]
    held = _await(runs, ats, count).words
    values = []
    for i, run in enumerate(runs):
        own = [fx.Int32(word) for word in held[i * count : (i + 1) * count]]
        if run.wanted is not None:
            own = [run.wanted.select(value, fx.Int32(0)) for value in own]
        values.append(own)
    return values


class _Held(TraceObject):
    """Words in registers; unlike its base it is the state of the loop that waits for them."""

    def __init__(self, words: list[fx.Int64]) -> None:
        self.words = words

    def __extract_to_ir_values__(self) -> list:
        return [word.ir_value() for word in self.words]

    def __get_ir_types__(self) -> list:
        return [T.i64] * len(self.words)

    @classmethod
    def __construct_from_ir_values__(cls, values: list, exemplar: _Held) -> _Held:
        return cls([fx.Int64(value) for value in values])


def _load(runs: list[Run], ats: list[fx.Pointer], count: int) -> _Held:
    return _Held(
        [
            fx.generic_load(at + i, memory_order=_RELAXED, syncscope=_SCOPES[run.words.space])
            for run, at in zip(runs, ats, strict=True)
            for i in range(count)
        ]
    )


def _tag_of(word: fx.Int64) -> fx.Int32:
    return fx.Int32(fx.Uint64(word) >> fx.Uint64(32))


def _missing(runs: list[Run], held: _Held, count: int) -> list[fx.Int32]:
    """For each run 0 when all its words have the tag."""
    result = []
    for i, run in enumerate(runs):
        missing = None
        for word in held.words[i * count : (i + 1) * count]:
            differs = _tag_of(word) ^ run.words.tag
            missing = differs if missing is None else missing | differs
        if run.wanted is not None:
            missing = run.wanted.select(missing, fx.Int32(0))
        result.append(missing)
    return result


def _any_missing(runs: list[Run], held: _Held, count: int) -> fx.Int32:
    return functools.reduce(operator.or_, _missing(runs, held, count))


@traced
def _await(runs: list[Run], ats: list[fx.Pointer], count: int) -> _Held:
    held = _load(runs, ats, count)
    missing = _any_missing(runs, held, count)
    waits = runs[0].words.waits
    if fx.const_expr(waits.debug):
        tries = fx.Int32(0)
        while (missing != 0) & (tries < waits.polls):
            fx.rocdl.s_sleep(1)
            held = _load(runs, ats, count)
            missing = _any_missing(runs, held, count)
            tries = (waits.given_up() != 0).select(fx.Int32(waits.polls), tries + 1)
        if missing != 0:
            _record(waits, runs, held, count)
    else:
        while missing != 0:
            fx.rocdl.s_sleep(1)
            held = _load(runs, ats, count)
            missing = _any_missing(runs, held, count)
    return held


@traced
def _record(waits: Waits, runs: list[Run], held: _Held, count: int) -> None:
    """Record the first run that misses a word, once a wave."""
    missing = _missing(runs, held, count)
    wait, index, found = fx.Int32(0), fx.Int32(0), fx.Int32(0)
    for i in fx.range_constexpr(len(runs)):
        j = len(runs) - 1 - i
        absent = missing[j] != 0
        wait = absent.select(fx.Int32(runs[j].words.wait_id), wait)
        index = absent.select(runs[j].index, index)
        found = absent.select(_tag_of(held.words[j * count]), found)
    if (uniform(wait) == wait) & (uniform(index) == index):
        waits.record(wait, index, runs[0].words.tag, found)


def float_pair(low: fx.Float32, high: fx.Float32) -> fx.Int32:
    """Two f32, rounded to bf16, as a word."""
    pair = fx.Vector.from_elements([low, high], fx.Float32).to(fx.BFloat16)
    return pair.bitcast(fx.Int32)[0]


def pair_floats(word: fx.Int32) -> tuple[fx.Float32, fx.Float32]:
    """The two bf16 of a word as f32."""
    return (word << 16).bitcast(fx.Float32), (word & -65536).bitcast(fx.Float32)
