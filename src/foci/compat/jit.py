"""Decorators of the functions that kernels are made of: as Triton's, but a function's source is read when something first needs it.

Triton's decorators read and tokenize the source of every function of a module as it is imported. A problem needs about half of them, and
its first call waits for the import.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import triton

from foci.compat.lookup import find

__all__ = ["make_decorator", "triton_jit"]

_OF_FUNCTION = ("__name__", "__qualname__", "__module__", "__doc__", "__globals__")
"""What Triton's constructor copies from a function, and Python asks of it by names that `__getattr__` is not asked for."""


class _ReadWhenNeeded:
    """Mixed into Triton's class of functions. Its constructor runs when an attribute is asked for that only the constructor sets."""

    def __init__(self, fn: Callable[..., Any], **options: Any) -> None:
        self.fn = fn
        self._options: dict[str, Any] | None = options
        self._construction = threading.RLock()
        self.__dict__.update((name, getattr(fn, name)) for name in _OF_FUNCTION)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_construction" not in self.__dict__:
            raise AttributeError(name)
        with self._construction:
            if self._options is not None:
                options, self._options = self._options, None
                try:
                    super().__init__(self.fn, **options)  # type: ignore[call-arg]
                except BaseException:
                    self._options = options
                    raise
        return object.__getattribute__(self, name)


def make_decorator(path: str, decorator: Callable[..., Any]) -> Callable[..., Any]:
    """Make a decorator as one of Triton's, of a class that reads a function's source when it is needed.

    Args:
        path: of the class that Triton's decorator makes instances of; where Triton has no such class, its decorator is returned.
        decorator: Triton's.
    """
    base = find(path, without="reads the source of all kernels as they are imported", seen=("3.6", "3.9"))
    if base is None:
        return decorator
    made: Any = type(base.__name__, (_ReadWhenNeeded, base), {})

    def decorate(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
        return made(fn, **options) if fn is not None else lambda fn: made(fn, **options)

    return decorate


triton_jit = triton.jit if triton.knobs.runtime.interpret else make_decorator("triton.runtime.jit.JITFunction", triton.jit)
