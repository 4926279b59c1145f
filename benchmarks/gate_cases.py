"""The cases of gate.py, as a process that measures them on request: a line of JSON in, a line of JSON out.

It uses what every commit has: the public functions of foci, by name.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import foci

Case = Callable[[], float]  # one measurement, in seconds

HOST_CALLS = 100


def host_cost(call: Callable[[], object]) -> Case:
    """Processor time of the calling thread for one small call."""

    def measure() -> float:
        start = time.thread_time()
        for _ in range(HOST_CALLS):
            call()
        return (time.thread_time() - start) / HOST_CALLS

    return measure


def kernel_time(call: Callable[[], object], device: str) -> Case:
    """Time of one large call: of the thread on the CPU, between events on a GPU; the median of five."""

    def on_cpu() -> float:
        start = time.thread_time()
        call()
        return time.thread_time() - start

    def on_gpu() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    return lambda: statistics.median((on_cpu if device == "cpu" else on_gpu)() for _ in range(5))


def spent() -> float:
    """Processor time of this process and of those that it started and that ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def first_call(backend: str | None, device: str) -> Case:
    """Processor time of this process and of the compilers it starts, for the first call of a function of new code."""
    functions = (torch.tanh, torch.sin, torch.sigmoid, torch.cos, torch.exp2)
    chains = itertools.product(functions, repeat=3)
    query = torch.randn(1, 2, 64, 32, device=device)

    def measure() -> float:
        f, g, h = next(chains)
        start = spent()
        with contextlib.nullcontext() if backend is None else foci.use(backend):
            foci.attention(query, query, query, score=lambda score, b, head, i, j: f(g(h(score))) + 0.1 * (i - j))
        if device != "cpu":
            torch.cuda.synchronize()
        return spent() - start

    return measure


def backward_too(call: Callable[..., Tensor], *leaves: Tensor) -> Callable[[], object]:
    wanting = [leaf.requires_grad_() for leaf in leaves]
    gradient = torch.randn_like(call(*wanting))
    return lambda: torch.autograd.grad(call(*wanting), wanting, gradient)


def cases(device: str) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names, and what makes the measurement: it may raise where this commit does not run the case."""
    on_cpu = device == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16
    batch, heads, length, dim = (1, 4, 512, 64) if on_cpu else (2, 16, 4096, 128)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    small = [draw(1, 2, 16, 8) for _ in range(3)]
    slopes, offsets = torch.rand(heads, device=device), torch.tensor([0, 7, 16], device=device)
    packed = [t[0].transpose(0, 1).contiguous() for t in small]
    causal, window = foci.masks.causal(), foci.masks.window(4)

    def biased(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + slopes[h] * (i - j)

    host = {
        "plain": lambda: foci.attention(*small),
        "drop-in, causal": lambda: foci.scaled_dot_product_attention(*small, is_causal=True),
        "window": lambda: foci.attention(*small, mask=window),
        "score function": lambda: foci.attention(*small, score=biased),
        "packed": lambda: foci.varlen_attn(*packed, offsets, offsets, 9, 9),
        "forward and backward": backward_too(lambda q, k, v: foci.attention(q, k, v, mask=causal), *(draw(1, 2, 16, 8) for _ in range(3))),
    }
    for name, call in host.items():
        yield f"host cost, {name}", lambda call=call: host_cost(call)

    yield "first call", lambda: first_call(None, device)
    if on_cpu:
        yield "first call, without a compiler", lambda: first_call("blocked", device)

    q, k, v = (draw(batch, heads, length, dim) for _ in range(3))
    halves = [t.to(torch.bfloat16) for t in (q, k, v)]
    grouped = draw(batch, heads // 4, length, dim)
    one, keys = draw(4, 8, 1, dim), draw(4, 2, 4 * length, dim)
    tokens = [draw(batch * length, heads, dim) for _ in range(3)]
    ends = torch.tensor([0, length // 5, length // 2, batch * length], device=device)
    longest = batch * length - length // 2
    bias = draw(heads, length, length)
    near, capped, alibi = foci.masks.window(length // 8), foci.scores.softcap(20.0), foci.scores.alibi(heads)
    kernels = {
        "plain": lambda: foci.attention(q, k, v),
        "causal": lambda: foci.attention(q, k, v, mask=causal),
        "causal, bfloat16": lambda: foci.attention(*halves, mask=causal),
        "window": lambda: foci.attention(q, k, v, mask=near),
        "ALiBi, causal": lambda: foci.attention(q, k, v, mask=causal, score=alibi),
        "softcap, grouped heads": lambda: foci.attention(q, grouped, grouped, mask=causal, score=capped),
        "one query, many keys": lambda: foci.attention(one, keys, keys),
        "packed": lambda: foci.varlen_attn(*tokens, ends, ends, longest, longest),
    }
    for name, call in kernels.items():
        yield f"kernel, {name}", lambda call=call: kernel_time(call, device)
    leaves = [draw(batch, heads, length, dim) for _ in range(3)]
    backwards = {
        "causal, forward and backward": lambda: backward_too(lambda q, k, v: foci.attention(q, k, v, mask=causal), *leaves),
        "bias, forward and backward": lambda: backward_too(lambda q, k, v: foci.attention(q, k, v, bias=bias), *leaves),
    }
    for name, make in backwards.items():
        yield f"kernel, {name}", lambda make=make: kernel_time(make(), device)


def prepare(device: str, words: list[str]) -> dict[str, Case | str]:
    """The chosen cases, each measured once for its kernels to be compiled; an error's text for those that this commit does not run."""
    prepared_cases: dict[str, Case | str] = {}
    for name, make in cases(device):
        if any(word in name for word in words):
            try:
                prepared_cases[name] = make()
                prepared_cases[name]()
            except Exception as error:
                prepared_cases[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return prepared_cases


def main() -> None:
    device, source = sys.argv[1:]
    if Path(source) not in Path(foci.__file__).parents:
        raise SystemExit(f"{source} was asked for, but Python imports foci from {foci.__file__}")
    torch.manual_seed(0)
    prepared: dict[str, Any] = {}
    for line in sys.stdin:
        question, argument = json.loads(line)
        if question == "prepare":
            prepared = prepare(device, argument)
            answer: Any = {name: case if isinstance(case, str) else None for name, case in prepared.items()}
        else:
            answer = prepared[argument]()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
