"""Correctness of the Triton backend on the GPU at hand: every case against the formula in float64.

    python benchmarks/gpu_check.py [--part i/n] [name ...]

Prints one line a case: the error, and in brackets the error that the plain formula makes in the same dtype. Ends with
the number of failures, which is also the exit status. Uninitialised memory is filled with NaN.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import foci
from foci import masks, scores
from foci.backends import load
from foci.backends.contract import Plan
from foci.backends.triton import BACKEND
from foci.planner import find_target
from foci.problem import Cotangents, Formula, Layout, Operands, Outputs, Problem, bucket
from foci.trace_functions import bind

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# dtype -> factors for out, dq, dk and dv against the plain formula's error, and a floor for unit-variance data
BUDGET = {
    torch.float32: (10.0, 10.0, 10.0, 3e-6),
    torch.float16: (1.5, 2.5, 4.0, 5e-4),
    torch.bfloat16: (1.5, 2.5, 4.0, 4e-3),
}


@dataclass(frozen=True)
class Case:
    """One problem. `cu` are (cu_q, cu_kv, q_lengths, kv_lengths) of a jagged one."""

    name: str
    score: Any = None
    mask: Any = None
    batch: int = 2
    heads: tuple[int, int] = (4, 4)
    lengths: tuple[int, int] = (517, 633)
    dims: tuple[int, int] = (64, 64)
    dtype: torch.dtype = torch.bfloat16
    scale: float | None = None
    dropout: float = 0.0
    cu: tuple[Any, Any, Any, Any] | None = None
    blocks: Tensor | None = None
    block_size: tuple[int, int] | None = None
    memory: str = "bhsd"
    row_max: bool = False
    capture_grads: bool = False


def tensor(case: Case, generator: torch.Generator, heads: int, length: int, dim: int) -> Tensor:
    """Random values in the case's memory layout."""
    b = case.batch
    shape = {"bhsd": (b, heads, length, dim), "bshd": (b, length, heads, dim), "odd": (b, heads, length, 2 * dim)}[case.memory]
    values = torch.randn(shape, generator=generator).to(case.dtype).to(DEVICE)
    return {"bhsd": values, "bshd": values.transpose(1, 2), "odd": values[..., ::2]}[case.memory]


def operands_of(case: Case, generator: torch.Generator) -> tuple[Formula, Operands]:
    """The formula and operands of a case."""
    query = tensor(case, generator, case.heads[0], case.lengths[0], case.dims[0])
    key = tensor(case, generator, case.heads[1], case.lengths[1], case.dims[0])
    value = tensor(case, generator, case.heads[1], case.lengths[1], case.dims[1])
    bound = bind(case.score, case.mask, DEVICE)
    jagged: dict[str, Any] = {}
    if case.cu is not None:
        names = ("cu_q", "cu_kv", "q_lengths", "kv_lengths")
        jagged = {n: None if v is None else torch.tensor(v, device=DEVICE) for n, v in zip(names, case.cu, strict=True)}
        q_len, kv_len = (
            jagged[n] if jagged[n] is not None else jagged[c].diff() for n, c in (("q_lengths", "cu_q"), ("kv_lengths", "cu_kv"))
        )
        jagged |= {"max_q": int(q_len.max()), "max_kv": int(kv_len.max())}
    seed = torch.tensor([0x1234567890ABCD], device=DEVICE) if case.dropout else None
    scale = 1 / math.sqrt(case.dims[0]) if case.scale is None else case.scale
    operands = Operands(
        query, key, value, bound.captures, bound.ints, bound.floats, scale, case.dropout, seed,
        None if case.blocks is None else case.blocks.to(DEVICE), **jagged,
    )  # fmt: skip
    layout = Layout.DENSE if case.cu is None else Layout.JAGGED
    return Formula(bound.variant, layout, Outputs(lse=True, row_max=case.row_max), case.dropout > 0, case.block_size), operands


def in_float64(t: Tensor | None) -> Any:
    return t.double() if t is not None and t.is_floating_point() else t


