"""Bad shapes: models whose products have odd sizes, with foci's padding, with Inductor's, without, and the good size next to them.

python benchmarks/padding.py [--cases linear-bf16,bert] [--implementations good,foci] [--seconds 1.0] [--device cuda]

Median milliseconds of CUDA events, implementations in turn. `good` is the same model with the next good size, compiled without
any padding; `ratio` is to it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import measure
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import foci
from foci.graph.padding.options import options

Step = Callable[[], object]
PLAIN = {"shape_padding": False, "comprehensive_padding": False}


@dataclass(frozen=True)
class Case:
    """A model with a bad size, and how to make its step for any size.

    Attributes:
        make: of a size and a device: a function to compile, whatever it trains.
        bad, good: sizes.
        eager: whether eager execution is measured too.
    """

    make: Callable[[int, str], Step]
    bad: int
    good: int
    eager: bool = False


def trained(loss: Callable[..., Tensor], inputs: tuple[object, ...]) -> Callable[[Callable[..., Tensor]], Step]:
    def step(compiled: Callable[..., Tensor]) -> Step:
        return lambda: compiled(*inputs).backward()

    step.loss = loss  # type: ignore[attr-defined]
    return step


def ran(function: Callable[..., object], inputs: tuple[object, ...]) -> Callable[[Callable[..., object]], Step]:
    def step(compiled: Callable[..., object]) -> Step:
        return lambda: compiled(*inputs)

    step.loss = function  # type: ignore[attr-defined]
    return step


def linear(dtype: torch.dtype, rows: int = 8192) -> Callable[[int, str], Step]:
    def make(vocabulary: int, device: str) -> Step:
        layer = nn.Linear(768, vocabulary, dtype=dtype, device=device)
        x = torch.randn(rows, 768, dtype=dtype, device=device, requires_grad=True)
        target = torch.randint(0, vocabulary, (rows,), device=device)
        return trained(lambda x: F.cross_entropy(layer(x), target), (x,))

    return make


def product(k: int, device: str) -> Step:
    a = torch.randn(8192, k, dtype=torch.float16, device=device) / 64
    return ran(torch.mm, (a, torch.randn(k, 768, dtype=torch.float16, device=device)))


def produced(k: int, device: str) -> Step:
    """The left matrix is made in the graph."""
    rows, columns = (torch.randn(n, dtype=torch.float16, device=device) / 8 for n in (8192, k))
    return ran(lambda r, c, b: torch.relu(r[:, None] + c) @ b, (rows, columns, torch.randn(k, 768, dtype=torch.float16, device=device)))


def changed(k: int, device: str) -> Step:
    """The left matrix is made in the graph, of one from outside."""
    a = torch.randn(8192, k, dtype=torch.float16, device=device) / 64
    return ran(lambda a, b: torch.relu(a) @ b, (a, torch.randn(k, 768, dtype=torch.float16, device=device)))


def bert(vocabulary: int, device: str, *, layers: int = 12, batch: int = 16) -> Step:
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(vocab_size=vocabulary, num_hidden_layers=layers)).to(device, torch.bfloat16)
    ids = torch.randint(0, 30000, (batch, 512), device=device)
    return trained(lambda ids: model(input_ids=ids, labels=ids).loss, (ids,))


def recommender(items: int, device: str) -> Step:
    widths = (items, 512, 512, 1024, 512, 512, items)
    pairs = itertools.pairwise(widths)
    model = nn.Sequential(*(layer for a, b in pairs for layer in (nn.Linear(a, b, device=device, dtype=torch.bfloat16), nn.SELU())))
    ratings = torch.rand(1024, items, device=device, dtype=torch.bfloat16)
    return trained(lambda x: F.mse_loss(model(x), x), (ratings,))


def chunked(length: int, device: str, *, window: int = 256) -> Step:
    """Attention of overlapping chunks as in Longformer: each query sees `window` keys to either side, 2 * window + 1 scores."""
    chunks = length // window
    q, k, v = (torch.randn(4 * 12, chunks, window, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.cat([F.pad(x, (0, 0, 0, 0, 1, 0))[:, :-1], x, F.pad(x[..., :1, :], (0, 0, 0, 0, 0, 1))[:, 1:]], 2) for x in (k, v))
        weights = torch.softmax(q @ k.mT / 8, -1, dtype=torch.float32).to(v.dtype)
        return (weights @ v).float().square().mean()

    return trained(attend, (q, k, v))


def attention(length: int, device: str, *, dim: int = 16) -> Step:
    q, k, v = (torch.randn(16 * 12, length, dim, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (torch.softmax(q @ k.mT / dim**0.5, -1) @ v).float().square().mean()

    return trained(attend, (q, k, v))


def convolution(width: int, device: str) -> Step:
    layer = nn.Conv2d(128, 128, 3, padding=1, device=device, dtype=torch.float16)
    x = torch.randn(1, 128, 640, width, device=device, dtype=torch.float16)
    return trained(lambda x: layer(F.gelu(x)).float().square().mean(), (x,))


CASES = {
    "linear-bf16": Case(linear(torch.bfloat16), 30523, 30528, eager=True),
    "linear-tf32": Case(linear(torch.float32), 30523, 30528, eager=True),
    "product-f16": Case(produced, 30522, 30528),
    "product-f16-changed": Case(changed, 30522, 30528),
    "product-f16-outside": Case(product, 30522, 30528),
    "bert": Case(bert, 30522, 30528),
    "recommender": Case(recommender, 197951, 197952),
    "longformer": Case(chunked, 4096, 4096),
    "attention-d16": Case(attention, 511, 512),
    "convolution": Case(convolution, 959, 960),
}


def implementations(case: Case, device: str, chosen: str) -> Iterator[tuple[str, Step, list[str]]]:
    """(name, step, what foci reported)."""
    for name, size, settings in (
        ("good", case.good, PLAIN),
        ("foci", case.bad, options()),
        ("inductor", case.bad, None),
        ("inductor, no padding", case.bad, PLAIN),
        ("eager", case.bad, "eager"),
    ):
        if (name == "eager" and not case.eager) or (chosen and name not in chosen):
            continue
        torch.manual_seed(0)
        torch._dynamo.reset()
        step = case.make(size, device)
        # the implementations share their code: of two sizes Dynamo would make one symbolic
        function = step.loss if settings == "eager" else torch.compile(step.loss, dynamic=False, options=settings)  # type: ignore[attr-defined]
        run = step(function)  # type: ignore[call-arg]
        with foci.observe() as log:
            start = time.perf_counter()
            run()
        first = time.perf_counter() - start
        yield name, run, [str(padding) for padding in log.paddings] + [f"first call {first:.1f} s"]


def measured(steps: dict[str, Step], device: str, seconds: float) -> dict[str, float]:
    if device != "cuda":
        return {name: value * 1e3 for name, value in measure.medians(measure.interleaved(steps, seconds=seconds)).items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(3):
        for step in steps.values():
            step()
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(next(iter(times.values()))) < 5:
        for name, step in steps.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            step()  # the card's clock and caches as in a loop of this implementation alone
            begin.record()
            for _ in range(3):
                step()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / 3)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--implementations", default="", help="names, with commas; all if not given")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=measure.RESULTS / "padding.jsonl")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("the sizes are those of a GPU: no CUDA device, nothing measured")
        return
    torch.backends.cuda.matmul.allow_tf32 = True
    facts = measure.facts(given.device)
    with given.out.open("a") as out:
        for name in given.cases.split(","):
            steps, reports = {}, {}
            for implementation, step, report in implementations(CASES[name], given.device, given.implementations):
                steps[implementation], reports[implementation] = step, report
                print(name, implementation, *report, sep="\n    ", flush=True)
            times = measured(steps, given.device, given.seconds)
            for implementation, ms in times.items():
                ratio = ms / times["good"]
                row = {"case": name, "implementation": implementation, "ms": round(ms, 4), "ratio": round(ratio, 3), **facts}
                print(json.dumps(row), flush=True)
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
