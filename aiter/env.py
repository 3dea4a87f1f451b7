"""Every environment variable this project reads, declared once.

A variable is a module constant; ``aiter.env.CU_NUM.get()`` parses the current value each
time it is called and never caches, so that tests and replays can change it. A variable
whose value can change which code is compiled is declared with ``affects_code=True``: the
build records those values beside its cache (:func:`code_values`), because a serving host
that sets them otherwise asks for other kernels.

An empty value counts as unset. A value that does not parse raises :class:`EnvError`.
Imports neither torch nor FlyDSL.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


class EnvError(ValueError):
    """An environment variable holds a value that its declaration does not allow."""


@dataclass(frozen=True)
class EnvVar(Generic[T]):
    """One variable: ``kind`` is what an error and the table say the value should be.

    ``default`` may be a function, called where the default is wanted.
    """

    name: str
    kind: str
    default: T | Callable[[], T]
    help: str
    parse: Callable[[str], T]
    affects_code: bool = False

    def get(self, environ: Mapping[str, str] | None = None) -> T:
        """The parsed value, or the default when unset or empty. Raises EnvError."""
        text = (os.environ if environ is None else environ).get(self.name, "")
        if not text.strip():
            return self._default()
        try:
            return self.parse(text.strip())
        except (ValueError, RuntimeError) as error:
            detail = f" ({error})" if str(error) else ""
            raise EnvError(f"{self.name}={text!r} is not {self.kind}{detail}") from None

    def _default(self) -> T:
        if not callable(self.default):
            return self.default
        try:
            return self.default()
        except RuntimeError as error:
            raise EnvError(f"{self.name} is not set, and has no default here: {error}") from None

    def is_set(self, environ: Mapping[str, str] | None = None) -> bool:
        """Whether the variable is present and not empty."""
        return bool((os.environ if environ is None else environ).get(self.name, "").strip())


REGISTRY: dict[str, EnvVar] = {}


def _declare(var: EnvVar[T]) -> EnvVar[T]:
    if var.name in REGISTRY:
        raise ValueError(f"{var.name} is declared twice")
    REGISTRY[var.name] = var
    return var


# ---------------------------------------------------------------- parsers

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def _parse_flag(text: str) -> bool:
    lowered = text.lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError


def _flag(name: str, default: bool, help: str, *, affects_code: bool = False) -> EnvVar[bool]:
    return _declare(
        EnvVar(
            name,
            "a flag: 1/0, true/false, yes/no, on/off",
            default,
            help,
            _parse_flag,
            affects_code,
        )
    )


def _number(name: str, kind: type[T], text: str, low: T) -> T:
    try:
        value = kind(text)  # type: ignore[call-arg]
    except ValueError:
        raise ValueError from None
    if not value >= low:  # type: ignore[operator]
        raise ValueError
    return value


def _int(
    name: str, default: T, help: str, *, low: int = 0, affects_code: bool = False
) -> EnvVar[T | int]:
    parse = lambda text: _number(name, int, text, low)
    return _declare(EnvVar(name, f"an integer >= {low}", default, help, parse, affects_code))


def _float(name: str, default: float, help: str, *, low: float) -> EnvVar[float]:
    parse = lambda text: _number(name, float, text, low)
    return _declare(EnvVar(name, f"a number >= {low:g}", default, help, parse))


def _str(name: str, default: T, help: str, *, affects_code: bool = False) -> EnvVar[T | str]:
    return _declare(EnvVar(name, "a string", default, help, str, affects_code))


def _path(name: str, default: T | Callable[[], Path], help: str) -> EnvVar[T | Path]:
    return _declare(EnvVar(name, "a path", default, help, lambda text: Path(text).expanduser()))


def _split(text: str, separators: str) -> tuple[str, ...]:
    for other in separators[1:]:
        text = text.replace(other, separators[0])
    return tuple(part.strip() for part in text.split(separators[0]) if part.strip())


def _list(name: str, separators: str, help: str) -> EnvVar[tuple[str, ...]]:
    kind = f"a list separated by {separators[0]!r}"
    return _declare(EnvVar(name, kind, (), help, lambda text: _split(text, separators)))


# ---------------------------------------------------------------- the variables

# Target
GPU_ARCHS = _list(
    "GPU_ARCHS",
    ";,",
    "architectures to build for; names the target in a replay, never overrides a device",
)
CU_NUM = _int(
    "CU_NUM",
    None,
    "compute units of the target, instead of the device's or the usual number",
    low=1,
    affects_code=True,
)
FLYDSL_GPU_ARCH = _str(
    "FLYDSL_GPU_ARCH", None, "FlyDSL's architecture; set by a pinned target", affects_code=True
)
ARCH = _str("ARCH", None, "FlyDSL's compile target; removed by a pinned target", affects_code=True)

# Cache and FlyDSL's modes
FLYDSL_RUNTIME_CACHE_DIR = _path(
    "FLYDSL_RUNTIME_CACHE_DIR",
    lambda: Path.home() / ".flydsl" / "cache",
    "folder of compiled kernels",
)
COMPILE_ONLY = _flag("COMPILE_ONLY", False, "compile and persist kernels, launch none")
FLYDSL_RUNTIME_RUN_ONLY = _flag(
    "FLYDSL_RUNTIME_RUN_ONLY", False, "load kernels from the cache, compile none"
)

# Toolkit
ROCM_PATH = _path("ROCM_PATH", None, "ROCm installation; its llvm/bin/ld.lld is taken first")
XDG_CACHE_HOME = _path(
    "XDG_CACHE_HOME",
    lambda: Path.home() / ".cache",
    "the private linker folder is made in aiter/ below it",
)

# Ahead-of-time build
AITER_AOT_REPLAY = _flag(
    "AITER_AOT_REPLAY", False, "this process replays the runtime for the one arch in GPU_ARCHS"
)
AITER_AOT_IMPORT = _flag(
    "AITER_AOT_IMPORT", False, "`import aiter` reaches configuration and target code only"
)
AITER_MAX_JOBS = _int(
    "AITER_MAX_JOBS", None, "compile workers alive at once, over all architectures", low=1
)
AITER_FLYDSL_AOT_TIMEOUT = _float(
    "AITER_FLYDSL_AOT_TIMEOUT", 1200.0, "seconds one kernel may take to compile", low=1
)
AITER_FLYDSL_AOT_MAX_RETRIES = _int(
    "AITER_FLYDSL_AOT_MAX_RETRIES", 2, "retries of a kernel whose worker died"
)
AITER_FLYDSL_AOT_MEM_PER_WORKER_GB = _float(
    "AITER_FLYDSL_AOT_MEM_PER_WORKER_GB",
    2.0,
    "memory a compile worker is counted with, GB",
    low=0.1,
)

# Tuned tables
AITER_CONFIG_FMOE = _list("AITER_CONFIG_FMOE", ":", "fused MoE tables, instead of the shipped ones")
AITER_CONFIG_FHMOE = _list(
    "AITER_CONFIG_FHMOE", ":", "shared-expert MoE tables, instead of the shipped ones"
)
AITER_CONFIG_GROUPED_FMOE = _list(
    "AITER_CONFIG_GROUPED_FMOE", ":", "grouped MoE tables (gfx1250), instead of the shipped ones"
)

# Kernel selection
AITER_BYPASS_TUNE_CONFIG = _flag(
    "AITER_BYPASS_TUNE_CONFIG",
    False,
    "ignore tuned tables, use the heuristic kernels",
    affects_code=True,
)
AITER_FLYDSL_FORCE = _flag(
    "AITER_FLYDSL_FORCE",
    True,
    "use heuristic FlyDSL kernels where no tuned row fits",
    affects_code=True,
)
AITER_FLYDSL_FORCE_REDUCE = _flag(
    "AITER_FLYDSL_FORCE_REDUCE",
    False,
    "stage 2 writes routes and reduces them, never atomically",
    affects_code=True,
)
AITER_SITUV2_A8W4 = _flag(
    "AITER_SITUV2_A8W4",
    False,
    "SiTUv2 with fp4 weights takes fp8 activations, not bf16",
    affects_code=True,
)
AITER_SITUV2_A4W4 = _flag(
    "AITER_SITUV2_A4W4",
    False,
    "SiTUv2 with fp4 weights takes fp4 activations, not bf16",
    affects_code=True,
)
AITER_BF16_FP8_MOE_BOUND = _int(
    "AITER_BF16_FP8_MOE_BOUND",
    256,
    "tokens from which interleaved SwiGLU with fp4 weights takes fp8 activations, not bf16",
    affects_code=True,
)
GPTOSS_SWIGLU_MXFP4_BF16_BOUND = _int(
    "GPTOSS_SWIGLU_MXFP4_BF16_BOUND",
    256,
    "tokens from which separated SwiGLU with fp4 weights takes fp4 activations, not bf16",
    affects_code=True,
)

# Mono decode runners (atom.mono)
ATOM_MONO_ENABLE = _flag("ATOM_MONO_ENABLE", True, "decode steps may take the mono runners")
ATOM_MONO_DEBUG = _flag(
    "ATOM_MONO_DEBUG", False, "mono kernels give up waits, and the step says who was missing"
)
ATOM_MONO_TIMELINE = _flag(
    "ATOM_MONO_TIMELINE", False, "mono kernels note when each workgroup enters a stage"
)
ATOM_MONO_CHECK = _flag(
    "ATOM_MONO_CHECK",
    False,
    "mono runners check their kernels' hand-offs and that ranks agree bit for bit",
)


# ---------------------------------------------------------------- reading and changing as a whole


def _shown(value: object) -> str:
    if value is None or value == ():
        return "-"
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value)


def render_table(environ: Mapping[str, str] | None = None) -> str:
    """One line per variable: name, value, where it comes from, whether it changes code, help.

    A value that does not parse is shown as such, so that the table can always be printed.
    """
    rows = [("variable", "value", "from", "code", "meaning")]
    for var in REGISTRY.values():
        try:
            value = _shown(var.get(environ))
        except EnvError:
            value = f"INVALID, not {var.kind}" if var.is_set(environ) else "none here"
        source = "env" if var.is_set(environ) else "default"
        rows.append((var.name, value, source, "yes" if var.affects_code else "", var.help))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ("  ".join([*map(str.ljust, row[:4], widths), row[4]]) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def code_values(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Name to shown value of every variable that can change which code is compiled."""
    return {v.name: _shown(v.get(environ)) for v in REGISTRY.values() if v.affects_code}


def snapshot(names: Iterable[str]) -> dict[str, str | None]:
    """The current raw values of ``names``; None marks an unset one. Input for :func:`assign`."""
    return {name: os.environ.get(name) for name in names}


def assign(values: Mapping[str, str | None]) -> None:
    """Set, or for None remove, variables of this process and of the children it starts."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def overlay(values: Mapping[str, str | None]) -> Iterator[None]:
    """:func:`assign` ``values`` for the duration, then put back exactly what was there."""
    saved = snapshot(values)
    assign(values)
    try:
        yield
    finally:
        assign(saved)
