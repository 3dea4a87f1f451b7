"""A runner is made when a step first wants it, once, and never while a graph is captured."""

from __future__ import annotations

import threading
import time

import pytest

from atom.mono.runtime import route
from atom.mono.runtime.consensus import MonoUnsupported
from atom.mono.runtime.route import LazyRunner


class FakeRunner:
    def __init__(self) -> None:
        self.prepared: list[int] = []
        self.ran: set[int] = set()

    def prepare(self, rows: int) -> bool:
        self.prepared.append(rows)
        return rows != 3

    def warm(self, rows: int) -> bool:
        return rows in self.ran


class Maker:
    def __init__(self, error: Exception | None = None) -> None:
        self.made: list[FakeRunner] = []
        self.calls, self.error = 0, error

    def __call__(self) -> FakeRunner:
        self.calls += 1
        if self.error is not None:
            raise self.error
        time.sleep(0.01)
        self.made.append(FakeRunner())
        return self.made[-1]


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch):
    """Switches what `capturing` says."""
    state = {"on": False}
    monkeypatch.setattr(route, "capturing", lambda: state["on"])
    return lambda on: state.update(on=on)


def test_the_first_step_makes_the_runner_and_prepares_its_width():
    make = Maker()
    lazy = LazyRunner(make, "mono")
    assert make.calls == 0
    assert lazy.ready(4)
    assert lazy.ready(8)
    assert make.calls == 1
    assert lazy.runner is make.made[0]
    assert lazy.runner.prepared == [4, 8]


def test_a_width_that_is_refused_leaves_the_others():
    lazy = LazyRunner(Maker(), "mono")
    assert not lazy.ready(3)
    assert lazy.ready(4)
    assert lazy.enabled


def test_nothing_is_made_or_prepared_during_a_capture(capture):
    make = Maker()
    lazy = LazyRunner(make, "mono")
    capture(True)
    assert not lazy.ready(4)
    assert (make.calls, lazy.enabled) == (0, True)
    capture(False)
    assert lazy.ready(4)
    capture(True)
    assert not lazy.ready(4), "prepared, but no step has run"
    assert not lazy.ready(8)
    lazy.runner.ran.add(4)
    assert lazy.ready(4)
    assert lazy.runner.prepared == [4]


def test_a_refusal_is_logged_and_final(caplog: pytest.LogCaptureFixture):
    make = Maker(MonoUnsupported("304 compute units, not 256"))
    lazy = LazyRunner(make, "mono")
    assert not lazy.ready(4)
    make.error = None
    assert not lazy.ready(4)
    assert (make.calls, lazy.enabled) == (1, False)
    assert "mono is not used: 304 compute units, not 256" in caplog.text
    with pytest.raises(MonoUnsupported, match="there is no runner"):
        _ = lazy.runner


def test_the_environment_closes_every_route(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ATOM_MONO_ENABLE", "0")
    make = Maker()
    lazy = LazyRunner(make, "mono")
    monkeypatch.delenv("ATOM_MONO_ENABLE")
    assert not lazy.ready(4)
    assert (make.calls, lazy.enabled) == (0, False)
    assert LazyRunner(make, "mono").ready(4)


def test_another_error_is_raised_once_and_disables_the_path():
    make = Maker(KeyError("a defect"))
    lazy = LazyRunner(make, "mono")
    with pytest.raises(KeyError):
        lazy.ready(4)
    assert not lazy.ready(4)
    assert make.calls == 1


def test_racing_steps_make_one_runner():
    make = Maker()
    lazy = LazyRunner(make, "mono")
    threads = [threading.Thread(target=lazy.ready, args=(4,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert make.calls == 1
