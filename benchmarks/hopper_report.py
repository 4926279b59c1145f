"""Writes the tables of docs/hopper.md from benchmarks/results/{hopper_forward,hopper_backward,dense_sizes}.jsonl, between its marks,
and draws the last of them.

python benchmarks/hopper_report.py
"""

from __future__ import annotations

import statistics
from typing import Any, Final

from pages import DOCS, PEERS, fill, markdown, results

COLUMNS: Final = {
    "hopper": "hopper",
    "foci": "planner",
    **{name: PEERS[name] for name in ("fa4", "cudnn", "varlen", "flex")},
    "triton": "triton (ours)",
}
RATIOS: Final = ("fa4", "flex")


def table(name: str) -> str:
    """TFLOP/s by problem and implementation, and the planner's over those of two peers."""
    rates_by_row: dict[tuple[str, tuple[int, ...]], dict[str, float]] = {}
    for line in results(f"hopper_{name}"):
        rates_by_row.setdefault((line["row"], tuple(line["shape"])), {})[line["who"]] = line[f"{name}_tflops"]
    head = ["problem", "B,H,S,D", *COLUMNS.values(), *(f"planner / {COLUMNS[peer]}" for peer in RATIOS)]
    return markdown(head, [[row, _place(row, shape), *_cells(rates)] for (row, shape), rates in rates_by_row.items()])


def _place(row: str, shape: tuple[int, ...]) -> str:
    return f"{shape[0]} sequences, {shape[1]} heads of {shape[3]}" if row.startswith("jagged") else ",".join(map(str, shape))


def _cells(rates: dict[str, Any]) -> list[str]:
    rated = [f"{rates[who]:.0f}" if who in rates else "" for who in COLUMNS]
    ours = rates.get("foci", rates["hopper"])  # rows of gpu_attention.py have backends alone
    return rated + [f"{ours / rates[peer]:.2f}" if peer in rates else "" for peer in RATIOS]


def sizes() -> str:
    """Microseconds of many dense problems, a line for each without a mask and under the causal one, and cuDNN's over the planner's."""
    lines_by_shape: dict[str, dict[bool, dict[str, Any]]] = {}
    for line in results("dense_sizes"):
        lines_by_shape.setdefault(line["shape"], {})[line["causal"]] = line
    passes = [(mask, name) for mask in ("dense", "causal") for name in ("forward", "backward")]
    head = ["B,H,S,D", *(f"{mask}, {name}" for mask, name in passes)]
    return markdown(
        head, [[shape, *(_beside(lines.get(mask == "causal"), name) for mask, name in passes)] for shape, lines in lines_by_shape.items()]
    )


def _beside(line: dict[str, Any] | None, name: str) -> str:
    if line is None:
        return ""
    ours, other = line[f"{name}_foci_us"], line.get(f"{name}_cudnn_us")
    return f"{ours:.0f}" if other is None else f"{ours:.0f} / {other:.0f} = {other / ours:.2f}"


def draw() -> None:
    """docs/hopper-sizes.png: how many times as long cuDNN takes, by head dim; a dot is a problem, a bar their median."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = results("dense_sizes")
    dims = sorted({_dim(line) for line in lines})
    figure = Figure(figsize=(11, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, name in zip(panels, ("forward", "backward"), strict=True):
        for causal, shift, color in ((False, -0.18, "#2f6f9f"), (True, 0.18, "#f2a65a")):
            for at, dim in enumerate(dims):
                chosen = [line for line in lines if line["causal"] == causal and _dim(line) == dim and f"{name}_cudnn_us" in line]
                ratios = [line[f"{name}_cudnn_us"] / line[f"{name}_foci_us"] for line in chosen]
                if ratios:
                    label = ("causal" if causal else "no mask") if name == "forward" and at == 0 else None
                    panel.scatter([at + shift] * len(ratios), ratios, color=color, s=16, label=label, zorder=3)
                    panel.hlines(statistics.median(ratios), at + shift - 0.16, at + shift + 0.16, color=color, linewidth=2, zorder=3)
        panel.axhline(1, color="#555555", linewidth=1)
        panel.set_xticks(range(len(dims)), [str(dim) for dim in dims])
        panel.set(title=name, xlabel="head dim of queries and keys")
        panel.grid(axis="y", color="#dddddd")
    panels[0].set_ylabel("time of cuDNN / time of foci      foci faster →")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    about = lines[0]
    figure.suptitle(
        f"{about['device']}, torch {about['torch']}, triton {about['triton']}, bfloat16, commit {about['commit']}, {about['date']}",
        fontsize=10,
    )
    figure.savefig(DOCS / "hopper-sizes.png")


def _dim(line: dict[str, Any]) -> int:
    return int(line["shape"].split(",")[3].split("/")[0])


def main() -> None:
    draw()
    fill("hopper.md", {name: table(name) for name in ("forward", "backward")} | {"sizes": sizes()})


if __name__ == "__main__":
    main()
