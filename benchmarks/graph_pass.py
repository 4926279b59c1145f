"""How much of torch.compile's time is foci's pass: GPT-2 of transformers, attention in plain torch, a training step, on the CPU.

Processor seconds of this process: what the C++ compiler takes in processes of its own is not counted, so that the share is an upper
bound. The pass alone is timed on graphs of 6 to 48 layers.

    python benchmarks/graph_pass.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import measure
import torch
import transformers
from torch import fx
from torch._inductor.utils import fresh_cache

from foci.fusion import fuse, inductor_backend


def model_of(layers: int) -> Any:
    config = transformers.GPT2Config(n_layer=layers, n_embd=64, n_head=4, vocab_size=128, use_cache=False)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def compiled(layers: int, *, with_inductor: bool) -> dict[str, object]:
    """Compiles one training step, `whole` with Inductor, else up to foci's pass."""
    torch._dynamo.reset()
    spent = {"pass s": 0.0, "nodes": 0, "sites": 0}  # over all graphs of the step

    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        begin = time.process_time()
        fused = fuse(graph_module, inputs)
        spent["pass s"] += time.process_time() - begin
        spent["nodes"] += len(graph_module.graph.nodes)
        spent["sites"] += sum(site.fused for site in fused.sites)
        return inductor_backend.hand_over(fused.graph_module, inputs, "inductor", {}) if with_inductor else fused.graph_module

    model = model_of(layers)
    tokens = torch.arange(64).reshape(2, 32)
    mask = torch.ones_like(tokens)
    with fresh_cache():
        begin = time.process_time()
        model_compiled = torch.compile(model, backend=backend)
        model_compiled(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()
        total = time.process_time() - begin
    result: dict[str, object] = {"layers": layers, **{name: round(value, 3) for name, value in spent.items()}}
    if with_inductor:
        result |= {"first step s": round(total, 2), "share %": round(100 * spent["pass s"] / total, 2)}
    return result


def main() -> None:
    compiled(1, whole=False)  # imports, and caches of the first use
    rows = [compiled(layers, whole=False) for layers in (6, 12, 24, 48)]
    rows.append(compiled(24, whole=True))
    measure.write("graph_pass", [{**row, **measure.facts(), "transformers": transformers.__version__} for row in rows])


if __name__ == "__main__":
    main()
