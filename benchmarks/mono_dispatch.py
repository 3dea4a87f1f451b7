"""What a mono decode step costs on the host: python benchmarks/mono_dispatch.py [--batches N]

Two experiments against the recording stub driver (`op_tests/hip_stub`, built here with gcc), so
no GPU is needed and none is timed:

    no-op     a warmed launcher of an empty kernel, eager, in alternating batches of 100 launches,
              the device synchronised between batches
    M3 step   a whole decode step of MiniMax-M3's 60 layers, 64 launches of its real kernels
              through its runner, in alternating rounds

each launched by FlyDSL's JIT call, by a `CompiledFunction` retained on the launcher, and by this
project's `_run_compiled`. The step also without any launch: what the runner itself takes. Prints
tables, with versions and what they do not show. Exits 2 where the stub cannot be built.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.dispatch import Times, launcher_source, loop, versions  # noqa: E402

BATCH = 100
JIT, COMPILED, RUN, NOTHING = "JIT call", "`CompiledFunction`", "`_run_compiled`", "no launch"
ROWS = 4

NOT_SHOWN = """\
Not shown: the real driver's part of a launch, since the stub only counts; device time; the dense
layers' attention, which is not mono's; full-model latency and serving throughput; and a replayed
graph, which pays none of this. The kernels are the real ones at small dimensions on one rank: a
JIT call traces its kernel every time, so its cost grows with the kernel, the other arms' does
not. JIT dispatch of other FlyDSL versions is another: 0.5 traces at every call."""


# ---------------------------------------------------------------- the ways to launch


def jit_call(exe: Any, *args: Any) -> None:
    """FlyDSL's own call of a launcher."""
    import flydsl.expr as fx

    exe(*args[:-1], fx.Stream(args[-1]))


def retained_call(exe: Any, *args: Any) -> None:
    """A `CompiledFunction` kept on the launcher since the first call."""
    retained = getattr(exe, "_cf", None)
    if retained is None:
        import flydsl.compiler as flyc
        import flydsl.expr as fx

        exe._cf = flyc.compile(exe, *args[:-1], fx.Stream(args[-1]))
        return
    retained(*args)


def no_call(exe: Any, *args: Any) -> None:
    """Nothing, to see what is around it."""


@contextmanager
def launching_by(way: Callable[..., None]) -> Iterator[None]:
    """Have the runner launch by `way`."""
    from atom.mono.models.minimax_m3 import execution
    from atom.mono.runtime import step_begin

    modules = (execution, step_begin)
    ours = execution._run_compiled
    for module in modules:
        module._run_compiled = way  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in modules:
            module._run_compiled = ours


# ---------------------------------------------------------------- no-op


def noop_launcher(folder: Path) -> Any:
    """A launcher of an address, an integer and a stream, whose kernel is empty."""
    import importlib.util

    source = "import flydsl.compiler as flyc\nimport flydsl.expr as fx\n"
    path = folder / "mono_noop.py"
    path.write_text(source + launcher_source("noop", ["Int64", "Int32"]))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module.launch_noop


def time_noop(folder: Path, batches: int, jit_batch: int) -> dict[str, Times]:
    """Microseconds a launch by each way."""
    import flydsl.compiler as flyc
    import flydsl.expr as fx

    from aiter.jit.utils.flydsl_private import runtime_library
    from aiter.ops.flydsl.kernels.tensor_shim import _run_compiled

    launcher = noop_launcher(folder)
    args = (0x7F0000000000, 4)
    compiled = flyc.compile(launcher, *args, fx.Stream(0x5500))
    ways = {
        JIT: (loop(launcher, (*args, fx.Stream(0x5500))), jit_batch),
        COMPILED: (loop(compiled, (*args, 0x5500)), BATCH),
        RUN: (loop(_run_compiled, (launcher, *args, 0x5500)), BATCH),
    }
    synchronize = runtime_library().hipDeviceSynchronize
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for run, _ in ways.values():
        run(2)
    for _ in range(batches):
        for name, (run, count) in ways.items():
            synchronize()
            seconds[name].append(run(count) / count * 1e6)
    return {name: Times(tuple(times)) for name, times in seconds.items()}


