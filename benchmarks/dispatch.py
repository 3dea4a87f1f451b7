"""What a launch costs on the host: python benchmarks/dispatch.py [--check] [--batches N]

Times, in one process and in alternating batches, the ways of starting a kernel that does
nothing: FlyDSL's JIT call and its `CompiledFunction`, `_run_compiled`, FlyDSL's packed entry
called from ctypes with a buffer that is ready, and a C function that does nothing called from
ctypes. For launchers of 8, 38 and 75 addresses and integers and for one of 5 tensors and 3
integers. The driver is the recording stub (`op_tests/hip_stub`), built here with gcc, so no GPU
is needed and none is timed. Prints a table for the README; with --check, exits 1 when a ratio
between two arms of this run is above its target. Exits 2 where the stub cannot be built.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import itertools
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

BATCH = 100  # calls timed together; one of the JIT call, which takes milliseconds
JIT, COMPILED, RUN, ENTRY, NOOP = (
    "JIT call",
    "`CompiledFunction`",
    "`_run_compiled`",
    "entry, buffer ready",
    "ctypes no-op",
)
ARMS = (JIT, COMPILED, RUN, ENTRY, NOOP)
PLAIN = (8, 38, 75)
# Of `_run_compiled`: launcher, against which arm, at most so many times that arm's median.
TARGETS = (
    ("8 arguments", COMPILED, 0.25),
    ("75 arguments", COMPILED, 0.15),
    ("8 arguments", NOOP, 2.0),
)

NOT_SHOWN = """\
Not shown: what the real driver takes, since the stub only counts; device time; and a replayed
graph, which pays none of this. Arguments exclude the stream, which every call passes too."""


@dataclass(frozen=True)
class Times:
    """Microseconds a call, one number a batch."""

    batches: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.batches)

    def __str__(self) -> str:
        tenths = statistics.quantiles(self.batches, n=10)
        digits = 2 if self.median < 100 else 0
        return f"{self.median:.{digits}f} ({tenths[0]:.{digits}f}-{tenths[-1]:.{digits}f})"


# ---------------------------------------------------------------- what is launched


def launcher_source(name: str, kinds: list[str]) -> str:
    """A launcher of a kernel that takes `kinds` and does nothing."""
    parameters = ", ".join(f"a{i}: fx.{kind}" for i, kind in enumerate(kinds))
    arguments = ", ".join(f"a{i}" for i in range(len(kinds)))
    return f"""
@flyc.kernel
def {name}_kernel({parameters}):
    pass

@flyc.jit
def launch_{name}({parameters}, stream: fx.Stream):
    {name}_kernel({arguments}).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)
"""


def load_launchers(folder: Path) -> ModuleType:
    """The launchers, from a file, because FlyDSL reads their source."""
    source = "import flydsl.compiler as flyc\nimport flydsl.expr as fx\n"
    for count in PLAIN:
        source += launcher_source(f"plain{count}", plain_kinds(count))
    source += launcher_source("tensors", ["Tensor"] * 5 + ["Int32"] * 3)
    path = folder / "dispatch_launchers.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def plain_kinds(count: int) -> list[str]:
    """Three addresses to an integer."""
    return ["Int32" if i % 4 == 3 else "Int64" for i in range(count)]


def launches(module: ModuleType) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Label -> launcher and the arguments of a call, the stream's handle last."""
    import torch

    cases = {}
    for count in PLAIN:
        args = [
            1000 + i if kind == "Int32" else 0x7F0000000000 + 4096 * i
            for i, kind in enumerate(plain_kinds(count))
        ]
        cases[f"{count} arguments"] = (getattr(module, f"launch_plain{count}"), (*args, 0x5500))
    tensors = [torch.zeros(64), torch.zeros(32, 16), torch.zeros(8), torch.zeros(16, 16)]
    args = (*tensors, torch.zeros(4, 64), 1, 2, 3, 0x5500)
    cases["5 tensors, 3 integers"] = (module.launch_tensors, args)
    return cases


# ---------------------------------------------------------------- the arms


