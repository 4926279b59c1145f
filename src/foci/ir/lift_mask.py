"""Masks hidden in scores: a score of -inf is a mask, wherever in the expression it is put."""

from __future__ import annotations

import math

from foci.ir.expr import DType, Expr, const, node
from foci.ir.ops import apply
from foci.ir.simplify import make, simplify

__all__ = ["lift_mask"]

_TRUE, _FALSE = const(True), const(False)


def lift_mask(score: Expr) -> tuple[Expr, Expr]:
    """`score` as `where(mask, rest, -inf)`: the pair (rest, mask), both simplified.

    Pulls `where(cond, x, -inf)` out of sums, products with positive constants, minima and other `where`s, when cond does
    not read the score and the other terms can't be +inf or nan by a constant of theirs.

    Example:
        >>> from foci.ir.expr import variable
        >>> s, q, kv = variable("score"), variable("q_idx"), variable("kv_idx")
        >>> lift_mask(apply("add", apply("where", apply("le", kv, q), s, -math.inf), 1.5))
        (score + 1.5, kv_idx <= q_idx)
    """
    score = simplify(score)
    rest, mask = _split(score)
    return (score, mask) if rest is score else (simplify(rest), simplify(mask))


def _split(e: Expr) -> tuple[Expr, Expr]:
    if e.op == "where" and e.dtype is DType.FLOAT:
        return _split_where(e)
    if e.op in ("add", "min"):
        (a, mask_a), (b, mask_b) = (_split(arg) for arg in e.args)
        alone_a, alone_b = mask_a is _TRUE, mask_b is _TRUE
        if (alone_a or _tame(e.args[1])) and (alone_b or _tame(e.args[0])):
            return apply(e.op, a, b), make("and", mask_a, mask_b)
    if e.op == "sub" and _tame(e.args[1]):
        a, mask = _split(e.args[0])
        return apply("sub", a, e.args[1]), mask
    if e.op in ("mul", "div") and e.dtype is DType.FLOAT:
        a, b = e.args
        if b.op == "const" and isinstance(b.value, float) and 0.0 < b.value < math.inf:
            rest, mask = _split(a)
            return apply(e.op, rest, b), mask
    if e.op == "round_to":
        rest, mask = _split(e.args[0])
        return node("round_to", (rest,), e.dtype, e.value), mask
    return e, _TRUE


def _split_where(e: Expr) -> tuple[Expr, Expr]:
    cond, a, b = e.args
    if "score" in cond.variables():
        return e, _TRUE
    lowest = tuple(arg.op == "const" and arg.value == -math.inf for arg in (a, b))
    if all(lowest):
        return const(0.0), _FALSE
    if lowest[1]:
        rest, mask = _split(a)
        return rest, make("and", cond, mask)
    if lowest[0]:
        rest, mask = _split(b)
        return rest, make("and", make("not", cond), mask)
    (rest_a, mask_a), (rest_b, mask_b) = _split(a), _split(b)
    return apply("where", cond, rest_a, rest_b), make("where", cond, mask_a, mask_b)


def _tame(e: Expr) -> bool:
    """Whether no constant of `e` is +inf or nan, which would make nan of -inf."""
    constants = (x.value for x in e.walk() if x.op == "const" and x.dtype is DType.FLOAT)
    return all(isinstance(value, float) and value < math.inf for value in constants)
