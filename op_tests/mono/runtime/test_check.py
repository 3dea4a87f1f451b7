"""Each way of breaking the contract between stages is found, and nothing else is reported."""

from __future__ import annotations

import threading

import pytest

from atom.mono.plan.check import ContractError, RegionDecl, check
from atom.mono.plan.trace import (
    Kind,
    Record,
    Space,
    enter_stage,
    note,
    note_unnamed,
    recording,
)

PUSH, POLL = Kind.PUSH, Kind.POLL
DECLS = (
    RegionDecl("qkv", Space.SCRATCH, writer="project"),
    RegionDecl("sum", Space.PEER, writer="reduce", exchange=True),
)
# A kernel that keeps the contract, as (stage, region, space, kind).
GOOD = (
    ("project", "qkv", "scratch", PUSH),
    ("attend", "qkv", "scratch", POLL),
    ("reduce", "sum", "peer", PUSH),
    ("reduce", "sum", "peer", POLL),
    ("after", "sum", "peer", POLL),
)


def record(events) -> Record:
    with recording() as found:
        last = None
        for stage, region, space, kind in events:
            if stage != last:
                enter_stage(stage)
                last = stage
            note(region, space, kind) if region else note_unnamed(space, kind)
    return found


def violations(events, decls=DECLS) -> tuple[str, ...]:
    try:
        check(record(events), decls)
    except ContractError as error:
        return error.violations
    return ()


def test_a_kernel_that_keeps_the_contract_passes():
    assert violations(GOOD) == ()


@pytest.mark.parametrize(
    ("events", "said"),
    [
        pytest.param(
            (GOOD[1], GOOD[0], *GOOD[2:]),
            "qkv: stage attend waits for stage project, which no workgroup reaches before: "
            "a deadlock",
            id="consumer before producer",
        ),
        pytest.param(
            (*GOOD, ("late", "qkv", "scratch", PUSH)),
            "qkv has two writers: stage late pushes into it, project is declared",
            id="two writers",
        ),
        pytest.param(
            (*GOOD[:2], ("reduce", "sum", "scratch", PUSH), *GOOD[3:]),
            "sum is peer memory, but stage reduce makes its push as for scratch",
            id="wrong scope",
        ),
        pytest.param(
            (GOOD[0], ("project", "qkv", "scratch", POLL), *GOOD[1:]),
            "qkv: stage project polls what it pushes itself; it is no exchange",
            id="polling its own region",
        ),
        pytest.param(
            (*GOOD[:2], GOOD[3], GOOD[2], GOOD[4]),
            "sum: stage reduce polls the exchange before pushing its own part",
            id="polling an exchange first",
        ),
        pytest.param(
            (*GOOD, ("x", "idx", "scratch", PUSH)),
            "stage x: push of idx, which is not declared",
            id="undeclared region",
        ),
        pytest.param(
            GOOD[:2],
            "sum is declared, but no stage uses it",
            id="stale declaration",
        ),
        pytest.param(
            (*GOOD, ("x", None, "scratch", POLL)),
            "stage x: poll of an unnamed scratch address",
            id="unnamed address",
        ),
    ],
)
def test_each_violation_is_reported_once_and_alone(events, said: str):
    assert violations(events) == (said,)


def test_a_writer_that_never_runs_is_reported_with_the_wait_it_leaves():
    assert violations(GOOD[1:]) == (
        "qkv: its writer, stage project, never runs",
        "qkv: stage attend waits for stage project, which no workgroup reaches before: a deadlock",
    )


def test_a_writer_that_runs_without_pushing_is_reported():
    events = (("project", "sum", "peer", POLL), *GOOD[1:2], *GOOD[2:])
    assert "qkv: its writer, stage project, never pushes into it" in violations(events)


def test_a_region_declared_twice_is_reported():
    assert violations(GOOD, (*DECLS, DECLS[0])) == ("qkv is declared twice",)


def test_all_violations_come_in_one_error():
    assert len(violations((GOOD[0], (*GOOD[0][:2], "peer", POLL)))) == 3


def test_nothing_is_recorded_outside_and_of_other_threads():
    enter_stage("before")
    with recording() as found:
        thread = threading.Thread(target=lambda: enter_stage("elsewhere"))
        thread.start()
        thread.join()
        enter_stage("here")
        note("qkv", "scratch", "push")
    note("qkv", "scratch", "poll")
    assert found.stages == ["here"]
    assert [event.kind for event in found.hand_offs] == [PUSH]


def test_a_hand_off_outside_of_any_stage_is_an_error():
    with recording(), pytest.raises(RuntimeError, match="outside of any stage"):
        note("qkv", "scratch", "push")


def test_recordings_do_not_nest_and_end_on_an_exception():
    with recording(), pytest.raises(RuntimeError), recording():
        pass
    with pytest.raises(ZeroDivisionError), recording():
        raise ZeroDivisionError
    with recording() as found:
        enter_stage("a")
    assert found.stages == ["a"]
