"""Finding a linker, in order, and laying it out without touching anybody's ROCm."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from aiter.jit.utils import linker, toolkit
from aiter.jit.utils.linker import ToolkitError, find_linker


def _fake_lld(path: Path, version: str = "19.1.7") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\necho "LLD {version} (compatible with GNU linkers) $@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def bare_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with no ROCm, no system linker, no wheel, and a cache folder of its own."""
    monkeypatch.setattr(linker, "SYSTEM_ROCM", tmp_path / "opt" / "rocm")
    monkeypatch.setattr(linker, "_package_folders", lambda package: [])
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ROCM_PATH", raising=False)


def _wheel(monkeypatch: pytest.MonkeyPatch, package: str, folder: Path) -> None:
    held = linker._package_folders

    def folders(name: str) -> list[Path]:
        return [folder] if name == package else held(name)

    monkeypatch.setattr(linker, "_package_folders", folders)


def test_no_linker_is_one_sentence_with_a_remedy():
    with pytest.raises(ToolkitError, match=r"no ld.lld of version 17.*pip install ziglang==0.14.1"):
        find_linker()


def test_the_order_of_preference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every source is present at first; each is taken away once it has been chosen."""
    zig = tmp_path / "ziglang" / "zig"
    _wheel(monkeypatch, "_rocm_sdk_core", tmp_path / "sdk")
    _wheel(monkeypatch, "ziglang", zig.parent)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "mine"))
    places = [
        ("ROCM_PATH", _fake_lld(tmp_path / "mine" / "llvm/bin/ld.lld")),
        (str(tmp_path / "opt/rocm"), _fake_lld(tmp_path / "opt/rocm/llvm/bin/ld.lld")),
        ("the _rocm_sdk_core wheel", _fake_lld(tmp_path / "sdk" / "lib/llvm/bin/ld.lld")),
        ("the system", _fake_lld(tmp_path / "bin" / "ld.lld-18", "18.0.0")),
        ("the ziglang wheel", _fake_lld(zig)),
    ]
    for origin, path in places:
        found = find_linker()
        assert found.origin == origin
        assert found.argv[0] == str(path)
        path.unlink()
    with pytest.raises(ToolkitError):
        find_linker()


def test_linkers_too_old_or_broken_are_passed_over_and_named(tmp_path: Path):
    old = _fake_lld(tmp_path / "opt/rocm/llvm/bin/ld.lld", "14.0.6")
    broken = tmp_path / "bin" / "ld.lld"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(ToolkitError) as error:
        find_linker()
    assert f"{old}: version 14" in str(error.value)
    assert f"{broken}: --version exited 3" in str(error.value)
    good = _fake_lld(tmp_path / "bin" / "ld.lld-17", "17.0.1")
    assert find_linker().argv == (str(good),)


def test_a_rocm_that_has_its_linker_is_used_in_place(tmp_path: Path):
    _fake_lld(tmp_path / "opt/rocm/llvm/bin/ld.lld")
    found = toolkit.find_toolkit()
    assert found.root == tmp_path / "opt/rocm"
    assert not (tmp_path / "cache").exists()


def _run_laid_out(root: Path) -> str:
    return subprocess.run(
        [root / "llvm/bin/ld.lld", "-a b"], capture_output=True, text=True, check=True
    ).stdout


def test_another_linker_is_laid_out_privately_with_the_users_bitcode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bitcode = tmp_path / "opt/rocm/amdgcn/bitcode"
    bitcode.mkdir(parents=True)
    (bitcode / "ocml.bc").write_text("bitcode")
    zig = _fake_lld(tmp_path / "a folder" / "zig")
    _wheel(monkeypatch, "ziglang", zig.parent)
    before = sorted((tmp_path / "opt").rglob("*"))
    found = toolkit.find_toolkit()
    assert found.root.is_relative_to(tmp_path / "cache")
    assert "ld.lld -a b" in _run_laid_out(found.root)
    assert (found.root / "amdgcn/bitcode/ocml.bc").read_text() == "bitcode"
    assert sorted((tmp_path / "opt").rglob("*")) == before
    assert toolkit.find_toolkit() == found


def test_another_linker_gets_another_folder(tmp_path: Path):
    lld = _fake_lld(tmp_path / "bin" / "ld.lld", "19.1.0")
    first = toolkit.find_toolkit().root
    _fake_lld(lld, "20.1.0")
    assert toolkit.find_toolkit().root != first


def test_concurrent_layouts_agree_and_leave_no_draft(tmp_path: Path):
    _fake_lld(tmp_path / "bin" / "ld.lld")
    roots: list[Path] = []
    threads = [
        threading.Thread(target=lambda: roots.append(toolkit.find_toolkit().root)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(roots) == 8
    assert len(set(roots)) == 1
    assert "LLD" in _run_laid_out(roots[0])
    assert list(roots[0].parent.iterdir()) == [roots[0]]


def test_a_cache_home_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    _fake_lld(tmp_path / "bin" / "ld.lld")
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(ToolkitError, match="set XDG_CACHE_HOME to a writable folder"):
        toolkit.find_toolkit()


def test_the_environment_overlay_ends_with_its_block(tmp_path: Path):
    _fake_lld(tmp_path / "bin" / "ld.lld")
    with toolkit.toolkit_env() as found:
        assert os.environ["ROCM_PATH"] == str(found.root)
        assert found.linker.version in found.describe()
    assert "ROCM_PATH" not in os.environ


def test_a_real_package_is_found_by_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Undo the fixture's stub: the look-up that it replaces must work, and import nothing."""
    package = tmp_path / "path" / "_rocm_sdk_core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    code = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(package.parent)!r})
        from aiter.jit.utils import linker
        print(linker._package_folders("_rocm_sdk_core"), linker._package_folders("no_such"))
        """)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == f"[{package!r}] []"


class TestWithoutALinker:
    @pytest.fixture(autouse=True)
    def forget(self):
        toolkit._remembered.cache_clear()
        yield
        toolkit._remembered.cache_clear()

    def test_what_comes_from_a_cache_needs_none(self):
        with toolkit.toolkit_env_if_any():
            pass

    def test_what_must_be_compiled_says_so(self):
        from flydsl.compiler.diagnostics import DSLCompileError

        with pytest.raises(ToolkitError, match="ld.lld"), toolkit.toolkit_env_if_any():
            raise DSLCompileError("lld invocation failed")

    def test_other_errors_pass(self):
        with pytest.raises(KeyError), toolkit.toolkit_env_if_any():
            raise KeyError("x")

    def test_it_is_looked_for_once_in_an_environment(self, monkeypatch: pytest.MonkeyPatch):
        looked = []
        monkeypatch.setattr(toolkit, "find_linker", lambda: looked.append(1) or _none())
        for _ in range(3):
            with toolkit.toolkit_env_if_any():
                pass
        assert len(looked) == 1
        monkeypatch.setenv("PATH", "/elsewhere")
        with toolkit.toolkit_env_if_any():
            pass
        assert len(looked) == 2


def _none():
    raise ToolkitError("no linker")
