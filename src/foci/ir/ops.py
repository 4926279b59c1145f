"""The op table: one row per operation of the language, and the constructor that types, casts and folds.

To add an operation is to add one row. A row holds what every analysis needs: the function on Python numbers, the partial
derivatives, the interval rule, and the same by other operations. Eager code calls the function of torch that has the row's name, and
so may users. Languages spell the rows that they have a function or an instruction for (`foci.ir.emit`), and take the others decomposed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import torch

from foci.ir import ranges
from foci.ir.expr import DType, Expr, const, node
from foci.ir.ranges import Rule

__all__ = ["LEAVES", "OPS", "Op", "Typing", "apply", "as_expr", "cast", "round_to", "signature"]

LEAVES: Final = frozenset({"const", "var", "param", "axis", "size"})
Partial = Callable[..., Expr]


class Typing(Enum):
    """Type rules of an operation's operands and result."""

    ARITHMETIC = "operands and result take the widest type, at least int32"
    FLOATING = "operands and result are FLOAT"
    COMPARISON = "operands take the widest type, the result is BOOL"
    BITWISE = "operands and result take the widest type, which must be BOOL or integer"
    SHIFT = "operands and result take the widest integer type, at least int32"
    PREDICATE = "a FLOAT operand, a BOOL result"
    SELECT = "a BOOL condition, then two operands of the widest type"

    __hash__ = object.__hash__  # as that of DType


@dataclass(frozen=True)
class Op:
    """An operation of the language, as a row of the table.

    Attributes:
        name: of the operation; eager code and users' functions find torch's function by it.
        arity: number of operands.
        typing: type rule.
        fold: computes with Python numbers.
        range: interval rule.
        partials: `partials[i](y, *args)` is dy/darg_i; without partials all are zero.
        decomposed: the same by other operations, of the typed operands, for languages that do not spell it.
    """

    name: str
    arity: int
    typing: Typing
    fold: Callable[..., Any]
    range: Rule
    partials: tuple[Partial, ...] | None = None
    decomposed: Callable[..., Expr] | None = None


def _promote(*dtypes: DType) -> DType:
    """The widest of the types: BOOL < INT32 < INT64 < FLOAT."""
    widest = dtypes[0]
    for dtype in dtypes:
        if dtype.width > widest.width:
            widest = dtype
    return widest


def as_expr(value: Expr | bool | int | float) -> Expr:
    """A number as a constant; an expression as it is."""
    return value if isinstance(value, Expr) else const(value)


def cast(expr: Expr, dtype: DType) -> Expr:
    """`expr` as `dtype`, without a node where it is that already."""
    if expr.dtype is dtype:
        return expr
    if expr.op == "const":
        number = expr.value
        assert isinstance(number, (bool, int, float))
        if dtype is DType.FLOAT:
            return const(float(number))
        if dtype is DType.BOOL:
            return const(bool(number))
        if math.isfinite(number):
            return node("const", (), dtype, int(number))
    return node("cast", (expr,), dtype, dtype.value)


def round_to(expr: Expr, dtype: torch.dtype) -> Expr:
    """`expr` rounded to float16 or bfloat16 and widened again: what an explicit cast in user code means."""
    return node("round_to", (cast(expr, DType.FLOAT),), DType.FLOAT, str(dtype).removeprefix("torch."))


def apply(name: str, *args: Expr | bool | int | float) -> Expr:
    """The operation `name` of the operands: cast to a common type, folded when all are constants.

    Raises:
        TypeError: for operands the operation does not take, such as a bitwise operation of floats.
    """
    op = OPS[name]
    if len(args) != op.arity:
        raise TypeError(f"{name} takes {op.arity} operands, got {len(args)}")
    exprs, dtype = _typed(op, tuple([as_expr(a) for a in args]))
    if all(e.op == "const" for e in exprs):
        folded = _fold(op, exprs, dtype)
        if folded is not None:
            return folded
    return node(name, exprs, dtype)


