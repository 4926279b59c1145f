"""Sums of the weights over queries, where a row's weights do not sum to one: with a sink.

With l the logsumexp of a row, sink included, column k sums to sum_q exp(s_qk - l_q) = exp(logsumexp over q of s_qk - l_q):
the logsumexp of an attention whose queries and keys are exchanged and whose score is s_qk - l_q. So it is differentiable,
takes memory linear in the lengths, and every backend can do it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foci.environment import Allowed
from foci.errors import ArgumentError
from foci.ir.expr import DType, Expr, const, load, variable
from foci.ir.ops import apply
from foci.ir.rewrite import substitute
from foci.operator import attend
from foci.problem import Formula, Layout, Operands, Outputs
from foci.variant import Capture, Variant

__all__ = ["column_sums"]

_EXCHANGED = (("q_idx", "kv_idx"), ("q_len", "kv_len"))


def column_sums(formula: Formula, operands: Operands, lse: Tensor, allowed: Allowed) -> Tensor:
    """[B, Hq, Skv], or [1, Hq, Tkv] when jagged: the sums over queries of exp(score - lse), without dropout.

    Args:
        formula, operands: the attention's.
        lse: [B, Hq, Sq], or [1, Hq, Tq] when jagged: what rows are normalised with.
        allowed: names of the backends to consider.

    Raises:
        ValueError: for a paged cache.
    """
    if formula.layout is Layout.PAGED:
        raise ArgumentError("column_sums cannot be returned together with a sink from a paged cache; gather the pages")
    o = operands
    heads = o.query.shape[1]
    key = o.key if o.key.shape[1] == heads else o.key.repeat_interleave(heads // o.key.shape[1], dim=1)
    rows = torch.where(lse == -torch.inf, torch.inf, lse)  # a row with nothing to attend to adds nothing
    captures: tuple[Tensor, ...] = (*o.captures, rows) if o.cu_q is None else (*o.captures, rows, o.cu_q)
    exchanged = Operands(
        key, o.query, o.query.new_zeros(*o.query.shape[:3], 1), captures, o.ints, o.floats, o.scale,
        blocks=None if o.blocks is None else o.blocks.transpose(-1, -2).contiguous(), cu_q=o.cu_kv, cu_kv=o.cu_q,
        q_lengths=o.kv_lengths, kv_lengths=o.q_lengths, max_q=o.max_kv, max_kv=o.max_q,
    )  # fmt: skip
    size = None if formula.block_size is None else formula.block_size[::-1]
    variant = _exchanged(formula.variant, tuple(Capture(t.dtype, t.dim()) for t in captures[len(o.captures) :]))
    asked = replace(formula, variant=variant, outputs=Outputs(lse=True), dropout=False, block_size=size)
    log_sums = attend(asked, exchanged, allowed).lse
    return torch.exp(log_sums)


def _exchanged(variant: Variant, more: tuple[Capture, ...]) -> Variant:
    """The variant with queries and keys exchanged, its score less the logsumexp of the row, the first of `more`."""
    names = {variable(a): variable(b) for pair in _EXCHANGED for a, b in (pair, pair[::-1])}
    slot = len(variant.captures)
    at: tuple[Expr, ...] = (variable("b"), variable("h"), variable("kv_idx"))
    if len(more) > 1:  # jagged: rows are counted in tokens
        start = load(slot + 1, (variable("b"),), DType.INT64 if more[1].dtype is torch.int64 else DType.INT32)
        at = (const(0), variable("h"), apply("add", start, variable("kv_idx")))
    score = apply("sub", substitute(variant.score, names), load(slot, at, DType.FLOAT))
    return Variant(score, substitute(variant.mask, names), (*variant.captures, *more))
