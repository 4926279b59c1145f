"""Bad shapes: models whose products have odd sizes, with foci's padding, with Inductor's, without, and the good size next to them.

python benchmarks/padding.py [--cases linear-bf16,bert] [--implementations good,foci] [--seconds 1.0] [--device cuda]

Median milliseconds of CUDA events, implementations in turn, forth and back, so that none always follows the one that heats the card.
`good` is the same model with the next good size, compiled without any padding, or eager where nothing is compiled; `ratio` is to it.
`busy ms` is the time of the kernels alone, without the gaps between them in which the card waits for the host.
`peak bytes` is what a step allocates above what was there, `stated bytes` what foci's report says of it; `pass s` are the seconds of
foci's passes within those of the first call, `import s` those of importing them, once a process, after Inductor. What Inductor starts
once a process is in the first call of whoever comes first: `--implementations foci` says what a process that has only foci pays.
Processes that share a `--lock` compile side by side and time one at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import measure
import torch
import torch._inductor.compile_fx  # what every compilation imports is none of foci's
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

import foci

_START = time.perf_counter()
from foci.padding.options import options  # noqa: E402

IMPORT_SECONDS = time.perf_counter() - _START

from foci.nn import PaddedLinear  # noqa: E402

Step = Callable[[], object]
PLAIN = {"shape_padding": False, "comprehensive_padding": False}


@dataclass(frozen=True)
class Case:
    """A model with a bad size, and how to make its step for any size.

    Attributes:
        make: of a size and a device: a function to compile, whatever it trains.
        bad, good: sizes.
        eager: whether eager execution is measured too.
        module: makes the same of foci's module, for the bad size; then nothing is compiled.
    """

    make: Callable[[int, str], Step]
    bad: int
    good: int
    eager: bool = False
    module: Callable[[int, str], Step] | None = None


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


def linear(dtype: torch.dtype, rows: int = 8192, *, layers: type[nn.Linear] = nn.Linear) -> Callable[[int, str], Step]:
    def make(vocabulary: int, device: str) -> Step:
        layer = layers(768, vocabulary, dtype=dtype, device=device)
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
    q, k, v = (torch.randn(64 * 12, length, dim, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (torch.softmax(q @ k.mT / dim**0.5, -1) @ v).float().square().mean()

    return trained(attend, (q, k, v))


def convolution(width: int, device: str, *, layout: torch.memory_format = torch.contiguous_format) -> Step:
    layer = nn.Conv2d(128, 128, 3, padding=1, device=device, dtype=torch.float16).to(memory_format=layout)
    x = torch.randn(1, 128, 640, width, device=device, dtype=torch.float16).to(memory_format=layout)
    return trained(lambda x: layer(F.gelu(x)).float().square().mean(), (x,))


CASES = {
    "linear-bf16": Case(linear(torch.bfloat16), 30523, 30528, eager=True),
    "linear-tf32": Case(linear(torch.float32), 30523, 30528, eager=True),
    "module-bf16": Case(linear(torch.bfloat16), 30523, 30528, module=linear(torch.bfloat16, layers=PaddedLinear)),
    "module-tf32": Case(linear(torch.float32), 30523, 30528, module=linear(torch.float32, layers=PaddedLinear)),
    "product-f16": Case(produced, 30522, 30528),
    "product-f16-changed": Case(changed, 30522, 30528),
    "product-f16-outside": Case(product, 30522, 30528),
    "bert": Case(bert, 30522, 30528),
    "recommender": Case(recommender, 197951, 197952),
    "longformer": Case(chunked, 4096, 4096),
    "attention-d16": Case(attention, 511, 512),
    "convolution": Case(convolution, 959, 960),
    "convolution-last": Case(functools.partial(convolution, layout=torch.channels_last), 959, 960),
}


@dataclass
class Timed(CustomGraphPass):
    """A pass, and the seconds that it took."""

    inner: CustomGraphPass
    seconds: float = 0.0

    def __call__(self, graph: fx.Graph) -> None:
        start = time.perf_counter()
        self.inner(graph)
        self.seconds += time.perf_counter() - start

    def uuid(self) -> object:
        start = time.perf_counter()
        inner_uuid = self.inner.uuid()
        self.seconds += time.perf_counter() - start
        return inner_uuid


@dataclass(frozen=True)
class Compiled:
    """A step that has run once.

    Attributes:
        run: the step.
        report: what foci said.
        facts: of the compilation, for the results.
    """

    run: Step
    report: list[str]
    facts: dict[str, float]


def _ways(case: Case) -> Iterator[tuple[str, Callable[[int, str], Step], int, dict[str, object] | str | None]]:
    """(name, what makes the step, size, Inductor's options or "eager")."""
    if case.module is not None:
        yield "good", case.make, case.good, "eager"
        yield "foci", case.module, case.bad, "eager"
        yield "eager", case.make, case.bad, "eager"
        return
    yield "good", case.make, case.good, PLAIN
    yield "foci", case.make, case.bad, options()
    yield "inductor", case.make, case.bad, None
    yield "inductor, no padding", case.make, case.bad, PLAIN
    if case.eager:
        yield "eager", case.make, case.bad, "eager"


def implementations(case: Case, device: str, chosen: str) -> Iterator[tuple[str, Compiled]]:
    """By name."""
    torch._dynamo.reset()  # once: the implementations share their code, not their options, and keep what was compiled
    for name, make, size, settings in _ways(case):
        if chosen and name not in chosen.split(","):
            continue
        torch.manual_seed(0)
        step = make(size, device)
        passes: list[Timed] = []
        if isinstance(settings, dict):
            settings = {key: Timed(value) if isinstance(value, CustomGraphPass) else value for key, value in settings.items()}
            passes = [value for value in settings.values() if isinstance(value, Timed)]
        # of two sizes Dynamo would make one symbolic
        function = step.loss if settings == "eager" else torch.compile(step.loss, dynamic=False, options=settings)  # type: ignore[attr-defined]
        run = step(function)  # type: ignore[call-arg]
        with foci.observe() as log:
            start = time.perf_counter()
            run()
        first = time.perf_counter() - start
        facts = {"first call s": round(first, 2)}
        if passes:
            facts["import s"] = round(IMPORT_SECONDS, 3)
            facts["pass s"] = round(sum(each.seconds for each in passes), 4)
            facts["stated bytes"] = sum(padding.bytes for padding in log.paddings)
        yield name, Compiled(run, [str(padding) for padding in log.paddings], facts)


def peak(step: Step) -> int:
    """Bytes that a step allocates on the card above what is there before it."""
    step()  # its gradients are there
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def measured(steps: dict[str, Step], device: str, seconds: float) -> dict[str, float]:
    if device != "cuda":
        return {name: value * 1e3 for name, value in measure.medians(measure.interleaved(steps, seconds=seconds)).items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    start, order = time.perf_counter(), list(steps)
    while time.perf_counter() - start < seconds or len(times[order[0]]) < 6:
        for name in order:
            until = time.perf_counter() + 0.02
            while time.perf_counter() < until:  # the card's clock and caches as in a loop of this implementation alone
                steps[name]()
                torch.cuda.synchronize()
            steps[name]()  # so that the card is still busy when the first of those that count comes
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(3):
                steps[name]()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / 3)
        order.reverse()
    return {name: statistics.median(values) for name, values in times.items()}


def profiled(step: Step) -> list[tuple[str, float, int]]:
    """(name, milliseconds, calls) of each kernel of a step, the longest first; of five steps."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)
    return [(row.key, row.self_device_time_total / 5000, row.count // 5) for row in rows if row.self_device_time_total > 0]


@contextlib.contextmanager
def held(lock: str | None, how: int, patience: float = 60.0) -> Iterator[bool]:
    """A lock of processes: many compile at once, one times. Gives up after `patience` seconds, and says whether it is held."""
    if lock is None:
        yield True
        return
    with open(lock, "w") as file:
        until = time.perf_counter() + patience
        while True:
            try:
                fcntl.flock(file, how | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.perf_counter() > until:
                    yield False
                    return
                time.sleep(0.05)
                continue
            yield True
            return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--implementations", default="", help="names, with commas; all if not given")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--lock", help="a file for processes side by side")
    parser.add_argument("--profile", default="", help="cases whose kernels are listed")
    parser.add_argument("--out", type=Path, default=measure.RESULTS / "padding.jsonl")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("the sizes are those of a GPU: no CUDA device, nothing measured")
        return
    torch.backends.cuda.matmul.allow_tf32 = True
    facts = measure.facts(arguments.device)
    compiled_cases: dict[str, dict[str, Compiled]] = {}
    with held(arguments.lock, fcntl.LOCK_SH):
        for case in arguments.cases.split(","):
            compiled_cases[case] = {}
            for name, implementation in implementations(CASES[case], arguments.device, arguments.implementations):
                compiled_cases[case][name] = implementation
                print(f"{case}, {name}", *implementation.report, implementation.facts, sep="\n    ", flush=True)
    with arguments.out.open("a") as out:
        for case, by_name in compiled_cases.items():
            steps = {name: each.run for name, each in by_name.items()}
            with held(arguments.lock, fcntl.LOCK_EX) as alone:
                times = measured(steps, arguments.device, arguments.seconds)
                peaks = {name: {"peak bytes": peak(step)} for name, step in steps.items()} if arguments.device == "cuda" else {}
                kernels = {name: profiled(step) for name, step in steps.items()} if arguments.device == "cuda" else {}
            for name, found_kernels in kernels.items() if case in arguments.profile.split(",") else ():
                print(
                    name, *(f"{ms:.4f} ms, {count} times: {key[:110]}" for key, ms, count in found_kernels[:14]), sep="\n    ", flush=True
                )
            for name, ms in times.items():
                row = {
                    "case": case,
                    "implementation": name,
                    "ms": round(ms, 4),
                    **({"ratio": round(ms / times["good"], 3)} if "good" in times else {}),
                    **({"busy ms": round(sum(ms for _, ms, _ in kernels[name]), 4)} if kernels else {}),
                    "alone": alone,
                    **by_name[name].facts,
                    **peaks.get(name, {}),
                    **facts,
                }
                print(json.dumps(row), flush=True)
                out.write(json.dumps(row) + "\n")
                out.flush()


if __name__ == "__main__":
    main()
