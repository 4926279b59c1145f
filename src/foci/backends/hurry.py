"""Whether somebody waits for a kernel that is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

__all__ = ["is_waited_for", "unhurried"]

_waited: Final[ContextVar[bool]] = ContextVar("waited", default=True)


def is_waited_for() -> bool:
    """Whether this thread's kernels are wanted at once."""
    return _waited.get()


@contextmanager
def unhurried() -> Iterator[None]:
    """Inside, kernels compile beside work that goes first."""
    before = _waited.set(False)
    try:
        yield
    finally:
        _waited.reset(before)
