"""How many workers: explicit numbers, CPUs, memory, and cgroups of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aiter import env
from aiter.aot.flydsl.limits import available_cpus, available_memory, worker_limit

GIB = 1 << 30


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", f"MemTotal: 99999999 kB\nMemAvailable: {64 * GIB // 1024} kB\n")
    return tmp_path


def test_the_command_line_wins_over_the_environment(root, monkeypatch):
    monkeypatch.setenv("AITER_MAX_JOBS", "5")
    assert worker_limit(3, root).workers == 3
    limit = worker_limit(None, root)
    assert (limit.workers, limit.reason) == (5, "AITER_MAX_JOBS")


def test_without_a_number_the_cpus_decide(root, monkeypatch):
    monkeypatch.delenv("AITER_MAX_JOBS", raising=False)
    assert worker_limit(None, root).workers == len(os.sched_getaffinity(0))


def test_memory_caps_an_explicit_number_and_says_so(root, monkeypatch):
    monkeypatch.setenv("AITER_FLYDSL_AOT_MEM_PER_WORKER_GB", "4")
    limit = worker_limit(100, root)
    assert limit.workers == 16
    assert "64.0 GB" in limit.reason
    assert "instead of 100 by --jobs" in limit.reason


def test_too_little_memory_still_leaves_one_worker(root):
    write(root, "proc/meminfo", "MemAvailable: 1000 kB\n")
    assert worker_limit(8, root).workers == 1


def test_the_tightest_cgroup_v2_above_this_process_counts(root):
    write(root, "proc/self/cgroup", "0::/pod/box\n")
    write(root, "sys/fs/cgroup/pod/box/memory.max", "max\n")
    write(root, "sys/fs/cgroup/pod/box/memory.current", "0\n")
    write(root, "sys/fs/cgroup/pod/memory.max", f"{6 * GIB}\n")
    write(root, "sys/fs/cgroup/pod/memory.current", f"{2 * GIB}\n")
    assert available_memory(root) == 4 * GIB
    write(root, "sys/fs/cgroup/pod/box/cpu.max", "50000 100000\n")
    assert available_cpus(root) == 1


def test_cgroup_v1_limits_count_and_its_number_for_unlimited_does_not(root):
    write(root, "proc/self/cgroup", "3:memory:/box\n2:cpu,cpuacct:/box\n")
    write(root, "sys/fs/cgroup/memory/box/memory.limit_in_bytes", f"{3 * GIB}\n")
    write(root, "sys/fs/cgroup/memory/box/memory.usage_in_bytes", f"{GIB}\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", "0\n")
    write(root, "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us", "100000\n")
    write(root, "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us", "100000\n")
    assert available_memory(root) == 2 * GIB
    assert available_cpus(root) == 1


def test_where_nothing_tells_there_is_no_memory_limit(tmp_path):
    assert available_memory(tmp_path) is None
    assert worker_limit(4, tmp_path).workers == 4


def test_a_number_of_jobs_that_is_none_is_refused(root, monkeypatch):
    monkeypatch.setenv("AITER_MAX_JOBS", "many")
    with pytest.raises(env.EnvError, match="AITER_MAX_JOBS"):
        worker_limit(None, root)
