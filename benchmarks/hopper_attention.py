"""Attention on a Hopper GPU: foci's hopper and triton backends beside FlashAttention-4, cuDNN, varlen_attn and FlexAttention.

    python benchmarks/hopper_attention.py [group ...]                 # the forward
    python benchmarks/hopper_attention.py --backward [group ...]      # the backward
    python benchmarks/hopper_attention.py --compile [group ...]       # only fill the caches, both passes, in processes side by side
    python benchmarks/hopper_attention.py --list                      # rows and their groups; needs no GPU

bfloat16; medians of CUDA events, the peers of a row taking turns, so that a slow moment of the card falls on all alike; of short rows
calls in a row, behind work that keeps the device busy until the host has called them.
TFLOP/s over the attended area, the backward counted as 2.5 forwards. "foci" is the planner's own choice, "hopper" and "triton" are
each backend's own kernels, chosen or not. Every peer runs in its default mode: FlashAttention-4's backward adds in any order, foci's
has one. A peer that is not installed, or declines, is named and left out. Lines go to $OUT/hopper_forward.jsonl or
$OUT/hopper_backward.jsonl where OUT is set.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import facts, in_turns
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import foci
from foci import masks
from foci.backends import load
from foci.backends.contract import Plan
from foci.backends.repeat_passes import repeat_backward, repeat_forward
from foci.planner import choose, find_target
from foci.problem import Cotangents, Formula, Layout, Operands, Outputs, Problem, bucket
from foci.trace_functions import Bound, bind

DEVICE = torch.device("cuda")
Shape = tuple[int, int, int, int]
Call = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One row of the table. `kind`: "dense", "jagged", or the name of a variant. `value_dim`: of values, where
    it is not that of keys. `keys`: how many there are, where not as many as queries. `dropout`: how many of the weights are dropped. `calls`:
    timed in a row."""

    name: str
    shape: Shape
    kind: str = "dense"
    causal: bool = False
    kv_heads: int = 0
    value_dim: int = 0
    keys: int = 0
    dropout: float = 0.0
    calls: int = 1


AHEAD = 12_000_000
"""Cycles that the device spins while the host calls what is short."""
OURS = ("hopper", "triton", "foci")
VARIANTS = ("window 1024", "document", "ALiBi causal", "softcap causal")


def _dense(*shapes: Shape, name: str = "dense", **options: Any) -> tuple[Row, ...]:
    return tuple(
        Row(name.replace("dense", "causal") if causal else name, shape, "dense", causal, **options)
        for shape in shapes
        for causal in (False, True)
    )


GROUPS = {
    "dense_128": _dense((2, 16, 8192, 128)),
    "dense_64": _dense((2, 32, 8192, 64)),
    "jagged": (Row("jagged", (64, 16, 8192, 128), "jagged"), Row("jagged causal", (64, 16, 8192, 128), "jagged", causal=True)),
    "dense_256": _dense((2, 8, 8192, 256)),
    "dense_192": (*_dense((2, 16, 8192, 192), name="dense Dv 128", value_dim=128), *_dense((2, 16, 8192, 192))),
    "dense_96": _dense((2, 16, 8192, 96)),
    "short_and_long": _dense((8, 16, 2048, 128), (1, 16, 16384, 128)),
    "short_64": _dense((16, 12, 512, 64), (8, 12, 2048, 64), calls=20),
    "grouped": _dense((2, 32, 8192, 128), name="dense GQA 4", kv_heads=8),
    "dropout": _dense((2, 32, 8192, 64), (2, 16, 8192, 128), name="dense dropout .1", dropout=0.1),
    "variants_128": tuple(Row(name, (2, 16, 8192, 128), name) for name in VARIANTS),
    "variants_64": tuple(Row(name, (2, 32, 8192, 64), name) for name in VARIANTS),
}


