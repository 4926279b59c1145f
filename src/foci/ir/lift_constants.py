"""Numbers become run-time parameters, so that a new window size or softcap is the same function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from foci.ir.expr import DType, Expr, param
from foci.ir.rewrite import canonical_levels, rebuild

__all__ = ["is_lifted", "lift_constants"]

_KEPT_INTS: Final = (-1, 0, 1, 2)
_KEPT_FLOATS: Final = ("-1.0", "-inf", "0.0", "0.5", "1.0", "2.0", "inf", "nan")
# Operand whose constant decides the code: division by a known divisor is a multiplication, by a power of two a shift.
_STRUCTURAL: Final = {"floordiv": 1, "mod": 1, "fmod": 1, "pow": 1, "shl": 1, "shr": 1}


def lift_constants(exprs: Sequence[Expr]) -> tuple[tuple[Expr, ...], tuple[int, ...], tuple[float, ...]]:
    """`exprs` with constants replaced by `param`, and the values of the parameters, ints and floats.

    Tiny constants (0, 1, -1, 2; 0.5; infinities, nan) and booleans stay, as do divisors of integer division and modulo,
    shift amounts and exponents. Equal numbers of one type share a slot; slots count by first appearance. Parameters that
    the expressions have already keep their slots.

    Raises:
        ValueError: where such a slot is one of the new ones.

    Example:
        >>> from foci.ir.expr import variable
        >>> from foci.ir.ops import apply
        >>> lift_constants([apply("le", apply("sub", variable("q_idx"), variable("kv_idx")), 128)])
        ((q_idx - kv_idx <= i0,), (128,), ())
    """
    ints: dict[tuple[DType, int], Expr] = {}
    floats: dict[str, Expr] = {}
    done: dict[Expr, Expr] = {}
    for root in exprs:
        for e in root.walk():
            args = tuple(_lifted(arg, ints, floats) if is_lifted(e.op, i, arg) else done[arg] for i, arg in enumerate(e.args))
            done[e] = rebuild(e, args)
    _check_slots(exprs, len(ints), len(floats))
    results = tuple(canonical_levels(_lifted(root, ints, floats) if is_lifted("", 0, root) else done[root]) for root in exprs)
    return results, tuple(value for _, value in ints), tuple(float(value) for value in floats)


def is_lifted(op: str, position: int, operand: Expr) -> bool:
    """Whether `operand`, at `position` of an operation `op`, is a constant that becomes a parameter."""
    value = operand.value
    if operand.op != "const" or isinstance(value, bool) or _STRUCTURAL.get(op) == position:
        return False
    return value not in _KEPT_INTS if isinstance(value, int) else repr(value) not in _KEPT_FLOATS


def _lifted(expr: Expr, ints: dict[tuple[DType, int], Expr], floats: dict[str, Expr]) -> Expr:
    if isinstance(expr.value, int):
        return ints.setdefault((expr.dtype, expr.value), param(len(ints), expr.dtype))
    return floats.setdefault(repr(expr.value), param(len(floats), DType.FLOAT))


def _check_slots(exprs: Sequence[Expr], ints: int, floats: int) -> None:
    for e in (e for root in exprs for e in root.walk() if e.op == "param"):
        assert isinstance(e.value, int)
        if e.value < (ints if e.dtype.is_integer else floats):
            raise ValueError(f"lift_constants: the expressions have a parameter {e!r} already, whose slot a lifted constant needs")
