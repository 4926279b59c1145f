"""Attention on the GPU at hand: foci's backends and their peers, in one run.

    python benchmarks/gpu_attention.py --compile 0/8     # one of eight processes that fill the caches
    python benchmarks/gpu_attention.py [row ...]         # times; a line for each row, in the order of their names
    python benchmarks/gpu_attention.py --part 0/4 --lock /tmp/lock     # one of four that get ready side by side and time one at a time

Peers: FlexAttention compiled, FlashAttention-4 where `flash_attn.cute` is found, torch's FLASH, cuDNN and EFFICIENT backends of
scaled_dot_product_attention, varlen_attn.
Medians of CUDA events, the sides of a row taking turns. TFLOP/s over the attended area, backward 2.5 times the forward. Lines go to
$OUT/gpu_attention.jsonl where OUT is set, with commit, device and versions; `number` is the row's place in the table.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import facts, in_turns
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import foci
from foci import masks, scores
from foci.backends import load
from foci.backends.contract import Plan
from foci.backends.repeat_passes import repeat_backward, repeat_forward
from foci.planner import find_target
from foci.problem import Cotangents, Formula, Layout, Operands, Outputs, Problem, bucket
from foci.trace_functions import bind

DEVICE = torch.device("cuda")
OURS = ("triton", "hopper")
"""foci's backends of their own kernels; the planner takes the first for a problem that the second declines."""


@dataclass(frozen=True)
class Row:
    """One row of the table. `flex` gives (score_mod, mask_mod) for FlexAttention, `sdpa` the keywords for SDPA.
    `value_dim`: of values, where it is not that of keys."""

    name: str
    shape: tuple[int, int, int, int]
    score: Callable[[], Any] | None = None
    mask: Callable[[], Any] | None = None
    flex: Callable[[], tuple[Any, Any]] | None = None
    sdpa: Callable[[], dict[str, Any]] | None = None
    peers: tuple[str, ...] = ()
    kv_heads: int = 0
    value_dim: int = 0
    dropout: float = 0.0
    learned: bool = False


def _ids() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    cuts = torch.randperm(8191, generator=generator)[:7] + 1
    marks = torch.zeros(8192, dtype=torch.int32)
    marks[cuts] = 1
    return marks.cumsum(0).to(torch.int32).to(DEVICE)


def _slopes(heads: int) -> Tensor:
    return torch.exp2(-8.0 / heads * torch.arange(1, heads + 1, device=DEVICE))


def _causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def _window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k < 1024)


def _document() -> Any:
    ids = _ids()
    return lambda b, h, q, k: ids[q] == ids[k]


def _alibi(heads: int) -> Any:
    slopes = _slopes(heads)
    return lambda s, b, h, q, k: s + slopes[h] * (k - q)


