"""Settings of the interpreter while a caller waits for the compiler's threads."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from foci.backends.compile_priority import is_waited_for

__all__ = ["caller_waits"]


@contextmanager
def caller_waits() -> Iterator[None]:
    """Shorten the GIL switch interval and pause Python's garbage collector while a caller waits for kernels.

    The compiler takes the GIL briefly about 100 times per kernel, and would wait 5 ms each time while the front end processes another
    kernel; so it does 450 times as it hashes its own files. The front end makes objects by the hundred thousand, so the collector would
    look through all objects of the process again and again, a fifth of the front end's time.
    """
    if not is_waited_for():
        yield
        return
    with _lock:
        _saved.append(_Settings(sys.getswitchinterval(), gc.isenabled()))
        sys.setswitchinterval(min(_saved[0].switch_interval, 2e-4))
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            before = _saved[0]
            _saved.pop()
            if not _saved:
                sys.setswitchinterval(before.switch_interval)
                if before.collects:
                    gc.enable()


class _Settings(NamedTuple):
    """Settings of the interpreter."""

    switch_interval: float  # seconds
    collects: bool  # whether the garbage collector runs by itself


_lock: Final = threading.Lock()
_saved: Final[list[_Settings]] = []
"""Settings to restore; the first are the process's own."""
