"""Writes the tables of docs/hopper.md from benchmarks/results/{hopper_forward,hopper_backward,dense_sizes}.jsonl, between its marks,
and draws the last of them.

python benchmarks/hopper_report.py
"""

from __future__ import annotations

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
    found: dict[tuple[str, tuple[int, ...]], dict[str, float]] = {}
    for line in results(f"hopper_{name}"):
        found.setdefault((line["row"], tuple(line["shape"])), {})[line["who"]] = line[f"{name}_tflops"]
    head = ["problem", "B,H,S,D", *COLUMNS.values(), *(f"planner / {COLUMNS[peer]}" for peer in RATIOS)]
    return markdown(head, [[row, _place(row, shape), *_cells(rates)] for (row, shape), rates in found.items()])


def _place(row: str, shape: tuple[int, ...]) -> str:
    return f"{shape[0]} sequences, {shape[1]} heads of {shape[3]}" if row.startswith("jagged") else ",".join(map(str, shape))


def _cells(rates: dict[str, Any]) -> list[str]:
    rated = [f"{rates[who]:.0f}" if who in rates else "" for who in COLUMNS]
    own = rates.get("foci", rates["hopper"])  # rows of gpu_attention.py have backends alone
    return rated + [f"{own / rates[peer]:.2f}" if peer in rates else "" for peer in RATIOS]


def sizes() -> str:
    """Microseconds of many dense problems, a line for each without a mask and under the causal one, and cuDNN's over the planner's."""
    found: dict[str, dict[bool, dict[str, Any]]] = {}
    for line in results("dense_sizes"):
        found.setdefault(line["shape"], {})[line["causal"]] = line
    passes = [(mask, name) for mask in ("dense", "causal") for name in ("forward", "backward")]
    head = ["B,H,S,D", *(f"{mask}, {name}" for mask, name in passes)]
    return markdown(
        head, [[shape, *(_beside(lines.get(mask == "causal"), name) for mask, name in passes)] for shape, lines in found.items()]
    )


def _beside(line: dict[str, Any] | None, name: str) -> str:
    if line is None:
        return ""
    own, other = line[f"{name}_foci_us"], line.get(f"{name}_cudnn_us")
    return f"{own:.0f}" if other is None else f"{own:.0f} / {other:.0f} = {other / own:.2f}"


def draw() -> None:
    """docs/hopper-sizes.png: how many times as long cuDNN takes, by length of keys, head dim and mask."""
    import matplotlib.pyplot as plt

    lines = results("dense_sizes")
    dims = sorted({_dim(line) for line in lines})
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for panel, name in zip(panels, ("forward", "backward"), strict=True):
        for causal, marker in ((False, "o"), (True, "^")):
            for at, dim in enumerate(dims):
                chosen = [line for line in lines if line["causal"] == causal and _dim(line) == dim and f"{name}_cudnn_us" in line]
                ratios = [line[f"{name}_cudnn_us"] / line[f"{name}_foci_us"] for line in chosen]
                keys = [int(line["shape"].split(",")[2].split("x")[-1]) for line in chosen]
                label = f"heads of {dim}" if name == "forward" and not causal else None
                panel.scatter(keys, ratios, color=f"C{at}", marker=marker, s=30, label=label)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(title=name, xlabel="keys")
        panel.set_xscale("log", base=2)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("time of cuDNN / time of foci")
    figure.legend(loc="outside right upper", title="o no mask, ^ causal")
    figure.suptitle(f"{lines[0]['device']}, torch {lines[0]['torch']}, bfloat16, commit {lines[0]['commit']}", fontsize=9)
    figure.savefig(DOCS / "hopper-sizes.png", dpi=110)


def _dim(line: dict[str, Any]) -> int:
    return int(line["shape"].split(",")[3].split("/")[0])


def main() -> None:
    draw()
    fill("hopper.md", {name: table(name) for name in ("forward", "backward")} | {"sizes": sizes()})


if __name__ == "__main__":
    main()
