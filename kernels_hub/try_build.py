"""What a build for the `kernels` library must do, in an environment without foci: `make hub` runs this.

    python kernels_hub/try_build.py kernels_hub/dist

The build is loaded as the kernels library loads it: a package under the name in its metadata, from a folder that is not on the path.
"""

import importlib
import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import torch


def load(folder: Path):
    name = json.loads((folder / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def formula(q, k, v, *, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """FlashAttention's definition in plain torch, in float64; q [B, S, H, D]."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * distance.abs()
    left, right = window[0], 0 if causal else window[1]
    keep = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        keep &= distance <= left
    if right >= 0:
        keep &= distance >= -right
    return (scores.masked_fill(~keep, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def main() -> None:
    folder = Path(sys.argv[1]).resolve() / "build" / "torch-cuda"
    assert importlib.util.find_spec("foci") is None, "foci is installed, so that this shows nothing"
    for path in folder.rglob("*.py"):
        assert not re.search(r"^\s*(from|import) foci\b", path.read_text(), re.MULTILINE), f"{path} imports foci by name"
    kernel = load(folder)
    assert not any(name.split(".")[0] == "foci" for name in sys.modules)
    assert not hasattr(torch.ops.foci, "attention")
    assert hasattr(getattr(torch.ops, kernel.__name__), "attention")

    torch.manual_seed(0)
    q = torch.randn(2, 50, 4, 32, requires_grad=True)
    k, v = torch.randn(2, 2, 70, 2, 32).unbind(0)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])
    for options in ({}, {"causal": True}, {"window": (8, 3)}, {"causal": True, "window": (8, -1), "softcap": 5.0, "slopes": slopes}):
        names = {"window": "window_size", "slopes": "alibi_slopes"}
        with kernel.observe() as log:
            out = kernel.flash_attn_func(q, k, v, **{names.get(name, name): value for name, value in options.items()})
        expected = formula(q, k, v, **options)
        torch.testing.assert_close(out, expected.float(), atol=2e-5, rtol=2e-5)
        grads = [torch.autograd.grad(o.sum(), q)[0] for o in (out * out, expected * expected)]
        torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)
        print(f"{sorted(options) or 'plain'}: {log.calls[0].backend}")

    offsets_q, offsets_k = torch.tensor([0, 20, 50], dtype=torch.int32), torch.tensor([0, 30, 70], dtype=torch.int32)
    packed = kernel.flash_attn_varlen_func(q[0], k[0], v[0], offsets_q, offsets_k, 30, 40, causal=True)
    parts = [
        formula(q[:1, a:b], k[:1, c:d], v[:1, c:d], causal=True)[0].float()
        for (a, b), (c, d) in zip(((0, 20), (20, 50)), ((0, 30), (30, 70)), strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(parts), atol=2e-5, rtol=2e-5)
    print(f"packed: as {kernel.__name__}")

    if importlib.util.find_spec("triton") is not None:
        for name in ("hopper", "triton"):
            importlib.import_module(f"{kernel.__name__}.backends.{name}")
        check = importlib.import_module(f"{kernel.__name__}.backends.self_check")
        child = check._CHILD.rpartition("os.write(")[0] + "os.write(answer, check_kernels.__name__.encode())"
        words = [sys.executable, "-c", child, json.dumps(sys.path), "cuda:0", str(folder / "__init__.py")]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert done.stdout == f"{kernel.__name__}.check_kernels", done
        print("GPU backends: imported, here and in the process of the self-check")

    compiled = torch.compile(lambda q: kernel.flash_attn_func(q, k, v, causal=True), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), formula(q, k, v, causal=True).float(), atol=2e-5, rtol=2e-5)
    print("compiled: one graph")


main()