def loop(function: Any, args: tuple[Any, ...]) -> Callable[[int], float]:
    """A function that calls `function(*args)` so many times; seconds in all.

    The tuple is ready: what a caller spends on making arguments is not a launch's.
    """

    def run(count: int) -> float:
        begin = time.perf_counter()
        for _ in itertools.repeat(None, count):
            function(*args)
        return time.perf_counter() - begin

    return run


def arms_of(
    launcher: Any, args: tuple[Any, ...], nothing: int
) -> dict[str, Callable[[int], float]]:
    """The arms for one launcher, each called once already."""
    import flydsl.compiler as flyc
    import flydsl.expr as fx

    from aiter.jit.utils.flydsl_private import packed_entry
    from aiter.ops.flydsl.kernels.tensor_shim import _run_compiled

    jit_args = (*args[:-1], fx.Stream(args[-1]))
    compiled = flyc.compile(launcher, *jit_args)
    compiled(*args)
    entry, packed = packed_entry(compiled)
    c_function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    arms = {
        JIT: loop(launcher, jit_args),
        COMPILED: loop(compiled, args),
        RUN: loop(_run_compiled, (launcher, *args)),
        ENTRY: loop(c_function(entry), (packed,)),
        NOOP: loop(c_function(nothing), (packed,)),
    }
    arms[RUN](1)
    return arms


def measure(arms: dict[str, Callable[[int], float]], batches: int) -> dict[str, Times]:
    """Alternate between the arms, so that what slows the machine slows all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for name, run in arms.items():
        run(1 if name == JIT else BATCH)
    for _ in range(batches):
        for name, run in arms.items():
            count = 1 if name == JIT else BATCH
            seconds[name].append(run(count) / count * 1e6)
    return {name: Times(tuple(times)) for name, times in seconds.items()}


# ---------------------------------------------------------------- the report


def report(results: dict[str, dict[str, Times]], batches: int) -> tuple[str, bool]:
    """The table and the ratios as text, and whether every target is met."""
    lines = [
        f"Microseconds a launch: median (p10-p90) of {batches} alternating batches of {BATCH} "
        "calls, of one JIT call.",
        "",
        "| launcher | " + " | ".join(ARMS) + " |",
        "|---|" + "---|" * len(ARMS),
    ]
    for label, times in results.items():
        lines.append(f"| {label} | " + " | ".join(str(times[arm]) for arm in ARMS) + " |")
    lines += ["", "| `_run_compiled` against | launcher | ratio | target |", "|---|---|---|---|"]
    good = True
    for label, against, most in TARGETS:
        ratio = results[label][RUN].median / results[label][against].median
        met = ratio <= most
        good &= met
        lines.append(f"| {against} | {label} | {ratio:.2f} | {most}{'' if met else ' missed'} |")
    return "\n".join([*lines, "", NOT_SHOWN]), good


def versions() -> str:
    """What was measured, and on what."""
    import torch

    from aiter.jit.utils.flydsl_private import FLYDSL_VERSION

    try:
        cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        cpu = None
    return (
        f"FlyDSL {FLYDSL_VERSION}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{cpu[1] if cpu else platform.processor()}, {os.cpu_count()} CPUs, "
        f"load {os.getloadavg()[0]:.1f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    parser.add_argument("--batches", type=int, default=40, help="batches of each arm")
    options = parser.parse_args()
    from op_tests.hip_stub import Driver, StubError, build

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            # Before anything imports FlyDSL, whose runtime would look for the real driver.
            driver = Driver(build(folder))
        except (StubError, OSError) as error:
            print(f"cannot measure: {error}", file=sys.stderr)
            return 2
        driver.logging(False)
        from aiter import env
        from aiter.jit.utils.backend import own_launch
        from aiter.jit.utils.chip_info import Target, pinned
        from aiter.jit.utils.toolkit import toolkit_env

        cache = env.overlay({env.FLYDSL_RUNTIME_CACHE_DIR.name: str(folder / "cache")})
        results = {}
        with cache, pinned(Target.of("gfx950")), toolkit_env(), own_launch():
            for label, (launcher, args) in launches(load_launchers(folder)).items():
                arms = arms_of(launcher, args, driver.nothing())
                results[label] = measure(arms, options.batches)
    table, good = report(results, options.batches)
    print(f"{versions()}\n\n{table}")
    return 0 if good or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
