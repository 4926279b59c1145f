"""The CPU backend against what torch offers, interleaved in one run. Prints one JSON line per comparison.

    python benchmarks/cpu_attention.py                   # every group
    python benchmarks/cpu_attention.py dense masked      # some of them
    python benchmarks/cpu_attention.py --clock thread    # CPU time of one thread, for a machine that others use too
    python benchmarks/cpu_attention.py --report benchmarks/results/cpu_attention.jsonl docs/cpu.md

Groups: dense, masked, functions (against torch.compile(flex_attention)), decode, small, jagged, memory, start. Each round
times one side and then the other; `ratio` is the median over rounds of peer / foci, so above 1 foci is faster, and
`ratio_of_minima` that of the fastest rounds. `load` is the machine's load average when the line was made: on a busy
machine only ratios mean something. `--report` writes the ratios between the marks of the page; of a
file with several runs, one after another, the medians.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import facts
from torch import Tensor

import foci

SECONDS = 2.0  # of rounds per comparison
WARM = 0.5  # seconds of calls before them
clock = time.perf_counter
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Call = Callable[[], object]


@dataclass(frozen=True)
class Pair:
    """Two calls that do the same, and the ratio that is aimed at."""

    case: str
    dtype: str
    direction: str
    peer_name: str
    ours: Call
    peer: Call
    target: float


def compare(pair: Pair) -> dict[str, object]:
    """Ratios over rounds; every round times both, in turns the one first or the other."""
    once = warm(pair)
    repeats = max(1, int(0.02 / max(1e-6, once[0])))
    count = max(5, min(31, int(SECONDS / (repeats * sum(once)))))
    rounds = []
    for i in range(count):
        turn = 1 if i % 2 else -1
        first, second = (pair.ours, pair.peer)[::turn]
        rounds.append((timed(first, repeats), timed(second, repeats))[::turn])
    ours, peer = zip(*rounds, strict=True)
    return {
        "case": pair.case,
        "dtype": pair.dtype,
        "direction": pair.direction,
        "foci_ms": round(1e3 * statistics.median(ours), 4),
        "peer": pair.peer_name,
        "peer_ms": round(1e3 * statistics.median(peer), 4),
        "ratio": round(statistics.median(p / o for o, p in rounds), 3),
        "ratio_of_minima": round(min(peer) / min(ours), 3),
        "target": pair.target,
        **machine(),
    }


def warm(pair: Pair) -> tuple[float, float]:
    """Seconds of one call of each once kernels, threads, memory and the processor's clock have settled."""
    start = time.perf_counter()
    once = timed(pair.ours, 1), timed(pair.peer, 1)
    while time.perf_counter() - start < WARM:
        once = timed(pair.ours, 1), timed(pair.peer, 1)
    return once


_facts = functools.cache(facts)


def machine() -> dict[str, object]:
    """What a number depends on besides the code."""
    return {
        **_facts(),
        "clock": "thread" if clock is time.thread_time else "wall",
        "load": round(os.getloadavg()[0], 1),
    }


def timed(call: Call, repeats: int) -> float:
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def tensors(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))


def without_graph(function: Callable[..., Tensor], operands: tuple[Tensor, ...]) -> Call:
    detached = tuple(t.detach() for t in operands)
    return lambda: function(*detached)


def gradients(function: Callable[..., Tensor], operands: tuple[Tensor, ...]) -> Call:
    out = function(*operands)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, operands, grad, retain_graph=True)


def both_ways(
    case: str,
    dtype: str,
    ours: Callable[..., Tensor],
    peer: Callable[..., Tensor],
    operands: tuple[Tensor, ...],
    targets: tuple[float, float],
    name: str,
) -> Iterator[Pair]:
    yield Pair(case, dtype, "forward", name, without_graph(ours, operands), without_graph(peer, operands), targets[0])
    yield Pair(case, dtype, "backward", name, gradients(ours, operands), gradients(peer, operands), targets[1])


