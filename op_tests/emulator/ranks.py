"""Several ranks at once: host functions in turns, their kernels interleaved round by round."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np


class _Rank:
    """One host function in a thread of its own; threads run strictly one at a time."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.steps: Iterator | None = None
        self.result: object = None
        self.error: BaseException | None = None
        self.failure: BaseException | None = None  # to be raised where the rank launched
        self.done = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        context = contextvars.copy_context()
        body = lambda: context.run(self._body, function)
        self._thread = threading.Thread(target=body, daemon=True)
        self._thread.start()

    def _body(self, function: Callable[[], object]) -> None:
        self._go.acquire()
        try:
            if self.failure is None:
                self.result = function()
        except BaseException as error:
            self.error = error
        self.done = True
        self._back.release()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def resume(self) -> None:
        """Let the host function run until it launches a kernel or ends."""
        self._go.release()
        self._back.acquire()

    def drive(self, steps: Iterator) -> None:
        """Called by the host function's thread: have ``steps`` run to their end."""
        self.steps = steps
        self._back.release()
        self._go.acquire()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure


class Ranks:
    """Fair turns: every rank either runs host code up to a launch or gets one round of its grid."""

    def __init__(self, functions: Sequence[Callable[[], object]], seed: int | None) -> None:
        self._ranks = [_Rank(f) for f in functions]
        self._rng = None if seed is None else np.random.default_rng(seed)

    def current(self) -> _Rank | None:
        """The rank whose thread asks, if any."""
        return next((r for r in self._ranks if r.is_current), None)

    def run(self) -> list[object]:
        """Results in rank order; the first error of a rank is raised after all have stopped."""
        try:
            while alive := [r for r in self._ranks if not r.done]:
                if self._rng is not None:
                    self._rng.shuffle(alive)
                for rank in alive:
                    self._turn(rank)
                    if rank.error is not None:
                        raise rank.error
        finally:
            for rank in self._ranks:
                while not rank.done:
                    rank.failure = RuntimeError("another rank failed")
                    rank.resume()
        return [r.result for r in self._ranks]

    def _turn(self, rank: _Rank) -> None:
        if rank.steps is not None:
            try:
                next(rank.steps)
                return
            except StopIteration:
                rank.steps = None
            except Exception as error:
                rank.steps, rank.failure = None, error
        rank.resume()
