"""Triton source of a variant's score and mask functions. No other code of the kernels is generated."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from foci.backends.gpu.affine_scores import affine_in_both
from foci.backends.gpu.codegen import TensorLayout, triton_codegen
from foci.backends.gpu.exp2_rewrite import ARGUMENTS, log2_weight, scaled_derivative
from foci.backends.gpu.generated import jit_function
from foci.backends.gpu.kernel_args import is_countable_by_eights
from foci.backends.mask_intervals import as_comparisons
from foci.ir.derivative import score_derivative
from foci.ir.emit import emit
from foci.ir.expr import DType, Expr
from foci.ir.ops import apply, cast
from foci.ir.rewrite import rewrite
from foci.variant import Variant

__all__ = [
    "KernelFunctions",
    "build_functions",
    "capture_layouts",
    "cast_coordinates_early",
    "environment_numbers",
    "is_half",
]

_ARGUMENTS: Final = "b, h, q_idx, kv_idx, q_len, kv_len, env"


@dataclass(frozen=True)
class KernelFunctions:
    """Jit functions generated from a score and mask function. Their arguments are tiles that broadcast together.

        score(score, b, h, q_idx, kv_idx, q_len, kv_len, env) -> score
        mask(b, ...) -> keep
        both(raw, scale, lse2, b, ...) -> (weight's exponent in base 2, slope of the score function), see `exp2_rewrite`
        line(b, ...) -> (what an affine score adds to the scaled product, its slope per key, its slope per query), see `affine_scores`

    `by_query` and `by_key` are the mask written as comparisons with a query's first and last key, and with a key's first and last query,
    if it has such bounds (`foci.backends.mask_intervals`); else they are the mask itself. With bounds, `by_query` is false for keys past
    the end, and `by_key` is only called for queries that exist.
    """

    score: Any
    both: Any
    mask: Any
    by_query: Any
    by_key: Any
    line: Any  # None unless scores are affine and half precision's rounding is enough
    source: str  # of all functions


def capture_layouts(captures: Sequence[Tensor]) -> tuple[TensorLayout, ...]:
    """Layouts of captured tensors, as far as they change the code."""
    layouts = []
    first = 0
    for t in captures:
        contiguous = t.dim() > 0 and (t.stride(-1) == 1 or t.shape[-1] == 1)
        steps = [stride for stride, n in zip(t.stride()[:-1], t.shape[:-1], strict=True) if n > 1]
        aligned = contiguous and all(stride % 8 == 0 for stride in steps) and is_countable_by_eights(steps)
        layouts.append(TensorLayout(t.dim(), contiguous, aligned, first))
        first += t.dim()
    return tuple(layouts)


@functools.lru_cache(maxsize=1024)
def build_functions(variant: Variant, layouts: tuple[TensorLayout, ...], *, half: bool) -> KernelFunctions:
    """Generate the functions of a variant. Equal arguments give the same object, so that Triton compiles kernels once."""
    codegen = triton_codegen(layouts, half=half)
    score = cast_coordinates_early(variant.score)
    slope = cast_coordinates_early(score_derivative(variant.score))
    parts: dict[str, tuple[str, tuple[Expr, ...]]] = {
        "score": (f"score, {_ARGUMENTS}", (score,)),
        "both": (f"{ARGUMENTS}, {_ARGUMENTS}", (log2_weight(score, half=half), scaled_derivative(slope, half=half))),
        "mask": (_ARGUMENTS, (variant.mask,)),
        "by_query": (_ARGUMENTS, (as_comparisons(variant.mask, "kv_idx") or variant.mask,)),
        "by_key": (_ARGUMENTS, (as_comparisons(variant.mask, "q_idx", is_inside=True) or variant.mask,)),
    }
    line = affine_in_both(score) if half else None
    if line is not None:
        parts["line"] = (_ARGUMENTS, line)
    sources = {name: _source(name, arguments, exprs, codegen) for name, (arguments, exprs) in parts.items()}
    functions = {name: jit_function(name, source) for name, source in sources.items()}
    return KernelFunctions(**{"line": None, **functions}, source="\n\n".join(sources.values()))


def _source(name: str, arguments: str, exprs: tuple[Expr, ...], codegen: Any) -> str:
    emitted = emit(exprs, codegen)
    results = list(emitted.results)
    # a result that is a Python number needs a shape; a slope does not, and a constant one costs nothing
    if exprs[0].op in ("const", "param"):
        zero = "(b < 0)" if exprs[0].dtype is DType.BOOL else "(b * 0.0)"
        results[0] = f"({zero} {'|' if exprs[0].dtype is DType.BOOL else '+'} {results[0]})"
    body = "\n".join(f"    {line}" for line in (*emitted.lines, f"return {', '.join(results)}"))
    return f"def {name}({arguments}):\n{body}\n"


def cast_coordinates_early(expr: Expr) -> Expr:
    """Move casts to FLOAT onto coordinates, which float32 holds exactly: a tile then converts each row and each column once, instead of
    each element."""

    def is_small(e: Expr) -> bool:
        return e.op in ("var", "const") or (e.op in ("add", "sub", "neg", "abs") and all(map(is_small, e.args)))

    def early(e: Expr) -> Expr:
        if e.op in ("var", "const"):
            return cast(e, DType.FLOAT)
        return apply(e.op, *(early(arg) for arg in e.args))

    def rule(e: Expr) -> Expr | None:
        if e.op == "cast" and e.dtype is DType.FLOAT and e.args[0].dtype is DType.INT32 and e.args[0].op != "var" and is_small(e.args[0]):
            return early(e.args[0])
        return None

    return rewrite(expr, rule)


def environment_numbers(captures: Sequence[Tensor], layouts: tuple[TensorLayout, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(sizes, strides) of captured tensors, flat; strides in the units of `TensorLayout.aligned`."""
    sizes = tuple(n for t in captures for n in t.shape)
    strides = tuple(
        (0 if n == 1 else stride) // (8 if layout.aligned else 1)
        for t, layout in zip(captures, layouts, strict=True)
        for n, stride in zip(t.shape, t.stride(), strict=True)
    )
    return sizes, strides


def is_half(dtype: torch.dtype) -> bool:
    """Whether results are rounded to half precision anyway."""
    return dtype in (torch.float16, torch.bfloat16)
