"""Masks that keep one interval of keys for each query, or of queries for each key, written as its first and last position.

Such masks are conjunctions of linear comparisons whose coefficient of that position is 1 or -1: causal masks, windows, lengths. A bound on
a distance, |q - k| <= w, is two comparisons. Kernels compute the visited tiles of such a mask by arithmetic, without a table. In a partial
tile they compare each score's position with the bounds, which are computed once per row, or per column.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from foci.ir.expr import DType, Expr, const, node, variable
from foci.ir.linear import Linear, linear, rebuilt
from foci.ir.ops import apply, cast

__all__ = ["Bounds", "as_comparisons", "comparisons", "find_bounds"]

_LENGTHS: Final = {"kv_idx": "kv_len", "q_idx": "q_len"}
_POSITIONS: Final = frozenset(_LENGTHS)
_NOWHERE: Final = const(1 << 30)
"""Larger than any position."""
_SMALL: Final = 1 << 20


@dataclass(frozen=True)
class Bounds:
    """First and last position that a mask keeps."""

    low: Expr
    high: Expr
    is_low: bool  # `low` may be more than 0
    is_high: bool  # `high` may be less than the last position


@functools.lru_cache(maxsize=512)
def find_bounds(mask: Expr, name: str = "kv_idx") -> Bounds | None:
    """Find the bounds of a variable, "kv_idx" or "q_idx", in a mask; None if the mask is not recognised as an interval.

    Example:
        >>> from foci.ir.ops import apply
        >>> causal = apply("le", variable("kv_idx"), variable("q_idx"))
        >>> find_bounds(causal).high, find_bounds(causal, "q_idx").low
        (min(kv_len - 1, q_idx), max(0, kv_idx))
    """
    low: Expr = const(0)
    high = apply("sub", variable(_LENGTHS[name]), const(1))
    is_low = is_high = False
    for part in comparisons(mask):
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
            high, is_high = apply("min", high, _total(rest.times(-1))), True
        else:
            low, is_low = apply("max", low, _total(rest)), True
    return Bounds(_narrow(low), _narrow(high), is_low, is_high)


@functools.lru_cache(maxsize=512)
def as_comparisons(mask: Expr, name: str, *, is_inside: bool = False) -> Expr | None:
    """Write a mask as comparisons of a variable with its bounds; None if it has none.

    Args:
        is_inside: the caller only asks about positions that exist; otherwise the result is false for positions past the end.

    Example:
        >>> from foci.ir.ops import apply
        >>> as_comparisons(apply("le", variable("kv_idx"), variable("q_idx")), "kv_idx")
        kv_idx <= min(kv_len - 1, q_idx)
        >>> as_comparisons(apply("le", variable("kv_idx"), variable("q_idx")), "q_idx", is_inside=True)
        max(0, kv_idx) <= q_idx
    """
    bounds = find_bounds(mask, name)
    if bounds is None:
        return None
    # not simplified: that would compare a difference with 0, which is one subtraction more for each score
    parts = [node("le", (bounds.low, variable(name)), DType.BOOL)] if bounds.is_low else []
    if bounds.is_high or not is_inside:
        parts.append(node("le", (variable(name), bounds.high), DType.BOOL))
    return functools.reduce(functools.partial(apply, "and"), parts) if parts else const(True)


def _is(term: Expr, name: str) -> bool:
    position = variable(name)
    return term is position or (term.op == "cast" and term.args[0] is position)


def _narrow(bound: Expr) -> Expr:
    """Clamp a bound to 32 bits: below 0 to -1, above all positions to `_NOWHERE`."""
    if bound.dtype is DType.INT32:
        return bound
    return cast(apply("max", apply("min", bound, _NOWHERE), const(-1)), DType.INT32)


def comparisons(mask: Expr) -> Iterator[Expr]:
    """Split a mask into the comparisons of which it is a conjunction. abs, min and max of positions become two comparisons each.

    Example:
        >>> from foci.ir.ops import apply
        >>> distance = apply("abs", apply("sub", variable("q_idx"), variable("kv_idx")))
        >>> list(comparisons(apply("le", distance, 3)))
        [q_idx - kv_idx - 3 <= 0, kv_idx - q_idx - 3 <= 0]
    """
    if mask.op == "and":
        for part in mask.args:
            yield from comparisons(part)
        return
    form = _form(mask)
    if form is None:
        yield mask
        return
    forms = _apart(form)
    if len(forms) == 1 and forms[0] is form:
        yield mask
    else:
        yield from (apply("le", rebuilt(one, repr), 0) for one in forms)


def _form(part: Expr) -> Linear | None:
    """Linear form that is at most 0 exactly where a comparison of integers holds; None for anything else."""
    if part.op not in ("le", "lt") or not part.args[0].dtype.is_integer or part.args[0].dtype is not part.args[1].dtype:
        return None
    difference = apply("sub", *part.args)
    return linear(difference if part.op == "le" else apply("add", difference, 1))


def _apart(form: Linear) -> tuple[Linear, ...]:
    """Split a form into forms without abs, min and max of positions; it is at most 0 exactly where all of them are."""
    for term, coefficient in form.terms.items():
        choices = _choices(term, coefficient, form.dtype) if _POSITIONS & term.variables() else ()
        if choices:
            rest = Linear({other: c for other, c in form.terms.items() if other is not term}, form.constant, form.dtype)
            return tuple(one for choice in choices for one in _apart(_plus(rest, choice.times(coefficient))))
    return (form,)


def _choices(term: Expr, coefficient: int, dtype: DType) -> tuple[Linear, ...]:
    """Forms whose largest multiple by `coefficient` equals the term's multiple: x and -x for abs(x); none if the term cannot be split."""
    inner = term.args[0] if term.op == "cast" and term.args[0].dtype is DType.INT32 else term
    if inner.op == "abs" and coefficient > 0:
        parts = tuple(linear(inner.args[0]).times(sign) for sign in (1, -1))
    elif (inner.op == "max" and coefficient > 0) or (inner.op == "min" and coefficient < 0):
        parts = tuple(map(linear, inner.args))
    elif inner is not term and inner.op in ("add", "sub", "neg"):
        parts = (linear(inner),)
    else:
        return ()
    if inner is term:
        return parts
    return tuple(_widened(part, dtype) for part in parts) if all(map(_stays, parts)) else ()


