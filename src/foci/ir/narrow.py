"""Integers of 8 and 16 bits. The language computes them in 32 bits; torch computes them in their own width, where they wrap.

So whoever turns an operation of torch into expressions asks `is_narrow` of the dtype that torch computes in, and if it is,
wraps operands and result with `wrap`. Loads of captured tensors need none: what a tensor holds fits its dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from foci.ir.expr import Expr
from foci.ir.ops import apply

__all__ = ["PROMOTED", "common_dtype", "fits", "is_narrow", "wrap"]

# A table, as a call of torch.promote_types while a function is traced counts as a call of the function's.
_DTYPES: Final = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32)
PROMOTED: Final = {(a, b): torch.promote_types(a, b) for a in _DTYPES for b in _DTYPES}
"""The dtype of operations of symbols with two dtypes."""

_LOWEST: Final = {torch.uint8: 0, torch.int8: -(1 << 7), torch.int16: -(1 << 15)}


def is_narrow(dtype: torch.dtype | None) -> bool:
    """Whether torch computes integers of this dtype in fewer than 32 bits."""
    return dtype in _LOWEST


def fits(number: int, dtype: torch.dtype) -> bool:
    """Whether torch takes a number of Python's for an element of a narrow `dtype`; a negative one for an unsigned dtype wraps."""
    return -(1 << 8 * dtype.itemsize) < number < _LOWEST[dtype] + (1 << 8 * dtype.itemsize)


def wrap(expr: Expr, dtype: torch.dtype) -> Expr:
    """An integer expression as a narrow `dtype` holds it; everything else as it is.

    Example:
        >>> from foci.ir.expr import const
        >>> wrap(const(300), torch.uint8), wrap(const(300), torch.int16), wrap(const(128), torch.int8)
        (44, 300, -128)
    """
    if dtype not in _LOWEST or not expr.dtype.is_integer:
        return expr
    # A remainder rather than `&`: interval analysis keeps its bounds where nothing wraps.
    low, count = _LOWEST[dtype], 1 << 8 * dtype.itemsize
    if low == 0:
        return apply("mod", expr, count)
    return apply("add", apply("mod", apply("sub", expr, low), count), low)


def common_dtype(dtypes: Iterable[tuple[torch.dtype, int]]) -> torch.dtype | None:
    """The dtype that torch computes in, of operands with these dtypes and ranks; None without any.

    Operands of rank 0 count only where there are no others of their kind (bool, integer, floating). Python's numbers are no operands:
    they take the dtype of the others, unless they are floating.
    """
    common: torch.dtype | None = None
    operands = sorted(dtypes, key=lambda operand: -operand[1])
    for dtype, rank in operands:
        if common is None:
            common = dtype
        elif rank or not operands[0][1] or _kind(dtype) > _kind(common):
            common = PROMOTED[common, dtype]
    return common


def _kind(dtype: torch.dtype) -> int:
    return 2 if dtype.is_floating_point else int(dtype is not torch.bool)
