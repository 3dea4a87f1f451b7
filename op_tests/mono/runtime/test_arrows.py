"""Imports of the mono packages point one way, and each says what lives in it."""

from __future__ import annotations

import ast
import re
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


@pytest.mark.parametrize("folder", ["plan", "device", "runtime", "models/minimax_m3"])
def test_a_folder_says_what_each_of_its_files_is(folder: str):
    package = ROOT / "atom/mono" / folder
    said = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    names = {path.stem for path in package.glob("*.py")} - {"__init__"}
    assert {
        name for name in names if not re.search(rf"^ *({name} |.*\b{name},)", said, re.M)
    } == set()


def test_the_check_sees_an_import_that_points_the_wrong_way():
    assert _wrong("atom/mono/runtime", ("atom.mono.plan",))
