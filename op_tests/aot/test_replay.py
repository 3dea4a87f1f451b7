"""Replays of small tables through the runtime itself, and of a runtime that misbehaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiter.aot.flydsl import replay as replay_module
from aiter.aot.flydsl.replay import ArchReplay, ReplayTask, replay_arch
from aiter.aot.flydsl.rows import select_rows
from aiter.fused_moe import _fused_moe_impl
from aiter.ops.flydsl.moe.request import caller_variants

from .samples import write_table

CK = "moe_ck2stages_gemm2_256x64x128x128"


def replay(table: Path, **options: object) -> ArchReplay:
    selection = select_rows([table], ())
    (arch,) = selection.archs
    return replay_arch(ReplayTask(arch, selection.tables, **options))


def statuses(found: ArchReplay) -> list[str]:
    return [event.status for event in found.events]


def functions(found: ArchReplay) -> set[str]:
    return {request.launch.build.qualname for request in found.requests}


def callers(table: Path) -> int:
    return len(caller_variants(select_rows([table], ()).archs[0].rows[0].row))


@pytest.fixture
def table(tmp_path) -> Path:
    return write_table(tmp_path / "t.csv", {})


@pytest.fixture
def runtime(monkeypatch):
    """Calls a function with the number of tokens before the runtime."""

    def install(before) -> None:
        def call(**arguments: object) -> object:
            before(arguments["hidden_states"].shape[0], arguments)
            return _fused_moe_impl(**arguments)

        monkeypatch.setattr(replay_module, "_fused_moe_impl", call)

    return install


def test_a_row_gives_every_launch_of_the_moe_and_names_its_line(table):
    found = replay(table)
    assert statuses(found) == ["OK"]
    assert functions(found) == {"build_sort", "build_quant_rows", "build_stage1", "build_stage2"}
    assert found.jobs["OK"] == found.job_count == 2 * callers(table)  # at M = 9 and 16
    assert {request.rows for request in found.requests} == {(f"{table}:2",)}
    assert len({request.launch for request in found.requests}) == len(found.requests)


def test_rows_that_share_a_launch_are_both_named(tmp_path):
    found = replay(write_table(tmp_path / "t.csv", {}, {"token": "32"}))
    assert {len(request.rows) for request in found.requests} == {2}


def test_the_tables_of_the_run_and_no_others_are_looked_up(tmp_path):
    """Shape and token of the row are not of any shipped table, so its kernels come from it."""
    name = "flydsl_moe2_afp8_wfp4_bf16_t32x256x256_reduce"
    found = replay(write_table(tmp_path / "t.csv", {"kernelName2": name}))
    assert "build_reduce" in functions(found)
    assert found.notes == []


def test_a_row_that_the_runtime_passes_over_is_noted(tmp_path):
    found = replay(write_table(tmp_path / "t.csv", {"block_m": "48"}))
    assert statuses(found) == ["OK"]
    assert any("t.csv:2" in note and "heuristic" in note for note in found.notes)


def test_a_flavour_that_is_not_built_yet_fails_and_is_not_dropped(tmp_path):
    found = replay(
        write_table(
            tmp_path / "t.csv",
            {},
            {"q_dtype_w": "torch.int8"},
        )
    )
    failed = [str(event) for event in found.events if event.status == "FAIL"]
    assert len(failed) == 1
    assert "t.csv:3" in failed[0]
    assert "refused at every token count" in failed[0] or "no kernels" in failed[0]
    assert found.failed


def test_a_row_no_token_count_reaches_is_skipped(tmp_path):
    found = replay(write_table(tmp_path / "t.csv", {"token": "3"}, {}))
    assert statuses(found) == ["SKIP", "OK"]
    assert "reaches a row of token 3" in str(found.events[0])


def test_a_row_beyond_the_token_counts_asked_for_is_skipped(tmp_path):
    found = replay(write_table(tmp_path / "t.csv", {}, {"token": "64"}), max_tokens=32)
    assert statuses(found) == ["OK", "SKIP"]
    assert "no token count up to 32 reaches a row of token 64" in str(found.events[1])


def test_a_mixed_row_gives_its_flydsl_stage_and_the_pair_served_here(tmp_path):
    name = "flydsl_moe1_afp8_wfp4_bf16_t32x64x256_w4_gui_kw2_fp8"
    found = replay(write_table(tmp_path / "t.csv", {"kernelName1": name, "kernelName2": CK}))
    stage1 = {r.launch.build.key.tile for r in found.requests if "stage1" in str(r.launch.build)}
    assert statuses(found) == ["OK"]
    assert {tile.k_waves for tile in stage1} == {1, 2}


def test_what_is_served_here_is_built_where_a_mixed_rows_own_stage_is_refused(
    tmp_path, monkeypatch
):
    def refuse(request: object, row: object) -> tuple:
        if request.tokens > 12:  # type: ignore[attr-defined]
            raise NotImplementedError("too many for this stage")
        return ()

    monkeypatch.setattr(replay_module, "mixed_row_launches", refuse)
    found = replay(write_table(tmp_path / "t.csv", {"kernelName2": CK}))
    texts = [str(event) for event in found.events]
    assert any("[REFUSED]" in t and "M=13..16" in t and "too many for" in t for t in texts)
    assert functions(found) >= {"build_sort", "build_stage1", "build_stage2"}
    monkeypatch.setattr(replay_module, "served_range", lambda token, cap, highest: (14, 16))
    refused_everywhere = replay(write_table(tmp_path / "t.csv", {"kernelName2": CK}))
    assert refused_everywhere.failed
    assert functions(refused_everywhere) >= {"build_sort", "build_stage1", "build_stage2"}


def test_token_counts_refused_to_the_default_caller_are_reported_with_their_range(table, runtime):
    def refuse(tokens: int, arguments: dict) -> None:
        if tokens > 13:
            raise NotImplementedError(f"{tokens} tokens are too many")

    runtime(refuse)
    found = replay(table)
    texts = [str(event) for event in found.events]
    assert any("[REFUSED]" in t and "M=14..16: 14 tokens are too many" in t for t in texts)
    assert any("[SKIP]" in t and "local_tokens" in t and "M=14..16" in t for t in texts)
    assert not found.failed
    assert found.jobs["REFUSED"] > 0
    assert found.jobs["SKIP"] > 0
    assert found.requests


def test_a_caller_that_is_refused_everywhere_is_skipped_with_its_reason(table, runtime):
    def refuse(tokens: int, arguments: dict) -> None:
        if arguments.get("num_local_tokens") is not None:
            raise NotImplementedError("no local tokens here")

    runtime(refuse)
    found = replay(table)
    assert set(statuses(found)) == {"OK", "SKIP"}
    assert "no local tokens here" in str(found.events[0])


def test_a_default_caller_that_is_refused_everywhere_fails(table, runtime):
    def refuse(tokens: int, arguments: dict) -> None:
        raise NotImplementedError("not today")

    runtime(refuse)
    found = replay(table)
    assert statuses(found) == ["FAIL", *["SKIP"] * (callers(table) - 1)]
    assert "not today" in str(found.events[0])
    assert found.requests == []


def test_any_other_exception_fails_the_row_and_spares_the_next(tmp_path, runtime):
    def fail(tokens: int, arguments: dict) -> None:
        if tokens <= 16:
            raise ZeroDivisionError("a bug")

    runtime(fail)
    table = write_table(tmp_path / "t.csv", {}, {"token": "32"})
    found = replay(table)
    assert statuses(found) == [*["FAIL"] * callers(table), "OK"]
    assert "ZeroDivisionError: a bug" in str(found.events[0])


def test_a_runtime_that_launches_nothing_fails(table, monkeypatch):
    monkeypatch.setattr(replay_module, "_fused_moe_impl", lambda **arguments: None)
    assert "made no launch" in str(replay(table).events[0])


def test_a_row_that_no_call_matches_fails(tmp_path):
    found = replay(write_table(tmp_path / "t.csv", {"q_type": "QuantType.per_128x128"}))
    assert found.failed


def test_changes_within_a_row_are_bisected_and_their_launches_built(table, runtime):
    sizes: list[int] = []

    def change(tokens: int, arguments: dict) -> None:
        sizes.append(tokens)
        if tokens >= 12:
            arguments["block_size_M"] = 64  # not the row's: the heuristic kernels serve it

    runtime(change)
    found = replay(table)
    assert any("M=9..11" in str(e) and "M=12..16" in str(e) for e in found.events)
    assert found.jobs["BISECT"] == len([m for m in sizes if m not in (9, 16)])
    keys = [r.launch.build.key for r in found.requests if r.launch.build.qualname == "build_sort"]
    assert {key.block_m for key in keys} == {32, 64}
    assert any("heuristic" in note for note in found.notes)


def test_an_exhaustive_replay_agrees_with_bisecting_a_real_row(tmp_path):
    reduce = "flydsl_moe2_afp8_wfp4_bf16_t32x256x256_reduce"
    table = write_table(tmp_path / "t.csv", {"token": "256", "topk": "6", "kernelName2": reduce})
    found, every = replay(table), replay(table, exhaustive=True)
    assert every.job_count == callers(table) * 128
    assert not every.failed
    assert {r.launch for r in every.requests} == {r.launch for r in found.requests}


def test_an_exhaustive_replay_finds_what_bisecting_cannot(table, runtime):
    def change(tokens: int, arguments: dict) -> None:
        if tokens == 11:
            arguments["block_size_M"] = 64

    runtime(change)
    assert not replay(table).failed
    every = replay(table, exhaustive=True)
    assert every.failed
    assert "1 token counts in M=9..16, the first 11" in str(every.events[0])


def test_the_highest_token_count_can_be_lowered(tmp_path):
    table = write_table(tmp_path / "t.csv", {"token": "32768"})
    found = replay(table, max_tokens=20000)
    assert "M=16385..20000" in str(found.events[-1])


def test_a_row_is_replayed_at_the_tier_above_where_no_row_is_tuned_for_that(tmp_path):
    """Its reduction is refused at some M beyond its own tier, where other kernels serve."""
    reduce = "flydsl_moe2_afp8_wfp4_bf16_t32x128x256_reduce"
    row = {"token": "32768", "kernelName2": reduce}
    alone = replay(write_table(tmp_path / "t.csv", row))
    assert any("M=16385..2097151" in str(e) and "M=2097152.." in str(e) for e in alone.events)
    both = replay(write_table(tmp_path / "t.csv", row, {**row, "token": "131072"}))
    assert [str(e) for e in both.events if "t.csv:2" in e.row and "M=16385..131071" in e.text]
    assert {r.launch for r in alone.requests} == {r.launch for r in both.requests}


def test_rows_of_one_architecture_with_other_compute_units_have_their_own_target(tmp_path):
    persistent = {"kernelName2": "flydsl_moe2_afp8_wfp4_bf16_t32x128x256_atomic_persist"}
    table = write_table(tmp_path / "t.csv", persistent, {**persistent, "cu_num": "64"})
    found = replay(table)
    assert statuses(found) == ["OK", "OK"]


def test_a_process_of_another_architecture_refuses(table, monkeypatch):
    from aiter.jit.utils.chip_info import Target, pinned

    with pinned(Target.of("gfx942")), pytest.raises(RuntimeError, match="its target is gfx942"):
        replay(table)


def test_the_parts_of_the_key_that_all_launches_share_are_traced_once(table):
    parts = replay(table, with_key_parts=True).common_parts
    assert parts["target"].startswith("rocm:gfx950")
    assert "mlir" not in parts
    assert replay(table).common_parts == {}
