"""What `foci masks` and `foci scores` print: each named one with its arguments and a line about it."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import NamedTuple

from rich.table import Column, Table
from rich.text import Text

__all__ = ["Entry", "list_entries", "make_table"]


class Entry(NamedTuple):
    """A mask or a score."""

    call: str
    line: str


def list_entries(module: ModuleType) -> list[Entry]:
    """Every public function of `foci.masks` or `foci.scores`, in alphabetical order.

    Example:
        >>> import foci
        >>> list_entries(foci.masks)[1].call
        'causal()'
    """
    entries = []
    for name in sorted(module.__all__):
        function = getattr(module, name)
        parameters = [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(function).parameters.values()]
        line, *_ = inspect.getdoc(function).splitlines()  # type: ignore[union-attr]
        entries.append(Entry(f"{name}{inspect.Signature(parameters)}", line))
    return entries


def make_table(module: ModuleType) -> Table:
    """A row for each entry."""
    table = Table(Column(module.__name__, overflow="fold"), Column("", overflow="fold"), box=None, pad_edge=False)
    for entry in list_entries(module):
        table.add_row(Text(entry.call), Text(entry.line))  # offsets[i] is no markup
    return table
