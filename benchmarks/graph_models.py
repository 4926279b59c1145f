"""Models with hand-written attention under torch.compile: Inductor as they are, Inductor rewritten on sdpa, and foci as they are.

Rewritten means that attention is one call of sdpa, causal or not, without the mask that transformers makes for it even where every token
counts: with that mask torch takes slower kernels, for BERT none at all ("inductor, sdpa of transformers").

GPT-2 small and BERT base of transformers, no dropout, from random parameters: bfloat16 on a GPU; on the CPU two layers in
float32. Every variant has its own model with the same parameters. A training step is forward with the loss, and backward.
The first step includes all compilation, from an empty cache of Inductor, but not what a process does once: imports, starting
workers, Dynamo's first look at transformers; a small model of one layer on a GPU, on the CPU one of the row's sizes, eager attention under
Inductor, goes before it all. Times on
the CPU are seconds of processors, of this thread for a step, of this process and its compilers for the first one, so that they are
those of a machine that does nothing else.

    python benchmarks/graph_models.py --model gpt2 --size 4x2048

On a small machine, in a few minutes, two processes side by side:

    for model in gpt2 bert; do
        python benchmarks/graph_models.py --device cpu --model $model --size 1x512 --size 1x2048 --layers 1 --vocabulary 4096 \\
            --lock /tmp/lock --name graph_models-$model &
    done

The variants of a row of the table are timed in turns, in one process, and written then; first steps are printed when they are done.
Processes that share a `--lock` compile side by side, which makes first steps longer than alone, and time one at a time. `--profile`
adds, for a GPU, how long it was busy in a step, and lists its kernels: a step that is longer waits for the host.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import measure
import torch
import transformers
from torch._inductor.utils import fresh_cache

import foci
from foci.fusion import summary

# A variant and the attention of transformers that it has.
ATTENTION = {
    "foci": "eager",
    "inductor, sdpa": "sdpa_without_mask",
    "inductor, sdpa of transformers": "sdpa",
    "inductor, eager attention": "eager",
    "eager": "eager",
}
VARIANTS = ("foci", "inductor, sdpa", "inductor, eager attention", "eager")


def sdpa_without_mask(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=bool(module.is_causal), scale=scaling)
    return out.transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register("sdpa_without_mask", sdpa_without_mask)


def model_of(name: str, length: int, layers: int, vocabulary: int | None, attention: str, device: str, dtype: torch.dtype) -> Any:
    """The same parameters for every kind of attention."""
    torch.manual_seed(0)
    words = {} if vocabulary is None else {"vocab_size": vocabulary}
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=layers, n_positions=length, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False, **words
        )
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    else:
        config = transformers.BertConfig(
            num_hidden_layers=layers, max_position_embeddings=length, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **words
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
def held(lock: str | None, how: int) -> Iterator[None]:
    """A lock of processes: many compile at once, one times. Who waits keeps others from beginning: else one that is to time would wait
    until nobody compiles by chance."""
    if lock is None:
        yield
        return
    with open(lock, "w") as file:
        with open(f"{lock}.turn", "w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            fcntl.flock(file, how)
        yield


def clock(device: str) -> float:
    """Seconds: of the wall for a GPU; on the CPU of all processors, for this process and those it waited for."""
    return time.perf_counter() if device == "cuda" else sum(os.times()[:4])


def timed(step: Callable[[], object], device: str, reps: int) -> float:
    """Median milliseconds of a turn; on a GPU by events, on the CPU of the one thread."""
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


def peak_gb(step: Callable[[], object], model: Any, device: str, before: float) -> float:
    """What a step takes at its peak: on a GPU with its parameters, on the CPU what it adds to the process, its gradients included.

    On the CPU it misses what foci's kernels keep for their next call.
    """
    model.zero_grad(set_to_none=True)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        wait(device)
        return torch.cuda.max_memory_allocated() / 1e9 - before
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that stays with the process would be taken again unseen
    before = measure.reset_peak()
    step()
    return (measure.status("VmHWM") - before) / 1e3


def kernels(step: Callable[[], object]) -> float:
    """Milliseconds that the GPU is busy in a step; prints its kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            step()
        wait("cuda")
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)
    for row in rows[:16]:
        print(f"    {row.self_device_time_total / 3000:.4f} ms, {row.count // 3} times: {row.key[:100]}", flush=True)
    return sum(row.self_device_time_total for row in rows) / 3000


@dataclass
class Compiled:
    """A model whose first step is done, and what is known of it so far."""

    step: Callable[[], object]
    facts: dict[str, object]


