"""Generated code that classifies a tile as empty, partial or full, and says for which heads and batch entries that is the same."""

from __future__ import annotations

import math

from foci.backends.cpu.codegen import INTERVALS
from foci.backends.cpu.functor import Functor
from foci.ir.emit import emit
from foci.ir.expr import DType, Expr, variable

__all__ = ["add_classes", "added_loads"]


def add_classes(functor: Functor, mask: Expr, score: Expr) -> None:
    """Adds `classify`, and what `classes.h` asks: whether it reads tensors, and whether it differs between heads and batch entries."""
    terms = added_loads(score)
    read = (mask, *terms)
    emitted = emit((mask, *(index for term in terms for index in term.args)), INTERVALS)
    of_mask, *results = emitted.results
    indices, left = iter(results), f"class_of({of_mask})"
    for term in terms:
        arguments = ", ".join((f"c{term.value}(call)", *(next(indices) for _ in term.args)))
        left = f"both({left}, interval::left_by({arguments}))"
    functor.add("static Class classify(const Call& call, const Rectangle& r)", [*emitted.lines, f"return {left};"])
    functor.members.append(f"static constexpr bool MASK_READS = {_spelled(any(e.op == 'load' for root in read for e in root.walk()))};")
    for member, name in (("mask_by_batch", "b"), ("mask_by_head", "h")):
        functor.add(f"static bool {member}(const Call& call)", [f"return {_varies(read, name)};"])


def added_loads(score: Expr) -> tuple[Expr, ...]:
    """The captured elements that are added to a score as they are, or times a positive number: where one is -inf, so is the score."""
    if score.op == "load":
        return (score,) if score.dtype is DType.FLOAT and "score" not in score.variables() else ()
    if score.op == "add":
        return tuple(dict.fromkeys(term for arg in score.args for term in added_loads(arg)))
    if score.op == "sub" or (score.op in ("mul", "div") and _is_positive(score.args[1])):
        return added_loads(score.args[0])
    return ()


def _is_positive(e: Expr) -> bool:
    return e.op == "const" and isinstance(e.value, float) and 0 < e.value < math.inf


def _varies(exprs: tuple[Expr, ...], name: str) -> str:
    """A condition on the call: whether expressions differ along a coordinate, which may index tensors that are broadcast along it."""
    dims: set[tuple[int, int]] = set()
    at = variable(name)
    for e in {e for root in exprs for e in root.walk()}:
        if e.op != "load" and at in e.args:
            return _spelled(True)
        if e.op == "load":
            dims |= {(int(str(e.value)), dim) for dim, index in enumerate(e.args) if index is at}
    tests = (f"(c{slot}(call).size[{dim}] > 1 && c{slot}(call).stride[{dim}] != 0)" for slot, dim in sorted(dims))
    return " || ".join(tests) or _spelled(False)


def _spelled(truth: bool) -> str:
    return "true" if truth else "false"
