"""Attention written out: one loop over sequences, one dense matrix of scores for each. The reference of the generated grid.

With `dtype=float64` it is exact. In the problem's dtype it is the plain formula, whose error the budget multiplies: products, softmax
and weights in that dtype, functions in float32 or wider.

Letters: T tokens of all sequences, Hq and Hkv heads, Sq and Skv lengths of one sequence, D and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foci.dropout import keep


@dataclass(frozen=True)
class Dense:
    """What is computed, apart from query, key and value.

    Attributes:
        lengths: queries and keys of each sequence.
        score: function (score, b, h, q_idx, kv_idx), run on dense tensors.
        attends: function (b, h, q_idx, kv_idx, q_len, kv_len), run on index tensors.
        scale: of the scores.
        added: [..., Sq or longer, Skv or longer], a tensor added to the scores, or None.
        sink: [Hq], logits that take part in the softmax without a value, or None.
        dropout_p, seed: the share of weights that are dropped, and the int64 [1] that decides which.
        detaches_lse: take the softmax's normalizer as a constant. Gradients are then those of the terms that the softmax's backward
            subtracts from each other: their size says how much rounding is left where the difference is zero.
    """

    lengths: Sequence[tuple[int, int]]
    score: Callable[..., Any]
    attends: Callable[..., Any]
    scale: float
    added: Tensor | None = None
    sink: Tensor | None = None
    dropout_p: float = 0.0
    seed: Tensor | None = None
    detaches_lse: bool = False


def attend(problem: Dense, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Out [Tq, Hq, Dv] and lse [Tq, Hq] of query [Tq, Hq, D], key [Tkv, Hkv, D] and value [Tkv, Hkv, Dv]."""
    q_lengths, kv_lengths = ([pair[side] for pair in problem.lengths] for side in (0, 1))
    sequences = zip(query.split(q_lengths), key.split(kv_lengths), value.split(kv_lengths), strict=True)
    results = [_attend_sequence(problem, number, *tensors) for number, tensors in enumerate(sequences)]
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


def _attend_sequence(problem: Dense, number: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    (q_len, heads, _), kv_len, dtype = query.shape, key.shape[0], query.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q = query.transpose(0, 1)  # [Hq, Sq, D]
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1).transpose(0, 1) for t in (key, value))  # [Hq, Skv, D]
    at = _indices(number, heads, q_len, kv_len, query.device)

    # S = score(scale * Q K^T) + bias
    with _python_numbers(wide):
        scores = problem.score(((q @ k.mT) * problem.scale).to(wide), *at).expand(heads, q_len, kv_len)
    if problem.added is not None:
        scores = scores + problem.added[..., :q_len, :kv_len].to(wide)
    attends = problem.attends(*at, q_len, kv_len).expand(scores.shape) & (scores > -torch.inf)
    scores = torch.where(attends, scores, 0.0).masked_fill(~attends, -torch.inf).to(dtype)

    # P = softmax(S), with the sink's logit as one more column
    logits = scores if problem.sink is None else torch.cat([scores, problem.sink.to(dtype)[:, None, None].expand(heads, q_len, 1)], -1)
    is_empty = (logits == -torch.inf).all(-1, keepdim=True)
    logits = torch.where(is_empty, 0.0, logits)
    lse = torch.logsumexp(logits.to(wide), -1, keepdim=True)
    weights = torch.exp(logits - lse.detach()) if problem.detaches_lse else torch.softmax(logits, -1)
    weights = torch.where(attends, weights[..., :kv_len], 0.0)
    lse = torch.where(is_empty, -torch.inf, lse)[..., 0]

    # O = dropout(P) V
    if problem.dropout_p:
        kept = keep(problem.seed, problem.dropout_p, *at)
        weights = torch.where(kept, weights / (1 - problem.dropout_p), 0.0)
    return (weights @ v).transpose(0, 1), lse.mT


@contextmanager
def _python_numbers(dtype: torch.dtype) -> Iterator[None]:
    """Products of index tensors and Python floats have this dtype: foci computes functions in it, torch in its default dtype."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def _indices(number: int, heads: int, q_len: int, kv_len: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """b [1, 1, 1], h [Hq, 1, 1], q_idx [Sq, 1], kv_idx [Skv]."""
    h, i, j = (torch.arange(n, device=device) for n in (heads, q_len, kv_len))
    return torch.full((1, 1, 1), number, device=device), h[:, None, None], i[:, None], j
