"""The environment registry: parsing, errors, and changes that undo themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aiter import env


def test_unset_and_empty_give_the_default():
    assert env.AITER_MAX_JOBS.get({}) is None
    assert env.AITER_MAX_JOBS.get({"AITER_MAX_JOBS": "  "}) is None
    assert env.AITER_FLYDSL_FORCE.get({}) is True
    assert env.GPU_ARCHS.get({}) == ()


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("Yes", True), ("on", True), ("0", False), ("FALSE", False)]
)
def test_flags_accept_the_usual_words(text: str, value: bool):
    assert env.AITER_AOT_REPLAY.get({"AITER_AOT_REPLAY": text}) is value


def test_lists_split_and_drop_blanks():
    assert env.GPU_ARCHS.get({"GPU_ARCHS": "gfx942; gfx950,"}) == ("gfx942", "gfx950")
    assert env.AITER_CONFIG_FMOE.get({"AITER_CONFIG_FMOE": "/a.csv:/b,c.csv"}) == (
        "/a.csv",
        "/b,c.csv",
    )


def test_paths_expand_the_home_folder():
    assert env.ROCM_PATH.get({"ROCM_PATH": "~/rocm"}) == Path.home() / "rocm"


def test_without_a_home_folder_only_what_needs_one_fails(monkeypatch: pytest.MonkeyPatch):
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    given = {"FLYDSL_RUNTIME_CACHE_DIR": "/c"}
    assert env.FLYDSL_RUNTIME_CACHE_DIR.get(given) == Path("/c")
    with pytest.raises(env.EnvError, match="XDG_CACHE_HOME is not set, and has no default here"):
        env.XDG_CACHE_HOME.get(given)
    row = {line.split()[0]: line for line in env.render_table(given).splitlines()}
    assert "none here" in row["XDG_CACHE_HOME"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("AITER_MAX_JOBS", "two"),
        ("AITER_MAX_JOBS", "0"),
        ("AITER_FLYDSL_AOT_MAX_RETRIES", "-1"),
        ("AITER_FLYDSL_AOT_TIMEOUT", "nan"),
        ("AITER_AOT_REPLAY", "maybe"),
    ],
)
def test_a_bad_value_names_the_variable_the_value_and_what_is_wanted(name: str, text: str):
    variable = env.REGISTRY[name]
    with pytest.raises(env.EnvError) as error:
        variable.get({name: text})
    assert name in str(error.value)
    assert text in str(error.value)
    assert variable.kind in str(error.value)


def test_the_table_shows_every_variable_once_and_survives_bad_values():
    table = env.render_table({"CU_NUM": "many", "GPU_ARCHS": "gfx950"}).splitlines()
    assert [line.split()[0] for line in table[1:]] == list(env.REGISTRY)
    row = {line.split()[0]: line for line in table}
    assert "INVALID" in row["CU_NUM"]
    assert "gfx950" in row["GPU_ARCHS"]
    assert " env " in row["GPU_ARCHS"]
    assert " default " in row["AITER_MAX_JOBS"]


def test_code_values_are_those_that_change_code():
    values = env.code_values({"AITER_SITUV2_A8W4": "1", "AITER_MAX_JOBS": "3"})
    assert values["AITER_SITUV2_A8W4"] == "1"
    assert "AITER_MAX_JOBS" not in values


def test_a_variable_cannot_be_declared_twice():
    with pytest.raises(ValueError, match="declared twice"):
        env._declare(env.CU_NUM)


def test_overlay_restores_set_and_unset_variables_after_an_exception(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("CU_NUM", "80")
    monkeypatch.delenv("ARCH", raising=False)
    monkeypatch.setenv("ROCM_PATH", "/a")
    with (
        pytest.raises(RuntimeError),
        env.overlay({"CU_NUM": None, "ARCH": "gfx950", "ROCM_PATH": "/b"}),
    ):
        assert "CU_NUM" not in os.environ
        assert os.environ["ARCH"] == "gfx950"
        raise RuntimeError
    assert os.environ["CU_NUM"] == "80"
    assert "ARCH" not in os.environ
    assert os.environ["ROCM_PATH"] == "/a"


def _python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)


def test_importing_aiter_and_its_configuration_loads_neither_torch_nor_flydsl():
    code = (
        "import sys, aiter, aiter.jit.core, aiter.jit.utils.toolkit, aiter.jit.utils.chip_info\n"
        "import aiter.ops.flydsl.kernel_names\n"
        "aiter.AITER_CONFIGS, aiter.Target, aiter.ActivationType\n"
        "sys.exit([m for m in ('torch', 'flydsl', 'numpy', 'pandas') if m in sys.modules] or 0)"
    )
    run = _python(code)
    assert run.returncode == 0, run.stderr


def test_an_aot_import_refuses_names_that_load_more():
    run = _python("import aiter; aiter.AITER_CONFIGS; aiter.dtypes", AITER_AOT_IMPORT="1")
    assert run.returncode != 0
    assert "import aiter.utility.dtypes itself" in run.stderr


def test_unknown_attributes_of_aiter_are_attribute_errors():
    import aiter

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = aiter.nothing
    assert "fused_moe" in dir(aiter)
