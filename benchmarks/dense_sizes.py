"""Dense attention of many sizes on the GPU at hand: the planner's choice beside cuDNN, forward and backward.

    python benchmarks/dense_sizes.py --compile     # only fill the caches, in processes side by side
    python benchmarks/dense_sizes.py               # times, a line each

bfloat16; medians of CUDA events around ten calls in a row, behind work that keeps the device busy until the host has called them, both
sides by turns. Lines go to $OUT/dense_sizes.jsonl where OUT is set; `benchmarks/hopper_report.py` makes the table of docs/hopper.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
from dataclasses import replace
from pathlib import Path

from hopper_attention import Row, choice_of, peers_of, timed
from measure import facts

CALLS = 10
SIDES = ("foci", "cudnn")


def _of(dim: int, *sizes: tuple[int, int, int], kv_heads: int = 0, value_dim: int = 0) -> tuple[Row, ...]:
    """Of (batch, heads, length), without a mask and under the causal one."""
    rows = [Row("dense", (*size, dim), kv_heads=kv_heads, value_dim=value_dim) for size in sizes]
    return tuple(replace(row, causal=causal) for row in rows for causal in (False, True))


SIZES = (
    *_of(16, (16, 16, 512)),
    *_of(32, (64, 8, 256), (16, 8, 1024), (4, 8, 4096)),
    *_of(64, (256, 16, 64), (64, 12, 128), (64, 12, 197), (64, 16, 256), (16, 12, 384), (16, 12, 512), (1, 12, 512), (8, 16, 768)),
    *_of(64, (8, 12, 1000), (4, 16, 1024), (16, 16, 1024), (2, 12, 2048), (8, 12, 2048), (1, 12, 4096), (1, 12, 16384), (1, 16, 1024)),
    *_of(64, (1, 16, 2048), (2, 24, 1536), (32, 12, 256)),
    *_of(64, (8, 32, 1024), (2, 32, 4096), kv_heads=8),
    *_of(72, (8, 16, 729)),
    *_of(80, (16, 16, 577)),
    *_of(96, (16, 12, 512), (4, 12, 2048)),
    *_of(128, (64, 16, 128), (32, 16, 256), (16, 16, 512), (1, 16, 512), (8, 16, 768), (1, 16, 1000), (8, 16, 1024), (8, 32, 1024)),
    *_of(128, (2, 32, 2048), (8, 16, 2048), (1, 32, 4096), (2, 16, 8192), (1, 32, 512), (1, 16, 2048)),
    *_of(128, (1, 16, 1536), (1, 8, 2048), (4, 16, 384), (1, 24, 3072), (3, 20, 1300)),
    *_of(128, (8, 32, 512), (4, 32, 1024), (1, 32, 8192), kv_heads=8),
    *_of(192, (4, 16, 2048), value_dim=128),
    *_of(256, (8, 8, 512), (4, 8, 2048)),
    Row("dense", (16, 12, 512, 64), keys=77),
    Row("dense", (2, 10, 4096, 64), keys=77),
    Row("dense", (8, 16, 128, 64), keys=1024),
    Row("dense", (2, 16, 128, 64), keys=4096),
    Row("dense", (2, 16, 64, 64), keys=4096),
    Row("dense", (2, 16, 64, 64), keys=1024),
    Row("dense", (1, 16, 128, 64), keys=1024),
    Row("dense", (4, 16, 128, 128), keys=4096),
    Row("dense", (1, 16, 128, 128), keys=8192),
    Row("dense", (1, 32, 64, 128), kv_heads=8, keys=8192),
    Row("dense", (8, 16, 256, 64), keys=1024),
    Row("dense", (16, 8, 100, 32), keys=850),
    Row("dense", (4, 16, 128, 128), keys=1024),
    Row("dense", (2, 8, 1024, 128), keys=4096),
    Row("dense", (2, 8, 4096, 128), keys=1024),
)


def shape_of(row: Row) -> str:
    """As the table has it: batch, heads of queries and of keys, lengths and head dims likewise, each once where they are one."""
    batch, heads, length, dim = row.shape
    pairs = (("/", heads, row.kv_heads), ("x", length, row.keys), ("/", dim, row.value_dim))
    return ",".join(map(str, (batch, *(f"{one}{sign}{other}" if other else one for sign, one, other in pairs))))


def fill(row: Row) -> None:
    """Compiles what a problem takes."""
    for backward in (False, True):
        peers_of(row, backward=backward)["foci"]()()


def measure(row: Row, facts: dict[str, str]) -> dict[str, object]:
    """Microseconds of both passes and sides."""
    line: dict[str, object] = {"shape": shape_of(row), "causal": row.causal, **facts}
    for name, backward in (("forward", False), ("backward", True)):
        peers = peers_of(row, backward=backward)
        line |= {f"{name}_{who}_us": 1e3 * ms for who, ms in timed({who: peers[who] for who in SIDES}, rounds=3, calls=CALLS).items()}
        line[f"{name}_choice"] = choice_of(row, backward=backward)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", action="store_true", help="only fill the caches")
    if parser.parse_args().compile:
        with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 2) - 1)) as pool:
            pool.map(fill, random.Random(0).sample(SIZES, len(SIZES)), chunksize=1)
        return
    machine = facts("cuda")
    for row in SIZES:
        line = measure(row, machine)
        if "OUT" in os.environ:
            with (Path(os.environ["OUT"]) / "dense_sizes.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        times = [line.get(f"{name}_{who}_us") for name in ("forward", "backward") for who in SIDES]
        shown = "  ".join("-" if us is None else f"{us:.1f}" for us in times)
        print(f"{'causal' if row.causal else 'dense':6s} {shape_of(row):20s} {shown}", flush=True)


if __name__ == "__main__":
    main()
