"""How many worker processes: the CPUs and the memory this process may use, whoever limits them.

A container's limits are not those of the machine, so cgroup v2 and v1 are asked as well.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from aiter import env

_GIB = 1 << 30
# What cgroup v1 writes for "no limit" is the highest page-aligned 63-bit number.
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class WorkerLimit:
    """`workers` at once, and in `reason` what decided that."""

    workers: int
    reason: str


def worker_limit(jobs: int | None = None, root: Path = Path("/")) -> WorkerLimit:
    """The number of workers: `jobs`, else AITER_MAX_JOBS, else the CPUs; memory permitting.

    A worker is counted with AITER_FLYDSL_AOT_MEM_PER_WORKER_GB. `root` is where /proc and /sys
    are. Raises EnvError.
    """
    named = env.AITER_MAX_JOBS.get()
    if jobs is not None:
        wanted, reason = jobs, "--jobs"
    elif named is not None:
        wanted, reason = named, env.AITER_MAX_JOBS.name
    else:
        wanted, reason = available_cpus(root), "the CPUs available"
    each = env.AITER_FLYDSL_AOT_MEM_PER_WORKER_GB.get()
    memory = available_memory(root)
    if memory is not None:
        fitting = max(1, int(memory / (each * _GIB)))
        if fitting < wanted:
            have = f"{memory / _GIB:.1f} GB of memory at {each:g} GB a worker"
            return WorkerLimit(fitting, f"{have}, instead of {wanted} by {reason}")
    return WorkerLimit(wanted, reason)


def available_cpus(root: Path = Path("/")) -> int:
    """CPUs this process may run on, at most its cgroup's quota."""
    cpus = len(os.sched_getaffinity(0))
    for quota in _cgroup_cpu_quotas(root):
        cpus = min(cpus, max(1, math.ceil(quota)))
    return cpus


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes this process and its children may still take; None where nothing tells."""
    found = []
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            found.append(int(value.split()[0]) * 1024)
    for folder in _cgroup_folders(root):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _integer(folder / limit_name), _integer(folder / used_name)
            if limit is not None and used is not None and limit < _UNLIMITED:
                found.append(max(0, limit - used))
    return min(found, default=None)


def _cgroup_cpu_quotas(root: Path) -> list[float]:
    quotas = []
    for folder in _cgroup_folders(root):
        words = " ".join(_lines(folder / "cpu.max")).split()
        if len(words) == 2 and words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
        quota, period = _integer(folder / "cpu.cfs_quota_us"), _integer(
            folder / "cpu.cfs_period_us"
        )
        if quota is not None and period and quota > 0:
            quotas.append(quota / period)
    return quotas


def _cgroup_folders(root: Path) -> list[Path]:
    """This process's cgroups and everything above them: each may hold a limit."""
    folders = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        mounts = [controllers] if controllers else ["", "unified"]
        for mount in mounts:
            top = root / "sys/fs/cgroup" / mount
            inner = top / path.lstrip("/")
            folders += [inner, *(up for up in inner.parents if up == top or top in up.parents)]
    return list(dict.fromkeys(folders))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _integer(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.lstrip("-").isdigit() else None
