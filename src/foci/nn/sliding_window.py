"""Attention to the keys nearby, as a module."""

from __future__ import annotations

from typing import Any

import torch

import foci
from foci.nn.attention import MultiheadAttention
from foci.nn.rotary import RotaryEmbedding

__all__ = ["SlidingWindowAttention"]


class SlidingWindowAttention(MultiheadAttention):
    """`MultiheadAttention` in which a query sees the keys near it (Beltagy et al., 2020, section 3.1).

    Args:
        embed_dim, num_heads: as in `MultiheadAttention`.
        left, right: how many keys before and after its own position a query sees; None for all.
        dropout, bias, batch_first, num_kv_heads, rotary, device, dtype: as in `MultiheadAttention`.

    Raises:
        ValueError: for a negative window.

    Example:
        >>> import torch, foci.nn
        >>> attention = foci.nn.SlidingWindowAttention(32, 4, left=16, batch_first=True)
        >>> x = torch.randn(1, 100, 32)
        >>> attention(x, x, x, need_weights=False)[0].shape
        torch.Size([1, 100, 32])
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, left: int | None, right: int | None = 0, dropout: float = 0.0, bias: bool = True,
        batch_first: bool = False, num_kv_heads: int | None = None, rotary: RotaryEmbedding | None = None, device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            embed_dim, num_heads, dropout, bias, batch_first=batch_first, device=device, dtype=dtype, num_kv_heads=num_kv_heads,
            rotary=rotary, mask=foci.masks.window(left, right),
        )  # fmt: skip
