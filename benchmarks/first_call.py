"""First calls: seconds of the first forward and backward of each kind of problem, of its first other length, and of a call then known.

    python benchmarks/first_call.py [--device cuda] [--quick] [--only foci,sdpa,flex,fa4]

foci beside torch's scaled_dot_product_attention, FlexAttention compiled, and FlashAttention-4 where it is installed. Each runs in two
processes: from empty caches, and with what the first left on disk. Python's imports, the device's context and what torch loads at a
process's first backward pass are not counted. Run it where nothing else runs. Results go to benchmarks/results, or to the folder OUT.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from attending import IMPLEMENTATIONS, attend, is_there, run_child, seconds
from measure import facts, write

KINDS = ("plain", "causal", "window", "document", "varlen", "decode", "softcap", "new function")
QUICK = ("causal", "document", "varlen", "decode", "new function")


def make(kind: str, length: int, device: str, *, needs_grad: bool) -> list[torch.Tensor]:
    """Query, key and value. On a GPU heads of 128 in bfloat16; on the CPU a small problem in float32."""
    heads, dim, dtype = (16, 128, torch.bfloat16) if device == "cuda" else (2, 64, torch.float32)
    rows = 1 if kind == "decode" else length
    shapes = [(length, heads, dim)] * 3 if kind == "varlen" else [(1, heads, rows, dim), *[(1, heads, length, dim)] * 2]
    return [torch.randn(shape, device=device, dtype=dtype).requires_grad_(needs_grad) for shape in shapes]


def measure(implementation: str, kind: str, device: str) -> dict[str, Any]:
    """Seconds of one kind of problem; `new_length_s` is the slowest of three lengths seen first."""
    needs_grad = kind != "decode"
    first, later_lengths = (2048, (1000, 3001, 4096)) if device == "cuda" else (200, (77, 256, 300))
    tensors = make(kind, first, device, needs_grad=needs_grad)
    row: dict[str, Any] = {"kind": kind}
    row["forward_s"], out = seconds(lambda: attend(implementation, kind, *tensors), device)
    if needs_grad:
        gradient = torch.randn_like(out)
        row["backward_s"], _ = seconds(lambda: out.backward(gradient), device)

    def step(inputs: list[torch.Tensor]) -> None:
        result = attend(implementation, kind, *inputs)
        if needs_grad:
            result.backward(torch.empty_like(result))

    lengths = [make(kind, length, device, needs_grad=needs_grad) for length in later_lengths]
    row["new_length_s"] = max(seconds(lambda inputs=inputs: step(inputs), device)[0] for inputs in lengths)
    row["known_s"] = statistics.median(seconds(lambda: step(tensors), device)[0] for _ in range(5))
    return row


def child(implementation: str, device: str, kinds: list[str]) -> None:
    import foci  # noqa: F401

    warm = torch.randn(64, 64, device=device, requires_grad=True)
    (warm @ warm).backward(warm.detach())  # with a gradient: torch then imports sympy
    for kind in kinds:
        try:
            row = measure(implementation, kind, device)
        except NotImplementedError:
            continue
        except Exception as error:  # a peer's: the table says so
            row = {"kind": kind, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"}
        print(json.dumps({name: round(value, 5) if isinstance(value, float) else value for name, value in row.items()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="fewer kinds, and only from empty caches for the peers")
    parser.add_argument("--only", default=",".join(IMPLEMENTATIONS))
    parser.add_argument("--child", nargs=2, metavar=("IMPLEMENTATION", "KINDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], options.device, options.child[1].split(","))
        return
    kinds, rows = ",".join(QUICK if options.quick else KINDS), []
    for implementation in filter(lambda each: is_there(each, options.device), options.only.split(",")):
        with tempfile.TemporaryDirectory(prefix="first_call_") as caches:
            for state in ("empty", "on disk"):
                if state == "on disk" and options.quick and implementation != "foci":
                    continue
                for row in run_child(__file__, [implementation, kinds, "--device", options.device], Path(caches)):
                    rows.append({"who": implementation, "caches": state, **row, **facts(options.device)})
                    print({name: rows[-1][name] for name in ("who", "caches", *row)}, flush=True)
    write(f"first_call-{options.device}", rows, quiet=True)


if __name__ == "__main__":
    main()
