"""A check compiles nothing, and what it misses it names: row, kernel and part of the key."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from aiter.aot.flydsl import manifest
from aiter.aot.flydsl.check import CheckResult, check
from aiter.aot.flydsl.common import LaunchRequest
from aiter.aot.flydsl.engine import build

from .samples import (
    CONTEXTS,
    ErfKey,
    FailKey,
    build_options,
    quiet,
    scale_request,
    unbuilt_request,
)

pytestmark = pytest.mark.compile
CONTEXT = {"kernel sources": "0"}
TWO, THREE = 2, 3


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    requests = [scale_request(TWO), scale_request(THREE)]
    build(requests, CONTEXTS, build_options(cache), quiet)
    return cache


@pytest.fixture
def cache(built: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(built, tmp_path / "cache"))


def look(cache: Path, *requests: LaunchRequest, context: dict[str, str] = CONTEXT) -> CheckResult:
    return check(requests, context, cache, workers=1, timeout=60.0)


def file_of(cache: Path, factor: int) -> Path:
    held = manifest.read(cache).artifacts.values()
    return cache / next(a.record.file for a in held if a.key["factor"] == str(factor))


def only_miss(cache: Path, **options: object) -> str:
    found = look(cache, scale_request(TWO), scale_request(THREE), **options)
    assert found.hits == 1
    (miss,) = found.misses
    assert miss.request == scale_request(TWO)
    return str(miss)


def test_a_complete_cache_passes_without_a_linker_and_without_writing(built, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("aiter.jit.utils.linker.find_linker", lambda: 1 / 0)
    before = {path: path.stat().st_mtime_ns for path in built.rglob("*")}
    found = look(built, scale_request(TWO), scale_request(THREE))
    assert (found.hits, found.misses) == (2, [])
    assert {path: path.stat().st_mtime_ns for path in built.rglob("*")} == before


def test_a_deleted_artifact_is_named_with_its_row(cache):
    file_of(cache, TWO).unlink()
    text = only_miss(cache)
    assert text.startswith("[MISS] t.csv:2: gfx950 samples.build_scale(ScaleKey(factor=2")
    assert "the file is missing" in text


def test_a_truncated_artifact_is_named(cache):
    path = file_of(cache, TWO)
    path.write_bytes(path.read_bytes()[:-1])
    assert "bytes, the manifest says" in only_miss(cache)


def test_a_swapped_artifact_is_named(cache):
    file_of(cache, TWO).write_bytes(file_of(cache, THREE).read_bytes())
    assert "not what was built" in only_miss(cache) or "bytes" in only_miss(cache)


def test_an_artifact_with_a_flipped_bit_is_named(cache):
    path = file_of(cache, TWO)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    assert "not what was built" in only_miss(cache)


def test_a_file_the_manifest_does_not_list_does_not_count(cache):
    held = manifest.read(cache)
    kept = {f: a for f, a in held.artifacts.items() if a.key["factor"] == str(THREE)}
    manifest.write(cache, manifest.Manifest(kept, held.contexts))
    text = only_miss(cache)
    assert "the manifest does not list it" in text
    assert "differs in factor 2, built with 3" in text


def test_a_launch_that_was_never_built_names_the_nearest_and_the_part_that_differs(built):
    found = look(built, scale_request(5))
    text = str(found.misses[0])
    assert "no such artifact was built" in text
    assert "the nearest artifact of launch_scale differs in factor 5, built with" in text


def test_a_launch_for_another_architecture_says_so(built):
    text = str(look(built, scale_request(TWO, "gfx942")).misses[0])
    assert "differs in arch gfx942, built with gfx950" in text


def test_changed_kernel_sources_are_named_as_the_cause(cache):
    held = manifest.read(cache)
    moved = {}
    for file, artifact in held.artifacts.items():
        record = replace(artifact.record, file=file.replace(".pkl", "0.pkl"))
        moved[record.file] = replace(artifact, record=record)
    manifest.write(cache, manifest.Manifest(moved, held.contexts))
    found = look(cache, scale_request(TWO), context={"kernel sources": "1"})
    text = str(found.misses[0])
    assert "the artifact of this build key differs in" in text
    assert "kernel sources 1, built with 0" in text


def test_an_environment_that_changes_code_is_named_as_the_cause(cache, monkeypatch):
    monkeypatch.setenv("FLYDSL_COMPILE_OPT_LEVEL", "1")
    text = str(look(cache, scale_request(TWO)).misses[0])
    assert "env.FLYDSL_COMPILE_OPT_LEVEL 1" in text


def test_an_environment_that_asks_for_other_kernels_is_named_as_well(cache):
    held = manifest.read(cache)
    contexts = {name: {**context, "env.X": ""} for name, context in held.contexts.items()}
    manifest.write(cache, replace(held, contexts=contexts))
    text = str(look(cache, scale_request(5), context={**CONTEXT, "env.X": "1"}).misses[0])
    assert "differs in env.X 1, built with unset; factor 5, built with" in text


def test_a_launch_whose_function_has_no_artifact_says_so(built):
    text = str(look(built, unbuilt_request("build_erf", ErfKey())).misses[0])
    assert "no such artifact was built" in text
    assert "no artifact of launch_erf was built" in text


def test_a_kernel_that_cannot_be_traced_is_a_miss(built):
    found = look(built, unbuilt_request("build_failing", FailKey()), scale_request(TWO))
    assert found.hits == 1
    assert "its key cannot be found: ZeroDivisionError" in str(found.misses[0])


@pytest.mark.parametrize(
    ("state", "remedy"),
    [("absent", "build the cache first"), ("garbage", "remove it and build anew")],
)
def test_without_a_usable_manifest_everything_is_a_miss(cache, state, remedy):
    path = cache / manifest.MANIFEST
    path.unlink() if state == "absent" else path.write_text("{")
    found = look(cache, scale_request(TWO), scale_request(THREE))
    assert len(found.misses) == 2
    assert manifest.MANIFEST in found.unusable
    assert remedy in found.unusable
    assert all(found.unusable in str(miss) for miss in found.misses)


def test_an_artifact_that_cannot_be_read_is_a_miss(cache):
    path = file_of(cache, TWO)
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    assert "cannot be read" in only_miss(cache)


def test_a_trace_is_all_a_launch_costs(built):
    found = look(built, scale_request(TWO), scale_request(THREE))
    assert found.trace_cpu_s < 1.0
    assert found.cpu_s < found.trace_cpu_s + 1.0
