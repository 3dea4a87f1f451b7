"""The pool against everything that can happen to a worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aiter.aot.flydsl.pool import WorkerPool

PAUSE = 0.02


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(PAUSE)
    return False


def square(number: int) -> int:
    return number * number


def pid_after_a_while(_: int) -> int:
    time.sleep(0.05)
    return os.getpid()


def die_unless_marked(task: tuple[str, int]) -> str:
    """Dies of SIGKILL until as many attempts as task[1] were made."""
    folder, deaths = task
    attempt = len(list(Path(folder).iterdir()))
    if attempt < deaths:
        (Path(folder) / str(attempt)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def sleep_or_square(number: int) -> int:
    if number < 0:
        time.sleep(60)
    return number * number


def raising(number: int) -> int:
    raise ZeroDivisionError(f"task {number}")


def printing(number: int) -> int:
    os.write(1, f"task {number}\n".encode())
    return number


def printing_and_aborting(number: int) -> int:
    os.write(1, b"at first\n")
    os.write(2, b"LLVM ERROR: no such operand\n\n")
    os.abort()


def exiting(number: int) -> int:
    os._exit(7)


def test_every_task_is_done_once_by_no_more_workers_than_allowed():
    with WorkerPool(pid_after_a_while, 3) as pool:
        done = list(pool.run(range(12)))
    assert sorted(d.task for d in done) == list(range(12))
    assert len({d.result for d in done}) <= 3
    assert all(d.failure is None and d.attempts == 1 for d in done)


def test_at_no_moment_are_there_more_workers_than_allowed(tmp_path):
    """Not even while dead ones are replaced."""
    with WorkerPool(die_unless_marked, 2, retries=3) as pool:
        for _ in pool.run([(str(tmp_path), 2)] * 6):
            assert len(pool.pids) <= 2


def test_workers_are_gone_when_the_pool_is_left():
    with WorkerPool(square, 2) as pool:
        results = pool.run(range(50))
        next(results)
        pids = pool.pids
        assert pids
    assert not any(map(alive, pids))


def test_an_exception_is_reported_with_its_traceback_and_costs_no_retry():
    with WorkerPool(raising, 1, retries=5) as pool:
        (done,) = pool.run([3])
    assert (done.failure.kind, done.attempts) == ("raised", 1)
    assert str(done.failure) == "ZeroDivisionError: task 3"
    assert "in raising" in done.failure.detail


def test_a_killed_worker_costs_its_task_a_retry(tmp_path):
    with WorkerPool(die_unless_marked, 1, retries=2) as pool:
        (done,) = pool.run([(str(tmp_path), 2)])
    assert (done.result, done.attempts) == ("done", 3)


def test_a_task_that_kills_every_worker_fails_by_itself(tmp_path):
    (tmp_path / "marks").mkdir()
    with WorkerPool(die_unless_marked, 2, retries=1) as pool:
        done = list(pool.run([(str(tmp_path / "marks"), 99), (str(tmp_path), 0)]))
    failed = next(d for d in done if d.failure)
    assert failed.task[1] == 99
    assert failed.failure.kind == "died"
    assert str(failed.failure) == "the worker was killed by SIGKILL: in each of 2 attempts"
    assert [d.result for d in done if not d.failure] == ["done"]


def test_a_worker_that_exits_is_told_from_one_that_was_killed():
    with WorkerPool(exiting, 1) as pool:
        (done,) = pool.run([0])
    assert "exited 7" in str(done.failure)


def test_what_a_worker_last_printed_is_part_of_its_failure(capfd):
    with WorkerPool(printing_and_aborting, 1) as pool:
        (done,) = pool.run([0])
    assert str(done.failure).startswith("the worker was killed by SIGABRT")
    assert "it printed 'LLVM ERROR: no such operand'" in str(done.failure)
    out, err = capfd.readouterr()
    assert out == ""
    assert "at first\nLLVM ERROR: no such operand\n" in err


def test_what_workers_print_never_reaches_standard_output(capfd):
    with WorkerPool(printing, 1) as pool:
        assert [done.result for done in pool.run([1, 2])] == [1, 2]
    out, err = capfd.readouterr()
    assert (out, err) == ("", "task 1\ntask 2\n")


def test_a_task_that_overruns_is_killed_and_others_go_on():
    with WorkerPool(sleep_or_square, 1, timeout=0.5, retries=3) as pool:
        done = list(pool.run([-1, 4]))
    assert [d.failure.kind if d.failure else d.result for d in done] == ["timeout", 16]
    assert done[0].attempts == 1


def test_a_worker_killed_from_outside_while_it_is_idle_is_replaced():
    with WorkerPool(square, 1, retries=1) as pool:
        results = pool.run([1, 2])
        assert next(results).result == 1
        os.kill(pool.pids[0], signal.SIGKILL)
        assert [d.result for d in results] == [4]


def test_a_worker_can_be_replaced_after_each_task():
    with WorkerPool(pid_after_a_while, 1, tasks_per_worker=1) as pool:
        pids = [d.result for d in pool.run(range(3))]
    assert len(set(pids)) == 3


SCRIPT = """
import os, subprocess, sys, time
from aiter.aot.flydsl.pool import WorkerPool
def work(n):
    # A child of its own, as a linker would be.
    child = subprocess.Popen(["sleep", "60"])
    open(sys.argv[1] + f"/{n}", "w").write(f"{os.getpid()} {child.pid}")
    time.sleep(60)
try:
    with WorkerPool(work, 2) as pool:
        list(pool.run([1, 2]))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(("how", "code"), [("SIGINT", 130), ("SIGKILL", -9)])
def test_however_the_parent_ends_no_worker_stays(tmp_path, how, code):
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)], start_new_session=True)
    files = [tmp_path / "1", tmp_path / "2"]
    try:
        assert wait_until(lambda: all(f.exists() and " " in f.read_text() for f in files))
        started = [list(map(int, f.read_text().split())) for f in files]
        parent.send_signal(signal.Signals[how])
        assert parent.wait(20) == code
        assert wait_until(lambda: not any(alive(worker) for worker, _ in started))
        if how == "SIGINT":
            assert wait_until(lambda: not any(alive(child) for _, child in started))
    finally:
        parent.kill()
        for file in files:
            if file.exists():
                for pid in file.read_text().split():
                    if alive(int(pid)):
                        os.kill(int(pid), signal.SIGKILL)
