"""What counts as an artifact, and how one gets into a cache."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import pickle
import queue
import stat
import threading
import time
import zlib
from pathlib import Path

import pytest

from aiter.aot.flydsl import artifacts
from aiter.aot.flydsl.artifacts import (
    STAGING,
    ArtifactError,
    FileRecord,
    build_lock,
    install,
    require_artifact,
    seed,
)
from aiter.aot.flydsl.common import UsageError

from .samples import quiet


def pickled(**changes: object) -> bytes:
    from flydsl.compiler.jit_executor import CompiledArtifact

    text = 'gpu.binary @k [#gpu.object<#rocdl.target<chip = "gfx950">>]'
    state = {
        "ir_zlib": zlib.compress(text.encode()),
        "entry": "launch_scale",
        "processor_refs": [],
        "link_libs": [],
        **changes,
    }
    artifact = CompiledArtifact.__new__(CompiledArtifact)
    CompiledArtifact.__getstate__, saved = lambda self: state, CompiledArtifact.__getstate__
    try:
        return pickle.dumps(artifact, protocol=4)
    finally:
        CompiledArtifact.__getstate__ = saved


def record_of(file: str, data: bytes) -> FileRecord:
    return FileRecord(file, len(data), hashlib.sha256(data).hexdigest())


def test_a_sound_artifact_passes():
    require_artifact(pickled(), "launch_scale", "gfx950")


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "not an artifact"),
        (pickled()[:-20], "not an artifact"),
        (pickle.dumps({"entry": "launch_scale"}), "not an artifact"),
        (pickled(ir_zlib=b"garbage"), "not an artifact"),
        (pickled(entry="launch_other"), "an artifact of launch_other"),
        (pickled(processor_refs=["os:system"]), "loads other code"),
        (pickled(ir_zlib=zlib.compress(b"module {}")), "no gfx950 binary"),
    ],
)
def test_anything_else_is_refused(data, complaint):
    with pytest.raises(ArtifactError, match=complaint):
        require_artifact(data, "launch_scale", "gfx950")


def test_judging_a_file_runs_nothing_it_names(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    with pytest.raises(ArtifactError, match="mkdir, which no artifact does"):
        require_artifact(pickle.dumps(Evil()), "launch_scale", "gfx950")
    assert not (tmp_path / "ran").exists()


def test_the_artifact_of_another_architecture_is_refused():
    with pytest.raises(ArtifactError, match="no gfx942 binary"):
        require_artifact(pickled(), "launch_scale", "gfx942")


def test_an_installed_artifact_can_be_read_by_other_users(tmp_path):
    with build_lock(tmp_path, quiet):
        record = install(tmp_path, "launch_x/k.pkl", b"data")
    path = tmp_path / "launch_x/k.pkl"
    assert path.read_bytes() == b"data"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    # FlyDSL opens the lock for writing even to read.
    assert stat.S_IMODE(path.with_suffix(".lock").stat().st_mode) == 0o666
    assert record.damage(tmp_path) is None


def test_damage_is_told_apart(tmp_path):
    with build_lock(tmp_path, quiet):
        record = install(tmp_path, "f/k.pkl", b"data")
    path = tmp_path / "f/k.pkl"
    path.write_bytes(b"dat")
    assert record.damage(tmp_path) == "the file has 3 bytes, the manifest says 4"
    path.write_bytes(b"atad")
    assert "not what was built" in record.damage(tmp_path)
    path.unlink()
    assert record.damage(tmp_path) == "the file is missing"
    path.mkdir()
    assert "cannot be read" in record.damage(tmp_path)


def test_installing_over_a_damaged_file_repairs_it(tmp_path):
    (tmp_path / "f").mkdir()
    (tmp_path / "f/k.pkl").write_bytes(b"half")
    with build_lock(tmp_path, quiet):
        install(tmp_path, "f/k.pkl", b"whole artifact")
    assert (tmp_path / "f/k.pkl").read_bytes() == b"whole artifact"


def test_only_recorded_and_intact_files_are_offered_to_flydsl(tmp_path):
    for name in ("good", "truncated", "unrecorded"):
        (tmp_path / "f").mkdir(exist_ok=True)
        (tmp_path / f"f/{name}.pkl").write_bytes(name.encode())
    records = [record_of("f/good.pkl", b"good"), record_of("f/truncated.pkl", b"more than that")]
    with build_lock(tmp_path, quiet):
        assert seed(tmp_path, records) == {"f/good.pkl"}
        staged = list((tmp_path / STAGING).glob("*/*.pkl"))
        assert [path.name for path in staged] == ["good.pkl"]


def test_what_a_killed_build_left_is_removed_and_nothing_else(tmp_path):
    (tmp_path / STAGING / "f").mkdir(parents=True)
    (tmp_path / STAGING / "f" / "half.pkl").write_bytes(b"x")
    (tmp_path / "f").mkdir()
    old, young = tmp_path / "f/.a.pkl.x1.tmp", tmp_path / "f/.b.pkl.x2.tmp"
    kept = [young, tmp_path / "f/a.pkl", tmp_path / "notes.txt"]
    for path in (old, *kept):
        path.write_bytes(b"x")
    (tmp_path / ".aiter_manifest.json.abc.tmp").write_text("{")
    os.utime(old, (time.time() - 7200,) * 2)
    with build_lock(tmp_path, quiet):
        assert not (tmp_path / STAGING / "f").exists()
    assert not old.exists()
    assert not (tmp_path / ".aiter_manifest.json.abc.tmp").exists()
    assert not (tmp_path / STAGING).exists()
    assert all(path.exists() for path in kept)


def test_the_lock_excludes_a_second_build(tmp_path):
    with (
        build_lock(tmp_path, quiet),
        (tmp_path / ".aiter_build.lock").open() as other,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / ".aiter_build.lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_second_build_says_that_it_waits_and_goes_on_when_the_first_ends(tmp_path):
    said, entered = queue.Queue(), threading.Event()

    def second() -> None:
        with build_lock(tmp_path, said.put):
            entered.set()

    thread = threading.Thread(target=second)
    with build_lock(tmp_path, quiet):
        thread.start()
        assert "waiting for another build" in said.get(timeout=10)
        assert not entered.is_set()
    thread.join(10)
    assert entered.is_set()


def test_a_folder_whose_lock_fails_is_a_usage_error(tmp_path, monkeypatch):
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(artifacts.fcntl, "flock", fail)
    with pytest.raises(UsageError, match="No locks available"), build_lock(tmp_path, quiet):
        pass


def test_a_folder_that_cannot_be_made_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_text("")
    cache = tmp_path / "file" / "cache"
    complaint = "cannot be written .*--cache-dir"
    with pytest.raises(UsageError, match=complaint) as caught, build_lock(cache, quiet):
        pass
    assert str(cache) in str(caught.value)


def test_a_full_folder_is_a_usage_error_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(artifacts, "_MIN_FREE", 1 << 62)
    with pytest.raises(UsageError, match="the cache folder is full"), build_lock(tmp_path, quiet):
        pass
    assert not (tmp_path / STAGING).exists()


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_a_build_that_installs_nothing_leaves_only_its_lock(tmp_path):
    with build_lock(tmp_path, quiet):
        pass
    assert folders(tmp_path) == [".aiter_build.lock"]
