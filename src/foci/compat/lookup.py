"""Looks up names of dependencies that are not public, and keeps a table of them."""

from __future__ import annotations

import importlib
import os
import time
import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Final, NamedTuple

__all__ = ["IMPORTED_AT", "NAMES", "PrivateName", "find", "find_first", "is_taken_away"]


class PrivateName(NamedTuple):
    """A name that foci reads though it is not public."""

    path: str
    """Dotted, with the module."""
    seen: tuple[str, str]
    """The first and the last release of its package known to have it."""
    without: str
    """What foci does where it is missing; continues a sentence."""
    is_found: bool
    """Whether the installed release has it."""


IMPORTED_AT: Final = time.time_ns()
"""When this module was imported, which is one of foci's first."""
_names: Final[dict[str, PrivateName]] = {}
NAMES: Final[Mapping[str, PrivateName]] = MappingProxyType(_names)
"""Each name looked up so far, by its path."""

SEEN: Final = ("2.11", "2.15")
_MISSING: Final = object()

_patterns: Final = tuple([pattern for pattern in os.environ.get("FOCI_WITHOUT", "").split(",") if pattern])
"""Patterns of names that `find` does not find, from the environment variable FOCI_WITHOUT."""


def is_taken_away(path: str) -> bool:
    """Whether FOCI_WITHOUT takes this name away."""
    return any(fnmatchcase(path, pattern) for pattern in _patterns)


def find(path: str, fallback: Any = None, *, without: str, seen: tuple[str, str] = SEEN) -> Any:
    """The object that a dotted path names, or `fallback` where the installed release has no such name.

    Warns once about a missing name, as foci is slower from then on.

    Args:
        path: module and attributes, such as "torch._C._get_tracing_state".
        fallback: what does the same by public means.
        without: what foci does without the name; continues "without it, foci ...".
        seen: the first and the last release of the package that are known to have the name.
    """
    value = _MISSING if is_taken_away(path) else _resolve(path)
    is_new = path not in _names
    if is_new:
        _names[path] = PrivateName(path, seen, without, value is not _MISSING)
    if value is not _MISSING:
        return value
    if is_new and not is_taken_away(path):
        warnings.warn(f"{path} is missing in the installed release: without it, foci {without}. `foci env` has a list.", stacklevel=2)
    return fallback


def find_first(*names: tuple[str, tuple[str, str]], fallback: Any = None, without: str) -> Any:
    """The first of these names that the installed release has, each with the first and the last release known to have it.

    Where it has none of them, the last one is noted as missing.
    """
    for path, seen in names[:-1]:
        if not is_taken_away(path) and _resolve(path) is not _MISSING:
            return find(path, without=without, seen=seen)
    path, seen = names[-1]
    return find(path, fallback, without=without, seen=seen)


def _resolve(path: str) -> Any:
    """Return what a dotted path names, or `_MISSING`."""
    parts = path.split(".")
    value: Any = importlib.import_module(parts[0])
    for n, name in enumerate(parts[1:], 2):
        owner = value
        if isinstance(owner, type):
            value = getattr(owner, name, getattr(owner, "__annotations__", {}).get(name, _MISSING))  # or a field of each instance
        elif hasattr(owner, name):
            value = getattr(owner, name)
        else:
            try:
                # a module that is being imported is no attribute of its package yet
                value = importlib.import_module(".".join(parts[:n]))
            except ImportError:
                return _MISSING
        if value is _MISSING:
            return _MISSING
    return value