def _plus(a: Linear, b: Linear) -> Linear:
    terms = {term: a.terms.get(term, 0) + b.terms.get(term, 0) for term in (*a.terms, *b.terms)}
    return Linear(terms, a.constant + b.constant, a.dtype).times(1)


def _widened(form: Linear, dtype: DType) -> Linear:
    return Linear({cast(term, dtype): c for term, c in form.terms.items()}, form.constant, dtype)


def _stays(form: Linear) -> bool:
    """Whether a sum cannot overflow 32 bits: at most one position with each sign, and a small constant."""
    signs = sorted(form.terms.values())
    return all(term.op == "var" for term in form.terms) and signs in ([], [-1], [1], [-1, 1]) and abs(form.constant) <= 1 << 30


def _total(form: Linear) -> Expr:
    """Sum of a form's terms, safe against overflow by a caller's large numbers: in 64 bits, or in 32 bits with the one term that is no
    position clamped."""
    non_positions = {term for term in form.terms if not _is_position(term)}
    if len(non_positions) > 1 or abs(form.constant) > _SMALL or any(abs(form.terms[term]) != 1 for term in non_positions):
        return rebuilt(_widened(form, DType.INT64), repr)
    terms = {_held(term) if term in non_positions else variable(str((term.args or (term,))[0].value)): c for term, c in form.terms.items()}
    return rebuilt(Linear(terms, form.constant, DType.INT32), repr)


def _is_position(term: Expr) -> bool:
    return (term.args[0] if term.op == "cast" else term).op == "var"


def _held(term: Expr) -> Expr:
    return cast(apply("max", apply("min", term, _NOWHERE), apply("neg", _NOWHERE)), DType.INT32)


def _difference(part: Expr, name: str) -> Linear | None:
    """`_form` of a comparison, if its coefficient of the variable is 1 or -1 and no other term reads the variable."""
    form = _form(part)
    if form is None:
        return None
    keys = [c for term, c in form.terms.items() if _is(term, name)]
    alone = len(keys) == 1 and abs(keys[0]) == 1 and all(_is(term, name) or name not in term.variables() for term in form.terms)
    return form if alone else None
