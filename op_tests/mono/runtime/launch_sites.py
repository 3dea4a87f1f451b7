"""Finds calls that start a kernel by another way than `_run_compiled`, in any folders, by syntax.

A value is a launcher when it is defined under `@flyc.jit`, comes out of a builder (a function
marked `@kernel_builder`, or with a launcher defined in it), is annotated `JitFunction`, is an
attribute of the mono dataclasses that hold launchers, or is named like one. Called, compiled for
arguments, or given to `_run_compiled` with its stream by keyword or left out, it is reported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SHIM = "aiter/ops/flydsl/kernels/tensor_shim.py"
LAUNCHERS = {"launcher", "exe"}
RETURN_LAUNCHERS = {"rebuild", "JitFunction"}
STREAM_NAMES = {"stream"}


@dataclass(frozen=True)
class Site:
    """A line of a file, and what is wrong there."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.what}"


def _last(node: ast.AST) -> str:
    """The last part of a dotted name, "" for what is no name."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _marked(node: ast.AST, decorator: str) -> bool:
    marks = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any(
        _last(mark.func if isinstance(mark, ast.Call) else mark) == decorator for mark in marks
    )


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def builders(trees: Iterable[ast.AST]) -> set[str]:
    """The names of the functions, and of the fields holding functions, that return launchers."""
    found = set(RETURN_LAUNCHERS)
    for tree in trees:
        for function in _functions(tree):
            inner = any(_marked(node, "jit") for node in function.body)
            if inner or _marked(function, "kernel_builder"):
                found.add(function.name)
        for node in ast.walk(tree):
            # A field annotated Callable[..., JitFunction].
            if isinstance(node, ast.AnnAssign) and isinstance(node.annotation, ast.Subscript):
                inside = [_last(part) for part in ast.walk(node.annotation)]
                if "Callable" in inside and "JitFunction" in inside:
                    found.add(_last(node.target))
    return found


def _launchers(tree: ast.AST, made_by: set[str]) -> set[str]:
    """Last names of what holds a launcher in one file."""
    found = LAUNCHERS | {f.name for f in _functions(tree) if _marked(f, "jit")}
    for node in ast.walk(tree):
        value = getattr(node, "value", None)
        if isinstance(value, ast.Call) and _last(value.func) in made_by:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AnnAssign | ast.NamedExpr):
                targets = [node.target]
            found |= {_last(target) for target in targets}
        annotation = getattr(node, "annotation", None)
        # `JitFunction` and `JitFunction | None`, not containers and callables of them.
        plain = annotation is not None and not isinstance(annotation, ast.Subscript)
        if plain and any(_last(part) == "JitFunction" for part in ast.walk(annotation)):
            found.add(node.arg if isinstance(node, ast.arg) else _last(node.target))
    return found - {""}


def _is_stream(node: ast.AST) -> bool:
    is_none = isinstance(node, ast.Constant) and node.value is None
    return is_none or _last(node) in STREAM_NAMES


def _wrong(call: ast.Call, launchers: set[str], made_by: set[str]) -> str:
    name = _last(call.func)
    if name == "_run_compiled":
        if call.keywords:
            return "_run_compiled with keywords"
        # Packed arguments may hold it; parameters behind it stand there by name.
        packed = bool(call.args) and isinstance(call.args[-1], ast.Starred)
        return "" if packed or any(map(_is_stream, call.args[1:])) else "_run_compiled, no stream"
    if isinstance(call.func, ast.Call) and _last(call.func.func) in made_by:
        return f"calls what {_last(call.func.func)} returns"
    if name in launchers:
        return f"calls the launcher {name}"
    is_compile = name == "compile" and _last(getattr(call.func, "value", None)) == "flyc"
    if is_compile and len(call.args) + len(call.keywords) > 1:
        return "flyc.compile with arguments starts the kernel"
    return ""


def launch_sites(root: Path, folders: Iterable[str]) -> list[Site]:
    """Wrong launches below `folders` of `root`, but for the choke point itself."""
    files = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    trees = {path.relative_to(root).as_posix(): ast.parse(path.read_text()) for path in files}
    made_by = builders(trees.values())
    found = []
    for file, tree in trees.items():
        if file == SHIM:
            continue
        launchers = _launchers(tree, made_by)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (what := _wrong(node, launchers, made_by)):
                found.append(Site(file, node.lineno, what))
    return sorted(found, key=lambda site: (site.file, site.line))


def run_compiled_calls(root: Path, folders: Iterable[str]) -> list[Site]:
    """Every call of `_run_compiled` below `folders`."""
    return [
        Site(path.relative_to(root).as_posix(), node.lineno, "_run_compiled")
        for folder in folders
        for path in sorted((root / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and _last(node.func) == "_run_compiled"
    ]
