"""The blocked backend on the CPU beside torch's paths: time and peak memory over the length.

Masks are made before the clock starts, for every implementation alike.

python benchmarks/blocked_cpu.py              # every case, a process each for memory
python benchmarks/blocked_cpu.py --memory IMPLEMENTATION MASK LENGTH DIRECTION
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import torch
from measure import facts, interleaved, medians, reset_peak, status, write
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import foci

HEADS, DIM = 1, 64
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
MASKS: dict[str, foci.Mask | None] = {"none": None, "causal": foci.masks.causal(), "window 512": foci.masks.window(512)}
# torch's paths that write the S x S scores: beyond this length they take gigabytes.
LONGEST_DENSE = 4096
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


# Each maker does once what a user would keep between calls, a dense mask or a block mask, and returns what a call does.


def _blocked(mask: str, length: int) -> Attention:
    named = MASKS[mask]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with foci.use("blocked"):
            return foci.attention(q, k, v, mask=named)

    return run


def _dense(mask: str, length: int) -> Tensor | None:
    named = MASKS[mask]
    return None if named is None else foci.create_mask(named, None, None, length, length, device="cpu")[0, 0]


def _math(mask: str, length: int) -> Attention:
    dense = _dense(mask, length)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)

    return run


def _flash(mask: str, length: int) -> Attention:
    causal = mask == "causal"
    dense = None if causal else _dense(mask, length)
    return lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, is_causal=causal)


def _flex(mask: str, length: int) -> Attention:
    named = MASKS[mask]
    block_mask = None if named is None else create_block_mask(named.function, None, None, length, length, device="cpu")
    return lambda q, k, v: flex_attention(q, k, v, block_mask=block_mask)  # type: ignore[return-value]


IMPLEMENTATIONS: dict[str, Callable[[str, int], Attention]] = {
    "foci blocked": _blocked,
    "torch math": _math,
    "torch flash": _flash,
    "flex eager": _flex,
}


def _applies(implementation: str, mask: str, length: int) -> bool:
    if implementation == "torch flash":
        return mask in ("none", "causal") or length <= LONGEST_DENSE
    return implementation == "foci blocked" or length <= LONGEST_DENSE


def _call(implementation: str, mask: str, length: int, direction: str) -> Callable[[], object]:
    grad = direction == "forward+backward"
    q, k, v = (torch.randn(1, HEADS, length, DIM, requires_grad=grad) for _ in range(3))
    attention = IMPLEMENTATIONS[implementation](mask, length)

    def run() -> object:
        out = attention(q, k, v)
        return torch.autograd.grad(out.sum(), (q, k, v)) if grad else out

    return run


def _memory(implementation: str, mask: str, length: int, direction: str) -> float:
    """Megabytes over the inputs, in a process of its own."""
    command = [sys.executable, __file__, "--memory", implementation, mask, str(length), direction]
    return float(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]))


def main() -> None:
    rows: list[dict[str, object]] = []
    for length in LENGTHS:
        for mask in MASKS:
            for direction in ("forward", "forward+backward"):
                names = [n for n in IMPLEMENTATIONS if _applies(n, mask, length) and not (n == "flex eager" and direction != "forward")]
                times = medians(interleaved({n: _call(n, mask, length, direction) for n in names}, seconds=0.3, rounds=2))
                for name in names:
                    row = {"benchmark": "blocked", "implementation": name, "mask": mask, "length": length, "direction": direction}
                    memory = _memory(name, mask, length, direction)
                    rows.append(
                        {**row, "ms": round(times[name] * 1e3, 3), "peak_mb": round(memory, 1), "heads": HEADS, "dim": DIM, **facts()}
                    )
                    print(json.dumps(rows[-1]), flush=True)
    write("blocked_cpu", rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory"]:
        case = (sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
        _call(case[0], case[1], 64, case[3])()
        run = _call(*case)
        before = reset_peak()
        run()
        print(json.dumps(status("VmHWM") - before))
    else:
        main()
