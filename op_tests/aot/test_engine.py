"""Builds of tiny kernels: what ends up in the cache, whatever happens on the way."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from pathlib import Path

import pytest

from aiter.aot.flydsl import artifacts, manifest
from aiter.aot.flydsl.artifacts import STAGING
from aiter.aot.flydsl.common import LaunchRequest, UsageError
from aiter.aot.flydsl.engine import BuildResult, build
from aiter.ops.flydsl.kernels.tensor_shim import launch_of

from . import samples
from .samples import (
    CONTEXTS,
    DeadlyKey,
    ErfKey,
    FailKey,
    HungryKey,
    SlowKey,
    build_hungry,
    build_options,
    quiet,
    scale_request,
    unbuilt_request,
)

pytestmark = pytest.mark.compile


def run(cache: Path, *requests: LaunchRequest, **options: object) -> BuildResult:
    return build(requests, CONTEXTS, build_options(cache, **options), quiet)


def contents(cache: Path) -> dict[str, bytes]:
    return {p.relative_to(cache).as_posix(): p.read_bytes() for p in cache.glob("*/*.pkl")}


def test_a_build_leaves_artifacts_locks_and_a_manifest_and_nothing_else(tmp_path):
    result = run(tmp_path, scale_request(2), scale_request(3), scale_request(2, "gfx942"))
    assert (result.built, result.reused, result.failures) == (3, 0, [])
    assert 0 < result.compile_cpu_s < 30
    held = manifest.read(tmp_path)
    assert held.artifacts.keys() == contents(tmp_path).keys()
    assert all(a.record.damage(tmp_path) is None for a in held.artifacts.values())
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"launch_scale", manifest.MANIFEST, ".aiter_build.lock"}
    assert {path.suffix for path in (tmp_path / "launch_scale").iterdir()} == {".pkl", ".lock"}


def test_the_manifest_says_who_asked_for_an_artifact_and_what_it_is(tmp_path):
    run(tmp_path, scale_request(2))
    (artifact,) = manifest.read(tmp_path).artifacts.values()
    assert artifact.rows == ("t.csv:2",)
    assert artifact.builder == "op_tests.aot.samples:build_scale"
    assert artifact.key == {"factor": "2", "label": ""}
    assert artifact.gfx == "gfx950"


def test_flydsl_finds_what_was_built(tmp_path):
    """In a fresh process, by the very path a serving process takes."""
    run(tmp_path, scale_request(2))
    code = """
from aiter.jit.utils.chip_info import Target, pinned
from aiter.ops.flydsl.kernels.tensor_shim import compile_artifact
from op_tests.aot.samples import ScaleKey, build_scale
with pinned(Target.of("gfx950")):
    compile_artifact(build_scale(ScaleKey(2)))
