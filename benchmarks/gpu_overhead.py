"""Host cost of one small call on the GPU at hand: microseconds of a loop of calls, of which the device waits for none.

    python benchmarks/gpu_overhead.py [--profile]

The floor is a Triton kernel that does nothing, launched by Triton; peers are torch's scaled_dot_product_attention and
FlexAttention compiled. (1, 2, 64, 64) in bfloat16, one thread, medians of rounds that take turns.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention.flex_attention import flex_attention

import foci
from foci import masks, scores

DEVICE = torch.device("cuda")
CALLS, ROUNDS = 100, 15


@triton.jit
def nothing(x):
    """Does nothing."""


def cases() -> dict[str, dict[str, Callable[[], Any]]]:
    """name -> direction -> call; the direction "backward" is the whole of forward and backward."""
    q, k, v = (torch.randn(1, 2, 64, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    gradient = torch.randn_like(q)
    x, offsets = torch.zeros(1, device=DEVICE), torch.tensor([0, 20, 64], device=DEVICE)
    slopes, causal = torch.rand(2, device=DEVICE), masks.causal()
    packed = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    packed_leaves = [t.clone().requires_grad_() for t in packed]
    packed_gradient = packed[0].clone()

    def pair(
        call: Callable[..., Any], inputs: Any = (q, k, v), grads: Any = leaves, cotangent: Any = gradient
    ) -> dict[str, Callable[[], Any]]:
        def backward() -> None:
            for leaf in grads:
                leaf.grad = None
            call(*grads).backward(cotangent)

        return {"forward": lambda: call(*inputs), "forward+backward": backward}

    def ours(**options: Any) -> Callable[..., Any]:
        return lambda *tensors: foci.attention(*tensors, **options)

    def jagged(*tensors: Any) -> Any:
        return foci.varlen_attn(*tensors, offsets, offsets, 44, 44, window_size=(-1, 0))

    flex = torch.compile(flex_attention)
    return {
        "empty launch": {"forward": lambda: nothing[(1,)](x)},
        "torch x.add_(1)": {"forward": lambda: x.add_(1)},
        "torch SDPA": pair(F.scaled_dot_product_attention),
        "torch SDPA causal": pair(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True)),
        "FlexAttention compiled": pair(lambda *t: flex(*t)),
        "foci plain": pair(ours()),
        "foci causal": pair(ours(mask=causal)),
        "foci ALiBi causal": pair(ours(mask=causal, score=scores.alibi(slopes))),
        "foci jagged causal": pair(jagged, packed, packed_leaves, packed_gradient),
        "foci by aten, causal": pair(ours(mask=causal)),
    }


def microseconds(name: str, call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    with foci.use("aten" if "aten" in name else "triton"):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        passed = time.perf_counter() - start
    torch.cuda.synchronize()
    return passed / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true", help="also where the host's time goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    calls = {(name, way): call for name, ways in cases().items() for way, call in ways.items()}
    for key in list(calls):
        try:
            microseconds(key[0], calls[key])
        except Exception as error:
            print(*key, type(error).__name__, str(error)[-300:], flush=True)
            del calls[key]
    rounds: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for _ in range(ROUNDS):
        for key, call in calls.items():
            rounds[key].append(microseconds(key[0], call))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "commit": commit}
    out = Path(os.environ["OUT"]) / "gpu_overhead.jsonl" if "OUT" in os.environ else None
    for (name, way), times in rounds.items():
        line = {"call": name, "direction": way, "us": round(statistics.median(times), 1), "least_us": round(min(times), 1)}
        print(f"{name:24s} {way:17s} {line['us']:7.1f} us, least {line['least_us']:7.1f}", flush=True)
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(line | about) + "\n")
    if options.profile:
        for key in (("foci causal", "forward"), ("foci causal", "forward+backward")):
            profile = cProfile.Profile()
            profile.enable()
            for _ in range(3):
                microseconds(key[0], calls[key])
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(22)


if __name__ == "__main__":
    main()
