"""Training curves: as a line of characters, and as a picture."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from foci.cli.demo.decoder import Training

__all__ = ["draw_curves", "draw_line"]

_BARS = "▁▂▃▄▅▆▇█"
_COLORS = {"sdpa": "#f2a65a", "foci": "#1d3f5c"}


def draw_line(values: Sequence[float], *, width: int) -> str:
    """Values as at most `width` bars, each the mean of neighbours, from the least to the greatest of these means.

    Example:
        >>> draw_line([8.0, 6.0, 4.0, 2.0, 1.0], width=5)
        '█▆▄▂▁'
    """
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1))] for mean in means)


def draw_curves(trainings: Sequence[Training], path: Path) -> Path:
    """Writes a PNG with the loss of each step: the first training wide and pale, the next on it.

    Raises:
        ModuleNotFoundError: when the extra `plots` is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for training, linewidth in zip(trainings, (5.0, 1.3), strict=False):
        label = f"{training.implementation}, {training.seconds * 1e3:.0f} ms a step"
        steps = range(1, len(training.losses) + 1)
        axes.plot(steps, training.losses, color=_COLORS[training.implementation], linewidth=linewidth, label=label)
    axes.set_title(f"a GPT-2-style model over bytes, {trainings[0].pattern.name}")
    axes.set_xlabel("training step")
    axes.set_ylabel("loss, nats per byte")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
