"""First calls of a process on a GPU: from empty caches, from empty caches with a kernel pack, and with what each left on disk.

    foci kernels build --arch sm_90 --set "causal D 128 bfloat16,decode D 128 bfloat16" -o PACK    # on any machine
    python benchmarks/kernel_packs.py PACK                                                          # fills docs/kernel-packs.md

Each state is a process of its own. Imports of torch and foci, the device's context and what torch loads at a process's first backward pass
are not counted, imports within the calls are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from attending import environment_with_byte_code
from measure import facts, write
from pages import fill, markdown, results

import foci

RESULT = "kernel_packs"


def seconds(call: Callable[[], object]) -> tuple[object, float]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return result, round(time.perf_counter() - start, 3)


def child() -> None:
    warm = torch.randn(64, 64, device="cuda", requires_grad=True)
    (warm @ warm).backward(warm.detach())  # with a gradient: torch then imports sympy
    row = {}
    for length, names in ((2048, ("forward_s", "backward_s")), (1333, ("new_forward_s", "new_backward_s"))):
        query, key, value = (torch.randn(2, 8, length, 128, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
        out, row[names[0]] = seconds(lambda q=query, k=key, v=value: foci.attention(q, k, v, mask=foci.masks.causal()))
        gradient = torch.randn_like(out)
        _, row[names[1]] = seconds(lambda o=out, g=gradient: o.backward(g))
    key, value = (torch.randn(4, 8, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    _, row["decode_s"] = seconds(lambda: foci.attention(key[:, :, :1].contiguous(), key, value))
    print(json.dumps(row), flush=True)


def measured(folder: str) -> dict[str, float]:
    environment = environment_with_byte_code() | {
        "FOCI_CACHE_DIR": f"{folder}/foci",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "FOCI_QUIET": "1",
    }
    done = subprocess.run([sys.executable, __file__, "--child"], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(pack: str) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as packed:
        (Path(packed) / "foci").mkdir(mode=0o700)
        environment = {**os.environ, "FOCI_CACHE_DIR": f"{packed}/foci"}
        take = f"from foci import kernel_packs; kernel_packs.import_pack({pack!r})"
        subprocess.run([sys.executable, "-c", take], env=environment, check=True)
        for state, folder in (("empty", empty), ("empty, with a pack", packed), ("of an earlier process", empty)):
            rows.append({"caches": state, **measured(folder), **facts("cuda")})
    write(RESULT, rows)


def table() -> str:
    names = ("caches", "forward_s", "backward_s", "new_forward_s", "new_backward_s", "decode_s")
    head = ["caches", "forward", "backward", "a new length, forward", "backward", "decoding"]
    return markdown(head, [[row[name] for name in names] for row in results(RESULT)])


if __name__ == "__main__":
    if sys.argv[1:] == ["--child"]:
        child()
    else:
        main(*sys.argv[1:])
        fill("kernel-packs.md", {"kernel-packs": table()})
