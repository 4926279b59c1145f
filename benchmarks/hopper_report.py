"""Writes the tables of docs/hopper.md from benchmarks/results/{hopper_forward,hopper_backward,dense_sizes}.jsonl, between its marks.

python benchmarks/hopper_report.py
"""

from __future__ import annotations

from typing import Any, Final

from pages import PEERS, fill, markdown, results

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


def main() -> None:
    fill("hopper.md", {name: table(name) for name in ("forward", "backward")} | {"sizes": sizes()})


if __name__ == "__main__":
    main()