def passed(function: Callable[..., Any], tensors: list[Tensor], *, backward: bool) -> Call:
    """A peer's forward, or its backward by autograd."""
    if not backward:
        return lambda: function(*tensors)
    leaves = [t.detach().requires_grad_() for t in tensors]
    result = function(*leaves)
    out = result[0] if isinstance(result, tuple) else result
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def asked_of(tensors: list[Tensor], bound: Bound, jagged: dict[str, Any], dropout: float, *, backward: bool) -> Problem:
    query, key, value = tensors
    batch, heads, rows, dim = query.shape
    sizes = (len(jagged["cu_q"]) - 1, jagged["max_q"], jagged["max_q"]) if jagged else (batch, rows, key.shape[2])
    formula = Formula(bound.variant, Layout.JAGGED if jagged else Layout.DENSE, Outputs(lse=True), dropout > 0)
    wanted = (backward, backward, backward, tuple(False for _ in bound.captures))
    return Problem(formula, query.dtype, dim, value.shape[3], heads, key.shape[1], *map(bucket, sizes), *wanted)


def planned(name: str, asked: Problem) -> Any:
    """A backend's kernel, or for "foci" that of the planner's choice; "hopper" takes its own backward whether it is ahead or not."""
    target = find_target(DEVICE)
    if name == "foci":
        plan = choose(asked, target).plan
        assert plan is not None
        return load(plan.backend).build(plan)
    if (reason := load(name).reject(asked, target)) is not None:
        raise NotImplementedError(reason)
    plan = Plan(name, asked, target)
    if name == "hopper":
        from foci.backends.hopper.kernel import build_kernel

        return build_kernel(plan, own_backward=True)
    return load(name).build(plan)


def ours(name: str, tensors: list[Tensor], score: Any, mask: Any, jagged: dict[str, Any], dropout: float, *, backward: bool) -> Call:
    """A pass of one of foci's backends, without what is before it."""
    query, key, value = tensors
    bound = bind(score, mask, DEVICE)
    seed = torch.tensor([11], device=DEVICE) if dropout else None
    numbers = (bound.captures, bound.ints, bound.floats, 1 / math.sqrt(query.shape[3]), dropout, seed)
    operands = Operands(query, key, value, *numbers, **jagged)
    kernel = planned(name, asked_of(tensors, bound, jagged, dropout, backward=backward))
    if not backward:
        return repeat_forward(operands, kernel)
    results = kernel.forward(operands)
    # laid out as the result is
    return repeat_backward(operands, results, Cotangents(torch.randn_like(results.out)), kernel)


def tensors_of(row: Row, lengths: list[int], device: torch.device = DEVICE) -> list[Tensor]:
    batch, heads, length, dim = row.shape
    batch, length = (1, sum(lengths)) if lengths else (batch, length)
    kv_heads, keys = row.kv_heads or heads, row.keys or length
    shapes = ((heads, length, dim), (kv_heads, keys, dim), (kv_heads, keys, row.value_dim or dim))
    return [torch.randn(batch, *shape, device=device, dtype=torch.bfloat16) for shape in shapes]


def lengths_of(row: Row) -> list[int]:
    """Of a jagged row: log-normal, from 16 to the row's length."""
    if row.kind != "jagged":
        return []
    drawn = torch.randn(row.shape[0], generator=torch.Generator().manual_seed(11))
    return [int(n) for n in torch.exp(drawn * 1.2 + 6.4).clamp(16, row.shape[2]).int()]


def document_ids(length: int) -> Tensor:
    """Eight documents, cut at random."""
    marks = torch.zeros(length, dtype=torch.int32)
    marks[torch.randperm(length - 1, generator=torch.Generator().manual_seed(3))[:7] + 1] = 1
    return marks.cumsum(0).to(torch.int32)


def variant_of(row: Row) -> tuple[Any, Any]:
    """(score, mask) as functions of positions, as FlexAttention and foci both take them; None where there is none."""
    heads, length = row.shape[1], row.shape[2]
    ids = document_ids(length).to(DEVICE)
    slopes = torch.exp2(-8.0 / heads * torch.arange(1, heads + 1, device=DEVICE))

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    return {
        "window 1024": (None, lambda b, h, q, k: (q >= k) & (q - k < 1024)),
        "document": (None, lambda b, h, q, k: ids[q] == ids[k]),
        "ALiBi causal": (lambda s, b, h, q, k: s + slopes[h] * (k - q), causal),
        "softcap causal": (lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20.0), causal),
    }[row.kind]


