"""First calls of new functions on the GPU at hand: seconds until the result is there, and what Triton compiled meanwhile.

    python benchmarks/gpu_first_call.py [--backends triton,hopper] [--functions a,b] [--flex] [--out FILE]

Triton's cache is a folder of its own, empty at first. A plain call comes before, so that Python's imports, the CUDA context and the
kernels that do not depend on the function are not counted. Run it where nothing else runs: compiling takes a processor's time.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="first_call_"))

import torch
import triton
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import foci

SHAPE = (2, 16, 2048, 128)


class New(NamedTuple):
    """A function nobody called before."""

    name: str
    score: Any
    mask: Any


def functions() -> Iterator[New]:
    """Scores and masks whose code differs."""
    slopes = torch.rand(16, device="cuda")
    ids = torch.arange(2048, device="cuda") // 300
    yield New("causal", None, lambda b, h, q, k: q >= k)
    yield New("ALiBi causal", lambda s, b, h, q, k: s + slopes[h] * (k - q), lambda b, h, q, k: q >= k)
    yield New("softcap window", lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20.0), lambda b, h, q, k: (q >= k) & (q - k < 512))
    yield New("document", None, lambda b, h, q, k: ids[q] == ids[k])


class Compiled:
    """Kernels that Triton compiled, by name: milliseconds of each stage."""

    def __init__(self) -> None:
        self.kernels: list[dict[str, Any]] = []
        triton.knobs.compilation.listener = self._note

    def _note(self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        if not cache_hit:
            stages = {"init": times.ir_initialization} | dict(times.lowering_stages)
            self.kernels.append({"kernel": src.name} | {name: round(us / 1e3) for name, us in stages.items()})

    def take(self) -> list[dict[str, Any]]:
        taken, self.kernels = self.kernels, []
        return taken


def inputs() -> list[Tensor]:
    return [torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


def ours(new: New, tensors: list[Tensor]) -> Tensor:
    return foci.attention(*tensors, score=new.score and foci.Score(new.score), mask=new.mask and foci.Mask(new.mask))


def flex(new: New, tensors: list[Tensor]) -> Tensor:
    blocks = create_block_mask(new.mask, None, None, SHAPE[2], SHAPE[2], "cuda")
    return torch.compile(flex_attention, dynamic=False)(*tensors, score_mod=new.score, block_mask=blocks)


def lines(who: str, run: Callable[[New, list[Tensor]], Tensor], compiled: Compiled, names: set[str]) -> Iterator[dict[str, Any]]:
    """A line for each function: its first forward, and the first backward after it."""
    tensors = inputs()
    # as a model hands it back: that of a plain sum has no strides, and takes kernels of its own
    dout = torch.randn_like(tensors[0])
    run(New("plain", None, lambda b, h, q, k: q >= 0), tensors).backward(dout)
    compiled.take()
    for new in functions():
        if names and new.name not in names:
            continue
        forward, out = seconds(lambda new=new: run(new, tensors))
        before = compiled.take()
        backward, _ = seconds(functools.partial(out.backward, dout))
        again, _ = seconds(lambda new=new: run(new, tensors))
        yield {
            "function": new.name, "who": who, "forward_s": round(forward, 3), "backward_s": round(backward, 3), "again_ms": round(again * 1e3, 2),
            "forward_kernels": before, "backward_kernels": compiled.take(),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", default="triton,hopper", help="of foci")
    parser.add_argument("--functions", default="", help="names, separated by commas; all by default")
    parser.add_argument("--flex", action="store_true", help="FlexAttention compiled as well")
    parser.add_argument("--out", type=Path, help="a file to add a line to for each function")
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "commit": commit}
    compiled = Compiled()
    for who in (*options.backends.split(","), *(("flex",) if options.flex else ())):
        with foci.use(who if who != "flex" else "triton"):
            for line in lines(who, flex if who == "flex" else ours, compiled, set(filter(None, options.functions.split(",")))):
                print(
                    f"{who:8s}{line['function']:16s} forward {line['forward_s']:6.2f} s, backward {line['backward_s']:6.2f} s", flush=True
                )
                for kernel in line["forward_kernels"] + line["backward_kernels"] if who != "flex" else ():
                    print("    " + ", ".join(f"{k} {v}" for k, v in kernel.items()), flush=True)
                if options.out is not None:
                    with options.out.open("a") as file:
                        file.write(json.dumps(line | about) + "\n")


if __name__ == "__main__":
    main()
