"""What is measured: a table of attention problems, each as foci is asked for it and as its peers are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

__all__ = ["CASES", "Asked", "Case", "Sizes", "sequence_lengths"]

Function: TypeAlias = Callable[..., Any] | None


@dataclass(frozen=True)
class Sizes:
    """B, Hq, Hkv, Sq, Skv, D of a problem; a jagged one has `batch` sequences of at most `q_len` tokens."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dim: int

    def __str__(self) -> str:
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        lengths = str(self.q_len) if self.q_len == self.kv_len else f"{self.q_len}x{self.kv_len}"
        return f"{self.batch},{heads},{lengths},{self.dim}"


@dataclass(frozen=True, eq=False)
class Asked:
    """One attention, for everybody.

    Attributes:
        mask, score: functions as foci and FlexAttention take them.
        attn_mask: the same as a tensor for scaled_dot_product_attention, bool or added; may require grad.
        is_causal, dropout_p: as scaled_dot_product_attention has them.
        has_sdpa: whether scaled_dot_product_attention can do it with the above.
    """

    mask: Function = None
    score: Function = None
    attn_mask: Tensor | None = None
    is_causal: bool = False
    dropout_p: float = 0.0
    has_sdpa: bool = True


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        name: of the row.
        build: the problem of given sizes, on a device, for a dtype.
        fit: the sizes it is measured at, from those of a square problem.
        layout: "dense", "jagged" or "paged".
        trains: whether there is a backward pass to measure.
    """

    name: str
    build: Callable[[Sizes, torch.device, torch.dtype], Asked]
    fit: Callable[[Sizes], Sizes] = lambda sizes: sizes
    layout: str = "dense"
    trains: bool = True


def sequence_lengths(sizes: Sizes) -> list[int]:
    """Log-normal lengths of sequences, the same at each call."""
    drawn = torch.randn(sizes.batch, generator=torch.Generator().manual_seed(11))
    return [int(n) for n in (sizes.q_len * torch.exp(drawn * 0.8 - 1.6)).clamp(16, sizes.q_len)]


def _causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def _plain(s: Sizes, device: torch.device, dtype: torch.dtype) -> Asked:
    return Asked()


def _is_causal(s: Sizes, device: torch.device, dtype: torch.dtype) -> Asked:
    return Asked(mask=_causal, is_causal=True)


def _window(s: Sizes, device: torch.device, dtype: torch.dtype) -> Asked:
    width = max(16, s.kv_len // 8)
    return Asked(mask=lambda b, h, q, kv: (q >= kv) & (q - kv < width), has_sdpa=False)


def _documents(count: int) -> Callable[[Sizes, torch.device, torch.dtype], Asked]:
    def build(s: Sizes, device: torch.device, dtype: torch.dtype) -> Asked:
        starts = torch.randperm(s.kv_len - 1, generator=torch.Generator().manual_seed(3))[: count - 1] + 1
        marks = torch.zeros(s.kv_len, dtype=torch.int32)
        marks[starts] = 1
        ids = marks.cumsum(0).to(device=device, dtype=torch.int32)
        return Asked(mask=lambda b, h, q, kv: ids[q] == ids[kv], has_sdpa=False)

    return build


def _alibi(s: Sizes, device: torch.device, dtype: torch.dtype) -> Asked:
    slopes = torch.exp2(-8.0 / s.heads * torch.arange(1, s.heads + 1, device=device))
    return Asked(mask=_causal, score=lambda score, b, h, q, kv: score + slopes[h] * (kv - q), has_sdpa=False)


def _softcap(s: Sizes, device: torch.device, dtype: torch.dtype) -> Asked:
    return Asked(mask=_causal, score=lambda score, b, h, q, kv: 20.0 * torch.tanh(score / 20.0), has_sdpa=False)


def _dropout(s: Sizes, device: torch.device, dtype: torch.dtype) -> Asked:
    return Asked(dropout_p=0.1)


def _draw(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(5), device=device, dtype=dtype)


def _padding(s: Sizes, device: torch.device, dtype: torch.dtype) -> Asked:
    keep = torch.arange(s.kv_len, device=device) < torch.linspace(s.kv_len // 2, s.kv_len, s.batch, device=device)[:, None]
    return Asked(mask=lambda b, h, q, kv: keep[b, kv], attn_mask=keep[:, None, None])


def _bool(s: Sizes, device: torch.device, dtype: torch.dtype) -> Asked:
    keep = _draw(s.q_len, s.kv_len, device=device, dtype=torch.float32) > -0.5
    return Asked(mask=lambda b, h, q, kv: keep[q, kv], attn_mask=keep)


def _bias(s: Sizes, device: torch.device, dtype: torch.dtype) -> Asked:
    table = _draw(1, s.heads, s.q_len, s.kv_len, device=device, dtype=dtype)
    return Asked(score=lambda score, b, h, q, kv: score + table[0, h, q, kv], attn_mask=table)


def _learned_bias(s: Sizes, device: torch.device, dtype: torch.dtype) -> Asked:
    table = _draw(1, s.heads, s.q_len, s.kv_len, device=device, dtype=dtype).requires_grad_()
    return Asked(score=lambda score, b, h, q, kv: score + table[0, h, q, kv], attn_mask=table)


def _grouped(s: Sizes) -> Sizes:
    return replace(s, kv_heads=max(1, s.heads // 4))


def _smaller(s: Sizes) -> Sizes:
    return replace(s, q_len=s.q_len // 2, kv_len=s.kv_len // 2)


def _decoding(s: Sizes) -> Sizes:
    return replace(_grouped(s), q_len=1, batch=4 * s.batch)


def _decoding_many(s: Sizes) -> Sizes:
    return replace(_decoding(s), batch=32 * s.batch)


def _decoding_long(s: Sizes) -> Sizes:
    return replace(_decoding(s), batch=2 * s.batch, kv_len=8 * s.kv_len)


def _decoding_longest(s: Sizes) -> Sizes:
    return replace(_decoding(s), batch=max(1, s.batch // 2), kv_len=16 * s.kv_len)


def _sequences(s: Sizes) -> Sizes:
    return replace(s, batch=16 * s.batch)


def _head_dim(dim: int) -> Callable[[Sizes], Sizes]:
    return lambda s: replace(s, dim=dim)


CASES: Final = (
    Case("dense", _plain),
    Case("causal", _is_causal),
    *(Case(f"causal D {dim}", _is_causal, _head_dim(dim)) for dim in (64, 96, 192, 256)),
    Case("window", _window),
    Case("window D 64", _window, _head_dim(64)),
    *(Case(f"documents {count}", _documents(count)) for count in (2, 8, 32)),
    Case("documents 8 D 64", _documents(8), _head_dim(64)),
    Case("ALiBi causal", _alibi),
    Case("ALiBi causal D 64", _alibi, _head_dim(64)),
    Case("softcap causal", _softcap),
    Case("softcap causal D 64", _softcap, _head_dim(64)),
    Case("dropout", _dropout),
    Case("padding mask", _padding),
    Case("bool mask", _bool, _smaller),
    Case("bias", _bias, _smaller),
    Case("learned bias", _learned_bias, _smaller),
    Case("GQA causal", _is_causal, _grouped),
    Case("jagged", _plain, _sequences, "jagged"),
    Case("jagged causal", _is_causal, _sequences, "jagged"),
    Case("decode", _plain, _decoding, trains=False),
    Case("decode many", _plain, _decoding_many, trains=False),
    Case("decode long", _plain, _decoding_long, trains=False),
    Case("decode longest", _plain, _decoding_longest, trains=False),
    Case("decode ALiBi", lambda s, device, dtype: replace(_alibi(s, device, dtype), mask=None), _decoding, trains=False),
    Case("decode paged", _plain, _decoding, "paged", trains=False),
    Case("decode paged many", _plain, _decoding_many, "paged", trains=False),
)
