"""Numbers that depend on the number of tokens of a packed call, so that a launch list works for any number of tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from foci.problem import Operands

__all__ = ["Count", "Tokens", "at_most", "count_tokens", "row_function"]

Tokens: TypeAlias = tuple[int, int]
"""Number of queries and of keys of a head; packed, of all sequences together."""


class Count(int):
    """An integer that was computed from the tokens of a packed call. `text` is the expression, over `t`, the `Tokens`."""

    text: str

    def __new__(cls, value: int, text: str) -> Count:
        count = super().__new__(cls, value)
        count.text = text
        return count

    @property
    def of(self) -> Callable[[Tokens], int]:
        """Return the function that computes the number from other tokens."""
        return _function(self.text)

    def __add__(self, other: int) -> Count:
        return Count(int(self) + int(other), f"({self.text} + {_text(other)})")

    def __radd__(self, other: int) -> Count:
        return Count(int(other) + int(self), f"({_text(other)} + {self.text})")

    def __sub__(self, other: int) -> Count:
        return Count(int(self) - int(other), f"({self.text} - {_text(other)})")

    def __mul__(self, other: int) -> Count:
        return Count(int(self) * int(other), f"({self.text} * {_text(other)})")

    def __rmul__(self, other: int) -> Count:
        return Count(int(other) * int(self), f"({_text(other)} * {self.text})")

    def __floordiv__(self, other: int) -> Count:
        return Count(int(self) // int(other), f"({self.text} // {_text(other)})")


def row_function(numbers: Sequence[int]) -> Callable[[Tokens], tuple[int, ...]]:
    """Return the function that computes these numbers, some of them `Count`s, from other tokens."""
    return _function(f"({''.join(f'{_text(n)}, ' for n in numbers)})")


def at_most(number: int, most: int) -> int:
    """The smaller of two numbers, the first of which may be a `Count`."""
    return Count(min(number, most), f"min({number.text}, {most})") if isinstance(number, Count) else min(number, most)


def _text(number: int) -> str:
    return number.text if isinstance(number, Count) else str(number)


@functools.lru_cache(maxsize=4096)
def _function(text: str) -> Callable[[Tokens], Any]:
    return eval(f"lambda t: {text}")  # type: ignore[no-any-return]  # text made here, of numbers and t alone


def count_tokens(operands: Operands) -> Tokens:
    """Number of queries and of keys of a head; for a packed call as `Count`s, from which other numbers are computed."""
    rows, columns = operands.query.shape[2], operands.key.shape[2]
    if operands.cu_q is None:
        return rows, columns
    return Count(rows, "t[0]"), Count(columns, "t[1]")