# ---------------------------------------------------------------- a whole step


def time_steps(driver: Any, rounds: int, jit_steps: int) -> tuple[dict[str, Times], int]:
    """Microseconds a step by each way, and the launches of one."""
    from atom.mono.models.minimax_m3.runner import layer_builders
    from op_tests.mono.runtime.stand_ins import make_runner, make_step, small_config

    config = small_config(reusing=frozenset(range(5, 60, 2)))
    runner = make_runner(config, builders=layer_builders())
    if not runner.prepare(ROWS):
        sys.exit(f"width {ROWS} was refused")
    runner._widths[ROWS]._attention = lambda layer, q, step, out: None
    step = make_step(config, ROWS)
    runner.forward(step)
    before = driver.count("hipModuleLaunchKernel")
    runner.forward(step)
    launches = driver.count("hipModuleLaunchKernel") - before

    def seconds(steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            runner.forward(step)
        return (time.perf_counter() - begin) / steps

    from aiter.ops.flydsl.kernels.tensor_shim import _run_compiled

    ways = {COMPILED: retained_call, RUN: _run_compiled, NOTHING: no_call}
    times: dict[str, list[float]] = {name: [] for name in (JIT, *ways)}
    with launching_by(retained_call):
        runner.forward(step)
    for _ in range(rounds):
        for name, way in ways.items():
            with launching_by(way):
                times[name].append(seconds(20) * 1e6)
    with launching_by(jit_call):
        times[JIT] = [seconds(1) * 1e6 for _ in range(jit_steps)]
    return {name: Times(tuple(batch)) for name, batch in times.items()}, launches


# ---------------------------------------------------------------- the report


def shown(times: Times) -> str:
    """Median, with the tenths where there are enough batches to have them."""
    if len(times.batches) > 2:
        return str(times)
    return f"{times.median:.0f}"


def report(
    noop: dict[str, Times], steps: dict[str, Times], launches: int, batches: int, jit_batch: int
) -> str:
    """Both tables as text."""
    lines = [
        f"No-op launcher, eager: median (p10-p90) of {batches} alternating batches of {BATCH} "
        f"launches ({jit_batch} of the JIT call), synchronised between batches.",
        "",
        "| dispatch | us a launch | JIT call / this |",
        "|---|---|---|",
    ]
    for name, times in noop.items():
        ratio = noop[JIT].median / times.median
        lines.append(f"| {name} | {times} | {ratio:,.0f} |")
    lines += [
        "",
        f"A whole MiniMax-M3 decode step, {launches} launches, {ROWS} rows: median (p10-p90).",
        "",
        "| dispatch | us a step | us a launch | JIT call / this |",
        "|---|---|---|---|",
    ]
    for name in (JIT, COMPILED, RUN, NOTHING):
        median = steps[name].median
        lines.append(
            f"| {name} | {shown(steps[name])} | {median / launches:.2f} | "
            f"{steps[JIT].median / median:,.0f} |"
        )
    return "\n".join([*lines, "", NOT_SHOWN])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=40, help="batches, and rounds of steps")
    parser.add_argument("--jit-batch", type=int, default=BATCH, help="launches of a JIT batch")
    parser.add_argument("--jit-steps", type=int, default=3, help="whole steps by the JIT call")
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
        with cache, pinned(Target.of("gfx950")), toolkit_env(), own_launch():
            noop = time_noop(folder, options.batches, options.jit_batch)
            steps, launches = time_steps(driver, options.batches, options.jit_steps)
    print(f"{versions()}\n")
    print(report(noop, steps, launches, options.batches, options.jit_batch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
