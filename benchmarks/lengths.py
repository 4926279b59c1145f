"""Stalls at new lengths: twelve training steps of a Llama with 12 layers, each batch of a length seen first, then the same again.

    python benchmarks/lengths.py [--device cuda] [--quick] [--only foci,sdpa,flex,fa4,none]

The model is written out below, with random weights: RMSNorm, rotary embeddings, grouped query heads, SwiGLU. Only its attention differs:
foci, torch's scaled_dot_product_attention, FlexAttention compiled, FlashAttention-4 where it is installed, and none, which is what a new
length costs the rest of the model. A stall is what a step takes longer than the same step later. Before the first step the model takes one
step of another length with torch's SDPA, whatever is measured: a process's first step loads CUDA's libraries, which is not counted as
attention's. From empty caches, and in a second process with what the first left on disk. Results go to benchmarks/results, or to the
folder OUT.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from attending import IMPLEMENTATIONS, attend, is_there, run_child, seconds
from measure import facts, write
from torch import Tensor, nn

LAYERS = 12


class Sizes(NamedTuple):
    """Of a model and its batches."""

    width: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int
    dtype: torch.dtype
    warm: tuple[int, int]  # (B, S) of the step before
    batches: tuple[tuple[int, int], ...]  # (B, S)


SIZES = {
    "cuda": Sizes(
        1024, 16, 4, 64, 32000, torch.bfloat16, (2, 384),
        ((2, 1024), (2, 700), (4, 333), (1, 2048), (8, 129), (2, 1537), (3, 512), (1, 3001), (16, 64), (2, 900), (1, 4096), (4, 255)),
    ),
    "cpu": Sizes(
        128, 4, 2, 32, 512, torch.float32, (2, 48),
        ((2, 100), (2, 70), (4, 33), (1, 200), (8, 17), (2, 150), (3, 64), (1, 257), (16, 8), (2, 90), (1, 300), (4, 55)),
    ),
}  # fmt: skip


class Layer(nn.Module):
    """One block of a Llama."""

    implementation = "sdpa"

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        joined = (sizes.heads + 2 * sizes.kv_heads) * sizes.dim
        self.qkv = nn.Linear(sizes.width, joined, bias=False)
        self.out = nn.Linear(sizes.heads * sizes.dim, sizes.width, bias=False)
        self.gate_up = nn.Linear(sizes.width, 6 * sizes.width, bias=False)
        self.down = nn.Linear(3 * sizes.width, sizes.width, bias=False)
        self.before, self.between = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        s, (batch, length, _) = self.sizes, x.shape
        heads = self.qkv(self.before(x)).view(batch, length, -1, s.dim).transpose(1, 2)
        q, k, v = heads.split((s.heads, s.kv_heads, s.kv_heads), 1)
        attended = attend(self.implementation, "causal", _rotate(q, angles), _rotate(k, angles), v)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(self.between(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)


class Llama(nn.Module):
    """A language model with random weights."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.dim = sizes.dim
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        rates = 10000.0 ** (-torch.arange(0, self.dim, 2, device=tokens.device) / self.dim)
        angles, x = positions[:, None] * rates, self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, angles)
        return self.head(self.norm(x))


def child(implementation: str, device: str) -> None:
    sizes = SIZES[device]
    torch.manual_seed(0)
    model = Llama(sizes).to(device, sizes.dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def step(tokens: Tensor) -> None:
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(torch.randint(sizes.vocabulary, sizes.warm, device=device))
    for layer in model.layers:
        layer.implementation = implementation
    batches = [torch.randint(sizes.vocabulary, size, device=device) for size in sizes.batches]
    new = [seconds(lambda tokens=tokens: step(tokens), device)[0] for tokens in batches]
    known = [min(seconds(lambda tokens=tokens: step(tokens), device)[0] for _ in range(3)) for tokens in batches]
    stalls = [max(0.0, a - b) for a, b in zip(new, known, strict=True)]
    row = {
        "new_s": sum(new), "known_s": sum(known), "stall_s": sum(stalls), "first_stall_s": stalls[0], "worst_later_stall_s": max(stalls[1:]),
        "median_known_s": statistics.median(known),
    }  # fmt: skip
    print(
        json.dumps({name: round(value, 4) for name, value in row.items()} | {"stalls_s": [round(stall, 3) for stall in stalls]}), flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="the peers only from empty caches")
    parser.add_argument("--only", default=",".join((*IMPLEMENTATIONS, "none")))
    parser.add_argument("--child", metavar="IMPLEMENTATION", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.device)
        return
    rows = []
    for implementation in filter(lambda each: is_there(each, options.device), options.only.split(",")):
        with tempfile.TemporaryDirectory(prefix="lengths_") as caches:
            for state in ("empty", "on disk"):
                if state == "on disk" and options.quick and implementation != "foci":
                    continue
                for row in run_child(__file__, [implementation, "--device", options.device], Path(caches)):
                    rows.append({"who": implementation, "caches": state, **row, **facts(options.device)})
                    print({name: rows[-1][name] for name in ("who", "caches", *row)}, flush=True)
    write(f"lengths-{options.device}", rows, quiet=True)


if __name__ == "__main__":
    main()
