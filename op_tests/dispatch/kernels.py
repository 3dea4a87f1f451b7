"""Launchers whose launches are worth recording; what their kernels compute does not matter."""

from __future__ import annotations

from dataclasses import dataclass

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.compiler.jit_function import JitFunction

from aiter.ops.flydsl.kernels.tensor_shim import kernel_builder


@dataclass(frozen=True)
class Key:
    factor: float = 2.0


# While there is an exception here, tracing `build_mixed`'s kernel raises it.
BREAKS: list[Exception] = []


@kernel_builder
def build_mixed(key: Key) -> JitFunction:
    """One kernel with every kind of plain argument, 256 bytes of LDS, and a grid (n, 2, 1)."""

    @flyc.kernel
    def mixed_kernel(out: fx.Int64, x: fx.Int64, n: fx.Int32, scale: fx.Float32):
        if BREAKS:
            raise BREAKS[0]
        fx.Float32(key.factor)

    @flyc.jit
    def launch_mixed(out: fx.Int64, x: fx.Int64, n: fx.Int32, scale: fx.Float32, stream: fx.Stream):
        mixed_kernel(out, x, n, scale).launch(
            grid=(n, 2, 1), block=(64, 1, 1), smem=256, stream=stream
        )

    return launch_mixed


@kernel_builder
def build_pair(key: Key) -> JitFunction:
    """Two kernels in one launch."""

    @flyc.kernel
    def first_kernel(x: fx.Int64):
        pass

    @flyc.kernel
    def second_kernel(x: fx.Int64, n: fx.Int32):
        pass

    @flyc.jit
    def launch_pair(x: fx.Int64, n: fx.Int32, stream: fx.Stream):
        first_kernel(x).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)
        second_kernel(x, n).launch(grid=(n, 1, 1), block=(128, 1, 1), stream=stream)

    return launch_pair


@kernel_builder
def build_trailing(key: Key) -> JitFunction:
    """A parameter behind the stream, with a default."""

    @flyc.kernel
    def trailing_kernel(x: fx.Int64, n: fx.Int32, cache_args: fx.Int64):
        pass

    @flyc.jit
    def launch_trailing(x: fx.Int64, n: fx.Int32, stream: fx.Stream, cache_args: fx.Int64 = 0):
        trailing_kernel(x, n, cache_args).launch(grid=(n, 1, 1), block=(64, 1, 1), stream=stream)

    return launch_trailing


def make_tensors() -> JitFunction:
    """A vector and a matrix as tensors; a launcher that no builder made."""

    @flyc.kernel
    def tensors_kernel(a: fx.Tensor, b: fx.Tensor, n: fx.Int32):
        pass

    @flyc.jit
    def launch_tensors(a: fx.Tensor, b: fx.Tensor, n: fx.Int32, stream: fx.Stream):
        tensors_kernel(a, b, n).launch(grid=(n, 1, 1), block=(64, 1, 1), stream=stream)

    return launch_tensors
