"""The public entry: environment, caching, unknown operations, statistics."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from op_tests.emulator import EmulationError, emulated, lowering

from . import sample_kernels as samples
from .snippets import module_text, run_module

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("before", [None, "gfx90a"])
def test_the_environment_is_restored(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before is None:
        monkeypatch.delenv("FLYDSL_GPU_ARCH", raising=False)
    else:
        monkeypatch.setenv("FLYDSL_GPU_ARCH", before)
    with emulated("gfx1250"):
        assert os.environ["FLYDSL_GPU_ARCH"] == "gfx1250"
    assert os.environ.get("FLYDSL_GPU_ARCH") == before


def test_the_target_may_be_any_object_with_a_gfx_name() -> None:
    class Target:
        gfx = "gfx942"

    with emulated(Target()) as emu:
        assert emu.arch == "gfx942"
    with pytest.raises(ValueError, match="gfx906"), emulated("gfx906"):
        pass


def test_a_launcher_is_lowered_once_for_each_arch(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[str] = []
    original = lowering._lower

    def counting(launcher, bound, bound_self, sig, arch):
        lowered.append(arch)
        return original(launcher, bound, bound_self, sig, arch)

    monkeypatch.setattr(lowering, "_lower", counting)
    launcher = samples.make_reverse(True)
    x, out = torch.arange(512, dtype=torch.int32), torch.zeros(512, dtype=torch.int32)
    for arch in ("gfx950", "gfx950", "gfx942"):
        with emulated(arch):
            launcher(out, x, 2, None)
            launcher(out, x, 1, None)
    assert lowered == ["gfx950", "gfx942"]


def test_another_flydsl_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "version", lambda name: "0.9.1")
    advice = "0.9.1 is installed; check .*lowering.py"
    with pytest.raises(RuntimeError, match=advice), emulated("gfx950"):
        pass


def test_an_unknown_operation_stops_with_its_name() -> None:
    body = """
      %c = llvm.mlir.constant(1 : i32) : i32
      %x = llvm.call_intrinsic "llvm.amdgcn.mystery"(%c) : (i32) -> i32"""
    with pytest.raises(EmulationError, match="llvm.amdgcn.mystery.*used in snippet"):
        run_module("gfx950", module_text(body, 1, 64), [torch.zeros(1)])


def test_unknown_inline_assembly_stops_with_its_text() -> None:
    body = """
      %c = llvm.mlir.constant(1 : i32) : i32
      %x = llvm.inline_asm "v_mystery $0, $1", "=v,v" %c : (i32) -> i32"""
    with pytest.raises(EmulationError, match="v_mystery"):
        run_module("gfx950", module_text(body, 1, 64), [torch.zeros(1)])


def test_statistics_count_what_a_kernel_did() -> None:
    x, out = torch.arange(1024, dtype=torch.int32), torch.zeros(1024, dtype=torch.int32)
    with emulated("gfx950", detailed_stats=True) as emu:
        samples.make_reverse(True)(out, x, 4, None)
    stats = emu.stats["reverse_0"]
    assert (stats.launches, stats.read_bytes, stats.write_bytes) == (1, 4096, 4096)
    assert (stats.lds_read_bytes, stats.lds_write_bytes) == (4096, 4096)
    assert stats.instructions["rocdl.s.barrier"] == 16  # 4 workgroups of 4 waves
    assert stats.instructions["llvm.load"] == 32
    assert stats.matrix == 0
    assert stats.conflicts == 0


def test_bank_conflicts_are_counted() -> None:
    """A stride of 32 words puts all 64 lanes into two of 64 banks: 32 words a bank."""
    body = """
      %tid = rocdl.workitem.id.x : i32
      %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
      %c32 = llvm.mlir.constant(32 : i32) : i32
      %at = llvm.mul %tid, %c32 : i32
      %to = llvm.getelementptr %lds[%at] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i32
      llvm.store %tid, %to : i32, !llvm.ptr<3>"""
    program = lowering.parse_program(module_text(body, 1, 64, lds=64 * 128), "gfx950", "host")
    with emulated("gfx950", detailed_stats=True) as emu:
        for _ in emu.program_rounds(program, [torch.zeros(1).numpy().astype("int64")]):
            pass
    assert emu.stats["snippet"].conflicts == 31


def test_the_fixture_and_the_option_print_statistics(tmp_path: Path) -> None:
    test = tmp_path / "test_sample.py"
    test.write_text("""
import torch
from op_tests.emulator_tests import sample_kernels as samples

def test_reverse(emulate):
    emulate("gfx950", order="random")
    x, out = torch.arange(256, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
    samples.make_reverse(True)(out, x, 1, None)
    assert torch.equal(out, x.flip(0))
""")
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "pytest", "-p", "op_tests.emulator.plugin"]
    command += ["--rootdir", str(tmp_path), "--emulator-stats", str(test)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "emulated kernels" in done.stdout
    assert "gfx950 reverse_0: 1 launches, read 1024 B, write 1024 B" in done.stdout


def test_launches_through_the_projects_choke_point_are_emulated() -> None:
    tensor_shim = pytest.importorskip("aiter.ops.flydsl.kernels.tensor_shim")
    launcher = tensor_shim.kernel_builder(samples.build_reverse)(samples.ReverseKey(128))
    x, out = torch.arange(256, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
    with emulated("gfx950"):
        tensor_shim._run_compiled(launcher, out, x, 2, None)
    assert torch.equal(out, x.view(2, 128).flip(1).reshape(-1))