def run(case: Case) -> bool:
    """Forward and backward of a case; whether within budget."""
    generator = torch.Generator().manual_seed(7)
    formula, operands = operands_of(case, generator)
    captures = operands.captures
    problem = Problem(
        formula, case.dtype, *case.dims, *case.heads, bucket(case.batch), *(bucket(n) for n in case.lengths), True, True, True,
        tuple(case.capture_grads and t.is_floating_point() for t in captures),
    )  # fmt: skip
    target = find_target(DEVICE)
    reason = BACKEND.reject(problem, target)
    if reason is not None:
        print(f"skip {case.name:26s} {reason}")
        return True
    wide = dataclasses.replace(
        operands,
        query=operands.query.double(),
        key=operands.key.double(),
        value=operands.value.double(),
        captures=tuple(map(in_float64, captures)),
    )
    reference = load("reference")
    kernels = (
        (BACKEND.build(Plan("triton", problem, target)), operands, case.dtype),
        (reference.build(Plan("reference", dataclasses.replace(problem, dtype=torch.float64), target)), wide, torch.float64),
        (reference.build(Plan("reference", problem, target)), operands, case.dtype),
    )
    started, runs, cotangents = time.time(), [], None
    for kernel, these, dtype in kernels:
        results = kernel.forward(these)
        if cotangents is None:
            cotangents = (
                torch.randn(results.out.shape, generator=generator).to(case.dtype).to(DEVICE),
                torch.randn(results.lse.shape, generator=generator).to(DEVICE),
            )
        grads = kernel.backward(these, results, Cotangents(cotangents[0].to(dtype), lse=cotangents[1].to(results.lse.dtype)))
        named = {"out": results.out, "lse": results.lse, "max": results.row_max, "dq": grads.query, "dk": grads.key, "dv": grads.value}
        runs.append(
            {n: t for n, t in named.items() if t is not None} | {f"dc{i}": t for i, t in enumerate(grads.captures) if t is not None}
        )
        if kernel is kernels[0][0]:
            if DEVICE.type == "cpu":
                continue  # the interpreter has one thread: programs run in the same order again
            first = runs[0]
            again_results = kernel.forward(these)
            again = kernel.backward(these, again_results, Cotangents(cotangents[0], lse=cotangents[1]))
            same = torch.equal(again_results.out, first["out"]) and all(
                torch.equal(a, first[n]) for n, a in (("dq", again.query), ("dk", again.key), ("dv", again.value))
            )
            assert same, "not bitwise repeatable"
    return report(case, runs, time.time() - started)


def report(case: Case, runs: list[dict[str, Tensor]], seconds: float) -> bool:
    """Prints a case's errors; whether all are within budget."""
    out_factor, dq_factor, dkv_factor, floor = BUDGET[case.dtype]
    factors = {"out": out_factor, "lse": 10.0, "max": 10.0, "dq": dq_factor}
    parts, is_good = [], True
    for name, ours in runs[0].items():
        exact, plain = runs[1][name].double(), runs[2][name].double()
        ours = ours.double()
        finite = torch.isfinite(exact)
        if not torch.equal(torch.isfinite(ours), finite):
            parts.append(f"{name}=NONFINITE")
            is_good = False
            continue
        largest = max(1.0, exact[finite].abs().max().item() if finite.any() else 0.0)
        error, same = ((t - exact)[finite].abs().max().item() if finite.any() else 0.0 for t in (ours, plain))
        slack = (3e-6 if name in ("lse", "max") else floor) * largest
        fits = error <= factors.get(name, dkv_factor) * same + slack
        is_good &= fits
        parts.append(f"{name}={error:.1e}({same:.0e}){'' if fits else '!'}")
    print(f"{'ok  ' if is_good else 'BAD '} {case.name:26s} {seconds:5.1f}s {' '.join(parts)}", flush=True)
    return is_good


