"""A cache built ahead of time is the one that `prepare` finds, and a wrong deployment is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from atom.mono import aot
from atom.mono.models.minimax_m3.config import Config
from atom.mono.models.minimax_m3.config_file import config_of

ROOT = Path(__file__).resolve().parents[3]

# Layer 0 is dense, 1 selects, 2 reuses: every kind of kernel, on small dimensions.
SMALL = {
    "dims": {
        "hidden": 128,
        "heads": 2,
        "kv_heads": 1,
        "index_heads": 1,
        "dense_inter": 128,
        "inter": 128,
        "experts": 16,
        "topk": 2,
    },
    "layers": 3,
    "dense_layers": 1,
    "index_topk_freq": 2,
    "tp": 1,
    "max_blocks": 16,
    "blocks": 2,
    "widths": [1, 4],
}

# As a server does it, where compiling is an error.
PREPARE = """
import json, sys
from flydsl.compiler import jit_function
def compile(*args, **keywords):
    raise AssertionError("something is compiled")
jit_function.MlirCompiler.compile = compile
from aiter.jit.utils.chip_info import Target, pinned
from atom.mono.models.minimax_m3.config_file import config_of
from atom.mono.models.minimax_m3.runner import layer_builders
from op_tests.mono.runtime.stand_ins import make_runner
config = config_of(json.load(open(sys.argv[1])))
with pinned(Target.of("gfx950")):
    runner = make_runner(config, builders=layer_builders())
    print([runner.prepare(rows) for rows in config.widths])
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a deployment, small.json, and its cache."""
    folder = tmp_path_factory.mktemp("mono_aot")
    (folder / "small.json").write_text(json.dumps(SMALL))
    assert _call("--config", folder / "small.json", "--cache-dir", folder / "cache").returncode == 0
    return folder


def _call(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "atom.mono.aot", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.compile
def test_a_server_with_the_cache_prepares_without_compiling(built: Path, monkeypatch):
    monkeypatch.setenv("FLYDSL_RUNTIME_CACHE_DIR", str(built / "cache"))
    command = [sys.executable, "-c", PREPARE, str(built / "small.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[True, True]", done.stderr


@pytest.mark.compile
def test_every_kernel_of_a_deployment_is_built_once_and_checked(built: Path):
    done = _call(
        "--config", built / "small.json", "--cache-dir", built / "cache", "--check", "--json"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    # Step-begin, and for each width two kernels of dense layers and two of sparse ones.
    assert len(report["launches"]) == 1 + 2 * 4
    assert (report["check"]["hits"], report["check"]["misses"]) == (9, [])
    rows = [f"{built / 'small.json'}:{rows} rows" for rows in (1, 4)]
    assert report["launches"][0]["rows"] == rows
    assert [launch["rows"] for launch in report["launches"][1:]] == [[rows[0]]] * 4 + [
        [rows[1]]
    ] * 4


@pytest.mark.compile
def test_a_missing_kernel_and_another_deployment_are_named(built: Path, tmp_path: Path):
    copy = tmp_path / "cache"
    subprocess.run(["cp", "-r", built / "cache", copy], check=True)
    (gone,) = copy.glob("launch_m3_dense_post_tp1_t4*/*.pkl")
    gone.unlink()
    done = _call("--config", built / "small.json", "--cache-dir", copy, "--check")
    assert done.returncode == 1
    (miss,) = [line for line in done.stdout.splitlines() if line.startswith("[MISS]")]
    assert f"{built / 'small.json'}:4 rows" in miss
    assert "build_dense_post" in miss
    other = tmp_path / "bf16.json"
    other.write_text(json.dumps({**SMALL, "kv_format": "bf16", "index_format": "bf16"}))
    done = _call("--config", other, "--cache-dir", built / "cache", "--check")
    assert done.returncode == 1
    assert done.stdout.count("[MISS]") == 2 * 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "Expecting"),
        ("[1]", "configuration is a JSON object, not [1]"),
        ('{"tpp": 4}', "configuration has no field 'tpp'; it has attn_format, aux_layers,"),
        ('{"tp": "4"}', "tp is a whole number, not '4'"),
        ('{"tp": true}', "tp is a whole number, not True"),
        ('{"debug": 1}', "debug is a truth value, not 1"),
        ('{"widths": [1, "4"]}', "widths is a list of whole numbers, not [1, '4']"),
        ('{"widths": []}', "a configuration without widths serves no step"),
        ('{"widths": [17]}', "17 tokens: a kernel takes 1 to 16"),
        ('{"kv_format": "fp4"}', "cache format 'fp4' is none of bf16, fp8"),
        ('{"index_topk_freq": 0}', "index_topk_freq 0: from 1 on"),
        ('{"index_topk_freq": 2, "reusing": [5]}', "and instead of reusing"),
        ('{"dims": {"hidden": 100}}', "hidden is a multiple of 128"),
        ('{"dims": {"width": 1}}', "dims has no field 'width'"),
        ('{"tp": 3}', "do not divide among 3 ranks"),
    ],
)
def test_a_deployment_that_is_none_is_one_sentence(tmp_path, capsys, given: str, said: str):
    path = tmp_path / "c.json"
    path.write_text(given)
    assert aot.main(["--config", str(path), "--list"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}: ")
    assert said in line


def test_what_a_deployment_does_not_name_has_its_default():
    assert config_of({}) == Config()
    assert config_of({"tp": 2, "eps": 1, "reusing": [5], "aux_layers": [1, 2]}) == Config(
        tp=2, eps=1.0, reusing=frozenset({5}), aux_layers=(1, 2)
    )
    assert config_of({"index_topk_freq": 4}) == Config().with_index_topk_freq(4)
