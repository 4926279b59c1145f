"""The small functions of a variant as the warps of a tile call them: what a tile needs once, then score, slope and mask.

    pre(b, h, at, q_len, kv_len, scale, env) -> aux
    score(raw, b, h, q_idx, kv_idx, q_len, kv_len, env, aux) -> score / aux[0]
    both(raw, lse2, b, h, q_idx, kv_idx, q_len, kv_len, env, aux) -> (score in base 2 - lse2, d score / d (scale * raw))
    mask(b, h, q_idx, kv_idx, q_len, kv_len, env, aux) -> keep
    line(b, h, q_idx, kv_idx, q_len, kv_len, env, aux) -> (score / aux[0] - raw, what it rises by from key to key), where they are
    a line (`foci.backends.triton.affine_scores`); where queries stream, (score - scale * raw in base 2, what it rises by from query
    to query)
    bounds(b, h, at, q_len, kv_len, env) -> (first, last) of what streams by, where a mask has them (`foci.backends.mask_intervals`)

`raw` is q . k, without the scale. `at` is the coordinate that stays while the other streams by, `resident`: "q_idx" where
keys stream, "kv_idx" where queries do. What depends on nothing else is computed by `pre`, once for a tile: a load inside a
loop is not moved out of it by the compiler. aux[0] is 1, or a positive factor of all scores: the exponential's own factor
takes it in, so that it costs nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from foci.backends.mask_intervals import find_bounds
from foci.backends.triton.affine_scores import affine_in_keys
from foci.backends.triton.codegen import TensorLayout, triton_codegen
from foci.backends.triton.exp2_rewrite import ONE, gather_factors, log2_weight, scaled_derivative, split_factor
from foci.backends.triton.functions import cast_coordinates_early, jit_function
from foci.ir.derivative import score_derivative
from foci.ir.emit import emit
from foci.ir.expr import DType, Expr, const, node, variable
from foci.ir.ops import apply
from foci.ir.rewrite import substitute
from foci.variant import Variant

__all__ = ["KernelFunctions", "build_functions"]

_TAIL: Final = "b, h, q_idx, kv_idx, q_len, kv_len, env, aux"
_SCORE: Final = variable("score")
_SCALE: Final = node("var", (), DType.FLOAT, "scale")
_LOG2E: Final = const(math.log2(math.e))
_SMALLEST: Final = 1e-6


@dataclass(frozen=True)
class KernelFunctions:
    """Jit functions, each to be passed as a `constexpr` argument of its own; `outer` is the factor in aux[0], `source` what they
    were made of. `line` is None where scores are none."""

    pre: Any
    score: Any
    both: Any
    mask: Any
    bounds: Any
    line: Any
    outer: Expr
    source: str

    def takes(self, scale: float, floats: Sequence[float]) -> bool:
        """Whether the factor in aux[0] is positive, and not so small that dividing by it would overflow."""
        return _value(self.outer, scale, floats) > _SMALLEST


def _value(e: Expr, scale: float, floats: Sequence[float]) -> float:
    """A factor of scores as the number it is in a call; 0 where it is not one for all calls alike."""
    if e.op == "const":
        return float(str(e.value))
    if e is _SCALE or e.op == "param":
        return scale if e is _SCALE else floats[int(str(e.value))]
    return math.prod(_value(arg, scale, floats) for arg in e.args) if e.op == "mul" else 0.0


@functools.lru_cache(maxsize=1024)
def build_functions(
    variant: Variant, lies: tuple[TensorLayout, ...], *, half: bool, resident: str, divided: bool = False
) -> KernelFunctions:
    """The functions of a variant. One object for each, so that Triton compiles kernels once.

    Args:
        variant: score and mask.
        lies: how the captured tensors lie.
        half: whether half precision's rounding is enough for transcendental functions.
        resident: "q_idx" or "kv_idx", see above.
        divided: whether `score` may leave a factor to aux[0]; to be used where `Functions.takes` then says so.
    """
    scaled = apply("mul", _SCORE, _SCALE)
    score = gather_factors(substitute(cast_coordinates_early(variant.score), {_SCORE: scaled}))
    inner, outer = _divide(score) if divided else (score, ONE)
    exponent, slope = (
        log2_weight(cast_coordinates_early(variant.score), half=half),
        scaled_derivative(cast_coordinates_early(score_derivative(variant.score)), half=half),
    )
    line: tuple[Expr, ...] = (affine_in_keys(inner) or ()) if divided else ()
    if resident == "kv_idx":
        line = tuple(
            gather_factors(apply("mul", part, _LOG2E)) for part in affine_in_keys(cast_coordinates_early(variant.score), "q_idx") or ()
        )
    roots, kept = _hoist((inner, exponent, slope, variant.mask, *line), resident)
    spelling = triton_codegen(lies, half=half)
    emitted = emit((outer, *kept), spelling)
    before = (f"    {resident} = at", *_indent(emitted.lines))
    results = ", ".join(emitted.results)
    sources = {"pre": _function("pre", "b, h, at, q_len, kv_len, scale, env", (*before, f"    return ({results},)"))}
    parts = {"score": ("score, ", roots[:1]), "both": ("raw, lse2, ", roots[1:3]), "mask": ("", roots[3:4])}
    if line:
        parts["line"] = ("", roots[4:])
    for name, (first, exprs) in parts.items():
        sources[name] = _written(name, first + _TAIL, exprs, spelling, len(kept))
    found = find_bounds(variant.mask, "kv_idx" if resident == "q_idx" else "q_idx")
    exprs = (const(0), const(0)) if found is None else (found.low, found.high)
    emitted = emit(exprs, spelling)
    ends = ", ".join(f"{resident} * 0 + {result}" for result in emitted.results)
    sources["bounds"] = _function("bounds", f"b, h, {resident}, q_len, kv_len, env", (*_indent(emitted.lines), f"    return {ends}"))
    made = {name: jit_function(name, source) for name, source in sources.items()}
    return KernelFunctions(**{"line": None, **made}, outer=outer, source="\n\n".join(sources.values()))


def _divide(score: Expr) -> tuple[Expr, Expr]:
    """(the score by its factor, the factor): a run-time number of a product, or the scale of score + fixed * something."""
    inner, factor = split_factor(score)
    if factor is not ONE and all(e is _SCALE or e.op in ("param", "const", "mul") for e in factor.walk()):
        return inner, factor
    if score.op == "add":
        for scaled, other in (score.args, score.args[::-1]):
            part, fixed = split_factor(other)
            if split_factor(scaled) == (_SCORE, _SCALE) and fixed is not ONE:
                return apply("add", _SCORE, apply("mul", part, apply("div", fixed, _SCALE))), _SCALE
    return score, ONE


def _hoist(roots: Sequence[Expr], resident: str) -> tuple[tuple[Expr, ...], tuple[Expr, ...]]:
    """(roots with what is invariant replaced by `aux` variables, the invariant expressions in their order)."""
    streaming = {"score", "raw", "lse2", "kv_idx" if resident == "q_idx" else "q_idx"}
    kept: dict[Expr, int] = {}

    def cut(e: Expr, memo: dict[Expr, Expr]) -> Expr:
        found = memo.get(e)
        if found is None:
            reads = e.variables()
            if e.args and not e.free and not (reads & streaming) and (resident not in reads or _is_costly(e)):
                found = _aux(kept.setdefault(e, len(kept)), e.dtype)
            elif e.args:
                found = node(e.op, tuple(cut(a, memo) for a in e.args), e.dtype, e.value)
            else:
                found = _aux(kept.setdefault(e, len(kept)), e.dtype) if e is _SCALE else e
            memo[e] = found
        return found

    cuts = tuple(cut(root, {}) for root in roots)
    return cuts, tuple(kept)


def _is_costly(e: Expr) -> bool:
    """Whether computing it anew beats holding it for every row: not if it reads memory or loops."""
    return any(part.op in ("load", "reduce") for part in e.walk())


def _aux(n: int, dtype: DType) -> Expr:
    return node("var", (), dtype, f"aux{n}")


def _written(name: str, arguments: str, exprs: tuple[Expr, ...], spelling: Any, count: int) -> str:
    emitted = emit(exprs, spelling)
    results = list(emitted.results)
    # what does not read the score is given the shape of a tile; a mask need only be a tensor
    reads = exprs[0].variables()
    if exprs[0].dtype is DType.BOOL:
        results[0] = results[0] if reads & {"q_idx", "kv_idx"} else f"((kv_idx < 0) | {results[0]})"
    elif not reads & {"score", "raw"}:
        results[0] = f"((q_idx + kv_idx) * 0.0 + {results[0]})"
    unpacked = [f"    aux{n} = aux[{n + 1}]" for n in range(count)]
    return _function(name, arguments, (*unpacked, *_indent(emitted.lines), f"    return {', '.join(results)}"))


def _function(name: str, arguments: str, lines: Sequence[str]) -> str:
    body = "\n".join(lines)
    return f"def {name}({arguments}):\n{body}\n"


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
