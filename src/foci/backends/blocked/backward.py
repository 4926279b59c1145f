"""Backward: weights are recomputed from scores and lse, tile by tile (Dao et al., "FlashAttention", 2022, section 3.1).

With w the weights, d their gradient and s the scores: ds = w * (d - sum over keys of w * d). The chain rule through the score function
multiplies ds by its derivative.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foci.backends.blocked.captures import CaptureSums
from foci.backends.blocked.scores import Scores
from foci.backends.blocked.tiles import Chunk, Run, Tile, block_classes, plan_chunks
from foci.backends.excluded import add_not_finite, finite, has_not_finite
from foci.backends.row_gradients import add_row_gradients
from foci.backends.sequences import sequences
from foci.ir.derivative import score_derivative
from foci.ir.expr import Expr
from foci.problem import Cotangents, Gradients, Operands, Problem, Results, accumulation_dtype

__all__ = ["backward"]

_derivative = functools.lru_cache(maxsize=1024)(score_derivative)


def backward(operands: Operands, problem: Problem, results: Results, cotangents: Cotangents) -> Gradients:
    """Gradients of what the problem asks for, in O(Sq + Skv) memory beside them. Sums are in the accumulation type."""
    query, key, value = operands.query, operands.key, operands.value
    call = _BackwardCall(
        problem=problem,
        operands=operands,
        results=results,
        cotangents=cotangents,
        captures=CaptureSums(problem, operands.captures, accumulation_dtype(query.dtype)),
        query=torch.zeros_like(query) if problem.query_grad else None,
        key=torch.zeros_like(key) if problem.key_grad else None,
        value=torch.zeros_like(value) if problem.value_grad else None,
    )
    if 0 not in query.shape[:3] and key.shape[2]:
        seqs = sequences(operands, problem.formula.layout)
        classes = block_classes(operands, problem.formula, seqs)
        for sequence in seqs:
            if sequence.q_len and sequence.kv_len:
                scores = Scores(operands, problem.formula, sequence)
                for chunk in plan_chunks(operands, sequence, classes):
                    _backward_chunk(call, scores, chunk)
    summed = Gradients(call.query, call.key, call.value, call.captures.gradients())
    return add_row_gradients(summed, problem, operands, results.lse, cotangents.lse)


@dataclass(frozen=True, eq=False)
class _BackwardCall:
    """A backward call and its results in the making."""

    problem: Problem
    operands: Operands
    results: Results
    cotangents: Cotangents
    captures: CaptureSums
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None

    @property
    def needs_scores(self) -> bool:
        """Whether a gradient flows through the scores, not only through the values."""
        return self.needs_products or bool(self.captures.sites)

    @property
    def needs_products(self) -> bool:
        return self.query is not None or self.key is not None


@dataclass(frozen=True, eq=False)
class _QueryTile:
    """A tile's query-side tensors, each [pairs, groups * rows, width]; `delta` is the sum over keys of w * d."""

    query: Tensor
    grad_out: Tensor
    lse: Tensor
    delta: Tensor
    strange: bool = False
    """Whether an operand of the tile is not finite somewhere, where positions may be excluded."""


@dataclass(frozen=True, eq=False)
class _KeyChunk:
    """A chunk's keys and values, [pairs, Skv, width], and the accumulators of their gradients."""

    key: Tensor
    value: Tensor
    key_sum: Tensor | None
    value_sum: Tensor | None
    strange: bool


def _backward_chunk(call: _BackwardCall, scores: Scores, chunk: Chunk) -> None:
    operands = call.operands
    keys, values = scores.key_rows(operands.key, chunk), scores.key_rows(operands.value, chunk)
    columns = _KeyChunk(
        keys,
        values,
        torch.zeros(keys.shape, dtype=keys.dtype, device=keys.device) if call.key is not None else None,
        torch.zeros(values.shape, dtype=values.dtype, device=values.device) if call.value is not None else None,
        any(scores.may_hide(tile) for tile in chunk.tiles) and has_not_finite(keys, values),
    )
    for tile in chunk.tiles:
        if tile.runs:
            _backward_tile(call, scores, columns, chunk, tile)
    for grad, total in ((call.key, columns.key_sum), (call.value, columns.value_sum)):
        if grad is not None and total is not None:
            part = grad[slice(*chunk.b), slice(*chunk.kv_heads), slice(*scores.sequence.kv)]
            part.copy_(total.view(part.shape))


def _backward_tile(call: _BackwardCall, scores: Scores, columns: _KeyChunk, chunk: Chunk, tile: Tile) -> None:
    operands, cotangents = call.operands, call.cotangents
    lse = scores.query_rows(call.results.lse[..., None], chunk, tile)
    grad_out = scores.query_rows(cotangents.out, chunk, tile)
    delta = (grad_out * scores.query_rows(call.results.out, chunk, tile)).sum(-1, keepdim=True)
    rows = _QueryTile(
        query=scores.query_rows(operands.query, chunk, tile) * operands.scale,
        grad_out=grad_out,
        lse=lse.masked_fill(lse == -torch.inf, torch.inf),  # a row without keys: exp(score - inf) is 0
        delta=delta,
    )
    if scores.may_hide(tile):
        strange = columns.strange or has_not_finite(rows.query, delta, rows.grad_out)
        rows = replace(rows, strange=strange)
    if cotangents.column_sums is not None or cotangents.weights is not None:
        for run in tile.runs:
            weights = _weights(scores, rows, columns, (chunk, tile, run))
            delta += (weights * _direct(call, scores, weights, (chunk, tile, run))).sum(-1, keepdim=True)
    if cotangents.lse is not None:
        delta -= scores.query_rows(cotangents.lse[..., None], chunk, tile).masked_fill(lse == -torch.inf, 0.0)
    query_sum = torch.zeros_like(rows.query) if call.query is not None else None
    for run in tile.runs:
        _backward_run(call, scores, (rows, columns), query_sum, (chunk, tile, run))
    if call.query is not None and query_sum is not None:
        start = scores.sequence.q[0]
        part = call.query[slice(*chunk.b), slice(*chunk.heads), start + tile.start : start + tile.stop]
        part.copy_(scores.by_head(query_sum.mul_(operands.scale), chunk, tile))


