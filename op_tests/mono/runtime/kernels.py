"""Small launchers in the style of the layer kernels: addresses, integers, bit patterns, stream."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.compiler.jit_function import JitFunction
from flydsl.compiler.kernel_function import KernelFunction

from aiter.ops.flydsl.kernels.device import global_pointer, shared_bytes
from aiter.ops.flydsl.kernels.tensor_shim import kernel_builder
from atom.mono.plan.trace import enter_stage, note
from atom.mono.runtime.abi import KernelAbi
from atom.mono.runtime.compile import LDS_BYTES

COPY_ABI = KernelAbi(("out", "x", "rows"))


@dataclass(frozen=True)
class CopyKey:
    """`factor` is in the code, so that two keys are two binaries."""

    factor: int = 2
    threads: int = 64


@kernel_builder
def build_copy(key: CopyKey) -> JitFunction:
    """out[i] = x[i] * factor for i32, one workgroup of 64 lanes a row."""

    @flyc.kernel
    def copy_kernel(out: fx.Int64, x: fx.Int64, rows: fx.Int32):
        enter_stage("copy")
        note("out", "scratch", "push")
        at = fx.Int32(fx.block_idx.x) * key.threads + fx.Int32(fx.thread_idx.x)
        value = global_pointer(fx.Int32, x)[at]
        global_pointer(fx.Int32, out)[at] = value * key.factor

    @flyc.jit
    def launch_copy(out: fx.Int64, x: fx.Int64, rows: fx.Int32, stream: fx.Stream):
        copy_kernel(out, x, rows).launch(
            grid=(rows, 1, 1), block=(key.threads, 1, 1), stream=stream
        )

    return launch_copy


SPILL_ABI = KernelAbi(("out", "index"))


@kernel_builder
def build_spilling(key: CopyKey) -> JitFunction:
    """A kernel that needs scratch: it indexes register memory by a value of the device."""

    @flyc.kernel
    def spilling_kernel(out: fx.Int64, index: fx.Int32):
        enter_stage("spill")
        words = fx.make_rmem_tensor(64, fx.Int32)
        for i in range(fx.Int32(0), fx.Int32(64), fx.Int32(1)):
            words[fx.Int32(i)] = fx.Int32(i) * key.factor + index
        global_pointer(fx.Int32, out)[index] = words[index]

    @flyc.jit
    def launch_spilling(out: fx.Int64, index: fx.Int32, stream: fx.Stream):
        spilling_kernel(out, index).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    return launch_spilling


@kernel_builder
def build_hungry(key: CopyKey) -> JitFunction:
    """A kernel that needs more LDS than there is."""

    @flyc.kernel
    def hungry_kernel(out: fx.Int64, index: fx.Int32):
        words = fx.recast_iter(fx.Int32, shared_bytes(LDS_BYTES + 1024))
        words[index] = index * key.factor
        fx.gpu.barrier()
        global_pointer(fx.Int32, out)[index] = words[index + 1]

    @flyc.jit
    def launch_hungry(out: fx.Int64, index: fx.Int32, stream: fx.Stream):
        hungry_kernel(out, index).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    return launch_hungry


def kernel_in(launcher: JitFunction) -> KernelFunction:
    """The one kernel that `launcher` starts."""
    found = inspect.getclosurevars(launcher.func).nonlocals.values()
    (kernel,) = (value for value in found if isinstance(value, KernelFunction))
    return kernel
