"""The problems whose kernels a common pack holds, as calls of tensors on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import foci
from foci import masks, scores

__all__ = ["COMMON", "Problem", "names_for"]

_SEQUENCES = (300, 212, 512)
_LENGTH = sum(_SEQUENCES)
_HEADS = 8


class Problem(NamedTuple):
    """A common problem.

    Attributes:
        name: kind, head dim, dtype and passes.
        run: computes it, forward and, if its name says so, backward.
    """

    name: str
    run: Callable[[], None]


def _dense(mask: Any = None, score: Any = None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: foci.attention(q, k, v, mask=mask, score=score)


def _documents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ids = torch.arange(q.shape[2], device=q.device) // 300
    return foci.attention(q, k, v, mask=masks.causal() & masks.document(ids))


def _varlen(window: tuple[int, int]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        offsets = torch.tensor([0, *_SEQUENCES], device=q.device).cumsum(0).to(torch.int32)
        q, k, v = (t[0].transpose(0, 1).contiguous() for t in (q, k, v))
        longest = max(_SEQUENCES)
        return foci.varlen_attn(q, k, v, offsets, offsets, longest, longest, window_size=window)

    return call


_ALIBI = torch.tensor([2.0 ** -(n + 1) for n in range(_HEADS)])
_KINDS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plain": _dense(),
    "causal": _dense(masks.causal()),
    "window": _dense(masks.window(256, 0)),
    "document": _documents,
    "varlen": _varlen((-1, -1)),
    "varlen causal": _varlen((-1, 0)),
    "softcap": _dense(masks.causal(), scores.softcap(30.0)),
    "alibi": lambda q, k, v: foci.attention(q, k, v, mask=masks.causal(), score=scores.alibi(_ALIBI.to(q.device))),
}
_DIMS = (64, 96, 128, 192, 256)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""float32 on the CPU alone: see `names_for`."""


def _tensors(
    batch: int, heads: tuple[int, int], lengths: tuple[int, int], dim: int, dtype: torch.dtype, *, needs_grad: bool
) -> list[Tensor]:
    sizes = ((heads[0], lengths[0]), (heads[1], lengths[1]), (heads[1], lengths[1]))
    return [torch.zeros(batch, h, s, dim, dtype=dtype).requires_grad_(needs_grad) for h, s in sizes]


def _run(call: Callable[[Tensor, Tensor, Tensor], Tensor], dim: int, dtype: torch.dtype, *, needs_grad: bool, is_packed: bool) -> None:
    for batch in (1,) if is_packed else (2, 16):  # a short and a full grid may have kernels of their own
        out = call(*_tensors(batch, (_HEADS, _HEADS), (_LENGTH, _LENGTH), dim, dtype, needs_grad=needs_grad))
        if needs_grad:
            out.backward(torch.zeros_like(out))  # type: ignore[no-untyped-call]


def _decode(dim: int, dtype: torch.dtype) -> None:
    for kv_heads in (_HEADS, 2, 1):
        q, k, v = _tensors(4, (_HEADS, kv_heads), (1, 4096), dim, dtype, needs_grad=False)
        foci.attention(q, k, v)
        foci.attention(q, k, v, mask=masks.causal_lower_right())


def _all() -> dict[str, Problem]:
    runs: dict[str, Callable[[], None]] = {}
    for dtype in _DTYPES:
        for dim in _DIMS:
            end = f"D {dim} {str(dtype).removeprefix('torch.')}"
            for kind, call in _KINDS.items():
                for needs_grad in (False, True):
                    name = f"{kind} {end} {'forward and backward' if needs_grad else 'forward'}"
                    packed = kind.startswith("varlen")
                    runs[name] = lambda c=call, d=dim, t=dtype, g=needs_grad, p=packed: _run(c, d, t, needs_grad=g, is_packed=p)  # type: ignore[misc]
            runs[f"decode {end} forward"] = lambda d=dim, t=dtype: _decode(d, t)  # type: ignore[misc]
    return {name: Problem(name, run) for name, run in runs.items()}


COMMON = _all()


def names_for(arch: str) -> list[str]:
    """Names of the problems that a common pack holds: on GPUs, those in half precision."""
    return [name for name in COMMON if arch == "cpu" or "float32" not in name]
