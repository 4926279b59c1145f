"""Host cost of one small call on the GPU at hand: microseconds of a loop of calls, of which the device waits for none.

    python benchmarks/gpu_overhead.py --compile 0/16     # one of sixteen processes that fill the caches
    python benchmarks/gpu_overhead.py [--profile WORD] [--only WORD ...] [--out FILE]

The floor is a Triton kernel that does nothing, launched by Triton, and for a backward pass an autograd function that only allocates;
peers are torch's scaled_dot_product_attention, varlen_attn and FlexAttention compiled. Problems are of (1, 2, 64, 64) in bfloat16, or
as many tokens of two sequences; one thread; medians of rounds, in which each call takes turns with the empty launch. foci's rows are
measured by each of its backends for GPUs. A row of calls whose lengths are new each time says what a call costs that nothing is known
of, and one of the operators alone what attention costs in a compiled graph. A line comes as soon as it is measured.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import os
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import measure
import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

import foci
from foci import masks, scores

DEVICE = torch.device("cuda")
CALLS, ROUNDS = 100, 15
BACKENDS = ("triton", "hopper")


@triton.jit
def nothing(x):
    """Does nothing."""


class Allocating(torch.autograd.Function):
    """What any attention does besides its launches: two tensors made forward, five saved, five made backward."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        out, lse = torch.empty_like(tensors[0]), tensors[0].new_empty((1, 2, 64), dtype=torch.float32)
        ctx.save_for_backward(*tensors, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        *tensors, _, lse = ctx.saved_tensors
        _ = torch.empty_like(lse), torch.empty_like(lse)
        return tuple(map(torch.empty_like, tensors))


class Inputs(NamedTuple):
    """Tensors of a call, leaves of the same shapes, and what flows back."""

    tensors: tuple[Tensor, ...]
    leaves: tuple[Tensor, ...]
    cotangent: Tensor


def inputs_of(*shapes: tuple[int, ...]) -> Inputs:
    tensors = tuple(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes)
    return Inputs(tensors, tuple(t.clone().requires_grad_() for t in tensors), torch.randn_like(tensors[0]))


def ways_of(call: Callable[..., Any], inputs: Inputs) -> dict[str, Callable[[], Any]]:
    """Direction -> call."""

    def both() -> None:
        for leaf in inputs.leaves:
            leaf.grad = None
        call(*inputs.leaves).backward(inputs.cotangent)

    return {"forward": lambda: call(*inputs.tensors), "forward+backward": both}


def foci_cases() -> dict[str, dict[str, Callable[[], Any]]]:
    """foci's calls by name and direction; the name is a backend's with the call's."""
    dense, packed = inputs_of(*[(1, 2, 64, 64)] * 3), inputs_of(*[(64, 2, 64)] * 3)
    offsets, slopes = torch.tensor([0, 20, 64], device=DEVICE), torch.rand(2, device=DEVICE)
    causal, keep = masks.causal(), torch.rand(1, 1, 64, 64, device=DEVICE) > 0.2
    bias = torch.randn(1, 2, 64, 64, device=DEVICE, dtype=torch.bfloat16)
    learned = Inputs((*dense.tensors, bias), (*dense.leaves, bias.clone().requires_grad_()), dense.cotangent)
    rows = torch.nested.nested_tensor_from_jagged(packed.tensors[0], offsets, min_seqlen=20, max_seqlen=44).transpose(1, 2)
    pool, lengths = inputs_of(*[(1, 4096, 2, 64)] * 3).tensors, _new_lengths()

    def attention(**options: Any) -> Callable[..., Any]:
        return lambda *tensors: foci.attention(*tensors, **options)

    def varlen(**options: Any) -> Callable[..., Any]:
        return lambda *tensors: foci.varlen_attn(*tensors, offsets, offsets, 44, 44, **options)

    def new() -> Any:
        n = next(lengths)
        return foci.attention(*(t[:, :n].transpose(1, 2) for t in pool))

    def autocast(*tensors: Tensor) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return foci.attention(*tensors)

    calls = {
        "plain": ways_of(attention(), dense),
        "causal": ways_of(attention(mask=causal), dense),
        "scaled_dot_product_attention causal": ways_of(lambda *t: foci.scaled_dot_product_attention(*t, is_causal=True), dense),
        "ALiBi causal": ways_of(attention(mask=causal, score=scores.alibi(slopes)), dense),
        "bool mask": ways_of(attention(mask=keep), dense),
        "dropout": ways_of(attention(dropout_p=0.1), dense),
        "autocast": ways_of(autocast, dense),
        "learned bias": ways_of(lambda q, k, v, b: foci.attention(q, k, v, bias=b), learned),
        "jagged": ways_of(varlen(), packed),
        "jagged causal": ways_of(varlen(window_size=(-1, 0)), packed),
        "jagged causal dropout": ways_of(varlen(window_size=(-1, 0), dropout_p=0.1), packed),
        "nested": {"forward": lambda: foci.attention(rows, rows, rows)},
        "new lengths": {"forward": new},
    }
    cases_by_name = {f"foci {name}, {backend}": ways for backend in BACKENDS for name, ways in calls.items()}
    for backend in BACKENDS:
        cases_by_name[f"foci operators causal, {backend}"] = operators_of(dense, backend, mask=causal)
        cases_by_name[f"foci compiled causal, {backend}"] = ways_of(torch.compile(attention(mask=causal)), dense)
    return cases_by_name


def operators_of(inputs: Inputs, backend: str, **options: Any) -> dict[str, Callable[[], Any]]:
    """The operators that a compiled graph calls, called as it does: no gradients are recorded, tensors are new objects each time."""
    seen: list[tuple[Any, ...]] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.foci.attention.default:
                seen.append(args)
            return func(*args, **(kwargs or {}))

    with Seen(), foci.use(backend):
        foci.attention(*inputs.tensors, **options)
    ((*tensors, captures, seed, blocks), rest) = seen[0][:6], seen[0][6:]

    def forward() -> Any:
        return torch.ops.foci.attention.default(*[t.detach() for t in tensors], captures, seed, blocks, *rest)

    def both() -> None:
        out, lse, *_ = forward()
        again = [t.detach() for t in tensors]
        torch.ops.foci.attention_backward.default(
            inputs.cotangent, None, None, None, out, lse, "111", *again, captures, seed, blocks, *rest
        )

    return {"forward": forward, "forward+backward": both}


def _new_lengths() -> Iterator[int]:
    """Lengths of one power of two, none of which comes again soon."""
    return itertools.cycle(range(2049, 4096))


def cases() -> dict[str, dict[str, Callable[[], Any]]]:
    """name -> direction -> call; the direction "forward+backward" is the whole of both."""
    dense, packed = inputs_of(*[(1, 2, 64, 64)] * 3), inputs_of(*[(64, 2, 64)] * 3)
    x, offsets = torch.zeros(1, device=DEVICE), torch.tensor([0, 20, 64], device=DEVICE, dtype=torch.int32)
    flex = torch.compile(flex_attention)
    calls = {
        "empty launch": {"forward": lambda: nothing[(1,)](x)},
        "torch x.add_(1)": {"forward": lambda: x.add_(1)},
        "autograd function that allocates": ways_of(Allocating.apply, dense),
        "torch SDPA": ways_of(F.scaled_dot_product_attention, dense),
        "torch SDPA causal": ways_of(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), dense),
        "FlexAttention compiled": ways_of(lambda *t: flex(*t), dense),
    }
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        pass
    else:
        calls["torch varlen_attn"] = ways_of(lambda *t: varlen_attn(*t, offsets, offsets, 44, 44), packed)
    calls |= foci_cases()
    calls["foci causal, aten"] = ways_of(lambda *t: foci.attention(*t, mask=masks.causal()), dense)
    return calls