"""
    env = {**os.environ, "FLYDSL_RUNTIME_CACHE_DIR": str(tmp_path), "FLYDSL_RUNTIME_RUN_ONLY": "1"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    missing = {**env, "FLYDSL_RUNTIME_CACHE_DIR": str(tmp_path / "empty")}
    assert subprocess.run([sys.executable, "-c", code], env=missing, capture_output=True).returncode


def test_two_builds_are_byte_identical_whatever_the_order_and_number_of_workers(tmp_path):
    requests = [scale_request(n) for n in range(2, 8)]
    run(tmp_path / "a", *requests, workers=1)
    run(tmp_path / "b", *reversed(requests), workers=3)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert len(contents(tmp_path / "a")) == 6


def test_a_second_build_compiles_nothing_and_touches_no_artifact(tmp_path):
    run(tmp_path, scale_request(2), scale_request(3))
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*/*.pkl")}
    result = run(tmp_path, scale_request(2), scale_request(3), scale_request(4))
    assert (result.built, result.reused) == (1, 2)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert len(manifest.read(tmp_path).artifacts) == 3


def test_launches_with_one_code_are_compiled_once(tmp_path):
    twins = [scale_request(2, label=label) for label in "abc"]
    result = run(tmp_path, *twins, scale_request(3))
    assert (result.built, result.shared) == (2, 2)
    served = [len(a.launches) for a in manifest.read(tmp_path).artifacts.values()]
    assert sorted(served) == [1, 3]
    again = run(tmp_path, *twins)
    assert (again.built, again.reused, again.shared) == (0, 1, 2)


@pytest.mark.parametrize("damage", ["delete", "truncate", "empty", "garbage", "swap"])
def test_a_damaged_artifact_is_built_again_and_only_that_one(tmp_path, damage):
    run(tmp_path, scale_request(2), scale_request(3))
    good = contents(tmp_path)
    victim, other = (tmp_path / name for name in sorted(good))
    if damage == "delete":
        victim.unlink()
    else:
        data = victim.read_bytes()
        changed = {"truncate": data[:-9], "empty": b"", "garbage": os.urandom(len(data))}
        victim.write_bytes(changed.get(damage, other.read_bytes()))
    result = run(tmp_path, scale_request(2), scale_request(3))
    assert (result.built, result.reused) == (1, 1)
    assert contents(tmp_path) == good


def test_a_file_that_no_manifest_lists_is_not_trusted(tmp_path):
    """Another kernel's artifact under this one's name would be loaded without complaint."""
    run(tmp_path, scale_request(2), scale_request(3))
    good = contents(tmp_path)
    one, two = (tmp_path / name for name in sorted(good))
    one.write_bytes(two.read_bytes())
    (tmp_path / manifest.MANIFEST).unlink()
    assert run(tmp_path, scale_request(2), scale_request(3)).built == 2
    assert contents(tmp_path) == good


def test_a_damaged_manifest_is_said_and_built_over(tmp_path):
    run(tmp_path, scale_request(2))
    (tmp_path / manifest.MANIFEST).write_text("{")
    lines: list[str] = []
    result = build([scale_request(2)], CONTEXTS, build_options(tmp_path), lines.append)
    assert result.built == 1
    assert any("not a manifest" in line for line in lines)


def test_a_kernel_that_does_not_compile_fails_alone(tmp_path):
    lines: list[str] = []
    bad = unbuilt_request("build_failing", FailKey())
    result = build([bad, scale_request(2)], CONTEXTS, build_options(tmp_path), lines.append)
    assert (result.built, len(result.failures)) == (1, 1)
    assert result.failures[0].failure.kind == "raised"
    assert any(line.startswith("[FAIL] gfx950 samples.build_failing") for line in lines)
    assert len(manifest.read(tmp_path).artifacts) == 1


def test_a_kernel_that_needs_a_device_library_is_refused(tmp_path):
    result = run(tmp_path, unbuilt_request("build_erf", ErfKey()))
    assert result.failures[0].failure.error == "DeviceLibraryError"
    assert contents(tmp_path) == {}


def test_a_kernel_with_more_lds_than_a_workgroup_has_is_refused(tmp_path):
    """LLVM makes a binary of it, which no device starts."""
    fits, does_not = (
        LaunchRequest("gfx950", launch_of(build_hungry(HungryKey(size))), ("t.csv:2",))
        for size in (160 << 10, (160 << 10) + 4096)
    )
    result = run(tmp_path, fits, does_not)
    assert (result.built, len(result.failures)) == (1, 1)
    assert "needs 167936 bytes of LDS, a workgroup of gfx950 has 163840" in str(
        result.failures[0].failure
    )
    again = run(tmp_path, does_not)
    assert len(again.failures) == 1, "an artifact left by the first try is not taken"


def test_a_builder_that_is_not_there_fails_alone(tmp_path):
    result = run(tmp_path, unbuilt_request("no_such_builder", FailKey()), scale_request(2))
    assert result.failures[0].failure.error == "AttributeError"
    assert result.built == 1


def test_a_killed_worker_costs_one_retry(tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    deadly = unbuilt_request("build_deadly", DeadlyKey(str(marks), times=1))
    result = run(tmp_path / "cache", deadly, scale_request(2))
    assert (result.built, result.retried, result.failures) == (2, 1, [])
    assert not (tmp_path / "cache" / STAGING).exists()


def test_a_kernel_that_kills_every_worker_fails_alone(tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    deadly = unbuilt_request("build_deadly", DeadlyKey(str(marks), times=99))
    result = run(tmp_path / "cache", deadly, scale_request(2), retries=1)
    assert result.built == 1
    assert "killed by SIGKILL" in str(result.failures[0].failure)


def test_a_kernel_that_takes_too_long_fails_alone(tmp_path):
    slow = unbuilt_request("build_slow", SlowKey(60.0))
    result = run(tmp_path, slow, scale_request(2), timeout=2.0)
    assert result.built == 1
    assert result.failures[0].failure.kind == "timeout"


def test_any_executor_of_processes_will_do(tmp_path):
    requests = [scale_request(2), scale_request(3), unbuilt_request("build_failing", FailKey())]
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=fork) as executor:
        first = run(tmp_path / "a", *requests, executor=executor)
        # The same, long-lived, workers fill another cache just as well.
        second = run(tmp_path / "b", *requests, executor=executor)
    assert (first.built, len(first.failures)) == (second.built, len(second.failures)) == (2, 1)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert len(contents(tmp_path / "b")) == 2


class Jammed(Executor):
    """Fails the first task for want of room and never comes to the others."""

    def __init__(self) -> None:
        self.futures: list[Future] = []

    def submit(self, function, /, *arguments, **options) -> Future:
        self.futures.append(Future())
        if len(self.futures) == 1:
            self.futures[0].set_exception(artifacts.CacheFullError("no room"))
        return self.futures[-1]


def test_a_build_that_ends_early_leaves_an_executor_nothing_to_do(tmp_path):
    executor = Jammed()
    with pytest.raises(UsageError, match="no room"):
        run(tmp_path, scale_request(2), scale_request(3), executor=executor)
    assert executor.futures[1].cancelled()


def test_the_task_an_executor_gets_can_cross_processes(tmp_path):
    from aiter.aot.flydsl.compiling import CompileTask

    task = CompileTask("gfx950", scale_request(2).launch, tmp_path, tmp_path)
    assert pickle.loads(pickle.dumps(task)) == task


def test_settings_that_keep_flydsl_from_writing_are_not_in_effect(tmp_path, monkeypatch):
    monkeypatch.setenv("FLYDSL_RUNTIME_ENABLE_CACHE", "0")
    monkeypatch.setenv("FLYDSL_RUNTIME_RUN_ONLY", "1")
    monkeypatch.setenv("FLYDSL_DUMP_IR", "1")
    monkeypatch.setenv("FLYDSL_DUMP_DIR", str(tmp_path / "dump"))
    assert run(tmp_path / "cache", scale_request(2)).built == 1
    assert not (tmp_path / "dump").exists()


# ---------------------------------------------------------------- no room


def test_a_disk_that_fills_up_ends_the_build_and_the_next_one_goes_on(tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1400k", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small file system to fill: {mounted.stderr.strip()}")
    try:
        requests = [scale_request(n) for n in range(2, 40)]
        monkeypatch.setattr(artifacts, "_MIN_FREE", 1 << 16)
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(artifacts.free_bytes(disk) - (200 << 10)))
        with pytest.raises(UsageError, match="full|cannot be written") as caught:
            run(disk / "cache", *requests)
        assert "--cache-dir" in str(caught.value)
        held = manifest.read_journal(disk / "cache").artifacts
        assert held
        assert all(a.record.damage(disk / "cache") is None for a in held.values())
        ballast.unlink()
        result = run(disk / "cache", *requests)
        assert result.built < len(requests)
        assert result.built + result.reused == len(requests)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


# ---------------------------------------------------------------- killed builds

BUILD = """
import sys
from op_tests.aot.samples import *
from aiter.aot.flydsl.engine import build
requests = [scale_request(n) for n in range(2, 22)]
build(requests, CONTEXTS, build_options(Path(sys.argv[1]), workers=2), quiet)
"""


@pytest.mark.parametrize(
    "moment", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(9, marks=pytest.mark.slow)]
)
def test_a_build_killed_at_any_moment_is_finished_by_the_next(tmp_path, moment):
    parent = subprocess.Popen([sys.executable, "-c", BUILD, str(tmp_path)], start_new_session=True)
    deadline = time.monotonic() + 60
    while len(contents(tmp_path)) < moment and time.monotonic() < deadline:
        time.sleep(0.005)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    files = contents(tmp_path)
    assert len(files) >= moment
    for name, data in files.items():
        artifacts.require_artifact(data, name.partition("/")[0], "gfx950")
    requests = [scale_request(n) for n in range(2, 22)]
    result = run(tmp_path, *requests)
    # All but what was finished and not yet written down is found again.
    assert result.reused >= len(files) - 2
    assert result.built + result.reused == 20
    assert not (tmp_path / STAGING).exists()
    assert not (tmp_path / manifest.JOURNAL).exists()
    run(tmp_path / "other", *requests)
    assert contents(tmp_path) == contents(tmp_path / "other")


@pytest.mark.slow
def test_a_second_build_of_one_cache_waits_for_the_first(tmp_path):
    command = [sys.executable, "-c", BUILD, str(tmp_path)]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    data = json.loads((tmp_path / manifest.MANIFEST).read_text())
    assert len(data["artifacts"]) == 20


def test_samples_behave_as_told(tmp_path):
    """The misbehaving builders are only as good as what they do when nothing is wrong."""
    (tmp_path / "death0").touch()
    assert samples.build_deadly(DeadlyKey(str(tmp_path), times=1)) is not None
