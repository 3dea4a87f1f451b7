"""One target, resolved in one place, and pinned without leaving anything behind."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest
import torch

from aiter.jit.utils import chip_info
from aiter.jit.utils.chip_info import Target, TargetError, get_target, pinned


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("AITER_AOT_REPLAY", "GPU_ARCHS", "CU_NUM", "FLYDSL_GPU_ARCH", "ARCH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def device(no_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=80, name="AMD Instinct MI308X"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(chip_info, "_devices", {})


@pytest.mark.usefixtures("no_device")
class TestWithoutDevice:
    def test_there_is_no_default_architecture(self):
        with pytest.raises(TargetError, match="torch sees no GPU.*pinned"):
            get_target()

    def test_gpu_archs_counts_for_nothing_outside_a_replay(self, monkeypatch):
        monkeypatch.setenv("GPU_ARCHS", "gfx950")
        with pytest.raises(TargetError, match="no GPU"):
            get_target()

    def test_a_replay_takes_the_one_architecture_named(self, monkeypatch):
        monkeypatch.setenv("AITER_AOT_REPLAY", "1")
        monkeypatch.setenv("GPU_ARCHS", "gfx942")
        assert get_target() == Target("gfx942", 304)
        monkeypatch.setenv("CU_NUM", "80")
        assert get_target() == Target("gfx942", 80)
        assert chip_info.get_gfx() == chip_info.get_gfx_runtime() == "gfx942"
        assert chip_info.get_cu_num() == 80

    @pytest.mark.parametrize("archs", ["", "gfx942;gfx950", "native"])
    def test_a_replay_refuses_any_other_number_of_architectures(self, monkeypatch, archs):
        monkeypatch.setenv("AITER_AOT_REPLAY", "1")
        monkeypatch.setenv("GPU_ARCHS", archs)
        with pytest.raises(TargetError, match="exactly one architecture"):
            get_target()

    def test_a_replay_refuses_an_unknown_architecture(self, monkeypatch):
        monkeypatch.setenv("AITER_AOT_REPLAY", "1")
        monkeypatch.setenv("GPU_ARCHS", "gfx999")
        with pytest.raises(TargetError, match=r"gfx999.*known: .*gfx950"):
            get_target()

    def test_a_pin_wins_over_the_replay_environment_and_ends_with_its_block(self, monkeypatch):
        monkeypatch.setenv("AITER_AOT_REPLAY", "1")
        monkeypatch.setenv("GPU_ARCHS", "gfx942")
        monkeypatch.setenv("CU_NUM", "7")
        with pinned(Target("gfx950", 256)):
            assert get_target() == Target("gfx950", 256)
        assert get_target() == Target("gfx942", 7)

    def test_a_pin_aligns_flydsl_and_restores_its_variables_after_an_exception(self, monkeypatch):
        monkeypatch.setenv("ARCH", "gfx1201")
        with pytest.raises(RuntimeError), pinned(Target.of("gfx950")):
            assert os.environ["FLYDSL_GPU_ARCH"] == "gfx950"
            assert "ARCH" not in os.environ
            with pinned(Target.of("gfx1250")):
                assert os.environ["FLYDSL_GPU_ARCH"] == "gfx1250"
            assert os.environ["FLYDSL_GPU_ARCH"] == "gfx950"
            raise RuntimeError
        assert "FLYDSL_GPU_ARCH" not in os.environ
        assert os.environ["ARCH"] == "gfx1201"

    def test_flydsl_itself_sees_the_pinned_architecture(self):
        from flydsl.compiler.backends import get_backend
        from flydsl.runtime.device import get_rocm_arch

        for gfx, wave in (("gfx942", 64), ("gfx1250", 32)):
            with pinned(Target.of(gfx)):
                assert get_rocm_arch() == gfx
                assert get_backend().target.arch == gfx
                assert get_backend().target.warp_size == wave

    def test_pins_left_out_of_order_take_only_themselves_away(self):
        outer, inner = pinned(Target.of("gfx942")), pinned(Target.of("gfx950"))
        outer.__enter__()
        inner.__enter__()
        outer.__exit__(None, None, None)
        assert get_target().gfx == os.environ["FLYDSL_GPU_ARCH"] == "gfx950"
        inner.__exit__(None, None, None)
        assert "FLYDSL_GPU_ARCH" not in os.environ

    def test_a_pin_holds_in_threads_started_inside_it(self):
        seen = []
        with pinned(Target.of("gfx950")):
            thread = threading.Thread(target=lambda: seen.append(get_target().gfx))
            thread.start()
            thread.join()
        assert seen == ["gfx950"]


@pytest.mark.usefixtures("device")
class TestWithDevice:
    def test_the_device_is_the_target_whatever_gpu_archs_says(self, monkeypatch):
        monkeypatch.setenv("GPU_ARCHS", "gfx950")
        assert get_target() == Target("gfx942", 80, "AMD Instinct MI308X")

    def test_cu_num_overrides_the_devices_compute_units(self, monkeypatch):
        monkeypatch.setenv("CU_NUM", "304")
        assert get_target() == Target("gfx942", 304, "AMD Instinct MI308X")

    def test_a_replay_never_looks_at_the_device(self, monkeypatch):
        monkeypatch.setenv("AITER_AOT_REPLAY", "1")
        monkeypatch.setenv("GPU_ARCHS", "gfx950")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("looked"))
        assert get_target() == Target("gfx950", 256)

    def test_a_device_that_is_not_amds_is_refused(self, monkeypatch):
        properties = SimpleNamespace(multi_processor_count=132, name="H100")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        with pytest.raises(TargetError, match="H100.*not a ROCm build"):
            get_target()


def test_targets_are_checked_values():
    with pytest.raises(TargetError, match="gfx950"):
        Target("MI355X", 256)
    with pytest.raises(TargetError, match="at least one compute unit"):
        Target("gfx950", 0)


def test_old_tables_tell_the_architecture_by_compute_units():
    assert [chip_info.gfx_from_cu_num(n) for n in (80, 304, 256)] == ["gfx942", "gfx942", "gfx950"]
    with pytest.raises(TargetError, match="120 compute units"):
        chip_info.gfx_from_cu_num(120)
