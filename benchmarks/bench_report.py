"""Draws what `foci bench --out` wrote: python benchmarks/bench_report.py benchmarks/results/bench_cpu.jsonl docs/cpu-bench.png

Lines of one file are of one machine; the picture says which, and the commit. A case measured twice counts as last measured.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path

from foci.bench import Line, draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("picture", type=Path)
    chosen = parser.parse_args()
    names = {field.name for field in fields(Line)}
    found = [json.loads(line) for line in chosen.source.read_text().splitlines()]
    last = {(row["case"], row["sizes"], row["dtype"], row["who"]): row for row in found}
    lines = [Line(**{name: value for name, value in row.items() if name in names}) for row in last.values()]
    about = found[-1]
    versions = ", ".join(f"{package} {about[package]}" for package in ("torch", "triton") if package in about)
    dtypes = ", ".join(dict.fromkeys(line.dtype for line in lines))
    draw(lines, chosen.picture, f"{about['device']}, {versions}, {dtypes}, commit {about.get('commit', 'unknown')}")


if __name__ == "__main__":
    main()
