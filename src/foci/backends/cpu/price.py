"""Estimated seconds that a score function adds to each score in the CPU kernels.

Fitted by hand to float32 on two cores of AMD Zen 4. `benchmarks/graph_cost.py` shows what they decide: attentions of models, each with its
bias computed in the kernel and as a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Final

from foci.backends.contract import CaptureFacts
from foci.backends.cpu.codegen import VALUES, is_vector
from foci.backends.cpu.functor import Functor
from foci.ir.derivative import capture_derivatives
from foci.ir.emit import decompose
from foci.ir.expr import DType, Expr, variable

__all__ = ["seconds_per_score"]


_FUNCTION: Final = 0.05e-9  # any score function at all: it needs a second pass over the products
_OPERATION: Final = 0.025e-9
_WIDE: Final = 3  # an operation on 64-bit integers costs this many
_DIVISION: Final = 0.2e-9  # integer division by a number that is no power of two
_LANES: Final = 3.0e-9  # a function of the C library, lane by lane
_RUN, _STRIDED, _GATHERED = 0.15e-9, 1.2e-9, 1.3e-9  # an element of a captured tensor: of neighbours, of a run with gaps, from anywhere
_ADDED_RUN, _ADDED_STRIDED, _ADDED_ANYWHERE = 0.8e-9, 3.0e-9, 5.0e-9  # its gradient
_BACKWARD: Final = 1.5  # times as much again: the function once more, and its derivative
_AXIS: Final = 16  # steps of a reduction, whose length is not known here

_SLOW: Final[Mapping[str, float]] = {
    **dict.fromkeys(("floordiv", "mod"), _DIVISION),
    **dict.fromkeys(("tanh", "exp", "exp2", "log", "log2", "sigmoid", "sqrt", "rsqrt", "softplus", "erf"), 0.15e-9),
    **dict.fromkeys(("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "atan2", "fmod", "pow", "expm1", "log1p"), _LANES),
}


@functools.lru_cache(maxsize=4096)
def seconds_per_score(score: Expr, facts: tuple[CaptureFacts, ...], *, needs_backward: bool) -> float:
    """Seconds that a score function adds to each score: operations that belong to neither row nor column, and reads of captures."""
    if score is variable("score"):
        return 0.0
    functor = Functor(())
    staged = decompose(functor.staged(score), VALUES.ops)
    total = _FUNCTION + sum(_operation(e) for e in staged.walk() if e.args and is_vector(e))
    for span in functor.spans:
        total += _RUN if span.dim == facts[span.slot].unit_dim or span.divisor else _STRIDED
    if not needs_backward:
        return total
    sites = [site for site in capture_derivatives(score) if facts[site.slot].wants_grad]
    return total * (1 + _BACKWARD) + sum(_gradient(site.indices, facts[site.slot]) for site in sites)


def _operation(e: Expr) -> float:
    if e.op == "load":
        return _GATHERED
    if e.op == "reduce":
        return _AXIS * _OPERATION
    if e.op in ("floordiv", "mod") and isinstance(e.args[1].value, int) and e.args[1].value & (e.args[1].value - 1) == 0:
        return _OPERATION
    return _SLOW.get(e.op, _OPERATION * (_WIDE if e.dtype is DType.INT64 else 1))


def _gradient(indices: Sequence[Expr], facts: CaptureFacts) -> float:
    """Seconds of the gradient of a captured element that a score reads at these indices."""
    moving = [dim for dim, index in enumerate(indices) if "kv_idx" in index.variables()]
    if not moving:
        return _OPERATION
    is_run = len(moving) == 1 and not any(e.op == "load" or e.op in _SLOW for e in indices[moving[0]].walk())
    return _ADDED_ANYWHERE if not is_run else _ADDED_RUN if moving[0] == facts.unit_dim else _ADDED_STRIDED