def microseconds(name: str, call: Callable[[], Any], calls: int = CALLS) -> float:
    torch.cuda.synchronize()
    with foci.use(name.rsplit(", ", 1)[-1] if name.startswith("foci") else "triton"):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        passed = time.perf_counter() - start
    torch.cuda.synchronize()
    return passed / calls * 1e6


def facts() -> dict[str, str]:
    """Device, versions, commit and day."""
    machine_facts = measure.facts("cuda")
    return {name: str(machine_facts[name]) for name in ("device", "torch", "triton", "commit", "date")}


def measured(name: str, call: Callable[[], Any], floor: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of a call and of the floor, whose rounds alternate."""
    calls = 10 if "new lengths" in name else CALLS
    microseconds(name, call, 5)
    pairs = [(microseconds(name, call, calls), microseconds("floor", floor)) for _ in range(ROUNDS)]
    times, floors = zip(*pairs, strict=True)
    timings = {"us": statistics.median(times), "least_us": min(times), "floor_us": statistics.median(floors)}
    return {key: round(value, 1) for key, value in timings.items()}


def show_profile(name: str, call: Callable[[], Any]) -> None:
    """Where the host's time goes."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(3):
        microseconds(name, call)
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(22)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", default="", help="i/n: only fill the caches, with every n-th call from the i-th")
    parser.add_argument("--profile", default="", help="also where the host's time goes in the calls whose names have this word")
    parser.add_argument("--only", nargs="*", default=[""], help="the calls whose names have one of these words alone")
    parser.add_argument("--out", type=Path, help="a file to add a line to for each row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    part, parts = map(int, (options.compile or "0/1").split("/"))
    named = [(name, ways) for name, ways in cases().items() if any(word in name for word in options.only)]
    x, about = torch.zeros(1, device=DEVICE), facts()
    out = options.out or (Path(os.environ["OUT"]) / "gpu_overhead.jsonl" if "OUT" in os.environ else None)
    for name, ways in named[part::parts]:
        for way, call in ways.items():
            try:
                if options.compile:
                    microseconds(name, call, 1)
                    continue
                line = {"call": name, "direction": way, **measured(name, call, lambda: nothing[(1,)](x))}
            except Exception as error:
                print(name, way, type(error).__name__, str(error)[-300:], flush=True)
                continue
            print(
                f"{name:50s} {way:17s} {line['us']:7.1f} us, least {line['least_us']:7.1f}, an empty launch {line['floor_us']:5.1f}",
                flush=True,
            )
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(line | about) + "\n")
            if options.profile and options.profile in name:
                show_profile(name, call)


if __name__ == "__main__":
    main()
