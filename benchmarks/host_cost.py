"""Host cost of one small call by each way in, beside torch's scaled_dot_product_attention, and what random lengths leave in the caches.

    OMP_NUM_THREADS=1 python benchmarks/host_cost.py [--device cuda] [--quick] [--only WORD ...] [--profile WORD]

On the CPU, processor time of the one thread, of (1, 2, 16, 8) in float32. On a GPU, time of loops of calls that wait for nothing, of
(1, 2, 64, 64) in bfloat16; `gpu_overhead.py` sets more of them beside an empty launch. Ours and torch's in turns, medians. `--profile`
prints where the calls whose name contains WORD spend their time. Results go to benchmarks/results, or to the folder OUT.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from attending import synchronize
from measure import facts, interleaved, medians, write
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

import foci
from foci import execution, trace_functions
from foci.integrations.transformers import attention_forward
from foci.ir import eager

CALLS = 200


class Case(NamedTuple):
    """Two calls of the same inputs. `peer` is torch's scaled_dot_product_attention of as many tokens where torch has no such call."""

    ours: Callable[..., Any]
    peer: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    is_trained: bool = True


class Layer(torch.nn.Module):
    """Attention whose score function reads an attribute of its module, by name or by a property."""

    def __init__(self, slopes: Tensor) -> None:
        super().__init__()
        self.register_buffer("slopes", slopes)

    @property
    def computed(self) -> Tensor:
        return self.slopes  # type: ignore[return-value]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return foci.attention(query, key, value, score=lambda s, b, h, i, j: s + self.slopes[h] * (i - j))


