"""TransformerEncoder with a padding mask: foci.nn beside torch.nn, padded SDPA and sequences packed by hand.

6 layers, d_model 768, 12 heads, feedforward 2048, no dropout, log-normal lengths from 16 to 512. On a GPU bfloat16 and a
batch of 32; on the CPU float32 and a batch of 6, or 32 with `--full`, which takes minutes. A training step is forward and
backward of a weighted sum of the tokens' outputs, in the layout in which each form has them; inference runs under
inference_mode. Ratios are medians over interleaved rounds. With `--threads 1` on the CPU, times are the processor's, so that they are
those of a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import functools
import itertools
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import measure
import torch
from torch import Tensor
from torch.nn import functional as F

import foci
import foci.nn

LAYERS, WIDTH, HEADS, LONGEST = 6, 768, 12, 512


def lengths_of(batch: int) -> list[int]:
    """Log-normal, the longest 512."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(batch, generator=generator).mul(0.8).add(4.69).exp().long().clamp(16, LONGEST)
    return [LONGEST, *drawn[1:].tolist()]


def encoder(nn, device: str, dtype: torch.dtype) -> torch.nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, dropout=0.0, batch_first=True, device=device, dtype=dtype)
    return nn.TransformerEncoder(layer, LAYERS)


def by_hand(model: torch.nn.Module, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """The encoder's layers, written out for tensors [..., E]; `attend` takes [..., H, D]."""
    for layer in model.layers:
        attention = layer.self_attn
        qkv = F.linear(x, attention.in_proj_weight, attention.in_proj_bias).unflatten(-1, (3, HEADS, -1))
        out = attend(*qkv.unbind(-3)).flatten(-2)
        x = layer.norm1(x + attention.out_proj(out))
        x = layer.norm2(x + layer.linear2(F.relu(layer.linear1(x))))
    return x


def padded_attention(hidden: Tensor):
    keep = ~hidden[:, None, None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=keep).transpose(1, 2)

    return attend


def packed_attention(lengths: list[int], device: str):
    """Flash attention of each sequence: torch's variable-length call on a GPU, one call for each on the CPU."""
    if device == "cuda":
        from torch.nn.attention.varlen import varlen_attn

        offsets = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        return lambda q, k, v: varlen_attn(q, k, v, offsets, offsets, max(lengths), max(lengths))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(t.split(lengths) for t in (q, k, v)))
        return torch.cat([F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in part))[0].transpose(0, 1) for part in parts])

    return attend


