"""Runs test functions in processes that have the stub driver: python -m op_tests.hip_stub.server.

Importing torch and FlyDSL takes seconds, so one server imports them, stub first, and forks for
each function. A request is (module, function, args, environment, seconds); the answer is
(exit status as `os.waitpid` gives it, True and the result or False and a traceback, or None when
the process died).
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .driver import Driver


def main(library: str, descriptor: str) -> None:
    driver = Driver(Path(library))
    importlib.import_module("pytest")
    importlib.import_module("aiter.ops.flydsl.kernels.tensor_shim")
    requests = Connection(int(descriptor))
    while True:
        try:
            request = requests.recv()
        except EOFError:
            return
        requests.send(_forked(driver, request))


def _forked(driver: Driver, request: tuple[Any, ...]) -> tuple[int, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _child(driver, request, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return status, pickle.loads(answer) if answer else None


def _child(driver: Driver, request: tuple[Any, ...], writer: int) -> None:
    from aiter.jit.utils.chip_info import Target, pinned

    module, function, args, environment, seconds = request
    signal.alarm(seconds)
    os.environ.update(environment)
    try:
        scenario = getattr(importlib.import_module(module), function)
        with pinned(Target.of("gfx950")):
            answer = pickle.dumps((True, scenario(driver, *args)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(answer)
    # Past the interpreter's shutdown, which belongs to the server.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
