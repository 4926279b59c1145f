"""Masks that keep one run of keys for each query, as its first and last key.

Such masks are conjunctions of comparisons in which a key's position stands alone: causal ones, windows, lengths. Their tiles
are found by arithmetic, with nothing to look up, and two comparisons a score mask what is partial.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from foci.ir.expr import DType, Expr, const, variable
from foci.ir.linear import Linear, linear, rebuilt
from foci.ir.ops import apply, cast

__all__ = ["Bounds", "bounds_of"]

_KEY: Final = variable("kv_idx")
_NOWHERE: Final = const(1 << 30)


@dataclass(frozen=True)
class Bounds:
    """First and last key of a query; `is_low` is whether the first is not always 0."""

    low: Expr
    high: Expr
    is_low: bool


@functools.lru_cache(maxsize=512)
def bounds_of(mask: Expr) -> Bounds | None:
    """The bounds of a mask, or None where it is not seen to have any.

    >>> from foci.ir.ops import apply
    >>> bounds_of(apply("le", variable("kv_idx"), variable("q_idx"))).high
    min(kv_len - 1, q_idx)
    """
    low: Expr = const(0)
    high = apply("sub", variable("kv_len"), const(1))
    is_low = False
    for part in _conjuncts(mask):
        if part.op == "const" and part.value is True:
            continue
        if "kv_idx" not in part.variables():
            low, is_low = apply("where", part, low, _NOWHERE), True
            continue
        form = _difference(part)
        if form is None:
            return None
        coefficient = sum(c for term, c in form.terms.items() if _is_key(term))
        rest = Linear({term: c for term, c in form.terms.items() if not _is_key(term)}, form.constant, form.dtype)
        if coefficient == 1:
            high = apply("min", high, rebuilt(rest.times(-1), repr))
        else:
            low, is_low = apply("max", low, rebuilt(rest, repr)), True
    return Bounds(_narrow(low), _narrow(high), is_low)


def _is_key(term: Expr) -> bool:
    return term is _KEY or (term.op == "cast" and term.args[0] is _KEY)


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


def _difference(part: Expr) -> Linear | None:
    """A form of coefficient 1 or -1 in the key's position and otherwise free of it, which is at most 0 where `part` holds."""
    if part.op not in ("le", "lt") or not part.args[0].dtype.is_integer or part.args[0].dtype is not part.args[1].dtype:
        return None
    form = linear(part.args[0]).plus(linear(part.args[1]), -1)
    if part.op == "lt":
        form = form.plus(Linear({}, 1, form.dtype))
    keys = [c for term, c in form.terms.items() if _is_key(term)]
    alone = len(keys) == 1 and abs(keys[0]) == 1 and all(_is_key(term) or "kv_idx" not in term.variables() for term in form.terms)
    return form if alone else None
