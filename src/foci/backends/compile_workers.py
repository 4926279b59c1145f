"""Worker processes that compile kernels: those of a call that waits for them, and in the background those of calls to come.

A compiler's front end is Python, which holds the GIL: in one process kernels would be read one after another, and a program that
computes meanwhile would be held up. Workers start at the first request, without torch, as forks of a process that has imported the
compiler. They end when they have had nothing to do for a minute, or with this process. Those of the background have a low priority of the
operating system. `compile_worker` is what they run, by the interpreter that `multiprocessing.set_executable` names where Python is
embedded; the main module is not imported in them, unlike in those of `multiprocessing`.
"""

from __future__ import annotations

import fcntl
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import spawn
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from foci.backends.compile_priority import Submit

__all__ = ["Job", "available_cores", "background_workers", "compiles_beside", "start_waited_workers", "waited_workers"]

_FEW_CORES: Final = 8
"""On fewer cores, kernels of later passes would take cores from those that a caller waits for."""


class _Kind(NamedTuple):
    """A kind of workers."""

    cores_each: int  # cores of the machine for each worker: the program has the others
    most: int  # workers
    niceness: int  # steps of priority below this process
    least_cores: int  # on fewer cores there are no workers


_WAITED: Final = _Kind(cores_each=2, most=8, niceness=0, least_cores=_FEW_CORES)
_BACKGROUND: Final = _Kind(cores_each=4, most=4, niceness=10, least_cores=4)
_SCRIPT: Final = Path(__file__).with_name("compile_worker.py")
_IDLE_SECONDS: Final = 60.0


class Job(Future[Any]):
    """A call of a function by a worker. It can be cancelled until a worker that is ready takes it."""

    def __init__(self, function: Callable[[bytes], None], argument: bytes) -> None:
        super().__init__()
        self.name = f"{function.__module__}:{function.__qualname__}".encode()
        self.argument = argument


def waited_workers() -> Submit | None:
    """Return the function that submits a job to the workers for kernels that a call waits for, or its backward will; None on few cores."""
    return _submit(_WAITED)


def background_workers() -> Submit | None:
    """Return the function that submits a job to the workers of the background; None where the machine has too few cores for one."""
    return _submit(_BACKGROUND)


def start_waited_workers() -> None:
    """Start the workers of `waited_workers` before there are jobs for them."""
    pool = _pool(_WAITED)
    if pool is not None:
        pool.start()


def _submit(kind: _Kind) -> Submit | None:
    pool = _pool(kind)
    return None if pool is None else pool.submit


def _pool(kind: _Kind) -> _Pool | None:
    cores = available_cores()
    return _Pool.of(kind, min(kind.most, cores // kind.cores_each)) if cores >= kind.least_cores else None


def compiles_beside() -> bool:
    """Whether kernels of later passes compile beside those that a caller waits for."""
    return available_cores() >= _FEW_CORES


def available_cores() -> int:
    """Cores for this process; ranks of one machine share its cores."""
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return max(1, len(os.sched_getaffinity(0)) // ranks)


class _Pool:
    """Workers that share a queue."""

    _shared: Final[dict[_Kind, _Pool]] = {}
    _lock = threading.Lock()

    def __init__(self, kind: _Kind, count: int) -> None:
        self._kind = kind
        self._count = count
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._running = 0

    @classmethod
    def of(cls, kind: _Kind, count: int) -> _Pool:
        """The pool of this process."""
        with cls._lock:
            return cls._shared.setdefault(kind, cls(kind, count))

    def submit(self, function: Callable[[bytes], None], argument: bytes) -> Job:
        """Call a function, which a worker imports by its name, in a worker."""
        job = Job(function, argument)
        with self._lock:
            self._jobs.put(job)
        self.start()
        return job

    def start(self) -> None:
        """Start the workers that do not run."""
        with self._lock:
            missing = self._count - self._running
            self._running = self._count
        if missing:
            self._begin(missing, self._run, missing)

    def _begin(self, count: int, target: Callable[..., None], *args: int) -> bool:
        """Start a thread on which a number of workers depend. If the system allows none, they do not run."""
        try:
            threading.Thread(target=target, args=args, name="foci-compile", daemon=True).start()
        except RuntimeError:
            self._fail(count)
            return False
        return True

    def _run(self, count: int) -> None:
        """Start a process that becomes some workers, have each fed, and wait for their end."""
        pipes: list[int] = []  # of each worker the ends of its jobs, to read and to write, and of its answers
        try:
            for _ in range(2 * count):
                _open_pipe(pipes)
            ends = [pipes[place : place + 4] for place in range(0, len(pipes), 4)]
            theirs = [end for jobs, _, _, answers in ends for end in (jobs, answers)]
            # -P: modules beside the script have names of packages
            command = [os.fsdecode(spawn.get_executable()), "-P", str(_SCRIPT), str(self._kind.niceness), *map(str, theirs)]
            path = os.pathsep.join(filter(None, sys.path))
            process = subprocess.Popen(
                command, pass_fds=theirs, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
        except Exception:
            _close(*pipes)
            self._fail(count)
            return
        _close(*theirs)
        for _, jobs, answers, _ in ends:
            if not self._begin(1, self._feed, jobs, answers):
                _close(jobs, answers)
        process.wait()

    def _feed(self, jobs: int, answers: int) -> None:
        """Give a worker jobs until there are none."""
        try:
            with open(jobs, "wb") as sink, open(answers, "rb") as source:
                is_ready = source.read(1)
                while is_ready and self._next(sink, source):
                    pass
            if not is_ready:
                raise BrokenPipeError("the compile worker ended")
        except Exception:  # it has ended: the rest is compiled by those who wait for it
            self._fail(1)

    def _next(self, sink: IO[bytes], source: IO[bytes]) -> bool:
        """Have one job done; False if there was none for long."""
        try:
            job = self._jobs.get(timeout=_IDLE_SECONDS)
        except queue.Empty:
            with self._lock:
                if self._jobs.empty():
                    self._running -= 1
                    return False
            return True
        if not job.set_running_or_notify_cancel():
            return True
        try:
            for part in (job.name, job.argument):
                sink.write(len(part).to_bytes(8, "little") + part)
            sink.flush()
            if not source.read(1):
                raise BrokenPipeError("the compile worker ended")
        except OSError as error:
            job.set_exception(error)
            raise
        job.set_result(None)
        return True

    def _fail(self, count: int) -> None:
        """Note that workers have ended. Without any, the jobs that wait fail."""
        with self._lock:
            self._running -= count
            while not self._running and not self._jobs.empty():
                job = self._jobs.get()
                if job.set_running_or_notify_cancel():
                    job.set_exception(BrokenPipeError("no compile worker is left"))


def _open_pipe(ends: list[int]) -> None:
    """Add the ends of a pipe. They are not those of standard streams, of which a program may have closed some: another process would have
    its own there."""
    opened = os.pipe()
    try:
        for end in opened:
            ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3))  # noqa: PERF401  # those that there are, if one cannot be made
    finally:
        _close(*opened)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
