"""The command line as it is used: exit codes, output, interruption, other users."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiter.aot.flydsl import artifacts, manifest, moe
from aiter.aot.flydsl.common import BuildError, replay_env, run_aot

from .samples import write_table

MODULE = [sys.executable, "-m", "aiter.aot.flydsl.moe"]
ROOT = Path(__file__).resolve().parents[2]


def call(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 300, **options}
    return subprocess.run([*MODULE, *map(str, arguments)], check=False, **options)


def call_here(capsys, *arguments: object) -> tuple[int, str]:
    """The same in this process, which has its imports behind it: exit code and log."""
    code = moe.main([str(argument) for argument in arguments])
    return code, capsys.readouterr().out


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A folder with a table, t.csv, and its finished cache, that other users may read."""
    folder = Path(tempfile.mkdtemp(prefix="aot_cli_"))
    folder.chmod(0o755)
    table = write_table(folder / "t.csv", {})
    done = call("--csv", table, "--cache-dir", folder / "cache", "--json")
    assert done.returncode == 0, done.stderr
    (folder / "build.json").write_text(done.stdout)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def cache(shared: Path, tmp_path: Path) -> Path:
    """A copy of the finished cache, to damage."""
    return Path(shutil.copytree(shared / "cache", tmp_path / "cache"))


# ---------------------------------------------------------------- a good run


@pytest.mark.compile
def test_a_build_reports_what_it_did(shared):
    report = json.loads((shared / "build.json").read_text())
    arch = report["archs"]["gfx950"]
    assert report["exit"] == 0
    assert arch["rows"] == 1
    assert arch["jobs"]["OK"] > 0
    assert arch["jobs"]["FAIL"] == 0
    assert report["build"]["built"] == len(list((shared / "cache").glob("*/*.pkl")))
    assert report["build"]["built"] + report["build"]["shared"] == len(arch["launches"])
    assert report["build"]["failures"] == []
    assert {name for launch in arch["launches"] for name in launch["rows"]} == {f"{shared}/t.csv:2"}


@pytest.mark.compile
def test_a_complete_cache_passes_and_the_summary_says_so(shared):
    done = call("--csv", shared / "t.csv", "--cache-dir", shared / "cache", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("[OK]")]
    assert row.startswith(f"[OK] {shared}/t.csv:2 (interleave; ")
    assert " and 1 more): " in row
    assert ": M=9..16, " in row
    assert "0 missing or damaged" in done.stdout
    assert "ms a job" in done.stdout


@pytest.mark.compile
@pytest.mark.parametrize("damage", ["deleted", "truncated", "swapped"])
def test_a_check_of_a_damaged_cache_exits_1_and_names_row_and_kernel(capsys, shared, cache, damage):
    victim, other = sorted(cache.glob("launch_moe_sort/*.pkl"))[:2]
    if damage == "deleted":
        victim.unlink()
    else:
        data = victim.read_bytes()[:-5] if damage == "truncated" else other.read_bytes()
        victim.write_bytes(data)
    code, log = call_here(capsys, "--csv", shared / "t.csv", "--cache-dir", cache, "--check")
    assert code == 1
    misses = [line for line in log.splitlines() if line.startswith("[MISS]")]
    assert misses
    assert all("t.csv:2: gfx950 moe_sort.build_sort(SortKey(" in line for line in misses)


@pytest.mark.compile
def test_a_second_table_shares_the_cache_and_both_check(capsys, shared, cache, tmp_path):
    other = write_table(tmp_path / "other.csv", {"model_dim": "768"})
    assert call_here(capsys, "--csv", other, "--cache-dir", cache)[0] == 0
    for table in (shared / "t.csv", other):
        assert call_here(capsys, "--csv", table, "--cache-dir", cache, "--check")[0] == 0
    rows = {row for a in manifest.read(cache).artifacts.values() for row in a.rows}
    assert rows == {f"{shared}/t.csv:2", f"{other}:2"}


def test_a_list_needs_no_linker_and_no_cache(shared, tmp_path):
    absent = tmp_path / "absent"
    env = {**os.environ, "PATH": "", "ROCM_PATH": str(tmp_path), "XDG_CACHE_HOME": "/proc/none"}
    done = call("--csv", shared / "t.csv", "--cache-dir", absent, "--list", env=env)
    assert done.returncode == 0, done.stderr
    assert "gfx950 moe_stage1.build_stage1(Stage1Key(" in done.stdout
    assert f"<- {shared}/t.csv:2" in done.stdout
    assert not absent.exists()


def test_json_is_alone_on_standard_output(shared):
    done = call("--csv", shared / "t.csv", "--list", "--json")
    assert json.loads(done.stdout)["exit"] == 0
    assert "[OK]" in done.stderr


