"""Numbers become run-time parameters, so that a new window size or softcap is the same function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from foci.ir.expr import DType, Expr, param
from foci.ir.rewrite import canonical_levels, rebuild

__all__ = ["lift_constants"]

_KEPT_INTS: Final = (-1, 0, 1, 2)
_KEPT_FLOATS: Final = ("-1.0", "-inf", "0.0", "0.5", "1.0", "2.0", "inf", "nan")
# Operand whose constant decides the code: division by a known divisor is a multiplication, by a power of two a shift.
_STRUCTURAL: Final = {"floordiv": 1, "mod": 1, "fmod": 1, "pow": 1, "shl": 1, "shr": 1}


def lift_constants(exprs: Sequence[Expr]) -> tuple[tuple[Expr, ...], tuple[int, ...], tuple[float, ...]]:
    """`exprs` with constants replaced by `param`, and the values of the parameters, ints and floats.

    Tiny constants (0, 1, -1, 2; 0.5; infinities, nan) and booleans stay, as do divisors of integer division and modulo,
    shift amounts and exponents. Equal numbers of one type share a slot; slots count by first appearance.

    >>> from foci.ir.expr import variable
    >>> from foci.ir.ops import apply
    >>> lift_constants([apply("le", apply("sub", variable("q_idx"), variable("kv_idx")), 128)])
    ((q_idx - kv_idx <= i0,), (128,), ())

    Raises:
        ValueError: for expressions that have parameters already.
    """
    ints: dict[tuple[DType, int], Expr] = {}
    floats: dict[str, Expr] = {}
    done: dict[Expr, Expr] = {}
    for root in exprs:
        for e in root.walk():
            if e.op == "param":
                raise ValueError(f"lift_constants: the expression has run-time numbers already: {root!r}")
            kept = _STRUCTURAL.get(e.op)
            args = tuple(
                arg if i == kept and arg.op == "const" else _lifted(arg, ints, floats) if arg.op == "const" else done[arg]
                for i, arg in enumerate(e.args)
            )
            done[e] = rebuild(e, args)
    results = tuple(canonical_levels(_lifted(root, ints, floats) if root.op == "const" else done[root]) for root in exprs)
    return results, tuple(value for _, value in ints), tuple(float(value) for value in floats)


def _lifted(expr: Expr, ints: dict[tuple[DType, int], Expr], floats: dict[str, Expr]) -> Expr:
    value = expr.value
    if isinstance(value, bool):
        return expr
    if isinstance(value, int):
        if value in _KEPT_INTS:
            return expr
        return ints.setdefault((expr.dtype, value), param(len(ints), expr.dtype))
    text = repr(value)
    if text in _KEPT_FLOATS:
        return expr
    return floats.setdefault(text, param(len(floats), DType.FLOAT))
