"""Derivatives of expressions, as expressions: reverse accumulation over the graph of shared nodes.

Adjoints flow from the result to its operands (A. Griewank, A. Walther, Evaluating Derivatives, 2nd ed., chapter 3). Two
things differ from a tape. What a `where` did not choose gets its zero by selection, never as zero times an adjoint that
may be infinite. And a `reduce` is a loop: the adjoint of what its body reads from outside is the sum over the loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from foci.ir.expr import DType, Expr, const, reduce, variable
from foci.ir.ops import OPS, apply, cast
from foci.ir.rewrite import canonical_levels, reduction, rename_axis
from foci.ir.simplify import simplify

__all__ = ["CaptureDerivative", "capture_derivatives", "score_derivative"]


@dataclass(frozen=True)
class CaptureDerivative:
    """How to gather the gradient of a captured tensor.

    `grad[slot][indices] += d_score * weight`, summed over b, h, q_idx, kv_idx, where d_score is the gradient of the expression's value;
    and over each `(level, extent)` of `axes`, outermost first, whose `axis(level)` runs to extent in indices and weight.
    """

    slot: int
    indices: tuple[Expr, ...]
    weight: Expr
    axes: tuple[tuple[int, Expr], ...] = ()


def score_derivative(expr: Expr) -> Expr:
    """d expr / d score, at the same score and coordinates; the constant 0 where `expr` does not read the score.

    Example:
        >>> from foci.ir.expr import param
        >>> cap = param(0, DType.FLOAT)
        >>> score_derivative(apply("mul", apply("tanh", apply("div", variable("score"), cap)), cap))
        1.0 - tanh(score / f0) * tanh(score / f0)
    """
    score = variable("score")
    adjoint = _Reverse(expr, lambda e: e is score).run().get(score, const(0.0))
    return simplify(canonical_levels(adjoint))


@functools.lru_cache(maxsize=1024)
def capture_derivatives(expr: Expr) -> tuple[CaptureDerivative, ...]:
    """Derivatives of `expr` by every element of a captured float tensor that it reads.

    Example:
        >>> from foci.ir.expr import load
        >>> capture_derivatives(apply("mul", variable("score"), load(0, (variable("h"),), DType.FLOAT)))
        (CaptureDerivative(slot=0, indices=(h,), weight=score, axes=()),)
    """
    reverse = _Reverse(expr, lambda e: e.op == "load" and e.dtype is DType.FLOAT)
    reverse.run()
    return tuple(_numbered(load) for load in reverse.loads if load.weight is not _ZERO)


_ZERO = const(0.0)
_Adjoints = dict[Expr, Expr]


@dataclass(frozen=True)
class _Loop:
    level: int
    extent: Expr


@dataclass(eq=False)
class _Reverse:
    """A reverse sweep over `root`, for the leaves that `wanted` selects."""

    root: Expr
    wanted: Callable[[Expr], bool]
    active: set[Expr] = field(init=False)
    loads: list[CaptureDerivative] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.active = set()
        for e in self.root.walk():
            reads = any(arg in self.active for arg in e.args) and e.op != "load"
            if e.dtype is DType.FLOAT and (reads or self.wanted(e)):
                self.active.add(e)

    def run(self) -> _Adjoints:
        if self.root not in self.active:
            return {}
        left, loads = self._sweep(self.root, const(1.0), None)
        self.loads = loads
        return left

    def _sweep(self, root: Expr, seed: Expr, loop: _Loop | None) -> tuple[_Adjoints, list[CaptureDerivative]]:
        """Adjoints that leave the body `root` of `loop`, and the loads inside it."""
        adjoints: _Adjoints = {root: seed}
        leaving: _Adjoints = {}
        loads: list[CaptureDerivative] = []
        for e in reversed(list(root.walk())):
            adjoint = adjoints.pop(e, None)
            if adjoint is None:
                continue
            if loop is not None and loop.level not in e.free:
                leaving[e] = adjoint
            elif e.op == "load":
                assert isinstance(e.value, int)
                loads.append(CaptureDerivative(e.value, e.args, adjoint))
            elif e.op == "reduce":
                loads += self._through_reduce(e, adjoint, adjoints)
            elif e.op == "var":
                leaving[e] = adjoint
            else:
                self._through_op(e, adjoint, adjoints)
        return leaving, loads

    def _through_op(self, e: Expr, adjoint: Expr, adjoints: _Adjoints) -> None:
        if e.op == "round_to":  # its own rounding aside, the identity
            _accumulate(adjoints, e.args[0], adjoint)
            return
        partials = OPS[e.op].partials if e.op in OPS else None
        for i, arg in enumerate(e.args):
            if partials is not None and arg in self.active:
                _accumulate(adjoints, arg, _times(adjoint, partials[i](e, *e.args)))

    def _through_reduce(self, e: Expr, adjoint: Expr, adjoints: _Adjoints) -> list[CaptureDerivative]:
        kind, level = reduction(e)
        body, extent = e.args
        seed = const(1.0)
        if kind != "sum":  # ties share, as in torch.amax
            seed = apply("where", apply("eq", body, e), 1.0, 0.0)
            ties = apply("max", reduce("sum", level, seed, extent), 1.0)
            adjoint = _times(adjoint, apply("div", 1.0, ties))
        leaving, loads = self._sweep(body, seed, _Loop(level, extent))
        for outer, inner in leaving.items():
            _accumulate(adjoints, outer, _times(adjoint, _summed(inner, level, extent)))
        return [CaptureDerivative(load.slot, load.indices, _times(adjoint, load.weight), ((level, extent), *load.axes)) for load in loads]


def _accumulate(adjoints: _Adjoints, e: Expr, amount: Expr) -> None:
    if amount is not _ZERO:
        adjoints[e] = apply("add", adjoints[e], amount) if e in adjoints else amount


def _times(a: Expr, b: Expr) -> Expr:
    """The product, where a choice of zero in either factor makes the product zero whatever the other is."""
    if a is _ZERO or b is _ZERO:
        return _ZERO
    for x, y in ((a, b), (b, a)):
        if x.op == "where" and x.args[2] is _ZERO:
            return apply("where", x.args[0], _times(x.args[1], y), _ZERO)
        if x.op == "where" and x.args[1] is _ZERO:
            return apply("where", x.args[0], _ZERO, _times(x.args[2], y))
        if x.op == "const" and x.value == 1.0:
            return y
        if x.op == "div" and x.args[0].op == "const" and x.args[0].value == 1.0:
            return _over(y, x.args[1])
    return apply("mul", a, b)


def _over(a: Expr, divisor: Expr) -> Expr:
    """The quotient, by leaving the divisor out of the product `a` where it is a factor, as in a softcap."""
    factors: list[Expr] = [a]
    rest: list[Expr] = []
    while factors:
        factor = factors.pop()
        if factor is divisor:
            return functools.reduce(_times, reversed(rest + factors), const(1.0))
        if factor.op == "mul":
            factors += reversed(factor.args)
        else:
            rest.append(factor)
    return apply("div", a, divisor)


def _summed(e: Expr, level: int, extent: Expr) -> Expr:
    if level in e.free:
        return reduce("sum", level, e, extent)
    return _times(e, cast(extent, DType.FLOAT))


def _numbered(derivative: CaptureDerivative) -> CaptureDerivative:
    """With its axes numbered from the innermost, above every reduction inside; all parts simplified."""
    levels = [level for level, _ in derivative.axes]
    parts = [derivative.weight, *derivative.indices, *(extent for _, extent in derivative.axes)]
    for i, level in enumerate(levels):
        parts = [rename_axis(part, level, -1 - i) for part in parts]
    parts = [canonical_levels(part) for part in parts]
    base = max(part.levels for part in parts)
    numbers = [base + len(levels) - 1 - i for i in range(len(levels))]
    for i, number in enumerate(numbers):
        parts = [rename_axis(part, -1 - i, number) for part in parts]
    weight, *rest = (simplify(part) for part in parts)
    indices, extents = rest[: len(derivative.indices)], rest[len(derivative.indices) :]
    return CaptureDerivative(derivative.slot, tuple(indices), weight, tuple(zip(numbers, extents, strict=True)))
