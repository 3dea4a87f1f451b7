"""Compiling launchers without dispatch, tracing them, and what their binaries take.

Everything here works on the JIT objects that the builders returned. They stay the launchers for
good: what `_run_compiled` retains for dispatch hangs on the same object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from flydsl.compiler.jit_function import JitFunction

from aiter import env
from aiter.jit.utils.chip_info import GFX_LDS_BYTES
from aiter.ops.flydsl.kernels.resources import KernelResources, launcher_resources
from aiter.ops.flydsl.kernels.tensor_shim import artifact_of, compile_artifact
from atom.mono.plan.check import RegionDecl, check
from atom.mono.plan.trace import Record, recording

from .abi import KernelAbi
from .deployment import ARCHS

__all__ = [
    "KernelResources",
    "check_traced",
    "compile_kernels",
    "compile_only",
    "launcher_resources",
    "residency_problems",
    "scratch_bytes",
    "trace",
]

LDS_BYTES = min(GFX_LDS_BYTES[gfx] for gfx in ARCHS)
Pairs = Iterable[tuple[JitFunction, KernelAbi]]


@contextmanager
def compile_only() -> Iterator[None]:
    """Until exit no launch of this process starts anything, on any thread: COMPILE_ONLY is set."""
    with env.overlay({env.COMPILE_ONLY.name: "1"}):
        yield


def compile_kernels(pairs: Pairs) -> list[JitFunction]:
    """Compile each launcher, or find it in the cache; launch and load nothing.

    Meanwhile launches on other threads start nothing either, because `compile_artifact` sets
    COMPILE_ONLY for the whole process: prepare between steps, not beside them.

    Raises TypeError for a launcher whose parameters are not those of its ABI, and what compiling
    raises. Returns the launchers.
    """
    launchers = []
    for launcher, abi in pairs:
        abi.check_launcher(launcher)
        compile_artifact(launcher)
        launchers.append(launcher)
    return launchers


def scratch_bytes(launcher: JitFunction) -> int:
    """Private memory a lane of the launcher's most demanding kernel needs, in bytes.

    Raises RuntimeError, never answers 0, for a launcher whose binary cannot be read.
    """
    return max(kernel.scratch_bytes for kernel in launcher_resources(launcher))


def residency_problems(launcher: JitFunction) -> list[str]:
    """Why not all workgroups of the launcher's kernels would be resident at once, a line each.

    A device that runs out of scratch starts part of a grid, and the part that runs waits for the
    rest forever. More LDS than a compute unit has is found out at the launch: the compiler prints
    an error and makes a binary all the same. Raises RuntimeError as `scratch_bytes` does.
    """
    name, lds = launcher.func.__name__, max(k.lds_bytes for k in launcher_resources(launcher))
    found = []
    if scratch := scratch_bytes(launcher):
        found.append(f"{name} needs {scratch} bytes of scratch a lane")
    if lds > LDS_BYTES:
        found.append(f"{name} needs {lds} bytes of LDS, a compute unit has {LDS_BYTES}")
    return found


def trace(launcher: JitFunction, abi: KernelAbi) -> Record:
    """The hand-offs of the launcher's kernels, by tracing alone; nothing is lowered.

    Raises RuntimeError when no stage was entered: that kernel says nothing about its hand-offs.
    """
    abi.check_launcher(launcher)
    with recording() as record:
        artifact_of(launcher)
    if not record.stages:
        raise RuntimeError(f"{launcher.func.__name__}: tracing entered no stage")
    return record


def check_traced(launcher: JitFunction, abi: KernelAbi, decls: Iterable[RegionDecl]) -> Record:
    """`trace`, checked against the declared regions. Raises ContractError."""
    record = trace(launcher, abi)
    check(record, decls)
    return record
