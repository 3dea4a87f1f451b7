"""Which GPU code is chosen and compiled for: one :class:`Target`, resolved in one place.

Order of resolution, first that applies:

1. the innermost :func:`pinned` target (a replay, the emulator, a test);
2. in a replay process (``AITER_AOT_REPLAY=1``): the environment, never the machine;
3. the current device as torch reports it. ``GPU_ARCHS`` does not override a device.

There is no default architecture: when nothing applies, :class:`TargetError` says what to do.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from aiter import env

# Compute units of the full part, for a target named by its architecture alone.
GFX_CU_NUM_MAP = {"gfx942": 304, "gfx950": 256, "gfx1250": 256}

# LDS that one workgroup can have, in bytes.
GFX_LDS_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10, "gfx1250": 320 << 10}

# Tables written before they had a ``gfx`` column tell the architecture by the CU count.
_CU_NUM_GFX = {80: "gfx942", 304: "gfx942", 256: "gfx950"}

_GFX = re.compile(r"gfx[0-9a-f]{3,4}")


class TargetError(RuntimeError):
    """No target can be determined, or the one that is named does not exist."""


@dataclass(frozen=True)
class Target:
    """A GPU to compile for: architecture, number of compute units, marketing name if known."""

    gfx: str
    cu_num: int
    device_name: str = ""

    def __post_init__(self) -> None:
        if not _GFX.fullmatch(self.gfx):
            raise TargetError(f"{self.gfx!r} is not an architecture name such as gfx950")
        if self.cu_num < 1:
            raise TargetError(f"a target needs at least one compute unit, not {self.cu_num}")

    @classmethod
    def of(cls, gfx: str) -> Target:
        """The full part of ``gfx``, with its usual number of compute units."""
        if gfx not in GFX_CU_NUM_MAP:
            known = ", ".join(sorted(GFX_CU_NUM_MAP))
            raise TargetError(
                f"the number of compute units of {gfx!r} is not known (known: {known}); "
                "give Target(gfx, cu_num), or set CU_NUM"
            )
        return cls(gfx, GFX_CU_NUM_MAP[gfx])


def get_target() -> Target:
    """The target of this process; see the module's docstring. Raises TargetError."""
    if _pins:
        return _pins[-1].target
    if env.AITER_AOT_REPLAY.get():
        return _replay_target()
    target, cu_num = _device_target(), env.CU_NUM.get()
    return target if cu_num is None else replace(target, cu_num=cu_num)


def get_gfx() -> str:
    """Architecture of :func:`get_target`, e.g. ``gfx950``."""
    return get_target().gfx


def get_gfx_runtime() -> str:
    """Alias of :func:`get_gfx`: what runs and what is compiled for are one value here."""
    return get_target().gfx


def get_cu_num() -> int:
    """Compute units of :func:`get_target`; ``CU_NUM`` overrides a target that is not pinned."""
    return get_target().cu_num


def gfx_from_cu_num(cu_num: int) -> str:
    """Architecture of a table row that names only its CU count. Raises TargetError."""
    try:
        return _CU_NUM_GFX[cu_num]
    except KeyError:
        known = ", ".join(f"{n} ({gfx})" for n, gfx in _CU_NUM_GFX.items())
        raise TargetError(f"no architecture is known by {cu_num} compute units: {known}") from None


# ---------------------------------------------------------------- pinning


@dataclass(eq=False)
class _Pin:
    target: Target


_pins: list[_Pin] = []
_pin_lock = threading.RLock()
_saved_env: dict[str, str | None] | None = None


@contextmanager
def pinned(target: Target) -> Iterator[Target]:
    """Make ``target`` the target of the whole process until exit.

    FlyDSL's own architecture query is pinned to the same value: FLYDSL_GPU_ARCH is set and
    ARCH, which would win over it for half of FlyDSL, is removed. Both come back on exit.
    Pins nest; a pin left out of order takes only itself away.
    """
    pin = _Pin(target)
    with _pin_lock:
        _pins.append(pin)
        _sync_flydsl_arch()
    try:
        yield target
    finally:
        with _pin_lock:
            _pins.remove(pin)
            _sync_flydsl_arch()


def _sync_flydsl_arch() -> None:
    global _saved_env
    names = (env.FLYDSL_GPU_ARCH.name, env.ARCH.name)
    if _pins:
        if _saved_env is None:
            _saved_env = env.snapshot(names)
        env.assign({names[0]: _pins[-1].target.gfx, names[1]: None})
    elif _saved_env is not None:
        env.assign(_saved_env)
        _saved_env = None


# ---------------------------------------------------------------- detection


def _replay_target() -> Target:
    archs = env.GPU_ARCHS.get()
    if len(archs) != 1 or archs[0] == "native":
        raise TargetError(
            "a replay process (AITER_AOT_REPLAY=1) needs GPU_ARCHS naming exactly one "
            f"architecture, not {';'.join(archs) or 'nothing'!r}"
        )
    cu_num = env.CU_NUM.get()
    return Target.of(archs[0]) if cu_num is None else Target(archs[0], cu_num)


_devices: dict[int, Target] = {}


def _device_target() -> Target:
    import torch

    # Asking whether there is a device costs a driver call; a device seen once stays.
    if not _devices and not torch.cuda.is_available():
        raise TargetError(
            "torch sees no GPU, so there is nothing to compile for; to build ahead of time use "
            "python -m aiter.aot.flydsl.moe, to choose a target in Python use "
            "aiter.jit.utils.chip_info.pinned(Target.of('gfx950'))"
        )
    index = torch.cuda.current_device()
    target = _devices.get(index)
    if target is None:
        target = _devices[index] = _describe(torch.cuda.get_device_properties(index))
    return target


def _describe(properties: object) -> Target:
    arch = getattr(properties, "gcnArchName", "").split(":", 1)[0]
    name = getattr(properties, "name", "")
    if not arch:
        raise TargetError(f"device {name!r} has no gcnArchName: this torch is not a ROCm build")
    return Target(arch, properties.multi_processor_count, name)  # type: ignore[attr-defined]
