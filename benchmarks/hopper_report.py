"""Writes the tables of docs/hopper.md from benchmarks/results/hopper_{forward,backward}.jsonl, between its marks, the rest stays.

python benchmarks/hopper_report.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "hopper.md"
COLUMNS: Final = {
    "hopper": "hopper",
    "foci": "planner",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN",
    "varlen": "varlen_attn",
    "flex": "FlexAttention",
    "triton": "triton (ours)",
}
RATIOS: Final = ("fa4", "flex")


def table(name: str) -> str:
    """TFLOP/s by problem and implementation, and the planner's over those of two peers."""
    found: dict[tuple[str, tuple[int, ...]], dict[str, float]] = {}
    for line in map(json.loads, (RESULTS / f"hopper_{name}.jsonl").read_text().splitlines()):
        found.setdefault((line["row"], tuple(line["shape"])), {})[line["who"]] = line[f"{name}_tflops"]
    head = ["problem", "B,H,S,D", *COLUMNS.values(), *(f"planner / {COLUMNS[peer]}" for peer in RATIOS)]
    rows = [[row, _place(row, shape), *_cells(rates)] for (row, shape), rates in found.items()]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def _place(row: str, shape: tuple[int, ...]) -> str:
    return f"{shape[0]} sequences, {shape[1]} heads of {shape[3]}" if row.startswith("jagged") else ",".join(map(str, shape))


def _cells(rates: dict[str, Any]) -> list[str]:
    rated = [f"{rates[who]:.0f}" if who in rates else "" for who in COLUMNS]
    return rated + [f"{rates['foci'] / rates[peer]:.2f}" if peer in rates else "" for peer in RATIOS]


def main() -> None:
    text = PAGE.read_text()
    for name in ("forward", "backward"):
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m, t=table(name): f"{m[1]}{t}\n{m[2]}", text, flags=re.DOTALL)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
