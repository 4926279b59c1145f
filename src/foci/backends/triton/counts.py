"""Numbers that follow from how many tokens a packed call has, so that a pass noted once is known for any number of them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TypeAlias

from foci.problem import Operands

__all__ = ["Count", "Tokens", "tokens_of"]

Tokens: TypeAlias = tuple[int, int]
"""Queries and keys of a head; packed, of all sequences together."""


class Count(int):
    """A number that follows from the tokens of a packed call; `of` says how."""

    of: Callable[[Tokens], int]

    def __new__(cls, value: int, of: Callable[[Tokens], int]) -> Count:
        made = super().__new__(cls, value)
        made.of = of
        return made

    def __add__(self, other: int) -> Count:
        return _joined(operator.add, self, other)

    def __radd__(self, other: int) -> Count:
        return _joined(operator.add, other, self)

    def __sub__(self, other: int) -> Count:
        return _joined(operator.sub, self, other)

    def __mul__(self, other: int) -> Count:
        return _joined(operator.mul, self, other)

    def __rmul__(self, other: int) -> Count:
        return _joined(operator.mul, other, self)

    def __floordiv__(self, other: int) -> Count:
        return _joined(operator.floordiv, self, other)


def _joined(way: Callable[[int, int], int], a: int, b: int) -> Count:
    left, right = (n.of if isinstance(n, Count) else lambda _, n=n: n for n in (a, b))
    return Count(way(int(a), int(b)), lambda tokens: way(left(tokens), right(tokens)))


def tokens_of(operands: Operands) -> Tokens:
    """Queries and keys of a head: plain numbers, or packed the `Count`s that others are made of."""
    rows, columns = operands.query.shape[2], operands.key.shape[2]
    if operands.cu_q is None:
        return rows, columns
    return Count(rows, operator.itemgetter(0)), Count(columns, operator.itemgetter(1))
