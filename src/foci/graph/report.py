"""Where attention was found, what became of it, and why: told to observers, printed as a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from foci.context import observers
from foci.graph.sites import Site

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["summary", "table", "tell"]


def tell(sites: Iterable[Site]) -> None:
    """Adds the sites to every log that is open."""
    found = list(sites)
    for log in observers():
        log.fusions.extend(found)


def summary(sites: Iterable[Site]) -> str:
    """One line, such as "5 of 6 attentions fused"."""
    found = list(sites)
    return f"{sum(site.fused for site in found)} of {len(found)} attentions fused"


def table(sites: Iterable[Site]) -> Table:
    """A row for each site, equal ones counted together: its place, what it was, and its formula or what stood in the way."""
    from rich.table import Table
    from rich.text import Text

    counted: dict[Site, int] = {}
    for site in sites:
        counted[site] = counted.get(site, 0) + 1
    made = Table(title=summary([site for site, count in counted.items() for _ in range(count)]))
    for name, justify in (("place", "left"), ("kind", "left"), ("sites", "right"), ("fused", "left"), ("formula, or why not", "left")):
        made.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for site, count in counted.items():
        verdict = Text("yes", "green") if site.fused else Text("no", "red")
        made.add_row(
            Text(site.location or "unknown"), site.kind, str(count), verdict, Text(site.variant if site.fused else site.reason or "")
        )
    return made