def _typed(op: Op, args: tuple[Expr, ...]) -> tuple[tuple[Expr, ...], DType]:
    dtypes = tuple([a.dtype for a in args])
    if DType.FLOAT in dtypes and op.typing in _WITHOUT_FLOATS:
        raise TypeError(f"{op.name} takes {_WITHOUT_FLOATS[op.typing]}, got {', '.join(dtype.value for dtype in dtypes)}")
    operand_dtypes, result = signature(op.typing, dtypes)
    return args if operand_dtypes == dtypes else tuple(map(cast, args, operand_dtypes)), result


_Types = tuple[DType, ...]
_WITHOUT_FLOATS: Final = {Typing.BITWISE: "booleans or integers", Typing.SHIFT: "integers"}


def signature(typing: Typing, dtypes: _Types) -> tuple[_Types, DType]:
    """Types that operands of these types are cast to, and the type of the result."""
    return _SIGNATURES[typing](dtypes)


def _alike(dtypes: _Types, least: DType = DType.BOOL) -> tuple[_Types, DType]:
    widest = _promote(least, *dtypes)
    return (widest,) * len(dtypes), widest


def _integers(dtypes: _Types, least: DType = DType.BOOL) -> tuple[_Types, DType]:
    return _alike(tuple([DType.INT32 if dtype is DType.FLOAT else dtype for dtype in dtypes]), least)


def _select(dtypes: _Types) -> tuple[_Types, DType]:
    widest = _promote(*dtypes[1:])
    return (DType.BOOL, widest, widest), widest


_SIGNATURES: Final[Mapping[Typing, Callable[[_Types], tuple[_Types, DType]]]] = {
    Typing.ARITHMETIC: lambda dtypes: _alike(dtypes, DType.INT32),
    Typing.FLOATING: lambda dtypes: ((DType.FLOAT,) * len(dtypes), DType.FLOAT),
    Typing.COMPARISON: lambda dtypes: (_alike(dtypes)[0], DType.BOOL),
    Typing.BITWISE: _integers,
    Typing.SHIFT: lambda dtypes: _integers(dtypes, DType.INT32),
    Typing.PREDICATE: lambda dtypes: ((DType.FLOAT,) * len(dtypes), DType.BOOL),
    Typing.SELECT: _select,
}


def _fold(op: Op, args: tuple[Expr, ...], dtype: DType) -> Expr | None:
    try:
        value = op.fold(*(a.value for a in args))
    except (ArithmeticError, ValueError):
        return None  # 1 / 0, log(-1): left to the arithmetic of the device
    if isinstance(value, complex):
        return None
    if dtype is DType.FLOAT:
        return const(float(value))
    if dtype is DType.BOOL:
        return const(bool(value))
    half = 1 << (31 if dtype is DType.INT32 else 63)
    return node("const", (), dtype, (int(value) + half) % (2 * half) - half)  # wraps as the device does


def _row(
    name: str, typing: Typing, fold: Callable[..., Any], rule: Rule, *partials: Partial, arity: int = 1,
    decomposed: Callable[..., Expr] | None = None,
) -> Op:  # fmt: skip
    return Op(name, arity, typing, fold, rule, partials or None, decomposed)


_A, _F, _C, _B, _P, _S = (Typing.ARITHMETIC, Typing.FLOATING, Typing.COMPARISON, Typing.BITWISE, Typing.PREDICATE, Typing.SELECT)
_inc, _dec = ranges.increasing, ranges.decreasing


def _to_integer(f: Callable[[float], int]) -> Callable[[float], float]:
    return lambda x: math.copysign(f(x), x)  # -0.5 rounds to -0.0


