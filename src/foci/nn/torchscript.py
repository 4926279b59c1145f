"""What TorchScript runs of the modules: the same operator, padded, with masks added to the scores.

TorchScript holds no Python functions, so that a scripted module knows no mask or score of its own and no cache, and
computes padding, which it sets to zero. The functions keep to what torch.jit compiles, which does
not read a NamedTuple whose annotations are text: so this file has no `from __future__ import annotations`.
"""

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from foci import scores
from foci.trace_functions import bind
from foci.variant import PLAIN

__all__ = ["ADDED", "AS_IT_IS", "Parameters", "additive", "attention", "project", "zeroed"]

AS_IT_IS: Final = PLAIN.text
"""The formula's text without a mask: see `foci.problem.Formula`."""

ADDED: Final = bind(scores.bias(torch.zeros(2, 2, 2, 2)).function, None, torch.device("cpu")).variant.text
"""The formula's text with a tensor [B, H, L, S] added to the scores."""


class Parameters(NamedTuple):
    """Parameters of the in-projections: one weight of all three, or three."""

    in_proj_weight: Tensor | None
    q_weight: Tensor | None
    k_weight: Tensor | None
    v_weight: Tensor | None
    bias: Tensor | None  # of all three


def additive(mask: Tensor | None, dtype: torch.dtype, name: str) -> Tensor | None:
    """A bool mask as a floating one, -inf where it is true."""
    if mask is None:
        return None
    if mask.dtype != torch.bool and not torch.is_floating_point(mask):
        raise AssertionError(f"only bool and floating types of {name} are supported")
    if torch.is_floating_point(mask):
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


def project(query: Tensor, key: Tensor, value: Tensor, weights: Parameters, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The in-projections."""
    packed, bias = weights.in_proj_weight, weights.bias
    q_weight, k_weight, v_weight = weights.q_weight, weights.k_weight, weights.v_weight
    if packed is not None:
        width = (packed.size(0) - size) // 2
        q_weight, k_weight, v_weight = packed[:size], packed[size : size + width], packed[size + width :]
    assert q_weight is not None
    assert k_weight is not None
    assert v_weight is not None
    if bias is None:
        return linear(query, q_weight), linear(key, k_weight), linear(value, v_weight)
    width = k_weight.size(0)
    return (
        linear(query, q_weight, bias[:size]),
        linear(key, k_weight, bias[size : size + width]),
        linear(value, v_weight, bias[size + width :]),
    )


def attention(
    heads: tuple[Tensor, Tensor, Tensor], attn_mask: Tensor | None, padding: Tensor | None, dropout_p: float, need_weights: bool,
    texts: tuple[str, str],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """[B, H, L, D] and weights [B, H, L, S] of projected tensors [B, H, L, D] and floating masks [L, S] or [B * H, L, S], [B, S]."""
    q, k, v = heads
    batch, count, q_len, kv_len = q.size(0), q.size(1), q.size(2), k.size(2)
    added: list[Tensor] = []
    text = texts[0]
    if attn_mask is not None or padding is not None:
        scores = torch.zeros([1, 1, 1, 1], dtype=q.dtype, device=q.device)
        if attn_mask is not None:
            scores = scores + (attn_mask if attn_mask.dim() == 2 else attn_mask.view(batch, count, q_len, kv_len))
        if padding is not None:
            scores = scores + padding.view(batch, 1, 1, kv_len)
        added.append(scores.expand(batch, count, q_len, kv_len))
        text = texts[1]
    seed: Tensor | None = None
    if dropout_p > 0.0:
        seed = torch.randint(0, 9223372036854775807, [1], dtype=torch.int64, device=q.device)
    asked = "weights" if need_weights else ""
    dropped = 1 if dropout_p > 0.0 else 0
    formula = f"layout=dense;outputs={asked};dropout={dropped};blocks=\n{text}"
    ints: list[int] = []
    floats: list[float] = []
    scale = 1.0 / math.sqrt(float(q.size(3)))
    out, _lse, _row_max, _columns, weights = torch.ops.foci.attention(
        q, k, v, added, seed, None, None, None, None, None, None, ints, floats, scale, dropout_p, 0, 0, formula, "*"
    )
    if need_weights:
        return out, weights
    return out, None


def zeroed(x: Tensor, padding: Tensor | None, batch_first: bool) -> Tensor:
    """Zeros where a mask [B, S] or [S] says that there is padding."""
    if padding is None:
        return x
    where = padding == -math.inf if torch.is_floating_point(padding) else padding
    if where.dim() == 2 and not batch_first:
        where = where.transpose(0, 1)
    return x.masked_fill(where.unsqueeze(-1), 0.0)
