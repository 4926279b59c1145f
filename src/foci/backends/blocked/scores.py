"""Scores, masks and dropout of one tile: what the forward and the backward pass have in common."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from foci.backends.blocked.tiles import Chunk, Run, Tile
from foci.backends.sequences import Sequence, coordinate
from foci.blocks import FULL, PARTIAL
from foci.dropout import keep_run
from foci.ir.eager import Env, evaluate
from foci.ir.expr import Expr
from foci.problem import Formula, Operands, accumulation_dtype

__all__ = ["Scores"]


@functools.lru_cache(maxsize=1024)
def _reads(score: Expr, mask: Expr) -> frozenset[str]:
    return (score.variables() | mask.variables()) - {"score"}


class Scores:
    """Evaluates the formula's functions on tiles of one sequence.

    Rows of a chunk are laid out as [pairs, groups * rows, ...], so that key heads are read once for all query heads that
    share them; functions see the same memory as [b, h, q, kv].
    """

    def __init__(self, operands: Operands, formula: Formula, sequence: Sequence) -> None:
        query = operands.query
        self.operands = operands
        self.formula = formula
        self.sequence = sequence
        self.acc = accumulation_dtype(query.dtype)
        self.score = formula.variant.score
        self.mask = formula.variant.mask
        self.is_identity = self.score.op == "var"
        self.reads = _reads(self.score, self.mask) | ({"b", "h", "q_idx"} if formula.dropout else set())
        self._at: dict[tuple[str, tuple[int, int]], Tensor] = {}

    def may_hide(self, tile: Tile) -> bool:
        """Whether a row of the tile may have no key: masked, or given -inf by the score function."""
        return not self.is_identity or any(run.masked for run in tile.runs)

    def query_rows(self, rows: Tensor, chunk: Chunk, tile: Tile) -> Tensor:
        """[pairs, groups * rows, width] in the accumulation type of a tensor laid out as the queries."""
        start = self.sequence.q[0]
        part = rows[chunk.b[0] : chunk.b[1], chunk.heads[0] : chunk.heads[1], start + tile.start : start + tile.stop]
        return part.to(self.acc).reshape(chunk.count, -1, rows.shape[-1])

    def key_rows(self, rows: Tensor, chunk: Chunk) -> Tensor:
        """[pairs, Skv, width] in the accumulation type of a tensor laid out as the keys."""
        part = rows[chunk.b[0] : chunk.b[1], chunk.kv_heads[0] : chunk.kv_heads[1], self.sequence.kv[0] : self.sequence.kv[1]]
        return part.to(self.acc).flatten(0, 1)

    def by_head(self, rows: Tensor, chunk: Chunk, tile: Tile) -> Tensor:
        """[b, h, q, ...] of [pairs, groups * rows, ...]: the same memory."""
        return rows.view(chunk.b[1] - chunk.b[0], chunk.heads[1] - chunk.heads[0], tile.stop - tile.start, *rows.shape[2:])

    def variables(self, at: tuple[Chunk, Tile, Run]) -> dict[str, Tensor]:
        """The coordinates of a tile that the functions read, as `foci.ir.eager` wants them."""
        chunk, tile, run = at
        spans = {"b": chunk.b, "h": chunk.heads, "q_idx": (tile.start, tile.stop), "kv_idx": (run.start, run.stop)}
        return {name: self._coordinate(name, spans.get(name, (0, 0))) for name in self.reads}

    def _coordinate(self, name: str, span: tuple[int, int]) -> Tensor:
        tensor = self._at.get((name, span))
        if tensor is None:
            tensor = self._at[name, span] = coordinate(name, self.sequence, span, self.operands.query.device)
        return tensor

    def env(self, at: tuple[Chunk, Tile, Run], score: Tensor) -> Env:
        """Environment in which expressions are evaluated over a tile; `score` is the raw score [b, h, q, kv]."""
        variables = self.variables(at)
        variables["score"] = score
        operands = self.operands
        return Env(variables, operands.captures, operands.ints, operands.floats, self.acc)

    def raw(self, query: Tensor, keys: Tensor, run: Run) -> Tensor:
        """Scaled products [pairs, groups * rows, kv] of rows that hold the scale already."""
        return torch.bmm(query, keys[:, run.start : run.stop].mT)

    def masked(self, query: Tensor, keys: Tensor, at: tuple[Chunk, Tile, Run]) -> Tensor:
        """Scores [pairs, groups * rows, kv], fresh memory: -inf where masked."""
        raw = self.raw(query, keys, at[2])
        if self.is_identity and not at[2].masked:
            return raw
        return self.functions(self.by_head(raw, *at[:2]), at)[0].view(raw.shape)

    def functions(self, raw: Tensor, at: tuple[Chunk, Tile, Run], more: Items[Expr] = ()) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Scores [b, h, q, kv] after score function and mask, and the values of further expressions.

        Without a score function the scores are written over `raw`; else they are fresh memory.
        """
        exprs = (*(() if self.is_identity else (self.score,)), *((self.mask,) if at[2].masked else ()), *more)
        values = list(evaluate(exprs, self.env(at, raw)))
        score = raw if self.is_identity else _whole(values.pop(0), raw)
        mask = values.pop(0) if at[2].masked else None
        if any(value.data_ptr() == score.data_ptr() for value in values):
            score = score.clone()  # exp is its own derivative
        if mask is not None:
            score.masked_fill_(torch.logical_not(self.allowed(mask, at)), -torch.inf)
        return score, tuple(values)

    def allowed(self, mask: Tensor, at: tuple[Chunk, Tile, Run]) -> Tensor:
        """Which positions of a masked run are attended to: its mask, combined with the caller's blocks."""
        chunk, tile, run = at
        if self.formula.block_size is None:
            return mask
        blocks = self.operands.blocks
        assert blocks is not None
        if blocks.shape[0] > 1:
            blocks = blocks[chunk.b[0] : chunk.b[1]]
        if blocks.shape[1] > 1:
            blocks = blocks[:, chunk.heads[0] : chunk.heads[1]]
        rows = torch.arange(tile.start, tile.stop, device=blocks.device) // self.formula.block_size[0]
        columns = torch.arange(run.start, run.stop, device=blocks.device) // self.formula.block_size[1]
        classes = blocks.index_select(2, rows).index_select(3, columns)
        return (classes == FULL) | ((classes == PARTIAL) & mask)

    def dropped(self, weights: Tensor, at: tuple[Chunk, Tile, Run]) -> Tensor:
        """Weights [pairs, groups * rows, kv] after dropout."""
        operands, view, run = self.operands, self.by_head(weights, *at[:2]), at[2]
        assert operands.seed is not None
        names = self.variables(at)
        keep_mask = keep_run(operands.seed, operands.dropout_p, (names["b"], names["h"], names["q_idx"]), run.start, run.stop)
        scale = 0.0 if operands.dropout_p >= 1 else 1 / (1 - operands.dropout_p)
        return torch.where(keep_mask, view * scale, 0.0).view(weights.shape)


def _whole(score: Tensor, view: Tensor) -> Tensor:
    # A function that ignores the score or a coordinate gives a smaller shape; the softmax overwrites what it gets.
    return score if score.shape == view.shape and score.is_contiguous() else score.to(view.device).expand(view.shape).contiguous()
