"""Writes the tables of docs/gpu.md from benchmarks/results/{gpu_attention,gpu_overhead,first_call,gpu_tuning}.jsonl: between its
marks, the rest stays.

python benchmarks/gpu_report.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
COLUMNS: Final = {
    "triton": "foci triton",
    "hopper": "foci hopper",
    "flex": "FlexAttention",
    "fa4": "FlashAttention-4",
    "flash": "torch FLASH",
    "cudnn": "cuDNN",
    "efficient": "EFFICIENT",
    "varlen": "varlen_attn",
}


def lines(name: str) -> list[dict[str, Any]]:
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def attention() -> str:
    """TFLOP/s forward / backward, or terabytes a second, by problem and implementation."""
    found: dict[tuple[str, tuple[int, ...]], dict[str, str]] = {}
    for line in sorted(lines("gpu_attention"), key=lambda line: line.get("number", 0)):
        cell = f"{line['forward_tflops']:.0f} / {line['backward_tflops']:.0f}"
        if "forward_tbs" in line:
            cell = f"{line['forward_tbs']:.2f} TB/s"
        found.setdefault((line["row"], tuple(line["shape"])), {})[line["who"]] = cell
    used = [name for name in COLUMNS if any(name in cells for cells in found.values())]
    rows = [[row, ",".join(map(str, shape)), *(cells.get(name, "") for name in used)] for (row, shape), cells in found.items()]
    return _markdown(["problem", "B,H,S,D", *(COLUMNS[name] for name in used)], rows)


def overhead() -> str:
    """Microseconds of the host by call, and over an empty launch."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    measured = lines("gpu_overhead")
    floor = next((line["us"] for line in measured if line["call"] == "empty launch"), 0.0)
    for line in measured:
        # a line that was not measured beside the floor is of a run that measured it once
        found.setdefault(line["call"], {})[line["direction"]] = (line["us"], line.get("floor_us", floor))

    def cells(pair: tuple[float, float] | None) -> list[str]:
        return ["", ""] if pair is None else [f"{pair[0]:.0f}", f"{pair[0] - pair[1]:.0f}"]

    rows = [[name, *cells(ways.get("forward")), *cells(ways.get("forward+backward"))] for name, ways in found.items()]
    return _markdown(["call", "forward, us", "over an empty launch", "forward and backward, us", "over an empty launch"], rows)


def first_call() -> str:
    """Seconds of the first forward and the first backward of a function nobody called before."""
    found: dict[str, dict[str, str]] = {}
    for line in lines("first_call"):
        found.setdefault(line["function"], {})[line["who"]] = f"{line['forward_s']:.1f} / {line['backward_s']:.1f}"
    used = [name for name in COLUMNS if any(name in cells for cells in found.values())]
    rows = [[function, *(cells.get(name, "") for name in used)] for function, cells in found.items()]
    return _markdown(["new function", *(f"{COLUMNS[name]}, s" for name in used)], rows)


def tuning() -> str:
    """TFLOP/s forward / backward by the table of schedules and by those that timing chose."""
    rows = []
    for line in lines("gpu_tuning"):
        rates = (" / ".join(f"{rate:.0f}" for rate in line[f"{which}_tflops"]) for which in ("table", "tuned"))
        rows.append([line["row"], ",".join(map(str, line["shape"])), *rates, f"{line['tuning_s']:.0f}"])
    return _markdown(["problem", "B,H,S,D", "by the table", "tuned", "tuning, s"], rows)


def main() -> None:
    text = PAGE.read_text()
    for name, table in (("attention", attention()), ("overhead", overhead()), ("first call", first_call()), ("tuning", tuning())):
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.DOTALL)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
