"""Rules as rows of a table: which operations a rule reads, what it says of them, an example, and a near one that it leaves alone.

`foci.ir.simplify` rewrites expressions by such a table, and `foci.fusion` reads graphs by some.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Rule", "by_name"]

Function = TypeVar("Function")


class Rule(NamedTuple, Generic[Function]):
    """A rewrite or recognition rule, as a row of a table.

    Attributes:
        names: the operations that the rule reads.
        meaning: what it says of them.
        function: the rule itself.
        examples: expressions that it reads, as text; tests run each one.
        counterexamples: expressions that look alike, and that it leaves alone.
    """

    names: tuple[str, ...]
    meaning: str
    function: Function
    examples: tuple[str, ...]
    counterexamples: tuple[str, ...]


def by_name(rules: Iterable[Rule[Function]]) -> dict[str, Function]:
    """The rule of each operation.

    Raises:
        ValueError: where two rows read one operation.

    Example:
        >>> by_name([Rule(("add", "sub"), "sums", len, ("x + 1",), ("x * 1",))])["sub"]
        <built-in function len>
    """
    functions: dict[str, Function] = {}
    for rule in rules:
        for name in rule.names:
            if name in functions:
                raise ValueError(f"two rules for {name}")
            functions[name] = rule.function
    return functions
