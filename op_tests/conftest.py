"""Fixtures of every test: an isolated environment, and a FlyDSL cache of the test's own."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


def _has_emulator() -> bool:
    try:
        return importlib.util.find_spec("op_tests.emulator.plugin") is not None
    except ModuleNotFoundError:
        return False


pytest_plugins = ["op_tests.emulator.plugin"] if _has_emulator() else []


@pytest.fixture(autouse=True)
def isolated_environment() -> Iterator[None]:
    """Whatever a test does to the environment is undone, even what code under test did."""
    saved = dict(os.environ)
    yield
    if dict(os.environ) != saved:
        os.environ.clear()
        os.environ.update(saved)


@pytest.fixture
def flydsl_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty FLYDSL_RUNTIME_CACHE_DIR that no other test sees."""
    folder = tmp_path / "flydsl_cache"
    folder.mkdir()
    monkeypatch.setenv("FLYDSL_RUNTIME_CACHE_DIR", str(folder))
    return folder
