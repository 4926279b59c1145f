"""Immutable, hash-consed expressions: the one language every attention variant is written in.

An expression is a pure function of the raw score and its coordinates::

    score                the scaled product of one query row and one key row
    b, h, q_idx, kv_idx  batch (or sequence), query head, query and key position
    q_len, kv_len        lengths of the sequence at hand

of captured tensors, read by `load`, and of run-time numbers, `param`. Two expressions that are built alike are one
object, so equality is identity and every analysis is memoised on the node.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from enum import Enum
from typing import Any, Final, TypeAlias
from weakref import _remove_dead_weakref  # type: ignore[attr-defined]  # what the standard library's own tables of weak values do

__all__ = ["COORDINATES", "LENGTHS", "DType", "Expr", "Payload", "axis", "const", "load", "node", "param", "reduce", "size", "variable"]


class DType(Enum):
    """The four kinds of number of the language; `FLOAT` is the accumulation type of the problem (float32 or float64).

    Attributes:
        width: place in the order BOOL < INT32 < INT64 < FLOAT, in which types are promoted.
        is_integer: INT32 or INT64.
    """

    BOOL = "bool"
    INT32 = "i32"
    INT64 = "i64"
    FLOAT = "float"

    __hash__ = object.__hash__  # members are equal by identity; that of Enum is a function of Python, asked for with every node

    def __init__(self, text: str) -> None:
        self.width = len(type(self).__members__)
        self.is_integer = text.startswith("i")


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
        variable_names: what `variables` returns.
        free: levels of the axes that it reads and does not bind.
        levels: one more than the highest level of a reduction in it, 0 without one.
        depth: operations above its deepest leaf; a leaf counts as one.
        digests: of `foci.ir.simplify`, which computes them when it first orders the node; None until then.
    """

    __slots__ = ("__weakref__", "args", "depth", "digests", "dtype", "free", "levels", "op", "value", "variable_names")

    op: str
    args: tuple[Expr, ...]
    dtype: DType
    value: Payload
    variable_names: frozenset[str]
    free: frozenset[int]
    levels: int
    depth: int
    digests: tuple[bytes, bytes] | None

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
        stack: list[Expr] = [self]
        open_: set[Expr] = set()  # nodes whose operands are on the stack above them
        while stack:
            expr = stack[-1]
            if expr in seen:
                stack.pop()
            elif expr in open_ or not expr.args:
                seen.add(expr)
                stack.pop()
                yield expr
            else:
                open_.add(expr)
                stack.extend(expr.args[::-1])

    def variables(self) -> frozenset[str]:
        """Names of the variables the expression reads."""
        return self.variable_names


class _Held(weakref.ref[Expr]):
    """A reference that knows under which key its node is held: what weakref.WeakValueDictionary has, without its calls in Python."""

    __slots__ = ("key",)

    key: tuple[object, ...]


_table: dict[tuple[object, ...], _Held] = {}


def _forget(gone: _Held) -> None:
    _remove_dead_weakref(_table, gone.key)  # in one step, and not another node that a thread made since


def node(op: str, args: tuple[Expr, ...], dtype: DType, value: Payload = None) -> Expr:
    """The one node with these parts. Checks nothing; `foci.ir.ops.apply` types and folds."""
    kind = value.__class__
    # 0.0 == -0.0, 1 == 1.0 == True and nan != nan must not merge or split constants
    key = (op, args, dtype, kind, repr(value) if kind is float else value)
    reference = _table.get(key)
    existing = None if reference is None else reference()
    if existing is None:
        new = _new(op, args, dtype, value)
        mine = _Held(new, _forget)
        mine.key = key
        while (existing := _table.setdefault(key, mine)()) is None:  # another thread's may come first
            _remove_dead_weakref(_table, key)
    return existing


_NOTHING: Final[frozenset[Any]] = frozenset()


def _new(op: str, args: tuple[Expr, ...], dtype: DType, value: Payload) -> Expr:
    """A new node, with what is asked of every node worked out from what its operands have."""
    names, free, levels, depth = _NOTHING, _NOTHING, 0, 1
    for arg in args:
        names = arg.variable_names if names <= arg.variable_names else names | arg.variable_names
        free = arg.free if free <= arg.free else free | arg.free
        levels = max(levels, arg.levels)
        depth = max(depth, arg.depth + bool(arg.args))
    if op == "var":
        names = frozenset((str(value),))
    elif op == "axis":
        free = frozenset((value,))
    elif op == "reduce":
        assert isinstance(value, tuple)
        level = int(value[1])
        free = (args[0].free - {level}).union(*(extent.free for extent in args[1:]))
        levels = max(levels, level + 1)
    expr = object.__new__(Expr)
    put = object.__setattr__
    put(expr, "op", op)
    put(expr, "args", args)
    put(expr, "dtype", dtype)
    put(expr, "value", value)
    put(expr, "variable_names", names)
    put(expr, "free", free)
    put(expr, "levels", levels)
    put(expr, "depth", depth)
    put(expr, "digests", None)
    return expr


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
