"""Worker processes that run one function over many tasks and survive what kills a worker.

Workers are forked: what the parent imported costs them nothing, and each lives for many tasks.
LLVM may abort the process it runs in, and the kernel may kill one that takes too much memory;
either costs the task at hand a retry in a new worker and no other task anything, and what it last
printed is part of the failure. A task that overruns its time is killed with its worker and not
tried again.

No worker outlives its parent, however the parent ends: the kernel is asked to kill it.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import IO, Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_FORK = multiprocessing.get_context("fork")
_PR_SET_PDEATHSIG = 1
_OUTPUT_LIMIT = 1 << 20


@dataclass(frozen=True)
class Failure:
    """Why a task has no result.

    kind: "raised", "died" (the worker ended) or "timeout". error: the exception's class name,
    or what became of the worker. detail: a traceback, or "".
    """

    kind: str
    error: str
    message: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.error}: {self.message}" if self.message else self.error


@dataclass(frozen=True)
class Done(Generic[T, R]):
    """A task and either its result or its failure. attempts: workers it took."""

    task: T
    result: R | None
    failure: Failure | None
    attempts: int


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    output: IO[bytes]
    entry: _Entry | None = None
    deadline: float = float("inf")
    served: int = 0
    told: int = 0  # bytes of its output passed on

    def pass_on_output(self) -> str:
        """Repeat on standard error what it printed since the last time, and return that."""
        # Not by reading the file object: its offset is the worker's too.
        data = os.pread(self.output.fileno(), _OUTPUT_LIMIT, self.told)
        self.told += len(data)
        text = data.decode(errors="replace")
        if text:
            print(text, end="", file=sys.stderr, flush=True)
        return text


@dataclass
class _Entry:
    task: Any
    attempts: int = 0


class WorkerPool(Generic[T, R]):
    """Run `function(task)` for many tasks in at most `workers` processes at once.

    timeout: seconds a task may take. retries: further attempts of a task whose worker died.
    tasks_per_worker: after how many tasks a worker is replaced; None for never.
    Use as a context manager: leaving it, by whatever way, leaves no process behind.
    """

    def __init__(
        self,
        function: Callable[[T], R],
        workers: int,
        *,
        timeout: float = float("inf"),
        retries: int = 0,
        tasks_per_worker: int | None = None,
    ) -> None:
        self._function = function
        self._limit = workers
        self._timeout = timeout
        self._retries = retries
        self._tasks_per_worker = tasks_per_worker
        self._workers: list[_Worker] = []

    def __enter__(self) -> WorkerPool[T, R]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers alive now."""
        return tuple(w.process.pid for w in self._workers if w.process.pid is not None)

    def run(self, tasks: Iterable[T]) -> Iterator[Done[T, R]]:
        """Yield each task as it is done, in no particular order; start them in the given one."""
        queue = deque(map(_Entry, tasks))
        while queue or any(worker.entry for worker in self._workers):
            self._assign(queue)
            busy = [worker for worker in self._workers if worker.entry]
            first = min(worker.deadline for worker in busy)
            patience = None if first == float("inf") else max(0.0, first - time.monotonic())
            ready = set(wait([worker.pipe for worker in busy], patience))
            for worker in busy:
                done = None
                if worker.pipe in ready:
                    done = self._receive(worker, queue)
                elif time.monotonic() >= worker.deadline:
                    done = self._overrun(worker)
                if done is not None:
                    yield done
        self._retire()

    def kill(self) -> None:
        """Kill every worker and whatever it started."""
        for worker in list(self._workers):
            self._end(worker)

    # ------------------------------------------------------------ workers

    def _assign(self, queue: deque[_Entry]) -> None:
        while queue:
            worker = next((w for w in self._workers if w.entry is None), None)
            if worker is None:
                if len(self._workers) >= self._limit:
                    return
                worker = self._start()
            entry = queue.popleft()
            entry.attempts += 1
            worker.entry = entry
            worker.deadline = time.monotonic() + self._timeout
            # A worker that died while idle shows when its pipe is read.
            with suppress(BrokenPipeError, ConnectionResetError):
                worker.pipe.send(entry.task)

    def _start(self) -> _Worker:
        mine, theirs = _FORK.Pipe()
        output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        process = _FORK.Process(
            target=_serve,
            args=(self._function, theirs, mine, output.fileno(), os.getpid()),
            daemon=True,
        )
        # Ctrl-C must find the child deaf from its first instruction, so it is held meanwhile.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
            worker = _Worker(process, mine, output)
            self._workers.append(worker)
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        return worker

    def _end(self, worker: _Worker) -> None:
        pid = worker.process.pid
        if pid is not None:
            # The worker's own process group: a linker it started goes with it.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        worker.process.join()
        worker.pass_on_output()
        worker.output.close()
        worker.pipe.close()
        self._workers.remove(worker)

    def _retire(self) -> None:
        """Let idle workers leave by themselves, so that their CPU time is accounted for."""
        for worker in list(self._workers):
            with suppress(BrokenPipeError, ConnectionResetError):
                worker.pipe.send(None)
        for worker in list(self._workers):
            worker.process.join(5)
            self._end(worker)

    # ------------------------------------------------------------ results

    def _receive(self, worker: _Worker, queue: deque[_Entry]) -> Done[T, R] | None:
        entry = worker.entry
        assert entry is not None
        try:
            result, failure = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            return self._died(worker, entry, queue)
        worker.pass_on_output()
        worker.entry = None
        worker.deadline = float("inf")
        worker.served += 1
        if worker.served == self._tasks_per_worker:
            with suppress(BrokenPipeError, ConnectionResetError):
                worker.pipe.send(None)
            worker.process.join(5)
            self._end(worker)
        return Done(entry.task, result, failure, entry.attempts)

    def _died(self, worker: _Worker, entry: _Entry, queue: deque[_Entry]) -> Done[T, R] | None:
        worker.process.join(5)
        code = worker.process.exitcode
        printed = worker.pass_on_output().strip().splitlines()
        self._end(worker)
        if entry.attempts <= self._retries:
            queue.appendleft(entry)
            return None
        how = f"was killed by {_signal_name(-code)}" if code and code < 0 else f"exited {code}"
        last_words = f"; it printed {printed[-1]!r}" if printed else ""
        failure = Failure(
            "died", f"the worker {how}", f"in each of {entry.attempts} attempts{last_words}"
        )
        return Done(entry.task, None, failure, entry.attempts)

    def _overrun(self, worker: _Worker) -> Done[T, R]:
        entry = worker.entry
        assert entry is not None
        self._end(worker)
        failure = Failure("timeout", "no result", f"within {self._timeout:g} s; killed")
        return Done(entry.task, None, failure, entry.attempts)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# ---------------------------------------------------------------- in a worker


def _serve(
    function: Callable[[Any], Any],
    pipe: Connection,
    parents_end: Connection,
    output: int,
    parent: int,
) -> None:
    parents_end.close()
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    # The parent repeats it on standard error: standard output belongs to the parent's result.
    os.dup2(output, 1)
    os.dup2(output, 2)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        if task is None:
            return
        pipe.send(_attempt(function, task))


def _attempt(function: Callable[[T], R], task: T) -> tuple[R | None, Failure | None]:
    try:
        return function(task), None
    except Exception as error:
        return None, failure_of(error)


def failure_of(error: BaseException) -> Failure:
    """A task's exception as text: it crosses processes whatever it holds."""
    detail = "".join(traceback.format_exception(error))
    return Failure("raised", type(error).__name__, str(error), detail)


def share_with_workers() -> None:
    """Prepare what is imported so far for workers to be forked from this process.

    Without it the first garbage collection in each worker would touch, and so copy, every page
    that holds an object.
    """
    gc.collect()
    gc.freeze()
