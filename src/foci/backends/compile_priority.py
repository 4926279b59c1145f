"""Whether somebody waits for a kernel that is compiled, and who else could compile it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

__all__ = ["Submit", "is_waited_for", "submit_elsewhere", "unhurried"]

Submit: TypeAlias = Callable[[Callable[[bytes], None], bytes], "Future[Any]"]
"""Calls a function in another process."""

_waited: Final[ContextVar[bool]] = ContextVar("waited", default=True)
_submit: Final[ContextVar[Submit | None]] = ContextVar("submit", default=None)


def is_waited_for() -> bool:
    """Whether this thread's kernels are wanted at once."""
    return _waited.get()


def submit_elsewhere() -> Submit | None:
    """What hands this thread's kernels to other processes; None where it compiles them itself."""
    return _submit.get()


@contextmanager
def unhurried(submit: Submit | None = None) -> Iterator[None]:
    """Inside, kernels compile beside work that goes first, in other processes where `submit` hands them there."""
    before, other = _waited.set(False), _submit.set(submit)
    try:
        yield
    finally:
        _submit.reset(other)
        _waited.reset(before)
