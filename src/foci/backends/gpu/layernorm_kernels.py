# mypy: ignore-errors
"""Row-wise kernels of a transformer layer: layer norm of a sum and its gradient, and column sums with activation derivatives.

Tensors are [rows, WIDTH], contiguous. Arithmetic is float32; stored values are rounded where torch's single operations round. Sums over
rows take two steps: each program stores its own in float32, and `finish_sums` adds them in a fixed order.
"""

from typing import Any, NamedTuple

import triton.language as tl

from foci.compat.jit import triton_jit

__all__ = ["ColumnConfig", "GradientConfig", "NormConfig", "column_sums", "finish_sums", "norm_gradient", "norm_sum"]


class NormConfig(NamedTuple):
    """Compile-time configuration of `norm_sum`; each field is a `tl.constexpr`, as in the other configurations here."""

    WIDTH: Any  # columns
    BLOCK: Any  # columns, padded to a power of two
    TILE: Any  # rows of a program
    ADDS: Any
    KEEPS: Any
    LEARNS: Any
    SCALES: Any
    SHIFTS: Any


class GradientConfig(NamedTuple):
    """Compile-time configuration of `norm_gradient`."""

    WIDTH: Any
    BLOCK: Any
    TILE: Any
    SUMS: Any
    ADDS: Any
    SCALES: Any


class ColumnConfig(NamedTuple):
    """Compile-time configuration of `column_sums`."""

    UNIT: Any  # columns are a multiple of it
    TILE: Any  # rows that a program reads at a time
    BLOCK: Any  # columns of a program
    KIND: Any


