"""Worker processes of the compiler: jobs are done elsewhere, a worker's end fails none silently, and idle workers end."""

import os
import pathlib
import re
import subprocess
import sys
import time
from multiprocessing import spawn

import pytest

import foci
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


IMPORTS = """
import importlib, runpy, sys
script, *modules = sys.argv[1:]
runpy.run_path(script)["without_packages"]()
for module in ("foci.backends.gpu.compile_subprocess", *modules):
    importlib.import_module(module)
    assert "torch" not in sys.modules, module
"""


def assert_imported_without_torch(modules):
    done = subprocess.run([sys.executable, "-c", IMPORTS, compile_workers._SCRIPT, *modules], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_workers_import_kernels_without_torch():
    """Which takes seconds."""
    pytest.importorskip("triton")
    root = pathlib.Path(foci.__file__).parent
    paths = [path for path in sorted(root.glob("backends/*/*.py")) if re.search(r"^@(gluon|triton)_jit", path.read_text(), re.M)]
    assert len(paths) > 30
    assert_imported_without_torch([".".join(("foci", *path.relative_to(root).with_suffix("").parts)) for path in paths])


def test_workers_load_arguments_of_kernels_without_torch(monkeypatch):
    """Their classes, which a pickled kernel names, are in modules that do without it."""
    pytest.importorskip("triton.experimental.gluon", reason="needs a Triton with Gluon")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter does not compile")
    from kernel_stand_ins import Function
    from launch_calls import CASES, FIXED, make_call, make_inputs
    from launch_recorder import recording_launches, run
    from record_launches import ARCHS

    classes = set()

    def note(value):
        if isinstance(value, tuple):
            classes.add(type(value))
            for part in value:
                note(part)

    class Noting(Function):
        def noted(self, log, grid, args, options, *, is_launch):
            note(args)
            return super().noted(log, grid, args, options, is_launch=is_launch)

    def stand_in(function, log):
        return Noting(function, log.launched, log.launched, log.compiled)

    for arch, backends in ARCHS.items():
        for case in CASES.values():
            with recording_launches(monkeypatch, arch, stand_in) as log, foci.use(*backends):
                run(log, make_call(case), make_inputs(case), FIXED)
    modules = {each.__module__ for each in classes - {tuple}}
    assert len(modules) > 10
    assert_imported_without_torch(sorted(modules))


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
