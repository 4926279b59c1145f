"""Models with hand-written attention under torch.compile: Inductor as they are, Inductor rewritten on sdpa, and foci as they are.

GPT-2 small and BERT base of transformers, no dropout, from random parameters: bfloat16 on a GPU; on the CPU two layers in
float32. Every variant has its own model with the same parameters. A training step is forward with the loss, and backward.
The first step includes all compilation, from an empty cache of Inductor. Times on the CPU are seconds of processors, of this thread for
a step, of this process and its compilers for the first one, so that they are those of a machine that does nothing else.

    python benchmarks/graph_models.py --model gpt2 --size 4x2048
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import measure
import torch
import transformers
from torch._inductor.utils import fresh_cache

import foci
from foci.graph import summary

VARIANTS = ("foci", "inductor, sdpa", "inductor, eager attention", "eager")


def model_of(name: str, length: int, layers: int, attention: str, device: str, dtype: torch.dtype) -> Any:
    """The same parameters for every kind of attention."""
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=layers, n_positions=length, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False
        )
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    else:
        config = transformers.BertConfig(
            num_hidden_layers=layers, max_position_embeddings=length, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
        model = transformers.AutoModelForMaskedLM.from_config(config, attn_implementation=attention)
    return model.to(device, dtype)


def compiled(variant: str, model: Any) -> Any:
    if variant == "eager":
        return model
    torch._dynamo.reset()
    return foci.compile(model) if variant == "foci" else torch.compile(model)


def training(model: Any, tokens: torch.Tensor) -> Callable[[], object]:
    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    return step


def inference(model: Any, tokens: torch.Tensor) -> Callable[[], object]:
    def step() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=tokens).logits

    return step


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def alone(lock: str | None) -> Iterator[None]:
    """While no other process is inside with the same file."""
    if lock is None:
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def clock(device: str) -> float:
    """Seconds: of the wall for a GPU; on the CPU of all processors, for this process and those it waited for."""
    return time.perf_counter() if device == "cuda" else sum(os.times()[:4])


def timed(step: Callable[[], object], device: str, reps: int) -> float:
    """Median milliseconds; on a GPU by events, on the CPU of the one thread."""
    times = []
    for _ in range(reps):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.thread_time()
            step()
            times.append(1e3 * (time.thread_time() - begin))
    return sorted(times)[len(times) // 2]


def peak_gb(step: Callable[[], object], model: Any, device: str) -> float:
    """On a GPU all that is allocated, parameters too; on the CPU what the step, its gradients included, adds to the process."""
    model.zero_grad(set_to_none=True)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        wait(device)
        return torch.cuda.max_memory_allocated() / 1e9
    before = measure.reset_peak()
    step()
    return (measure.status("VmHWM") - before) / 1e3


def row(
    name: str, variant: str, mode: str, batch: int, length: int, layers: int, device: str, dtype: torch.dtype, reps: int, lock: str | None
) -> dict[str, object]:
    attention = "sdpa" if "sdpa" in variant else "eager"
    tokens = torch.randint(0, 30000, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)
    plain = model_of(name, length, layers, attention, device, dtype).train(mode == "training")
    model = compiled(variant, plain)
    step = (training if mode == "training" else inference)(model, tokens)
    with fresh_cache(), foci.observe() as log:
        begin = clock(device)
        result = step()
        wait(device)
        first = clock(device) - begin
    with alone(lock):
        for _ in range(2):
            step()
        wait(device)
        milliseconds = timed(step, device, reps)
    found = {
        "model": name,
        "variant": variant,
        "mode": mode,
        "batch": batch,
        "length": length,
        "layers": layers,
        "dtype": str(dtype).removeprefix("torch."),
        "ms": round(milliseconds, 3),
        "peak GB": round(peak_gb(step, plain, device), 3),
        "first step s": round(first, 1),
        "result": round(float(result.float().mean()), 6),
        "sites": summary(log.fusions) if log.fusions else None,
        "backends": sorted({call.backend for call in (*log.calls, *log.backward_calls)}),
        **measure.facts(device),
        "transformers": transformers.__version__,
    }
    del model, plain, step, result
    if device == "cuda":
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=("gpt2", "bert"), action="append")
    parser.add_argument("--mode", choices=("training", "inference"), action="append")
    parser.add_argument("--variant", choices=VARIANTS, action="append")
    parser.add_argument("--size", action="append", help="batch x length, such as 4x2048")
    parser.add_argument("--layers", type=int, help="12 on a GPU, 2 on the CPU, if not given")
    parser.add_argument("--lock", help="a file that is locked while timing, for runs side by side")
    parser.add_argument("--name", default="graph_models", help="of the file of results")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
        torch._inductor.config.compile_threads = 1  # compilers are this process's own children, whose time is counted
    on_gpu = options.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    sizes = [tuple(map(int, size.split("x"))) for size in options.size or (("4x2048", "16x512") if on_gpu else ("1x512",))]
    rows = []
    for batch, length in sizes:
        for name in options.model or ("gpt2", "bert"):
            for mode in options.mode or ("training", "inference"):
                for variant in options.variant or VARIANTS:
                    layers = options.layers or (12 if on_gpu else 2)
                    rows.append(
                        row(name, variant, mode, batch, length, layers, options.device, dtype, reps=10 if on_gpu else 3, lock=options.lock)
                    )
                    measure.write(f"{options.name}-{options.device}", rows)


if __name__ == "__main__":
    main()
