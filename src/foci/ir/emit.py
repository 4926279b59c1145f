"""Expressions to source text: one algorithm for every language, by a table of spellings.

A `Spelling` says how a language writes each operation; `emit` decides order, names, sharing and loops. A value that does
not depend on the index of a reduction is computed outside its loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from foci.ir.expr import Expr, axis
from foci.ir.ops import OPS
from foci.ir.rewrite import canonical_levels, rebuild, reduction

__all__ = ["Emitted", "Reduction", "Spelling", "UnsupportedOperation", "decompose", "emit"]

OpSpelling = str | Callable[[Expr, tuple[str, ...]], str]


class UnsupportedOperation(NotImplementedError):
    """A language neither spells an operation nor any decomposition of it."""


@dataclass(frozen=True)
class Reduction:
    """Arguments of a language's `reduce`.

    Attributes:
        expr: the node; its kind is `expr.value[0]`, its type `expr.dtype`.
        name: the variable that must hold the result.
        kind: sum, max, min, any or all.
        axis: what the speller of `axis` calls the index.
        extent: the number of steps, spelled.
        body: lines that compute the body for one index.
        result: the body's value after those lines, spelled; empty when `factors` is given.
        factors: for a spelling with `dot`, the two spelled factors of a sum of products that both read the axis.
        depth: how many loops enclose this one.
    """

    expr: Expr
    name: str
    kind: str
    axis: str
    extent: str
    body: tuple[str, ...]
    result: str
    factors: tuple[str, ...]
    depth: int


@dataclass(frozen=True)
class Spelling:
    """Code generation for one language.

    Attributes:
        ops: for each row of the op table that the language has, a format string of the spelled operands such as
            `"({0} + {1})"`, or a function of the node and its spelled operands, which may look at types.
        const, var, param, axis, size: write a leaf.
        load: writes one element of a captured tensor, given the spelled indices.
        cast: writes a `cast` or a `round_to`, given the spelled operand.
        reduce: writes a loop as lines.
        assign: writes the line that names a value: of the node, the name and the spelled value.
        dot: whether `reduce` takes a sum of products as its two factors.
        outer: writes, inside a loop, a value of an enclosing level: of the node, its spelling and the number of loops
            between the two. The default is the spelling itself.
        inline_depth: how deeply operations used once may nest within one line; 0 gives each operation its line.
    """

    ops: Mapping[str, OpSpelling]
    const: Callable[[Expr], str]
    var: Callable[[Expr], str]
    param: Callable[[Expr], str]
    axis: Callable[[Expr], str]
    size: Callable[[Expr], str]
    load: Callable[[Expr, tuple[str, ...]], str]
    cast: Callable[[Expr, str], str]
    reduce: Callable[[Reduction], Sequence[str]]
    assign: Callable[[Expr, str, str], str]
    dot: bool = False
    outer: Callable[[Expr, str, int], str] = field(default=lambda expr, text, loops: text)
    inline_depth: int = 0


@dataclass(frozen=True)
class Emitted:
    """Lines of source, and where each expression's value is after them. Names are v0, v1 ..."""

    lines: tuple[str, ...]
    results: tuple[str, ...]


def emit(exprs: Sequence[Expr], spelling: Spelling) -> Emitted:
    """Source of `exprs` in the language of `spelling`; common subexpressions once.

    Raises:
        UnsupportedOperation: for an operation that the language lacks and that has no decomposition.
    """
    roots = tuple(decompose(e, spelling.ops) for e in exprs)
    emitter = _Emitter(spelling, roots)
    results = tuple(emitter.spell(root, (emitter.top,)) for root in roots)
    return Emitted(tuple(emitter.top.lines), results)


def decompose(expr: Expr, ops: Collection[str]) -> Expr:
    """`expr` with every operation that is not one of `ops` written by others.

    Raises:
        UnsupportedOperation: naming the operation.
    """
    is_spelled = all(e.op in ops or e.op not in OPS for e in expr.walk())
    return expr if is_spelled else _decompose(expr, ops, ())


def _decompose(expr: Expr, ops: Collection[str], within: tuple[str, ...]) -> Expr:
    done: dict[Expr, Expr] = {}
    for e in expr.walk():
        here = rebuild(e, tuple([done[arg] for arg in e.args]))
        if here.op in OPS and here.op not in ops:
            rule = OPS[here.op].decomposed
            if rule is None or here.op in within:  # exp by exp2 by exp
                wanted = (*within, here.op)[0]
                raise UnsupportedOperation(f"operation {wanted!r} has neither a spelling in this language nor a decomposition")
            here = _decompose(rule(*here.args), ops, (*within, here.op))
        done[e] = here
    return canonical_levels(done[expr])


