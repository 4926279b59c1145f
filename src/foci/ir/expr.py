"""Immutable, hash-consed expressions: the one language every attention variant is written in.

An expression is a pure function of the raw score and its coordinates::

    score                the scaled product of one query row and one key row
    b, h, q_idx, kv_idx  batch (or sequence), query head, query and key position
    q_len, kv_len        lengths of the sequence at hand

of captured tensors, read by `load`, and of run-time numbers, `param`. Two expressions that are built alike are one
object, so equality is identity and every analysis is memoised on the node.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from enum import Enum
from typing import Final, TypeAlias

__all__ = ["COORDINATES", "LENGTHS", "DType", "Expr", "Payload", "axis", "const", "load", "node", "param", "reduce", "size", "variable"]


class DType(Enum):
    """The four kinds of number of the language; `FLOAT` is the accumulation type of the problem (float32 or float64)."""

    BOOL = "bool"
    INT32 = "i32"
    INT64 = "i64"
    FLOAT = "float"

    @property
    def is_integer(self) -> bool:
        return self in (DType.INT32, DType.INT64)


COORDINATES: Final = ("b", "h", "q_idx", "kv_idx")
LENGTHS: Final = ("q_len", "kv_len")

Payload: TypeAlias = bool | int | float | str | tuple[int | str, ...] | None


class Expr:
    """One node of an expression.

    Attributes:
        op: name of a row of the op table (`foci.ir.ops.OPS`), or a leaf: `const`, `var`, `param`, `axis`, `size`, or
            `load`, `reduce`.
        args: operands; the indices of a `load`; body and extent of a `reduce`.
        dtype: kind of the value.
        value: what `op` needs besides operands: the number of a `const`, the name of a `var`, the slot of a `param`,
            the level of an `axis`, `(slot, dim)` of a `size`, the slot of a `load`, `(kind, level)` of a `reduce`,
            the target of a `cast` or `round_to`.
    """

    __slots__ = ("__weakref__", "args", "dtype", "op", "value")

    op: str
    args: tuple[Expr, ...]
    dtype: DType
    value: Payload

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"an Expr is immutable; tried to set {name!r}")

    def __reduce__(self) -> tuple[object, ...]:
        return node, (self.op, self.args, self.dtype, self.value)

    def __repr__(self) -> str:
        from foci.ir.text import to_infix

        return to_infix(self)

    def walk(self) -> Iterator[Expr]:
        """Each distinct node once, operands before users."""
        seen: set[Expr] = set()
        stack: list[tuple[Expr, bool]] = [(self, False)]
        while stack:
            expr, ready = stack.pop()
            if ready:
                yield expr
            elif expr not in seen:
                seen.add(expr)
                stack.append((expr, True))
                stack.extend((arg, False) for arg in reversed(expr.args))

    def variables(self) -> frozenset[str]:
        """Names of the variables the expression reads."""
        return frozenset(str(e.value) for e in self.walk() if e.op == "var")


_table: weakref.WeakValueDictionary[tuple[object, ...], Expr] = weakref.WeakValueDictionary()


def _identity(value: Payload) -> object:
    # 0.0 == -0.0, 1 == 1.0 == True and nan != nan must not merge or split constants.
    if isinstance(value, float):
        return ("f", "nan" if math.isnan(value) else value.hex())
    return (type(value).__name__, value)


def node(op: str, args: tuple[Expr, ...], dtype: DType, value: Payload = None) -> Expr:
    """The one node with these parts. Checks nothing; `foci.ir.ops.apply` types and folds."""
    key = (op, args, dtype, _identity(value))
    found = _table.get(key)
    if found is None:
        found = object.__new__(Expr)
        for name, part in (("op", op), ("args", args), ("dtype", dtype), ("value", value)):
            object.__setattr__(found, name, part)
        _table[key] = found
    return found


def const(value: bool | int | float) -> Expr:
    """A number. Integers beyond 32 bits are INT64."""
    if isinstance(value, bool):
        return node("const", (), DType.BOOL, value)
    if isinstance(value, int):
        return node("const", (), DType.INT32 if -(2**31) <= value < 2**31 else DType.INT64, value)
    return node("const", (), DType.FLOAT, float(value))


def variable(name: str) -> Expr:
    """`score`, a coordinate (`COORDINATES`) or a length (`LENGTHS`)."""
    if name == "score":
        return node("var", (), DType.FLOAT, name)
    if name not in COORDINATES + LENGTHS:
        raise ValueError(f"no variable {name!r}; the variables are score, {', '.join(COORDINATES + LENGTHS)}")
    return node("var", (), DType.INT32, name)


def param(slot: int, dtype: DType) -> Expr:
    """A run-time number: entry `slot` of the call's ints (INT32, INT64) or floats (FLOAT)."""
    return node("param", (), dtype, slot)


def axis(level: int) -> Expr:
    """The bound index of the enclosing `reduce` of that level. Levels count from the innermost, 0."""
    return node("axis", (), DType.INT32, level)


def size(slot: int, dim: int) -> Expr:
    """Length of dimension `dim` of captured tensor `slot`."""
    return node("size", (), DType.INT32, (slot, dim))


def load(slot: int, indices: tuple[Expr, ...], dtype: DType) -> Expr:
    """One element of captured tensor `slot`, one index per dimension.

    A negative index counts from the end, as in torch. An index out of range reads some element of the tensor: tiles
    overhang the lengths, and what they read there is masked.
    """
    return node("load", indices, dtype, slot)


def reduce(kind: str, level: int, body: Expr, extent: Expr) -> Expr:
    """`kind` (sum, max, min, any, all) of `body` over `axis(level)` from 0 to `extent`."""
    return node("reduce", (body, extent), body.dtype, (kind, level))
