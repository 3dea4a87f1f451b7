"""A width is built once, on every rank or on none, and what was decided stays decided."""

from __future__ import annotations

import logging
import re
import threading

import pytest

from atom.mono.runtime import widths
from atom.mono.runtime.consensus import MonoUnsupported
from atom.mono.runtime.widths import WidthBuilds
from op_tests.mono.runtime.kernels import (
    COPY_ABI,
    SPILL_ABI,
    CopyKey,
    build_copy,
    build_hungry,
    build_spilling,
)

pytestmark = pytest.mark.compile


class Counted:
    """Builds a copy kernel a width, and remembers which widths were built."""

    def __init__(self, fails: bool = False) -> None:
        self.built: list[int] = []
        self.fails = fails

    def __call__(self, rows: int):
        self.built.append(rows)
        if self.fails:
            raise KeyError("no such weight")
        return build_copy(CopyKey(factor=rows))


def _widths(build, abi=COPY_ABI) -> WidthBuilds:
    return WidthBuilds(build, lambda launcher: [(launcher, abi)], None, "copies")


def test_a_width_is_built_once_and_kept(gfx950):
    build = Counted()
    builds = _widths(build)
    assert builds.prepare(4)
    assert builds.prepare(4)
    assert builds[4] is build_copy(CopyKey(4))
    assert build.built == [4]
    assert 4 in builds
    assert 8 not in builds


def test_scratch_refuses_the_width_and_says_how_much(gfx950, caplog: pytest.LogCaptureFixture):
    builds = _widths(lambda rows: build_spilling(CopyKey(rows)), SPILL_ABI)
    with caplog.at_level(logging.WARNING):
        assert not builds.prepare(4)
    assert re.search(
        r"copies: width 4 is refused: launch_spilling needs \d+ bytes of scratch a lane",
        caplog.text,
    )
    with pytest.raises(MonoUnsupported, match="width 4 was refused"):
        builds[4]


def test_more_lds_than_there_is_refuses_the_width(gfx950, caplog: pytest.LogCaptureFixture):
    builds = _widths(lambda rows: build_hungry(CopyKey(rows)), SPILL_ABI)
    assert not builds.prepare(4)
    assert (
        "copies: width 4 is refused: launch_hungry needs 164864 bytes of LDS, a compute unit has "
        "163840"
    ) in caplog.text


def test_a_build_that_raises_is_logged_and_never_tried_again(caplog: pytest.LogCaptureFixture):
    build = Counted(fails=True)
    builds = _widths(build)
    assert not builds.prepare(4)
    build.fails = False
    assert not builds.prepare(4)
    assert build.built == [4]
    assert "no such weight" in caplog.text
    assert "copies: width 4 cannot be built" in caplog.text


def test_a_width_that_another_rank_refuses_is_dropped_for_good(
    gfx950, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    builds = _widths(Counted())
    monkeypatch.setattr(widths, "tp_agree", lambda ok, group: False)
    assert not builds.prepare(4)
    monkeypatch.undo()
    assert not builds.prepare(4)
    assert "width 4 is refused by another rank" in caplog.text


def test_a_vote_that_fails_leaves_the_width_refused(gfx950, monkeypatch: pytest.MonkeyPatch):
    def lost(ok: bool, group: object) -> bool:
        raise ConnectionError("a rank is gone")

    builds = _widths(Counted())
    monkeypatch.setattr(widths, "tp_agree", lost)
    with pytest.raises(ConnectionError):
        builds.prepare(4)
    monkeypatch.undo()
    assert not builds.prepare(4)


def test_a_width_nobody_prepared_says_so():
    with pytest.raises(MonoUnsupported, match="width 2 is not prepared"):
        _widths(Counted())[2]


def test_racing_preparations_build_once(gfx950):
    build = Counted()
    builds = _widths(build)
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(builds.prepare(4))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 6
    assert build.built == [4]
