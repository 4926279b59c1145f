"""What `MultiheadAttention` is given, brought to packed tokens: inputs without a batch, nested inputs, masks of longer sequences."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from foci.nn.packing import Packing, Pair, pack_nested, pack_whole

__all__ = [
    "Projected",
    "are_same_sequences",
    "as_pair",
    "cut_mask",
    "mark_padding",
    "of_sequences",
    "read_packing",
    "unsqueezed",
    "within_mask",
]

Projected: TypeAlias = tuple[Tensor, Tensor, Tensor]


def unsqueezed(inputs: Projected, dim: int) -> Projected:
    """A batch of one; inputs that are one tensor stay one."""
    query, key, value = inputs
    q = query.unsqueeze(dim)
    k = q if key is query else key.unsqueeze(dim)
    return q, k, k if value is key else value.unsqueeze(dim)


def read_packing(tensor: Tensor, *, batch_first: bool) -> Packing:
    return pack_nested(tensor) if tensor.is_nested else pack_whole(tensor, batch_first=batch_first)


def of_sequences(rows: Tensor | None, offsets: Tensor, packing: Packing) -> Tensor | None:
    """[H, T] as a NestedTensor [B, H, ragged], or [B, H, S] where the batch was none."""
    if rows is None:
        return None
    if packing.nested is None:
        return torch.unflatten(rows, 1, (packing.batch, -1)).transpose(0, 1)
    return torch.nested.nested_tensor_from_jagged(rows.T, offsets=offsets).transpose(1, 2)


def as_pair(padding: Packing | Pair) -> Pair:
    return padding if isinstance(padding, Pair) else Pair(padding, padding)


def within_mask(packings: Pair, attn_mask: Tensor | None, *, is_causal: bool) -> Pair:
    """Packings whose unknown lengths are those of a mask that is read."""
    if attn_mask is None or is_causal or attn_mask.dim() < 2:
        return packings
    query = packings.query.within(attn_mask.shape[-2])
    return Pair(query, query if packings.key is packings.query else packings.key.within(attn_mask.shape[-1]))


def cut_mask(attn_mask: Tensor, query: Packing, key: Packing) -> Tensor:
    """The part of a mask for longer sequences that is about nested ones."""
    if query.nested is not None and attn_mask.dim() > 1:
        attn_mask = attn_mask[..., : query.shape[1], :]
    return attn_mask if key.nested is None else attn_mask[..., : key.shape[1]]


def mark_padding(packing: Packing, tokens: Tensor) -> Tensor:
    """bool [B, S], where no token is."""
    return ~packing.spread(torch.ones(tokens.shape[0], dtype=torch.bool, device=tokens.device))


def are_same_sequences(query: Tensor, key: Tensor) -> bool:
    if query is key:
        return True
    jagged = query.is_nested and key.is_nested and query.layout == key.layout == torch.jagged
    return jagged and query.offsets() is key.offsets()  # type: ignore[attr-defined]