def dense() -> Iterator[Pair]:
    """Full and causal attention against torch SDPA."""
    targets = {
        ("float32", False): (1.2, 1.25),
        ("float32", True): (1.3, 1.35),
        ("bfloat16", False): (2.3, 1.7),
        ("bfloat16", True): (2.4, 1.8),
    }
    for name, dtype in DTYPES.items():
        for S, H, D in ((2048, 8, 64), (2048, 8, 128), (4096, 4, 64), (8192, 1, 64), (8192, 1, 128)):
            for causal in (False, True):
                mask = foci.masks.causal() if causal else None
                case = f"{'causal' if causal else 'full'} 1,{H},{S},{D}"
                yield from both_ways(
                    case, name,
                    lambda q, k, v, mask=mask: foci.attention(q, k, v, mask=mask),
                    lambda q, k, v, causal=causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
                    tensors((1, H, S, D), dtype), targets[name, causal], "torch SDPA",
                )  # fmt: skip


def masked() -> Iterator[Pair]:
    """A padding mask and a dense bool mask, both as tensors, against torch SDPA with the mask."""
    S, H, D = 2048, 8, 64
    padding = torch.zeros(1, 1, 1, S, dtype=torch.bool)
    padding[..., : 3 * S // 4] = True
    random = torch.rand(1, 1, S, S) < 0.7
    for name, dtype in DTYPES.items():
        targets = (1.3, 1.3) if name == "float32" else (2.3, 1.7)
        for case, mask in (("padding mask", padding), ("bool mask", random)):
            yield from both_ways(
                f"{case} 1,{H},{S},{D}", name,
                lambda q, k, v, mask=mask: foci.scaled_dot_product_attention(q, k, v, attn_mask=mask),
                lambda q, k, v, mask=mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
                tensors((1, H, S, D), dtype), targets, "torch SDPA",
            )  # fmt: skip


def functions() -> Iterator[Pair]:
    """Score and mask functions: forward against torch.compile(flex_attention), backward against our own plain backward."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    S, H, D = 2048, 8, 64
    slopes, bias, ids = torch.linspace(-1, -0.01, H), torch.randn(H, S, S), torch.arange(S) // 300
    scores = {
        "ALiBi": lambda s, b, h, q, k: s + slopes[h] * (q - k),
        "softcap": lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
        "bias": lambda s, b, h, q, k: s + bias[h, q, k],
    }
    masks = {
        "document": lambda b, h, q, k: ids[q] == ids[k],
        "window": lambda b, h, q, k: (q >= k) & (q - k < 512),
    }
    for name, dtype in DTYPES.items():
        for case, score, mask in ((c, s, None) for c, s in scores.items()):
            yield from _function(f"{case} 1,{H},{S},{D}", name, (score, mask, None), tensors((1, H, S, D), dtype), flex_attention)
        for case, mask in masks.items():
            blocks = create_block_mask(mask, None, None, S, S, device="cpu")
            yield from _function(f"{case} 1,{H},{S},{D}", name, (None, mask, blocks), tensors((1, H, S, D), dtype), flex_attention)


def _function(
    case: str, dtype: str, variant: tuple[object, object, object], operands: tuple[Tensor, ...], flex: Callable[..., Tensor]
) -> Iterator[Pair]:
    score, mask, blocks = variant
    torch._dynamo.reset()
    compiled = torch.compile(flex)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return foci.attention(q, k, v, score=score, mask=mask)

    target = 2.0 if dtype == "float32" else 6.0
    yield Pair(case, dtype, "forward", "torch.compile(flex_attention)", without_graph(ours, operands),
               without_graph(lambda q, k, v: compiled(q, k, v, score_mod=score, block_mask=blocks), operands), target)  # fmt: skip
    if mask is None:  # the same density as plain attention
        yield Pair(
            case,
            dtype,
            "backward",
            "own plain backward",
            gradients(ours, operands),
            gradients(lambda q, k, v: foci.attention(q, k, v), operands),
            0.87,
        )


def decode() -> Iterator[Pair]:
    """One query against 8192 keys: time against a copy of the same bytes."""
    for name, dtype in DTYPES.items():
        query, key, value = torch.randn(1, 32, 1, 128, dtype=dtype), *(torch.randn(1, 8, 8192, 128, dtype=dtype) for _ in range(2))
        to = torch.empty_like(key), torch.empty_like(value)
        yield Pair("decode 1,32/8,1x8192,128", name, "forward", "copy of K and V", lambda q=query, k=key, v=value: foci.attention(q, k, v),
                   lambda k=key, v=value, to=to: (to[0].copy_(k), to[1].copy_(v)), 0.85)  # fmt: skip


def small() -> Iterator[Pair]:
    """Many tiny problems."""
    for name, dtype in DTYPES.items():
        yield from both_ways(
            "small 64,8,32,64",
            name,
            foci.attention,
            F.scaled_dot_product_attention,
            tensors((64, 8, 32, 64), dtype),
            (1.0, 1.0),
            "torch SDPA",
        )


def jagged() -> Iterator[Pair]:
    """Equal sequences packed along one dimension, against the same work dense: a ratio near 1."""
    for name, dtype in DTYPES.items():
        B, S, H, D = 8, 512, 8, 64
        dense_operands = tensors((B, H, S, D), dtype)
        packed = tuple(t.detach().transpose(1, 2).reshape(B * S, H, D).requires_grad_() for t in dense_operands)
        offsets = torch.arange(0, (B + 1) * S, S, dtype=torch.int32)

        def ours(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor = offsets, S: int = S) -> Tensor:
            return foci.varlen_attn(q, k, v, offsets, offsets, S, S)

        case = f"jagged {B}x{S},{H},{D}"
        yield Pair(
            case, name, "forward", "the same work dense", without_graph(ours, packed), without_graph(foci.attention, dense_operands), 0.95
        )
        yield Pair(case, name, "backward", "the same work dense", gradients(ours, packed), gradients(foci.attention, dense_operands), 0.95)


GROUPS = {"dense": dense, "masked": masked, "functions": functions, "decode": decode, "small": small, "jagged": jagged}

_MEMORY = """
import sys, torch, foci

def resident(name):  # of this process alone: getrusage also counts what its parent held
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) / 1024

