"""Scores that were set to the lowest number, brought to a mask where that is what they mean.

`softmax` of a row whose masked scores are -inf is what a mask says. With the lowest finite number, or one so low that no
score comes near, the same holds for every row that attends to something: the masked weights are exactly zero. A row that
attends to nothing is the exception: its scores are all alike, and its weights uniform over all keys. So a score of the form
`where(keep, x, lowest)` becomes a mask, and the rule for such rows is kept by a separate step, unless every row provably
attends to something. Scores whose lowest numbers come in more than one level stay scores.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Final

import torch

from foci.compat.fake import real_values
from foci.ir import expr as ir
from foci.ir.expr import COORDINATES, DType, Expr
from foci.ir.interval import Grid, bounds
from foci.ir.ops import apply
from foci.ir.ranges import Range
from foci.ir.rewrite import rewrite, substitute
from foci.ir.simplify import simplify

__all__ = ["LOWEST", "Masked", "canonical", "is_low", "leading_scale", "masked"]

LOWEST: Final = -6e4
"""A constant at or under this one masks: float16's lowest number is -65504, and no score comes near."""

_TRUE, _FALSE = ir.const(True), ir.const(False)


@dataclass(frozen=True)
class Masked:
    """A score and a mask.

    `uniform`: rows with nothing to attend to have uniform weights, and such rows may occur; all their scores are `lowest`.
    """

    score: Expr
    mask: Expr
    uniform: bool
    lowest: float = -math.inf


def canonical(e: Expr) -> Expr:
    """Simplified, with numbers that stand for conditions as conditions."""
    return simplify(rewrite(simplify(e), _canonical))


def masked(score: Expr) -> Masked:
    """The score with its lowest constants as a mask.

    Args:
        score: of the variable `score` and the coordinates.
    """
    score = canonical(score)
    split = _split(score)
    if split is None or "score" in split[1].variables():
        return Masked(score, _TRUE, uniform=False)
    rest, keep, lowest = split
    keep = simplify(keep)
    if keep is _TRUE or lowest is None:
        return Masked(score, _TRUE, uniform=False)
    if any(is_low(e) for e in rest.walk()):
        return Masked(score, _TRUE, uniform=False)
    finite = lowest != -math.inf
    return Masked(simplify(rest), keep, uniform=finite and not _surely_attends(keep), lowest=lowest)


_CHOSEN: Final = frozenset(("add", "sub", "mul", "div", "neg", "eq", "ne", "lt", "le"))


def _one(e: Expr) -> Expr:
    return ir.const(1.0 if e.dtype is DType.FLOAT else 1)


def _zero(e: Expr) -> Expr:
    return ir.const(0.0 if e.dtype is DType.FLOAT else 0)


def is_low(e: Expr) -> bool:
    """Whether it is a constant that masks."""
    return e.op == "const" and isinstance(e.value, float) and e.value <= LOWEST


def _canonical(e: Expr) -> Expr | None:
    """`float(condition)` in arithmetic as a choice, so that `(1 - mask) * lowest` is one; what positions always satisfy as true."""
    if e.op in ("lt", "le") and e.args[0].dtype.is_integer and e.variables() <= _POSITIONS and _true_for_positions(e):
        return _TRUE
    if e.op == "cast" and e.dtype is DType.FLOAT and e.args[0].dtype is DType.BOOL:
        return apply("where", e.args[0], 1.0, 0.0)
    if e.op == "where" and e.args[0].op == "lt" and e.args[0].args[1] is e.args[1] and e.args[0].args[0] is e.args[2] and is_low(e.args[1]):
        return e.args[2]  # clamped from below by what no score comes near
    if e.op in ("add", "sub") and (chosen := _kept_or_low(e)) is not None:
        return chosen
    if e.op == "mul" and all(a.op == "where" and a.args[1:] == (_one(a), _zero(a)) for a in e.args):
        return apply("where", apply("and", *(a.args[0] for a in e.args)), *e.args[0].args[1:])
    if e.op in _CHOSEN and e.args[0].dtype is not DType.BOOL:
        choices = [n for n, a in enumerate(e.args) if a.op == "where" and a.args[1].op == a.args[2].op == "const"]
        plain_args = [a for n, a in enumerate(e.args) if n not in choices]
        if len(choices) == 1 and all(a.op == "const" for a in plain_args):
            n = choices[0]
            sides = [apply(e.op, *(e.args[n].args[s] if i == n else a for i, a in enumerate(e.args))) for s in (1, 2)]
            return apply("where", e.args[n].args[0], *sides)
    return None


