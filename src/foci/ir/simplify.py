"""Simplification to one form, so that functions that compute the same are, mostly, the same expression.

Every rule is exact: on integers as the device wraps them, on floats for every value including infinities and nan, except
that the sign of a zero may change (`x + 0.0` is `x`). `x * 0.0` stays, since x may be infinite.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Final

from foci.ir.expr import COORDINATES, LENGTHS, DType, Expr, Payload, const, load, node
from foci.ir.lift_constants import is_lifted
from foci.ir.linear import compare, linear, rebuilt
from foci.ir.ops import apply, cast
from foci.ir.rewrite import reduction, rewrite, substitute
from foci.ir.rule import Rule, by_name

__all__ = ["RULES", "make", "simplify"]

Rewrite = Callable[[Expr], Expr | None]
_TRUE, _FALSE = const(True), const(False)


def simplify(expr: Expr) -> Expr:
    """`expr` in canonical form.

    Example:
        >>> from foci.ir.expr import variable
        >>> q, kv = variable("q_idx"), variable("kv_idx")
        >>> simplify(apply("lt", apply("sub", q, kv), 4)), simplify(apply("not", apply("lt", 3, apply("sub", q, kv))))
        (q_idx - kv_idx <= 3, q_idx - kv_idx <= 3)
    """
    simple = rewrite(expr, _settled)
    # a reduction that moves to another level renumbers its axis, by which operands are sorted
    return simple if simple is expr or not simple.levels else simplify(simple)


@functools.lru_cache(maxsize=4096)
def _settled(e: Expr) -> Expr:
    """`e`, whose operands are in canonical form, in canonical form."""
    rule = _RULES.get(e.op)
    changed = rule(e) if rule is not None else None
    return e if changed is None or changed is e else _settled(changed)


def make(name: str, *args: Expr | bool | int | float) -> Expr:
    """An operation of operands in canonical form, in canonical form."""
    return _settled(apply(name, *args))


def _cast(e: Expr, dtype: DType) -> Expr:
    return _settled(cast(e, dtype))


# Order of commuted operands ----------------------------------------------------------------------------------------

_PLACES: Final = {name: place for place, name in enumerate(("score", *COORDINATES, *LENGTHS))}
_KINDS: Final = {"var": 0, "param": 2, "size": 2, "const": 3}


class _Key:
    """Sort key: variables in their order, then by depth, then run-time numbers, then constants.

    Ties are broken by a digest of the shape, which leaves out the numbers of slots and the constants that will be lifted,
    so that neither new constants nor other captures change an order; then by a digest of everything.
    """

    __slots__ = ("expr", "place")

    def __init__(self, expr: Expr) -> None:
        self.expr = expr
        self.place = _KINDS.get(expr.op, 1), _PLACES[str(expr.value)] if expr.op == "var" else expr.depth

    def __lt__(self, other: _Key) -> bool:
        if self.place != other.place:
            return self.place < other.place
        return self.expr is not other.expr and _digests(self.expr) < _digests(other.expr)


def _digests(expr: Expr) -> tuple[bytes, bytes]:
    """Digests of the shape and of everything."""
    if expr.digests is None:
        for e in expr.walk():
            if e.digests is None:
                object.__setattr__(e, "digests", _compute_digests(e))
    assert expr.digests is not None
    return expr.digests


def _compute_digests(e: Expr) -> tuple[bytes, bytes]:
    """Digests of a node whose operands have theirs."""
    parts = [_digests(arg) for arg in e.args]
    shapes = [arg.dtype.value if is_lifted(e.op, i, arg) else parts[i][0].hex() for i, arg in enumerate(e.args)]
    shape = _digest(e.op, e.dtype.value, _expression_shape(e.value) if e.op in _SLOTTED else repr(e.value), *shapes)
    return shape, _digest(e.op, e.dtype.value, repr(e.value), *(digest.hex() for _, digest in parts))


_SLOTTED: Final = ("load", "param", "size")


def _expression_shape(value: Payload) -> str:
    return str(value[1]) if isinstance(value, tuple) else ""


def _digest(*parts: str) -> bytes:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).digest()


def _in_order(e: Expr) -> Expr:
    a, b = e.args
    return node(e.op, (b, a), e.dtype) if _Key(b) < _Key(a) else e


def _chain(e: Expr, drop: Expr | None, absorb: Expr | None) -> Expr:
    """An associative, commutative, idempotent operation in one order; `drop` is its neutral, `absorb` its zero."""
    operands: set[Expr] = set()
    stack = list(e.args)
    while stack:
        arg = stack.pop()
        if arg.op == e.op:
            stack.extend(arg.args)
        else:
            operands.add(arg)
    operands.discard(drop)
    if absorb is not None and absorb in operands:
        return absorb
    constants = [arg for arg in operands if arg.op == "const"]
    if len(constants) > 1:
        folded = constants[0]
        for arg in constants[1:]:
            folded = apply(e.op, folded, arg)
        operands = operands.difference(constants) | {folded}
    if not operands:
        assert drop is not None
        return drop
    if e.dtype is DType.BOOL and absorb is not None and any(make("not", arg) in operands for arg in _may_contradict(operands)):
        return absorb
    first, *rest = sorted(operands, key=_Key)
    for arg in rest:
        first = node(e.op, (first, arg), e.dtype)
    return first


def _may_contradict(operands: set[Expr]) -> list[Expr]:
    """Operands of which at least one is in every pair that excludes each other; a negation counts like a comparison."""
    orders = [arg for arg in operands if arg.op in ("lt", "le")]
    return orders[1:] + [arg for arg in operands if arg.op in ("not", "ne")]


# Rules, by operation -----------------------------------------------------------------------------------------------


def _is(e: Expr, value: float) -> bool:
    return e.op == "const" and not isinstance(e.value, bool) and e.value == value


def _add(e: Expr) -> Expr | None:
    if e.dtype.is_integer:
        return rebuilt(linear(e), _Key)
    a, b = e.args
    if _is(a, 0.0):
        return b
    if _is(b, 0.0):
        return a
    if b.op == "neg":
        return make("sub", a, b.args[0])
    if a.op == "neg":
        return make("sub", b, a.args[0])
    return _in_order(e)


def _sub(e: Expr) -> Expr | None:
    if e.dtype.is_integer:
        return rebuilt(linear(e), _Key)
    a, b = e.args
    if _is(b, 0.0):
        return a
    if _is(a, 0.0):
        return make("neg", b)
    if b.op == "neg":
        return make("add", a, b.args[0])
    if b.op == "const" and _Key(a) < _Key(b):  # x - 3 is x + -3
        return make("add", a, apply("neg", b))
    return None


def _neg(e: Expr) -> Expr | None:
    if e.dtype.is_integer:
        return rebuilt(linear(e), _Key)
    a = e.args[0]
    if a.op == "neg":
        return a.args[0]
    if a.op == "sub":
        return make("sub", a.args[1], a.args[0])
    if a.op == "mul" and a.args[1].op == "const":
        return make("mul", a.args[0], apply("neg", a.args[1]))
    return None


def _mul(e: Expr) -> Expr | None:
    a, b = e.args
    if e.dtype.is_integer:
        return rebuilt(linear(e), _Key) if a.op == "const" or b.op == "const" else _in_order(e)
    for x, y in ((a, b), (b, a)):
        if _is(y, 1.0):
            return x
        if _is(y, -1.0):
            return make("neg", x)
        if x.op == "neg":
            return make("mul", x.args[0], apply("neg", y)) if y.op == "const" else make("neg", make("mul", x.args[0], y))
    return _in_order(e)


def _div(e: Expr) -> Expr | None:
    a, b = e.args
    if b.op == "const":
        assert isinstance(b.value, float)
        mantissa, exponent = math.frexp(b.value)
        if abs(mantissa) == 0.5 and abs(exponent) < 100:  # a power of two: the reciprocal is exact
            return make("mul", a, 1.0 / b.value)
    if a.op == "neg":
        return make("neg", make("div", a.args[0], b))
    return None


def _floordiv(e: Expr) -> Expr | None:
    return e.args[0] if e.dtype.is_integer and _is(e.args[1], 1) else None


def _mod(e: Expr) -> Expr | None:
    a, b = e.args
    if not e.dtype.is_integer:
        return None
    if _is(b, 1):
        return cast(const(0), e.dtype)
    return a if a.op == "mod" and a.args[1] is b and b.op == "const" else None


def _pow(e: Expr) -> Expr | None:
    a, b = e.args
    if _is(b, 0.0):
        return const(1.0)
    if _is(b, 1.0):
        return a
    if _is(b, 2.0):
        return make("mul", a, a)
    return make("div", 1.0, a) if _is(b, -1.0) else None


def _abs(e: Expr) -> Expr | None:
    a = e.args[0]
    if a.op == "abs":
        return a
    if a.op in ("neg", "sub") and a.dtype is DType.FLOAT:
        turned = a.args[0] if a.op == "neg" else make("sub", a.args[1], a.args[0])
        return make("abs", turned) if a.op == "neg" or _Key(turned) < _Key(a) else None
    if a.dtype.is_integer:
        form = linear(a)
        if form.begins_negative(_Key):
            return make("abs", rebuilt(form.times(-1), _Key))
    return None


def _rounding(e: Expr) -> Expr | None:
    a = e.args[0]
    return a if a.op in ("floor", "ceil", "round", "trunc") or (a.op == "cast" and a.args[0].dtype is not DType.FLOAT) else None


def _never(e: Expr) -> Expr | None:
    return _FALSE if e.args[0].op == "cast" else None  # integers are neither nan nor infinite


def _extreme(e: Expr) -> Expr | None:
    neutral = {"min": math.inf, "max": -math.inf}[e.op]
    return _chain(e, const(neutral) if e.dtype is DType.FLOAT else None, None)


def _and(e: Expr) -> Expr | None:
    if e.dtype is DType.BOOL:
        return _chain(e, _TRUE, _FALSE)
    return _chain(e, cast(const(-1), e.dtype), cast(const(0), e.dtype))


def _or(e: Expr) -> Expr | None:
    if e.dtype is DType.BOOL:
        return _chain(e, _FALSE, _TRUE)
    return _chain(e, cast(const(0), e.dtype), cast(const(-1), e.dtype))


def _xor(e: Expr) -> Expr | None:
    a, b = e.args
    if e.dtype is DType.BOOL:
        return make("ne", a, b)
    if a is b:
        return cast(const(0), e.dtype)
    return b if _is(a, 0) else a if _is(b, 0) else _in_order(e)


def _shift(e: Expr) -> Expr | None:
    return e.args[0] if _is(e.args[1], 0) else None


def _not(e: Expr) -> Expr | None:
    a = e.args[0]
    if a.op == "not":
        return a.args[0]
    if a.op in ("eq", "ne"):
        return make("ne" if a.op == "eq" else "eq", *a.args)
    if a.op in ("lt", "le") and a.args[0].dtype.is_integer:  # not for floats: nan compares false both ways
        return make("le" if a.op == "lt" else "lt", a.args[1], a.args[0])
    return None


def _comparison(e: Expr) -> Expr | None:
    a, b = e.args
    if a.dtype.is_integer:
        truth = _of_truth(e)
        if truth is not None:
            return truth
        form = compare(e.op, a, b, _Key)
        return const(form) if isinstance(form, bool) else form
    if a.dtype is DType.BOOL:
        return _bool_comparison(e)
    return _in_order(e) if e.op in ("eq", "ne") else None


def _of_truth(e: Expr) -> Expr | None:
    """`int(condition) == 1` and the like are the condition."""
    for x, y in (e.args, e.args[::-1]):
        if x.op == "cast" and x.args[0].dtype is DType.BOOL and y.op == "const":
            sides = [apply(e.op, *((cast(const(v), x.dtype), y) if x is e.args[0] else (y, cast(const(v), x.dtype)))) for v in (0, 1)]
            return make("where", x.args[0], sides[1], sides[0])
    return None


def _bool_comparison(e: Expr) -> Expr | None:
    a, b = e.args
    if e.op == "lt":
        return make("and", make("not", a), b)
    if e.op == "le":
        return make("or", make("not", a), b)
    for x, y in ((a, b), (b, a)):
        if y.op == "const":
            return x if y.value is (e.op == "eq") else make("not", x)
        if y.op == "not":
            return make("ne" if e.op == "eq" else "eq", x, y.args[0])
    return const(e.op == "eq") if a is b else _in_order(e)


def _where(e: Expr) -> Expr | None:
    cond, a, b = e.args
    if cond.op == "const":
        return a if cond.value else b
    if a is b:
        return a
    if cond.op == "not" or (cond.op == "ne" and cond.args[0].dtype is not DType.FLOAT):
        return make("where", make("not", cond), b, a)
    if e.dtype is DType.BOOL and "const" in (a.op, b.op):
        negated = make("not", cond)
        if b.op == "const":
            return make("or", negated, a) if b.value else make("and", cond, a)
        return make("or", cond, b) if a.value else make("and", negated, b)
    if a.op == "where" and a.args[0] is cond:
        return make("where", cond, a.args[1], b)
    if b.op == "where" and b.args[0] is cond:
        return make("where", cond, a, b.args[2])
    return None


_SAFE_THROUGH: Final = {  # casts that lose nothing, so a cast after them sees the value itself
    (DType.BOOL, DType.INT32), (DType.BOOL, DType.INT64), (DType.BOOL, DType.FLOAT), (DType.INT32, DType.INT64),
}  # fmt: skip


def _cast_rule(e: Expr) -> Expr | None:
    a = e.args[0]
    if e.dtype is DType.BOOL:
        return make("ne", a, cast(const(0), a.dtype))
    if a.op == "cast" and (a.args[0].dtype, a.dtype) in _SAFE_THROUGH:
        return _cast(a.args[0], e.dtype)
    if a.op == "where" and a.args[1].op == a.args[2].op == "const":
        return make("where", a.args[0], cast(a.args[1], e.dtype), cast(a.args[2], e.dtype))
    return None


def _round_to(e: Expr) -> Expr | None:
    a = e.args[0]
    return a if a.op == "round_to" and a.value == e.value else None


def _load(e: Expr) -> Expr | None:
    def narrow(index: Expr) -> Expr:
        return index.args[0] if index.op == "cast" and index.args[0].dtype.is_integer and index.dtype is DType.INT64 else index

    assert isinstance(e.value, int)
    return load(e.value, tuple(narrow(index) for index in e.args), e.dtype)


def _reduce(e: Expr) -> Expr | None:
    kind, level = reduction(e)
    body, extent = e.args
    if (kind == "any" and body is _FALSE) or (kind == "all" and body is _TRUE):
        return body
    if extent.op == "const" and extent.value == 1:
        bound = next((x for x in body.walk() if x.op == "axis" and x.value == level), None)
        return body if bound is None else simplify(substitute(body, {bound: const(0)}))
    return None


# Examples are of s (the raw score), b, h, q and kv (its coordinates), and the captured tensors `table` [4] and `rows` [4, 1].
RULES: Final[tuple[Rule[Rewrite], ...]] = (
    Rule(("add",), "a sum without zeros, in one order; a negation is subtracted", _add, ("s + 0.0", "s + -(s * s)", "kv + q"),
         ("s + 1.0",)),
    Rule(("sub",), "a difference without zeros; less a number is plus its negative", _sub, ("s - 0.0", "0.0 - s", "s - 3.0", "q - kv - q"),
         ("s - s",)),
    Rule(("neg",), "a negation goes into differences and numbers", _neg, ("-(-s)", "-(s - s * s)", "-(s * 3.0)"), ("-s", "-(s + 1.0)")),
    Rule(("mul",), "a product without ones, in one order, the sign outside", _mul, ("s * 1.0", "s * -1.0", "-s * 2.0"), ("s * 0.0",)),
    Rule(("div",), "a quotient by a power of two is a product; the sign is outside", _div, ("s / 4.0", "-s / 3.0"), ("s / 3.0", "s / s")),
    Rule(("floordiv",), "an integer divided by 1", _floordiv, ("q // 1",), ("q // 2", "s // 1.0")),
    Rule(("mod",), "an integer modulo 1, or twice modulo one number", _mod, ("q % 1", "q % 4 % 4"), ("q % 4 % 2", "s % 1.0")),
    Rule(("pow",), "a power of 0, 1, 2 or -1", _pow, ("s**0.0", "s**1.0", "s**2.0", "s**-1.0"), ("s**0.5", "s**3.0")),
    Rule(("abs",), "a size forgets signs", _abs, ("abs(abs(s))", "abs(-s)", "abs(kv - q)"), ("abs(s)", "abs(q - kv)")),
    Rule(("floor", "ceil", "round", "trunc"), "what is whole already", _rounding, ("torch.floor(torch.ceil(s))", "torch.round(q * 1.0)"),
         ("torch.floor(s)", "torch.floor(s * 2.0)")),
    Rule(("isnan", "isinf"), "an integer is a finite number", _never, ("torch.isnan(q * 1.0)",), ("torch.isnan(s)", "torch.isinf(s * s)")),
    Rule(("min", "max"), "the extreme of several operands, each once and in one order", _extreme,
         ("torch.minimum(s, s)", "torch.minimum(q, torch.minimum(kv, q))"), ("torch.maximum(s, table[0])",)),
    Rule(("and",), "all of several truths, each once and in one order; false where two exclude each other", _and,
         ("(q >= kv) & (q >= kv)", "(q >= kv) & (q < kv)", "q & -1"), ("(s > 1.0) & (s <= 1.0)", "q & kv")),
    Rule(("or",), "one of several truths, each once and in one order; true where one must hold", _or,
         ("(q >= kv) | (q >= kv)", "(q >= kv) | (q < kv)", "q | 0"), ("(s > 1.0) | (s <= 1.0)", "q | kv")),
    Rule(("xor",), "truths that differ; integers of which one is 0 or both are one", _xor, ("(q >= kv) ^ (s > 1.0)", "q ^ 0", "q ^ q"),
         ("q ^ kv",)),
    Rule(("shl", "shr"), "a shift by 0", _shift, ("q << 0", "q >> 0"), ("q << 1",)),
    Rule(("not",), "a negation turns comparisons round, of integers alone where nan would compare false", _not,
         ("torch.logical_not(torch.logical_not(s < 1.0))", "torch.logical_not(q >= kv)", "torch.logical_not(s == 1.0)"),
         ("torch.logical_not(s < 1.0)",)),
    Rule(("eq", "ne", "lt", "le"), "comparisons of integers in one form; truths are compared by logic", _comparison,
         ("q < kv + 1", "(q >= kv) == (s > 1.0)", "q - kv <= q"), ("s < s", "s <= 1.0")),
    Rule(("where",), "a choice that is known, of one value, or made before; conditions are not negated", _where,
         ("torch.where(q >= kv, s, s)", "torch.where(q != kv, s, 0.0)", "torch.where(q >= kv, torch.where(q >= kv, s, 0.0), 1.0)"),
         ("torch.where(q >= kv, s, 0.0)", "torch.where(s != 1.0, s, 0.0)")),
    Rule(("cast",), "a cast of what another cast kept, of a choice of numbers, or to a truth", _cast_rule,
         ("(q >= kv).int().float()", "torch.where(q >= kv, 1, 0).float()", "q.bool()"), ("q.float()",)),
    Rule(("round_to",), "what is rounded already", _round_to, ("s.half().half()",), ("s.half()", "s.half().bfloat16()")),
    Rule(("load",), "an index is read as it is, not widened", _load, ("table[q.long()]",), ("table[q]",)),
    Rule(("reduce",), "a reduction of one element, or of what decides it", _reduce,
         ("((rows[q] > 0.0) & False).any()", "((rows[q] > 0.0) | True).all()"), ("rows[q].sum()", "(rows[q] > 0.0).all()")),
)  # fmt: skip

_RULES: Final[Mapping[str, Rewrite]] = by_name(RULES)
