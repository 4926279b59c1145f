"""Affine scores, such as ALiBi: the product of query and key, plus a term with a constant slope along the keys of a row, or along queries.

The affine term is the initial value of a tile's accumulator, instead of zero. A thread's columns are a constant distance apart, so an
element costs one operation (`foci.backends.gpu.tiles.affine_columns`, `foci.backends.hopper.masking.affine_terms`). In the backward,
where queries are columns, the part of the term that varies by query is subtracted from the query's logsumexp.
"""

from __future__ import annotations

from foci.backends.gpu.exp2_rewrite import ONE
from foci.ir.expr import Expr, const, variable
from foci.ir.ops import apply
from foci.ir.simplify import simplify

__all__ = ["affine_in_both", "affine_in_keys"]

_SCORE = variable("score")
_ZERO = const(0.0)
_POSITIONS = frozenset(("q_idx", "kv_idx"))


def affine_in_keys(score: Expr, streaming: str = "kv_idx") -> tuple[Expr, Expr] | None:
    """Read a score as raw score plus an affine function of the key: (what is added, slope per key). None if it is not affine, or constant.

    Values that are read from memory must be the same in every row. With `streaming` "q_idx" rows are keys, and the slope is per query.

    Example:
        >>> from foci.ir.ops import cast
        >>> from foci.ir.expr import DType
        >>> distance = apply("sub", cast(variable("kv_idx"), DType.FLOAT), cast(variable("q_idx"), DType.FLOAT))
        >>> affine_in_keys(apply("add", _SCORE, apply("mul", distance, 0.5)))
        ((float(kv_idx) - float(q_idx)) * 0.5, 0.5)
    """
    if score.op != "add" or _SCORE not in score.args:
        return None
    added = score.args[1] if score.args[0] is _SCORE else score.args[0]
    if "score" in added.variables() or any(part.op in ("load", "reduce") and _reads(part) for part in added.walk()):
        return None
    rise = _rise(added, streaming)
    return None if rise is None or rise is _ZERO else (added, rise)


def affine_in_both(score: Expr) -> tuple[Expr, Expr, Expr] | None:
    """(what is added to the raw score, slope per key, slope per query); None if the slope per key is 0, or a slope varies."""
    affine, across = affine_in_keys(score), affine_in_keys(score, "q_idx")
    if affine is None:
        return None
    added, rise = affine
    if across is None and "q_idx" in added.variables():
        return None
    return added, rise, _ZERO if across is None else across[1]


def _reads(e: Expr) -> bool:
    return not e.variables().isdisjoint(_POSITIONS)


def _rise(e: Expr, streaming: str) -> Expr | None:
    """Slope of a float expression along a coordinate; None if it varies."""
    if streaming not in e.variables():
        return _ZERO
    if e.op == "cast" and e.args[0].op == "var":
        return ONE
    if e.op in ("add", "sub"):
        first, second = (_rise(arg, streaming) for arg in e.args)
        return None if first is None or second is None else simplify(apply(e.op, first, second))
    if e.op == "mul":
        for factor, other in (e.args, e.args[::-1]):
            if not _reads(factor):
                rise = _rise(other, streaming)
                return None if rise is None else simplify(apply("mul", rise, factor))
    return None
