"""Forward attention on a Hopper GPU: foci's hopper and triton backends beside FlashAttention-4, cuDNN, varlen_attn and FlexAttention.

    python benchmarks/hopper_forward.py [group ...]      # dense_128 dense_64 dense_256 short_and_long jagged grouped variants_128 variants_64
    python benchmarks/hopper_forward.py --compile [group ...]      # only fill the caches

bfloat16; medians of CUDA events, the peers of a row taking turns, so that a slow moment of the card falls on all alike.
TFLOP/s over the attended area. Lines go to $OUT/hopper_forward.jsonl where OUT is set.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import foci
from foci import masks
from foci.backends import load
from foci.backends.contract import Plan
from foci.binding import bind
from foci.planner import target_of
from foci.problem import Formula, Layout, Operands, Outputs, Problem, bucket

DEVICE = torch.device("cuda")
Calls = dict[str, Callable[[], Any]]


def ours(query: Tensor, key: Tensor, value: Tensor, score: Any = None, mask: Any = None, **jagged: Any) -> Calls:
    """A forward of each backend that takes the problem."""
    bound = bind(score, mask, DEVICE)
    operands = Operands(query, key, value, bound.captures, bound.ints, bound.floats, 1 / math.sqrt(query.shape[3]), **jagged)
    batch, heads, rows, dim = query.shape
    sizes = (len(jagged["cu_q"]) - 1, jagged["max_q"], jagged["max_q"]) if jagged else (batch, rows, key.shape[2])
    formula = Formula(bound.variant, Layout.JAGGED if jagged else Layout.DENSE, Outputs(lse=True))
    captures = tuple(False for _ in bound.captures)
    asked = Problem(formula, query.dtype, dim, dim, heads, key.shape[1], *map(bucket, sizes), capture_grads=captures)
    found: Calls = {}
    for name in ("hopper", "triton"):
        if load(name).reject(asked, target_of(DEVICE)) is None:
            kernel = load(name).compile(Plan(name, asked, target_of(DEVICE)))
            found[name] = lambda kernel=kernel: kernel.forward(operands)
    return found


def timed(calls: Calls, *, only_compile: bool, rounds: int = 7) -> dict[str, float]:
    """Milliseconds of each call that runs."""
    good: Calls = {}
    for name, call in calls.items():
        try:
            call(), call()
            torch.cuda.synchronize()
            good[name] = call
        except Exception as error:
            print(f"  {name}: {type(error).__name__} {str(error)[-200:]}", flush=True)
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in good}
    for _ in range(0 if only_compile else rounds):
        for name, call in good.items():
            call()
            for _ in range(3):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                call()
                end.record()
                marks[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in found) for name, found in marks.items() if found}


def tensors(shape: tuple[int, int, int, int], kv_heads: int = 0) -> list[Tensor]:
    batch, heads, rows, dim = shape
    return [torch.randn(batch, n, rows, dim, device=DEVICE, dtype=torch.bfloat16) for n in (heads, kv_heads or heads, kv_heads or heads)]


def dense(shape: tuple[int, int, int, int], *, causal: bool, kv_heads: int = 0) -> tuple[float, Calls]:
    """(flops, calls) of a plain or causal row."""
    query, key, value = tensors(shape, kv_heads)
    calls = ours(query, key, value, mask=masks.causal() if causal else None)

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=bool(kv_heads))

    def fa4() -> Any:
        from flash_attn.cute import flash_attn_func

        return flash_attn_func(*first, causal=causal)

    first = [t.transpose(1, 2).contiguous() for t in (query, key, value)]
    batch, heads, rows, dim = shape
    return 4.0 * batch * heads * rows * rows * dim * (0.5 if causal else 1.0), calls | {"fa4": fa4, "cudnn": cudnn}


def jagged(*, causal: bool) -> tuple[float, Calls]:
    """The same of 64 log-normal lengths from 16 to 8192."""
    from torch.nn.attention.varlen import varlen_attn

    generator = torch.Generator().manual_seed(11)
    lengths = torch.exp(torch.randn(64, generator=generator) * 1.2 + 6.4).clamp(16, 8192).int().tolist()
    cu, most = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int(), max(lengths)
    packed = [torch.randn(sum(lengths), 16, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    sequences = {"cu_q": cu, "cu_kv": cu, "max_q": most, "max_kv": most}
    calls = ours(*(t.transpose(0, 1)[None] for t in packed), mask=masks.causal() if causal else None, **sequences)

    def fa4() -> Any:
        from flash_attn.cute import flash_attn_varlen_func

        spans = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": most, "max_seqlen_k": most}
        return flash_attn_varlen_func(*packed, **spans, causal=causal)

    def varlen() -> Any:
        return varlen_attn(*packed, cu, cu, most, most, window_size=(-1, 0) if causal else (-1, -1))

    area = float(sum(n * n for n in lengths)) * (0.5 if causal else 1.0)
    return 4.0 * 16 * 128 * area, calls | {"fa4": fa4, "varlen": varlen}


def variants(heads: int, dim: int) -> list[tuple[str, Any, Any, float]]:
    """(name, score, mask, attended area of both batch entries) of the rows against FlexAttention, 8192 long."""
    length = 8192
    generator = torch.Generator().manual_seed(3)
    marks = torch.zeros(length, dtype=torch.int32)
    marks[torch.randperm(length - 1, generator=generator)[:7] + 1] = 1
    ids = marks.cumsum(0).to(torch.int32).to(DEVICE)
    slopes = torch.exp2(-8.0 / heads * torch.arange(1, heads + 1, device=DEVICE))

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    return [
        ("window 1024", None, lambda b, h, q, k: (q >= k) & (q - k < 1024), 2 * (1024.0 * length - 1024 * 1023 / 2)),
        ("document", None, lambda b, h, q, k: ids[q] == ids[k], 2 * float((torch.bincount(ids).double() ** 2).sum())),
        ("ALiBi causal", lambda s, b, h, q, k: s + slopes[h] * (k - q), causal, float(length) ** 2),
        ("softcap causal", lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20.0), causal, float(length) ** 2),
    ]


def variant(shape: tuple[int, int, int, int], score: Any, mask: Any, area: float) -> tuple[float, Calls]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    query, key, value = tensors(shape)
    calls = ours(query, key, value, foci.Score(score) if score else None, foci.Mask(mask))
    block = create_block_mask(mask, None, None, shape[2], shape[2], "cuda")
    flex = torch.compile(flex_attention, dynamic=False)
    return 4.0 * shape[1] * shape[3] * area, calls | {"flex": lambda: flex(query, key, value, score_mod=score, block_mask=block)}


def rows(group: str) -> list[tuple[str, tuple[int, ...], Callable[[], tuple[float, Calls]]]]:
    """(name, shape, what makes flops and calls) of a group."""
    shapes = {
        "dense_128": [(2, 16, 8192, 128)],
        "dense_64": [(2, 32, 8192, 64)],
        "dense_256": [(2, 8, 8192, 256)],
        "short_and_long": [(8, 16, 2048, 128), (1, 16, 16384, 128)],
    }
    if group in shapes:
        return [("causal" if c else "dense", s, lambda s=s, c=c: dense(s, causal=c)) for s in shapes[group] for c in (False, True)]
    if group == "jagged":
        return [("jagged causal" if c else "jagged", (64, 16, 8192, 128), lambda c=c: jagged(causal=c)) for c in (False, True)]
    if group == "grouped":
        return [("dense GQA 4", (2, 32, 8192, 128), lambda: dense((2, 32, 8192, 128), causal=False, kv_heads=8))]
    heads, dim = {"variants_128": (16, 128), "variants_64": (32, 64)}[group]
    shape = (2, heads, 8192, dim)
    return [(name, shape, lambda rest=rest: variant(shape, *rest)) for name, *rest in variants(heads, dim)]


GROUPS = ("dense_128", "dense_64", "jagged", "dense_256", "short_and_long", "grouped", "variants_128", "variants_64")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", action="store_true", help="only fill the caches")
    parser.add_argument("groups", nargs="*", default=GROUPS)
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    about = {"commit": commit, "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    for group in options.groups:
        for name, shape, make in rows(group):
            flops, calls = make()
            found = timed(calls, only_compile=options.compile)
            for who, ms in found.items():
                line = {"row": name, "shape": shape, "who": who, "forward_ms": ms, "forward_tflops": flops / ms / 1e9} | about
                if "OUT" in os.environ:
                    with (Path(os.environ["OUT"]) / "hopper_forward.jsonl").open("a") as file:
                        file.write(json.dumps(line) + "\n")
            print(
                f"{name:15s} {','.join(map(str, shape)):16s} " + "  ".join(f"{who} {flops / ms / 1e9:.0f}" for who, ms in found.items()),
                flush=True,
            )


if __name__ == "__main__":
    main()
