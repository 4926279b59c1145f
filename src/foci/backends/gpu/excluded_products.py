# mypy: ignore-errors
"""Products that leave excluded positions out, whatever these hold.

The weight of an excluded position is 0, and tensor cores compute 0 times NaN, and 0 times infinity, as NaN. So results that hold a NaN are
computed once more, `ROWS` rows at a time, with the products of this file, three in place of one. Split-KV kernels of few rows do so
themselves, `decode.mend_splits` after those of many rows, and the kernels of `mend` after all others. Where nothing is excluded, kernels do
without all of it.
"""

import triton.language as tl

from foci.compat.jit import triton_jit

__all__ = ["ROWS", "exact_product", "finite_part", "has_nan", "is_finite", "report_nan", "report_none"]

ROWS = tl.constexpr(16)
"""Rows that are computed once more at a time: few, so that kernels need no more registers than for the first time."""


@triton_jit
def has_nan(x, rows):
    """Whether a tile has a NaN in one of `rows`, a bool for each row."""
    return tl.max(tl.where((x != x) & rows[:, None], 1, 0)) > 0


@triton_jit
def is_finite(x):
    """Not `x - x == 0`: where x is itself a product, that becomes one fused operation, whose result is the rounding error of x."""
    return tl.abs(x) < float("inf")


@triton_jit
def finite_part(x):
    """x with 0 in place of NaN and infinities."""
    return tl.where(is_finite(x), x, 0.0)


@triton_jit
def exact_product(weights, x, acc, PRECISION: tl.constexpr):
    """acc + weights x, where a weight of 0 leaves its row of x out. weights: [M, N], none below 0. x: [N, D]. acc: [M, D]."""
    acc = tl.dot(weights.to(x.dtype), finite_part(x), acc, input_precision=PRECISION)
    # how many attended values are NaN, or infinite with that sign: a NaN counts twice, as infinity minus infinity is NaN
    attended = (weights != 0.0).to(tl.float16)
    above = tl.dot(attended, (~is_finite(x) & (x != float("-inf"))).to(tl.float16))
    below = tl.dot(attended, (~is_finite(x) & (x != float("inf"))).to(tl.float16))
    return acc + tl.where(above > 0.0, float("inf"), 0.0) + tl.where(below > 0.0, float("-inf"), 0.0)


@triton_jit
def report_nan(flags, acc):
    """Write this program's flag, whether its results hold a NaN or an infinity. `flags`: int32, or None where nothing is excluded."""
    if flags is not None:
        tl.store(flags + tl.program_id(0), tl.max(tl.where(is_finite(acc), 0, 1)))


@triton_jit
def report_none(flags):
    """`report_nan` of a program without results."""
    if flags is not None:
        tl.store(flags + tl.program_id(0), 0)
