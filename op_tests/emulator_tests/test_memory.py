"""Wild accesses are errors that say where; buffers behave as the hardware's."""

from __future__ import annotations

import pytest
import torch

from op_tests.emulator import EmulationError, emulated

from . import sample_kernels as samples

pytestmark = pytest.mark.emulated


def _words(count: int) -> torch.Tensor:
    return torch.arange(1, count + 1, dtype=torch.int32)


def test_a_store_past_a_tensor_names_kernel_line_workgroup_wave_and_lane() -> None:
    x, out = _words(512), torch.zeros(400, dtype=torch.int32)
    with emulated("gfx950"), pytest.raises(EmulationError) as caught:
        samples.make_reverse(True)(out, x, 2, None)
    text = str(caught.value)
    assert text.startswith("reverse_0: llvm.store: store of 4 bytes")
    assert "past the end of tensor (400,) int32 (1600 bytes)" in text
    assert "workgroup (1, 0, 0), wave 2, lane 16" in text
    assert "sample_kernels.py" in text


def test_an_unregistered_tensor_may_not_be_read() -> None:
    x, out = _words(256), torch.zeros(256, dtype=torch.int32)
    with emulated("gfx950") as emu:
        launcher = samples.make_reverse(True)
        with pytest.raises(EmulationError, match="llvm.load.*outside every tensor"):
            launcher(out, x.data_ptr(), 1, None)
        emu.register(x)
        launcher(out, x.data_ptr(), 1, None)
    assert torch.equal(out, x.flip(0))


def test_lds_beyond_the_allocation_is_an_error() -> None:
    x, out = _words(256), torch.zeros(256, dtype=torch.int32)
    short = samples.make_reverse(True, lds_words=200)
    with emulated("gfx950"), pytest.raises(EmulationError, match="LDS byte 800 of 800") as caught:
        short(out, x, 1, None)
    assert "wave 3, lane 8" in str(caught.value)


def test_a_buffer_reads_zero_and_drops_stores_beyond_its_end() -> None:
    x, out = _words(64), torch.full((64,), -1, dtype=torch.int32)
    with emulated("gfx950"):
        samples.make_buffer_copy(40)(out, x, None)
    assert out[:10].tolist() == x[:10].tolist()
    assert out[10:].eq(-1).all()


def test_a_buffer_larger_than_its_tensor_is_an_error() -> None:
    x, out = _words(32), torch.zeros(64, dtype=torch.int32)
    with emulated("gfx950"), pytest.raises(EmulationError, match="past the end of tensor"):
        samples.make_buffer_copy(256)(out, x, None)


@pytest.mark.parametrize("order", ["lockstep", "random"])
def test_poison_reports_lds_that_nothing_wrote(order: str) -> None:
    x, out = _words(256), torch.zeros(256, dtype=torch.int32)
    with emulated("gfx950", poison=True, order=order) as emu:
        samples.make_reverse(True)(out, x, 1, None)
    assert torch.equal(out, x.flip(0))
    with emulated("gfx950", poison=True, order="random") as emu:
        emu.register(x)
        with pytest.raises(EmulationError, match="that nothing wrote"):
            samples.make_reverse(False)(out, x, 1, None)


def test_poison_reports_scratch_tensors_read_before_written() -> None:
    x, out = _words(256), torch.zeros(256, dtype=torch.int32)
    with emulated("gfx950", poison=True) as emu:
        emu.register(x, scratch=True)
        with pytest.raises(EmulationError, match="that nothing wrote"):
            samples.make_reverse(True)(out, x, 1, None)
        samples.make_reverse(True)(x, out, 1, None)
        samples.make_reverse(True)(out, x, 1, None)


def test_launch_arguments_are_released_after_the_launch() -> None:
    x, out = _words(256), torch.zeros(256, dtype=torch.int32)
    with emulated("gfx950") as emu:
        launcher = samples.make_reverse(True)
        launcher(out, x, 1, None)
        with pytest.raises(EmulationError, match="outside every tensor"):
            launcher(out, x.data_ptr(), 1, None)
        assert emu.stats["reverse_0"].launches == 2
