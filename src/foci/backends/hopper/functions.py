"""Jit functions generated from a mask and score function, as the kernels call them on a tile.

    pre(b, h, at, q_len, kv_len, scale, env) -> aux
    score(raw, b, h, q_idx, kv_idx, q_len, kv_len, env, aux) -> score / aux[0]
    both(raw, lse2, b, h, q_idx, kv_idx, q_len, kv_len, env, aux) -> (score in base 2 - lse2, d score / d (scale * raw))
    mask(b, h, q_idx, kv_idx, q_len, kv_len, env, aux) -> keep
    line(b, h, q_idx, kv_idx, q_len, kv_len, env, aux)
        -> (score / aux[0] - raw, slope per key), for scores that are affine in the key (`foci.backends.gpu.affine_scores`);
           where queries stream: (score - scale * raw, slope per query), both in base 2
    bounds(b, h, at, q_len, kv_len, env) -> (first, last) streaming index, if the mask has bounds (`foci.backends.mask_intervals`)

`raw` is q . k without the scale. `at` is the index that is constant over a kernel's loop, `resident`: "q_idx" where keys stream, "kv_idx"
where queries do. `pre` computes once what depends on nothing else, because the compiler does not hoist loads out of a loop. aux[0] is 1 or
a positive factor of all scores, which the exponential's own factor absorbs at no cost.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from foci.backends.gpu.affine_scores import affine_in_keys
from foci.backends.gpu.codegen import TensorLayout, triton_codegen
from foci.backends.gpu.exp2_rewrite import ONE, gather_factors, log2_weight, scaled_derivative, split_factor
from foci.backends.gpu.functions import cast_coordinates_early
from foci.backends.gpu.generated import jit_function
from foci.backends.mask_intervals import find_bounds
from foci.ir.derivative import score_derivative
from foci.ir.emit import emit
from foci.ir.expr import DType, Expr, const, node, variable
from foci.ir.ops import apply
from foci.ir.rewrite import substitute
from foci.variant import Variant

__all__ = ["KernelFunctions", "build_functions"]

_COORDINATES: Final = "b, h, q_idx, kv_idx, q_len, kv_len, env, aux"
_SCORE: Final = variable("score")
_SCALE: Final = node("var", (), DType.FLOAT, "scale")
_LOG2E: Final = const(math.log2(math.e))
_SMALLEST_FACTOR: Final = 1e-6


@dataclass(frozen=True)
class KernelFunctions:
    """Jit functions, each to be passed as a `constexpr` argument."""

    pre: Any
    score: Any
    both: Any
    mask: Any
    bounds: Any
    line: Any  # None unless scores are affine
    outer: Expr  # the factor in aux[0]
    source: str  # of all functions

    def takes(self, scale: float, floats: Sequence[float]) -> bool:
        """Whether the factor in aux[0] is positive, and not so small that dividing by it would overflow."""
        return _value(self.outer, scale, floats) > _SMALLEST_FACTOR


def _value(e: Expr, scale: float, floats: Sequence[float]) -> float:
    """Evaluate a factor of scores for a call; 0 for any other expression."""
    if e.op == "const":
        return float(str(e.value))
    if e is _SCALE or e.op == "param":
        return scale if e is _SCALE else floats[int(str(e.value))]
    return math.prod(_value(arg, scale, floats) for arg in e.args) if e.op == "mul" else 0.0


@functools.lru_cache(maxsize=1024)
def build_functions(
    variant: Variant, layouts: tuple[TensorLayout, ...], *, half: bool, resident: str, divided: bool = False
) -> KernelFunctions:
    """Generate the functions of a variant. Equal arguments give the same object, so that Triton compiles kernels once.

    Args:
        variant: score and mask.
        layouts: strides and dtypes of the captured tensors.
        half: whether half precision's rounding is enough for transcendental functions.
        resident: "q_idx" or "kv_idx", see above.
        divided: whether `score` may leave a factor to aux[0]. If `KernelFunctions.takes` is then false for a call, the caller builds the
            functions again without it.
    """
    scaled = apply("mul", _SCORE, _SCALE)
    score = gather_factors(substitute(cast_coordinates_early(variant.score), {_SCORE: scaled}))
    inner, outer = _divide(score) if divided else (score, ONE)
    exponent, slope = (
        log2_weight(cast_coordinates_early(variant.score), half=half),
        scaled_derivative(cast_coordinates_early(score_derivative(variant.score)), half=half),
    )
    affine: tuple[Expr, ...] = (affine_in_keys(inner) or ()) if divided else ()
    if resident == "kv_idx":
        affine = tuple(
            gather_factors(apply("mul", part, _LOG2E)) for part in affine_in_keys(cast_coordinates_early(variant.score), "q_idx") or ()
        )
    roots, hoisted = _hoist((inner, exponent, slope, variant.mask, *affine), resident)
    codegen = triton_codegen(layouts, half=half)
    emitted = emit((outer, *hoisted), codegen)
    before = (f"    {resident} = at", *_indent(emitted.lines))
    results = ", ".join(emitted.results)
    sources = {"pre": _function("pre", "b, h, at, q_len, kv_len, scale, env", (*before, f"    return ({results},)"))}
    parts = {"score": ("score, ", roots[:1]), "both": ("raw, lse2, ", roots[1:3]), "mask": ("", roots[3:4])}
    if affine:
        parts["line"] = ("", roots[4:])
    for name, (first, exprs) in parts.items():
        sources[name] = _write_function(name, first + _COORDINATES, exprs, codegen, len(hoisted))
    bounds = find_bounds(variant.mask, "kv_idx" if resident == "q_idx" else "q_idx")
    exprs = (const(0), const(0)) if bounds is None else (bounds.low, bounds.high)
    emitted = emit(exprs, codegen)
    ends = ", ".join(f"{resident} * 0 + {result}" for result in emitted.results)
    sources["bounds"] = _function("bounds", f"b, h, {resident}, q_len, kv_len, env", (*_indent(emitted.lines), f"    return {ends}"))
    jitted = {name: jit_function(name, source) for name, source in sources.items()}
    return KernelFunctions(**{"line": None, **jitted}, outer=outer, source="\n\n".join(sources.values()))


def _divide(score: Expr) -> tuple[Expr, Expr]:
    """Split a score into (score / factor, factor): a constant or parameter that multiplies it, or the scale of `score + constant * x`."""
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
    """Replace loop-invariant parts of the roots by `aux` variables. Returns (roots, invariant expressions in order)."""
    streaming = {"score", "raw", "lse2", "kv_idx" if resident == "q_idx" else "q_idx"}
    hoisted: dict[Expr, int] = {}

    def cut(e: Expr, memo: dict[Expr, Expr]) -> Expr:
        replaced = memo.get(e)
        if replaced is None:
            reads = e.variables()
            if e.args and not e.free and not (reads & streaming) and (resident not in reads or _is_costly(e)):
                replaced = _aux(hoisted.setdefault(e, len(hoisted)), e.dtype)
            elif e.args:
                replaced = node(e.op, tuple(cut(a, memo) for a in e.args), e.dtype, e.value)
            else:
                replaced = _aux(hoisted.setdefault(e, len(hoisted)), e.dtype) if e is _SCALE else e
            memo[e] = replaced
        return replaced

    cuts = tuple(cut(root, {}) for root in roots)
    return cuts, tuple(hoisted)


def _is_costly(e: Expr) -> bool:
    """Whether to compute it once and hold it for every row: if it reads memory or loops."""
    return any(part.op in ("load", "reduce") for part in e.walk())


def _aux(n: int, dtype: DType) -> Expr:
    return node("var", (), dtype, f"aux{n}")


def _write_function(name: str, arguments: str, exprs: tuple[Expr, ...], codegen: Any, aux_count: int) -> str:
    emitted = emit(exprs, codegen)
    results = list(emitted.results)
    # a result that does not read the score is broadcast to the tile's shape; a mask need only be a tensor
    reads = exprs[0].variables()
    if exprs[0].dtype is DType.BOOL:
        results[0] = results[0] if reads & {"q_idx", "kv_idx"} else f"((kv_idx < 0) | {results[0]})"
    elif not reads & {"score", "raw"}:
        results[0] = f"((q_idx + kv_idx) * 0.0 + {results[0]})"
    unpacked = [f"    aux{n} = aux[{n + 1}]" for n in range(aux_count)]
    return _function(name, arguments, (*unpacked, *_indent(emitted.lines), f"    return {', '.join(results)}"))


def _function(name: str, arguments: str, lines: Sequence[str]) -> str:
    body = "\n".join(lines)
    return f"def {name}({arguments}):\n{body}\n"


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
