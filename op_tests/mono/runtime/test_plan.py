"""Build keys, layouts and shards: the arithmetic that needs no device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from atom.mono.plan.build_key import key_tuple, source_digest
from atom.mono.plan.execution import rounds
from atom.mono.plan.layout import ALIGN, Layout
from atom.mono.plan.shard import shard
from atom.mono.plan.trace import Space


@dataclass(frozen=True)
class Key:
    tokens: int
    eps: float = 1e-6
    debug: bool = False


@dataclass(frozen=True)
class Outer:
    inner: Key
    select: bool = True


@dataclass
class Loose:
    tokens: int = 1


@dataclass(frozen=True)
class Holding:
    tokens: list


def test_the_busiest_workgroup_has_a_task_more_once_a_round_is_full():
    assert [rounds(tasks, 4) for tasks in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    for tasks in range(40):
        each = [len(range(block, tasks, 7)) for block in range(7)]
        assert rounds(tasks, 7) == max(each)


def test_a_key_tuple_changes_with_every_field_and_with_the_sources():
    keys = [Key(4), Key(8), Key(4, 1e-5), Key(4, debug=True)]
    assert len({key_tuple(key, digest) for key in keys for digest in ("a", "b")}) == 8


def test_a_key_tuple_sees_into_nested_keys():
    assert key_tuple(Outer(Key(4)), "a") != key_tuple(Outer(Key(8)), "a")
    assert key_tuple(Outer(Key(4)), "a") == key_tuple(Outer(Key(4)), "a")


@pytest.mark.parametrize("key", [Loose(), Holding([1]), 3, Holding(Loose())])
def test_a_key_that_could_change_is_refused(key: object):
    with pytest.raises(TypeError):
        key_tuple(key, "")


def test_a_source_digest_follows_contents_and_names(tmp_path: Path):
    def digest(name: str, text: str) -> str:
        folder = tmp_path / f"{name}-{len(text)}"
        folder.mkdir()
        (folder / name).write_text(text)
        (folder / "notes.txt").write_text(text)
        return source_digest(folder)

    assert len({digest("a.py", "x"), digest("a.py", "xy"), digest("b.py", "x")}) == 3
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "a.py").write_text("x")
    assert source_digest(tmp_path / "moved") == source_digest(tmp_path / "a.py-1")


def test_no_source_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        source_digest(tmp_path)
    with pytest.raises(FileNotFoundError):
        source_digest(tmp_path / "gone.py")


def test_regions_are_aligned_disjoint_and_found_by_name():
    layout = Layout(Space.PEER)
    placed = [layout.place(f"r{i}", size) for i, size in enumerate((1, ALIGN, ALIGN + 1, 8))]
    assert [r.offset for r in placed] == [0, ALIGN, 2 * ALIGN, 4 * ALIGN]
    assert layout.nbytes == 5 * ALIGN
    assert list(layout.regions) == [layout[region.name] for region in placed] == placed


@pytest.mark.parametrize(("name", "nbytes"), [("r", 8), ("s", 0)])
def test_a_region_twice_or_of_no_bytes_is_refused(name: str, nbytes: int):
    layout = Layout(Space.SCRATCH)
    layout.place("r", 8)
    with pytest.raises(ValueError, match=name):
        layout.place(name, nbytes)


def test_shards_of_all_ranks_make_up_the_whole():
    assert [i for rank in range(4) for i in shard(64, 4, rank)] == list(range(64))
    with pytest.raises(ValueError, match="heads: 6 cannot be divided equally among 4"):
        shard(6, 4, 0, "heads")
    with pytest.raises(ValueError, match="no rank 4 of 4"):
        shard(8, 4, 4)
