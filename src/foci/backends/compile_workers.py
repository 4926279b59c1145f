"""Worker processes that compile kernels in the background, beside a program that compiles nothing else.

A compiler's front end is Python, which would hold this process's GIL for seconds. The workers are started at the first request, have the
lowest priority but one of the operating system, and end when they have had nothing to do for a minute, or with this process. The main
module is not imported in them, unlike in those of `multiprocessing`.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import IO, Any, Final

from foci.backends.compile_priority import Submit

__all__ = ["Job", "available_cores", "compile_workers", "serve"]

_CORES_EACH: Final = 4
"""Cores of the machine for each worker: the program has the others."""
_MOST_WORKERS: Final = 4
_IDLE_SECONDS: Final = 60.0


class Job(Future[Any]):
    """A call of a function by a worker. It can be cancelled until a worker that is ready takes it."""

    def __init__(self, function: Callable[[bytes], None], argument: bytes) -> None:
        super().__init__()
        self.function = function
        self.argument = argument


def compile_workers() -> Submit | None:
    """Return the function that submits a job to the workers; None where the machine has too few cores for one."""
    count = min(_MOST_WORKERS, available_cores() // _CORES_EACH)
    return _Pool.of(count).submit if count else None


def available_cores() -> int:
    """Cores for this process; ranks of one machine share its cores."""
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return max(1, len(os.sched_getaffinity(0)) // ranks)


class _Pool:
    """Workers that share a queue."""

    _shared: _Pool | None = None
    _lock = threading.Lock()

    def __init__(self, count: int) -> None:
        self._count = count
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._running = 0

    @classmethod
    def of(cls, count: int) -> _Pool:
        """The pool of this process."""
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls(count)
            return cls._shared

    def submit(self, function: Callable[[bytes], None], argument: bytes) -> Job:
        """Call a function, which a worker imports by its name, in a worker."""
        job = Job(function, argument)
        with self._lock:
            self._jobs.put(job)
            if self._running < self._count:
                self._running += 1
                threading.Thread(target=self._feed, name="foci-compile", daemon=True).start()
        return job

    def _feed(self) -> None:
        """Start a worker, and give it jobs until there are none."""
        command = [sys.executable, "-c", "from foci.backends.compile_workers import serve; serve()"]
        path = os.pathsep.join(filter(None, sys.path))
        try:
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path}
            ) as worker:
                assert worker.stdin is not None
                assert worker.stdout is not None
                is_ready = worker.stdout.read(1)  # it has imported torch, which takes seconds
                while is_ready and self._next(worker.stdin, worker.stdout):
                    pass
            if not is_ready:
                raise BrokenPipeError("the compile worker ended")
        except OSError:  # it could not be started, or has ended: the rest is compiled by those who wait for it
            self._fail_all()

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
            name = f"{job.function.__module__}:{job.function.__qualname__}".encode()
            for part in (name, job.argument):
                sink.write(len(part).to_bytes(8, "little") + part)
            sink.flush()
            if not source.read(1):
                raise BrokenPipeError("the compile worker ended")
        except OSError as error:
            job.set_exception(error)
            raise
        job.set_result(None)
        return True

    def _fail_all(self) -> None:
        with self._lock:
            self._running -= 1
            while not self._running and not self._jobs.empty():
                job = self._jobs.get()
                if job.set_running_or_notify_cancel():
                    job.set_exception(BrokenPipeError("no compile worker is left"))


def serve() -> None:
    """Do jobs from standard input, one after another, and answer each, and the start, with a byte: what a worker runs."""
    import importlib

    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a compiler prints is no answer
    os.nice(10)
    sink.write(b"\0")
    sink.flush()
    while header := source.read(8):
        module, _, name = source.read(int.from_bytes(header, "little")).decode().partition(":")
        argument = source.read(int.from_bytes(source.read(8), "little"))
        getattr(importlib.import_module(module), name)(argument)
        sink.write(b"\0")
        sink.flush()
