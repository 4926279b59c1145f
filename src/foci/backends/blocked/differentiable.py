"""Attention over runs of keys from differentiable torch functions alone, for second derivatives and forward mode."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from foci.backends import excluded
from foci.backends.blocked.scores import Scores
from foci.backends.blocked.tiles import Chunk, Run, Tile, block_classes, plan_chunks
from foci.backends.reference import attend
from foci.backends.sequences import Sequence, narrow, pack, sequences
from foci.ir.eager import evaluate
from foci.problem import Formula, Layout, Operands, Results, lay_out

__all__ = ["differentiable"]


def differentiable(operands: Operands, formula: Formula, /) -> Results:
    """Attention as a composite of differentiable torch functions, nothing tracked written in place.

    Skips what the mask empties, as the kernels do. Forward-mode AD takes memory linear in the lengths. Reverse mode,
    whose graph this is under double backward, keeps the weights of every tile: B Hq Sq Skv elements, less the skipped
    blocks.

    Args:
        operands: the call.
        formula: what to compute of it.

    Returns:
        The results, those not asked for None; `row_max` carries no derivative.
    """
    seqs = sequences(operands, formula.layout)
    classes = block_classes(operands, formula, seqs)
    parts = [(s, _attend_sequence(operands, formula, s, classes)) for s in seqs]
    return parts[0][1] if formula.layout is Layout.DENSE else pack(operands, formula.outputs, parts)


def _attend_sequence(operands: Operands, formula: Formula, sequence: Sequence, classes: Tensor | int) -> Results:
    if 0 in (*operands.query.shape[:2], sequence.q_len, sequence.kv_len):
        return attend(narrow(operands, sequence), formula, sequence)
    scores = Scores(operands, formula, sequence)
    chunks = [(chunk, _attend_chunk(scores, chunk)) for chunk in plan_chunks(operands, sequence, classes)]
    batches = [list(group) for _, group in itertools.groupby(chunks, key=lambda item: item[0].b)]

    def join(name: str) -> Tensor | None:
        rows = [[getattr(results, name) for _, results in batch] for batch in batches]
        return None if rows[0][0] is None else torch.cat([torch.cat(heads, dim=1) for heads in rows], dim=0)

    out, lse = join("out"), join("lse")
    assert out is not None
    assert lse is not None
    out = lay_out(out.to(operands.query.dtype), operands.query)
    weights = join("weights")
    return Results(out, lse, join("row_max"), join("column_sums"), None if weights is None else weights.to(operands.query.dtype))


def _attend_chunk(scores: Scores, chunk: Chunk) -> Results:
    operands = scores.operands
    keys, values = scores.key_rows(operands.key, chunk), scores.key_rows(operands.value, chunk)
    tiles = [_attend_tile(scores, (keys, values), chunk, tile) for tile in chunk.tiles]

    def join(name: str) -> Tensor | None:
        parts = [getattr(tile, name) for tile in tiles]
        return None if parts[0] is None else torch.cat(parts, dim=2)

    out, lse = join("out"), join("lse")
    assert out is not None
    assert lse is not None
    columns = None
    if scores.formula.outputs.column_sums:
        columns = torch.stack([tile.column_sums for tile in tiles if tile.column_sums is not None]).sum(0)
    return Results(out, lse, join("row_max"), columns, join("weights"))


def _attend_tile(scores: Scores, columns: tuple[Tensor, Tensor], chunk: Chunk, tile: Tile) -> Results:
    """Results [b, h, q, ...] of a tile, all in the accumulation type.

    The maximum is a constant to every derivative: it cancels from `out`, from the weights and from lse.
    """
    keys, values = columns
    query = scores.query_rows(scores.operands.query, chunk, tile) * scores.operands.scale
    top = query.new_full((*query.shape[:2], 1), -torch.inf).detach()
    base = torch.zeros_like(top)
    total, out = torch.zeros_like(query[..., :1]), query.new_zeros((*query.shape[:2], values.shape[-1]))
    run_weights: list[tuple[Run, Tensor, Tensor, Tensor]] = []
    may_hide = scores.may_hide(tile)
    for run in tile.runs:
        score = _masked(scores, query, keys, (chunk, tile, run))
        attended = score != -torch.inf if may_hide else None
        if attended is not None:
            score = torch.where(attended, score, -torch.inf)  # no gradient passes where the score function gives -inf
        before, top = top, torch.maximum(top, score.detach().amax(-1, keepdim=True))
        base = torch.where(top == -torch.inf, 0.0, top)
        weights, shrink = torch.exp(score - base), torch.exp(before - base)
        dropped_weights = scores.dropped(weights, (chunk, tile, run)) if scores.formula.dropout else weights
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + excluded.weighted_values(dropped_weights, values[:, run.start : run.stop], attended)
        if scores.formula.outputs.column_sums or scores.formula.outputs.weights:
            run_weights.append((run, score, weights, base))
    empty = top == -torch.inf
    safe = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -torch.inf, base + torch.log(safe))[..., 0]
    normalized = [(run, torch.where(score == -torch.inf, 0.0, e * (torch.exp(at - base) / safe))) for run, score, e, at in run_weights]
    all_weights = _whole(scores, normalized, query)
    by_head = [scores.by_head(t, chunk, tile) for t in (out / safe, lse, top[..., 0], all_weights)]
    outputs = scores.formula.outputs
    return Results(
        out=by_head[0],
        lse=by_head[1],
        row_max=by_head[2] if outputs.row_max else None,
        column_sums=by_head[3].sum(2) if outputs.column_sums else None,
        weights=by_head[3] if outputs.weights else None,
    )


def _whole(scores: Scores, weights: list[tuple[Run, Tensor]], query: Tensor) -> Tensor:
    """Concatenate weights of runs, with zeros between them: [pairs, groups * rows, Skv]; no columns if no output needs them."""
    outputs, pieces, position = scores.formula.outputs, [query.new_zeros((*query.shape[:2], 0))], 0
    length = scores.sequence.kv_len if outputs.column_sums or outputs.weights else 0
    for run, weight in [*weights, (Run(length, length, False), pieces[0])]:
        pieces += [query.new_zeros((*query.shape[:2], run.start - position)), weight]
        position = run.stop
    return torch.cat(pieces, dim=-1)


def _masked(scores: Scores, query: Tensor, keys: Tensor, at: tuple[Chunk, Tile, Run]) -> Tensor:
    """Scores [pairs, groups * rows, kv] of a run, -inf where masked."""
    chunk, tile, run = at
    keys = keys[:, run.start : run.stop]
    if scores.is_identity and not run.masked:
        return excluded.scores(query, keys, None)
    view_shape = scores.by_head(query, chunk, tile).shape[:-1] + keys.shape[-2:-1]
    shape = (*query.shape[:2], keys.shape[1])
    allowed = None
    if run.masked:
        mask = evaluate((scores.mask,), scores.env(at, query.new_zeros(())))[0]  # reads no score
        allowed = scores.allowed(mask, at).expand(view_shape)
    everywhere = torch.ones(shape, dtype=torch.bool, device=query.device) if allowed is None else allowed.reshape(shape)
    view = excluded.scores(query, keys, everywhere).view(view_shape)
    if allowed is not None:
        # A score function singular where it is masked must not turn a zero gradient into NaN.
        view = torch.where(allowed, view, 1.0)
    score = evaluate((scores.score,), scores.env(at, view))[0].expand(view_shape)
    return (score if allowed is None else torch.where(allowed, score, -torch.inf)).reshape(shape)
