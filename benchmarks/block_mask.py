"""Time and peak memory of making block masks, each in a process of its own. Prints one JSON line per case.

    python benchmarks/block_mask.py > benchmarks/results/block_mask.jsonl  # every case
    python benchmarks/block_mask.py document 131072                        # one case

On one thread, so that the barriers of a busy machine are not what is measured; CPU seconds and the load stand beside.
Peak memory is what the process's resident set grew by at most while the block mask was made (Linux only); the limits are those the project
promises, and the exit status says whether they hold.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from measure import reset_peak, status

import foci
from foci.mask_mods import create_block_mask

BLOCK = 128
SECONDS, MEGABYTES = 2.0, 200.0


def _documents(length: int) -> torch.Tensor:
    starts = torch.randint(0, length, (length // 4096,), generator=torch.Generator().manual_seed(0))
    return torch.zeros(length, dtype=torch.int32).scatter_(0, starts, 1).cumsum(0, dtype=torch.int32)


CASES: dict[str, Callable[[int], foci.Mask]] = {
    "causal": lambda n: foci.masks.causal(),
    "window": lambda n: foci.masks.causal() & foci.masks.window(1024),
    "document": lambda n: foci.masks.document(_documents(n)),
    "causal document": lambda n: foci.masks.document(_documents(n)) & foci.masks.causal(),
    "natten": lambda n: foci.masks.natten((n // 256, 256), 13),
    "block diffusion": lambda n: foci.masks.block_diffusion(n // 2, block=512),
}
LENGTHS = (16384, 131072)


def measure_case(name: str, length: int) -> dict[str, object]:
    """One case, made once in this process after a tiny one that loads what is loaded lazily."""
    torch.set_num_threads(1)
    create_block_mask(CASES[name](4096), None, None, 4096, 4096, device="cpu", BLOCK_SIZE=BLOCK)
    mask = CASES[name](length)
    before = reset_peak()
    start, start_cpu = time.perf_counter(), time.process_time()
    block_mask = create_block_mask(mask, None, None, length, length, device="cpu", BLOCK_SIZE=BLOCK)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    megabytes = status("VmHWM") - before
    return {
        "case": name,
        "length": length,
        "block": BLOCK,
        "seconds": round(seconds, 4),
        "cpu_seconds": round(cpu_seconds, 4),
        "peak_mb": round(megabytes, 1),
        "sparsity_percent": round(block_mask.sparsity(), 3),
        "within_limits": seconds < SECONDS and megabytes < MEGABYTES,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
    }


def main() -> int:
    """All cases, or the one named on the command line; 1 when a limit is broken."""
    if len(sys.argv) == 3:
        result = measure_case(sys.argv[1], int(sys.argv[2]))
        print(json.dumps(result), flush=True)
        return 0 if result["within_limits"] else 1
    codes = [
        subprocess.run([sys.executable, os.path.abspath(__file__), name, str(length)], check=False).returncode
        for name in CASES
        for length in LENGTHS
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
