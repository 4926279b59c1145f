"""What rows a power of two apart cost products on the CPU: elements of a column then fall into few sets of the caches.

    OMP_NUM_THREADS=1 python benchmarks/padding_cpu.py

One matrix of each product lies tight, its rows a power of two apart, and in turn with 64 bytes behind each row, as the other two always
do. The least processor time counts, as others may use the machine. `ratio` above one: the power of two is slower.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import measure
import torch
from torch import Tensor

# M, N, K
SHAPES = ((1024, 1024, 1024), (512, 2048, 2048), (64, 4096, 4096), (256, 1024, 4096), (8, 1024, 8192), (1, 4096, 4096))
ROLES = ("a", "at", "b", "bt", "out")
DTYPES = (torch.float32, torch.bfloat16)


def product(shape: tuple[int, int, int], dtype: torch.dtype, transposed: str, tight: str) -> Callable[[], object]:
    """A call in which all rows have room behind them, but those of the matrix `tight`; `transposed` may be "at" or "bt"."""

    def matrix(name: str, rows: int, columns: int) -> Tensor:
        stride = columns if name == tight else columns + 64 // dtype.itemsize
        return torch.randn(rows * stride).to(dtype).as_strided((rows, columns), (stride, 1))

    m, n, k = shape
    a = matrix("at", k, m).t() if transposed == "at" else matrix("a", m, k)
    b = matrix("bt", n, k).t() if transposed == "bt" else matrix("b", k, n)
    out = matrix("out", m, n)
    return lambda: torch.mm(a, b, out=out)


def least(calls: list[Callable[[], object]], seconds: float) -> list[float]:
    """Of each call, in turn."""
    best = [float("inf")] * len(calls)
    until = time.perf_counter() + seconds
    rounds = 0
    while rounds < 6 or time.perf_counter() < until:
        for index, call in enumerate(calls):
            begin = time.thread_time()
            call()
            best[index] = min(best[index], time.thread_time() - begin)
        rounds += 1
    return best


def main() -> None:
    torch.set_num_threads(1)  # a thread's own time is that of all
    rows = []
    for dtype, shape, role in itertools.product(DTYPES, SHAPES, ROLES):
        tight, roomy = least([product(shape, dtype, role, of) for of in (role, "")], 0.7)
        row = {"dtype": str(dtype).removeprefix("torch."), "shape": shape, "tight": role, "ms": round(tight * 1e3, 4)}
        rows.append({**row, "ratio": round(tight / roomy, 3), **measure.facts()})
        print(*row.values(), rows[-1]["ratio"], flush=True)
    for dtype in DTYPES:
        ratios = [row["ratio"] for row in rows if row["dtype"] == str(dtype).removeprefix("torch.")]
        print(dtype, "median", statistics.median(ratios), "least", min(ratios), "most", max(ratios))
    measure.write("padding_cpu", rows)


if __name__ == "__main__":
    main()
