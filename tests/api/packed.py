"""Nested and packed tensors for tests, and what each sequence gets by itself."""

import torch
import torch.nn.functional as F
from drawn import rand

import foci

ASKED = foci.AuxRequest(lse=True, row_max=True, column_sums=True)
BACKENDS = ("reference", "blocked")


def nested(lengths, heads, dim, *, seed=0, dtype=torch.float64):
    """[B, H, ragged, D] that requires grad, a view of packed [T, H, D]."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = rand(int(offsets[-1]), heads, dim, seed=seed, dtype=dtype).requires_grad_()
    return values, torch.nested.nested_tensor_from_jagged(values, offsets=offsets).transpose(1, 2)


def pieces(values, lengths):
    """[1, H, length, D] of each sequence."""
    return [part.transpose(0, 1)[None] for part in values.split(list(lengths))]


def unpacked(njt):
    """Packed [T, H, ...] of a [B, H, ragged, ...] NestedTensor."""
    return njt.transpose(1, 2).values()


def per_sequence(q, k, v, q_lengths, kv_lengths, mask=None, **kwargs):
    out = []
    for a, b, c in zip(pieces(q, q_lengths), pieces(k, kv_lengths), pieces(v, kv_lengths), strict=True):
        one = F.scaled_dot_product_attention(a, b, c, attn_mask=None if mask is None else mask(a.shape[2], b.shape[2]), **kwargs)
        out.append(one[0].transpose(0, 1))
    return torch.cat(out)