S = int(sys.argv[1])
q, k, v = (torch.randn(1, 2, S, 64, requires_grad=True) for _ in range(3))
with foci.use("cpu"):
    foci.attention(q[:, :, :64], k[:, :, :64], v[:, :, :64], mask=foci.masks.causal()).sum().backward()
    before = resident("VmRSS")
    foci.attention(q, k, v, mask=foci.masks.causal()).sum().backward()
print(resident("VmHWM") - before)
"""


def memory() -> Iterator[dict[str, object]]:
    """How far the resident set rises in a causal forward and backward, each length in a process of its own."""
    for S in (2048, 4096, 8192, 16384):
        ran = subprocess.run([sys.executable, "-c", _MEMORY, str(S)], capture_output=True, text=True, check=True)
        yield {
            "case": f"memory 1,2,{S},64 causal",
            "dtype": "float32",
            "direction": "both",
            "megabytes": round(float(ran.stdout), 1),
            "scores_megabytes": 2 * S * S * 4 / 2**20,
        }


_START = """
import gc, json, sys, time, torch, foci
torch.set_num_threads(1)
q, k, v = (torch.randn(1, 2, 64, 64) for _ in range(3))
torch.nn.functional.scaled_dot_product_attention(q, k, v)
ids, slopes = torch.arange(64) // 20, torch.linspace(-1, -0.01, 2)
calls = {
    "first call of a process": {"mask": foci.masks.causal()},
    "first call of another function: window": {"mask": foci.masks.window(16)},
    "first call of another function: documents": {"mask": lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)},
    "first call of another function: softcap": {"score": lambda s, b, h, q, k: 20 * torch.tanh(s / 20)},
    "first call of another function: ALiBi": {"score": lambda s, b, h, q, k: s + slopes[h] * (q - k)},
    "second call": {"mask": foci.masks.window(16)},
}
gc.collect()  # else Python's collector may pass over all of torch within the first call, 50 ms
found = {}
for name, functions in calls.items():
    start = time.thread_time()
    foci.attention(q, k, v, **functions)
    found[name] = 1e3 * (time.thread_time() - start)
print(json.dumps(found))
"""
_PROCESSES = 15


def start() -> Iterator[dict[str, object]]:
    """CPU time of first calls: in a new process, of other functions in it, and again; all found in the cache on disk."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}  # byte code, as of an installed package
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-c", _START]
        runs = [
            json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)
            for _ in range(1 + _PROCESSES)
        ][1:]  # the first compiles
    for case in runs[0]:
        times = [run[case] for run in runs]
        times_ms = {"ms": round(statistics.median(times), 2), "least_ms": round(min(times), 2)}
        yield {"case": case, "dtype": "float32", "direction": "forward", **times_ms, **machine()}


