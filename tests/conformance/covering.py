"""Rows of values, one value for each dimension, that hold every allowed pair of values. What cannot occur is stated as rules.

The method is greedy (Cohen, Dalal, Fredman and Patton, "The AETG system", 1997): each row starts from a pair that no row has yet and takes,
dimension by dimension, the value that adds most new pairs. A depth-first search keeps to the rules.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Dimensions = Mapping[str, Sequence[Any]]
Pair = tuple[str, Any, str, Any]


@dataclass(frozen=True)
class Rule:
    """Values that cannot stand together.

    Attributes:
        reason: why not, one sentence.
        dimensions: names of those that decide.
        forbids: whether values of these dimensions cannot stand together.
    """

    reason: str
    dimensions: tuple[str, ...]
    forbids: Callable[..., bool]

    def applies(self, row: Row) -> bool:
        """Whether the rule forbids the row, as far as it has values."""
        return all(name in row for name in self.dimensions) and self.forbids(*(row[name] for name in self.dimensions))


def _by_dimension(dimensions: Dimensions, rules: Sequence[Rule]) -> dict[str, list[Rule]]:
    return {name: [rule for rule in rules if name in rule.dimensions] for name in dimensions}


class Table:
    """The rows that dimensions and rules allow."""

    def __init__(self, dimensions: Dimensions, rules: Sequence[Rule]) -> None:
        self.dimensions = dimensions
        self._rules = _by_dimension(dimensions, rules)

    def complete(self, row: Row, order: Callable[[str, Row, list[Any]], list[Any]]) -> Row | None:
        """The row with a value for each dimension; None where the rules leave none.

        The dimension with the fewest values left comes next, so that a dead end is seen early; `order` sorts its values.
        """
        choices = {name: self._values(name, row) for name in self.dimensions if name not in row}
        if not choices:
            return row
        name = min(choices, key=lambda name: len(choices[name]))
        for value in order(name, row, choices[name]):
            completed = self.complete({**row, name: value}, order)
            if completed is not None:
                return completed
        return None

    def _values(self, name: str, row: Row) -> list[Any]:
        """What no rule forbids in this dimension, given the row."""
        rules = [rule for rule in self._rules[name] if all(other == name or other in row for other in rule.dimensions)]
        return [value for value in self.dimensions[name] if not any(rule.applies({**row, name: value}) for rule in rules)]

    def is_allowed(self, row: Row) -> bool:
        """Whether no rule forbids the row, as far as it has values."""
        return not any(rule.applies(row) for name in row for rule in self._rules[name])

    def pairs(self) -> list[Pair]:
        """All pairs that no rule forbids by itself, in a fixed order."""
        combinations = []
        for first, second in itertools.combinations(self.dimensions, 2):
            for a, b in itertools.product(self.dimensions[first], self.dimensions[second]):
                if self.is_allowed({first: a, second: b}):
                    combinations.append((first, a, second, b))
        return combinations

    def cover(self, seed: int, cheap: Sequence[str] = (), must: Sequence[tuple[str, str]] | None = None) -> tuple[list[Row], list[Pair]]:
        """Rows that hold every pair that can occur, and the pairs that cannot.

        Args:
            seed: of the order in which values are tried.
            cheap: dimensions whose first value is taken wherever another adds no new pair.
            must: pairs of dimensions to cover, by default all.
        """
        rng = random.Random(seed)
        left = dict.fromkeys(pair for pair in self.pairs() if must is None or (pair[0], pair[2]) in must)
        rows, impossible = [], []

        def order(name: str, row: Row, values: list[Any]) -> list[Any]:
            """Values with the most new pairs first; among equals the first of a cheap dimension, else any."""
            if name not in cheap:
                rng.shuffle(values)
            return sorted(values, key=lambda value: -sum(pair in left for pair in _pairs_with(self.dimensions, row, name, value)))

        while left:
            first, a, second, b = next(iter(left))
            row = self.complete({first: a, second: b}, order)
            if row is None:
                impossible.append((first, a, second, b))
                del left[first, a, second, b]
                continue
            rows.append({name: row[name] for name in self.dimensions})
            for pair in pairs_of(self.dimensions, row):
                left.pop(pair, None)
        return rows, impossible


def pairs_of(dimensions: Dimensions, row: Row) -> Iterator[Pair]:
    """The pairs that a row holds."""
    for first, second in itertools.combinations(dimensions, 2):
        yield first, row[first], second, row[second]


def _pairs_with(dimensions: Dimensions, row: Row, name: str, value: Any) -> Iterator[Pair]:
    """The pairs that a value adds to a row."""
    places = {other: place for place, other in enumerate(dimensions)}
    for other, theirs in row.items():
        yield (other, theirs, name, value) if places[other] < places[name] else (name, value, other, theirs)