def _choose_first(less: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    return lambda a, b: a if a != a or less(a, b) else b  # nan wins, as in torch


def _fold_sign(x: Any) -> Any:
    return (x > 0) - (x < 0)


def _fold_fmod(a: Any, b: Any) -> Any:
    if isinstance(a, int):
        size = abs(a) % abs(b)
        return -size if a < 0 else size
    return math.fmod(a, b)


def _fold_not(x: Any) -> Any:
    return (not x) if isinstance(x, bool) else ~x


def _chosen(a: Expr, b: Expr) -> Expr:
    # the derivative of a choice where a <= b: by selection, so that what was not chosen may be infinite; a tie is split, as in torch
    return apply("where", apply("le", a, b), apply("where", apply("eq", a, b), 0.5, 1.0), 0.0)


# Decompositions ----------------------------------------------------------------------------------------------------
# Accuracy near zero is kept: expm1 and log1p by Kahan's correction (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
# section 1.14.1), and what can be built on them is.


def _add(a: Expr | float, b: Expr | float) -> Expr:
    return apply("add", a, b)


def _sub(a: Expr | float, b: Expr | float) -> Expr:
    return apply("sub", a, b)


def _mul(a: Expr | float, b: Expr | float) -> Expr:
    return apply("mul", a, b)


def _div(a: Expr | float, b: Expr | float) -> Expr:
    return apply("div", a, b)


def _where(cond: Expr, a: Expr | float, b: Expr | float) -> Expr:
    return apply("where", cond, a, b)


def _copy_sign(x: Expr, magnitude: Expr) -> Expr:
    return _where(apply("lt", x, 0.0), apply("neg", magnitude), magnitude)


def _expm1(x: Expr) -> Expr:
    u = apply("exp", x)
    corrected = _div(_mul(_sub(u, 1.0), x), apply("log", u))
    plain = apply("or", apply("le", _sub(u, 1.0), -1.0), apply("lt", 80.0, x))  # exp(x) - 1 is exact enough there
    return _where(apply("eq", u, 1.0), x, _where(plain, _sub(u, 1.0), corrected))


def _log1p(x: Expr) -> Expr:
    u = _add(1.0, x)
    corrected = _div(_mul(apply("log", u), x), _sub(u, 1.0))
    return _where(apply("eq", u, 1.0), x, _where(apply("lt", 1e8, u), apply("log", u), corrected))


def _sinh(x: Expr) -> Expr:
    t = apply("expm1", apply("abs", x))
    # t / (t + 1) is 1 for an infinite t
    half = _mul(0.5, _add(t, _sub(1.0, _div(1.0, _add(t, 1.0)))))
    small = _mul(0.5, _add(t, _div(t, _add(t, 1.0))))
    return _copy_sign(x, _where(apply("lt", t, 1.0), small, half))


def _cosh(x: Expr) -> Expr:
    return _mul(0.5, _add(apply("exp", x), apply("exp", apply("neg", x))))


def _tanh(x: Expr) -> Expr:
    t = apply("expm1", _mul(-2.0, apply("abs", x)))
    return _copy_sign(x, _div(apply("neg", t), _add(t, 2.0)))


def _sigmoid(x: Expr) -> Expr:
    return _div(1.0, _add(1.0, apply("exp", apply("neg", x))))


def _one_minus_square(x: Expr) -> Expr:
    return apply("sqrt", _mul(_sub(1.0, x), _add(1.0, x)))


def _atan2(y: Expr, x: Expr) -> Expr:
    steep = apply("lt", apply("abs", x), apply("abs", y))
    ratio = _where(steep, _div(x, y), _where(apply("eq", x, 0.0), 0.0, _div(y, x)))
    angle = apply("atan", ratio)
    quarter = _sub(_copy_sign(y, const(math.pi / 2)), angle)
    beyond = _add(angle, _copy_sign(y, const(math.pi)))
    return _where(steep, quarter, _where(apply("lt", x, 0.0), beyond, angle))


def _trunc(x: Expr) -> Expr:
    return _copy_sign(x, apply("floor", apply("abs", x)))


def _round(x: Expr) -> Expr:
    below = apply("floor", x)
    rest = _sub(x, below)
    odd = apply("ne", _mul(2.0, apply("floor", _mul(0.5, below))), below)
    up = apply("or", apply("lt", 0.5, rest), apply("and", apply("eq", rest, 0.5), odd))
    return _where(up, _add(below, 1.0), below)


def _pow(x: Expr, y: Expr) -> Expr:
    # |x|^y, negated for a negative base and an odd integer exponent, nan for a negative base and a fraction
    size = apply("exp2", _mul(y, apply("log2", apply("abs", x))))
    odd = apply("ne", _mul(2.0, apply("floor", _mul(0.5, y))), y)
    signed = _where(apply("eq", apply("floor", y), y), _where(odd, apply("neg", size), size), math.nan)
    return _where(apply("eq", y, 0.0), 1.0, _where(apply("lt", x, 0.0), signed, size))


def _floordiv(a: Expr, b: Expr) -> Expr:
    if a.dtype is DType.FLOAT:
        return apply("floor", _div(a, b))
    # truncating division corrected where signs differ; fmod(a, b) has the sign of a
    rest = apply("fmod", a, b)
    exact = cast(_div(_sub(a, rest), b), a.dtype)
    crosses = apply("and", apply("ne", rest, 0), apply("ne", apply("lt", rest, 0), apply("lt", b, 0)))
    return _sub(exact, cast(crosses, a.dtype))


def _mod(a: Expr, b: Expr) -> Expr:
    return _sub(a, _mul(apply("floordiv", a, b), b))


def _fmod(a: Expr, b: Expr) -> Expr:
    if a.dtype is DType.FLOAT:
        return _sub(a, _mul(apply("trunc", _div(a, b)), b))
    size = apply("mod", apply("abs", a), apply("abs", b))
    return apply("where", apply("lt", a, 0), apply("neg", size), size)


def _sign(x: Expr) -> Expr:
    return cast(apply("where", apply("lt", 0, x), 1, apply("where", apply("lt", x, 0), -1, 0)), x.dtype)


def _min(a: Expr, b: Expr) -> Expr:
    less = apply("where", apply("lt", a, b), a, b)
    return less if a.dtype is not DType.FLOAT else _where(apply("isnan", a), a, less)


def _max(a: Expr, b: Expr) -> Expr:
    more = apply("where", apply("lt", b, a), a, b)
    return more if a.dtype is not DType.FLOAT else _where(apply("isnan", a), a, more)


def _xor(a: Expr, b: Expr) -> Expr:
    return apply("ne", a, b) if a.dtype is DType.BOOL else _sub(apply("or", a, b), apply("and", a, b))


# The table ---------------------------------------------------------------------------------------------------------

# fmt: off
OPS: Final[dict[str, Op]] = {
    row.name: row
    for row in (
        _row("neg", _A, lambda a: -a, _dec(torch.neg), lambda y, a: const(-1.0), decomposed=lambda a: apply("sub", 0, a)),
        _row("abs", _A, abs, ranges.absolute, lambda y, a: apply("sign", a), decomposed=lambda a: apply("max", a, apply("neg", a))),
        _row("sign", _A, _fold_sign, _inc(torch.sign), decomposed=_sign),
        _row("add", _A, lambda a, b: a + b, ranges.add, lambda y, a, b: const(1.0), lambda y, a, b: const(1.0), arity=2),
        _row("sub", _A, lambda a, b: a - b, ranges.sub, lambda y, a, b: const(1.0), lambda y, a, b: const(-1.0),
             arity=2, decomposed=lambda a, b: apply("add", a, apply("neg", b))),
        _row("mul", _A, lambda a, b: a * b, ranges.mul, lambda y, a, b: b, lambda y, a, b: a, arity=2),
        _row("div", _F, lambda a, b: a / b, ranges.div,
             lambda y, a, b: apply("div", 1.0, b), lambda y, a, b: apply("neg", apply("div", y, b)), arity=2),
        _row("floordiv", _A, lambda a, b: a // b, ranges.floordiv, arity=2, decomposed=_floordiv),
        _row("mod", _A, lambda a, b: a % b, ranges.mod,
             lambda y, a, b: const(1.0), lambda y, a, b: apply("neg", apply("floordiv", a, b)), arity=2, decomposed=_mod),
        _row("fmod", _A, _fold_fmod, ranges.fmod,
             lambda y, a, b: const(1.0), lambda y, a, b: apply("neg", apply("trunc", apply("div", a, b))), arity=2, decomposed=_fmod),
        _row("min", _A, _choose_first(operator.lt), ranges.minimum,
             lambda y, a, b: _chosen(a, b), lambda y, a, b: _chosen(b, a), arity=2, decomposed=_min),
        _row("max", _A, _choose_first(operator.gt), ranges.maximum,
             lambda y, a, b: _chosen(b, a), lambda y, a, b: _chosen(a, b), arity=2, decomposed=_max),
        _row("floor", _F, _to_integer(math.floor), _inc(torch.floor)),
        _row("ceil", _F, _to_integer(math.ceil), _inc(torch.ceil), decomposed=lambda a: apply("neg", apply("floor", apply("neg", a)))),
        _row("round", _F, _to_integer(round), _inc(torch.round), decomposed=_round),
        _row("trunc", _F, _to_integer(math.trunc), _inc(torch.trunc), decomposed=_trunc),
        _row("exp", _F, math.exp, _inc(torch.exp), lambda y, a: y, decomposed=lambda a: apply("exp2", _mul(a, 1 / math.log(2)))),
        _row("exp2", _F, lambda a: 2.0**a, _inc(torch.exp2), lambda y, a: apply("mul", y, math.log(2)),
             decomposed=lambda a: apply("exp", _mul(a, math.log(2)))),
        _row("expm1", _F, math.expm1, _inc(torch.expm1), lambda y, a: apply("add", y, 1.0), decomposed=_expm1),
        _row("log", _F, math.log, _inc(torch.log), lambda y, a: apply("div", 1.0, a),
             decomposed=lambda a: _mul(apply("log2", a), math.log(2))),
        _row("log2", _F, math.log2, _inc(torch.log2), lambda y, a: apply("div", 1 / math.log(2), a),
             decomposed=lambda a: _mul(apply("log", a), 1 / math.log(2))),
        _row("log1p", _F, math.log1p, _inc(torch.log1p), lambda y, a: apply("div", 1.0, apply("add", a, 1.0)), decomposed=_log1p),
        _row("sqrt", _F, math.sqrt, _inc(torch.sqrt), lambda y, a: apply("div", 0.5, y), decomposed=lambda a: apply("pow", a, 0.5)),
        _row("rsqrt", _F, lambda a: 1 / math.sqrt(a), _dec(torch.rsqrt), lambda y, a: apply("mul", -0.5, apply("div", y, a)),
             decomposed=lambda a: _div(1.0, apply("sqrt", a))),
        _row("pow", _F, lambda a, b: a**b, ranges.power,
             lambda y, a, b: apply("where", apply("eq", b, 0.0), 0.0, apply("mul", b, apply("pow", a, apply("sub", b, 1.0)))),
             lambda y, a, b: apply("where", apply("eq", a, 0.0), 0.0, apply("mul", y, apply("log", a))), arity=2, decomposed=_pow),
        _row("sin", _F, math.sin, ranges.oscillating, lambda y, a: apply("cos", a)),
        _row("cos", _F, math.cos, ranges.oscillating, lambda y, a: apply("neg", apply("sin", a))),
        _row("tan", _F, math.tan, ranges.unknown, lambda y, a: apply("add", 1.0, apply("mul", y, y)),
             decomposed=lambda a: _div(apply("sin", a), apply("cos", a))),
        _row("asin", _F, math.asin, _inc(torch.asin), lambda y, a: apply("rsqrt", apply("sub", 1.0, apply("mul", a, a))),
             decomposed=lambda a: apply("atan2", a, _one_minus_square(a))),
        _row("acos", _F, math.acos, _dec(torch.acos),
             lambda y, a: apply("neg", apply("rsqrt", apply("sub", 1.0, apply("mul", a, a)))),
             decomposed=lambda a: apply("atan2", _one_minus_square(a), a)),
        _row("atan", _F, math.atan, _inc(torch.atan), lambda y, a: apply("div", 1.0, apply("add", 1.0, apply("mul", a, a))),
             decomposed=lambda a: apply("asin", _div(a, apply("sqrt", _add(1.0, _mul(a, a)))))),
        _row("atan2", _F, math.atan2, ranges.bounded(-math.pi, math.pi),
             lambda y, a, b: apply("div", b, apply("add", apply("mul", a, a), apply("mul", b, b))),
             lambda y, a, b: apply("neg", apply("div", a, apply("add", apply("mul", a, a), apply("mul", b, b)))),
             arity=2, decomposed=_atan2),
        _row("sinh", _F, math.sinh, _inc(torch.sinh), lambda y, a: apply("cosh", a), decomposed=_sinh),
        _row("cosh", _F, math.cosh, ranges.cosh, lambda y, a: apply("sinh", a), decomposed=_cosh),
        _row("tanh", _F, math.tanh, _inc(torch.tanh), lambda y, a: apply("sub", 1.0, apply("mul", y, y)), decomposed=_tanh),
        _row("sigmoid", _F, lambda a: 1 / (1 + math.exp(-a)), _inc(torch.sigmoid),
             lambda y, a: apply("mul", y, apply("sub", 1.0, y)), decomposed=_sigmoid),
        _row("erf", _F, math.erf, _inc(torch.erf),
             lambda y, a: apply("mul", 2 / math.sqrt(math.pi), apply("exp", apply("neg", apply("mul", a, a))))),
        _row("isnan", _P, math.isnan, ranges.bounded(0, 1), decomposed=lambda a: apply("ne", a, a)),
        _row("isinf", _P, math.isinf, ranges.bounded(0, 1), decomposed=lambda a: apply("eq", apply("abs", a), math.inf)),
        _row("eq", _C, lambda a, b: a == b, ranges.eq, arity=2),
        _row("ne", _C, lambda a, b: a != b, ranges.ne, arity=2, decomposed=lambda a, b: apply("not", apply("eq", a, b))),
        _row("lt", _C, lambda a, b: a < b, ranges.lt, arity=2),
        _row("le", _C, lambda a, b: a <= b, ranges.le, arity=2, decomposed=lambda a, b: apply("or", apply("lt", a, b), apply("eq", a, b))),
        _row("and", _B, lambda a, b: a & b, ranges.bit_and, arity=2),
        _row("or", _B, lambda a, b: a | b, ranges.bit_or, arity=2),
        _row("xor", _B, lambda a, b: a ^ b, ranges.bit_xor, arity=2, decomposed=_xor),
        _row("not", _B, _fold_not, _dec(lambda x: -1 - x)),
        _row("shl", Typing.SHIFT, lambda a, b: a << min(b, 64), lambda a, b: ranges.mul(a, _inc(torch.exp2)(b)),
             arity=2, decomposed=lambda a, b: _mul(a, cast(apply("exp2", b), a.dtype))),
        _row("shr", Typing.SHIFT, lambda a, b: a >> b, lambda a, b: ranges.floordiv(a, _inc(torch.exp2)(b)),
             arity=2, decomposed=lambda a, b: apply("floordiv", a, cast(apply("exp2", b), a.dtype))),
        _row("where", _S, lambda c, a, b: a if c else b, ranges.select,
             lambda y, c, a, b: const(0.0), lambda y, c, a, b: apply("where", c, 1.0, 0.0), lambda y, c, a, b: apply("where", c, 0.0, 1.0),
             arity=3),
    )
}
# fmt: on