@dataclass(eq=False)
class _Frame:
    """The body of one loop, or the top."""

    level: int | None
    names: dict[Expr, tuple[str, int]] = field(default_factory=dict)  # spelling, and how deeply it nests
    lines: list[str] = field(default_factory=list)


def _home(e: Expr) -> int | None:
    """Level of the innermost loop that a value belongs to."""
    return min(e.free) if e.free else None


class _Emitter:
    def __init__(self, spelling: Spelling, roots: Sequence[Expr]) -> None:
        self.spelling = spelling
        self.top = _Frame(None)
        self.uses: dict[Expr, int] = {}
        self.count = 0
        for e in {e for root in roots for e in root.walk()}:
            for i, arg in enumerate(e.args):
                # what is computed outside the loop that uses it has a name, lest it move into the loop
                home = reduction(e)[1] if e.op == "reduce" and i == 0 else _home(e)
                self.uses[arg] = self.uses.get(arg, 0) + 1 + (home != _home(arg))

    def spell(self, root: Expr, frames: tuple[_Frame, ...]) -> str:
        """The spelling of `root` inside the innermost of `frames`, after emitting what it needs."""
        stack = [root]
        while stack:
            e = stack[-1]
            scope = self._find_frames(e, frames)
            if e in scope[-1].names:
                stack.pop()
                continue
            operands = e.args[1:] if e.op == "reduce" else e.args
            missing = [arg for arg in operands if arg not in self._find_frames(arg, scope)[-1].names]
            if missing:
                stack.extend(reversed(missing))
                continue
            self._emit_node(e, scope)
            stack.pop()
        return self._read(root, frames)

    def _find_frames(self, e: Expr, frames: tuple[_Frame, ...]) -> tuple[_Frame, ...]:
        """The frames down to the one that `e` belongs to: the innermost whose axis it reads."""
        for i in range(len(frames) - 1, 0, -1) if e.free else ():
            if frames[i].level in e.free:
                return frames[: i + 1]
        return frames[:1]

    def _read(self, e: Expr, frames: tuple[_Frame, ...]) -> str:
        scope = self._find_frames(e, frames)
        text = scope[-1].names[e][0]
        loops = len(frames) - len(scope)
        return self.spelling.outer(e, text, loops) if loops else text

    def _emit_node(self, e: Expr, frames: tuple[_Frame, ...]) -> None:
        frame, spelling = frames[-1], self.spelling
        if e.op == "reduce":
            frame.names[e] = (self._emit_loop(e, frames), 0)
            return
        leaf = getattr(spelling, e.op) if e.op in ("const", "var", "param", "axis", "size") else None
        if leaf is not None:
            frame.names[e] = (leaf(e), 0)
            return
        operands = tuple(self._read(arg, frames) for arg in e.args)
        if e.op == "load":
            text = spelling.load(e, operands)
        elif e.op in ("cast", "round_to"):
            text = spelling.cast(e, operands[0])
        else:
            op = spelling.ops[e.op]
            text = op.format(*operands) if isinstance(op, str) else op(e, operands)
        depth = 1 + max((self._find_frames(arg, frames)[-1].names[arg][1] for arg in e.args), default=0)
        if self.uses.get(e, 0) <= 1 and depth <= spelling.inline_depth:
            frame.names[e] = (text, depth)
            return
        name = self._fresh()
        frame.lines.append(spelling.assign(e, name, text))
        frame.names[e] = (name, 0)

    def _emit_loop(self, e: Expr, frames: tuple[_Frame, ...]) -> str:
        kind, level = reduction(e)
        inner = _Frame(level)
        extent = self._read(e.args[1], frames)
        body, scope = e.args[0], (*frames, inner)
        is_dot = self.spelling.dot and kind == "sum" and body.op == "mul" and all(level in arg.free for arg in body.args)
        factors = tuple(self.spell(arg, scope) for arg in body.args) if is_dot else ()
        result = "" if is_dot else self.spell(body, scope)
        name = self._fresh()
        index = self.spelling.axis(axis(level))
        loop = Reduction(e, name, kind, index, extent, tuple(inner.lines), result, factors, len(frames) - 1)
        frames[-1].lines.extend(self.spelling.reduce(loop))
        return name

    def _fresh(self) -> str:
        self.count += 1
        return f"v{self.count - 1}"
