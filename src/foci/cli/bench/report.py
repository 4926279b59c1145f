"""Measured lines as a table for people, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.table import Table

from foci.cli.bench.measure import Line

__all__ = ["draw", "summary", "table"]

_NAMES: Final = {
    "sdpa": "torch SDPA",
    "flash": "torch FLASH",
    "cudnn": "cuDNN",
    "efficient": "torch EFFICIENT",
    "math": "torch MATH",
    "flex": "FlexAttention, compiled",
    "fa4": "FlashAttention-4",
    "varlen": "torch varlen_attn",
    "nested": "torch SDPA of a NestedTensor",
}
"""Peers as a picture names them, by what results call them in small letters. A peer's place is its color and marker in every picture."""
_PLACES: Final = {name: place for place, name in enumerate(_NAMES)}
_MARKERS: Final = "os>v<^DP*X"
"""One for each peer, and one for others."""


def table(lines: Sequence[Line], title: str) -> Table:
    """One row for each case: rate of foci, forward / backward, and for each peer how many times faster foci is."""
    peers = list(dict.fromkeys(line.who for line in lines if line.who != "foci"))
    shown = Table(title=title)
    for name in ("case", "B,H,S,D", "foci", "backend", *peers):
        shown.add_column(name, justify="left" if name in ("case", "backend") else "right", overflow="fold")
    for case, sizes in dict.fromkeys((line.case, line.sizes) for line in lines):
        row = {line.who: line for line in lines if (line.case, line.sizes) == (case, sizes)}
        ours = row.get("foci")
        backend = "" if ours is None or ours.backend is None else ours.backend
        shown.add_row(case, sizes, _rates(ours), backend, *(_times(row.get(name), ours) for name in peers))
    return shown


def summary(lines: Sequence[Line]) -> str:
    """The lines of one case as one line of text, in the words of `table`."""
    ours = next((line for line in lines if line.who == "foci"), None)
    backend = "" if ours is None or ours.backend is None else f" {ours.backend}"
    peers = "".join(f", {line.who} {_times(line, ours)}" for line in lines if line.who != "foci")
    return f"{lines[0].case} {lines[0].sizes}: {_rates(ours)}{backend}{peers}"


def _rates(line: Line | None) -> str:
    if line is None or line.error is not None:
        return "cannot"
    rates = " / ".join(f"{rate:.3g}" for rate in (line.forward_rate, line.backward_rate) if rate is not None)
    return f"{rates} {line.unit}" if line.unit.endswith("B/s") else rates


def _times(line: Line | None, ours: Line | None) -> str:
    if line is None:
        return ""
    if line.error is not None:
        return "cannot"
    return " / ".join(f"{ratio:.2f}" for ratio in ratios(line, ours) if ratio is not None)


def ratios(line: Line, ours: Line | None) -> tuple[float | None, float | None]:
    """How many times faster foci is than a peer, forward and backward."""
    if ours is None:
        return None, None
    pairs = ((line.forward_ms, ours.forward_ms), (line.backward_ms, ours.backward_ms))
    forward, backward = (None if theirs is None or our_ms is None else theirs / our_ms for theirs, our_ms in pairs)
    return forward, backward


def draw(lines: Sequence[Line], path: Path, title: str) -> None:
    """A picture of the ratios of `lines`, forward and backward side by side: right of the line at 1 foci is faster.

    Raises:
        ModuleNotFoundError: when the extra `plots` is not installed.
        ValueError: for no line of a peer beside one of foci.
    """
    comparisons = [(line, ratios(line, ours)) for line in lines for ours in (_ours_beside(line, lines),) if line.who != "foci" and ours]
    comparisons = [(line, pair) for line, pair in comparisons if pair[0] is not None]
    if not comparisons:
        raise ValueError("lines hold no peer beside foci; nothing can be compared")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = list(dict.fromkeys((line.case, line.sizes) for line, _ in comparisons))
    names = list(dict.fromkeys(line.who for line, _ in comparisons))
    figure = Figure(figsize=(11, 1.2 + 0.27 * len(rows)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    for side, (axis, direction) in enumerate(zip(axes, ("forward", "backward"), strict=True)):
        for name in names:
            points = [(pair[side], rows.index((line.case, line.sizes))) for line, pair in comparisons if line.who == name]
            points = [(x, y) for x, y in points if x is not None]
            place = _PLACES.get(name.lower(), len(_PLACES))
            axis.scatter(
                [x for x, _ in points],
                [y for _, y in points],
                s=34,
                label=_NAMES.get(name.lower(), name),
                color=f"C{place}",
                marker=_MARKERS[place],
                zorder=3,
            )
        axis.axvline(1.0, color="#555555", linewidth=1)
        axis.set_xscale("log")
        low, high = axis.get_xlim()
        ticks = [t for t in (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200) if low <= t <= high]
        axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axis.minorticks_off()
        axis.grid(axis="x", color="#dddddd")
        axis.set_title(direction)
        axis.set_xlabel("time of the peer / time of foci        foci faster →")
    axes[0].set_yticks(range(len(rows)), [f"{case}  {sizes}" for case, sizes in rows], fontsize=8)
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(names)), frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path)


def _ours_beside(line: Line, lines: Sequence[Line]) -> Line | None:
    same = (other for other in lines if (other.case, other.sizes, other.dtype) == (line.case, line.sizes, line.dtype))
    return next((other for other in same if other.who == "foci" and other.error is None), None)
