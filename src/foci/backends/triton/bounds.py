"""Masks that keep one run of keys for each query, or of queries for each key, as its first and last one.

Such masks are conjunctions of comparisons in which that position stands alone: causal ones, windows, lengths. Their tiles
can be found by arithmetic, with nothing to look up, and two comparisons a score mask what is partial: bounds are worked out row by
row, or column by column.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from foci.ir.expr import DType, Expr, const, node, variable
from foci.ir.linear import Linear, linear, rebuilt
from foci.ir.ops import apply, cast

__all__ = ["Bounds", "bounds_of", "within"]

_LENGTHS: Final = {"kv_idx": "kv_len", "q_idx": "q_len"}
_NOWHERE: Final = const(1 << 30)


@dataclass(frozen=True)
class Bounds:
    """First and last position that is kept; `is_low` is whether the first is not always 0, `is_high` whether the last is not always
    the last there is."""

    low: Expr
    high: Expr
    is_low: bool
    is_high: bool


@functools.lru_cache(maxsize=512)
def bounds_of(mask: Expr, name: str = "kv_idx") -> Bounds | None:
    """The bounds of a variable, "kv_idx" or "q_idx", in a mask, or None where it is not seen to have any.

    >>> from foci.ir.ops import apply
    >>> causal = apply("le", variable("kv_idx"), variable("q_idx"))
    >>> bounds_of(causal).high, bounds_of(causal, "q_idx").low
    (min(kv_len - 1, q_idx), max(0, kv_idx))
    """
    low: Expr = const(0)
    high = apply("sub", variable(_LENGTHS[name]), const(1))
    is_low = is_high = False
    for part in _conjuncts(mask):
        if part.op == "const" and part.value is True:
            continue
        if name not in part.variables():
            low, is_low = apply("where", part, low, _NOWHERE), True
            continue
        form = _difference(part, name)
        if form is None:
            return None
        coefficient = sum(c for term, c in form.terms.items() if _is(term, name))
        rest = Linear({term: c for term, c in form.terms.items() if not _is(term, name)}, form.constant, form.dtype)
        if coefficient == 1:
            high, is_high = apply("min", high, rebuilt(rest.times(-1), repr)), True
        else:
            low, is_low = apply("max", low, rebuilt(rest, repr)), True
    return Bounds(_narrow(low), _narrow(high), is_low, is_high)


@functools.lru_cache(maxsize=512)
def within(mask: Expr, name: str, *, is_inside: bool = False) -> Expr | None:
    """The mask as comparisons of a variable with its bounds; None where it has none.

    Args:
        is_inside: positions beyond the last are nobody's concern; otherwise it holds for none of them.

    >>> from foci.ir.ops import apply
    >>> within(apply("le", variable("kv_idx"), variable("q_idx")), "kv_idx")
    kv_idx <= min(kv_len - 1, q_idx)
    >>> within(apply("le", variable("kv_idx"), variable("q_idx")), "q_idx", is_inside=True)
    max(0, kv_idx) <= q_idx
    """
    found = bounds_of(mask, name)
    if found is None:
        return None
    # as they stand: simplified, a comparison would be of differences, of which there is one for each score
    parts = [node("le", (found.low, variable(name)), DType.BOOL)] if found.is_low else []
    if found.is_high or not is_inside:
        parts.append(node("le", (variable(name), found.high), DType.BOOL))
    return functools.reduce(functools.partial(apply, "and"), parts) if parts else const(True)


def _is(term: Expr, name: str) -> bool:
    position = variable(name)
    return term is position or (term.op == "cast" and term.args[0] is position)


def _narrow(bound: Expr) -> Expr:
    """A bound in 32 bits; beyond those it is nowhere."""
    if bound.dtype is DType.INT32:
        return bound
    return cast(apply("max", apply("min", bound, _NOWHERE), const(-1)), DType.INT32)


def _conjuncts(mask: Expr) -> Iterator[Expr]:
    if mask.op == "and":
        for part in mask.args:
            yield from _conjuncts(part)
    else:
        yield mask


def _difference(part: Expr, name: str) -> Linear | None:
    """A form of coefficient 1 or -1 in a variable and otherwise free of it, which is at most 0 where `part` holds."""
    if part.op not in ("le", "lt") or not part.args[0].dtype.is_integer or part.args[0].dtype is not part.args[1].dtype:
        return None
    difference = apply("sub", *part.args)
    form = linear(difference if part.op == "le" else apply("add", difference, 1))
    keys = [c for term, c in form.terms.items() if _is(term, name)]
    alone = len(keys) == 1 and abs(keys[0]) == 1 and all(_is(term, name) or name not in term.variables() for term in form.terms)
    return form if alone else None
