"""Attentions of models on the CPU: eager, with every bias drawn, and as foci's rule decides (`fusion/materialise.py`).

"Drawn" sets the rule aside: every bias that can be is computed inside the kernel. The graph is
run as it is, without Inductor, so that columns differ in attention alone. Models have two layers and random parameters, no dropout.
Variants run in turns, and each number is a median of ratios to the eager run beside it, so that a busy machine moves them little.

    python benchmarks/graph_cost.py [--threads 2] [--seconds 4] [--dtype float32 bfloat16] [--mode inference training] [name ...]
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import measure
import torch
import transformers
from torch import Tensor, fx, nn

from foci.fusion import Site, fuse


class ChannelAttention(nn.Module):
    """Attention over channels, as in XCiT: each head's scores are features by features, the tokens are their head dim."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 4, 1).unbind(0)
        q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
        weights = ((q @ k.transpose(-2, -1)) * self.temperature).softmax(dim=-1)
        return self.out((weights @ v).permute(0, 3, 1, 2).reshape(batch, tokens, width))


def sam() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.SamVisionConfig(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=4, image_size=512, patch_size=16, global_attn_indexes=[1], mlp_dim=512
    )
    return transformers.models.sam.modeling_sam.SamVisionModel(config), {"pixel_values": torch.randn(1, 3, 512, 512)}


def swin() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.SwinConfig(image_size=128, patch_size=4, embed_dim=64, depths=[2], num_heads=[4], window_size=4)
    return transformers.SwinModel(config), {"pixel_values": torch.randn(4, 3, 128, 128)}


def beit() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.BeitConfig(
        hidden_size=384,
        num_hidden_layers=2,
        num_attention_heads=6,
        intermediate_size=768,
        image_size=224,
        patch_size=16,
        use_relative_position_bias=True,
        attn_implementation="eager",
    )
    return transformers.BeitModel(config), {"pixel_values": torch.randn(2, 3, 224, 224)}


def xcit() -> tuple[nn.Module, dict[str, Tensor]]:
    return nn.Sequential(ChannelAttention(384, 8), ChannelAttention(384, 8)), {"input": torch.randn(4, 784, 384)}


def text(kind: str, length: int = 384, **options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=512,
        hidden_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        intermediate_size=1024,
        use_cache=False,
        **options,
    )
    model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    return model, {"input_ids": torch.randint(1, 512, (2, length)), "attention_mask": torch.ones(2, length, dtype=torch.long)}


MODELS: Final[dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]]] = {
    "sam": sam,
    "deberta-v2": lambda: text("deberta-v2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=64),
    "beit": beit,
    "swin": swin,
    "xcit": xcit,
    "gpt2": lambda: text("gpt2"),
    "bert": lambda: text("bert"),
    "llama": lambda: text("llama", num_key_value_heads=2),
    "t5": lambda: (
        transformers.T5EncoderModel(transformers.T5Config(vocab_size=512, num_layers=2)),
        {"input_ids": torch.randint(1, 512, (2, 384))},
    ),
}


@contextmanager
def all_drawn() -> Iterator[None]:
    with (
        mock.patch("foci.fusion.match.estimate_prices", return_value=None),
        mock.patch("foci.fusion.sdpa_flex_calls.estimate_prices", return_value=None),
    ):
        yield


def fused(model: nn.Module, inputs: dict[str, Tensor], *, training: bool) -> tuple[Callable[..., Any], list[Site]]:
    sites: list[Site] = []

    def backend(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        fusion = fuse(module, examples)
        sites.extend(fusion.sites)
        return fusion.graph_module.forward

    function = torch.compile(copy.deepcopy(model), backend=backend, dynamic=False)
    run(function, inputs, training=training)
    return function, sites


def run(model: Callable[..., Any], inputs: dict[str, Tensor], *, training: bool) -> None:
    with torch.set_grad_enabled(training):
        out = model(**inputs)
        out = out if isinstance(out, Tensor) else out[0]
        if training:
            out.float().square().mean().backward()


def row(name: str, dtype: torch.dtype, *, training: bool, seconds: float, clock: Callable[[], float]) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, inputs = MODELS[name]()
    inputs = {key: t.to(dtype) if t.is_floating_point() else t for key, t in inputs.items()}
    for part in model.to(dtype).train(training).modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    with all_drawn():
        drawn, drawn_sites = fused(model, inputs, training=training)
    planned, sites = fused(model, inputs, training=training)
    variants = {"eager": model, "drawn": drawn, "foci": planned}
    calls = {key: functools.partial(run, function, inputs, training=training) for key, function in variants.items()}
    times = measure.interleaved(calls, seconds=seconds, rounds=7, clock=clock)
    print(f"{name:11s} {str(dtype)[6:]:9s} {'training' if training else 'inference':10s}", end="")
    print(f"eager {statistics.median(times['eager']) * 1e3:7.2f} ms", end="")
    for key, fusion_sites in (("drawn", drawn_sites), ("foci", sites)):
        ratio = statistics.median(t / e for t, e in zip(times[key], times["eager"], strict=True))
        print(f"   {key} x{ratio:.2f} ({sum(s.reason is None for s in fusion_sites)} of {len(fusion_sites)} fused)", end="")
    print()
    for said in dict.fromkeys(s.reason or s.variant for s in sites):
        print(f"    {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each row")
    parser.add_argument("--processor-time", action="store_true", help="count processor time, on a machine that does other things too")
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--mode", nargs="+", choices=("inference", "training"), default=["inference", "training"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.processor_time else time.perf_counter
    for name in args.names:
        for dtype in args.dtype:
            for mode in args.mode:
                row(name, getattr(torch, dtype), training=mode == "training", seconds=args.seconds, clock=clock)


if __name__ == "__main__":
    main()
