"""Operations written by other operations, for languages that lack them.

Accuracy near zero is kept: expm1 and log1p by Kahan's correction (N. J. Higham, Accuracy and Stability of Numerical
Algorithms, 2nd ed., section 1.14.1), and what can be built on them is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from foci.ir.expr import DType, Expr, const
from foci.ir.ops import apply, cast

__all__ = ["DECOMPOSITIONS"]


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


DECOMPOSITIONS: Final[Mapping[str, Callable[..., Expr]]] = {
    "neg": lambda a: apply("sub", 0, a),
    "abs": lambda a: apply("max", a, apply("neg", a)),
    "sign": _sign,
    "sub": lambda a, b: apply("add", a, apply("neg", b)),
    "floordiv": _floordiv,
    "mod": _mod,
    "fmod": _fmod,
    "min": _min,
    "max": _max,
    "ceil": lambda a: apply("neg", apply("floor", apply("neg", a))),
    "round": _round,
    "trunc": _trunc,
    "exp": lambda a: apply("exp2", _mul(a, 1 / math.log(2))),
    "exp2": lambda a: apply("exp", _mul(a, math.log(2))),
    "expm1": _expm1,
    "log": lambda a: _mul(apply("log2", a), math.log(2)),
    "log2": lambda a: _mul(apply("log", a), 1 / math.log(2)),
    "log1p": _log1p,
    "sqrt": lambda a: apply("pow", a, 0.5),
    "rsqrt": lambda a: _div(1.0, apply("sqrt", a)),
    "pow": _pow,
    "tan": lambda a: _div(apply("sin", a), apply("cos", a)),
    "asin": lambda a: apply("atan2", a, _one_minus_square(a)),
    "acos": lambda a: apply("atan2", _one_minus_square(a), a),
    "atan": lambda a: apply("asin", _div(a, apply("sqrt", _add(1.0, _mul(a, a))))),
    "atan2": _atan2,
    "sinh": _sinh,
    "cosh": _cosh,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "isnan": lambda a: apply("ne", a, a),
    "isinf": lambda a: apply("eq", apply("abs", a), math.inf),
    "ne": lambda a, b: apply("not", apply("eq", a, b)),
    "le": lambda a, b: apply("or", apply("lt", a, b), apply("eq", a, b)),
    "xor": _xor,
    "shl": lambda a, b: _mul(a, cast(apply("exp2", b), a.dtype)),
    "shr": lambda a, b: apply("floordiv", a, cast(apply("exp2", b), a.dtype)),
}
"""For an operation, the same by others: a function of the (typed) operands. erf, floor and where have none."""
