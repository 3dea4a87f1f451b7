"""A runner made on the first step that wants one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from aiter import env

from .consensus import MonoUnsupported
from .stream import capturing

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What a route needs of a runner."""

    def prepare(self, rows: int) -> bool:
        """Whether width `rows` can run, after compiling it if need be. Collective."""
        ...

    def warm(self, rows: int) -> bool:
        """Whether a step of width `rows` has run, so that the next compiles and loads nothing."""
        ...


R = TypeVar("R", bound=Runner)


class LazyRunner(Generic[R]):
    """Says step by step whether the mono path is taken, and makes its runner when it first is.

    Weights are bound and memory is allocated after the model is loaded, and never while a graph
    is captured: then only what has already run once is taken. `what` names the path in the log.
    """

    def __init__(self, create: Callable[[], R], what: str) -> None:
        self._create, self._what = create, what
        self._runner: R | None = None
        self._enabled = env.ATOM_MONO_ENABLE.get()
        self._lock = threading.Lock()
        if not self._enabled:
            logger.info("%s is not used: %s is 0", what, env.ATOM_MONO_ENABLE.name)

    @property
    def enabled(self) -> bool:
        """False for good with ATOM_MONO_ENABLE=0, and once making the runner was refused or
        failed."""
        return self._enabled

    @property
    def runner(self) -> R:
        """The runner. Raises MonoUnsupported before `ready` has made it."""
        if self._runner is None:
            raise MonoUnsupported(f"{self._what}: there is no runner")
        return self._runner

    def ready(self, rows: int) -> bool:
        """Whether a step of `rows` rows can take the mono path now.

        Makes the runner, once, and prepares the width. Raises what making the runner raises other
        than MonoUnsupported, which is logged.
        """
        if not self._enabled:
            return False
        if capturing():
            return self._runner is not None and self._runner.warm(rows)
        with self._lock:
            if self._runner is None and self._enabled:
                self._make()
        return self._runner is not None and self._runner.prepare(rows)

    def _make(self) -> None:
        self._enabled = False
        try:
            self._runner = self._create()
        except MonoUnsupported as refusal:
            logger.warning("%s is not used: %s", self._what, refusal)
            return
        self._enabled = True