def _kept_or_low(e: Expr) -> Expr | None:
    """`x * keep - large * (1 - keep)`, with `keep` as a number, as a choice of x and the lowest number."""
    for product, low in (e.args, e.args[::-1])[: 2 if e.op == "add" else 1]:
        if product.op != "mul" or low.op != "where" or low.args[1] is not _zero(e):
            continue
        beyond = simplify(apply("neg", low.args[2]) if e.op == "sub" else low.args[2])
        for factor, x in (product.args, product.args[::-1]):
            if is_low(beyond) and factor.op == "where" and factor.args == (low.args[0], _one(e), _zero(e)):
                return apply("where", low.args[0], x, beyond)
    return None


_Split = tuple[Expr, Expr, float | None]


def _split(e: Expr) -> _Split | None:
    """`e` as where(keep, rest, lowest): (rest, keep, lowest); None where the lowest numbers have several levels."""
    if e.op == "where" and e.dtype is DType.FLOAT:
        cond, a, b = e.args
        for keep, inner, low in ((cond, a, b), (apply("not", cond), b, a)):
            if is_low(low) and not is_low(inner):
                return _narrowed(_split(inner), keep, float(str(low.value)))
        return e, _TRUE, None
    if e.op in ("add", "sub"):
        a, b = e.args
        left, right = _split(a), _split(b) if e.op == "add" else (b, _TRUE, None)
        if left is None or right is None or (left[2] is not None and right[2] is not None and not left[2] == right[2] == -math.inf):
            return None
        lowest = right[2] if left[2] is None else left[2]
        return apply(e.op, left[0], right[0]), apply("and", left[1], right[1]), lowest
    if e.op == "max" and any(is_low(a) for a in e.args):
        return _split(e.args[0] if is_low(e.args[1]) else e.args[1])
    if e.op in ("mul", "div") and e.args[1].op == "const" and isinstance(e.args[1].value, float) and e.args[1].value > 0:
        inner_split = _split(e.args[0])
        return None if inner_split is None else (apply(e.op, inner_split[0], e.args[1]), inner_split[1], inner_split[2])
    return e, _TRUE, None


def _narrowed(inner: _Split | None, keep: Expr, lowest: float) -> _Split | None:
    if inner is None:
        return None
    rest, mask, below = inner
    if below is not None and below != lowest:
        return None
    return rest, apply("and", keep, mask), lowest


def _surely_attends(keep: Expr) -> bool:
    """Whether each row has a key for every value of everything: its own position, the first key, or the last."""
    if any(e.op == "load" for e in keep.walk()):
        return False
    q, kv = ir.variable("q_idx"), ir.variable("kv_idx")
    for candidate in (ir.const(0), q):
        at = simplify(substitute(keep, {kv: candidate}))
        if at is _TRUE or _true_for_positions(at):
            return True
    return False


_POSITIONS: Final = frozenset(COORDINATES)


@functools.lru_cache(maxsize=1024)
def _true_for_positions(e: Expr) -> bool:
    """Whether a condition holds because positions are not negative."""
    if any(x.op in ("param", "load", "size", "axis") for x in e.walk()):
        return False

    def holds() -> bool:
        first, last = torch.zeros((), dtype=torch.float64, device="cpu"), torch.full((), float(1 << 24), dtype=torch.float64, device="cpu")
        grid = Grid({name: Range(first, last) for name in e.variables()})
        return bool(bounds(e, grid).lo >= 1)

    return real_values(holds)


def leading_scale(score: Expr) -> tuple[Expr, float]:
    """`f(score * c)` as `f` and c, where every use of the score is multiplied or divided by one constant; else c is 1.

    Example:
        >>> from foci.ir.expr import variable
        >>> leading_scale(apply("add", apply("mul", variable("score"), 0.125), variable("kv_idx")))
        (score + float(kv_idx), 0.125)
    """
    total = 1.0
    while (step := _one_scale(score)) is not None:
        score, total = step[0], total * step[1]
    return score, total


def _one_scale(score: Expr) -> tuple[Expr, float] | None:
    s = ir.variable("score")
    uses = [e for e in score.walk() if s in e.args]
    scales: set[float] = set()
    for e in uses:
        if e.op not in ("mul", "div") or e.args[0] is not s or not isinstance(e.args[1].value, float) or e.args[1].op != "const":
            return None
        scales.add(e.args[1].value if e.op == "mul" else 1.0 / e.args[1].value)
    return (substitute(score, dict.fromkeys(uses, s)), scales.pop()) if len(scales) == 1 else None
