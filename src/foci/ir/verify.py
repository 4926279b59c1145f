"""The checks that every expression passes before anything is made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from foci.ir.expr import COORDINATES, LENGTHS, DType, Expr
from foci.ir.ops import OPS, signature
from foci.ir.rewrite import reduction
from foci.ir.text import to_infix

__all__ = ["IllFormedExpression", "verify"]


class IllFormedExpression(ValueError):
    """An expression that means nothing: a mistake in what built it, not in a user's function."""


def verify(expr: Expr, captures: int) -> None:
    """Raises for an expression that is not well formed, with the node and what is wrong with it.

    Checked: known operations, their arity and types; variables and their types; slots against the number of captured
    tensors; each captured tensor read with one rank and one type; axes bound; levels canonical.

    Raises:
        IllFormedExpression: naming the node.

    Example:
        >>> from foci.ir.expr import node, variable
        >>> verify(node("add", (variable("q_idx"),), DType.INT32), 0)
        Traceback (most recent call last):
        foci.ir.verify.IllFormedExpression: add takes 2 operands, got 1, in: add(q_idx)
    """
    loads: dict[int, tuple[int, DType]] = {}
    for e in expr.walk():
        check = _check_op if e.op in OPS else _CHECKS.get(e.op)
        problem = f"no operation {e.op!r}" if check is None else check(e)
        if problem is None and e.op in ("load", "size"):
            problem = _check_slot(e, captures, loads)
        if problem is not None:
            raise IllFormedExpression(f"{problem}, in: {_shown(e)}")
    if expr.free:
        raise IllFormedExpression(f"no reduction binds r{min(expr.free)}, in: {_shown(expr)}")


def _shown(e: Expr) -> str:
    if e.op in OPS and len(e.args) != OPS[e.op].arity:  # not to be written infix
        return f"{e.op}({', '.join(map(to_infix, e.args))})"
    try:
        return to_infix(e)
    except (AssertionError, IndexError, TypeError, ValueError):
        return f"{e.op} of {len(e.args)} operands with value {e.value!r}"


def _names(dtypes: tuple[DType, ...]) -> str:
    return ", ".join(dtype.value for dtype in dtypes)


def _check_op(e: Expr) -> str | None:
    row = OPS[e.op]
    if len(e.args) != row.arity:
        return f"{e.op} takes {row.arity} operands, got {len(e.args)}"
    if e.value is not None:
        return f"{e.op} takes no value, got {e.value!r}"
    dtypes = tuple(arg.dtype for arg in e.args)
    expected, result = signature(row.typing, dtypes)
    if dtypes != expected:
        return f"{e.op} takes ({_names(expected)}), got ({_names(dtypes)})"
    return None if e.dtype is result else f"{e.op} of ({_names(dtypes)}) is {result.value}, not {e.dtype.value}"


def _check_const(e: Expr) -> str | None:
    python = {DType.BOOL: bool, DType.FLOAT: float}.get(e.dtype, int)
    if type(e.value) is not python:
        return f"a {e.dtype.value} constant holds a {python.__name__}, got {e.value!r}"
    if e.dtype.is_integer and isinstance(e.value, int):
        half = 1 << (31 if e.dtype is DType.INT32 else 63)
        if not -half <= e.value < half:
            return f"constant {e.value} does not fit {e.dtype.value}"
    return None


def _check_var(e: Expr) -> str | None:
    if e.value == "score":
        return None if e.dtype is DType.FLOAT else f"score is float, not {e.dtype.value}"
    if e.value not in COORDINATES + LENGTHS:
        return f"no variable {e.value!r}"
    return None if e.dtype is DType.INT32 else f"{e.value} is i32, not {e.dtype.value}"


def _check_param(e: Expr) -> str | None:
    if not isinstance(e.value, int) or e.value < 0:
        return f"a param has a slot, 0 or more, got {e.value!r}"
    return "a param is an integer or float, not bool" if e.dtype is DType.BOOL else None


def _check_axis(e: Expr) -> str | None:
    return None if isinstance(e.value, int) and e.dtype is DType.INT32 else f"an axis is i32 with a level, got {e.value!r} {e.dtype.value}"


def _check_size(e: Expr) -> str | None:
    good = isinstance(e.value, tuple) and len(e.value) == 2 and all(isinstance(part, int) and part >= 0 for part in e.value)
    return None if good and e.dtype is DType.INT32 else f"a size is i32 with (slot, dim), got {e.value!r} {e.dtype.value}"


def _check_load(e: Expr) -> str | None:
    wrong = [i for i, arg in enumerate(e.args) if not arg.dtype.is_integer]
    return f"index {wrong[0]} of a load is {e.args[wrong[0]].dtype.value}, not an integer" if wrong else None


def _check_cast(e: Expr) -> str | None:
    if len(e.args) != 1 or e.value != e.dtype.value:
        return f"a cast takes one operand and its own type as value, got {len(e.args)} and {e.value!r}"
    return None


def _check_round_to(e: Expr) -> str | None:
    if e.value not in ("float16", "bfloat16", "float32"):
        return f"round_to rounds to float16, bfloat16 or float32, got {e.value!r}"
    good = len(e.args) == 1 and e.dtype is DType.FLOAT and e.args[0].dtype is DType.FLOAT
    return None if good else "round_to takes and gives a float"


def _check_reduce(e: Expr) -> str | None:
    if len(e.args) != 2 or not e.args[1].dtype.is_integer:
        return "a reduce takes a body and an integer extent"
    if not isinstance(e.value, tuple) or len(e.value) != 2 or e.value[0] not in ("sum", "max", "min", "any", "all"):
        return f"a reduce has (kind, level), kind one of sum, max, min, any, all; got {e.value!r}"
    kind, level = reduction(e)
    body = e.args[0]
    if (kind in ("any", "all")) != (body.dtype is DType.BOOL) or e.dtype is not body.dtype:
        return f"{kind} of a {body.dtype.value} body cannot be {e.dtype.value}"
    if level == body.levels:
        return None
    return f"a reduce at level {level} around reductions up to {body.levels - 1}; its level must be {body.levels}"


_CHECKS: Final[Mapping[str, Callable[[Expr], str | None]]] = {
    "const": _check_const,
    "var": _check_var,
    "param": _check_param,
    "axis": _check_axis,
    "size": _check_size,
    "load": _check_load,
    "cast": _check_cast,
    "round_to": _check_round_to,
    "reduce": _check_reduce,
}


def _check_slot(e: Expr, captures: int, loads: dict[int, tuple[int, DType]]) -> str | None:
    slot = e.value[0] if isinstance(e.value, tuple) else e.value
    if not isinstance(slot, int) or not 0 <= slot < captures:
        return f"slot {slot!r} of {captures} captured tensors"
    if e.op == "load":
        seen = loads.setdefault(slot, (len(e.args), e.dtype))
        if seen != (len(e.args), e.dtype):
            return f"c{slot} is read with {len(e.args)} indices as {e.dtype.value}, and with {seen[0]} as {seen[1].value}"
    return None