def area(row: Row) -> float:
    """Pairs of query and key that one head attends to, all batch entries together."""
    batch, _, length, _ = row.shape
    if row.kind == "jagged":
        pairs = float(sum(n * n for n in lengths_of(row)))
    elif row.kind == "window 1024":
        pairs = batch * (min(1024, length) * length - min(1024, length) * (min(1024, length) - 1) / 2)
    elif row.kind == "document":
        pairs = batch * float((torch.bincount(document_ids(length)).double() ** 2).sum())
    else:
        pairs = batch * float(length) * (row.keys or length)
    return pairs / 2 if row.causal or "causal" in row.kind else pairs


def flops(row: Row, *, backward: bool) -> float:
    return (5.0 if backward else 2.0) * row.shape[1] * (row.shape[3] + (row.value_dim or row.shape[3])) * area(row)


def given_of(row: Row) -> tuple[Any, Any, dict[str, Any]]:
    """Score, mask and offsets of a row, as foci takes them."""
    lengths, (score, mask) = lengths_of(row), variant_of(row) if row.kind in VARIANTS else (None, None)
    cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    jagged = {"cu_q": cu, "cu_kv": cu, "max_q": max(lengths), "max_kv": max(lengths)} if lengths else {}
    return foci.Score(score) if score else None, foci.Mask(mask) if mask else masks.causal() if row.causal else None, jagged


def choice_of(row: Row, *, backward: bool) -> str:
    """The backend that the planner takes for a row."""
    score, mask, jagged = given_of(row)
    tensors = tensors_of(row, lengths_of(row), torch.device("meta"))
    plan = choose(asked_of(tensors, bind(score, mask, DEVICE), jagged, row.dropout, backward=backward), find_target(DEVICE)).plan
    return plan.backend if plan is not None else ""


def peers_of(row: Row, *, backward: bool) -> dict[str, Callable[[], Call]]:
    """What makes the call of each peer of a row, foci's backends first. Operands are the same for all."""
    lengths = lengths_of(row)
    tensors = tensors_of(row, lengths)
    *functions, jagged = given_of(row)
    call_backend = functools.partial(ours, score=functions[0], mask=functions[1], jagged=jagged, dropout=row.dropout, backward=backward)
    builders: dict[str, Callable[[], Call]] = {name: functools.partial(call_backend, name, tensors) for name in OURS}
    if row.kind in VARIANTS:
        builders["flex"] = functools.partial(flex, tensors, *variant_of(row), row.shape[2], backward=backward)
    elif row.kind == "jagged":
        # tokens first, as both take them
        packed, cu = [t[0].transpose(0, 1).contiguous() for t in tensors], jagged["cu_q"]
        builders["fa4"] = functools.partial(flash_varlen, packed, cu, max(lengths), causal=row.causal, backward=backward)
        builders["varlen"] = functools.partial(varlen, packed, cu, max(lengths), causal=row.causal, backward=backward)
    else:
        if not row.dropout:  # FlashAttention-4 drops none
            builders["fa4"] = functools.partial(
                flash, [t.transpose(1, 2).contiguous() for t in tensors], causal=row.causal, backward=backward
            )
        builders["cudnn"] = functools.partial(cudnn, tensors, row, backward=backward)
    return builders


def cudnn(tensors: list[Tensor], row: Row, *, backward: bool) -> Call:
    def run(*operands: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*operands, dropout_p=row.dropout, is_causal=row.causal, enable_gqa=bool(row.kv_heads))

    return passed(run, tensors, backward=backward)


def flash(tensors: list[Tensor], *, causal: bool, backward: bool) -> Call:
    from flash_attn.cute import flash_attn_func

    return passed(lambda *operands: flash_attn_func(*operands, causal=causal), tensors, backward=backward)


def flash_varlen(tensors: list[Tensor], cu: Tensor, most: int, *, causal: bool, backward: bool) -> Call:
    from flash_attn.cute import flash_attn_varlen_func

    spans = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": most, "max_seqlen_k": most}
    return passed(lambda *operands: flash_attn_varlen_func(*operands, **spans, causal=causal), tensors, backward=backward)


def varlen(tensors: list[Tensor], cu: Tensor, most: int, *, causal: bool, backward: bool) -> Call:
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if causal else (-1, -1)
    return passed(lambda *operands: varlen_attn(*operands, cu, cu, most, most, window_size=window), tensors, backward=backward)


