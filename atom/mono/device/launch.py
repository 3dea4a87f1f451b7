"""Launchers of persistent kernels."""

from __future__ import annotations

import inspect

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.compiler.kernel_function import KernelFunction

from atom.mono.plan.execution import THREADS


def persistent_kernel(symbol: str):
    """`@flyc.kernel` for a kernel of a persistent grid that profilers know as `symbol`."""
    return flyc.kernel(name=symbol, known_block_size=[THREADS, 1, 1])


def persistent_launcher(kernel: KernelFunction, symbol: str, blocks: int) -> flyc.JitFunction:
    """A launcher that starts `kernel` on `blocks` workgroups.

    It takes the kernel's parameters, then the stream, and is called `launch_<symbol>`, which is
    also the name of its folder in the cache.
    """

    def launch(**arguments):
        stream = arguments.pop("stream")
        kernel(**arguments).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)

    taken = inspect.signature(kernel._func, eval_str=True).parameters.values()
    stream = inspect.Parameter(
        "stream", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=fx.Stream
    )
    launcher = flyc.jit(launch)
    # A launcher's parameters are its kernel's; written out they would be a second list to keep.
    launcher.func.__signature__ = inspect.Signature([*taken, stream])
    launcher.func.__name__ = f"launch_{symbol}"
    return launcher
