"""What the command line, the engine and a package build share. Imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from aiter import env

# Every way a ROCm or CUDA runtime can be kept from seeing a device.
_HIDE_GPUS = dict.fromkeys(
    ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), "-1"
)


class UsageError(Exception):
    """The build cannot start: one sentence naming file, line and remedy. Exit code 2."""


class BuildError(RuntimeError):
    """The build began and something of it failed. Exit code 1."""


class OpKind(Enum):
    """A family of operators that is built ahead of time; the value is its command-line module."""

    MOE = "aiter.aot.flydsl.moe"


@dataclass(frozen=True)
class LaunchRequest:
    """A launch to build for `gfx` and the table rows, file:line, that ask for it.

    `launch` is a `tensor_shim.Launch`; this module must not import its class.
    """

    gfx: str
    launch: object
    rows: tuple[str, ...]


def replay_env(gfx: str) -> dict[str, str]:
    """Variables of the process that replays `gfx`: the target comes from here, not the machine."""
    return {env.GPU_ARCHS.name: gfx, env.AITER_AOT_REPLAY.name: "1", **_HIDE_GPUS}


def prepare_process() -> None:
    """Make this process one that workers can be forked from, before it imports torch.

    No GPU is seen, and numpy starts no threads, which a fork would lose.
    """
    os.environ.update(_HIDE_GPUS)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def run_aot(cache_dir: Path | str) -> None:
    """Build every kind's shipped tables into `cache_dir`, for a package build to call.

    GPU_ARCHS names the architectures, AITER_MAX_JOBS the number of workers. Each kind runs in a
    process of its own, so that the caller's stays as it was; its log goes to this one's output.
    Raises BuildError.
    """
    for kind in OpKind:
        command = [sys.executable, "-m", kind.value, "--cache-dir", str(cache_dir)]
        code = subprocess.run(command, check=False).returncode
        if code:
            raise BuildError(f"{' '.join(command)} exited {code}; its log says why")
