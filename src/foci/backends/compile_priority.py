"""Whether a caller waits for a thread's kernels, and whether other processes compile them; threads that compile ahead."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

__all__ = [
    "Submit",
    "in_background",
    "is_stopping",
    "is_waited_for",
    "submit_elsewhere",
    "unhurried",
    "wait_for_background",
]

Submit: TypeAlias = Callable[[Callable[[bytes], None], bytes], "Future[Any]"]
"""(function, argument) -> future of the call in another process."""

_waited: Final[ContextVar[bool]] = ContextVar("waited", default=True)
_submit: Final[ContextVar[Submit | None]] = ContextVar("submit", default=None)


def is_waited_for() -> bool:
    """Whether a caller waits for this thread's kernels."""
    return _waited.get()


def submit_elsewhere() -> Submit | None:
    """Return the function that submits this thread's kernels to other processes; None if it compiles them itself."""
    return _submit.get()


@contextmanager
def unhurried(submit: Submit | None = None) -> Iterator[None]:
    """Compile kernels in the background inside the block: other work has priority. With `submit`, other processes compile them."""
    before, other = _waited.set(False), _submit.set(submit)
    try:
        yield
    finally:
        _submit.reset(other)
        _waited.reset(before)


_stopping: Final = threading.Event()
_JOIN_SECONDS: Final = 30.0
_NAME: Final = "foci-ahead"


def in_background(function: Callable[..., None], *args: object) -> threading.Thread:
    """Run a function in a thread that ends before the interpreter does: it asks `is_stopping` between two kernels.

    The interpreter ends daemon threads wherever they are. In the middle of a compiler that aborts the process.
    """
    thread = threading.Thread(target=function, args=args, name=_NAME, daemon=True)
    atexit.register(_stop, thread)
    thread.start()
    return thread


def _stop(thread: threading.Thread) -> None:
    _stopping.set()
    thread.join(_JOIN_SECONDS)


def wait_for_background() -> None:
    """Wait until no thread compiles ahead."""
    for thread in threading.enumerate():
        if thread.name == _NAME:
            thread.join()


def is_stopping() -> bool:
    """Whether the interpreter ends, so that nothing more is compiled ahead."""
    return _stopping.is_set()
