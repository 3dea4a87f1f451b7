"""pytest plugin: the ``emulate`` fixture, the ``emulated`` marker and ``--emulator-stats``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from .session import Emulator, emulated
from .stats import KernelStats

_STATS = pytest.StashKey[dict[str, KernelStats]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--emulator-stats",
        action="store_true",
        help="print what every emulated kernel did, LDS bank conflicts included",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "emulated: runs compiled kernels on the CPU emulator")
    config.stash[_STATS] = {}


@pytest.fixture
def emulate(request: pytest.FixtureRequest) -> Iterator[Callable[..., Emulator]]:
    """Start emulation until the test ends: ``emu = emulate("gfx950", order="random", seed=3)``.

    Takes the arguments of :func:`op_tests.emulator.emulated`. Call it once a test.
    """
    config = request.config
    wanted = config.getoption("--emulator-stats")
    with ExitStack() as stack:
        started: list[Emulator] = []

        def start(target: object, **options: object) -> Emulator:
            if started:
                raise RuntimeError("emulate() was already called in this test")
            options.setdefault("detailed_stats", wanted)
            started.append(stack.enter_context(emulated(target, **options)))
            return started[0]

        yield start
    for emulator in started:
        for name, stats in emulator.stats.items():
            key = f"{emulator.arch} {name}"
            config.stash[_STATS].setdefault(key, KernelStats(key)).add(stats)


def pytest_terminal_summary(terminalreporter: object, config: pytest.Config) -> None:
    if not config.getoption("--emulator-stats"):
        return
    terminalreporter.section("emulated kernels")
    for name, stats in sorted(config.stash[_STATS].items()):
        terminalreporter.write_line(stats.summary(name))
