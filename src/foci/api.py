"""The entry points `attention` and `explain`. Torch's own, by torch's signatures, are in `foci.functional`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, overload

from torch import Tensor

from foci.core import Function, Tensors, decision
from foci.dispatch import run
from foci.jagged import attend_nested, decision_nested, is_nested
from foci.normalize import (
    MaskLike,
    ScoreLike,
    check_outputs,
    check_sink,
    lower_right_form,
    mask_parts,
    refuse_arguments,
    score_parts,
    with_strict_signature,
)
from foci.planner import Decision
from foci.prepare import Extras, alignment_note, check_inputs
from foci.problem import Outputs, Results
from foci.strided_nested import as_jagged, as_strided, has_strided

__all__ = ["AuxOutput", "AuxRequest", "Explanation", "attention", "explain", "returned"]

AuxRequest: TypeAlias = Outputs


class AuxOutput(NamedTuple):
    """Auxiliary outputs of `attention`; None where not asked for.

    Attributes:
        lse: [B, Hq, Sq] logsumexp of the scores, natural logarithm, float32 (float64 for float64), differentiable;
            -inf for a row with nothing to attend to. With a sink, the sink is part of the sum.
        row_max: [B, Hq, Sq] largest score of the row. Carries no gradient.
        column_sums: [B, Hq, Skv] weights summed over the queries.
        weights: [B, Hq, Sq, Skv] the weights themselves, zero rows where nothing is attended.

    Example:
        >>> import foci, torch
        >>> q = torch.randn(1, 2, 16, 8)
        >>> out, aux = foci.attention(q, q, q, return_aux=foci.AuxRequest(lse=True))
        >>> aux.lse.shape, aux.row_max
        (torch.Size([1, 2, 16]), None)
    """

    lse: Tensor | None = None
    row_max: Tensor | None = None
    column_sums: Tensor | None = None
    weights: Tensor | None = None


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: MaskLike = None,
    score: ScoreLike = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_aux: None = None,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: MaskLike = None,
    score: ScoreLike = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_aux: AuxRequest,
) -> tuple[Tensor, AuxOutput]: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: MaskLike = None,
    score: ScoreLike = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]: ...


@with_strict_signature
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *positional: Any,
    mask: MaskLike = None,
    score: ScoreLike = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_aux: AuxRequest | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """Attention: softmax(score(scale * query key^T) + bias, over the keys the mask keeps) value.

    A row that may attend to nothing gives zeros. Query heads are grouped over key heads when there are more of them.

    Args:
        query: [B, Hq, Sq, D], float16, bfloat16, float32 or float64; or a NestedTensor. One of strided layout is copied into a jagged
            one, and the result back.
        key: [B, Hkv, Skv, D], Hq a multiple of Hkv, B may be 1.
        value: [B, Hkv, Skv, Dv].
        mask: which keys a query attends to: a `foci.Mask` (`foci.masks` has the known ones), a function
            (b, h, q_idx, kv_idx) -> bool, a bool tensor that broadcasts to [B, Hq, Sq, Skv], a `foci.BlockMask`, or
            torch's BlockMask or CausalBias.
        score: what happens to the scaled scores: a `foci.Score` or a function (score, b, h, q_idx, kv_idx) -> score.
        bias: added to the scores after `score`; broadcasts to [B, Hq, Sq, Skv]; may require grad.
        sink: [Hq], a learned logit per head that takes part in the softmax and has no value (Xiao et al. 2023).
        scale: 1 / sqrt(D) by default.
        dropout_p: probability with which a weight is dropped, from torch's generator; a function of the seed and the
            position alone, the same on every backend.
        return_aux: which auxiliary outputs to return besides.

    Returns:
        [B, Hq, Sq, Dv] in the query's dtype; with `return_aux`, that and an `AuxOutput`. In memory it lies without gaps, as
        [B, Sq, Hq, Dv] where the query's heads lie within its rows, else as [B, Hq, Sq, Dv].

    Raises:
        TypeError: for an argument of a wrong type or dtype, or a function that leaves the language.
        ValueError: for a wrong shape, device or value.
        NoViableBackend: if no backend accepts; the message has each one's reason.

    Example:
        >>> import foci, torch
        >>> q, k, v = (torch.randn(2, 8, 128, 64, requires_grad=True) for _ in range(3))
        >>> out = foci.attention(q, k, v, mask=foci.masks.window(32), score=foci.scores.alibi(8))
        >>> out.shape
        torch.Size([2, 8, 128, 64])
        >>> out.sum().backward()
    """
    if positional or unknown:
        refuse_arguments("attention", positional, unknown)
    nested = is_nested(query, key, value)
    strided = nested and has_strided(query, key, value)
    tensors = as_jagged((query, key, value)) if strided else (query, key, value)
    call = _checked(tensors, mask, score, bias, sink, scale, dropout_p, return_aux)
    results = attend_nested(*call) if nested else run(*call)
    return returned(as_strided(results) if strided else results, return_aux)


def returned(results: Results, return_aux: AuxRequest | None) -> Tensor | tuple[Tensor, AuxOutput]:
    """Return what a call with `return_aux` returns: the output, or a pair with its `AuxOutput`."""
    if return_aux is None:
        return results.out
    return results.out, AuxOutput(results.lse if return_aux.lse else None, results.row_max, results.column_sums, results.weights)


@dataclass(frozen=True)
class Explanation:
    """The planner's decision about a call, and why: `print` it, or read `backend`, `decision` and `notes`.

    Attributes:
        decision: the planner's.
        notes: what may be amiss in the call itself, each a sentence or two.
    """

    decision: Decision
    notes: tuple[str, ...] = ()

    @property
    def backend(self) -> str | None:
        """The backend that would run, None if none would."""
        return None if self.decision.plan is None else self.decision.plan.backend

    def __str__(self) -> str:
        p = self.decision.problem
        dtype = str(p.dtype).removeprefix("torch.")
        heads = f"{p.q_heads} query heads on {p.kv_heads}, head dim {p.head_dim}, value dim {p.value_dim}"
        head = f"attention on {self.decision.target.device}: {dtype}, {heads}"
        sizes = f"{p.formula.layout.value}, batch <= {p.batch}, queries <= {p.q_len}, keys <= {p.kv_len}"
        notes = "".join(f"\nnote: {note}" for note in self.notes)
        return f"{head}\n{sizes}\nscore: {p.variant}\n{self.decision.table()}{notes}"


@with_strict_signature
def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *positional: Any,
    mask: MaskLike = None,
    score: ScoreLike = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_aux: AuxRequest | None = None,
    **unknown: Any,
) -> Explanation:
    """Return what `attention` would do with these arguments: every backend with its verdict and reason. Nothing runs.

    Args:
        query, key, value, mask, score, bias, sink, scale, dropout_p, return_aux: as in `attention`.

    Raises:
        TypeError, ValueError: as `attention`. A problem without a viable backend is explained, not raised.

    Example:
        >>> import foci, torch
        >>> q = torch.randn(1, 8, 512, 64)
        >>> explanation = foci.explain(q, q, q, mask=foci.masks.causal())
        >>> explanation.backend is not None
        True
    """
    if positional or unknown:
        refuse_arguments("explain", positional, unknown)
    nested = is_nested(query, key, value)
    if nested and has_strided(query, key, value):
        query, key, value = as_jagged((query, key, value))
    call = _checked((query, key, value), mask, score, bias, sink, scale, dropout_p, return_aux)
    if nested:
        return Explanation(decision_nested(*call))
    tensors, score_function, mask_function, extras = call
    note = alignment_note(query, key, extras)  # said here, so no warning of it
    return Explanation(
        decision(tensors, score_function, mask_function, extras._replace(lower_right_form="")), () if note is None else (note,)
    )


def _checked(
    tensors: Tensors,
    mask: MaskLike,
    score: ScoreLike,
    bias: Tensor | None,
    sink: Tensor | None,
    scale: float | None,
    dropout_p: float,
    return_aux: AuxRequest | None,
) -> tuple[Tensors, Function, Function, Extras]:
    """The arguments of `attention` as the road behind it takes them: tensors, score and mask as functions, and the rest."""
    query, key, value = tensors
    check_inputs(query, key, value)
    mask_function, blocks, block_size = (None, None, None) if mask is None else mask_parts(mask, query, key)
    score_function = None if score is None and bias is None else score_parts(score, bias, query, key)
    extras = Extras(
        check_outputs(return_aux, sink), scale=scale, dropout_p=dropout_p, blocks=blocks, block_size=block_size,
        sink=None if sink is None else check_sink(sink, query), lower_right_form="" if mask is None else lower_right_form(mask),
    )  # fmt: skip
    return tensors, score_function, mask_function, extras
