"""Tables that are data: TOML files beside the modules that read them, with a line for where their numbers were measured."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final

__all__ = ["load_table", "rows_by_width"]

_SOURCE: Final = "source"
"""The key of a table that says where its numbers come from; for people."""


def load_table(module: str, name: str) -> dict[str, Any]:
    """Read the file `name` beside a module, without the keys "source" of its tables.

    Args:
        module: the `__file__` of the module.
        name: of the file.
    """
    table: dict[str, Any] = _without_sources(tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8")))
    return table


def rows_by_width(table: dict[str, Any]) -> dict[int, Any]:
    """Return a table whose keys are widths, which TOML writes as text."""
    return {int(width): row for width, row in table.items()}


def _without_sources(value: Any) -> Any:
    return {key: _without_sources(row) for key, row in value.items() if key != _SOURCE} if isinstance(value, dict) else value
