"""Fixtures: the recording driver, and a pinned target with a cache of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aiter.jit.utils.chip_info import Target, pinned
from op_tests.hip_stub import hip_stub

__all__ = ["hip_stub"]


@pytest.fixture
def gfx950(flydsl_cache: Path) -> Iterator[Target]:
    """gfx950 as the target, and an empty FlyDSL cache."""
    with pinned(Target.of("gfx950")) as target:
        yield target
