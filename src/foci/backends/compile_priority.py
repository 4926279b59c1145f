"""Whether a caller waits for the kernels that this thread compiles, and whether other processes compile them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

__all__ = ["Submit", "is_waited_for", "submit_elsewhere", "unhurried"]

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