# Reports ---------------------------------------------------------------------------------------------------------------


def results(source: Path) -> tuple[list[dict[str, object]], str]:
    """The lines of a file and of how many runs they are; lines of one row are made one by the medians of their numbers."""
    rows: dict[tuple[object, ...], list[dict[str, object]]] = {}
    for text in source.read_text().splitlines():
        line = json.loads(text)
        rows.setdefault(tuple(line.get(key) for key in ("case", "dtype", "direction", "peer")), []).append(line)
    middle = {"ratio", "ratio_of_minima", "foci_ms", "peer_ms", "ms", "least_ms", "megabytes"}
    combined = [
        {key: round(statistics.median(line[key] for line in lines), 3) if key in middle else value for key, value in lines[-1].items()}
        for lines in rows.values()
    ]
    counts = sorted(set(map(len, rows.values())))
    return combined, " to ".join(map(str, counts[:1] + counts[1:][-1:]))


def rows_of(lines: list[dict[str, object]]) -> Iterator[str]:
    """The table of ratios: forward and backward of a case in one row, those below their target in bold."""
    by_case = {(line["case"], line["dtype"], line["peer"].removeprefix("own plain backward"), line["direction"]): line for line in lines}
    for (case, dtype, peer, direction), line in by_case.items():
        back = by_case.get((case, dtype, peer, "backward")) or by_case.get((case, dtype, "", "backward"))
        if direction == "forward":
            yield f"| {case}, against {peer} | {dtype} | {_cells(line)} | {_cells(back) if back else ' | '} |"


def _cells(line: dict[str, object]) -> str:
    mark = "" if line["ratio"] >= line["target"] else "**"
    return f"{mark}{line['ratio']:.2f}{mark} ({line['ratio_of_minima']:.2f}) | {line['target']}"


def report(source: Path, page: Path) -> None:
    """Draws the ratios and writes the tables into the page."""
    lines, runs = results(source)
    ratios = [line for line in lines if "ratio" in line]
    last, loads = ratios[-1], [line["load"] for line in ratios]
    clock_words = "CPU time of one thread" if last["clock"] == "thread" else f"wall time, {last['threads']} threads"
    parts = [
        f"torch {last['torch']}, {clock_words}, load average {min(loads)} to {max(loads)}. Medians over rounds of peer / foci, taken in turn;",
        f"in brackets the ratio of the fastest rounds; runs: {runs}, of which medians again. Bold: below the target.",
        "",
        "| case (B,H,S,D) | dtype | forward | target | backward | target |",
        "|---|---|---|---|---|---|",
        *rows_of(ratios),
        "",
        "| growth of the resident set over a causal forward and backward | MB | two S x S matrices would take |",
        "|---|---|---|",
        *(f"| {m['case'].removeprefix('memory ')} | {m['megabytes']} | {m['scores_megabytes']:.0f} |" for m in lines if "megabytes" in m),
        "",
        "| CPU time of first calls, kernels found in the cache | median ms | least |",
        "|---|---|---|",
        *(f"| {m['case']} | {m['ms']} | {m['least_ms']} |" for m in lines if "ms" in m),
    ]
    before, _, rest = page.read_text().partition("<!-- results -->\n")
    after = rest.partition("<!-- end of results -->\n")[2]
    page.write_text(f"{before}<!-- results -->\n{chr(10).join(parts)}\n<!-- end of results -->\n{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", help="of " + ", ".join((*GROUPS, *SINGLE)))
    parser.add_argument("--clock", choices=("wall", "thread"), default="wall", help="thread: of one thread alone")
    parser.add_argument("--report", nargs=2, metavar=("RESULTS", "PAGE"), type=Path)
    chosen = parser.parse_args()
    if chosen.report:
        report(*chosen.report)
        return
    if chosen.clock == "thread":
        global clock
        clock = time.thread_time
        torch.set_num_threads(1)
    with foci.use("cpu"):
        for group in chosen.groups or (*GROUPS, *SINGLE):
            for line in SINGLE[group]() if group in SINGLE else map(compare, GROUPS[group]()):
                print(json.dumps(line), flush=True)


SINGLE = {"memory": memory, "start": start}


if __name__ == "__main__":
    main()
