"""Worker processes of the compiler: jobs are done elsewhere, a worker's end fails none silently, and idle workers end."""

import os
import subprocess
import sys
import time

import pytest

from foci.backends import compile_workers


@pytest.fixture
def pool():
    return compile_workers._Pool(1)


def wait_until_none_runs(pool):
    deadline = time.monotonic() + 30
    while pool._running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pool._running == 0


def test_a_job_is_done_in_another_process(pool, tmp_path):
    pool.submit(os.mkdir, str(tmp_path / "made").encode()).result(60)
    assert (tmp_path / "made").is_dir()


def test_a_worker_that_ends_fails_its_jobs_and_later_ones_have_another(pool, tmp_path):
    lost = pool.submit(os._exit, b"")  # a wrong argument: the worker ends
    with pytest.raises(OSError, match="ended"):
        lost.result(60)
    wait_until_none_runs(pool)
    pool.submit(os.mkdir, str(tmp_path / "made").encode()).result(60)
    assert (tmp_path / "made").is_dir()


def test_idle_workers_end(pool, monkeypatch, tmp_path):
    monkeypatch.setattr(compile_workers, "_IDLE_SECONDS", 0.01)
    pool.submit(os.mkdir, str(tmp_path / "made").encode()).result(60)
    wait_until_none_runs(pool)
    pool.submit(os.rmdir, str(tmp_path / "made").encode()).result(60)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("cores", "ranks", "count"), [(2, "", 0), (4, "", 1), (16, "", 4), (128, "8", 4), (64, "8", 2), (16, "8", 0)])
def test_the_program_keeps_most_cores(cores, ranks, count, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(compile_workers._Pool, "_shared", None)
    assert (compile_workers.compile_workers() is not None) == (count > 0)
    if count:
        assert compile_workers._Pool._shared._count == count


ENDS = """
import time
from foci.backends.compile_priority import in_background, is_stopping

def work():
    while not is_stopping():
        time.sleep(0.01)
    print("ended between two kernels")

in_background(work)
"""


def test_a_thread_that_compiles_ahead_ends_before_the_interpreter():
    """Which would end it in the middle of a compiler, and abort."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ended between two kernels\n"), done.stderr


def test_a_job_that_no_worker_has_taken_can_be_cancelled(pool, tmp_path):
    pool._running = 1  # as if a worker were busy
    job = pool.submit(os.mkdir, str(tmp_path / "cancelled").encode())
    assert job.cancel()
    pool._running = 0
    pool.submit(os.mkdir, str(tmp_path / "made").encode()).result(60)
    assert (tmp_path / "made").is_dir()
    assert not (tmp_path / "cancelled").exists()