@triton_jit(do_not_specialize=["rows", "which", "eps"])
def norm_sum(x, y, scale, shift, out, stats, rows, which, eps, c):
    """out = layer_norm(x + y) with ADDS, else layer_norm(x). KEEPS: also store the sum to x. `out` may be x. `c`: `NormConfig`.

    LEARNS: store mean and reciprocal standard deviation to stats [2, 2, rows] float32, at norm `which`.
    """
    row = tl.program_id(0) * c.TILE + tl.arange(0, c.TILE)
    column = tl.arange(0, c.BLOCK)
    inside = (row < rows)[:, None] & (column < c.WIDTH)[None, :]
    at = row.to(tl.int64)[:, None] * c.WIDTH + column[None, :]
    total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if c.ADDS:
        total += tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(x.dtype.element_ty)
        if c.KEEPS:
            tl.store(x + at, rounded, mask=inside)
        total = rounded.to(tl.float32)
    mean = tl.sum(total, 1) / c.WIDTH
    centered = tl.where(inside, total - mean[:, None], 0.0)
    spread = tl.rsqrt(tl.sum(centered * centered, 1) / c.WIDTH + eps)
    if c.LEARNS:
        pointer = stats + which * 2 * rows + row
        tl.store(pointer, mean, mask=row < rows)
        tl.store(pointer + rows, spread, mask=row < rows)
    result = centered * spread[:, None]
    if c.SCALES:
        result *= tl.load(scale + column, mask=column < c.WIDTH, other=0.0).to(tl.float32)[None, :]
    if c.SHIFTS:
        result += tl.load(shift + column, mask=column < c.WIDTH, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton_jit(do_not_specialize=["rows", "which", "line", "first"])
def norm_gradient(dy, x, scale, stats, added, dx, sums, rows, which, line, first, c):
    """dx of a layer norm of x, rounded. ADDS: add `added` and round the sum. dx may be dy. `c`: `GradientConfig`.

    SUMS: program n stores column sums to row n of `sums`, [programs, line slots], from slot `first` on: of dy * normalized x, of dy and,
        with SUMS == 3, of dx as stored. A slot is 128 columns.
    """
    column = tl.arange(0, c.BLOCK)
    within = (column < c.WIDTH)[None, :]
    of_scale = tl.zeros([c.TILE, c.BLOCK], tl.float32)
    of_shift = tl.zeros([c.TILE, c.BLOCK], tl.float32)
    of_dx = tl.zeros([c.TILE, c.BLOCK], tl.float32)
    if c.SCALES:
        factor = tl.load(scale + column, mask=column < c.WIDTH, other=0.0).to(tl.float32)[None, :]
    for start in range(tl.program_id(0) * c.TILE, rows, tl.num_programs(0) * c.TILE):
        row = start + tl.arange(0, c.TILE)
        inside = (row < rows)[:, None] & within
        at = row.to(tl.int64)[:, None] * c.WIDTH + column[None, :]
        d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if c.ADDS:
            more = tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        pointer = stats + which * 2 * rows + row
        mean = tl.load(pointer, mask=row < rows, other=0.0)
        spread = tl.load(pointer + rows, mask=row < rows, other=0.0)
        h = tl.where(inside, (v - mean[:, None]) * spread[:, None], 0.0)
        w = d * factor if c.SCALES else d
        level = tl.sum(w, 1) / c.WIDTH
        along = tl.sum(w * h, 1) / c.WIDTH
        result = ((w - level[:, None] - h * along[:, None]) * spread[:, None]).to(dx.dtype.element_ty)
        if c.ADDS:
            result = (result.to(tl.float32) + more).to(dx.dtype.element_ty)
        tl.store(dx + at, result, mask=inside)
        if c.SUMS:
            of_scale += d * h
            of_shift += d
        if c.SUMS == 3:
            of_dx += tl.where(inside, result.to(tl.float32), 0.0)
    if c.SUMS:
        slot: tl.constexpr = (c.WIDTH + 127) // 128 * 128
        pointer = sums + tl.program_id(0) * (line * 128) + first * 128 + column
        tl.store(pointer, tl.sum(of_scale, 0), mask=column < c.WIDTH)
        tl.store(pointer + slot, tl.sum(of_shift, 0), mask=column < c.WIDTH)
        if c.SUMS == 3:
            tl.store(pointer + 2 * slot, tl.sum(of_dx, 0), mask=column < c.WIDTH)


@triton_jit(do_not_specialize=["start_at", "rows", "units", "blocks", "line", "first"])
def column_sums(dy, before, sums, start_at, rows, units, blocks, line, first, c):
    """Sum the columns of dy [rows, units * UNIT]. `c`: `ColumnConfig`. KIND: first replace dy by its gradient before an activation: 1 is
    relu, whose result is `before`; 2 is gelu, whose argument is `before`.

    Programs are `blocks` of columns for each part of the rows. Part n stores its sums to row n of `sums`, [parts, line slots] from slot
    `start_at` on, from slot `first` on.
    """
    part = tl.program_id(0) // blocks
    parts = tl.num_programs(0) // blocks
    column = tl.program_id(0) % blocks * c.BLOCK + tl.arange(0, c.BLOCK)
    width = units * c.UNIT
    within = (column < width)[None, :]
    total = tl.zeros([c.TILE, c.BLOCK], tl.float32)
    for start in range(part * c.TILE, rows, parts * c.TILE):
        row = start + tl.arange(0, c.TILE)
        inside = (row < rows)[:, None] & within
        at = (row.to(tl.int64)[:, None] * units) * c.UNIT + column[None, :]
        d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        if c.KIND == 1:
            d = tl.where(tl.load(before + at, mask=inside, other=0.0).to(tl.float32) <= 0, 0.0, d)
        if c.KIND == 2:
            v = tl.load(before + at, mask=inside, other=0.0).to(tl.float32)
            d *= 0.5 * (1.0 + tl.erf(v * 0.7071067811865476)) + v * (0.3989422804014327 * tl.exp(-0.5 * v * v))
        if c.KIND:
            result = d.to(dy.dtype.element_ty)
            tl.store(dy + at, result, mask=inside)
            d = result.to(tl.float32)
        total += tl.where(inside, d, 0.0)
    pointer = sums + start_at * 128 + part * (line * 128) + first * 128 + column
    tl.store(pointer, tl.sum(total, 0), mask=column < width)


@triton_jit(do_not_specialize=["one", "one_rows", "start_at", "other", "other_rows"])
def finish_sums(sums, out, one, one_rows, start_at, other, other_rows, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """out [(one + other) slots] = column sums of two arrays: [one_rows, one slots], and [other_rows, other slots] from slot `start_at`
    on."""
    column = tl.program_id(0) * BLOCK
    is_one = column < one * 128
    line = tl.where(is_one, one, other) * 128
    rows = tl.where(is_one, one_rows, other_rows)
    begin = tl.where(is_one, 0, start_at - one) * 128 + column
    columns = begin + tl.arange(0, BLOCK)
    total = tl.zeros([CHUNK, BLOCK], tl.float32)
    for start in range(0, rows, CHUNK):
        row = start + tl.arange(0, CHUNK)
        total += tl.load(sums + row[:, None] * line + columns[None, :], mask=(row < rows)[:, None], other=0.0)
    tl.store(out + column + tl.arange(0, BLOCK), tl.sum(total, 0).to(out.dtype.element_ty))
