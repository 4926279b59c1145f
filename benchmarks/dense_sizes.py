"""Dense attention of many sizes on the GPU at hand: the planner's choice beside cuDNN, forward and backward.

    python benchmarks/dense_sizes.py --compile     # only fill the caches, in processes side by side
    python benchmarks/dense_sizes.py               # times, a line each

bfloat16; medians of CUDA events around ten calls in a row, behind work that keeps the device busy until the host has called them, both
sides by turns. Lines go to $OUT/dense_sizes.jsonl where OUT is set; `benchmarks/hopper_report.py` makes the table of docs/hopper.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from hopper_attention import DEVICE, about, asked_of, ours, passed, timed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foci import masks
from foci.binding import bind
from foci.planner import choose, target_of

CALLS = 10


@dataclass(frozen=True)
class Size:
    """A problem: batch, heads of queries and of keys, lengths of both, head dims of keys and of values; and its mask."""

    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int
    dim: int
    value_dim: int
    causal: bool = False

    @property
    def shape(self) -> str:
        """As the table has it."""
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        length = f"{self.rows}" if self.rows == self.keys else f"{self.rows}x{self.keys}"
        dim = f"{self.dim}" if self.dim == self.value_dim else f"{self.dim}/{self.value_dim}"
        return f"{self.batch},{heads},{length},{dim}"

    def tensors(self, device: torch.device = DEVICE) -> list[Tensor]:
        """Query, key and value."""
        b, d = self.batch, self.dim
        shapes = ((b, self.heads, self.rows, d), (b, self.kv_heads, self.keys, d), (b, self.kv_heads, self.keys, self.value_dim))
        return [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]


def _of(dim: int, *sizes: tuple[int, int, int], kv_heads: int = 0, value_dim: int = 0) -> tuple[Size, ...]:
    """Of (batch, heads, length), without a mask and under the causal one."""
    found = [Size(b, h, kv_heads or h, n, n, dim, value_dim or dim) for b, h, n in sizes]
    return tuple(replace(size, causal=causal) for size in found for causal in (False, True))


SIZES = (
    *_of(32, (64, 8, 256), (16, 8, 1024), (4, 8, 4096)),
    *_of(64, (256, 16, 64), (64, 12, 128), (64, 12, 197), (64, 16, 256), (16, 12, 384), (16, 12, 512), (1, 12, 512), (8, 16, 768)),
    *_of(64, (8, 12, 1000), (4, 16, 1024), (16, 16, 1024), (2, 12, 2048), (8, 12, 2048), (1, 12, 4096), (1, 12, 16384)),
    *_of(64, (8, 32, 1024), (2, 32, 4096), kv_heads=8),
    *_of(72, (8, 16, 729)),
    *_of(80, (16, 16, 577)),
    *_of(96, (16, 12, 512), (4, 12, 2048)),
    *_of(128, (64, 16, 128), (32, 16, 256), (16, 16, 512), (1, 16, 512), (8, 16, 768), (1, 16, 1000), (8, 16, 1024), (8, 32, 1024)),
    *_of(128, (2, 32, 2048), (8, 16, 2048), (1, 32, 4096), (2, 16, 8192)),
    *_of(128, (8, 32, 512), (4, 32, 1024), (1, 32, 8192), kv_heads=8),
    *_of(192, (4, 16, 2048), value_dim=128),
    *_of(256, (8, 8, 512), (4, 8, 2048)),
    Size(16, 12, 12, 512, 77, 64, 64),
    Size(2, 10, 10, 4096, 77, 64, 64),
    Size(8, 16, 16, 128, 1024, 64, 64),
    Size(2, 8, 8, 4096, 1024, 128, 128),
)


def own(size: Size, *, backward: bool) -> Callable[[], Any]:
    """A pass of the planner's choice."""
    mask = masks.causal() if size.causal else None
    return ours("foci", size.tensors(), None, mask, {}, 0.0, backward=backward)


def cudnn(size: Size, *, backward: bool) -> Callable[[], Any]:
    """A pass of cuDNN's, as PyTorch calls it."""

    def run(*given: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*given, is_causal=size.causal, enable_gqa=size.heads != size.kv_heads)

    return passed(run, size.tensors(), backward=backward)


def choice_of(size: Size, *, backward: bool) -> str:
    """The backend that the planner takes."""
    bound = bind(None, masks.causal() if size.causal else None, DEVICE)
    plan = choose(asked_of(size.tensors(torch.device("meta")), bound, {}, 0.0, backward=backward), target_of(DEVICE)).plan
    return plan.backend if plan is not None else ""


def fill(size: Size) -> None:
    """Compiles what a problem takes."""
    for backward in (False, True):
        own(size, backward=backward)()


def measure(size: Size, facts: dict[str, str]) -> dict[str, object]:
    """Microseconds of both passes and sides."""
    line: dict[str, object] = {"shape": size.shape, "causal": size.causal, **facts}
    for name, backward in (("forward", False), ("backward", True)):
        sides = {"foci": functools.partial(own, size, backward=backward), "cudnn": functools.partial(cudnn, size, backward=backward)}
        line |= {f"{name}_{who}_us": 1e3 * ms for who, ms in timed(sides, rounds=3, calls=CALLS).items()}
        line[f"{name}_choice"] = choice_of(size, backward=backward)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", action="store_true", help="only fill the caches")
    if parser.parse_args().compile:
        with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 2) - 1)) as pool:
            pool.map(fill, random.Random(0).sample(SIZES, len(SIZES)), chunksize=1)
        return
    facts = about()
    for size in SIZES:
        line = measure(size, facts)
        if "OUT" in os.environ:
            with (Path(os.environ["OUT"]) / "dense_sizes.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        times = [line.get(f"{name}_{who}_us") for name in ("forward", "backward") for who in ("foci", "cudnn")]
        shown = "  ".join("-" if us is None else f"{us:.1f}" for us in times)
        print(f"{'causal' if size.causal else 'dense ':6s} {size.shape:20s} {shown}", flush=True)


if __name__ == "__main__":
    main()
