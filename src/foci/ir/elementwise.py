"""Operations of symbols, numbers and tensors: rows are broadcast, and integers of 8 and 16 bits wrap, as torch has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from foci.ir import expr as ir
from foci.ir.expr import Expr
from foci.ir.narrow import PROMOTED, common_dtype, fits, is_narrow, wrap
from foci.ir.ops import OPS, Typing, apply
from foci.ir.rewrite import substitute
from foci.ir.trace import NUMBERS, Axis, Symbol, TraceError, is_numpy_number
from foci.ir.user_lines import complaint

__all__ = ["elementwise", "merge_axes", "pointwise"]


def merge_axes(symbols: Sequence[Symbol]) -> tuple[tuple[Axis, ...], list[Expr]]:
    """Broadcasts rows: common axes, and each symbol's expression rewritten to them."""
    rank = max(s.ndim for s in symbols)
    if rank == 0:
        return (), [s.expr for s in symbols]
    axes: list[Axis] = []
    maps: list[dict[Expr, Expr]] = [{} for _ in symbols]
    for position in range(-rank, 0):
        present = [(n, s.axes[position]) for n, s in enumerate(symbols) if s.ndim >= -position]
        chosen = next((axis for _, axis in present if axis.length != 1), present[0][1])
        for n, axis in present:
            if axis.length not in (1, chosen.length):
                raise TraceError(complaint(f"an operation on rows of shapes {[list(s.shape) for s in symbols]}", "rows must broadcast"))
            if axis is not chosen:
                maps[n][axis.index] = ir.const(0) if axis.length == 1 and chosen.length != 1 else chosen.index
        axes.append(chosen)
    return tuple(axes), [substitute(s.expr, table) if table else s.expr for s, table in zip(symbols, maps, strict=True)]


def elementwise(build: Callable[..., Expr], *values: Any, typing: Typing = Typing.ARITHMETIC) -> Symbol:
    """Applies `build` (Exprs -> Expr) to symbols, numbers and tensors, broadcasting rows.

    A row that occurs twice keeps one axis, so `(x * x).sum()` is a sum over one index.
    """
    tracer = next(v.tracer for v in values if isinstance(v, Symbol))
    symbols = [tracer.symbol(v) for v in values]
    axes, exprs = merge_axes(symbols)
    dtype = None
    if typing not in _IN_FLOATS:
        dtype = common_dtype((s.dtype, s.ndim) for s, v in zip(symbols, values, strict=True) if not _is_number(v))
    if dtype is None or not is_narrow(dtype):
        return Symbol(tracer, build(*exprs), axes)
    if typing is Typing.SELECT:
        _check_fit(values[1:], dtype)
    # torch brings operands into the dtype first, in comparisons as well
    fitting = [PROMOTED[s.dtype, dtype] == dtype for s in symbols]
    result = build(*(e if is_fitting else wrap(e, dtype) for e, is_fitting in zip(exprs, fitting, strict=True)))
    if not result.dtype.is_integer:
        return Symbol(tracer, result, axes)
    return Symbol(tracer, wrap(result, dtype) if result.op in _OVERFLOWING else result, axes, dtype)


_IN_FLOATS: Final = (Typing.FLOATING, Typing.PREDICATE)
_OVERFLOWING: Final = frozenset(("abs", "add", "const", "floordiv", "mul", "neg", "shl", "sub"))
"""Operations of numbers that fit a dtype whose results may not."""


def _check_fit(values: Sequence[Any], dtype: torch.dtype) -> None:
    for value in values:
        if isinstance(value, int) and not fits(value, dtype):
            raise TraceError(complaint(f"{value} in the place of a number of {dtype}", "capture tensor.int()"))


def _is_number(value: Any) -> bool:
    """Whether a value takes the dtype of the tensors that it meets."""
    return isinstance(value, NUMBERS) or is_numpy_number(value)


def pointwise(name: str, *values: Any) -> Symbol:
    """The operation `name` of the op table on symbols, numbers and tensors."""
    try:
        return elementwise(lambda *exprs: apply(name, *exprs), *values, typing=OPS[name].typing)
    except TypeError as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(complaint(str(error), "cast the operands first")) from None
