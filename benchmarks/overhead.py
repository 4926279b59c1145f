"""Host cost of one small call, in processor time of its one thread, and what a thousand random lengths leave in the caches.

OMP_NUM_THREADS=1 python benchmarks/overhead.py
"""

from __future__ import annotations

import random
import time

import torch
from measure import facts, interleaved, medians, write

import foci
from foci import execution, trace_functions
from foci.ir import eager

CALLS = 200


def _repeat(function):  # type: ignore[no-untyped-def]
    def run() -> None:
        for _ in range(CALLS):
            function()

    return run


def overhead() -> list[dict[str, object]]:
    """Microseconds over F.scaled_dot_product_attention for (1, 2, 16, 8)."""
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    slopes = torch.randn(2)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    cases = {
        "plain": (lambda: foci.attention(q, k, v), lambda: sdpa(q, k, v)),
        "drop-in": (lambda: foci.scaled_dot_product_attention(q, k, v), lambda: sdpa(q, k, v)),
        "causal": (lambda: foci.scaled_dot_product_attention(q, k, v, is_causal=True), lambda: sdpa(q, k, v, is_causal=True)),
        "window": (lambda: foci.attention(q, k, v, mask=foci.masks.window(4)), lambda: sdpa(q, k, v)),
        "score function": (lambda: foci.attention(q, k, v, score=lambda s, b, h, i, j: s + slopes[h] * (i - j)), lambda: sdpa(q, k, v)),
    }
    rows = []
    for name, (ours, peer) in cases.items():
        with foci.observe() as log:
            ours()
        times = medians(interleaved({"foci": _repeat(ours), "torch": _repeat(peer)}, clock=time.thread_time))
        us = {key: value / CALLS * 1e6 for key, value in times.items()}
        rows.append(
            {
                "benchmark": "host overhead",
                "case": name,
                "backend": log.calls[0].backend,
                "foci_us": round(us["foci"], 1),
                "torch_us": round(us["torch"], 1),
                "over_us": round(us["foci"] - us["torch"], 1),
                **facts(),
            }
        )
    return rows


def _cache_sizes() -> dict[str, int]:
    return {
        "decisions": len(execution._decisions),
        "kernels": len(execution._kernels),
        **trace_functions.cache_sizes(),
        "emitted functions": eager._compiled.cache_info().currsize,
    }


def growth() -> dict[str, object]:
    """Cache sizes after one length of each power of two, and after a thousand random lengths more."""

    def call(length: int) -> None:
        q = torch.randn(1, 1, length, 8)
        foci.attention(q, q, q, mask=foci.masks.window(16), score=lambda s, b, h, i, j: s * 0.5 + (i - j + length))

    for exponent in range(10):
        call(2**exponent)
    before = _cache_sizes()
    source = random.Random(0)
    for _ in range(1000):
        call(source.randint(1, 512))
    return {"benchmark": "cache growth over 1000 random lengths", "before": before, "after": _cache_sizes(), **facts()}


if __name__ == "__main__":
    write("overhead", [*overhead(), growth()])
