"""Worker processes of the compiler: jobs are done elsewhere, a worker's end fails none silently, and idle workers end."""

import contextlib
import functools
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
from multiprocessing import spawn

import pytest

import foci
from foci.backends import compile_workers


@pytest.fixture
def pool():
    return compile_workers._Pool(compile_workers._BACKGROUND, 1)


def wait_until_few_run(pool, count=0):
    """Wait until no more than `count` workers run."""
    deadline = time.monotonic() + 30
    while pool._running > count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pool._running == count


def test_a_job_is_done_in_another_process(pool, tmp_path):
    pool.submit(os.mkdir, str(tmp_path / "made").encode()).result(60)
    assert (tmp_path / "made").is_dir()


def test_a_worker_that_ends_fails_its_jobs_and_later_ones_have_another(pool, tmp_path):
    lost = pool.submit(os._exit, b"")  # a wrong argument: the worker ends
    with pytest.raises(OSError, match="ended"):
        lost.result(60)
    wait_until_few_run(pool)
    pool.submit(os.mkdir, str(tmp_path / "made").encode()).result(60)
    assert (tmp_path / "made").is_dir()


@pytest.mark.parametrize("interpreter", ["/no/python", None])
def test_jobs_fail_where_no_worker_can_start(interpreter, pool, monkeypatch):
    """As in a program that embeds Python, and names no interpreter to `multiprocessing.set_executable`."""
    monkeypatch.setattr(spawn, "get_executable", lambda: interpreter)
    with pytest.raises(OSError, match="no compile worker is left"):
        pool.submit(os.mkdir, b"never").result(60)
    wait_until_few_run(pool)


def test_idle_workers_end(pool, monkeypatch, tmp_path):
    monkeypatch.setattr(compile_workers, "_IDLE_SECONDS", 0.01)
    pool.submit(os.mkdir, str(tmp_path / "made").encode()).result(60)
    wait_until_few_run(pool)
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


@pytest.mark.parametrize("kind", [compile_workers._WAITED, compile_workers._BACKGROUND])
def test_workers_of_the_background_have_a_low_priority(kind, tmp_path):
    """Those that a caller waits for have the caller's."""
    compile_workers._Pool(kind, 1).submit(tell, str(tmp_path / "told").encode()).result(60)
    niceness, *_ = (tmp_path / "told").read_text().split()
    assert int(niceness) == os.nice(0) + kind.niceness


def tell(path):
    """A job: write a worker's niceness, its number, its parent's, and whether it has Triton, to a file."""
    with open(path + b".new", "w") as file:
        file.write(f"{os.nice(0)} {os.getpid()} {os.getppid()} {'triton.compiler' in sys.modules}")
    os.rename(path + b".new", path)


def tell_and_wait(paths):
    """A job that ends once another worker has done one beside it."""
    mine, other = paths.split(b"\n")
    tell(mine)
    while not os.path.exists(other):
        time.sleep(0.01)


def test_workers_are_forks_of_a_process_that_imported_the_compiler(tmp_path):
    pool = compile_workers._Pool(compile_workers._WAITED, 2)
    files = [tmp_path / name for name in "ab"]
    for job in [pool.submit(tell_and_wait, f"{one}\n{other}".encode()) for one, other in (files, files[::-1])]:
        job.result(60)
    (_, one, parent, has_triton), (_, other, *same) = (file.read_text().split() for file in files)
    assert one != other
    assert [parent, has_triton] == same
    assert parent != str(os.getpid())
    assert has_triton == str(importlib.util.find_spec("triton") is not None)  # the job itself imported nothing of it


def test_a_worker_that_ends_leaves_the_others(tmp_path):
    """Each pipe is held by its worker alone."""
    pool = compile_workers._Pool(compile_workers._WAITED, 2)
    lost = pool.submit(os._exit, b"")
    with pytest.raises(OSError, match="ended"):
        lost.result(60)
    wait_until_few_run(pool, 1)
    for name in "abc":
        pool.submit(os.mkdir, str(tmp_path / name).encode()).result(60)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


def held_pipes():
    """What the descriptors of this process name."""
    names = set()
    for end in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, as that of the folder itself
            names.add(os.readlink(f"/proc/self/fd/{end}"))
    return names


def test_workers_that_ended_hold_no_descriptors(pool, monkeypatch, tmp_path):
    opened = set()

    def note(pipes, inner=compile_workers._open_pipe):
        inner(pipes)
        opened.update(os.readlink(f"/proc/self/fd/{end}") for end in pipes[-2:])

    monkeypatch.setattr(compile_workers, "_open_pipe", note)
    monkeypatch.setattr(compile_workers, "_IDLE_SECONDS", 0.01)
    pool.submit(os.mkdir, str(tmp_path / "made").encode()).result(60)
    assert opened
    wait_until_few_run(pool)
    deadline = time.monotonic() + 10
    while (kept := opened & held_pipes()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not kept


def test_jobs_fail_where_no_pipe_can_be_opened(pool, monkeypatch):
    """As in a process that has all the files open that it may have."""
    opened, open_pipe = [], os.pipe

    def one_pipe():
        if opened:
            raise OSError("too many open files")
        opened.append(open_pipe())
        return opened[0]

    monkeypatch.setattr(os, "pipe", one_pipe)
    with pytest.raises(OSError, match="no compile worker is left"):
        pool.submit(os.mkdir, b"never").result(60)
    for end in opened[0]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)


@pytest.mark.parametrize("started", [0, 1, 2])
def test_jobs_do_not_wait_for_threads_that_the_system_refuses(started, pool, monkeypatch, tmp_path):
    """The thread that starts workers, and one that feeds each, of two."""
    pool._count, begun, start = 2, [], threading.Thread.start

    def refuse(thread):
        if thread.name == "foci-compile" and len(begun) == started:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        job = pool.submit(os.mkdir, str(tmp_path / "first").encode())
        if started < 2:
            with pytest.raises(OSError, match="no compile worker is left"):
                job.result(60)
        else:
            job.result(60)  # by the one that is fed
            wait_until_few_run(pool, 1)
    pool.submit(os.mkdir, str(tmp_path / "second").encode()).result(60)
    assert (tmp_path / "second").is_dir()


CLOSED = """
import os, sys
for descriptor in map(int, sys.argv[2:]):
    os.close(descriptor)
from foci.backends import compile_workers
pool = compile_workers._Pool(compile_workers._WAITED, 2)
for number in range(3):
    pool.submit(os.mkdir, f"{sys.argv[1]}/{number}".encode()).result(60)
"""


@pytest.mark.parametrize("closed", ["0", "0 1", "0 1 2", "1"])
def test_workers_of_a_program_without_standard_streams(closed, tmp_path):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CLOSED, str(tmp_path), *closed.split()], timeout=100, check=False)
    assert done.returncode == 0
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]


def test_a_function_without_a_name_is_refused(pool):
    with pytest.raises(AttributeError):
        pool.submit(functools.partial(os.mkdir), b"never")
    assert pool._running == 0


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
