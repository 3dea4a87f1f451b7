"""Small kernels in the project's launcher ABI, for tests that need something to compile."""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx

from aiter.ops.flydsl.kernels.device import shared_bytes


def _f32_at(address: fx.Int64) -> fx.Pointer:
    pointer = fx.PointerType.get(
        fx.Float32.ir_type, address_space=fx.AddressSpace.Global, alignment=4
    )
    return fx.inttoptr(pointer, address)


def make_scale(factor: float) -> flyc.JitFunction:
    """``out[0] = factor * x[0]``; another factor is other code under the same name."""

    @flyc.kernel
    def scale_kernel(out: fx.Int64, x: fx.Int64):
        view = lambda address: fx.make_view(_f32_at(address), fx.make_layout(1, 1))
        view(out)[0] = view(x)[0] * fx.Float32(factor)

    @flyc.jit
    def launch_scale(out: fx.Int64, x: fx.Int64, n: fx.Int32, stream: fx.Stream):
        scale_kernel(out, x).launch(grid=(n, 1, 1), block=(64, 1, 1), stream=stream)

    return launch_scale


def make_device_library() -> flyc.JitFunction:
    """``out[0] = erf(x[0])``: erf has no instruction, so it is a call into ROCm's ocml."""

    @flyc.kernel
    def erf_kernel(out: fx.Int64, x: fx.Int64):
        view = lambda address: fx.make_view(_f32_at(address), fx.make_layout(1, 1))
        view(out)[0] = fx.math.erf(view(x)[0])

    @flyc.jit
    def launch_erf(out: fx.Int64, x: fx.Int64, stream: fx.Stream):
        erf_kernel(out, x).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    return launch_erf


def make_failing() -> flyc.JitFunction:
    """Raises ZeroDivisionError while it is traced, inside a kernel."""

    @flyc.kernel
    def failing_kernel(out: fx.Int64):
        1 // 0  # noqa: B018

    @flyc.jit
    def launch_failing(out: fx.Int64, stream: fx.Stream):
        failing_kernel(out).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    return launch_failing


def make_hungry(lds_bytes: int) -> flyc.JitFunction:
    """Takes that much LDS, and uses it."""

    @flyc.kernel
    def hungry_kernel(out: fx.Int64):
        words = fx.recast_iter(fx.Float32, shared_bytes(lds_bytes))
        lane = fx.Int32(fx.thread_idx.x)
        words[lane] = fx.Float32(2.0)
        fx.gpu.barrier()
        fx.make_view(_f32_at(out), fx.make_layout(64, 1))[lane] = words[lane ^ 1]

    @flyc.jit
    def launch_hungry(out: fx.Int64, stream: fx.Stream):
        hungry_kernel(out).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    return launch_hungry
