"""Packed sequences beside dense batches on the GPU at hand: the same tokens in sequences of one length, and padded batches.

    python benchmarks/gpu_packed.py --compile 0/3        # one of three processes that fill the caches
    python benchmarks/gpu_packed.py [--out FILE]

Bfloat16, no mask but the padded batch's own, and the causal one; the planner's choice of backend; forward without gradients, and the
backward pass alone. Lengths of the padded comparison are drawn from an eighth of the longest on. `device_us` is what the device needs, behind work that
keeps it busy until the host has called it often enough; `host_us` what a call costs the host; `ms` is between events around eager
calls, both sides in turns, of which the longer of the two decides.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import measure
import torch
from pages import RESULTS
from torch import Tensor

import foci

SHAPES = ((16, 16, 1024, 64), (64, 16, 256, 64), (8, 16, 2048, 128))
"""Sequences, heads, length, head dim."""
CASES = tuple((shape, mask) for mask in ("", "causal") for shape in SHAPES)
CALLS = 20
AHEAD = 30_000_000
"""Cycles that the device spins meanwhile."""


def passes(call: Callable[..., Tensor], tensors: list[Tensor], gradient: Tensor) -> dict[str, Callable[[], object]]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = call(*leaves)
    return {"forward": lambda: call(*tensors), "backward": lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True)}


def sides(batch: int, heads: int, length: int, dim: int, mask: str) -> dict[str, dict[str, Callable[[], object]]]:
    """Side -> pass -> call; under the causal mask beside a dense batch alone."""
    flat = [torch.randn(batch * length, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    dense = [t.view(batch, length, heads, dim).transpose(1, 2) for t in flat]
    equal = torch.arange(batch + 1, device="cuda") * length
    if mask:
        causal = foci.masks.causal()
        return {
            "packed": passes(lambda q, k, v: foci.varlen_attn(q, k, v, equal, equal, length, length, mask=causal), flat[:3], flat[3]),
            "dense": passes(lambda q, k, v: foci.attention(q, k, v, mask=causal), dense[:3], dense[3]),
        }
    drawn = [length, *(random.Random(n).randint(length // 8, length) for n in range(batch - 1))]
    offsets = torch.tensor([0, *drawn], device="cuda").cumsum(0)
    few = [t[: sum(drawn)].contiguous() for t in flat]
    padding = foci.masks.padding(torch.tensor(drawn, device="cuda"))
    nested = [torch.nested.nested_tensor_from_jagged(t, equal, min_seqlen=length, max_seqlen=length).transpose(1, 2) for t in flat[:3]]
    return {
        "packed": passes(lambda q, k, v: foci.varlen_attn(q, k, v, equal, equal, length, length), flat[:3], flat[3]),
        "dense": passes(foci.attention, dense[:3], dense[3]),
        "packed, own lengths": passes(lambda q, k, v: foci.varlen_attn(q, k, v, offsets, offsets, length, length), few[:3], few[3]),
        "padded": passes(lambda q, k, v: foci.attention(q, k, v, mask=padding), dense[:3], dense[3]),
        "nested": {"forward": lambda: foci.attention(*nested)},
    }


def device_us(call: Callable[[], object]) -> float:
    times_us = []
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(AHEAD)
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        times_us.append(begin.elapsed_time(end) / CALLS * 1e3)
    return statistics.median(times_us)


def host_us(call: Callable[[], object]) -> float:
    times_us = []
    for _ in range(7):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times_us.append((time.perf_counter() - begin) / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times_us)


def five(call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(5):
            call()

    return run


def rows(shape: tuple[int, int, int, int], mask: str) -> list[dict[str, object]]:
    passes_by_side = sides(*shape, mask)
    rows = []
    for direction in ("forward", "backward"):
        calls = {side: ways[direction] for side, ways in passes_by_side.items() if direction in ways}
        with foci.observe() as log:
            for call in calls.values():
                call()
                call()
        backends = [each.backend for each in (log.calls if direction == "forward" else log.backward_calls)[::2]]
        times = measure.in_turns({side: five(call) for side, call in calls.items()})
        for (side, call), backend in zip(calls.items(), backends, strict=True):
            numbers = {"ms": round(times[side] / 5, 4), "device_us": round(device_us(call), 1), "host_us": round(host_us(call), 1)}
            rows.append({"shape": list(shape), "mask": mask, "direction": direction, "side": side, "backend": backend, **numbers})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", default="", help="i/n: only fill the caches, with every n-th case from the i-th")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_packed.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    part, parts = map(int, (options.compile or "0/1").split("/"))
    if options.compile:
        for shape, mask in CASES[part::parts]:
            for ways in sides(*shape, mask).values():
                for call in ways.values():
                    call()
        return
    about = measure.facts("cuda")
    with options.out.open("w") as file:
        for shape, mask in CASES:
            for row in rows(shape, mask):
                print(json.dumps(row), flush=True)
                file.write(json.dumps(row | about) + "\n")


if __name__ == "__main__":
    main()
