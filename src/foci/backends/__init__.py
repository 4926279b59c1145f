"""The registry of backends: found by name, imported when the planner first asks for them.

To add a backend is to add one module with a `BACKEND` and one row here, or to call `foci.register_backend`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from foci.backends.contract import Backend

__all__ = ["changes", "load", "names", "names_on", "only_device", "register", "remembered", "unregister"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _BuiltIn(NamedTuple):
    module: str
    only_on: str | None = None  # the one kind of device that it runs on: for tensors elsewhere the module is not imported


_BUILT_IN: Final[dict[str, _BuiltIn]] = {
    "hopper": _BuiltIn("foci.backends.hopper", only_on="cuda"),
    "triton": _BuiltIn("foci.backends.triton"),
    "aten": _BuiltIn("foci.backends.aten"),
    "cpu": _BuiltIn("foci.backends.cpu", only_on="cpu"),
    "blocked": _BuiltIn("foci.backends.blocked"),
    "reference": _BuiltIn("foci.backends.reference"),
}
"""By name, in the order in which equal costs are decided."""

_registered: dict[str, Backend] = {}
_changes = 0
_remembered: list[Callable[[], None]] = []


def names() -> tuple[str, ...]:
    """Every backend's name, registered ones first.

    Example:
        >>> "cpu" in names()
        True
    """
    return (*_registered, *_BUILT_IN)


def only_device(name: str) -> str | None:
    """The one kind of device that a backend runs on, as torch names it; None where only `Backend.reject` knows."""
    return _BUILT_IN[name].only_on if name in _BUILT_IN else None


def names_on(device: str) -> tuple[str, ...]:
    """Names of the backends that may run on a kind of device.

    Example:
        >>> "cpu" in names_on("cuda")
        False
    """
    return tuple(name for name in names() if only_device(name) in (None, device))


def changes() -> int:
    """How often a backend was registered or taken away: what was decided among others is decided anew."""
    return _changes


def remembered(function: _Function) -> _Function:
    """A function of hashable arguments that remembers what it found among the backends until one is registered or taken away."""
    known = functools.lru_cache(maxsize=64)(function)
    _remembered.append(known.cache_clear)
    return known  # type: ignore[return-value]


def load(name: str) -> Backend:
    """The backend of that name.

    Raises:
        ValueError: if there is none.
    """
    if name in _registered:
        return _registered[name]
    if name not in _BUILT_IN:
        raise ValueError(f"no backend {name!r}; there are {', '.join(names())}")
    backend: Backend = importlib.import_module(_BUILT_IN[name].module).BACKEND
    return backend


def register(backend: Backend) -> None:
    """Adds a backend, before all others of equal cost.

    Raises:
        TypeError: if its class does not derive from `foci.backends.contract.Backend`, or it has no name.
        ValueError: if its name is taken.

    Example:
        >>> from foci.backends.contract import Backend
        >>> class Never(Backend):
        ...     name = "never"
        ...
        ...     def reject(self, problem, target, /):
        ...         return "never computes anything"
        ...
        ...     def cost(self, problem, target, /):
        ...         return 0.0
        ...
        ...     def build(self, plan, /):
        ...         raise NotImplementedError
        >>> register(Never())
        >>> names()[0]
        'never'
        >>> unregister("never")
    """
    _check(backend)
    if backend.name in names():
        raise ValueError(f"a backend {backend.name!r} exists already")
    _registered[backend.name] = backend
    _changed()


def _check(backend: object) -> None:
    if not isinstance(backend, Backend):
        got = f"the class {backend.__name__}" if isinstance(backend, type) else f"an object of {type(backend).__name__}"
        missing = [part for part in ("name", "reject", "cost", "build") if not hasattr(backend, part)]
        lacks = f", which lacks {', '.join(missing)}" if missing else ""
        raise TypeError(f"backend must be an object of a class that derives from foci.backends.contract.Backend; got {got}{lacks}")
    if not isinstance(name := getattr(backend, "name", None), str):
        raise TypeError(f"a backend's name must be a string; that of {type(backend).__name__} is {name!r}")


def unregister(name: str) -> None:
    """Takes a registered backend away again. Built-in backends stay; `register` shows an example.

    Raises:
        ValueError: if no backend of that name was registered.
    """
    if name not in _registered:
        raise ValueError(f"no backend {name!r} was registered; registered are {', '.join(_registered) or 'none'}")
    del _registered[name]
    _changed()


def _changed() -> None:
    global _changes
    _changes += 1
    for forget in _remembered:
        forget()
