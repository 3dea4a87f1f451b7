"""The context in which the runtime is replayed on a host with no GPU.

Tensors are fake and claim to be on `cuda:0`; the target is pinned; every kernel launch is written
down instead of made; whatever else would reach a GPU raises. All of it ends with the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from flydsl.compiler import jit_executor
from flydsl.compiler.jit_function import JitFunction
from torch._subclasses.fake_tensor import FakeTensorMode

from aiter import env
from aiter.jit.utils.chip_info import Target, pinned
from aiter.jit.utils.host_scalars import run_host_scalar_ops_for_real
from aiter.ops.flydsl.kernels.tensor_shim import Launch, intercepted, launch_of

# FakeTensorMode lets fake tensors be on it without any CUDA; the runtime sees a GPU's tensors.
DEVICE = torch.device("cuda", 0)


class DryRunError(RuntimeError):
    """Something under replay reached for a GPU."""


class Recorder:
    """The launches made since the last :meth:`take`, each counted once, in order."""

    def __init__(self) -> None:
        self._launches: dict[JitFunction, Launch] = {}
        self._seen: dict[Launch, None] = {}

    def __call__(self, launcher: JitFunction, args: tuple[Any, ...]) -> None:
        launch = self._launches.get(launcher)
        if launch is None:
            launch = self._launches[launcher] = launch_of(launcher)
        self._seen[launch] = None

    def take(self) -> tuple[Launch, ...]:
        """What was recorded; begins anew."""
        launches = tuple(self._seen)
        self._seen.clear()
        return launches


class _Stream:
    """Stands in for the current stream: a null handle, and nothing to wait for."""

    cuda_stream = 0

    def synchronize(self) -> None:
        """There is nothing on it."""


def preload() -> None:
    """Import what the first FakeTensorMode of a process imports: as much again as torch."""
    FakeTensorMode()


@contextmanager
def dry_run(target: Target) -> Iterator[Recorder]:
    """Replay for `target` until exit; the recorder receives every launch.

    Within, a tensor that is not fake is refused, so that no real memory is read or written, and
    CUDA's initialisation and FlyDSL's execution engine raise DryRunError. Every patch is
    undone on any exit.
    """
    recorder = Recorder()
    with ExitStack() as stack:
        stack.enter_context(pinned(target))
        stack.enter_context(env.overlay({env.COMPILE_ONLY.name: "1"}))
        stream = _Stream()
        patches: list[tuple[Any, str, Callable[..., Any]]] = [
            (torch.cuda, "_lazy_init", _forbidden("CUDA's initialisation")),
            (torch.cuda, "current_stream", lambda device=None: stream),
            (torch.cuda, "current_device", lambda: DEVICE.index),
            (torch.cuda, "synchronize", lambda device=None: None),
            (jit_executor, "ExecutionEngine", _forbidden("FlyDSL's execution engine")),
        ]
        for owner, name, stand_in in patches:
            stack.enter_context(_patched(owner, name, stand_in))
        stack.enter_context(run_host_scalar_ops_for_real())
        stack.enter_context(intercepted(recorder))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=False))
        yield recorder


@contextmanager
def _patched(owner: Any, name: str, value: object) -> Iterator[None]:
    saved = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, saved)


def _forbidden(what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise DryRunError(f"{what} was reached in a dry run, which must not touch a GPU")

    return refuse
