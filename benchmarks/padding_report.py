"""Writes the table and the plot of docs/padding.md from benchmarks/results/padding.jsonl.

python benchmarks/padding_report.py
"""

from __future__ import annotations

from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from pages import DOCS, fill, markdown, results

NAMES = ("foci", "inductor", "inductor, no padding", "eager")
CASES = {
    "linear-bf16": "Linear(768, 30523) and cross entropy, 8192 rows, bfloat16, training",
    "linear-tf32": "the same in float32 with tf32",
    "module-bf16": "Linear(768, 30523) and cross entropy, eager, bfloat16, training (foci: PaddedLinear)",
    "module-tf32": "the same in float32 with tf32",
    "product-f16": "8192 x 30522 @ 30522 x 768, float16, left matrix made in the graph",
    "product-f16-changed": "left matrix relu of an input",
    "product-f16-outside": "both matrices from outside",
    "bert": "BERT base, masked language model, vocabulary 30522, 16 x 512, bfloat16, training",
    "recommender": "recommender 197951-512-512-1024-512-512-197951, 1024 rows, bfloat16, training",
    "longformer": "chunked attention, 513 keys a chunk, bfloat16, training (good: the same, unpadded)",
    "attention-d16": "attention of 511 tokens, head dim 16, bfloat16, training",
    "convolution": "convolution 1 x 128 x 640 x 959, float16, training",
    "convolution-last": "the same with channels last",
}


def taken(by_case: dict[tuple[str, str], dict[str, Any]]) -> str:
    """A table of the passes' time and memory."""
    first = {row["case"]: row for row in results("padding_first")}
    rows = []
    for case in CASES:
        ours, plain = by_case.get((case, "foci"), {}), by_case.get((case, "inductor, no padding"), by_case.get((case, "good"), {}))
        if "pass s" in ours and "peak bytes" in plain:
            shares = f"{100 * ours['pass s'] / ours['first call s']:.1f} %", _of_first(first.get(case))
            rows.append([case, *shares, f"{ours['stated bytes'] / 1e6:.1f}", f"{(ours['peak bytes'] - plain['peak bytes']) / 1e6:.1f}"])
    shares = "passes, of the first call", "passes and their import, of the first call in a process"
    return markdown(["case", *shares, "memory stated, MB", "more than unpadded at the peak, MB"], rows)


def _of_first(row: dict[str, Any] | None) -> str:
    return f"{100 * (row['import s'] + row['pass s']) / row['first call s']:.1f} %" if row is not None else ""


def main() -> None:
    rows = results("padding")
    by_case = {(row["case"], row["implementation"]): row for row in rows}
    cases = [case for case in CASES if (case, "foci") in by_case]
    lines = []
    for case in cases:
        ratios = [f"{by_case[case, name]['ratio']:.3f}" if (case, name) in by_case else "" for name in NAMES]
        lines.append([CASES[case], f"{by_case[case, 'good']['ms']:.3f}", *ratios])
    table = markdown(["case", "good size, ms", *NAMES], lines)
    last, commits = rows[-1], ", ".join(dict.fromkeys(f"{row['commit']} ({row['date']})" for row in by_case.values()))
    where = f"{last['device']}, torch {last['torch']}, commit {commits}; times of the odd size over those of the good one:"
    fill("padding.md", {"measured": "\n".join(["", where, "", table, "", "![ratios](padding.png)", "", taken(by_case), ""])})

    figure, axis = plt.subplots(figsize=(9, 0.5 * len(cases) + 1.5), constrained_layout=True)
    for place, name in enumerate(NAMES):
        heights = [by_case[case, name]["ratio"] if (case, name) in by_case else 0.0 for case in cases]
        axis.barh([index + 0.2 * place for index in range(len(cases))], heights, 0.2, label=name)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_yticks([index + 0.3 for index in range(len(cases))], cases)
    axis.set_xlabel("time over that of the good size")
    axis.invert_yaxis()
    axis.legend(fontsize=8)
    figure.savefig(DOCS / "padding.png", dpi=110)


if __name__ == "__main__":
    main()
