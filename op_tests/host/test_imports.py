"""Imports point one way, and FlyDSL's private names are touched in one file."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

import aiter

ROOT = Path(__file__).resolve().parents[2]

# What the modules below a folder must not import.
ARROWS = {
    "aiter": ["atom", "op_tests"],
    "atom": ["op_tests"],
    "aiter/jit": ["aiter.ops.flydsl", "aiter.aot", "aiter.fused_moe", "aiter.fhmoe"],
    "aiter/utility": ["aiter.ops", "aiter.aot", "aiter.fused_moe"],
    "aiter/ops": ["aiter.aot", "aiter.fused_moe", "aiter.fhmoe"],
    "aiter/ops/flydsl/kernels": [
        "aiter.ops.flydsl.moe",
        "aiter.ops.flydsl.mega_moe",
        "aiter.ops.flydsl.kernel_names",
    ],
}

PRIVATE = "aiter/jit/utils/flydsl_private.py"


def imports_of(path: Path, root: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every module, and every name, that a file imports."""
    package = path.relative_to(root).with_suffix("").parts[:-1]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def violations(root: Path) -> list[str]:
    bad = []
    for folder, forbidden in ARROWS.items():
        for path in sorted((root / folder).rglob("*.py")):
            for line, name in imports_of(path, root):
                if any(name == f or name.startswith(f + ".") for f in forbidden):
                    bad.append(f"{path.relative_to(root)}:{line} imports {name}")
    return bad


def private_uses(root: Path) -> list[str]:
    bad = []
    for top in ("aiter", "atom"):
        for path in sorted((root / top).rglob("*.py")):
            for line, name in imports_of(path, root):
                # flydsl._mlir is the MLIR Python binding, which kernels use as such.
                parts = name.removeprefix("flydsl._mlir").split(".")
                private = any(p.startswith("_") and not p.startswith("__") for p in parts)
                if name.startswith("flydsl.") and private and path != root / PRIVATE:
                    bad.append(f"{path.relative_to(root)}:{line} imports {name}")
    return bad


def test_imports_point_one_way():
    assert violations(ROOT) == []


def test_private_names_of_flydsl_are_imported_in_one_file():
    assert private_uses(ROOT) == []


@pytest.mark.parametrize(
    ("path", "source", "shown"),
    [
        ("aiter/a.py", "import atom.mono", "aiter/a.py:1 imports atom.mono"),
        ("aiter/a.py", "def f():\n    from atom import mono", "aiter/a.py:2 imports atom.mono"),
        (
            "aiter/ops/flydsl/kernels/a.py",
            "from ..moe import plan",
            "aiter/ops/flydsl/kernels/a.py:1 imports aiter.ops.flydsl.moe.plan",
        ),
        (
            "aiter/ops/flydsl/kernels/a.py",
            "from aiter.ops.flydsl import moe",
            "aiter/ops/flydsl/kernels/a.py:1 imports aiter.ops.flydsl.moe",
        ),
        (
            "aiter/ops/flydsl/moe/a.py",
            "from aiter import aot",
            "aiter/ops/flydsl/moe/a.py:1 imports aiter.aot",
        ),
        ("aiter/a.py", "import aiter.atomic, atomizer", None),
        ("aiter/ops/flydsl/moe/a.py", "from ..kernels import gemm", None),
    ],
)
def test_the_check_sees_each_kind_of_import(
    tmp_path: Path, path: str, source: str, shown: str | None
):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    assert violations(tmp_path) == ([shown] if shown else [])


def test_the_check_sees_private_imports(tmp_path: Path):
    file = tmp_path / "aiter" / "a.py"
    file.parent.mkdir()
    file.write_text(
        "from flydsl.compiler.jit_function import _flydsl_key, JitFunction\n"
        "from flydsl._mlir import ir\nfrom flydsl.compiler import _aot\n"
    )
    assert [text.rpartition(" ")[2] for text in private_uses(tmp_path)] == [
        "flydsl.compiler.jit_function._flydsl_key",
        "flydsl.compiler._aot",
    ]


@pytest.mark.parametrize("name", sorted(aiter._LAZY))
def test_a_name_of_the_package_means_the_same_whatever_was_imported_before(name: str):
    """Importing a submodule puts it into the package under its name."""
    module, attribute, _ = aiter._LAZY[name]
    assert attribute is None or importlib.util.find_spec(f"aiter.{name}") is None
    value = importlib.import_module(module)
    assert getattr(aiter, name) is (value if attribute is None else getattr(value, attribute))
