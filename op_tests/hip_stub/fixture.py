"""The fixture through which tests run functions against the stub driver."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from .build import StubError, build

_ROOT = Path(__file__).resolve().parents[2]


class ScenarioError(AssertionError):
    """A function raised, or its process died; the message has its traceback."""


class HipStub:
    """Runs functions in processes that have the stub for a driver."""

    def __init__(self, library: Path, cache: Path) -> None:
        ours, theirs = socket.socketpair()
        self._cache = cache
        self._server = subprocess.Popen(
            [sys.executable, "-m", "op_tests.hip_stub.server", str(library), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=_ROOT,
        )
        theirs.close()
        self._requests = Connection(ours.detach())

    def run(
        self,
        scenario: Callable[..., Any],
        *args: Any,
        environment: dict[str, str] | None = None,
        seconds: int = 60,
    ) -> Any:
        """What `scenario(driver, *args)` returns in a fresh process, on the target gfx950.

        `scenario` is a function of a module, its arguments and result can be pickled. The
        FlyDSL cache is shared by a session's runs unless `environment` names another.
        Raises ScenarioError.
        """
        variables = {"FLYDSL_RUNTIME_CACHE_DIR": str(self._cache), **(environment or {})}
        request = (scenario.__module__, scenario.__qualname__, args, variables, seconds)
        self._requests.send(request)
        status, answer = self._requests.recv()
        if answer is None:
            how = (
                f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
                if os.WIFSIGNALED(status)
                else f"exited with {os.WEXITSTATUS(status)}"
            )
            raise ScenarioError(f"{scenario.__qualname__}{args!r} {how}")
        good, result = answer
        if not good:
            raise ScenarioError(f"{scenario.__qualname__}{args!r} raised\n{result}")
        return result

    def close(self) -> None:
        """End the server."""
        self._requests.close()
        self._server.wait(timeout=30)


@pytest.fixture(scope="session")
def hip_stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HipStub]:
    """A `HipStub`; skips where gcc is missing, or torch needs the real driver."""
    import torch

    if torch.version.hip is not None:
        pytest.skip("the stub would take the place of the driver that this torch needs")
    folder = tmp_path_factory.mktemp("hip_stub")
    try:
        library = build(folder)
    except StubError as error:
        pytest.skip(str(error))
    stub = HipStub(library, folder / "cache")
    yield stub
    stub.close()
