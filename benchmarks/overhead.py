"""Host cost of one small call, in processor time of its one thread, and what a thousand random lengths leave in the caches.

OMP_NUM_THREADS=1 python benchmarks/overhead.py
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from measure import facts, interleaved, medians, write
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask

import foci
from foci import execution, trace_functions
from foci.ir import eager

CALLS = 200


def _repeat(function):  # type: ignore[no-untyped-def]
    def run() -> None:
        for _ in range(CALLS):
            function()

    return run


def cases() -> dict[str, tuple[Any, Any]]:
    """Calls of (1, 2, 16, 8) by each way in, beside torch's scaled_dot_product_attention."""
    q, k, v, gradient = (torch.randn(1, 2, 16, 8) for _ in range(4))
    slopes, sdpa = torch.randn(2), torch.nn.functional.scaled_dot_product_attention
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    block_masks = [
        create(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu") for create in (foci.create_block_mask, torch_create_block_mask)
    ]
    offsets = torch.tensor([0, 7, 16])
    packed = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    nested = [torch.nested.nested_tensor_from_jagged(t, offsets, min_seqlen=7, max_seqlen=9).transpose(1, 2) for t in packed]
    pages, table, lengths = (torch.randn(4, 2, 4, 8) for _ in range(2)), torch.arange(4)[None], torch.tensor([13])
    key_pages, value_pages = pages
    compiled = torch.compile(lambda q, k, v: foci.attention(q, k, v, mask=foci.masks.window(4)))

    def patched() -> None:
        with foci.patch():
            torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def plain() -> None:
        sdpa(q, k, v)

    def train(attend: Any) -> Any:
        return lambda: torch.autograd.grad(attend(*leaves), leaves, gradient)

    return {
        "plain": (lambda: foci.attention(q, k, v), plain),
        "drop-in": (lambda: foci.scaled_dot_product_attention(q, k, v), plain),
        "causal": (
            lambda: foci.scaled_dot_product_attention(q, k, v, is_causal=True),
            lambda: sdpa(q, k, v, is_causal=True),
        ),
        "window": (lambda: foci.attention(q, k, v, mask=foci.masks.window(4)), plain),
        "score function": (lambda: foci.attention(q, k, v, score=lambda s, b, h, i, j: s + slopes[h] * (i - j)), plain),
        "dropout": (lambda: foci.attention(q, k, v, dropout_p=0.1), lambda: sdpa(q, k, v, dropout_p=0.1)),
        "BlockMask": (lambda: foci.flex_attention(q, k, v, block_mask=block_masks[0]), plain),
        "torch's BlockMask": (lambda: foci.flex_attention(q, k, v, block_mask=block_masks[1]), plain),
        "packed": (lambda: foci.varlen_attn(*packed, offsets, offsets, 9, 9), plain),
        "NestedTensor": (lambda: foci.scaled_dot_product_attention(*nested), plain),
        "paged": (lambda: foci.paged_attention(q, key_pages, value_pages, table, lengths), plain),
        "patched, with patch() itself": (patched, plain),
        "compiled, with Dynamo's guards": (lambda: compiled(q, k, v), plain),
        "forward and backward": (train(foci.attention), train(sdpa)),
    }


def overhead() -> list[dict[str, object]]:
    """Microseconds over torch."""
    rows = []
    for name, (ours, peer) in cases().items():
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