class Form(torch.nn.Module):
    """A form as a module of the batch's tensors, which `make_graphed_callables` takes."""

    def __init__(self, module: torch.nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module = module
        self.call = call

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.call(self.module, *tensors)


class Forms(NamedTuple):
    """Each way to compute the same encoder of the same batch: outputs [T, E], or padded, [B, S, E]; and the batch.

    `wholes` are those captured as one graph, and `graphed` those that torch makes callables of, with their arguments.
    """

    calls: dict[str, Callable[[], Tensor]]
    modules: dict[str, torch.nn.Module]
    wholes: dict[str, Callable[[], Tensor]]
    graphed: dict[str, tuple[Form, tuple[Tensor, ...]]]
    lengths: list[int]
    rows: Tensor

    def tokens(self, out: Tensor) -> Tensor:
        """[T, E] of either."""
        return out if out.dim() == 2 else out.flatten(0, 1)[self.rows]

    def like(self, weights: Tensor, out: Tensor) -> Tensor:
        """Weights [T, E] in the layout of an output, zeros for padding."""
        return weights if out.dim() == 2 else torch.zeros_like(out).flatten(0, 1).index_copy(0, self.rows, weights).view_as(out)


def forwards(batch: int, device: str, dtype: torch.dtype) -> Forms:
    torch.manual_seed(0)
    lengths = lengths_of(batch)
    hidden = torch.arange(LONGEST, device=device) >= torch.tensor(lengths, device=device)[:, None]
    x = torch.randn(batch, LONGEST, WIDTH, device=device, dtype=dtype)
    rows = (~hidden).flatten().nonzero().squeeze(1)
    tokens = x.flatten(0, 1)[rows]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = encoder(torch.nn, device, dtype)
    ours = foci.nn.convert(copy.deepcopy(theirs))
    sdpa, packed, flat = copy.deepcopy(theirs), copy.deepcopy(theirs), copy.deepcopy(theirs)
    flat.enable_nested_tensor = False  # the way into nested tensors waits for the device, which a graph cannot
    on_padded, on_packed = padded_attention(hidden), packed_attention(lengths, device)
    nested = torch.nested.nested_tensor([x[n, :length] for n, length in enumerate(lengths)], layout=torch.jagged)

    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    packing = foci.nn.Packing(offsets, max(lengths), (batch, LONGEST))
    replayed = foci.nn.capture(copy.deepcopy(ours))
    rolled_masks = itertools.cycle([hidden.roll(n, 0) for n in range(batch)])
    calls = {
        "foci.nn": lambda: ours(x, src_key_padding_mask=hidden),
        "foci.nn, another mask in each call": lambda: ours(x, src_key_padding_mask=next(rolled_masks)),
        "foci.nn, nested input": lambda: ours(nested).values(),
        "foci.nn, packed input": lambda: ours(tokens, src_key_padding_mask=packing),
        "foci.nn, captured": lambda: replayed(x, src_key_padding_mask=hidden),
        "foci.nn, captured, packed input": lambda: replayed(tokens, src_key_padding_mask=packing),
        "torch.nn": lambda: theirs(x, src_key_padding_mask=hidden),
        "padded SDPA": lambda: by_hand(sdpa, x, on_padded),
        "packed by hand": lambda: by_hand(packed, tokens, on_packed),
    }
    modules = {name: replayed if "captured" in name else ours for name in calls if name.startswith("foci")}
    modules |= {"torch.nn": theirs, "padded SDPA": sdpa, "packed by hand": packed}
    wholes = {name: calls[name] for name in ("foci.nn, packed input", "packed by hand", "padded SDPA")}
    graphed = {
        "torch.nn": (Form(flat, lambda m, x, hidden: m(x, src_key_padding_mask=hidden)), (x, hidden)),
        "packed by hand": (Form(copy.deepcopy(packed), lambda m, x: by_hand(m, x, on_packed)), (tokens,)),
    }
    return Forms(calls, modules, {**wholes, "torch.nn": lambda: flat(x, src_key_padding_mask=hidden)}, graphed, lengths, rows)


def training_step(forward: Callable[[], Tensor], module: torch.nn.Module, weights: Tensor) -> Callable[[], None]:
    def step() -> None:
        module.zero_grad(set_to_none=True)
        (forward() * weights).sum().backward()

    return step


def inference(forward: Callable[[], Tensor]) -> Callable[[], None]:
    def step() -> None:
        with torch.inference_mode():
            forward()

    return step


def waited(step: Callable[[], None], device: str) -> Callable[[], None]:
    if device == "cpu":
        return step

    def run() -> None:
        step()
        torch.cuda.synchronize()

    return run


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The same step as one CUDA graph, which knows this batch alone: what the device needs, without the host."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def held_by_graphs(forms: Forms, mode: str, losses: dict[str, Tensor], steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Captures what there is to capture, and adds it to `steps`. Returns the megabytes that graphs hold for good."""
    held: dict[str, float] = {}
    for name in [name for name in steps if "captured" in name]:
        before = reserved()
        steps[name]()
        held[name] = reserved() - before
    for name, (form, inputs) in forms.graphed.items() if mode == "training" else ():
        before, called = reserved(), f"{name}, as graphed callable"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graphed = torch.cuda.make_graphed_callables(form, inputs)
        steps[called] = waited(training_step(functools.partial(graphed, *inputs), form, losses[name]), "cuda")
        held[called] = reserved() - before
    for name, call in forms.wholes.items():
        if name == "torch.nn" and mode == "inference":
            continue  # its nested fast path asks the device where the padding is
        module = forms.graphed["torch.nn"][0] if name == "torch.nn" else forms.modules[name]
        step = training_step(call, module, losses[name]) if mode == "training" else inference(call)
        before, called = reserved(), f"{name}, as a CUDA graph"
        steps[called] = waited(captured(step), "cuda")
        held[called] = reserved() - before
    return held


def reserved() -> float:
    """Megabytes that the allocator cannot give back."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() / 1e6


def peak(step: Callable[[], None], device: str) -> float:
    """Megabytes that a step needs beyond what there was before it, but for memory of graphs."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    ctypes.CDLL(None).malloc_trim(0)  # what earlier steps left in the allocator is no need of this one
    before = measure.reset_peak()
    step()
    return measure.status("VmHWM") - before


def compare(mode: str, batch: int, device: str, dtype: torch.dtype, *, rounds: int, with_graphs: bool) -> list[dict[str, object]]:
    forms = forwards(batch, device, dtype)
    calls, modules, lengths = forms.calls, forms.modules, forms.lengths
    if not with_graphs:
        calls = {name: call for name, call in calls.items() if "captured" not in name}
    for module in (*modules.values(), *(form for form, _ in forms.graphed.values())):
        module.train(mode == "training")
    with torch.no_grad():
        outputs = {name: call() for name, call in calls.items()}
    outs = {name: forms.tokens(out).float() for name, out in outputs.items()}
    for name, out in outs.items():
        torch.testing.assert_close(out, outs["packed by hand"], rtol=0, atol=1e-3 if dtype == torch.float32 else 0.25, msg=name)
    weights = torch.randn_like(outs["packed by hand"]).to(dtype)
    losses = {name: forms.like(weights, out) for name, out in outputs.items()}
    steps = {
        name: waited(training_step(call, modules[name], losses[name]) if mode == "training" else inference(call), device)
        for name, call in calls.items()
    }
    del outputs, outs
    graphs = held_by_graphs(forms, mode, losses, steps) if with_graphs else {}
    is_alone = device == "cpu" and torch.get_num_threads() == 1
    times = measure.interleaved(steps, seconds=2.0, rounds=rounds, clock=time.thread_time if is_alone else time.perf_counter)
    medians = measure.medians(times)
    with foci.observe() as log:
        steps["foci.nn"]()
    return [
        {
            "mode": mode,
            "what": name,
            "batch": batch,
            "tokens": sum(lengths),
            "padded tokens": batch * LONGEST,
            "dtype": str(dtype).removeprefix("torch."),
            "ms": round(1e3 * medians[name], 3),
            "times foci.nn": round(measure.ratio(times, name, "foci.nn"), 3),
            "peak MB": round(peak(step, device)),
            "graphs MB": round(graphs[name]) if name in graphs else None,
            "backend": log.calls[0].backend if name.startswith("foci") else None,
            **measure.facts(device),
        }
        for name, step in steps.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--full", action="store_true", help="a batch of 32 on the CPU too")
    parser.add_argument("--eager", action="store_true", help="on a GPU, without CUDA graphs")
    parser.add_argument("--mode", choices=("training", "inference"), action="append")
    parser.add_argument("--threads", type=int, help="on the CPU; torch's own number if not given")
    parser.add_argument("--rounds", type=int, help="20 on a GPU, 3 on the CPU, if not given")
    parser.add_argument("--calling-thread", action="store_true", help="all backward passes in the thread that calls them, not in the GPU's")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    batch, rounds = (32, 20) if on_gpu else (32, 1) if options.full else (6, 3)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with torch.autograd.set_multithreading_enabled(not options.calling_thread):
        rows = [
            row
            for mode in options.mode or ("training", "inference")
            for row in compare(
                mode, batch, options.device, dtype, rounds=options.rounds or rounds, with_graphs=on_gpu and not options.eager
            )
        ]
    kind = "" if on_gpu else "-full" * options.full + "-one-thread" * (options.threads == 1)
    kind += "-calling-thread" * options.calling_thread
    measure.write(f"modules-{options.device}{kind}", rows)


if __name__ == "__main__":
    main()
