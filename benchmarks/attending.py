"""What the benchmarks of first calls and new lengths share: attention by foci and by its peers, and processes with caches of their own."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

WINDOW = 128
DOCUMENT = 100

IMPLEMENTATIONS = ("foci", "sdpa", "flex", "fa4")


def is_there(implementation: str, device: str) -> bool:
    """Whether a peer is installed and runs on the device."""
    if implementation != "fa4":
        return True
    try:
        from flash_attn.cute import flash_attn_func  # noqa: F401
    except Exception:  # whatever an import of another project raises
        return False
    return device == "cuda"


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], Any], device: str) -> tuple[float, Any]:
    """(seconds until the result is there, result)."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return time.perf_counter() - start, result


def attend(implementation: str, kind: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of dense [B, H, S, D], or of packed [T, H, D] with `kind` "varlen".

    Raises:
        NotImplementedError: if the peer cannot express it.
    """
    return {"foci": _foci, "sdpa": _sdpa, "flex": _flex, "fa4": _fa4, "none": _none}[implementation](kind, q, k, v)


def document_offsets(tokens: int, device: torch.device) -> Tensor:
    return torch.tensor([*range(0, tokens, DOCUMENT), tokens], dtype=torch.int32, device=device)


def _foci(kind: str, q: Tensor, k: Tensor, v: Tensor) -> Any:
    import foci
    from foci import masks, scores

    if kind == "varlen":
        offsets = document_offsets(q.shape[0], q.device)
        return foci.varlen_attn(q, k, v, offsets, offsets, DOCUMENT, DOCUMENT, mask=masks.causal())
    if kind == "document":
        ids = torch.arange(q.shape[2], device=q.device) // DOCUMENT
        return foci.attention(q, k, v, mask=lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx))
    options: dict[str, Any] = {
        "plain": {},
        "decode": {},
        "causal": {"mask": masks.causal()},
        "window": {"mask": masks.window(WINDOW, 0)},
        "softcap": {"mask": masks.causal(), "score": scores.softcap(20.0)},
        "new function": {"mask": masks.causal(), "score": lambda s, b, h, q_idx, kv_idx: s + torch.sin((q_idx - kv_idx) * 0.01)},
    }
    return foci.attention(q, k, v, **options[kind])


def _none(kind: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The values instead of their average, as many heads as the query has: what everything but attention costs."""
    return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def _sdpa(kind: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    options: dict[str, Any] = {"enable_gqa": True} if kind != "varlen" and q.shape[1] != k.shape[1] else {}
    if kind in ("plain", "decode"):
        return F.scaled_dot_product_attention(q, k, v, **options)
    if kind == "causal":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    if kind in ("window", "document"):
        q_idx, kv_idx = (torch.arange(t.shape[2], device=q.device) for t in (q, k))
        distance = q_idx[:, None] - kv_idx
        alike = q_idx[:, None] // DOCUMENT == kv_idx // DOCUMENT
        keep = (distance >= 0) & ((distance <= WINDOW) if kind == "window" else alike)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, **options)
    if kind == "varlen" and q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        offsets = document_offsets(q.shape[0], q.device)
        try:
            return varlen_attn(q, k, v, offsets, offsets, DOCUMENT, DOCUMENT, window_size=(-1, 0))
        except TypeError:  # torch 2.10
            return varlen_attn(q, k, v, offsets, offsets, DOCUMENT, DOCUMENT, is_causal=True)
    raise NotImplementedError(f"sdpa has no {kind}")


_compiled: list[Any] = []


def _flex(kind: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if kind == "varlen":
        raise NotImplementedError("flex_attention has no packed form")
    if not _compiled:
        _compiled.append(torch.compile(flex_attention))
    masks: dict[str, Any] = {
        "window": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= WINDOW),
        "document": lambda b, h, q_idx, kv_idx: (q_idx // DOCUMENT == kv_idx // DOCUMENT) & (q_idx >= kv_idx),
        **dict.fromkeys(("causal", "softcap", "new function"), lambda b, h, q_idx, kv_idx: q_idx >= kv_idx),
    }
    scores: dict[str, Any] = {
        "softcap": lambda s, b, h, q_idx, kv_idx: 20.0 * torch.tanh(s / 20.0),
        "new function": lambda s, b, h, q_idx, kv_idx: s + torch.sin((q_idx - kv_idx) * 0.01),
    }
    blocks = create_block_mask(masks[kind], None, None, q.shape[2], k.shape[2], q.device) if kind in masks else None
    result: Tensor = _compiled[0](q, k, v, score_mod=scores.get(kind), block_mask=blocks, enable_gqa=q.shape[1] != k.shape[1])
    return result


def _fa4(kind: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    def first(result: Any) -> Tensor:
        return result[0] if isinstance(result, tuple) else result

    if kind == "varlen":
        offsets = document_offsets(q.shape[0], q.device)
        return first(flash_attn_varlen_func(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True))
    options: dict[str, Any] = {
        "plain": {},
        "decode": {},
        "causal": {"causal": True},
        "window": {"window_size": (WINDOW, 0)},
        "softcap": {"causal": True, "softcap": 20.0},
    }
    if kind not in options:
        raise NotImplementedError(f"FlashAttention-4 has no {kind}")
    return first(flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), **options[kind])).transpose(1, 2)


# ---- processes with caches of their own ----


def run_child(script: str, arguments: Sequence[str], caches: Path, timeout: float = 600.0) -> list[dict[str, Any]]:
    """The lines of JSON that a script prints in a process of its own, whose compilers cache below `caches`."""
    folders = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "FOCI_CACHE_DIR": "foci", "CUTE_DSL_CACHE_DIR": "cute"}
    environment = environment_with_byte_code() | {name: str(caches / folder) for name, folder in folders.items()}
    command = [sys.executable, script, "--child", *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return [{"error": f"longer than {timeout:.0f} s"}]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        complaint = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        lines.append({"error": complaint[0] if complaint else f"exit code {done.returncode}"})
    return lines


IMPORTS = """
import importlib, pkgutil, foci
for module in pkgutil.walk_packages(foci.__path__, "foci."):
    try: importlib.import_module(module.name)
    except Exception: pass  # it needs what is not installed
for name in ("torch._dynamo", "torch._inductor.compile_fx", "torch.nn.attention.flex_attention", "triton.experimental.gluon"):
    try: importlib.import_module(name)
    except Exception: pass
"""


@functools.cache
def environment_with_byte_code() -> dict[str, str]:
    """The environment of processes whose modules have their byte code on disk, as those of installed packages have."""
    folder = tempfile.TemporaryDirectory(prefix="byte_code_")
    atexit.register(folder.cleanup)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = folder.name
    subprocess.run([sys.executable, "-c", IMPORTS], env=environment, capture_output=True, check=False)
    return environment
