"""What tuning gains on the GPU at hand: the table's schedules against those that timing chooses (`foci.use(tune=True)`).

    python benchmarks/gpu_tuning.py --compile 0/16 [row ...]    # one of sixteen processes that fill Triton's cache
    python benchmarks/gpu_tuning.py [--out FILE] [row ...]      # rows of gpu_attention.py; one line each

Medians of CUDA events. Nothing is read from or left in the user's store of choices.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any, Final

import torch
import triton
from gpu_attention import DEVICE, Row, flops, planned, rows

from foci.backends.contract import Plan
from foci.backends.repeat_passes import repeat_backward, repeat_forward
from foci.backends.triton.kernel import build_kernel
from foci.backends.triton.tuning import Store, TunedKernel, list_candidates
from foci.planner import find_target
from foci.problem import Cotangents

ROWS: Final = (("ALiBi causal", 128), ("window 1024", 64))


def chosen(names: list[str]) -> list[Row]:
    """The rows of these names; those of `ROWS` by default."""
    return [row for row in rows() if (row.name in names if names else (row.name, row.shape[3]) in ROWS)]


def compile_all(row: Row, part: int, parts: int) -> None:
    """Compiles every n-th candidate of each kernel of both passes, from the i-th."""
    problem, operands, dout = planned(row)
    plan = Plan("triton", problem, find_target(DEVICE))
    first = build_kernel(plan)
    results = first.forward(operands)
    first.backward(operands, results, Cotangents(dout))
    for kind in first.schedules:
        for schedule in list_candidates(kind, plan)[part::parts]:
            kernel = build_kernel(plan)
            kernel.schedules[kind] = schedule
            if kind.startswith("forward"):
                kernel.forward(operands)
            else:
                kernel.backward(operands, results, Cotangents(dout))
    torch.cuda.synchronize()


def milliseconds(kernel: Any, operands: Any, results: Any, dout: torch.Tensor) -> list[float]:
    """Of forward and backward."""
    passes = (repeat_forward(operands, kernel), repeat_backward(operands, results, Cotangents(dout), kernel))
    return [triton.testing.do_bench(run, warmup=15, rep=80, return_mode="median") for run in passes]


def line(row: Row) -> dict[str, Any]:
    """A row by the table and tuned."""
    problem, operands, dout = planned(row, is_tuned=True)
    plan = Plan("triton", problem, find_target(DEVICE))
    by_table, tuned = build_kernel(plan), TunedKernel(plan, build_kernel, store=Store(None))
    start = time.perf_counter()
    results = tuned.forward(operands)
    tuned.backward(operands, results, Cotangents(dout))
    seconds = time.perf_counter() - start
    table_ms, tuned_ms = (milliseconds(kernel, operands, results, dout) for kernel in (by_table, tuned.kernel))
    work = flops(row)
    return {
        "row": row.name, "shape": row.shape, "tuning_s": round(seconds, 1), "table_ms": table_ms, "tuned_ms": tuned_ms,
        "table_tflops": [work / table_ms[0] / 1e9, 2.5 * work / table_ms[1] / 1e9],
        "tuned_tflops": [work / tuned_ms[0] / 1e9, 2.5 * work / tuned_ms[1] / 1e9],
        "chosen": {kind: str(schedule) for kind, schedule in tuned.chosen.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", default="", help="i/n: only fill Triton's cache, every n-th candidate")
    parser.add_argument("--out", type=Path, help="a file to add a line to for each row")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "commit": commit}
    for row in chosen(options.names):
        if options.compile:
            compile_all(row, *map(int, options.compile.split("/")))
            continue
        result = line(row)
        rates = [f"{a:.0f} -> {b:.0f}" for a, b in zip(result["table_tflops"], result["tuned_tflops"], strict=True)]
        print(f"{row.name:15s} {row.shape} forward {rates[0]}, backward {rates[1]} TFLOP/s, {result['tuning_s']} s of tuning", flush=True)
        for kind, schedule in result["chosen"].items():
            print(f"    {kind}: {schedule}", flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(result | about) + "\n")


if __name__ == "__main__":
    main()
