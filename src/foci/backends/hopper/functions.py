"""The small functions of a variant as the warps of a tile call them: what a tile needs once, then score, slope and mask.

    pre(b, h, at, q_len, kv_len, scale, env) -> aux
    score(raw, b, h, q_idx, kv_idx, q_len, kv_len, env, aux) -> score
    both(raw, b, h, q_idx, kv_idx, q_len, kv_len, env, aux) -> (score, d score / d (scale * raw))
    mask(b, h, q_idx, kv_idx, q_len, kv_len, env, aux) -> keep

`raw` is q . k, without the scale. `at` is the coordinate that stays while the other streams by, `resident`: "q_idx" where
keys stream, "kv_idx" where queries do. What depends on nothing else is computed by `pre`, once for a tile: a load inside a
loop is not moved out of it by the compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from foci.backends.triton.functions import float_early, jit_function
from foci.backends.triton.spelling import Lie, spelling_for
from foci.ir.derivative import score_derivative
from foci.ir.emit import emit
from foci.ir.expr import DType, Expr, node, variable
from foci.ir.ops import apply
from foci.ir.rewrite import free_axes, substitute
from foci.variant import Variant

__all__ = ["Functions", "functions_of"]

_TAIL: Final = "b, h, q_idx, kv_idx, q_len, kv_len, env, aux"
_SCORE: Final = variable("score")
_SCALE: Final = node("var", (), DType.FLOAT, "scale")


@dataclass(frozen=True)
class Functions:
    """Jit functions, each to be passed as a `constexpr` argument of its own; `source` is what they were made of."""

    pre: Any
    score: Any
    both: Any
    mask: Any
    source: str


@functools.lru_cache(maxsize=1024)
def functions_of(variant: Variant, lies: tuple[Lie, ...], *, half: bool, resident: str) -> Functions:
    """The functions of a variant. One object for each, so that Triton compiles kernels once.

    Args:
        variant: score and mask.
        lies: how the captured tensors lie.
        half: whether half precision's rounding is enough for transcendental functions.
        resident: "q_idx" or "kv_idx", see above.
    """
    scaled = apply("mul", _SCORE, _SCALE)
    score, slope = (substitute(float_early(e), {_SCORE: scaled}) for e in (variant.score, score_derivative(variant.score)))
    roots, kept = _hoist((score, slope, variant.mask), resident)
    spelling = spelling_for(lies, half=half)
    before = [f"    {resident} = at"]
    emitted = emit(kept, spelling)
    results = ", ".join((*emitted.results, "b"))
    sources = {
        "pre": _function("pre", "b, h, at, q_len, kv_len, scale, env", (*before, *_indent(emitted.lines), f"    return ({results},)"))
    }
    parts = {"score": ("score, ", roots[:1]), "both": ("score, ", roots[:2]), "mask": ("", roots[2:])}
    for name, (first, exprs) in parts.items():
        sources[name] = _written(name, first + _TAIL, exprs, spelling, len(kept))
    made = {name: jit_function(name, source) for name, source in sources.items()}
    return Functions(**made, source="\n\n".join(sources.values()))


def _hoist(roots: Sequence[Expr], resident: str) -> tuple[tuple[Expr, ...], tuple[Expr, ...]]:
    """(roots with what is invariant replaced by `aux` variables, the invariant expressions in their order)."""
    streaming = {"score", "kv_idx" if resident == "q_idx" else "q_idx"}
    kept: dict[Expr, int] = {}

    def cut(e: Expr, memo: dict[Expr, Expr], free: dict[Expr, frozenset[int]]) -> Expr:
        found = memo.get(e)
        if found is None:
            reads = e.variables()
            if e.args and not free[e] and not (reads & streaming) and (resident not in reads or _is_costly(e)):
                found = _aux(kept.setdefault(e, len(kept)), e.dtype)
            elif e.args:
                found = node(e.op, tuple(cut(a, memo, free) for a in e.args), e.dtype, e.value)
            else:
                found = _aux(kept.setdefault(e, len(kept)), e.dtype) if e is _SCALE else e
            memo[e] = found
        return found

    cuts = tuple(cut(root, {}, free_axes(root)) for root in roots)
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
    elif "score" not in reads:
        results[0] = f"((q_idx + kv_idx) * 0.0 + {results[0]})"
    unpacked = [f"    aux{n} = aux[{n}]" for n in range(count)]
    return _function(name, arguments, (*unpacked, *_indent(emitted.lines), f"    return {', '.join(results)}"))


def _function(name: str, arguments: str, lines: Sequence[str]) -> str:
    body = "\n".join(lines)
    return f"def {name}({arguments}):\n{body}\n"


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
