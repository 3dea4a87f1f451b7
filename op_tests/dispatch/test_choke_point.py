"""Every launch goes through `tensor_shim`, which calls no launcher either: found by its syntax."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What makes a function a launcher, or one that returns launchers.
LAUNCHER, BUILDER = "jit", "kernel_builder"
# Functions that return a launcher whoever calls them.
RETURN_LAUNCHERS = {"rebuild", "JitFunction"}
# Names and annotations that say a value is a launcher.
LAUNCHER_NAMES, LAUNCHER_TYPES = {"launcher", "exe"}, {"JitFunction"}

Name = tuple[str, ...]


def _dotted(node: ast.AST) -> Name:
    """("self", "launch") for self.launch; () for what is not a name."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return (*base, node.attr)
    return ()


def _decorated(tree: ast.AST, decorator: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for mark in node.decorator_list:
                name = _dotted(mark.func if isinstance(mark, ast.Call) else mark)
                if name and name[-1] == decorator:
                    yield node.name


def builders_of(trees: dict[Path, ast.AST]) -> set[str]:
    """Functions that return launchers: marked as builders, or with a launcher defined inside."""
    found = set(RETURN_LAUNCHERS)
    for tree in trees.values():
        found.update(_decorated(tree, BUILDER))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any(
                True for inner in node.body for _ in _decorated(inner, LAUNCHER)
            ):
                found.add(node.name)
    return found


def direct_launches(tree: ast.AST, builders: set[str]) -> list[int]:
    """Lines of `tree` that call a launcher, or compile one for arguments."""
    makes = (
        lambda node: isinstance(node, ast.Call) and (_dotted(node.func) or ("",))[-1] in builders
    )
    launchers: set[Name] = {(name,) for name in _decorated(tree, LAUNCHER)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and makes(node.value):
            launchers.update(filter(None, map(_dotted, node.targets)))
        elif isinstance(node, ast.NamedExpr | ast.AnnAssign) and makes(node.value):
            launchers.add(_dotted(node.target))
        elif isinstance(node, ast.arg | ast.AnnAssign):
            annotation = node.annotation
            if annotation is not None and _dotted(annotation)[-1:] in {
                (t,) for t in LAUNCHER_TYPES
            }:
                launchers.add((node.arg,) if isinstance(node, ast.arg) else _dotted(node.target))
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        callee = _dotted(node.func)
        compiles = callee[-2:] == ("flyc", "compile") and len(node.args) + len(node.keywords) > 1
        if (
            callee in launchers
            or (callee and callee[-1] in LAUNCHER_NAMES)
            or makes(node.func)
            or compiles
        ):
            found.append(node.lineno)
    return sorted(found)


def _trees(root: Path) -> dict[Path, ast.AST]:
    files = [path for top in ("aiter", "atom") for path in sorted((root / top).rglob("*.py"))]
    return {path.relative_to(root): ast.parse(path.read_text()) for path in files}


def test_nothing_calls_a_launcher():
    trees = _trees(ROOT)
    builders = builders_of(trees)
    assert len(builders) > len(RETURN_LAUNCHERS), "no builder was found at all"
    found = [
        f"{path}:{line}" for path, tree in trees.items() for line in direct_launches(tree, builders)
    ]
    assert found == []


BUILDERS = """
@kernel_builder
def build_scale(key):
    @flyc.jit
    def launch_scale(x: fx.Int64, stream: fx.Stream):
        scale_kernel(x).launch(grid=(1, 1, 1), stream=stream)
    return launch_scale
"""


@pytest.mark.parametrize(
    "code",
    [
        "build_scale(key)(1, None)",
        "tensors.build_scale(key)(1, stream=None)",
        "launcher = build_scale(key)\nlauncher(1, None)",
        "def f(self):\n    self.launch = build_scale(key)\ndef g(self):\n    self.launch(1, None)",
        "if (go := build_scale(key)):\n    go(1, None)",
        "go: object = build_scale(key)\ngo(1, None)",
        "def f(go: JitFunction):\n    go(1, None)",
        "def f(launcher):\n    launcher(1, None)",
        "def f(self):\n    self.launcher(*args)",
        "rebuild(ref)(1, None)",
        "@flyc.jit\ndef launch(x):\n    pass\nlaunch(1)",
        "flyc.compile(go, 1, None)",
    ],
)
def test_each_way_of_launching_directly_is_found(code: str):
    trees = {Path("a.py"): ast.parse(BUILDERS), Path("b.py"): ast.parse(code)}
    assert len(direct_launches(trees[Path("b.py")], builders_of(trees))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "_run_compiled(build_scale(key), 1, None)",
        "launcher = build_scale(key)\n_run_compiled(launcher, 1, None)",
        "compile_artifact(rebuild(launch.build))",
        "flyc.compile[hints](launcher)",
        BUILDERS,
    ],
)
def test_what_is_no_direct_launch_is_not_reported(code: str):
    trees = {Path("a.py"): ast.parse(BUILDERS), Path("b.py"): ast.parse(code)}
    assert direct_launches(trees[Path("b.py")], builders_of(trees)) == []
