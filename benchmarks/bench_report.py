"""Draws what `foci bench --out`, gpu_attention.py or hopper_attention.py wrote:

python benchmarks/bench_report.py benchmarks/results/bench_cpu.jsonl docs/cpu-bench.png
python benchmarks/bench_report.py benchmarks/results/hopper_forward.jsonl benchmarks/results/hopper_backward.jsonl docs/hopper.png

Lines are of one machine; the picture says which. It shows one commit, that of most lines. A case measured twice counts as last measured,
and passes measured apart belong together.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import fields
from pathlib import Path

from foci.cli.bench import Line, draw


def _as_line(row: dict) -> dict:
    """A line of gpu_attention.py or hopper_attention.py as one of `foci bench`."""
    if "row" not in row:
        return row
    shape = ",".join(map(str, row["shape"]))
    line = row | {"case": row["row"], "sizes": shape, "dtype": "bfloat16"}
    return line | {"backward_ms": None} if row["row"].startswith("decode") else line


def _with_fastest(rows: list[dict]) -> list[dict]:
    """One side for foci where its backends were measured apart: the planner's, else the one that takes the least time forward."""
    ours = ("foci", "hopper", "triton")
    best: dict[tuple[str, str], dict] = {}

    def rank(row: dict) -> tuple[bool, float]:
        return row["who"] != "foci", row.get("forward_ms", 1e9)

    for row in rows:
        key = (row["case"], row["sizes"])
        if row["who"] in ours and (key not in best or rank(row) < rank(best[key])):
            best[key] = row
    return [row | {"who": "foci", "backend": row.get("backend", row["who"])} for row in best.values()] + [
        r for r in rows if r["who"] not in ours
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", type=Path, nargs="+")
    parser.add_argument("picture", type=Path)
    chosen = parser.parse_args()
    names = {field.name for field in fields(Line)}
    rows = [json.loads(line) for source in chosen.sources for line in source.read_text().splitlines()]
    commit = statistics.mode(str(row.get("commit", "unknown")) for row in rows)
    line_rows = [_as_line(row) for row in rows if str(row.get("commit", "unknown")) == commit]
    last: dict[tuple[str, ...], dict] = {}
    for row in line_rows:
        key = (row["case"], row["sizes"], row["dtype"], row["who"])
        last[key] = last.get(key, {}) | row
    lines = [Line(**{name: value for name, value in row.items() if name in names}) for row in _with_fastest(list(last.values()))]
    about = line_rows[-1]
    versions = ", ".join(f"{package} {about[package]}" for package in ("torch", "triton") if package in about)
    dtypes = ", ".join(dict.fromkeys(line.dtype for line in lines))
    draw(lines, chosen.picture, f"{about['device']}, {versions}, {dtypes}, commit {commit}, {about['date']}")


if __name__ == "__main__":
    main()