def first_step(name: str, variant: str, mode: str, batch: int, length: int, layers: int, vocabulary: int | None, device: str) -> Compiled:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    before = torch.cuda.memory_allocated() / 1e9 if device == "cuda" else 0.0
    tokens = torch.randint(0, vocabulary or 30000, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)
    plain = model_of(name, length, layers, vocabulary, ATTENTION[variant], device, dtype).train(mode == "training")
    step = (training if mode == "training" else inference)(compiled(variant, plain), tokens)
    with fresh_cache(), foci.observe() as log:
        begin = clock(device)
        result = float(step().float().mean())
        wait(device)
        first = clock(device) - begin
    facts = {
        "model": name,
        "variant": variant,
        "mode": mode,
        "batch": batch,
        "length": length,
        "layers": layers,
        "vocabulary": plain.config.vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
        "peak GB": round(peak_gb(step, plain, device, before), 3),
        "first step s": round(first, 1),
        "result": round(result, 6),
        "sites": summary(log.fusions) if log.fusions else None,
        "backends": sorted({call.backend for call in (*log.calls, *log.backward_calls)}),
        **measure.facts(device),
        "transformers": transformers.__version__,
    }
    print({name: facts[name] for name in ("model", "variant", "mode", "batch", "length", "first step s", "peak GB")}, flush=True)
    return Compiled(step, facts)


def once(name: str, mode: str, batch: int, length: int, layers: int, vocabulary: int | None, device: str) -> None:
    """What a process does once, of which the first variant would take six seconds of a step of twenty; of given sizes, as torch
    remembers what it found out of operations with those: two seconds for the first variant."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = model_of(name, length, layers, vocabulary, "eager", device, dtype).train(mode == "training")
    with fresh_cache():
        torch._dynamo.reset()
        (training if mode == "training" else inference)(
            torch.compile(model), torch.zeros(batch, length, dtype=torch.int64, device=device)
        )()


TURNS: Final = 3
_SMALL: Final = (1, 64, 1, 512)


def rows_of(compiled_models: Sequence[Compiled], device: str, reps: int, *, profile: bool) -> list[dict[str, object]]:
    """Times variants in turns: on one core, at one clock, whatever else the machine does."""
    for each in compiled_models:
        for _ in range(2 if device == "cuda" else 1):
            each.step()
    wait(device)
    times = [[timed(each.step, device, reps) for each in compiled_models] for _ in range(TURNS)]
    rows = [{**each.facts, "ms": round(statistics.median(turn[n] for turn in times), 3)} for n, each in enumerate(compiled_models)]
    for each, row in zip(compiled_models, rows, strict=True):
        if profile:
            print({name: row[name] for name in ("model", "variant", "mode", "batch", "length")})
            row["GPU busy ms"] = round(kernels(each.step), 3)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=("gpt2", "bert"), action="append")
    parser.add_argument("--mode", choices=("training", "inference"), action="append")
    parser.add_argument("--variant", choices=tuple(ATTENTION), action="append")
    parser.add_argument("--size", action="append", help="batch x length, such as 4x2048")
    parser.add_argument("--layers", type=int, help="12 on a GPU, 2 on the CPU, if not given")
    parser.add_argument("--vocabulary", type=int, help="the model's own, if not given")
    parser.add_argument("--lock", help="a file for processes side by side")
    parser.add_argument("--profile", action="store_true", help="the kernels of a step, on a GPU")
    parser.add_argument("--name", default="graph_models", help="of the file of results")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)
        torch._inductor.config.compile_threads = 1  # compilers are this process's own children, whose time is counted
    sizes = [tuple(map(int, size.split("x"))) for size in options.size or (("4x2048", "16x512") if on_gpu else ("1x512",))]
    variants, models, modes = options.variant or VARIANTS, options.model or ("gpt2", "bert"), options.mode or ("inference", "training")
    layers = options.layers or (12 if on_gpu else 2)
    rows: list[dict[str, object]] = []
    os.environ.setdefault("FOCI_CACHE_DIR", tempfile.mkdtemp())
    torch.compile(lambda x: x.relu() + 1)(torch.ones(8, device=options.device))
    for (batch, length), name, mode in itertools.product(sizes, models, modes):
        with held(options.lock, fcntl.LOCK_SH):
            once(name, mode, *((batch, length, layers, options.vocabulary) if not on_gpu else _SMALL), options.device)
            compiled_models = [
                first_step(name, variant, mode, batch, length, layers, options.vocabulary, options.device) for variant in variants
            ]
        with held(options.lock, fcntl.LOCK_EX):
            rows += rows_of(compiled_models, options.device, 10 if on_gpu else 1, profile=options.profile and on_gpu)
        del compiled_models
        measure.write(f"{options.name}-{options.device}", rows)


if __name__ == "__main__":
    main()