def _weights(scores: Scores, rows: _QueryTile, columns: _KeyChunk, at: tuple[Chunk, Tile, Run]) -> Tensor:
    return _attention_weights(scores.masked(rows.query, columns.key, at), rows)


def _attention_weights(score: Tensor, rows: _QueryTile) -> Tensor:
    # At scores beyond 1e8 rounding alone could lift a score above lse, and its weight to infinity.
    return score.sub_(rows.lse).clamp_(max=0.0).exp_()


def _direct(call: _BackwardCall, scores: Scores, weights: Tensor, at: tuple[Chunk, Tile, Run]) -> Tensor:
    """Gradient that reaches the weights by themselves and by their column sums; broadcasts to the shape of the weights."""
    chunk, tile, run = at
    b, h, kv = slice(*chunk.b), slice(*chunk.heads), slice(scores.sequence.kv[0] + run.start, scores.sequence.kv[0] + run.stop)
    total = torch.zeros((), dtype=weights.dtype, device=weights.device)
    if call.cotangents.column_sums is not None:
        total = total + call.cotangents.column_sums[b, h, None, kv]
    if call.cotangents.weights is not None:
        total = total + call.cotangents.weights[b, h, tile.start : tile.stop, kv]
    return total.expand(scores.by_head(weights, chunk, tile).shape).reshape(weights.shape)


def _backward_run(
    call: _BackwardCall, scores: Scores, both: tuple[_QueryTile, _KeyChunk], query_sum: Tensor | None, at: tuple[Chunk, Tile, Run]
) -> None:
    rows, columns = both
    run, cotangents = at[2], call.cotangents
    more = _expressions(call, scores)
    raw = scores.raw(rows.query, columns.key, run)
    values: tuple[Tensor, ...] = ()
    score = raw
    if run.masked or not scores.is_identity:
        score, values = scores.functions(scores.by_head(raw, *at[:2]), at, more)
    excluded = score.view(raw.shape) == -torch.inf if rows.strange else None
    weights = _attention_weights(score.view(raw.shape), rows)
    if excluded is not None:
        weights.masked_fill_(excluded, 0.0)
    if columns.value_sum is not None:
        dropped_weights = scores.dropped(weights, at) if scores.formula.dropout else weights
        total = columns.value_sum[:, run.start : run.stop]
        total.baddbmm_(dropped_weights.mT, finite(rows.grad_out) if rows.strange else rows.grad_out)
        if excluded is not None:
            add_not_finite(total, (dropped_weights != 0).mT, rows.grad_out)
    if not call.needs_scores:
        return
    grad = torch.bmm(rows.grad_out, columns.value[:, run.start : run.stop].mT)
    if scores.formula.dropout:
        grad = scores.dropped(grad, at)
    if cotangents.column_sums is not None or cotangents.weights is not None:
        grad += _direct(call, scores, weights, at)
    dscore = grad.sub_(rows.delta).mul_(weights)
    if excluded is not None:
        dscore.masked_fill_(weights == 0, 0.0)
    if call.captures.sites:
        factors = values[len(values) - len(call.captures.sites) :]
        call.captures.add(scores, scores.by_head(dscore, *at[:2]), factors, scores.by_head(raw, *at[:2]), at)
    if not call.needs_products:
        return
    if not scores.is_identity:
        dscore = _through_function(scores, dscore, values[0], at)
    if query_sum is not None:
        keys = columns.key[:, run.start : run.stop]
        query_sum.baddbmm_(dscore, finite(keys) if rows.strange else keys)
    if columns.key_sum is not None:
        columns.key_sum[:, run.start : run.stop].baddbmm_(dscore.mT, finite(rows.query) if rows.strange else rows.query)


def _expressions(call: _BackwardCall, scores: Scores) -> tuple[Expr, ...]:
    """Expressions that a tile evaluates besides score and mask: the derivative by the score, and the factors of captured tensors."""
    if scores.is_identity:
        return ()
    derivatives = (_derivative(scores.score),) if call.needs_products else ()
    return (*derivatives, *(site.factor for site in call.captures.sites))


def _through_function(scores: Scores, dscore: Tensor, derivative: Tensor, at: tuple[Chunk, Tile, Run]) -> Tensor:
    expr = _derivative(scores.score)
    if expr.op == "const" and expr.value == 1.0:
        return dscore
    # Where the weight is 0 the derivative may be infinite.
    view = scores.by_head(dscore, *at[:2])
    return torch.where(view == 0, 0.0, view * derivative).view(dscore.shape)
