"""Keys of kernels in Triton's cache on disk, the same in every process.

Triton knows a function by its text, by what it calls, and by the constants that all of these read. It takes up the constants of what is
called before it has looked at that, so the first function of a process that is asked for its key lacks constants, which it would have had
as the second: another order of kernels gave another key, and each was compiled once more. So what is called is asked first.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from triton.runtime.jit import JITCallable, JITFunction

__all__ = ["fill_cache_keys", "source_length"]


def fill_cache_keys(arguments: Iterable[Any]) -> None:
    """Compute Triton's cache keys of the functions among some arguments, and in tuples among these, callees first."""
    for each in arguments:
        if isinstance(each, JITFunction):
            _settle(each, set())
        elif isinstance(each, tuple):
            fill_cache_keys(each)


def _settle(function: JITCallable, begun: set[int]) -> None:
    if function.hash is not None or id(function) in begun:
        return
    begun.add(id(function))
    for called in _called(function):
        _settle(called, begun)
    function.cache_key  # noqa: B018


def _called(function: JITCallable) -> Iterator[JITCallable]:
    for name in function.fn.__code__.co_names:
        callee = function.__globals__.get(name)
        if isinstance(callee, JITCallable):
            yield callee


@functools.lru_cache(maxsize=1024)
def source_length(function: JITCallable) -> int:
    """Characters of a kernel's source, with all that it calls: which of two kernels takes longer to compile."""
    found, begun = {function}, [function]
    while begun:
        new = set(_called(begun.pop())) - found
        found |= new
        begun.extend(new)
    return sum(len(each.src) for each in found)
