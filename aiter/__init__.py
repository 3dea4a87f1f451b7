"""Mixture-of-experts kernels for AMD GPUs.

Importing this package loads nothing heavy (no torch, no FlyDSL); the names below are
resolved on first use. Under ``AITER_AOT_IMPORT=1`` only configuration and target code may
be reached this way, so that a build's parent process stays small: import the module you
want by its own name there.
"""

from __future__ import annotations

import importlib
from typing import Any

from aiter import env as _env

# name -> (module, attribute or None for the module itself, reachable under AITER_AOT_IMPORT)
_LAZY: dict[str, tuple[str, str | None, bool]] = {
    "AITER_CONFIGS": ("aiter.jit.core", "AITER_CONFIGS", True),
    "ActivationType": ("aiter.ops.enum", "ActivationType", True),
    "GateMode": ("aiter.ops.enum", "GateMode", True),
    "QuantType": ("aiter.ops.enum", "QuantType", True),
    "Target": ("aiter.jit.utils.chip_info", "Target", True),
    "dtypes": ("aiter.utility.dtypes", None, False),
    # The module, as importing it makes of this name anyway: its function is fused_moe.fused_moe.
    "fused_moe": ("aiter.fused_moe", None, False),
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    try:
        module, attribute, light = _LAZY[name]
    except KeyError:
        raise AttributeError(f"module 'aiter' has no attribute {name!r}") from None
    if not light and _env.AITER_AOT_IMPORT.get():
        raise AttributeError(
            f"aiter.{name} is not reachable under AITER_AOT_IMPORT=1; import {module} itself"
        )
    loaded = importlib.import_module(module)
    value = loaded if attribute is None else getattr(loaded, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
