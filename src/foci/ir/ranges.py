"""Intervals over whole grids of blocks at once, and the rules that carry them through operations.

A `Range` holds lower and upper bounds as float64 tensors that broadcast together, one entry per block pair. Booleans are
ranges within [0, 1]: `lo == 1` is surely true, `hi == 0` surely false. Rules are conservative: the true value never
leaves the range (Moore, Interval Analysis, 1966), and what may be nan has no bounds at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Range", "Rule", "bounded", "decreasing", "increasing", "oscillating", "unknown"]


@dataclass(frozen=True, eq=False)
class Range:
    """Bounds `lo <= x <= hi`, float64 tensors that broadcast together."""

    lo: Tensor
    hi: Tensor

    def where(self, keep: Tensor, other: Range) -> Range:
        """Return these bounds where `keep`, elsewhere those of another."""
        return Range(torch.where(keep, self.lo, other.lo), torch.where(keep, self.hi, other.hi))

    def hull(self, other: Range) -> Range:
        """The narrowest bounds that hold both."""
        return Range(torch.minimum(self.lo, other.lo), torch.maximum(self.hi, other.hi))


Rule = Callable[..., Range]


def _sound(lo: Tensor, hi: Tensor) -> Range:
    # inf - inf, log(-1) and the like say nothing: widen.
    unknown = torch.isnan(lo) | torch.isnan(hi)
    return Range(torch.where(unknown, -torch.inf, lo), torch.where(unknown, torch.inf, hi))


def increasing(f: Callable[[Tensor], Tensor]) -> Rule:
    """The rule of a function that never falls."""
    return lambda a: _sound(f(a.lo), f(a.hi))


def decreasing(f: Callable[[Tensor], Tensor]) -> Rule:
    """The rule of a function that never rises."""
    return lambda a: _sound(f(a.hi), f(a.lo))


def oscillating(a: Range) -> Range:
    """The rule of sine and cosine: of infinity they are nan."""
    return Range(torch.full_like(a.lo, -1.0), torch.full_like(a.hi, 1.0)).where(_is_finite(a), unknown(a))


def _is_finite(a: Range) -> Tensor:
    return torch.isfinite(a.lo) & torch.isfinite(a.hi)


def bounded(lo: float, hi: float) -> Rule:
    """The rule of a function of which only its bounds are used."""
    return lambda *args: Range(torch.full_like(args[0].lo, lo), torch.full_like(args[0].hi, hi))


def unknown(*args: Range) -> Range:
    """The rule that knows nothing."""
    return bounded(-torch.inf, torch.inf)(*args)


def add(a: Range, b: Range) -> Range:
    """The rule of a sum."""
    return _sound(a.lo + b.lo, a.hi + b.hi)


def sub(a: Range, b: Range) -> Range:
    """The rule of a difference."""
    return _sound(a.lo - b.hi, a.hi - b.lo)


def _corners(f: Callable[[Tensor, Tensor], Tensor], a: Range, b: Range) -> Range:
    at = [f(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    return _sound(
        torch.minimum(torch.minimum(at[0], at[1]), torch.minimum(at[2], at[3])),
        torch.maximum(torch.maximum(at[0], at[1]), torch.maximum(at[2], at[3])),
    )


def mul(a: Range, b: Range) -> Range:
    """The rule of a product."""
    return _corners(torch.mul, a, b)


def _by_divisor(f: Callable[[Tensor, Tensor], Tensor], a: Range, b: Range) -> Range:
    # inf / inf says nothing, so an unbounded dividend over an unbounded divisor is unknown.
    return _corners(f, a, b).where(_is_divisor(b), unknown(add(a, b)))


def _is_divisor(b: Range) -> Tensor:
    return ((b.lo > 0) | (b.hi < 0)) & _is_finite(b)


def div(a: Range, b: Range) -> Range:
    """The rule of a quotient; unknown where the divisor may be zero."""
    return _by_divisor(torch.div, a, b)


def floordiv(a: Range, b: Range) -> Range:
    """The rule of a quotient rounded down."""
    return _by_divisor(lambda x, y: torch.floor(x / y), a, b)


def mod(a: Range, b: Range) -> Range:
    """The rule of a remainder with the divisor's sign: exact where the dividend stays within one turn."""
    point = (b.lo == b.hi) & (b.lo > 0)
    turn = torch.floor(a.lo / b.lo)
    proper = _is_divisor(b) & _is_finite(a)
    same = point & (turn == torch.floor(a.hi / b.lo)) & proper
    wide = Range(torch.minimum(b.lo, torch.zeros_like(b.lo)), torch.maximum(b.hi, torch.zeros_like(b.hi)))
    return _sound(a.lo - turn * b.lo, a.hi - turn * b.lo).where(same, wide.where(proper, unknown(add(a, b))))


