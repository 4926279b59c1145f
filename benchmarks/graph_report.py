"""Writes the table of docs/graph.md from benchmarks/results/graph_models-cuda.jsonl, between its marks; the rest stays.

python benchmarks/graph_report.py
"""

from __future__ import annotations

from typing import Any, Final

from pages import fill, markdown, results

VARIANTS: Final = {"foci": "foci", "inductor, sdpa": "sdpa", "inductor, eager attention": "eager attention"}
MODELS: Final = {"gpt2": "GPT-2", "bert": "BERT"}


def table() -> str:
    """A row for each step: milliseconds, in brackets those that the GPU is busy; then peaks and first steps, in the same order."""
    steps: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for line in results("graph_models-cuda"):
        step = (MODELS[line["model"]], f"{line['batch']} x {line['length']}", line["mode"])
        steps.setdefault(step, {})[line["variant"]] = line
    rows = []
    for step, by_variant in steps.items():
        lines = [by_variant[variant] for variant in VARIANTS if variant in by_variant]
        peaks, firsts = (
            " / ".join(form.format(line[key]) for line in lines) for key, form in (("peak GB", "{:#.3g}"), ("first step s", "{:.0f}"))
        )
        rows.append([", ".join(step), *(_time(by_variant.get(variant)) for variant in VARIANTS), peaks, firsts])
    return markdown(["", *VARIANTS.values(), "peak GB", "first step s"], rows)


def _time(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    busy = f" ({line['GPU busy ms']:#.3g})" if "GPU busy ms" in line else ""
    return f"{line['ms']:#.3g}{busy}"


if __name__ == "__main__":
    fill("graph.md", {"models-cuda": table()})