def _softcap(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 20.0 * torch.tanh(s / 20.0)


def _bias(heads: int, length: int) -> Tensor:
    return torch.randn(1, heads, length, length, device=DEVICE, dtype=torch.bfloat16, generator=torch.Generator(DEVICE).manual_seed(5))


def _keep(length: int) -> Tensor:
    return torch.rand(length, length, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(5)) > 0.3


def rows() -> list[Row]:
    """The rows, in the order of the table."""
    every = []
    dense = ("flash", "cudnn", "fa4", "flex")
    for shape in ((8, 16, 2048, 128), (2, 16, 8192, 128), (1, 16, 16384, 128), (2, 32, 8192, 64), (2, 8, 8192, 256)):
        every.append(Row("dense", shape, flex=lambda: (None, None), sdpa=dict, peers=dense))
        every.append(Row("causal", shape, mask=masks.causal, flex=lambda: (None, _causal), sdpa=lambda: {"is_causal": True}, peers=dense))
    for heads, dim in ((16, 128), (32, 64)):
        shape = (2, heads, 8192, dim)
        every += [
            Row("window 1024", shape, mask=lambda: foci.Mask(_window), flex=lambda: (None, _window), peers=("flex",)),
            Row("document", shape, mask=lambda: foci.Mask(_document()), flex=lambda: (None, _document()), peers=("flex",)),
            Row("ALiBi causal", shape, score=functools.partial(lambda n: foci.Score(_alibi(n)), heads), mask=masks.causal,
                flex=functools.partial(lambda n: (_alibi(n), _causal), heads), peers=("flex",)),
            Row("softcap causal", shape, score=lambda: foci.Score(_softcap), mask=masks.causal, flex=lambda: (_softcap, _causal), peers=("flex",)),
        ]  # fmt: skip
    shape = (2, 16, 4096, 128)
    every += [
        Row("bias [1,H,S,S]", shape, score=lambda: scores.bias(_bias(16, 4096)), sdpa=lambda: {"attn_mask": _bias(16, 4096)}, peers=("cudnn", "efficient")),
        Row("bool [S,S]", shape, mask=lambda: foci.Mask(lambda b, h, q, k, t=_keep(4096): t[q, k]), sdpa=lambda: {"attn_mask": _keep(4096)}, peers=("cudnn", "efficient")),
        Row("dropout 0.1", shape, dropout=0.1, sdpa=lambda: {"dropout_p": 0.1}, peers=("flash", "cudnn")),
        Row("learned bias", shape, score=lambda: scores.bias(_bias(16, 4096)), learned=True),
        Row("GQA 4 causal", (2, 32, 8192, 128), kv_heads=8, mask=masks.causal, sdpa=lambda: {"is_causal": True, "enable_gqa": True}, peers=("flash", "cudnn", "fa4")),
        Row("causal D 96", (2, 16, 8192, 96), mask=masks.causal, sdpa=lambda: {"is_causal": True}, peers=("flash", "cudnn")),
        Row("causal D 192, Dv 128", (2, 16, 8192, 192), value_dim=128, mask=masks.causal, sdpa=lambda: {"is_causal": True}, peers=("flash", "cudnn", "fa4")),
        Row("causal D 192", (2, 16, 8192, 192), mask=masks.causal, sdpa=lambda: {"is_causal": True}, peers=("flash", "cudnn")),
        *(Row("decode", (b, 32, n, 128), kv_heads=8, sdpa=lambda: {"enable_gqa": True}, peers=("flash", "cudnn")) for b, n in ((64, 8192), (4, 65536), (1, 131072))),
        *(Row("decode ALiBi", (b, 32, n, 128), kv_heads=8, score=lambda: foci.Score(_alibi(32))) for b, n in ((64, 8192), (4, 65536), (1, 131072))),
        *(Row("decode paged", (b, 32, n, 128), kv_heads=8) for b, n in ((64, 8192), (4, 65536), (1, 131072))),
        Row("jagged", (64, 16, 8192, 128), peers=("varlen", "fa4")),
        Row("jagged causal", (64, 16, 8192, 128), mask=masks.causal, peers=("varlen", "fa4")),
    ]  # fmt: skip
    return every


def jagged_lengths() -> list[int]:
    """64 log-normal lengths from 16 to 8192."""
    generator = torch.Generator().manual_seed(11)
    return torch.exp(torch.randn(64, generator=generator) * 1.2 + 6.4).clamp(16, 8192).int().tolist()


def inputs(row: Row, *, grad: bool = False) -> tuple[list[Tensor], Tensor]:
    """q, k, v and the gradient of out."""
    b, h, s, d = row.shape
    if row.name.startswith("jagged"):
        b, s = 1, sum(jagged_lengths())
    kv = row.kv_heads or h
    rows = 1 if row.name.startswith("decode") else s
    dv = row.value_dim or d
    shapes = ((h, rows, d), (kv, s, d), (kv, s, dv), (h, rows, dv))
    tensors = [torch.randn(b, *shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes]
    return [t.requires_grad_(grad) for t in tensors[:3]], tensors[3]


PAGE = 256
"""Keys of a page."""


def paged(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Keys and values in pages that lie in disorder, and where they lie."""
    (b, h, s, d), pages = k.shape, k.shape[2] // PAGE
    pools = [t.view(b, h, pages, PAGE, d).transpose(1, 2).reshape(b * pages, h, PAGE, d) for t in (k, v)]
    order = torch.randperm(b * pages, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    pools = [torch.empty_like(t).index_copy_(0, order, t) for t in pools]
    lengths = torch.full((b,), s, dtype=torch.int32, device=DEVICE)
    return pools[0], pools[1], {"page_table": order.view(b, pages).int(), "kv_lengths": lengths, "max_kv": s}


def planned(row: Row, *, is_tuned: bool = False) -> tuple[Problem, Operands, Tensor]:
    """A row as a problem with its operands, and the gradient of out."""
    (q, k, v), dout = inputs(row)
    bound = bind(row.score() if row.score else None, row.mask() if row.mask else None, DEVICE)
    jagged: dict[str, Any] = {}
    layout = Layout.DENSE
    if row.name.startswith("decode paged"):
        layout = Layout.PAGED
        k, v, jagged = paged(k, v)
    if row.name.startswith("jagged"):
        lengths = jagged_lengths()
        cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
        layout = Layout.JAGGED
        jagged = {"cu_q": cu, "cu_kv": cu, "max_q": max(lengths), "max_kv": max(lengths)}
    seed = torch.tensor([5], device=DEVICE) if row.dropout else None
    operands = Operands(q, k, v, bound.captures, bound.ints, bound.floats, 1 / math.sqrt(row.shape[3]), row.dropout, seed, **jagged)
    formula = Formula(bound.variant, layout, Outputs(lse=True), row.dropout > 0)
    b, h, s, d = row.shape
    grads = tuple(row.learned and t.is_floating_point() for t in bound.captures)
    wanted = (layout is not Layout.PAGED,) * 3
    problem = Problem(formula, torch.bfloat16, d, row.value_dim or d, h, k.shape[1], bucket(b), bucket(s), bucket(s), *wanted, grads)
    return dataclasses.replace(problem, tuned=is_tuned), operands, dout.transpose(1, 2).contiguous().transpose(1, 2)


def ours(row: Row, backend: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward and backward of one of foci's backends."""
    problem, operands, dout = planned(row)
    target = find_target(DEVICE)
    reason = load(backend).reject(problem, target)
    if reason:
        raise NotImplementedError(reason)
    kernel = load(backend).build(Plan(backend, problem, target))
    forward = repeat_forward(operands, kernel)
    if not problem.needs_backward:
        return forward, lambda: None
    return forward, repeat_backward(operands, kernel.forward(operands), Cotangents(dout), kernel)


def _timed_pair(function: Callable[..., Tensor], tensors: list[Tensor], dout: Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    out = function(*tensors)
    gradient = dout.reshape(out.shape) if out.shape != dout.shape else dout
    return lambda: function(*(t.detach() for t in tensors)), lambda: torch.autograd.grad(out, tensors, gradient, retain_graph=True)


def _flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def peer(row: Row, name: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward and backward of a peer."""
    tensors, dout = inputs(row, grad=True)
    if name == "flex":
        assert row.flex is not None
        torch._dynamo.reset()
        score_mod, mask_mod = row.flex()
        block = None if mask_mod is None else create_block_mask(mask_mod, None, None, row.shape[2], row.shape[2], DEVICE)
        compiled = _flex()
        return _timed_pair(lambda q, k, v: compiled(q, k, v, score_mod=score_mod, block_mask=block), tensors, dout)
    if name == "fa4":
        return _flash_attention_4(row, tensors, dout)
    if name == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        lengths = jagged_lengths()
        cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
        packed = [t.detach()[0].transpose(0, 1).contiguous().requires_grad_() for t in tensors]
        options = {"window_size": (-1, 0)} if "causal" in row.name else {}
        return _timed_pair(
            lambda q, k, v: varlen_attn(q, k, v, cu, cu, max(lengths), max(lengths), **options),
            packed,
            dout[0].transpose(0, 1).contiguous(),
        )
    backend = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}[name]
    assert row.sdpa is not None
    options = row.sdpa()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **options)

    return _timed_pair(run, tensors, dout)


def _flash_attention_4(row: Row, tensors: list[Tensor], dout: Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """FlashAttention-4 by its CuTe interface, in its own layout: tokens first."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    options: dict[str, Any] = {"causal": "causal" in row.name}
    function = flash_attn_func
    if row.name.startswith("jagged"):
        lengths = jagged_lengths()
        cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
        function = flash_attn_varlen_func
        tensors, dout = [t[0] for t in tensors], dout[0]
    packed = [t.detach().transpose(-3, -2).contiguous().requires_grad_() for t in tensors]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = function(q, k, v, **options)
        return result[0] if isinstance(result, tuple) else result

    return _timed_pair(run, packed, dout.transpose(-3, -2).contiguous())


def flops(row: Row) -> float:
    """Of the forward, over the attended area."""
    b, h, s, d = row.shape
    widths = d + (row.value_dim or d)
    if row.name.startswith("jagged"):
        area = float(sum(n * n for n in jagged_lengths())) * (0.5 if "causal" in row.name else 1.0)
        return 2.0 * h * widths * area
    area = float(s) * s
    if row.name.startswith("window"):
        area = 1024.0 * s - 1024.0 * 1023 / 2
    elif row.name == "document":
        area = float((torch.bincount(_ids()).double() ** 2).sum())
    elif "causal" in row.name:
        area /= 2
    return 2.0 * b * h * widths * area


@contextlib.contextmanager
def held(lock: str, how: int) -> Iterator[None]:
    """Holds the lock of processes side by side: fcntl.LOCK_SH to get ready beside each other, fcntl.LOCK_EX to time alone."""
    if not lock:
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, how)
        yield


@dataclass(frozen=True)
class Ready:
    """One side of a row: its passes, each run once, and megabytes they take beside their inputs."""

    passes: tuple[Callable[[], Any], ...]
    peak_mb: float


def ready(row: Row, name: str) -> Ready | None:
    """A side that runs, or None and a line that says why not."""
    try:
        forward, backward = ours(row, name) if name in OURS else peer(row, name)
        passes = (forward,) if row.name.startswith("decode") else (forward, backward)
        for run in passes:
            run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for run in passes:
            run()
        torch.cuda.synchronize()
        return Ready(passes, (torch.cuda.max_memory_allocated() - before) / 2**20)
    except Exception as error:
        print(f"{row.name} {row.shape} {name}: {type(error).__name__} {str(error)[-300:]}", flush=True)
        return None


def measure(row: Row, names: Sequence[str], *, only_compile: bool, lock: str = "") -> dict[str, dict[str, Any]]:
    """Lines of a row, by who: TFLOP/s and milliseconds of forward and backward."""
    with held(lock, fcntl.LOCK_SH):
        sides = {name: side for name in names if (side := ready(row, name)) is not None}
    if only_compile:
        return {}
    with held(lock, fcntl.LOCK_EX):
        forward = in_turns({name: side.passes[0] for name, side in sides.items()})
        backward = in_turns({name: side.passes[1] for name, side in sides.items() if len(side.passes) > 1})
    return {name: line(row, name, forward[name], backward.get(name), side.peak_mb) for name, side in sides.items()}


def line(row: Row, name: str, forward_ms: float, backward_ms: float | None, peak_mb: float) -> dict[str, Any]:
    """What is written of one side; of a decode, terabytes of keys and values a second in the place of TFLOP/s."""
    about = {"row": row.name, "shape": row.shape, "who": name, "forward_ms": forward_ms, "peak_mb": peak_mb}
    if backward_ms is None:
        b, _, n, d = row.shape
        rate = 4.0 * b * row.kv_heads * n * d / forward_ms / 1e9
        return about | {"forward_tbs": rate, "forward_tflops": rate, "backward_tflops": 0.0}
    work = flops(row)
    rates = {"forward_tflops": work / forward_ms / 1e9, "backward_tflops": 2.5 * work / backward_ms / 1e9}
    return about | {"backward_ms": backward_ms} | rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", default="", help="i/n: only fill the caches, every n-th row")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th row, from the i-th")
    parser.add_argument("--lock", default="", help="a file for processes side by side")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--backends", default=",".join(OURS), help="of foci")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    todo = [(number, row) for number, row in enumerate(rows()) if not options.names or row.name in options.names]
    if options.names:
        todo.sort(key=lambda one: options.names.index(one[1].name))
    part, parts = map(int, (options.compile or options.part).split("/"))
    machine = facts("cuda")
    out = Path(os.environ["OUT"]) / "gpu_attention.jsonl" if "OUT" in os.environ else None
    for number, row in todo[part::parts]:
        names = (*options.backends.split(","), *(() if options.no_peers else row.peers))
        lines = measure(row, names, only_compile=bool(options.compile), lock=options.lock)
        if out is not None:
            with out.open("a") as file:
                file.writelines(json.dumps({"number": number} | each | machine) + "\n" for each in lines.values())
        b, h, s, d = row.shape
        shown = "  ".join(
            f"{n} {m['forward_tbs']:.2f} TB/s" if "forward_tbs" in m else f"{n} {m['forward_tflops']:.0f}/{m['backward_tflops']:.0f}"
            for n, m in lines.items()
        )
        if not options.compile:
            print(f"{row.name:15s} {b},{h},{s},{d:<4d} {shown}", flush=True)


if __name__ == "__main__":
    main()
