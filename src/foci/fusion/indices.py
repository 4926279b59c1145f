"""Where an element lies: each dimension's index as digits, so that merged and split dimensions keep their parts.

An index is one tuple of digits for each dimension, the most significant first: the index of a dimension of size B * H that was
merged of two is (b, B), (h, H), and splitting it again gives the two back. A dimension of size 1 has no digits. Atoms are the
digits that stand for a dimension of the attention itself; they are placeholders (`axis` of a negative level) until the
attention's layout is known. This is the mixed-radix form of an index map; nothing in it depends on concrete sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from foci.fusion.fx_utils import Size, same_size
from foci.ir import expr as ir
from foci.ir.expr import Expr
from foci.ir.ops import apply

__all__ = [
    "Digit",
    "Digits",
    "Index",
    "NeedsSplit",
    "NoRule",
    "broadcast_index",
    "combine_digits",
    "coordinates",
    "count_values",
    "is_atom",
    "offset",
    "one_digit",
    "regroup",
    "symbolic_expression",
]

Number: TypeAlias = Callable[[Size], Expr]


class NoRule(Exception):
    """No rule says how the element is computed; the argument says what stood in the way."""


class NeedsSplit(Exception):
    """An atom must be two: the argument is the atom and the size of its low part."""

    def __init__(self, atom: Expr, low: Size) -> None:
        super().__init__(atom, low)
        self.atom, self.low = atom, low


@dataclass(frozen=True)
class Digit:
    """A part of an index: its value, from 0 to `size` - 1."""

    expr: Expr
    size: Size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Digit) and self.expr is other.expr and same_size(self.size, other.size)

    def __hash__(self) -> int:
        return hash(self.expr)


Digits: TypeAlias = tuple[Digit, ...]
Index: TypeAlias = tuple[Digits, ...]


def is_atom(digit: Digit) -> bool:
    """Whether a digit is one of those that a match names itself, not a formula of others."""
    return digit.expr.op == "axis" and isinstance(digit.expr.value, int) and digit.expr.value < 0


def count_values(digits: Sequence[Digit]) -> Size:
    """Number of values of the digits together."""
    return math.prod(d.size for d in digits)


def combine_digits(digits: Digits, number: Number) -> Expr:
    """The index as one integer (Horner's rule)."""
    if not digits:
        return ir.const(0)
    total = digits[0].expr
    for digit in digits[1:]:
        total = apply("add", apply("mul", total, number(digit.size)), digit.expr)
    return total


def _as_dimension(digits: Digits, size: Size, number: Number) -> Digits:
    """`digits` if they span the whole dimension; if they span a part of it, one digit of the dimension's size."""
    if same_size(count_values(digits), size):
        return digits
    return (Digit(combine_digits(digits, number), size),)


def one_digit(value: Expr, size: Size) -> Digits:
    """The index `value` of a dimension of `size`."""
    return () if same_size(size, 1) else (Digit(value, size),)


def offset(digits: Digits, start: Expr, step: int, size: Size, number: Number) -> Digits:
    """The index `start + step * digits` of a dimension of `size`."""
    if same_size(size, 1):
        return ()
    value = combine_digits(digits, number)
    if step != 1:
        value = apply("mul", value, step)
    return (Digit(apply("add", start, value), size),)


def broadcast_index(index: Index, sizes: Sequence[Size]) -> Index:
    """The index of an operand of these sizes, broadcast to where `index` points."""
    last_dims = index[len(index) - len(sizes) :]
    return tuple(() if same_size(size, 1) else digits for digits, size in zip(last_dims, sizes, strict=True))


def regroup(index: Index, shape: Sequence[Size], new_shape: Sequence[Size], number: Number) -> Index:
    """The index of a tensor of sizes `new_shape` that holds, in the same order, what one of sizes `shape` has at `index`.

    Raises:
        NeedsSplit: where an atom spans two of the wanted dimensions.
        NoRule: where the dimensions do not line up.
    """
    flat = [digit for digits, size in zip(index, shape, strict=True) for digit in _as_dimension(digits, size, number)]
    result: list[Digits] = []
    for size in reversed(new_shape):
        digits: list[Digit] = []
        while not same_size(count_values(digits), size):
            if not flat:
                raise NoRule("a view that merges and splits dimensions which do not line up")
            rest = _quotient(size, count_values(digits))
            last = flat.pop()
            if _fits(last.size, rest):
                digits.insert(0, last)
                continue
            high, low = _split(last, rest, number)
            flat.append(high)
            digits.insert(0, low)
        result.insert(0, tuple(digits))
    if any(not same_size(digit.size, 1) for digit in flat):
        raise NoRule("a view that merges and splits dimensions which do not line up")
    return tuple(result)


def _quotient(a: Size, b: Size) -> Size:
    if not same_size(a % b, 0):  # type: ignore[operator]
        raise NoRule("a view that merges and splits dimensions which do not line up")
    return a // b


def _fits(size: Size, room: Size) -> bool:
    """Whether a digit divides what is left of a dimension."""
    if same_size(size, room):
        return True
    if isinstance(size, int) and isinstance(room, int):
        return size <= room and room % size == 0
    return same_size(room % size, 0)  # type: ignore[operator]


def _split(digit: Digit, low: Size, number: Number) -> tuple[Digit, Digit]:
    high = _quotient(digit.size, low)
    if is_atom(digit):
        raise NeedsSplit(digit.expr, low)
    divisor = number(low)
    return Digit(apply("floordiv", digit.expr, divisor), high), Digit(apply("mod", digit.expr, divisor), low)


def coordinates(groups: Mapping[str, Digits], number: Number) -> dict[Expr, Expr]:
    """Each atom as an expression of the variable that counts its group, and so each index that merges neighbouring atoms again."""
    table: dict[Expr, Expr] = {}
    for name, digits in groups.items():
        for first in range(len(digits)):
            for last in range(first, len(digits)):
                value = ir.variable(name)
                if last < len(digits) - 1:
                    value = apply("floordiv", value, number(count_values(digits[last + 1 :])))
                if first:
                    value = apply("mod", value, number(count_values(digits[first : last + 1])))
                table[combine_digits(digits[first : last + 1], number)] = value
    return table


def symbolic_expression(size: Size) -> object:
    """A hashable identity of a size."""
    return size.node.expr if isinstance(size, torch.SymInt) else size
