"""Imports of the mono packages point one way."""

from __future__ import annotations

from pathlib import Path

import pytest

from op_tests.host.test_imports import imports_of

ROOT = Path(__file__).resolve().parents[3]

# Folder -> what its files must not import.
ARROWS = {
    "atom/mono/plan": ("torch", "flydsl", "aiter", "atom.mono.device", "atom.mono.runtime"),
    "atom/mono/device": ("atom.mono.runtime",),
    "atom/mono": ("op_tests", "benchmarks"),
}
MODELS = "atom.mono.models"


def _wrong(folder: str, forbidden: tuple[str, ...]) -> list[str]:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for line, name in imports_of(path, ROOT):
            if any(name == f or name.startswith(f + ".") for f in forbidden):
                found.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    return found


@pytest.mark.parametrize("folder", ARROWS)
def test_a_folder_imports_nothing_above_it(folder: str):
    assert _wrong(folder, ARROWS[folder]) == []


@pytest.mark.parametrize("folder", ["plan", "device", "runtime"])
def test_only_models_know_a_model(folder: str):
    assert _wrong(f"atom/mono/{folder}", (MODELS,)) == []


def test_the_check_sees_an_import_that_points_the_wrong_way():
    assert _wrong("atom/mono/runtime", ("atom.mono.plan",))