def flex(tensors: list[Tensor], score: Any, mask: Any, length: int, *, backward: bool) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    block = create_block_mask(mask, None, None, length, length, DEVICE.type)
    compiled = torch.compile(flex_attention, dynamic=False)
    return passed(lambda *operands: compiled(*operands, score_mod=score, block_mask=block), tensors, backward=backward)


def repeated(call: Call, times: int) -> Call:
    def run() -> None:
        for _ in range(times):
            call()

    return run


def timed(peers: dict[str, Callable[[], Call]], rounds: int = 6, calls: int = 1) -> dict[str, float]:
    """Milliseconds of each peer that runs, of so many calls in a row."""
    good: dict[str, Call] = {}
    for name, make in peers.items():
        try:
            call = make()
            call(), call()
            torch.cuda.synchronize()
            good[name] = call
        except Exception as error:
            print(f"  {name}: {type(error).__name__} {str(error)[-200:]}", flush=True)
    times = in_turns({name: repeated(call, calls) for name, call in good.items()}, rounds=rounds, each=3, ahead=AHEAD * (calls > 1))
    return {name: ms / calls for name, ms in times.items()}


def _planned(row: Row) -> Row:
    """What the planner and schedules see of a row."""
    batch, heads, length, dim = row.shape
    return replace(row, name="", calls=1, shape=(bucket(batch), heads, bucket(length), dim), keys=bucket(row.keys or length))


def fill(rows: list[Row], peers: list[str], processes: int) -> None:
    """Compiles what the rows take in both passes, each peer in a process of its own, forked before CUDA starts."""
    # gradients, if asked for, do not change ours of the forward
    distinct = {_planned(row): row for row in rows}.values()
    pairs = [(row, peer) for peer in peers for row in distinct if peer in OURS or (peer == "flex") == (row.kind in VARIANTS)]
    waiting = [(*pair, True) for pair in pairs] + [(*pair, False) for pair in pairs if pair[1] not in OURS]
    alive = 0
    while waiting or alive:
        if waiting and alive < processes:
            row, peer, backward = waiting.pop(0)
            alive += 1
            if os.fork() == 0:
                try:
                    builder = peers_of(row, backward=backward).get(peer)
                    timed({peer: builder} if builder is not None else {}, rounds=0)
                finally:
                    os._exit(0)
        else:
            os.wait()
            alive -= 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backward", action="store_true", help="time the backward pass, not the forward")
    parser.add_argument("--compile", action="store_true", help="only fill the caches, for both passes")
    parser.add_argument("--peers", default="fa4,flex,hopper,triton", help="whose caches --compile fills")
    parser.add_argument("--list", action="store_true", help="print the rows and run nothing")
    parser.add_argument("groups", nargs="*", metavar="group", help=", ".join(GROUPS))
    options = parser.parse_args()
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"no such group: {', '.join(sorted(unknown))}")
    groups = options.groups or list(GROUPS)
    if options.list:
        for group in groups:
            for row in GROUPS[group]:
                print(
                    f"{group:15s} {row.name:17s} {','.join(map(str, row.shape)):16s} {flops(row, backward=options.backward) / 1e12:.3f} TFLOP"
                )
        return
    rows = [row for group in groups for row in GROUPS[group]]
    if options.compile:
        fill(rows, options.peers.split(","), max(2, (os.cpu_count() or 2) - 2))
        return
    name, machine = "backward" if options.backward else "forward", facts("cuda")
    for row in rows:
        times_ms, choice = timed(peers_of(row, backward=options.backward), calls=row.calls), choice_of(row, backward=options.backward)
        rates = {who: flops(row, backward=options.backward) / ms / 1e9 for who, ms in times_ms.items()}
        for who, ms in times_ms.items():
            line = {"row": row.name, "shape": row.shape, "who": who, f"{name}_ms": ms, f"{name}_tflops": rates[who], "choice": choice}
            if "OUT" in os.environ:
                with (Path(os.environ["OUT"]) / f"hopper_{name}.jsonl").open("a") as file:
                    file.write(json.dumps(line | machine) + "\n")
        shown = "  ".join(f"{who} {rate:.0f}" for who, rate in rates.items())
        print(f"{row.name:17s} {','.join(map(str, row.shape)):16s} {shown}  ({choice} chosen)", flush=True)


if __name__ == "__main__":
    main()
