"""The manifest and the journal: round trips, merging, and files that are not whole."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import Enum

import pytest

from aiter.aot.flydsl import manifest
from aiter.aot.flydsl.artifacts import FileRecord
from aiter.aot.flydsl.manifest import Artifact, Journal, Manifest, ManifestError

CONTEXT = {"flydsl": "0.5.0", "kernel sources": "abc"}
NAME = manifest.context_id(CONTEXT)


def artifact(file: str = "f/a.pkl", **changes: object) -> Artifact:
    plain = Artifact(
        record=FileRecord(file, 10, "00ff"),
        gfx="gfx950",
        function="f",
        builder="m:build",
        key={"tile.m": "32"},
        launches=("m:build Key()",),
        rows=("t.csv:2",),
        context=NAME,
        cpu_s=0.5,
    )
    return replace(plain, **changes)


def of(*artifacts: Artifact) -> Manifest:
    return Manifest({a.record.file: a for a in artifacts}, {NAME: CONTEXT})


def test_what_is_written_is_read_back(tmp_path):
    written = of(artifact(), artifact("f/b.pkl", rows=()))
    manifest.write(tmp_path, written)
    assert manifest.read(tmp_path) == written
    assert [p.name for p in tmp_path.iterdir()] == [manifest.MANIFEST]


def test_no_manifest_is_none(tmp_path):
    assert manifest.read(tmp_path) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 1}', '{"format": 1, "contexts": {}, "artifacts": {"a": {}}}'],
)
def test_a_damaged_manifest_is_an_error_that_names_it(tmp_path, text):
    (tmp_path / manifest.MANIFEST).write_text(text)
    with pytest.raises(ManifestError, match=f"{manifest.MANIFEST}: not a manifest .* build anew"):
        manifest.read(tmp_path)


def test_a_manifest_of_another_format_is_an_error(tmp_path):
    manifest.write(tmp_path, of(artifact()))
    path = tmp_path / manifest.MANIFEST
    path.write_text(path.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(ManifestError, match="format 99"):
        manifest.read(tmp_path)


def test_an_artifact_of_no_context_is_an_error(tmp_path):
    manifest.write(tmp_path, Manifest(of(artifact()).artifacts, {}))
    with pytest.raises(ManifestError, match="context"):
        manifest.read(tmp_path)


def test_a_failed_write_leaves_the_old_manifest_and_no_draft(tmp_path, monkeypatch):
    manifest.write(tmp_path, of(artifact()))
    monkeypatch.setattr("os.replace", lambda *names: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        manifest.write(tmp_path, of(artifact("f/b.pkl")))
    monkeypatch.undo()
    assert manifest.read(tmp_path) == of(artifact())
    assert [p.name for p in tmp_path.iterdir()] == [manifest.MANIFEST]


def test_merging_builds_of_two_tables_keeps_both():
    old = of(artifact(), artifact("f/b.pkl", rows=("t.csv:3", "other.csv:9")))
    new = of(artifact("f/b.pkl", rows=("t.csv:4",), launches=("m:build Other()",)))
    merged = manifest.merge(old, new, ["t.csv"])
    assert merged.artifacts["f/a.pkl"].rows == ()  # no row of the new table asks for it
    assert merged.artifacts["f/b.pkl"].rows == ("other.csv:9", "t.csv:4")
    assert merged.artifacts["f/b.pkl"].launches == ("m:build Key()", "m:build Other()")


def test_merging_drops_contexts_nothing_was_built_in():
    stale = Manifest({}, {"stale": {}})
    assert manifest.merge(stale, of(artifact()), ()).contexts == {NAME: CONTEXT}


def test_artifacts_are_found_by_launch_and_architecture():
    held = of(artifact(), artifact("f/b.pkl", gfx="gfx942"))
    assert [a.record.file for a in held.of_launch("gfx942", "m:build Key()")] == ["f/b.pkl"]
    assert held.of_launch("gfx950", "m:build Other()") == []


def test_the_journal_of_a_killed_build_is_read_up_to_its_last_whole_line(tmp_path):
    journal = Journal(tmp_path, {NAME: CONTEXT})
    journal.add(artifact())
    journal.add(artifact("f/b.pkl"))
    journal.close()
    path = tmp_path / manifest.JOURNAL
    path.write_text(path.read_text()[:-30])
    assert manifest.read_journal(tmp_path) == of(artifact())
    again = Journal(tmp_path, {NAME: CONTEXT})
    again.add(artifact("f/c.pkl"))
    again.close()
    assert manifest.read_journal(tmp_path) == of(artifact(), artifact("f/c.pkl"))


@pytest.mark.parametrize("text", ["", "null\n3\n[]\n", "\x00\xff garbage", '{"file": "f/a.pkl"}'])
def test_a_journal_of_garbage_holds_nothing(tmp_path, text):
    (tmp_path / manifest.JOURNAL).write_text(text)
    assert manifest.read_journal(tmp_path).artifacts == {}


def test_writing_the_manifest_ends_the_journal(tmp_path):
    Journal(tmp_path, {}).close()
    manifest.write(tmp_path, of(artifact()))
    assert not (tmp_path / manifest.JOURNAL).exists()


class Mode(Enum):
    FAST = 1


@dataclass(frozen=True)
class Tile:
    m: int


@dataclass(frozen=True)
class Key:
    tile: Tile
    mode: Mode


def test_a_build_keys_fields_are_flattened_by_dotted_name():
    assert manifest.key_fields(Key(Tile(32), Mode.FAST)) == {"tile.m": "32", "mode": "FAST"}


def test_the_sources_digest_follows_contents_and_names(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    first = manifest.sources_digest(tmp_path)
    assert first == manifest.sources_digest(tmp_path)
    (tmp_path / "a.py").write_text("x = 2")
    second = manifest.sources_digest(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, manifest.sources_digest(tmp_path)}) == 3


def test_the_manifest_is_plain_json_with_what_a_person_looks_for(tmp_path):
    manifest.write(tmp_path, of(artifact()))
    data = json.loads((tmp_path / manifest.MANIFEST).read_text())
    assert data["artifacts"]["f/a.pkl"]["rows"] == ["t.csv:2"]
    assert data["contexts"][NAME]["flydsl"] == "0.5.0"
