"""Every launch of `atom` and `aiter` goes through `_run_compiled`, positional, stream included."""

from __future__ import annotations

from pathlib import Path

import pytest

from op_tests.mono.runtime.launch_sites import launch_sites, run_compiled_calls

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("folder", ["atom", "aiter"])
def test_nothing_starts_a_kernel_by_another_way(folder: str):
    assert [str(site) for site in launch_sites(ROOT, [folder])] == []


def test_the_launches_of_mono_are_where_they_are_expected():
    files = [site.file for site in run_compiled_calls(ROOT, ["atom"])]
    execution = "atom/mono/models/minimax_m3/execution.py"
    assert files == [execution] * 3 + ["atom/mono/runtime/step_begin.py"]


BUILDERS = """
@kernel_builder
def build_scale(key):
    @flyc.jit
    def launch_scale(x: fx.Int64, stream: fx.Stream):
        scale_kernel(x).launch(grid=(1, 1, 1), stream=stream)
    return launch_scale

@dataclass
class Builders:
    scale: Callable[[Key], JitFunction]
"""


def _found(tmp_path: Path, code: str) -> list[str]:
    for name, text in (("a", BUILDERS), ("b", code)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "m.py").write_text(text)
    sites = launch_sites(tmp_path, ["a", "b"])
    assert {site.file for site in sites} <= {"b/m.py"}
    return [site.what for site in sites]


@pytest.mark.parametrize(
    "code",
    [
        "build_scale(key)(1, None)",
        "builders.scale(key)(1, None)",
        "go = build_scale(key)\ngo(1, None)",
        "self.go = builders.scale(key)\ndef f(self):\n    self.go(1, stream=None)",
        "@dataclass\nclass K:\n    pre: JitFunction | None\ndef f(kernels):\n    kernels.pre(1)",
        "def f(pre: JitFunction):\n    pre(1)",
        "def f(launcher, args):\n    launcher(*args)",
        "flyc.compile(go, 1, None)",
        "_run_compiled(go, 1, stream=stream)",
        "_run_compiled(go, 1, 2)",
    ],
)
def test_each_other_way_is_found(tmp_path: Path, code: str):
    assert len(_found(tmp_path, code)) == 1


@pytest.mark.parametrize(
    "code",
    [
        "_run_compiled(build_scale(key), 1, None)",
        "_run_compiled(kernels.pre, *order(bound + fresh), stream)",
        "_run_compiled(launcher, *args)",
        "_run_compiled(launcher, *pack, stream, cache_args)",
        "go = build_scale(key)\ncompile_artifact(go)",
        "flyc.compile[hints](go)",
    ],
)
def test_what_is_no_direct_launch_is_not_reported(tmp_path: Path, code: str):
    assert _found(tmp_path, code) == []
