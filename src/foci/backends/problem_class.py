"""Kind of a problem, by its score function and mask. Kernels' measured rates and schedules are tabulated by it."""

from __future__ import annotations

import functools
import math
from typing import Final

from foci.backends.causal import is_causal
from foci.backends.mask_intervals import find_bounds
from foci.ir.derivative import score_derivative
from foci.ir.expr import Expr, const
from foci.problem import Layout, Problem
from foci.variant import Variant

__all__ = ["MAX_MASK_BYTES", "find_pair_loads", "mask_bytes", "may_exclude", "score_kind", "tile_bytes"]

MAX_MASK_BYTES: Final = 1 << 26
"""Most bytes of the mask bits of partial tiles. If they take more, kernels evaluate the mask function instead."""
_FINITE: Final = frozenset(
    ("var", "param", "cast", "neg", "abs", "sign", "add", "sub", "mul", "div", "min", "max", "floor", "ceil", "round", "trunc")
    + ("sin", "cos", "tanh", "sigmoid", "erf", "where", "eq", "ne", "lt", "le", "and", "or", "xor", "not")
)
"""Operations whose result is finite if their operands are."""


def score_kind(problem: Problem) -> str:
    """Kind of a problem: one row of the tables of rates and schedules.

    "pair"      score or mask reads memory for each pair of positions, unless it is a "mask"
    "mask"      no score function; the mask reads memory for each pair of positions, and its mask bits fit
    "added"     the score function adds a term that reads no memory by query
    "score"     any other score function
    "full"      no score function; the mask keeps all keys, or up to a last one of each row that is not the causal mask's
    "causal"    no score function; the causal mask
    "window"    no score function; the mask keeps one interval of keys a row, which may begin after key 0
    "document"  no score function; any other mask, or a caller's block mask
    """
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
    """Bytes that each score reads from captured tensors at indices that depend on both q_idx and kv_idx."""
    return sum(variant.captures[int(str(e.value))].dtype.itemsize for e in find_pair_loads(variant.score) | find_pair_loads(variant.mask))


@functools.lru_cache(maxsize=1024)
def may_exclude(variant: Variant, block_size: tuple[int, int] | None) -> bool:
    """Whether the mask, the caller's blocks or a score of -inf may exclude a position. False only where that is certain."""
    return block_size is not None or variant.mask != const(True) or not _is_finite(variant.score, variant)


def _is_finite(e: Expr, variant: Variant) -> bool:
    """Whether an expression is finite for finite scores, sums and products that overflow apart."""
    if e.op == "const":
        return math.isfinite(float(str(e.value)))
    if e.op == "load" and not e.variables() & {"q_idx", "kv_idx"}:
        return True  # of a head alone, as ALiBi's slopes: it says nothing of a position
    if e.op == "load":
        return not variant.captures[int(str(e.value))].dtype.is_floating_point and all(_is_finite(a, variant) for a in e.args)
    if e.op == "div" and e.args[1].op not in ("const", "param"):
        return False
    # of a head alone: no distance makes it overflow
    is_known = e.op in _FINITE or (e.op in ("exp", "exp2") and not e.variables() & {"score", "q_idx", "kv_idx"})
    return is_known and all(_is_finite(a, variant) for a in e.args)


def find_pair_loads(expr: Expr) -> set[Expr]:
    """The loads whose index depends on both q_idx and kv_idx."""
    return {e for e in expr.walk() if e.op == "load" and {"q_idx", "kv_idx"} <= e.variables()}


def mask_bytes(problem: Problem, tile_q: int, tile_kv: int) -> int:
    """Bytes of the mask bits of a dense mask if every tile is partial: four words for each query of a tile, whatever its number of keys."""
    tiles = -(-problem.q_len // tile_q) * -(-problem.kv_len // tile_kv)
    return 16 * tile_q * tiles * _masks(problem)


def _masks(problem: Problem) -> int:
    """Number of different masks: one for each batch entry and head that the mask reads."""
    reads = problem.variant.mask.variables()
    return (problem.batch if "b" in reads else 1) * (problem.q_heads if "h" in reads else 1)


def _is_kept(problem: Problem) -> bool:
    """Whether mask bits are stored: a bit for each pair of positions, in tiles of 128 keys."""
    formula, bits = problem.formula, problem.q_len * (problem.kv_len + 128) * _masks(problem)
    return formula.layout is Layout.DENSE and formula.block_size is None and bits <= 8 * MAX_MASK_BYTES


def _is_added(score: Expr) -> bool:
    reads = {name for e in score.walk() if e.op in ("load", "reduce") for name in e.variables()}
    return "q_idx" not in reads and score_derivative(score) == const(1.0)
