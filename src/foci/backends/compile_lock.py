"""One compilation of each kernel on a machine: who needs a kernel that another process compiles waits for it. And word of a long wait."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

from foci.backends import disk
from foci.backends.compile_priority import is_waited_for

__all__ = ["compiling", "locked"]

_LOCKS: Final = 256  # files; two kernels that share one wait for each other
_LONGEST: Final = 300.0  # seconds of a compilation
_PATIENCE: Final = 1.0  # seconds of a wait about which nothing is said


@contextlib.contextmanager
def locked(key: str) -> Iterator[None]:
    """Hold the lock of a kernel, which ends with the process that holds it. Nothing is held, and each process compiles for itself, where
    there is no folder for locks, or the file system has none, and once a process has held it for longer than a compilation may take.

    Args:
        key: digest of what the kernel is compiled from.
    """
    folder = disk.cache_directory("locks")
    number = int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) % _LOCKS
    with contextlib.ExitStack() as stack:
        if folder is not None:
            with contextlib.suppress(OSError):
                descriptor = os.open(folder / f"{number}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, descriptor)
                _take(descriptor)
                stack.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)  # a process forked meanwhile has the descriptor too
        yield


def _take(descriptor: int) -> None:
    deadline, pause = time.monotonic() + _LONGEST, 0.01
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
        else:
            return


_has_said: Final[ContextVar[bool]] = ContextVar("told", default=False)


@contextlib.contextmanager
def compiling(what: str) -> Iterator[None]:
    """Say on stderr what compiles, once, if it is not done after a second and a caller waits for it. FOCI_QUIET=1 says nothing.

    Args:
        what: such as "3 kernels for sm_90: attention_forward, combine_splits".
    """
    if os.environ.get("FOCI_QUIET") == "1" or _has_said.get() or not is_waited_for():
        yield
        return
    timer = threading.Timer(_PATIENCE, _say, (what,))
    timer.daemon = True
    timer.start()
    token = _has_said.set(True)
    try:
        yield
    finally:
        _has_said.reset(token)
        timer.cancel()


def _say(what: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        print(f"foci compiles {what}. It is kept on disk; FOCI_QUIET=1 hides this", file=sys.stderr, flush=True)
