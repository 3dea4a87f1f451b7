"""Launchers of persistent kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

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

    taken = inspect.signature(kernel._func, eval_str=True).parameters
    types = {name: parameter.annotation for name, parameter in taken.items()}
    return launcher_of(launch, f"launch_{symbol}", types)


def launcher_of(
    launch: Callable[..., None], name: str, types: Mapping[str, type]
) -> flyc.JitFunction:
    """`launch(**arguments)` as a launcher `name` with parameters of `types`, then the stream.

    For parameters that are declared elsewhere: written out they would be a second list to keep.
    """
    launcher = flyc.jit(launch)
    launcher.func.__name__ = name
    launcher.func.__signature__ = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
            for name, kind in {**types, "stream": fx.Stream}.items()
        ]
    )
    return launcher
