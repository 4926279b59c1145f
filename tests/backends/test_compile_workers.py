"""Worker processes of the compiler: jobs are done elsewhere, a worker's end fails none silently, and idle workers end."""

import os
import subprocess
import sys
import time
from multiprocessing import spawn

import pytest

from foci.backends import compile_workers


@pytest.fixture
def pool():
    return compile_workers._Pool(compile_workers._BACKGROUND, 1)


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


@pytest.mark.parametrize("interpreter", ["/no/python", None])
def test_jobs_fail_where_no_worker_can_start(interpreter, pool, monkeypatch):
    """As in a program that embeds Python, and names no interpreter to `multiprocessing.set_executable`."""
    monkeypatch.setattr(spawn, "get_executable", lambda: interpreter)
    with pytest.raises(OSError, match="no compile worker is left"):
        pool.submit(os.mkdir, b"never").result(60)
    wait_until_none_runs(pool)


def test_idle_workers_end(pool, monkeypatch, tmp_path):
    monkeypatch.setattr(compile_workers, "_IDLE_SECONDS", 0.01)
    pool.submit(os.mkdir, str(tmp_path / "made").encode()).result(60)
    wait_until_none_runs(pool)
    pool.submit(os.rmdir, str(tmp_path / "made").encode()).result(60)
    assert not (tmp_path / "made").exists()


def test_workers_that_started_early_do_the_first_jobs(pool, tmp_path):
    pool.start()
    assert pool._running == 1
    pool.submit(os.mkdir, str(tmp_path / "made").encode()).result(60)
    assert (tmp_path / "made").is_dir()
    assert pool._running == 1


@pytest.mark.parametrize(
    ("cores", "ranks", "waited", "background"),
    [(2, "", 0, 0), (4, "", 0, 1), (8, "", 4, 2), (16, "", 8, 4), (128, "8", 8, 4), (64, "8", 4, 2), (16, "8", 0, 0)],
)
def test_the_program_keeps_most_cores(cores, ranks, waited, background, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(compile_workers._Pool, "_shared", {})
    submits = compile_workers.waited_workers(), compile_workers.background_workers()
    assert [0 if submit is None else submit.__self__._count for submit in submits] == [waited, background]


def test_workers_of_the_background_have_a_low_priority(tmp_path):
    """Those that a caller waits for have the caller's."""
    for kind in (compile_workers._WAITED, compile_workers._BACKGROUND):
        said = subprocess.run(
            [sys.executable, "-P", compile_workers._SCRIPT, str(kind.niceness)], input=job("tell", f"{tmp_path}/{kind.niceness}"), check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, os.path.dirname(__file__)])}, capture_output=True,
        ).stdout  # fmt: skip
        assert said == b"\0\0"
        assert (tmp_path / str(kind.niceness)).read_text() == str(os.nice(0) + kind.niceness)


def job(function, argument):
    """A job as a worker reads it, of a function of this module."""
    return b"".join(len(part.encode()).to_bytes(8, "little") + part.encode() for part in (f"{__name__}:{function}", argument))


def tell(path):
    """Write this process's niceness to a file."""
    with open(path, "w") as file:
        file.write(str(os.nice(0)))


KERNELS = """
import importlib, pathlib, re, runpy, sys
runpy.run_path(sys.argv[1])["without_packages"]()
root = pathlib.Path(sys.modules["foci"].__path__[0])
kernels = [path for path in sorted(root.glob("backends/*/*.py")) if re.search(r"^@(gluon|triton)[.]jit", path.read_text(), re.M)]
for path in (*kernels, root / "backends/gpu/compile_subprocess.py"):
    importlib.import_module(".".join(("foci", *path.relative_to(root).with_suffix("").parts)))
    assert "torch" not in sys.modules, path
print(len(kernels))
"""


def test_workers_import_kernels_without_torch():
    """Which takes seconds."""
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", KERNELS, compile_workers._SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


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