def cases() -> list[Case]:
    """Every case; small when interpreted."""
    small = DEVICE.type == "cpu"
    n, m = (21, 37) if small else (517, 633)  # the interpreter's tiles are 16 by 16
    half = torch.float16 if small else torch.bfloat16
    g = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(DEVICE)

    ids = (torch.arange(m) // (11 if small else 100)).to(DEVICE)
    table, per_batch = random(4, n + m), torch.tensor([7, n - 4], device=DEVICE)
    rows, columns, kept = random(n, 8), random(m, 8), (torch.rand(4, n, m, generator=g) > 0.5).to(DEVICE)
    chosen = torch.randint(0, m, (n, 5), generator=g).to(DEVICE)
    cu = ([0, 20, 20, 37, 60], [0, 10, 30, 50, 71]) if small else ([0, 200, 200, 337, 1060], [0, 110, 330, 550, 1271])
    spans = (cu[0][-1], cu[1][-1])
    lengths = ([18, 0, 17, 20], [10, 3, 0, 17]) if small else ([180, 0, 137, 700], [110, 3, 0, 600])
    case: Callable[..., Case] = functools.partial(_small_case, n, m) if small else Case
    block = 32 if small else 128
    classes = torch.randint(0, 3, (2, 1, -(-n // block), -(-m // block)), generator=g).to(torch.int8)
    heads, long = (2, 150) if small else (4, 5000)
    window = foci.Mask(lambda b, h, q, k: (q - k < 9) & (q >= k)) if small else foci.Mask(lambda b, h, q, k: (q - k < 150) & (q >= k))
    every = [
        case("plain"), case("causal", mask=masks.causal()), case("window", mask=window),
        case("plain D 128", dims=(128, 128)), case("causal D 128", dims=(128, 128), mask=masks.causal()),
        case("causal D 96", dims=(96, 96), mask=masks.causal()), case("D 40 Dv 72", dims=(40, 72)), case("D 33", dims=(33, 33)),
        case("D 192 Dv 128", dims=(192, 128), mask=masks.causal()), case("D 256", dims=(256, 256), mask=masks.causal()), case("D 512", dims=(512, 512)),
        case("float16", dtype=torch.float16, mask=masks.causal()), case("float32", dtype=torch.float32, mask=masks.causal()),
        case("float32 D 128", dtype=torch.float32, dims=(128, 128)),
        case("gqa", heads=(2 * heads, heads), mask=masks.causal()), case("mqa", heads=(heads, 1)),
        case("bshd", memory="bshd", mask=masks.causal()), case("odd strides", memory="odd"),
        case("negative scale", scale=-0.3, mask=masks.causal(), row_max=True), case("zero scale", scale=0.0, mask=masks.causal()),
        case("alibi", score=scores.alibi(heads), mask=masks.causal(), row_max=True), case("alibi D 128", dims=(128, 128), score=scores.alibi(heads), mask=masks.causal()),
        case("softcap", score=scores.softcap(20.0)), case("softcap half", score=scores.softcap(20.0), dtype=half, dims=(128, 128), mask=masks.causal()),
        case("bias", score=scores.bias(random(2, heads, n, m))), case("bias heads aligned", score=scores.bias(random(heads, n, 648 if not small else 48)[..., :m])),
        case("bias broadcast", score=scores.bias(random(heads, 1, m))), case("relative", score=foci.Score(lambda s, b, h, q, k: s + table[h, q - k + m])),
        case("squared", score=foci.Score(lambda s, b, h, q, k: s * s)), case("sin cos where", score=foci.Score(lambda s, b, h, q, k: torch.sin(s) + torch.cos(s) * torch.where(q > k, 0.5, 1.5))),
        case("floor division", score=foci.Score(lambda s, b, h, q, k: torch.where((q - k) // 3 % 2 == 0, s, s * 0.7))),
        case("modulo mask", mask=foci.Mask(lambda b, h, q, k: (k - q) // 7 % 3 != 1)), case("document", lengths=(m, m), mask=foci.Mask(lambda b, h, q, k: ids[q] == ids[k])),
        case("bool tensor", mask=foci.Mask(lambda b, h, q, k: kept[h, q, k])), case("bool tensor D 128", dims=(128, 128), mask=foci.Mask(lambda b, h, q, k: kept[h, q, k])), case("empty rows", mask=foci.Mask(lambda b, h, q, k: (q >= 20) & (k <= q))),
        case("per batch", mask=foci.Mask(lambda b, h, q, k: k < per_batch[b])), case("row products", score=foci.Score(lambda s, b, h, q, k: s + torch.dot(rows[q], columns[k]))),
        case("any of row", mask=foci.Mask(lambda b, h, q, k: (chosen[q] == k).any(-1))),
        case("dropout", dropout=0.3, mask=masks.causal()), case("all dropped", dropout=1.0),
        case("blocks", blocks=classes, block_size=(block, block), mask=masks.causal()), case("block rows", blocks=classes[:1], block_size=(block, block)),
        case("jagged", batch=1, lengths=spans, cu=(*cu, None, None)), case("jagged causal gqa", batch=1, heads=(2 * heads, heads), lengths=spans, mask=masks.causal(), cu=(*cu, None, None)),
        case("jagged lengths alibi", batch=1, lengths=spans, score=scores.alibi(heads), cu=(*cu, *lengths)), case("jagged dropout window", batch=1, lengths=spans, dropout=0.2, mask=window, cu=(*cu, None, None)),
        case("learned bias", score=scores.bias(random(1, heads, n, m)), capture_grads=True), case("learned bias causal", score=scores.bias(random(2, 1, n, m)), mask=masks.causal(), capture_grads=True),
        case("learned bias half", score=scores.bias(random(heads, n, m).to(half)), dtype=half, capture_grads=True), case("learned bias aligned", lengths=(n, 48 if small else 640), score=scores.bias(random(1, heads, n, 48 if small else 640)), capture_grads=True),
        case("learned key bias", score=scores.bias(random(heads, 1, m)), capture_grads=True, mask=masks.causal()), case("learned row bias", score=scores.bias(random(2, 1, n, 1)), capture_grads=True),
        case("learned slopes", score=scores.alibi(random(heads)), capture_grads=True, mask=masks.causal()), case("learned temperature", score=scores.temperature(random(heads).abs() + 1), capture_grads=True, scale=-0.2),
        case("learned scalar", score=foci.Score(lambda s, b, h, q, k, t=random(1)[0]: s * t + t), capture_grads=True),
        case("learned table", score=foci.Score(lambda s, b, h, q, k: s + table[h, q - k + m]), capture_grads=True, mask=window),
        case("learned gather", score=foci.Score(lambda s, b, h, q, k: s + table[h, ids[q % n]] * 0.5), capture_grads=True, dropout=0.2),
        case("learned table jagged", batch=1, lengths=spans, score=foci.Score(lambda s, b, h, q, k: s + table[h, q - k + m] * 0.1), capture_grads=True, cu=(*cu, *lengths)),
        case("learned bias jagged", batch=1, lengths=spans, score=scores.bias(random(heads, n + m, n + m)), mask=masks.causal(), capture_grads=True, cu=(*cu, None, None)),
        *_decodes(case, heads, long),
        case("one", lengths=(1, 1)), case("one query", lengths=(1, m)), case("more queries", lengths=(m, 9), mask=masks.causal()),
    ]  # fmt: skip
    return every if small else every + _large()


def _small_case(n: int, m: int, name: str, **options: Any) -> Case:
    return Case(name, **({"lengths": (n, m), "dims": (24, 24), "dtype": torch.float32, "heads": (2, 2)} | options))


def _decodes(case: Callable[..., Case], heads: int, long: int) -> list[Case]:
    return [
        case("decode", lengths=(1, long), heads=(2 * heads, heads), row_max=True), case("decode alibi 4", lengths=(4, long), heads=(heads, heads), score=scores.alibi(heads), memory="bshd"),
        case("decode window", lengths=(3, long), heads=(4 * heads, heads), mask=foci.Mask(lambda b, h, q, k: (q + long - 3 >= k) & (q + long - 3 - k < 20))),
        case("decode list dropout", lengths=(2, long), mask=foci.Mask(lambda b, h, q, k: (k // 7) % 5 == b), dropout=0.1, dims=(40, 72)), case("decode nothing", lengths=(2, long), mask=foci.Mask(lambda b, h, q, k: (k < 0) | (q > 0))),
    ]  # fmt: skip


def _large() -> list[Case]:
    return [
        Case("large causal", mask=masks.causal(), batch=1, lengths=(4096, 4096), dims=(128, 128), heads=(2, 2)),
        Case("large alibi", mask=masks.causal(), score=scores.alibi(2), batch=1, lengths=(4000, 4000), dims=(64, 64), heads=(2, 2)),
        Case("large values", batch=1, lengths=(256, 256), scale=0.1),
        Case("many heads", batch=70000, heads=(1, 1), lengths=(3, 5), dims=(16, 16)),
    ]


def main() -> int:
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="0/1", help="i/n: every n-th case, from the i-th")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    failures = 0
    for case in cases()[part::parts]:
        if options.names and case.name not in options.names:
            continue
        try:
            failures += not run(case)
        except Exception as error:
            failures += 1
            print(f"FAIL {case.name:26s} {type(error).__name__}: {str(error)[-600:]}", flush=True)
            traceback.print_exc(limit=-3)
    print(f"{failures} failures")
    return min(failures, 255)


if __name__ == "__main__":
    sys.exit(main())
