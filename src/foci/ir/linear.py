"""Integer sums in one form: terms with coefficients and a constant.

`q_idx - kv_idx + 1`, `1 + (q_idx - kv_idx)` and `q_idx - (kv_idx - 1)` are one expression. Sums wrap as the integers of
the device do, so the form is exact; comparisons are normalised as if no sum left the range of its type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from foci.ir.expr import DType, Expr, node

__all__ = ["Linear", "compare", "linear", "rebuilt"]

Key = Callable[[Expr], Any]
_SCALARS: Final = ("param", "size")  # the same for every score of a call


class Linear(NamedTuple):
    """Sum of `coefficient * term`, plus `constant`, in `dtype` arithmetic."""

    terms: Mapping[Expr, int]
    constant: int
    dtype: DType

    def times(self, factor: int) -> Linear:
        """The sum multiplied by an integer."""
        return _wrapped({term: c * factor for term, c in self.terms.items()}, self.constant * factor, self.dtype)

    def begins_negative(self, key: Key) -> bool:
        """Whether the first term in the order of `key` is taken, not added. The least integer is its own negative, and added."""
        first = min(self.terms, key=key, default=None)
        return first is not None and _lowest(self.dtype) < self.terms[first] < 0


def _lowest(dtype: DType) -> int:
    return -(1 << (31 if dtype is DType.INT32 else 63))


def _wrapped(terms: Mapping[Expr, int], constant: int, dtype: DType) -> Linear:
    half = -_lowest(dtype)
    nonzero = {term: wrapped for term, c in terms.items() if (wrapped := (c + half) % (2 * half) - half)}
    return Linear(nonzero, (constant + half) % (2 * half) - half, dtype)


def linear(e: Expr) -> Linear:
    """The linear form of an integer expression."""
    return _sum((e, 1))


def _sum(*parts: tuple[Expr, int]) -> Linear:
    """The linear form of expressions of one type, each times a factor, added up."""
    terms: dict[Expr, int] = {}
    constant = sum(_add(e, factor, terms) for e, factor in parts)
    return _wrapped(terms, constant, parts[0][0].dtype)


def _add(e: Expr, factor: int, terms: dict[Expr, int]) -> int:
    """Adds the terms of `factor * e` to `terms`; its constant."""
    if e.op == "const":
        assert isinstance(e.value, int)
        return factor * e.value
    if e.op in ("add", "sub"):
        return _add(e.args[0], factor, terms) + _add(e.args[1], factor if e.op == "add" else -factor, terms)
    if e.op == "neg":
        return _add(e.args[0], -factor, terms)
    if e.op == "mul":
        for number, rest in (e.args, e.args[::-1]):
            if number.op == "const":
                assert isinstance(number.value, int)
                return _add(rest, factor * number.value, terms)
    terms[e] = terms.get(e, 0) + factor
    return 0


def rebuilt(form: Linear, key: Key) -> Expr:
    """The expression of a form: positive terms, then negative ones, then the constant, each in the order of `key`."""
    dtype, constant = form.dtype, form.constant
    lowest = _lowest(dtype)
    added = sorted((t for t, c in form.terms.items() if c > 0 or c == lowest), key=key)
    taken = sorted((t for t, c in form.terms.items() if lowest < c < 0), key=key)
    total: Expr | None = None
    for term in added:
        product = _times(term, form.terms[term], dtype)
        total = product if total is None else node("add", (total, product), dtype)
    if total is None and (constant or not taken):
        total, constant = node("const", (), dtype, constant), 0
    for term in taken:
        product = _times(term, -form.terms[term], dtype)
        total = node("neg", (product,), dtype) if total is None else node("sub", (total, product), dtype)
    assert total is not None
    if constant > 0 or constant == lowest:
        return node("add", (total, node("const", (), dtype, constant)), dtype)
    return node("sub", (total, node("const", (), dtype, -constant)), dtype) if constant else total


def _times(term: Expr, coefficient: int, dtype: DType) -> Expr:
    return term if coefficient == 1 else node("mul", (term, node("const", (), dtype, coefficient)), dtype)


def compare(op: str, a: Expr, b: Expr, key: Key) -> Expr | bool:
    """The integer comparison `op` (eq, ne, lt, le) of a and b in one form: what varies left, what is fixed right.

    `q - kv < 4`, `q < kv + 4` and `3 >= q - kv` are all `q - kv <= 3`.
    """
    terms, constant, dtype = _sum((a, 1), (b, -1))
    if op == "lt":
        constant += 1  # x < 0 is x + 1 <= 0
    if not terms:
        constant = _wrapped({}, constant, dtype).constant
        return {"eq": constant == 0, "ne": constant != 0}.get(op, constant <= 0)
    moving = Linear({term: c for term, c in terms.items() if term.op not in _SCALARS}, 0, dtype)
    fixed = _wrapped({term: -c for term, c in terms.items() if term.op in _SCALARS}, -constant, dtype)  # moving op fixed
    if op in ("eq", "ne"):
        if (moving if moving.terms else fixed).begins_negative(key):
            moving, fixed = moving.times(-1), fixed.times(-1)
        if not moving.terms:
            moving, fixed = Linear(fixed.terms, 0, dtype), Linear({}, -fixed.constant, dtype)
        return _sides(op, moving, fixed, key)
    if not moving.terms:
        moving, fixed = Linear(fixed.terms, 0, dtype).times(-1), Linear({}, fixed.constant, dtype)
    strict = fixed.constant == -1
    if strict:
        fixed = fixed._replace(constant=0)
    return _sides("lt" if strict else "le", moving, fixed, key)


def _sides(op: str, moving: Linear, fixed: Linear, key: Key) -> Expr:
    rises = any(c > 0 for c in moving.terms.values())
    falls = any(c < 0 for c in moving.terms.values())
    if rises and (fixed.terms or fixed.constant or not falls):
        left, right = moving, fixed
    else:
        rising = Linear({term: c for term, c in moving.terms.items() if c > 0}, 0, moving.dtype)
        left = rising if rises else fixed.times(-1)
        right = Linear({term: c for term, c in moving.terms.items() if c < 0}, 0, moving.dtype).times(-1)
    return node(op, (rebuilt(left, key), rebuilt(right, key)), DType.BOOL)
