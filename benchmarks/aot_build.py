"""What the ahead-of-time build costs, in CPU time, against what its kernels alone would cost.

    python benchmarks/aot_build.py [--csv TABLE] [--jobs N] [--check]

Runs the command line four times on one table: a build into an empty cache, a second build of it,
a check, and a build into another empty cache. With --check a figure beyond its limit, or two
builds that differ in a byte, exits 1.

    replay          CPU of the replay phase a job
    artifact        CPU of a compile task an artifact, its linker's included
    build ratio     CPU of the whole build over the sum of the compile tasks
    check ratio     CPU of a whole check over one trace a launch and the imports
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Figure:
    """A measured value, its unit, what is aimed at and what is allowed."""

    name: str
    value: float
    unit: str
    aim: float
    limit: float

    def __str__(self) -> str:
        verdict = "ok" if self.value <= self.limit else "TOO MUCH"
        return (
            f"{self.name:22} {self.value:8.3f} {self.unit:3}  "
            f"aim {self.aim:g}, at most {self.limit:g}  {verdict}"
        )


def run(cache: Path, options: list[str]) -> dict[str, Any]:
    """The JSON document of one run of the command line."""
    command = [sys.executable, "-m", "aiter.aot.flydsl.moe", "--json", "--cache-dir", str(cache)]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} exited {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout)


def replay_ms(report: dict[str, Any]) -> float:
    """CPU milliseconds a replayed job, over all architectures."""
    archs = report["archs"].values()
    jobs = sum(sum(arch["jobs"].values()) for arch in archs)
    return 1000 * sum(arch["replay_cpu_s"] for arch in archs) / jobs


def artifacts(cache: Path) -> dict[str, bytes]:
    """Every artifact by name."""
    return {p.relative_to(cache).as_posix(): p.read_bytes() for p in cache.glob("*/*.pkl")}


def main() -> int:
    """Measure, print, and with --check judge."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--csv", action="append", default=[], metavar="FILE")
    parser.add_argument("--jobs", default="2")
    parser.add_argument("--check", action="store_true", help="exit 1 beyond a limit")
    given = parser.parse_args()
    options = ["--jobs", given.jobs, *(word for csv in given.csv for word in ("--csv", csv))]
    with tempfile.TemporaryDirectory() as folder:
        one, two = Path(folder, "one"), Path(folder, "two")
        cold, again = run(one, options), run(one, options)
        check, other = run(one, [*options, "--check"]), run(two, options)
        identical = artifacts(one) == artifacts(two)
    built, traced = cold["build"], check["check"]
    figures = [
        Figure("replay", replay_ms(cold), "ms", 4, 10),
        Figure("artifact", built["compile_cpu_s"] / built["built"], "s", 2, 5),
        Figure("build ratio", cold["cpu_s"] / built["compile_cpu_s"], "", 1.1, 1.15),
        Figure(
            "build ratio, again", other["cpu_s"] / other["build"]["compile_cpu_s"], "", 1.1, 1.15
        ),
        Figure(
            "check ratio",
            check["cpu_s"] / (traced["trace_cpu_s"] + check["import_cpu_s"]),
            "",
            1.1,
            1.2,
        ),
    ]
    jobs = sum(sum(arch["jobs"].values()) for arch in cold["archs"].values())
    print(
        f"{jobs} jobs, {traced['hits']} launches, {built['built']} artifacts; cold build "
        f"{cold['wall_s']:.1f} s ({cold['cpu_s']:.1f} s CPU), second {again['wall_s']:.1f} s, "
        f"check {check['wall_s']:.1f} s, imports {cold['import_cpu_s']:.1f} s CPU"
    )
    print(*figures, sep="\n")
    print(f"two builds {'are byte-identical' if identical else 'DIFFER'}")
    if again["build"]["built"]:
        print(f"the second build compiled {again['build']['built']} artifacts again")
    good = identical and not again["build"]["built"]
    good = good and all(figure.value <= figure.limit for figure in figures)
    return 0 if good or not given.check else 1


if __name__ == "__main__":
    sys.exit(main())
