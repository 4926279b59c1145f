"""Draws docs/speed.png, the plot of README.md, from results on file: how many times as long a peer takes as foci, medians over problems.

python benchmarks/speed_plot.py
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from pages import DOCS, PEERS, results

PASSES: Final = ("forward", "backward")
COLORS: Final = {"forward": "#2f6f9f", "backward": "#f2a65a"}


class Bar(NamedTuple):
    """A peer on a device."""

    label: str
    ratios: dict[str, list[float]]
    """Time of the peer over time of foci, by pass, one for each problem."""


class Panel(NamedTuple):
    """A device."""

    title: str
    bars: list[Bar]


def _ratios(lines: Iterable[dict[str, Any]], peer: str, field: str) -> list[float]:
    """Of every problem that both ran; foci is the planner's choice, or the faster of its GPU backends where each was timed."""
    problems: dict[tuple[str, tuple[int, ...]], dict[str, float]] = {}
    for line in lines:
        if line.get(field) is not None:
            problems.setdefault((line["row"], tuple(line["shape"])), {})[line["who"]] = line[field]
    ratios = []
    for times in problems.values():
        ours = times.get("foci") or min((times[who] for who in ("hopper", "triton") if who in times), default=None)
        if ours is not None and peer in times:
            ratios.append(times[peer] / ours)
    return ratios


def _versions(lines: list[dict[str, Any]]) -> str:
    line = lines[0]
    commits = ", ".join(dict.fromkeys(f"{each['commit']}, {each['date']}" for each in lines if "commit" in each))
    packages = ", ".join(f"{name} {line[name]}" for name in ("torch", "triton") if name in line)
    return f"{packages}, foci at {commits}"


def gpu() -> Panel:
    """FlashAttention-4, cuDNN and FlexAttention, all from one run of hopper_attention.py."""
    passes = {name: results(f"hopper_{name}") for name in PASSES}
    bars = [
        Bar(PEERS[peer], {name: _ratios(lines, peer, f"{name}_ms") for name, lines in passes.items()}) for peer in ("fa4", "cudnn", "flex")
    ]
    lines = [*passes["forward"], *passes["backward"]]
    return Panel(f"{lines[0]['device']}, bfloat16\n{_versions(lines)}", bars)


def cpu() -> Panel:
    """torch's SDPA and compiled FlexAttention, which has no backward on a CPU, in both dtypes. Runs of a problem count by their median."""
    lines = [line for line in results("cpu_attention") if "peer" in line]
    peers = {"torch SDPA": "torch SDPA", "torch.compile(flex_attention)": "FlexAttention, compiled"}
    bars = []
    for peer, label in peers.items():
        for dtype in ("float32", "bfloat16"):
            ratios: dict[str, list[float]] = {}
            for name in PASSES:
                problems: dict[str, list[float]] = {}
                for line in lines:
                    if (line["peer"], line["dtype"], line["direction"]) == (peer, dtype, name):
                        problems.setdefault(line["case"], []).append(line["ratio"])
                ratios[name] = [statistics.median(values) for values in problems.values()]
            bars.append(Bar(f"{label}, {dtype}", ratios))
    return Panel(f"{lines[0]['device']}, {lines[0]['threads']} threads\n{_versions(lines)}", bars)


def draw(panels: list[Panel]) -> None:
    """docs/speed.png."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for axis, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for at, bar in enumerate(panel.bars):
            for offset, name in zip((-0.19, 0.19), PASSES, strict=True):
                if not bar.ratios[name]:
                    continue
                median, count = statistics.median(bar.ratios[name]), len(bar.ratios[name])
                axis.barh(at + offset, median, height=0.36, color=COLORS[name], label=name if at == 0 else None, zorder=2)
                axis.text(median, at + offset, f" {median:.2f}×  ({count} problems)", va="center", fontsize=8)
        axis.set_yticks(range(len(panel.bars)), [bar.label for bar in panel.bars], fontsize=9)
        axis.set_ylim(len(panel.bars) - 0.5, -0.5)
        axis.set_xlim(0, 1.45 * max(statistics.median(values) for bar in panel.bars for values in bar.ratios.values() if values))
        axis.axvline(1.0, color="#555555", linewidth=1, zorder=3)
        axis.grid(axis="x", color="#dddddd", zorder=0)
        axis.set_xlabel("time of the peer / time of foci, median        foci faster →", fontsize=9)
        axis.set_title(panel.title, fontsize=9)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(DOCS / "speed.png")


if __name__ == "__main__":
    draw([gpu(), cpu()])
