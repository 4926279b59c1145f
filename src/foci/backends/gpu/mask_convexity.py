"""Whether a mask attends to an interval: of keys for each query, and of queries for each key; and where it may begin."""

from __future__ import annotations

import functools

from foci.backends.mask_intervals import comparisons
from foci.ir.expr import DType, Expr

__all__ = ["begins_late", "is_convex"]

_FLAT, _RISING, _FALLING = 0, 1, -1


@functools.lru_cache(maxsize=512)
def is_convex(mask: Expr, name: str) -> bool:
    """Whether the values of variable `name` ("kv_idx" or "q_idx") at which `mask` holds are an interval, the rest fixed.

    Proved for conjunctions of comparisons between sides that rise or fall; False where there is no such proof.

    Example:
        >>> from foci.ir.expr import variable
        >>> from foci.ir.ops import apply
        >>> is_convex(apply("le", variable("kv_idx"), variable("q_idx")), "kv_idx")
        True
    """
    return all(_is_interval(part, name) for part in comparisons(mask))


def _is_interval(part: Expr, name: str) -> bool:
    if name not in part.variables():
        return True
    if part.op not in ("lt", "le"):
        return False
    low, high = (_trend(arg, name) for arg in part.args)
    return low is not None and high is not None and not (low == high != _FLAT)


@functools.lru_cache(maxsize=512)
def begins_late(mask: Expr) -> bool:
    """Whether a convex mask bounds the keys of a query from below as well, as a window does, so that a query may have few.

    Example:
        >>> from foci.ir.expr import variable
        >>> from foci.ir.ops import apply
        >>> begins_late(apply("le", variable("kv_idx"), variable("q_idx"))), begins_late(apply("le", variable("q_idx"), variable("kv_idx")))
        (False, True)
    """
    return any(map(_is_lower, comparisons(mask)))


def _is_lower(part: Expr) -> bool:
    if part.op not in ("lt", "le"):
        return False
    low, high = (_trend(arg, "kv_idx") for arg in part.args)
    return low == _FALLING or high == _RISING


def _trend(expr: Expr, name: str) -> int | None:
    """Whether an expression rises or falls as the variable grows; None if unknown."""
    if name not in expr.variables():
        return _FLAT
    if expr.op == "var":
        return _RISING
    if expr.op == "neg":
        return _flip(_trend(expr.args[0], name))
    if expr.op == "cast" and expr.dtype is not DType.BOOL:
        return _trend(expr.args[0], name)
    if expr.op in ("add", "min", "max"):
        return _merge(_trend(expr.args[0], name), _trend(expr.args[1], name))
    if expr.op == "sub":
        return _merge(_trend(expr.args[0], name), _flip(_trend(expr.args[1], name)))
    return None


def _flip(trend: int | None) -> int | None:
    return None if trend is None else -trend


def _merge(a: int | None, b: int | None) -> int | None:
    if a is None or b is None or a * b < 0:
        return None
    return a or b
