"""Attention with the names, arguments and layout of FlashAttention: tensors are [B, S, H, D], causal masks end in the lower right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from foci import masks
from foci.api import attention
from foci.functional import varlen_attn
from foci.variant import Mask, kv_len, q_len

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]

UNLIMITED = (-1, -1)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """Compute attention of [B, S, H, D] tensors.

    Args:
        q: [B, Sq, Hq, D].
        k: [B, Skv, Hkv, D], Hq a multiple of Hkv.
        v: [B, Skv, Hkv, Dv].
        dropout_p: probability of dropping a weight.
        softmax_scale: 1 / sqrt(D) by default.
        causal: whether the last query attends to the last key, the one before to the one before, and so on.
        window_size: (left, right) keys around that diagonal; -1 is unlimited.
        softcap: cap of the scores, `softcap * tanh(score / softcap)`; 0 for none.
        alibi_slopes: [Hq] or [B, Hq], taken from a score times its distance from the diagonal.
        deterministic: gradients are deterministic in any case.
        return_attn_probs: must be False.

    Returns:
        [B, Sq, Hq, Dv].

    Raises:
        NotImplementedError: for return_attn_probs.
        TypeError, ValueError: for wrong tensors.
    """
    refuse_probabilities(return_attn_probs)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out = attention(
        *heads_first,
        mask=mask_of(causal, window_size),
        score=score_of(softcap, alibi_slopes),
        scale=softmax_scale,
        dropout_p=dropout_p,
    )
    return out.transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """Compute attention of packed sequences.

    Args:
        q: [Tq, Hq, D].
        k: [Tkv, Hkv, D].
        v: [Tkv, Hkv, Dv].
        cu_seqlens_q, cu_seqlens_k: [N + 1] int32, first token of each sequence, and the end of the last.
        max_seqlen_q, max_seqlen_k: lengths of the longest.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in `flash_attn_func`,
            within each sequence.

    Returns:
        [Tq, Hq, Dv].

    Raises:
        NotImplementedError: for return_attn_probs.
        TypeError, ValueError: for wrong tensors.
    """
    refuse_probabilities(return_attn_probs)
    return varlen_attn(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        mask=mask_of(causal, window_size), score=score_of(softcap, alibi_slopes), scale=softmax_scale, dropout_p=dropout_p,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip


def refuse_probabilities(asked: bool) -> None:
    """Refuses what FlashAttention returns for its own tests."""
    if asked:
        raise NotImplementedError(
            "return_attn_probs must be False: foci.attention(..., return_aux=foci.AuxRequest(weights=True)) has weights"
        )


def mask_of(causal: bool, window_size: tuple[int, int]) -> Mask | None:
    """The mask around the diagonal that ends in the lower right corner."""
    left, right = window_size
    right = 0 if causal else right
    if (left, right) == UNLIMITED:
        return None
    return masks.window(None if left == -1 else left, None if right == -1 else right, align="lower_right")


def score_of(softcap: float, alibi_slopes: Tensor | None) -> Callable[..., Any] | None:
    """The cap first, then the slopes."""
    if softcap == 0.0 and alibi_slopes is None:
        return None

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if softcap != 0.0:
            score = softcap * (score / softcap).tanh()
        if alibi_slopes is not None:
            slope = alibi_slopes[h] if alibi_slopes.dim() == 1 else alibi_slopes[b, h]
            score = score - slope * (q_idx + kv_len() - q_len() - kv_idx).abs()
        return score

    return score
