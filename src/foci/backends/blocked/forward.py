"""The forward pass: an online softmax over runs of keys.

Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022, algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foci.backends.blocked.scores import Scores
from foci.backends.blocked.tiles import Chunk, Run, Tile, block_classes, plan_chunks
from foci.backends.excluded import add_not_finite, finite, has_not_finite
from foci.backends.sequences import Sequence, sequences, without_keys
from foci.problem import Formula, Operands, Results, accumulation_dtype, empty_out

__all__ = ["forward", "forward_single", "is_single"]

_SINGLE = 1 << 16


def is_single(operands: Operands) -> bool:
    """Whether a dense call is small enough for `forward_single`, and not empty."""
    batch, heads, q_len, _ = operands.query.shape
    return 0 < batch * heads * q_len * operands.key.shape[2] <= _SINGLE


def forward_single(operands: Operands, formula: Formula) -> Results:
    """A small dense call in as few torch calls as will do: any functions, but no dropout and no output beside lse."""
    query, key, value = operands.query, operands.key, operands.value
    batch, heads, q_len, _ = query.shape
    acc = accumulation_dtype(query.dtype)
    if query.dtype != acc:
        query, key, value = query.to(acc), key.to(acc), value.to(acc)
    groups, kv_len = heads // key.shape[1], key.shape[2]
    query, key, value = query.reshape(batch * key.shape[1], groups * q_len, -1), key.flatten(0, 1), value.flatten(0, 1)
    score = torch.bmm(query * operands.scale, key.mT)
    is_plain = formula.variant.is_plain
    if not is_plain:
        run = Run(0, kv_len, formula.variant.mask.op != "const")
        tile = Tile(0, q_len, (run,))
        chunk = Chunk((0, batch), (0, operands.key.shape[1]), groups, (tile,))
        scores = Scores(operands, formula, Sequence(None, (0, q_len), (0, kv_len)))
        score = scores.functions(score.view(batch, heads, q_len, kv_len), (chunk, tile, run))[0].view(score.shape)
    attended = None if is_plain or not has_not_finite(value) else score != -torch.inf
    base = score.amax(-1, keepdim=True)
    if not is_plain:
        base = base.masked_fill_(base == -torch.inf, 0.0)
    weights = score.sub_(base).exp_()
    total = weights.sum(-1, keepdim=True)
    lse = torch.log(total).add_(base)
    if not is_plain:
        total = total.masked_fill_(total == 0, 1.0)
    out = torch.bmm(weights, value if attended is None else finite(value)).div_(total)
    if attended is not None:
        add_not_finite(out, attended, value)
    out = out.view(batch, heads, q_len, -1)
    return Results(out=empty_out(operands.query, operands.value).copy_(out), lse=lse.view(batch, heads, q_len))


def forward(operands: Operands, formula: Formula) -> Results:
    """Attention of any call, in O(Sq + Skv) memory beside the results."""
    results = without_keys(operands, formula.outputs)
    if 0 in operands.query.shape[:3] or operands.key.shape[2] == 0:
        return results
    seqs = sequences(operands, formula.layout)
    classes = block_classes(operands, formula, seqs)
    for sequence in seqs:
        if sequence.q_len and sequence.kv_len:
            scores = Scores(operands, formula, sequence)
            for chunk in plan_chunks(operands, sequence, classes):
                _forward_chunk(scores, chunk, results)
    return results


def _forward_chunk(scores: Scores, chunk: Chunk, results: Results) -> None:
    operands = scores.operands
    keys, values = scores.key_rows(operands.key, chunk), scores.key_rows(operands.value, chunk)
    strange = any(scores.may_hide(tile) for tile in chunk.tiles) and has_not_finite(values)
    for tile in chunk.tiles:
        if tile.runs:
            query = scores.query_rows(operands.query, chunk, tile) * operands.scale
            base, total = _forward_tile(scores, (query, keys, values), (chunk, tile), results, strange=strange)
            if results.column_sums is not None or results.weights is not None:
                _weights_tile(scores, (query, keys, base, total), chunk, tile, results)


def _forward_tile(
    scores: Scores, operands: tuple[Tensor, Tensor, Tensor], at: tuple[Chunk, Tile], results: Results, *, strange: bool
) -> tuple[Tensor, Tensor]:
    """Writes out, lse and row_max of a tile; gives what normalises its weights, [pairs, groups * rows, 1] each.

    Weights are `exp(score - base) / total`: base is the row's maximum, 0 where the row has no key.
    """
    query, keys, values = operands
    chunk, tile = at
    may_be_empty = scores.may_hide(tile)
    row_max: Tensor | None = None
    base = row_sum = out = None
    for run in tile.runs:
        score = scores.masked(query, keys, (chunk, tile, run))
        attended = score != -torch.inf if strange else None
        run_max = score.amax(-1, keepdim=True)
        prev_max, row_max = row_max, run_max if row_max is None else torch.maximum(row_max, run_max)
        base = row_max.masked_fill(row_max == -torch.inf, 0.0) if may_be_empty else row_max
        weights = score.sub_(base).exp_()
        run_sum = weights.sum(-1, keepdim=True)
        if scores.formula.dropout:
            weights = scores.dropped(weights, (chunk, tile, run))
        run_values = values[:, run.start : run.stop]
        value = finite(run_values) if strange else run_values
        if out is None or row_sum is None or prev_max is None:
            out, row_sum = torch.bmm(weights, value), run_sum
        else:
            shrink = torch.exp(prev_max - base)
            out, row_sum = out.mul_(shrink).baddbmm_(weights, value), row_sum.mul_(shrink).add_(run_sum)
        if attended is not None:
            add_not_finite(out, attended, run_values)
    assert row_max is not None
    assert base is not None
    assert row_sum is not None
    assert out is not None
    lse = torch.log(row_sum).add_(base)
    if may_be_empty:
        row_sum = row_sum.masked_fill(row_sum == 0, 1.0)
    _write(results.out, scores, out.div_(row_sum), chunk, tile)
    _write(results.lse, scores, lse[..., 0], chunk, tile)
    if results.row_max is not None:
        _write(results.row_max, scores, row_max[..., 0], chunk, tile)
    return base, row_sum


def _write(target: Tensor, scores: Scores, rows: Tensor, chunk: Chunk, tile: Tile) -> None:
    start = scores.sequence.q[0]
    part = target[chunk.b[0] : chunk.b[1], chunk.heads[0] : chunk.heads[1], start + tile.start : start + tile.stop]
    part.copy_(scores.by_head(rows, chunk, tile))


def _weights_tile(scores: Scores, operands: tuple[Tensor, Tensor, Tensor, Tensor], chunk: Chunk, tile: Tile, results: Results) -> None:
    """A second pass over the runs of a tile, for what needs normalised weights."""
    query, keys, base, total = operands
    b, h, first = slice(*chunk.b), slice(*chunk.heads), scores.sequence.kv[0]
    for run in tile.runs:
        weights = scores.masked(query, keys, (chunk, tile, run)).sub_(base).exp_().div_(total)
        view = scores.by_head(weights, chunk, tile)
        columns = slice(first + run.start, first + run.stop)
        if results.column_sums is not None:
            results.column_sums[b, h, columns] += view.sum(2)
        if results.weights is not None:
            results.weights[b, h, tile.start : tile.stop, columns] = view
