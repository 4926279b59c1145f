"""Draws what `foci bench --out` or gpu_attention.py wrote: python benchmarks/bench_report.py benchmarks/results/bench_cpu.jsonl docs/cpu-bench.png

Lines of one file are of one machine; the picture says which, and the commit. A case measured twice counts as last measured.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path

from foci.bench import Line, draw


def _as_line(row: dict) -> dict:
    """A line of gpu_attention.py as one of `foci bench`."""
    if "row" not in row:
        return row
    shape = ",".join(map(str, row["shape"]))
    backward = None if row["row"].startswith("decode") else row["backward_ms"]
    return row | {"case": row["row"], "sizes": shape, "dtype": "bfloat16", "backward_ms": backward}


def _with_fastest(rows: list[dict]) -> list[dict]:
    """One side for foci where its backends were measured apart: the one that takes the least time forward."""
    own = ("foci", "hopper", "triton")
    best: dict[tuple[str, str], dict] = {}
    for row in rows:
        key = (row["case"], row["sizes"])
        if row["who"] in own and (key not in best or row.get("forward_ms", 1e9) < best[key].get("forward_ms", 1e9)):
            best[key] = row
    return [row | {"who": "foci", "backend": row.get("backend", row["who"])} for row in best.values()] + [
        r for r in rows if r["who"] not in own
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("picture", type=Path)
    chosen = parser.parse_args()
    names = {field.name for field in fields(Line)}
    found = [_as_line(json.loads(line)) for line in chosen.source.read_text().splitlines()]
    last = {(row["case"], row["sizes"], row["dtype"], row["who"]): row for row in found}
    lines = [Line(**{name: value for name, value in row.items() if name in names}) for row in _with_fastest(list(last.values()))]
    about = found[-1]
    versions = ", ".join(f"{package} {about[package]}" for package in ("torch", "triton") if package in about)
    commits = ", ".join(dict.fromkeys(str(row.get("commit", "unknown")) for row in last.values()))
    dtypes = ", ".join(dict.fromkeys(line.dtype for line in lines))
    draw(lines, chosen.picture, f"{about['device']}, {versions}, {dtypes}, commit {commits}")


if __name__ == "__main__":
    main()
