"""Kinds of problems: what the rates of kernels depend on, and how they are best cut up."""

from __future__ import annotations

from foci.backends.causal import is_causal
from foci.backends.triton.bounds import bounds_of
from foci.backends.triton.schedules import tile_bytes
from foci.ir.derivative import score_derivative
from foci.ir.expr import Expr, const
from foci.problem import Problem

__all__ = ["kind_of"]


def kind_of(problem: Problem) -> str:
    """Of a score function "pair" where it reads memory for each pair of positions, "added" where it only adds to the product and reads
    nothing for each query, else "score". Without one by the mask: "full", "causal", "window" for one run of keys a row, "document" for
    the rest."""
    variant = problem.variant
    if tile_bytes(variant):
        return "pair"
    if variant.score.op != "var":
        return "added" if _is_added(variant.score) else "score"
    bounds = bounds_of(variant.mask) if problem.formula.block_size is None else None
    if bounds is None:
        return "document"
    if bounds.is_low:
        return "window"
    return "causal" if is_causal(variant) else "full"


def _is_added(score: Expr) -> bool:
    reads = {name for e in score.walk() if e.op in ("load", "reduce") for name in e.variables()}
    return "q_idx" not in reads and score_derivative(score) == const(1.0)
