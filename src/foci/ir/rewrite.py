"""Rebuilding expressions: bottom-up rewriting, substitution, and the levels of nested reductions.

`axis(level)` names the index of an enclosing `reduce` by number, as de Bruijn levels do (N. G. de Bruijn, Lambda calculus
notation with nameless dummies, 1972), but counted from the innermost reduction outward. Counting makes equal functions
equal nodes; it also means that a body which gains or loses a reduction must be renumbered, which is done here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from foci.ir.expr import Expr, axis, node, reduce
from foci.ir.ops import OPS, apply, cast

__all__ = ["bind", "canonical_levels", "rebuild", "reduction", "rename_axis", "rewrite", "substitute"]

LEVEL_SPACING: Final = 1 << 20


def rebuild(expr: Expr, args: tuple[Expr, ...]) -> Expr:
    """The node `expr` with other operands: typed, cast and folded again."""
    if args == expr.args:
        return expr
    if expr.op in OPS:
        return apply(expr.op, *args)
    if expr.op == "cast":
        return cast(args[0], expr.dtype)
    if expr.op == "reduce":
        kind, level = reduction(expr)
        return reduce(kind, level, args[0], args[1])
    return node(expr.op, args, expr.dtype, expr.value)


def reduction(expr: Expr) -> tuple[str, int]:
    """Kind and level of a `reduce`."""
    assert isinstance(expr.value, tuple)
    kind, level = expr.value
    assert isinstance(kind, str)
    assert isinstance(level, int)
    return kind, level


def rewrite(expr: Expr, rule: Callable[[Expr], Expr | None]) -> Expr:
    """`expr` with `rule` applied to every node, operands first; None keeps the node. Each distinct node is seen once.

    Example:
        >>> from foci.ir.expr import const, variable
        >>> from foci.ir.ops import apply
        >>> rewrite(apply("add", variable("q_idx"), 3), lambda e: const(e.value + 1) if e.op == "const" else None)
        q_idx + 4
    """
    done: dict[Expr, Expr] = {}
    for e in expr.walk():
        rebuilt = rebuild(e, tuple([done[arg] for arg in e.args])) if e.args else e
        changed = rule(rebuilt)
        done[e] = rebuilt if changed is None else changed
    return canonical_levels(done[expr])


def substitute(expr: Expr, replacements: Mapping[Expr, Expr]) -> Expr:
    """`expr` with each node that is a key replaced by its value. Replacements are not searched again.

    Example:
        >>> from foci.ir.expr import const, variable
        >>> from foci.ir.ops import apply
        >>> substitute(apply("add", variable("q_idx"), 3), {variable("q_idx"): variable("kv_idx")})
        kv_idx + 3
    """
    # A replacement that reduces must not catch the axes of reductions around it: those move out of the way first.
    apart = expr.levels > 0 and any(new.levels for new in replacements.values())
    source = _spread_levels(expr) if apart else expr
    done: dict[Expr, Expr] = {}
    for e in source.walk():
        new = replacements.get(e)
        done[e] = rebuild(e, tuple([done[arg] for arg in e.args])) if new is None else new
    return canonical_levels(done[source])


# Levels ------------------------------------------------------------------------------------------------------------


def _spread_levels(expr: Expr) -> Expr:
    """`expr` with level n >= 0 moved to (n + 1) * LEVEL_SPACING, so that new levels fit between and below.

    Negative levels, free axes that a tracer has not bound yet, stay.
    """
    done: dict[Expr, Expr] = {}
    for e in expr.walk():
        args = tuple(done[arg] for arg in e.args)
        if e.op == "axis":
            assert isinstance(e.value, int)
            done[e] = axis(_spread(e.value))
        elif e.op == "reduce":
            kind, level = reduction(e)
            done[e] = reduce(kind, _spread(level), args[0], args[1])
        else:
            done[e] = e if args == e.args else node(e.op, args, e.dtype, e.value)
    return done[expr]


def _spread(level: int) -> int:
    return (level + 1) * LEVEL_SPACING if level >= 0 else level


def canonical_levels(expr: Expr) -> Expr:
    """`expr` with every `reduce` at one above the highest level inside its body, or 0."""
    if not expr.levels or all(reduction(e)[1] == e.args[0].levels for e in expr.walk() if e.op == "reduce"):
        return expr
    done: dict[Expr, Expr] = {}
    spread = _spread_levels(expr)
    for e in spread.walk():
        args = tuple(done[arg] for arg in e.args)
        if e.op == "reduce":
            kind, level = reduction(e)
            done[e] = bind(kind, level, args[0], args[1])
        else:
            done[e] = e if args == e.args else node(e.op, args, e.dtype, e.value)
    result = done[spread]
    for level in result.free:  # axes that stay free keep their numbers
        result = rename_axis(result, level, level // LEVEL_SPACING - 1 if level > 0 else level)
    return result


def bind(kind: str, level: int, body: Expr, extent: Expr) -> Expr:
    """The reduction of `body` over `axis(level)`, renumbered to the canonical level."""
    levels = body.levels
    return reduce(kind, levels, rename_axis(body, level, levels), extent)


def rename_axis(expr: Expr, old: int, new: int) -> Expr:
    """`expr` with its free `axis(old)` renamed; reductions that bind `old` themselves keep it."""
    if old == new:
        return expr
    done: dict[Expr, Expr] = {}
    for e in expr.walk():
        if old not in e.free:
            done[e] = e
        elif e.op == "axis":
            done[e] = axis(new)
        elif e.op == "reduce" and reduction(e)[1] == old:
            done[e] = reduce(reduction(e)[0], old, e.args[0], done[e.args[1]])
        else:
            done[e] = node(e.op, tuple(done[arg] for arg in e.args), e.dtype, e.value)
    return done[expr]
