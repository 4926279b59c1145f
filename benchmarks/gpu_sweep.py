"""Times schedules of the Triton kernels on the GPU at hand, to fill the table of `foci.backends.gpu.schedules`.

    python benchmarks/gpu_sweep.py --compile 0/12     # one of twelve processes that fill Triton's cache
    python benchmarks/gpu_sweep.py                    # times, one line each, best of each kernel last

Lines go to $OUT/gpu_sweep.jsonl where OUT is set.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
import triton

import foci
from foci import masks, scores
from foci.backends.contract import Given, Plan
from foci.backends.gpu.architectures import find
from foci.backends.gpu.kernel import GpuKernel
from foci.backends.gpu.launch_builder import LaunchBuilder
from foci.backends.gpu.portable_passes import PortableBackward
from foci.backends.gpu.schedules import Schedule, shared_bytes
from foci.backends.gpu.tile_tables import operand_sequences
from foci.backends.repeat_passes import repeat_forward
from foci.backends.triton.kernel import build_kernel
from foci.planner import find_target
from foci.problem import Formula, Operands, Outputs, Problem
from foci.trace_functions import bind

S = Schedule
CANDIDATES = {
    ("key_gradient", 128): [S(64, 64, 4, 2, True), S(128, 64, 8, 2, True, True), S(128, 64, 8, 1, True, True), S(64, 64, 8, 2, True, True), S(64, 128, 8, 1, True), S(64, 128, 8, 2, True), S(64, 64, 4, 2, True, True), S(64, 64, 4, 1, True, True)],
    ("query_gradient", 128): [S(128, 64, 8, 3, True), S(128, 64, 8, 2, True), S(64, 64, 4, 2, True), S(64, 128, 4, 2, True)],
    ("forward", 128): [S(128, 128, 8, 3, True), S(128, 64, 8, 3, True), S(64, 64, 4, 3, True), S(64, 128, 4, 2, True), S(128, 64, 4, 3, True)],
    ("forward", 64): [S(64, 128, 4, 2, True), S(128, 64, 4, 3, True), S(128, 128, 8, 2, True), S(64, 64, 4, 3, True), S(128, 128, 4, 2, True)],
}  # fmt: skip


def _document() -> Any:
    ids = (torch.arange(8192, device="cuda") // 1024).int()
    return lambda b, h, q, k: ids[q] == ids[k]


VARIANTS: dict[str, Any] = {
    "full": (None, None, 1.0),
    "causal": (None, masks.causal(), 0.5),
    "alibi": (scores.alibi(16), masks.causal(), 0.5),
    "softcap": (scores.softcap(20.0), masks.causal(), 0.5),
    "window": (None, foci.Mask(lambda b, h, q, k: (q >= k) & (q - k < 1024)), (1024.0 * 8192 - 512 * 1023) / 8192**2),
    "document": (None, _document, 0.125),
    "bias": (lambda heads: scores.bias(torch.randn(1, heads, 8192, 8192, device="cuda", dtype=torch.bfloat16)), None, 1.0),
}
SAME = {"forward": ("forward_sparse", "forward_listed"), "key_gradient": ("key_gradient_scored",)}
FLOPS = {"forward": 4, "query_gradient": 6, "key_gradient": 8, "key_gradient_alone": 6, "value_gradient_alone": 4}


def jobs(names: list[str], dims: list[int], kinds: list[str]) -> list[tuple[str, int, str, Schedule]]:
    """(kernel, head dim, variant, schedule), those whose shared memory fits."""
    limit = find(find_target(torch.device("cuda")).arch).shared_bytes
    return [
        (kind, dim, name, schedule)
        for (kind, dim), schedules in CANDIDATES.items()
        if dim in dims and (not kinds or kind in kinds)
        for schedule in schedules
        if shared_bytes(kind, schedule, (dim, dim), 2, scratch=2 if names == ["bias"] else 0) <= limit
        for name in names
    ]


def kernel_of(dim: int, name: str) -> tuple[GpuKernel, Operands]:
    score, mask, _ = VARIANTS[name]
    heads, device = 2048 // dim, torch.device("cuda")
    if name == "document":
        mask = foci.Mask(mask())
    if name == "bias":
        score = score(heads)
    if name == "alibi":
        score = scores.alibi(heads)
    q, k, v = (torch.randn(2, heads, 8192, dim, device=device, dtype=torch.bfloat16) for _ in range(3))
    bound = bind(score, mask, device)
    operands = Operands(q, k, v, bound.captures, bound.ints, bound.floats, 1 / math.sqrt(dim))
    problem = Problem(
        Formula(bound.variant, outputs=Outputs(lse=True)), torch.bfloat16, dim, dim, heads, heads, 2, 8192, 8192, True, True, True, ()
    )
    return build_kernel(Plan("triton", problem, find_target(device))), operands


def launcher(kind: str, dim: int, name: str, schedule: Schedule) -> Any:
    """A function that launches one kernel."""
    kernel, operands = kernel_of(dim, name)
    kernel.schedules[kind] = schedule
    kernel.schedules.update(dict.fromkeys(SAME.get(kind, ()), schedule))
    if kind == "forward":
        return repeat_forward(operands, kernel)
    results = kernel.forward(operands)
    dout = torch.randn_like(results.out)
    grads = [torch.empty_like(t) for t in (operands.query, operands.key, operands.value)]
    launches, sequences = LaunchBuilder((), None), operand_sequences(operands)
    call = kernel.builder.begin(
        operands, {"out": results.out, "dout": dout, "dq": grads[0], "dk": grads[1], "dv": grads[2]}, sequences, launches
    )
    grad_inputs = Given(results.out, results.lse, dout, None)
    rows = (torch.empty_like(results.lse), torch.empty_like(results.lse))
    backward = PortableBackward(kernel.builder)
    backward._prepare(call, grad_inputs, rows)
    if kind == "query_gradient":
        return lambda: backward._query_gradient(call, grad_inputs, rows, grads[0])
    kind = backward._key_passes(grads[1], grads[2])[0][0] if kind == "key_gradient" else kind
    wanted = (None if kind == "value_gradient_alone" else grads[1], None if kind == "key_gradient_alone" else grads[2])
    return lambda: backward._key_gradient(call, kind, (dout, *rows), wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", default="", help="i/n: only fill the cache with every n-th job")
    parser.add_argument("--variants", default="full,causal")
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--kinds", default="", help="kernels, all by default")
    options = parser.parse_args()
    todo = jobs(options.variants.split(","), [int(d) for d in options.dims.split(",")], options.kinds.split(",") if options.kinds else [])
    if options.compile:
        part, parts = map(int, options.compile.split("/"))
        for job in todo[part::parts]:
            launcher(*job)()
            torch.cuda.synchronize()
        return
    out = Path(os.environ["OUT"]) / "gpu_sweep.jsonl" if "OUT" in os.environ else None
    best: dict[tuple[str, int, str], tuple[float, Schedule]] = {}
    for kind, dim, name, schedule in todo:
        try:
            ms = triton.testing.do_bench(launcher(kind, dim, name, schedule), warmup=10, rep=40, return_mode="median")
        except Exception as error:
            print(kind, dim, name, schedule, type(error).__name__, str(error)[-200:], flush=True)
            continue
        heads = 2048 // dim
        rate = FLOPS[kind] * 2 * heads * 8192**2 * dim * VARIANTS[name][2] / ms / 1e9
        print(
            f"{kind:21s} D{dim:<4d}{name:8s} {schedule.tile_q:3d}x{schedule.tile_kv:<3d} w{schedule.warps} s{schedule.stages} {'tma' if schedule.descriptors else '   '} {'turned' if schedule.turned else '      '} {ms:7.3f} ms {rate:6.0f} TFLOP/s",
            flush=True,
        )
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps({"kernel": kind, "D": dim, "variant": name, **vars(schedule), "ms": ms, "tflops": rate}) + "\n")
        if (kind, dim, name) not in best or best[kind, dim, name][0] > ms:
            best[kind, dim, name] = (ms, schedule)
    print(f"best on {torch.cuda.get_device_name()}, foci {foci.__name__}")
    for key, (ms, schedule) in best.items():
        print(*key, f"{ms:.3f}", schedule)


if __name__ == "__main__":
    main()
