"""Dynamo's table of backends. Nothing here imports Dynamo before it is asked."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from foci.compat.lookup import find

__all__ = ["BACKENDS", "register_backend"]

BACKENDS: Final = "torch._dynamo.backends.registry"
"""The module with the table, whose import foci watches for. An installed foci has an entry point besides, which torch documents."""


def register_backend(registry: ModuleType, name: str, backend: Callable[..., Any]) -> None:
    """Adds a backend to the table, unless an entry point has put it there: maybe right now, with the import of this module.

    Args:
        registry: the module that `BACKENDS` names, which may not be imported to its end yet.
        name: what torch.compile knows the backend by.
        backend: a function of a graph and its example inputs.
    """
    by_entry_point = "has a backend of torch.compile only where it is installed"
    register = find(f"{BACKENDS}.register_backend", without=by_entry_point)
    tables = [find(f"{BACKENDS}.{table}", without=by_entry_point) for table in ("_COMPILER_FNS", "_BACKENDS")]
    if register is not None and all(table is not None and name not in table for table in tables):
        register(backend, name=name)