def fmod(a: Range, b: Range) -> Range:
    """The rule of a remainder with the dividend's sign."""
    most = torch.maximum(b.lo.abs(), b.hi.abs())
    zero = torch.zeros_like(most)
    result = Range(torch.where(a.lo < 0, -most, zero), torch.where(a.hi > 0, most, zero))
    return result.where(_is_divisor(b) & _is_finite(a), unknown(add(a, b)))


def minimum(a: Range, b: Range) -> Range:
    """The rule of the smaller of two."""
    return Range(torch.minimum(a.lo, b.lo), torch.minimum(a.hi, b.hi))


def maximum(a: Range, b: Range) -> Range:
    """The rule of the larger of two."""
    return Range(torch.maximum(a.lo, b.lo), torch.maximum(a.hi, b.hi))


def absolute(a: Range) -> Range:
    """The rule of an absolute value."""
    crosses = (a.lo <= 0) & (a.hi >= 0)
    least = torch.minimum(a.lo.abs(), a.hi.abs())
    return Range(torch.where(crosses, torch.zeros_like(least), least), torch.maximum(a.lo.abs(), a.hi.abs()))


def cosh(a: Range) -> Range:
    """The rule of the hyperbolic cosine."""
    return increasing(torch.cosh)(absolute(a))


def power(a: Range, b: Range) -> Range:
    """The rule of a power: of a positive base, or a square."""
    # Monotone corners hold for a positive base only.
    return _corners(torch.pow, a, b).where((a.lo > 0) & (b.lo == b.hi), _square_or_unknown(a, b))


def _square_or_unknown(a: Range, b: Range) -> Range:
    two = (b.lo == 2) & (b.hi == 2)
    return mul(absolute(a), absolute(a)).where(two, unknown(add(a, b)))


def _truth(sure: Tensor, possible: Tensor) -> Range:
    return Range(sure.to(torch.float64), possible.to(torch.float64))


def lt(a: Range, b: Range) -> Range:
    """The rule of `a < b`."""
    return _truth(a.hi < b.lo, a.lo < b.hi)


def le(a: Range, b: Range) -> Range:
    """The rule of `a <= b`."""
    sure = (a.hi < b.lo) | ((a.hi == b.lo) & torch.isfinite(a.hi))  # what has no bounds may be nan
    return _truth(sure, a.lo <= b.hi)


def eq(a: Range, b: Range) -> Range:
    """The rule of `a == b`."""
    return _truth((a.lo == a.hi) & (b.lo == b.hi) & (a.lo == b.lo), (a.lo <= b.hi) & (b.lo <= a.hi))


def negated(a: Range) -> Range:
    """The rule of `not`."""
    return Range(1 - a.hi, 1 - a.lo)


def ne(a: Range, b: Range) -> Range:
    """The rule of `a != b`."""
    return negated(eq(a, b))


def _are_natural(a: Range, b: Range) -> Tensor:
    return (a.lo >= 0) & (b.lo >= 0)


def _are_bools(a: Range, b: Range) -> Tensor:
    return _are_natural(a, b) & (a.hi <= 1) & (b.hi <= 1)


def bit_and(a: Range, b: Range) -> Range:
    """The rule of `&`: exact for booleans, of non-negative integers no larger than either."""
    truth = minimum(a, b)
    loose = Range(torch.zeros_like(truth.lo), truth.hi).where(_are_natural(a, b), unknown(truth))
    return truth.where(_are_bools(a, b), loose)


def bit_or(a: Range, b: Range) -> Range:
    """The rule of `|`: exact for booleans, of non-negative integers no larger than their sum."""
    truth = maximum(a, b)
    loose = Range(truth.lo, a.hi + b.hi).where(_are_natural(a, b), unknown(truth))  # a | b <= a + b
    return truth.where(_are_bools(a, b), loose)


def bit_xor(a: Range, b: Range) -> Range:
    """The rule of `^`: exact for booleans, of non-negative integers no larger than their sum."""
    loose = Range(torch.zeros_like(a.hi + b.hi), a.hi + b.hi).where(_are_natural(a, b), unknown(add(a, b)))
    return ne(a, b).where(_are_bools(a, b), loose)


def select(cond: Range, a: Range, b: Range) -> Range:
    """The rule of a choice by a condition."""
    return a.where(cond.lo == 1, b.where(cond.hi == 0, a.hull(b)))
