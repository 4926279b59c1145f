"""Kinds of problems: what the rates of kernels depend on, and how they are best cut up."""

from __future__ import annotations

import functools
from typing import Final

from foci.backends.causal import is_causal
from foci.backends.mask_intervals import find_bounds
from foci.ir.derivative import score_derivative
from foci.ir.expr import Expr, const
from foci.problem import Layout, Problem
from foci.variant import Variant

__all__ = ["WORDS_AT_MOST", "find_pair_loads", "score_kind", "tile_bytes", "word_bytes"]

WORDS_AT_MOST: Final = 1 << 26
"""Bytes of the words of a mask's partial tiles; where there are more, kernels compute the mask."""


def score_kind(problem: Problem) -> str:
    """Of a score function "pair" where it reads memory for each pair of positions, "added" where it only adds to the product and reads
    nothing for each query, else "score". Without one by the mask: "full", "causal", "window" for one run of keys a row, "mask" where it
    reads memory for each pair and fits the words that are kept of it, "document" for the rest."""
    variant = problem.variant
    if tile_bytes(variant):
        return "mask" if variant.score.op == "var" and _is_kept(problem) else "pair"
    if variant.score.op != "var":
        return "added" if _is_added(variant.score) else "score"
    bounds = find_bounds(variant.mask) if problem.formula.block_size is None else None
    if bounds is None:
        return "document"
    if bounds.is_low:
        return "window"
    return "causal" if is_causal(variant) else "full"


@functools.lru_cache(maxsize=1024)
def tile_bytes(variant: Variant) -> int:
    """Bytes that each score reads from captured tensors by (q, kv) at once."""
    return sum(variant.captures[int(str(e.value))].dtype.itemsize for e in find_pair_loads(variant.score) | find_pair_loads(variant.mask))


def find_pair_loads(expr: Expr) -> set[Expr]:
    """The loads whose index depends on both q_idx and kv_idx."""
    return {e for e in expr.walk() if e.op == "load" and {"q_idx", "kv_idx"} <= e.variables()}


def word_bytes(problem: Problem, tile_q: int, tile_kv: int) -> int:
    """What the words of a dense mask take if all tiles of so many queries and keys are partial: four for each query of a tile, however
    many keys it has, of each batch entry and head that differs."""
    tiles = -(-problem.q_len // tile_q) * -(-problem.kv_len // tile_kv)
    return 16 * tile_q * tiles * _masks(problem)


def _masks(problem: Problem) -> int:
    """Of how many batch entries and heads a mask differs."""
    reads = problem.variant.mask.variables()
    return (problem.batch if "b" in reads else 1) * (problem.q_heads if "h" in reads else 1)


def _is_kept(problem: Problem) -> bool:
    """Whether a mask's words are kept, in tiles of 128 keys: a bit for each pair of positions."""
    asked, places = problem.formula, problem.q_len * (problem.kv_len + 128) * _masks(problem)
    return asked.layout is Layout.DENSE and asked.block_size is None and places <= 8 * WORDS_AT_MOST


def _is_added(score: Expr) -> bool:
    reads = {name for e in score.walk() if e.op in ("load", "reduce") for name in e.variables()}
    return "q_idx" not in reads and score_derivative(score) == const(1.0)
