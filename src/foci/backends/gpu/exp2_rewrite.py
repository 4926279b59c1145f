"""Scores as exponents of weights, rewritten so that a score costs few operations where a program computes a whole tile of them.

What is one number for all of a tile, the scale, a slope, a cap, is multiplied with its like first: a tile then takes one product
where it took one for each. Terms that do not read the raw product are joined with the row's logsumexp before the product comes.
Rounding differs from the formula's as written, by a few units of float32: for operands in half precision.
"""

from __future__ import annotations

import math
from typing import Final

from foci.ir.expr import DType, Expr, const, node, variable
from foci.ir.ops import apply
from foci.ir.rewrite import rewrite, substitute

__all__ = ["ARGUMENTS", "ONE", "gather_factors", "log2_weight", "scaled_derivative", "split_factor"]

ARGUMENTS: Final = "raw, scale, lse2"
"""Variables of `log2_weight` besides coordinates: the product of query and key, its factor, and logsumexp in base 2."""

_SCORE: Final = variable("score")
_RAW, _SCALE, _LSE2 = (node("var", (), DType.FLOAT, name) for name in ARGUMENTS.split(", "))
_LOG2E: Final = const(math.log2(math.e))
ONE: Final = const(1.0)


def log2_weight(score: Expr, *, half: bool) -> Expr:
    """log2 of a weight: the score in base 2 less `lse2`.

    Example:
        >>> log2_weight(apply("add", variable("score"), 3.0), half=False)
        (raw * scale + 3.0) * 1.4426950408889634 - lse2
        >>> log2_weight(apply("mul", variable("score"), 3.0), half=True)
        raw * (scale * 3.0 * 1.4426950408889634) - lse2
    """
    scaled = _scaled(score)
    if not half:
        return apply("sub", apply("mul", scaled, _LOG2E), _LSE2)
    reads, rest = _terms(gather_factors(scaled))
    shift = _LSE2 if rest is None else apply("sub", _in_base2(rest), _LSE2)
    if reads is None:
        return shift
    return apply("sub" if rest is None else "add", _in_base2(reads), shift)


def scaled_derivative(derivative: Expr, *, half: bool) -> Expr:
    """Derivative of a score by the scaled product, over the variables of `log2_weight`."""
    scaled = _scaled(derivative)
    return gather_factors(scaled) if half else scaled


def _scaled(e: Expr) -> Expr:
    return substitute(e, {_SCORE: apply("mul", _RAW, _SCALE)})


def _in_base2(e: Expr) -> Expr:
    product = apply("mul", e, _LOG2E)
    return _gather(product) or product


def _terms(e: Expr) -> tuple[Expr | None, Expr | None]:
    """Split a sum into terms that read the raw product, and the others."""
    if not _reads_raw(e):
        return None, e
    if e.op == "add":
        (reads, rest), (other_reads, other_rest) = map(_terms, e.args)
        return _sum(reads, other_reads), _sum(rest, other_rest)
    if e.op == "sub" and not _reads_raw(e.args[1]):
        reads, rest = _terms(e.args[0])
        less = e.args[1]
        return reads, apply("mul", less, -1.0) if rest is None else apply("sub", rest, less)
    return e, None


def _reads_raw(e: Expr) -> bool:
    return "raw" in e.variables()


def _sum(a: Expr | None, b: Expr | None) -> Expr | None:
    return apply("add", a, b) if a is not None and b is not None else b if a is None else a


def gather_factors(e: Expr) -> Expr:
    """Multiply factors that are constant over a tile with each other first; a division counts as a multiplication."""
    return rewrite(e, _gather)


def _is_fixed(e: Expr) -> bool:
    """Whether an expression is constant over a tile."""
    return e.dtype is DType.FLOAT and not e.variables() & {"raw", "score", "lse2", "q_idx", "kv_idx"} and not e.free


def _gather(e: Expr) -> Expr | None:
    if e.op == "div" and _is_fixed(e.args[1]) and not _is_fixed(e.args[0]):
        product = apply("mul", e.args[0], apply("div", ONE, e.args[1]))
        return _gather(product) or product
    if e.op == "mul":
        inner, factor = split_factor(e)
        if inner.op == "mul" and not _is_fixed(inner):
            deeper, other = split_factor(inner)
            if other is not ONE and factor is not ONE:
                return apply("mul", deeper, apply("mul", other, factor))
    return None


def split_factor(e: Expr) -> tuple[Expr, Expr]:
    """Split a product into (what varies over a tile, the constant factor); the factor is `ONE` if there is none."""
    if e.op == "mul":
        left, right = e.args
        if _is_fixed(right):
            return left, right
        if _is_fixed(left):
            return right, left
    return e, ONE