def cases(device: str) -> dict[str, Case]:
    """Calls by each way in."""
    length, dim, dtype = (64, 64, torch.bfloat16) if device == "cuda" else (16, 8, torch.float32)
    q, k, v = (torch.randn(1, 2, length, dim, device=device, dtype=dtype) for _ in range(3))
    dense, sdpa = (q, k, v), F.scaled_dot_product_attention
    block_masks = [
        create(lambda b, h, i, j: i >= j, None, None, length, length, device=device)
        for create in (foci.create_block_mask, torch_create_block_mask)
    ]
    slopes, window, causal = torch.randn(2, device=device), foci.masks.window(4), foci.masks.causal()
    offsets = torch.tensor([0, 7, length], device=device, dtype=torch.int32)
    packed = tuple(t[0].transpose(0, 1).contiguous() for t in dense)
    ends = offsets.long()  # one tensor: sequences count as the same by it
    rows = [torch.nested.nested_tensor_from_jagged(t, ends, min_seqlen=7, max_seqlen=length - 7).transpose(1, 2) for t in packed]
    pages = [torch.randn(4, 2, length // 4, dim, device=device, dtype=dtype) for _ in range(2)]
    table, lengths = torch.arange(4, device=device)[None], torch.tensor([length - 3], device=device)
    module = SimpleNamespace(is_causal=True)

    def patched(*tensors: Tensor) -> Any:
        return F.scaled_dot_product_attention(*tensors)

    def flex(block_mask: Any) -> Callable[..., Any]:
        return lambda *tensors: foci.flex_attention(*tensors, block_mask=block_mask)

    def plain(*tensors: Tensor) -> Any:
        return sdpa(*tensors)

    def plain_packed(*tensors: Tensor) -> Any:
        return sdpa(*(t.transpose(0, 1)[None] for t in tensors))

    layer, most = Layer(slopes), length - 7
    return {
        "attention": Case(foci.attention, plain, dense),
        "scaled_dot_product_attention": Case(foci.scaled_dot_product_attention, plain, dense),
        "scaled_dot_product_attention, patched": Case(patched, plain, dense),
        "attention, causal": Case(lambda *t: foci.attention(*t, mask=causal), lambda *t: sdpa(*t, is_causal=True), dense),
        "attention, window": Case(lambda *t: foci.attention(*t, mask=window), plain, dense),
        "attention, score function": Case(
            lambda *t: foci.attention(*t, score=lambda s, b, h, i, j: s + slopes[h] * (i - j)), plain, dense
        ),
        "attention, score of a module": Case(layer, plain, dense),
        "attention, score traced each time": Case(
            lambda *t: foci.attention(*t, score=lambda s, b, h, i, j: s + layer.computed[h] * (i - j)), plain, dense
        ),
        "attention, dropout": Case(lambda *t: foci.attention(*t, dropout_p=0.1), lambda *t: sdpa(*t, dropout_p=0.1), dense),
        "flex_attention, BlockMask": Case(flex(block_masks[0]), plain, dense),
        "flex_attention, torch's BlockMask": Case(flex(block_masks[1]), plain, dense),
        "flex_attention, torch's BlockMask, patched": Case(
            lambda *t: torch_flex_attention(*t, block_mask=block_masks[1]), plain, dense
        ),
        "varlen_attn": Case(lambda *t: foci.varlen_attn(*t, offsets, offsets, most, most), plain_packed, packed),
        "NestedTensor": Case(
            lambda *_: foci.scaled_dot_product_attention(*rows), lambda *_: sdpa(*dense), dense, is_trained=False
        ),
        "paged_attention": Case(lambda q: foci.paged_attention(q, *pages, table, lengths), lambda q: sdpa(q, k, v), (q,), is_trained=False),
        "paged_attention, one query": Case(
            lambda q: foci.paged_attention(q, *pages, table, lengths), lambda q: sdpa(q, k, v), (q[:, :, -1:],), is_trained=False
        ),
        "transformers": Case(
            lambda *t: attention_forward(module, *t, None)[0],
            lambda *t: sdpa(*t, is_causal=True).transpose(1, 2).contiguous(),
            tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in dense),  # as a model's projections lie
        ),
    }  # fmt: skip


def _is_patched(name: str) -> bool:
    return name.endswith("patched")


def _loop(call: Callable[..., Any], inputs: tuple[Tensor, ...], calls: int, *, backward: bool) -> Callable[[], None]:
    if not backward:

        def forward() -> None:
            for _ in range(calls):
                call(*inputs)

        return forward
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    gradient = torch.randn_like(call(*leaves))

    def both() -> None:
        for _ in range(calls):
            torch.autograd.grad(call(*leaves), leaves, gradient)

    return both


def host_cost(device: str, *, quick: bool, words: list[str]) -> list[dict[str, object]]:
    """Microseconds of a call, ours and torch's."""
    rows: list[dict[str, object]] = []
    calls, clock = (50 if quick else CALLS), time.thread_time if device == "cpu" else time.perf_counter
    for name, case in cases(device).items():
        if words and not any(word in name for word in words):
            continue
        for backward in (False, True)[: 1 + case.is_trained]:
            ours = _with_patch(_loop, name)(case.ours, case.inputs, calls, backward=backward)
            peer = _loop(case.peer, case.inputs, calls, backward=backward)
            with foci.observe() as log:
                _with_patch(ours, name)()
                synchronize(device)

            def timed(loop: Callable[[], None]) -> Callable[[], None]:
                def run() -> None:
                    loop()
                    synchronize(device)

                return run if device == "cuda" else loop

            times = interleaved({"foci": timed(_with_patch(ours, name)), "torch": timed(peer)}, clock=clock, seconds=0.5 if quick else 2.0)
            us = {key: value / calls * 1e6 for key, value in medians(times).items()}
            rows.append(
                {
                    "benchmark": "host cost", "case": name, "direction": "forward and backward" if backward else "forward",
                    "backend": log.calls[0].backend, "foci_us": round(us["foci"], 1), "torch_us": round(us["torch"], 1),
                    "ratio": round(us["foci"] / us["torch"], 2), **facts(device),
                }
            )  # fmt: skip
            print(
                f"{name:45s} {rows[-1]['direction']:21s} {us['foci']:8.1f} us, torch {us['torch']:8.1f} us, x {rows[-1]['ratio']}",
                flush=True,
            )
    return rows


def _with_patch(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function, called inside `foci.patch()` where the case is of a patched function."""
    if not _is_patched(name):
        return function

    def run(*args: Any, **options: Any) -> Any:
        with foci.patch():
            return function(*args, **options)

    return run


def profile(device: str, word: str) -> None:
    """Print where the calls spend their time."""
    for name, case in cases(device).items():
        for backward in (False, True)[: 1 + case.is_trained]:
            if word not in name:
                continue
            loop = _with_patch(_with_patch(_loop, name)(case.ours, case.inputs, CALLS, backward=backward), name)
            loop()
            profiler = cProfile.Profile()
            profiler.runcall(loop)
            print(f"== {name}, {'forward and backward' if backward else 'forward'}: {CALLS} calls")
            pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def _cache_sizes() -> dict[str, int]:
    return {
        **execution.cache_sizes(),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="shorter loops, and no growth of caches")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD")
    parser.add_argument("--profile", metavar="WORD")
    options = parser.parse_args()
    if options.profile is not None:
        profile(options.device, options.profile)
        return
    rows = host_cost(options.device, quick=options.quick, words=options.only)
    if not options.only:
        more = [growth()] if options.device == "cpu" and not options.quick else []
        write(f"host_cost-{options.device}", rows + more, quiet=True)


if __name__ == "__main__":
    main()
