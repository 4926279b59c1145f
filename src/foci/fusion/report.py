"""Fusion report: where attention was found, whether it was fused, and why not. Sent to observers, printed as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from foci.context import observers
from foci.fusion.fusion_report import Site

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["summary", "table", "tell"]

_WORDS: Final = {"matmul-softmax-matmul": "plain torch", "flex": "flex_attention", "mha": "MultiheadAttention"}


def tell(sites: Iterable[Site]) -> None:
    """Adds the sites to every log that is open."""
    all_sites = list(sites)
    for log in observers():
        log.fusions.extend(all_sites)


def summary(sites: Iterable[Site]) -> str:
    """Summarise sites in one line.

    Raises:
        TypeError: for anything but sites.

    Example:
        >>> summary([])
        '0 of 0 attentions fused'
    """
    checked = _checked(sites)
    return f"{sum(site.fused for site in checked)} of {len(checked)} attentions fused"


def table(sites: Iterable[Site]) -> Table:
    """A row for each site, equal ones counted together: its place, how it is written, and its formula or what stood in the way.

    Raises:
        ModuleNotFoundError: when the extra `cli` is not installed.
        TypeError: for anything but sites.
    """
    try:
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("foci.fusion.table needs rich, which is not installed: pip install 'foci[cli]'", name="rich") from error

    checked = _checked(sites)
    result = Table(title=summary(checked))
    for name in ("place", "n", "written as", "fused", "formula, or why not"):
        result.add_column(name, justify="right" if name == "n" else "left", overflow="fold")
    for site, count in Counter(checked).items():
        verdict = Text("yes", "green") if site.fused else Text("no", "red")
        text = site.variant if site.fused else site.reason or ""
        result.add_row(Text(_short(site.location)), str(count), _WORDS.get(site.kind, site.kind), verdict, Text(text))
    return result


def _checked(sites: Any) -> list[Site]:
    listed = list(sites) if isinstance(sites, Iterable) else [sites]
    for site in listed:
        if not isinstance(site, Site):
            raise TypeError(f"sites must be foci.fusion.Site; got {type(site).__name__}")
    return listed


def _short(location: str) -> str:
    """A place in an installed package from the package on, one below the working directory from there."""
    _, installed, inside = location.rpartition("site-packages/")
    return inside if installed else location.removeprefix(f"{Path.cwd()}/") or "unknown"
