"""Build, or check, the kernels of mono decode runners ahead of time: no GPU, no ROCm.

    python -m atom.mono.aot                       MiniMax-M3 as it ships
    python -m atom.mono.aot --config tp2.json     another deployment of it; may be repeated
    python -m atom.mono.aot --check               compile nothing; fail on what is missing
    python -m atom.mono.aot --list                compile nothing; print the launches

A deployment is a JSON object of the fields of `models.minimax_m3.config.Config` that differ from
the default, as `{"tp": 2, "index_topk_freq": 4, "widths": [1, 4]}`. The launchers are those that
the runner's own `prepare` makes, so a server with this cache compiles nothing when it prepares a
width; it traces each kernel once. Exit codes as of `aiter.aot.flydsl.moe`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aiter.aot.flydsl import command
from aiter.aot.flydsl.command import Kind, Wanted
from aiter.aot.flydsl.common import LaunchRequest, UsageError

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from aiter.aot.flydsl.limits import WorkerLimit
    from aiter.aot.flydsl.report import Log
    from atom.mono.models.minimax_m3.config import Config

SHIPPED = "minimax_m3"


@dataclass(frozen=True)
class Deployment:
    """Where a configuration comes from, and what it is."""

    label: str
    config: Config


def main(argv: Sequence[str] | None = None, executor: Executor | None = None) -> int:
    """Run the command line; returns the exit code. executor: as of `command.run`."""
    parser = argparse.ArgumentParser(
        prog="python -m atom.mono.aot",
        description="Compile every kernel that mono decode runners launch.",
        epilog=command.EPILOG,
    )
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="a deployment; repeatable"
    )
    command.add_options(parser)
    given = parser.parse_args(argv)
    paths = tuple(Path(path).expanduser() for path in given.config)
    kind = Kind(
        read=lambda log: _read(paths),
        preload=_preload,
        collect=_collect,
        show=lambda deployments: [f"config    {d.label}: {d.config}" for d in deployments],
    )
    return command.run(kind, command.options_of(given), executor)


def _read(paths: Sequence[Path]) -> list[Deployment]:
    from atom.mono.models.minimax_m3.config import Config
    from atom.mono.models.minimax_m3.config_file import config_of

    if not paths:
        return [Deployment(SHIPPED, Config().with_env())]
    found = []
    for path in paths:
        try:
            found.append(Deployment(str(path), config_of(json.loads(path.read_text())).with_env()))
        except OSError as error:
            raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise UsageError(f"{path}: {error}") from None
    return found


def _preload() -> None:
    from atom.mono.models.minimax_m3 import runner

    runner.layer_builders()


def _collect(deployments: list[Deployment], limit: WorkerLimit, log: Log) -> Wanted:
    from aiter.aot.flydsl.manifest import common_parts, launch_id
    from aiter.jit.utils.chip_info import Target, pinned
    from aiter.ops.flydsl.kernels.tensor_shim import Launch, artifact_of, launch_of
    from atom.mono.device.step_begin import build_step_begin
    from atom.mono.models.minimax_m3.execution import width_kernels
    from atom.mono.models.minimax_m3.runner import layer_builders, sources
    from atom.mono.runtime.deployment import ARCHS

    asked: dict[Launch, list[str]] = {}
    for deployment in deployments:
        config, builders = deployment.config, layer_builders()
        for rows in config.widths:
            kernels = width_kernels(config, rows, builders).pairs()
            for launcher in (build_step_begin(config.step_begin()), *(pair[0] for pair in kernels)):
                asked.setdefault(launch_of(launcher), []).append(f"{deployment.label}:{rows} rows")
    wanted = Wanted(
        requests=[
            LaunchRequest(gfx, launch, tuple(dict.fromkeys(rows)))
            for gfx in ARCHS
            for launch, rows in asked.items()
        ],
        contexts={},
        sources=sources(),
        labels=tuple(deployment.label for deployment in deployments),
    )
    for gfx in ARCHS:
        with pinned(Target.of(gfx)):
            parts = artifact_of(build_step_begin(deployments[0].config.step_begin())).parts
        wanted.contexts[gfx] = common_parts(parts)
    for request in wanted.requests:
        wanted.launch_lines.append(
            f"{request.gfx} {launch_id(request.launch)} <- {', '.join(request.rows)}"
        )
    widths = sum(len(deployment.config.widths) for deployment in deployments)
    wanted.lines.append(f"{widths} widths, {len(asked)} distinct launches")
    wanted.document["launches"] = [
        {"gfx": r.gfx, "launch": launch_id(r.launch), "rows": list(r.rows)} for r in wanted.requests
    ]
    return wanted


if __name__ == "__main__":
    sys.exit(main())
