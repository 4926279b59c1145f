"""Writes the table of docs/modules.md from benchmarks/results/modules-cuda.jsonl, between its marks; the rest stays.

python benchmarks/modules_report.py
"""

from __future__ import annotations

from typing import Any, Final

from pages import fill, markdown, results

NAMES: Final = {
    "torch.nn": "torch.nn (inference: its nested fast path)",
    "padded SDPA": "padded, scaled_dot_product_attention",
    "packed by hand": "packed by hand, torch's varlen_attn",
    "torch.nn, as graphed callable": "torch.nn, by make_graphed_callables",
    "torch.nn, as a CUDA graph": "torch.nn, as a CUDA graph (padded)",
    "packed by hand, as graphed callable": "packed by hand, by make_graphed_callables",
}
"""What the page calls forms that results name shortly."""
MODES: Final = ("training", "inference")
PEER: Final = "torch.nn"


def table() -> str:
    """A row for each form: milliseconds of both modes, how many times as long torch.nn takes, and what training holds."""
    lines = results("modules-cuda")
    forms: dict[str, dict[str, dict[str, Any]]] = {line["what"]: {} for line in sorted(lines, key=lambda line: line["mode"] != "training")}
    for line in lines:
        forms[line["what"]][line["mode"]] = line
    head = ["", "training step", "torch.nn takes", "inference", "torch.nn takes", "peak MB, training", "held by graphs, MB"]
    return markdown(head, [[NAMES.get(form, form), *_cells(lines_by_mode, forms[PEER])] for form, lines_by_mode in forms.items()])


def _cells(lines_by_mode: dict[str, dict[str, Any]], peer: dict[str, dict[str, Any]]) -> list[str]:
    cells = []
    for mode in MODES:
        line = lines_by_mode.get(mode)
        cells.append(f"{line['ms']:#.3g}" if line else "")
        cells.append(f"{peer[mode]['times foci.nn'] / line['times foci.nn']:.2f}" if line and line["what"] != PEER else "")
    training = lines_by_mode.get("training", {})
    held = (training.get("peak MB"), training.get("graphs MB"))
    return [*cells, *("" if megabytes is None else f"{megabytes:,}" for megabytes in held)]


if __name__ == "__main__":
    fill("modules.md", {"modules-cuda": table()})