def test_output_that_nobody_reads_to_its_end_is_no_accident(shared):
    reader = subprocess.Popen(
        f"{sys.executable} -m aiter.aot.flydsl.moe --csv {shared}/t.csv --list | head -1",
        shell=True,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    out, err = reader.communicate(timeout=60)
    assert len(out.splitlines()) == 1
    assert "Traceback" not in err


def test_each_architecture_replays_in_a_process_of_its_own(capsys, tmp_path):
    """A row no kernel serves yet fails under its own architecture, and the other's is served."""
    table = write_table(tmp_path / "t.csv", {}, {"gfx": "gfx942", "cu_num": "80"})
    code, log = call_here(capsys, "--csv", table, "--list", "--jobs", 1)
    lines = log.splitlines()
    assert any(line.startswith("gfx950: 1 rows") for line in lines)
    assert any(line.startswith("gfx942: 1 rows") for line in lines)
    failed = [line for line in lines if line.startswith("[FAIL]")]
    assert code == (1 if failed else 0)
    assert all("t.csv:3" in line and "gfx942" in line for line in failed)
    code, log = call_here(capsys, "--csv", table, "--list", "--arch", "gfx950")
    assert code == 0
    assert "gfx942" not in log


# ---------------------------------------------------------------- runs that cannot be made


@pytest.fixture
def table(tmp_path) -> Path:
    return write_table(tmp_path / "t.csv", {})


def refused(capsys, *arguments: object) -> str:
    """The one sentence a run that cannot be made says, in this process: it starts nothing."""
    assert moe.main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "[" not in out
    return err


def test_a_missing_table_exits_2(capsys, tmp_path):
    assert "absent.csv: there is no such file" in refused(capsys, "--csv", tmp_path / "absent.csv")


def test_a_user_without_a_home_folder_exits_2(capsys, table, tmp_path, monkeypatch):
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("FLYDSL_RUNTIME_CACHE_DIR", raising=False)
    for arguments, said in (
        (["--list"], "this user has no home folder; set HOME to one"),
        (["--list", "--cache-dir", tmp_path], "this user has no home folder; set HOME to one"),
        ([], "XDG_CACHE_HOME is not set, and has no default here"),
    ):
        assert moe.main([*map(str, arguments), "--csv", str(table)]) == 2
        assert said in capsys.readouterr().err


def test_an_unknown_architecture_exits_2(capsys, table):
    assert "gfx999" in refused(capsys, "--csv", table, "--arch", "gfx950,gfx999")


def test_without_a_linker_a_build_exits_2(capsys, table, tmp_path, monkeypatch):
    monkeypatch.setattr("aiter.jit.utils.linker._candidates", lambda: iter(()))
    text = refused(capsys, "--csv", table, "--cache-dir", tmp_path / "cache")
    assert "ld.lld" in text
    assert "pip install" in text
    assert not (tmp_path / "cache").exists()


def test_a_cache_folder_that_cannot_be_made_exits_2(capsys, table, tmp_path):
    (tmp_path / "file").write_text("")
    text = refused(capsys, "--csv", table, "--cache-dir", tmp_path / "file" / "cache")
    assert "file/cache: the cache folder cannot be written" in text
    assert "--cache-dir" in text


def test_a_full_cache_folder_exits_2(capsys, table, tmp_path, monkeypatch):
    monkeypatch.setattr(artifacts, "_MIN_FREE", 1 << 62)
    text = refused(capsys, "--csv", table, "--cache-dir", tmp_path / "cache")
    assert "the cache folder is full" in text


def test_a_setting_that_does_not_parse_exits_2(capsys, table, monkeypatch):
    monkeypatch.setenv("AITER_MAX_JOBS", "many")
    assert "AITER_MAX_JOBS='many' is not an integer" in refused(capsys, "--csv", table)


@pytest.mark.parametrize(
    ("name", "value"),
    [("CU_NUM", "x"), ("AITER_FLYDSL_FORCE", "maybe"), ("AITER_FLYDSL_AOT_TIMEOUT", "0")],
)
def test_a_setting_that_only_a_worker_reads_is_refused_as_well(
    capsys, table, monkeypatch, name, value
):
    monkeypatch.setenv(name, value)
    assert f"{name}='{value}' is not" in refused(capsys, "--csv", table, "--list")


@pytest.mark.parametrize("arguments", [["--jobs", "0"], ["--check", "--list"], ["--frobnicate"]])
def test_a_wrong_command_line_exits_2(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        moe.main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_an_error_is_json_too_when_that_is_asked_for(capsys, tmp_path):
    assert moe.main(["--csv", str(tmp_path / "absent.csv"), "--json"]) == 2
    assert "no such file" in json.loads(capsys.readouterr().out)["error"]


def test_the_settings_are_shown_with_their_origin(capsys, table, monkeypatch, tmp_path):
    monkeypatch.setenv("AITER_MAX_JOBS", "7")
    cache = tmp_path / "cache"
    arguments = ["--show-config", "--csv", str(table), "--cache-dir", str(cache)]
    assert moe.main(arguments) == 0
    out = capsys.readouterr().out
    assert "AITER_MAX_JOBS" in out
    assert str(cache) in out
    assert "gfx950: 1 rows" in out
    assert not cache.exists()


def test_importing_the_command_line_loads_neither_torch_nor_flydsl():
    code = "import sys, aiter.aot.flydsl.moe; print({'torch', 'flydsl'} & set(sys.modules))"
    env = {**os.environ, "AITER_AOT_IMPORT": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True)
    assert done.stdout.decode().strip() == "set()", done.stderr.decode()


# ---------------------------------------------------------------- runs that fail


def test_a_table_whose_rows_all_fail_exits_1(capsys, tmp_path):
    bad = write_table(tmp_path / "bad.csv", {"q_dtype_w": "torch.int8"})
    for mode in ("--list", "--check"):
        code, log = call_here(capsys, "--csv", bad, "--cache-dir", tmp_path / "cache", mode)
        assert code == 1
        assert "bad.csv:2" in log
        assert "[FAIL] no row asks for any launch" in log


def test_a_check_without_a_cache_exits_1(capsys, table, tmp_path):
    code, log = call_here(capsys, "--csv", table, "--cache-dir", tmp_path / "absent", "--check")
    assert code == 1
    assert "build the cache first" in log
    assert log.count("[MISS]") == 1
    assert not (tmp_path / "absent").exists()


def test_run_aot_raises_when_its_command_line_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("AITER_CONFIG_FMOE", str(tmp_path / "absent.csv"))
    with pytest.raises(BuildError, match="exited 2"):
        run_aot(tmp_path / "cache")


@pytest.mark.compile
def test_run_aot_builds_into_the_folder_it_is_given(shared, cache, monkeypatch):
    monkeypatch.setenv("AITER_CONFIG_FMOE", str(shared / "t.csv"))
    before = dict(os.environ)
    for path in cache.glob("launch_mx_quant_rows/*.pkl"):
        path.unlink()
    run_aot(cache)
    assert dict(os.environ) == before
    assert list(cache.glob("launch_mx_quant_rows/*.pkl"))


def test_the_process_of_a_replay_sees_no_gpu_and_one_architecture():
    values = replay_env("gfx942")
    assert values["GPU_ARCHS"] == "gfx942"
    assert values["AITER_AOT_REPLAY"] == "1"
    hidden = {name for name, value in values.items() if value == "-1"}
    assert {"HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"} == hidden


# ---------------------------------------------------------------- other users, interruption


@pytest.fixture
def read_only(shared: Path) -> Iterator[tuple[Path, list[str]]]:
    """The finished cache without write permission, and how to run as somebody bound by that."""
    cache = shared / "cache"
    prefix = []
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root may write anywhere, and there is no setpriv to be somebody else")
        prefix = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        probe = subprocess.run([*prefix, sys.executable, "-c", "import torch"], capture_output=True)
        if probe.returncode:
            pytest.skip(f"an unprivileged user cannot run {sys.executable}")
    folders = [cache, *(path for path in cache.iterdir() if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    yield cache, prefix
    for folder in folders:
        folder.chmod(0o755)


@pytest.mark.compile
def test_a_read_only_cache_of_another_user_can_be_checked_and_not_built(shared, read_only):
    cache, prefix = read_only
    command = [*prefix, *MODULE, "--csv", str(shared / "t.csv"), "--cache-dir", str(cache)]
    env = {**os.environ, "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    options = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "check": False}
    checked = subprocess.run([*command, "--check"], **options)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    # A linker that needs no folder of its own, so that the cache is what is in the way.
    env["XDG_CACHE_HOME"] = str(shared / "xdg")
    (shared / "xdg").mkdir(exist_ok=True)
    (shared / "xdg").chmod(0o777)
    built = subprocess.run(command, **options)
    assert built.returncode == 2
    assert f"{cache}: the cache folder cannot be written" in built.stderr


def processes_of(text: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                line = (folder / "cmdline").read_text()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if text in line and state not in "ZX":
                found.append(int(folder.name))
    return found


@pytest.mark.compile
def test_ctrl_c_exits_130_leaves_no_process_and_the_next_run_goes_on(table, tmp_path):
    cache = tmp_path / "interrupted_cache"
    command = [*MODULE, "--csv", str(table), "--cache-dir", str(cache), "--jobs", "2"]
    run = subprocess.Popen(
        command, cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    deadline = time.monotonic() + 60
    while not list(cache.glob("*/*.pkl")) and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: everybody in the foreground
    out, _ = run.communicate(timeout=30)
    assert run.returncode == 130, out.decode()
    assert "interrupted" in out.decode()
    assert "Traceback" not in out.decode()
    assert processes_of(str(cache)) == []
    finished = list(cache.glob("*/*.pkl"))
    for path in finished:
        artifacts.require_artifact(path.read_bytes(), path.parent.name, "gfx950")
    assert not (cache / artifacts.STAGING).exists()
    assert not (cache / manifest.MANIFEST).exists()
    again = call("--csv", table, "--cache-dir", cache, "--json")
    report = json.loads(again.stdout)
    assert (again.returncode, report["exit"]) == (0, 0)
    assert report["build"]["reused"] >= len(finished) - 2
