# mypy: ignore-errors
"""What a transformer layer computes between its products: norms of sums, derivatives, and sums of columns.

Tensors are [rows, WIDTH], contiguous, and compute in float32; what is stored is rounded where torch's single operations round. Sums over
rows come in two steps: each program leaves its own in float32, and `finish_sums` adds them in one order, whichever ended first.
"""

import triton
import triton.language as tl

__all__ = ["column_sums", "finish_sums", "norm_gradient", "norm_sum"]


@triton.jit(do_not_specialize=["rows", "which", "eps"])
def norm_sum(
    x, y, scale, shift, out, stats, rows, which, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ADDS: tl.constexpr, KEEPS: tl.constexpr, LEARNS: tl.constexpr, SCALES: tl.constexpr, SHIFTS: tl.constexpr,
):  # fmt: skip
    """out = the layer norm of x + y, with ADDS, else of x; with KEEPS the sum is written over x; `out` may be x.

    With LEARNS mean and reciprocal spread go to stats [2, 2, rows], float32, of which `which` is the norm's.
    """
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        total += tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(x.dtype.element_ty)
        if KEEPS:
            tl.store(x + at, rounded, mask=inside)
        total = rounded.to(tl.float32)
    mean = tl.sum(total, 1) / WIDTH
    apart = tl.where(inside, total - mean[:, None], 0.0)
    spread = tl.rsqrt(tl.sum(apart * apart, 1) / WIDTH + eps)
    if LEARNS:
        place = stats + which * 2 * rows + row
        tl.store(place, mean, mask=row < rows)
        tl.store(place + rows, spread, mask=row < rows)
    found = apart * spread[:, None]
    if SCALES:
        found *= tl.load(scale + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    if SHIFTS:
        found += tl.load(shift + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, found.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "which", "line", "first"])
def norm_gradient(
    dy, x, scale, stats, added, dx, sums, rows, which, line, first,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SUMS: tl.constexpr, ADDS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """dx of a layer norm of x, rounded; with ADDS `added` is added and the sum rounded. dx may be dy.

    With SUMS program n leaves its sums in row n of `sums`, [programs, line slots], from slot `first` on: of dy times what the norm scales,
    of dy and, with SUMS == 3, of dx as it is stored.
    """
    column = tl.arange(0, BLOCK)
    within = (column < WIDTH)[None, :]
    of_scale = tl.zeros([TILE, BLOCK], tl.float32)
    of_shift = tl.zeros([TILE, BLOCK], tl.float32)
    of_dx = tl.zeros([TILE, BLOCK], tl.float32)
    if SCALES:
        factor = tl.load(scale + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    for start in range(tl.program_id(0) * TILE, rows, tl.num_programs(0) * TILE):
        row = start + tl.arange(0, TILE)
        inside = (row < rows)[:, None] & within
        at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if ADDS:
            more = tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        place = stats + which * 2 * rows + row
        mean = tl.load(place, mask=row < rows, other=0.0)
        spread = tl.load(place + rows, mask=row < rows, other=0.0)
        h = tl.where(inside, (v - mean[:, None]) * spread[:, None], 0.0)
        w = d * factor if SCALES else d
        level = tl.sum(w, 1) / WIDTH
        along = tl.sum(w * h, 1) / WIDTH
        found = ((w - level[:, None] - h * along[:, None]) * spread[:, None]).to(dx.dtype.element_ty)
        if ADDS:
            found = (found.to(tl.float32) + more).to(dx.dtype.element_ty)
        tl.store(dx + at, found, mask=inside)
        if SUMS:
            of_scale += d * h
            of_shift += d
        if SUMS == 3:
            of_dx += tl.where(inside, found.to(tl.float32), 0.0)
    if SUMS:
        slot: tl.constexpr = (WIDTH + 127) // 128 * 128
        place = sums + tl.program_id(0) * (line * 128) + first * 128 + column
        tl.store(place, tl.sum(of_scale, 0), mask=column < WIDTH)
        tl.store(place + slot, tl.sum(of_shift, 0), mask=column < WIDTH)
        if SUMS == 3:
            tl.store(place + 2 * slot, tl.sum(of_dx, 0), mask=column < WIDTH)


@triton.jit(do_not_specialize=["start_at", "rows", "units", "blocks", "line", "first"])
def column_sums(
    dy, before, sums, start_at, rows, units, blocks, line, first,
    UNIT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Sums of the columns of dy [rows, units * UNIT]; behind an activation, of what dy is replaced by: KIND 1 is relu, whose result is
    `before`, KIND 2 gelu, whose argument it is.

    Programs are `blocks` of columns for each part of the rows; part n leaves its sums in row n of `sums`, [parts, line slots] from slot
    `start_at` on, from slot `first` on.
    """
    part = tl.program_id(0) // blocks
    parts = tl.num_programs(0) // blocks
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    width = units * UNIT
    within = (column < width)[None, :]
    total = tl.zeros([TILE, BLOCK], tl.float32)
    for start in range(part * TILE, rows, parts * TILE):
        row = start + tl.arange(0, TILE)
        inside = (row < rows)[:, None] & within
        at = (row.to(tl.int64)[:, None] * units) * UNIT + column[None, :]
        d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        if KIND == 1:
            d = tl.where(tl.load(before + at, mask=inside, other=0.0).to(tl.float32) <= 0, 0.0, d)
        if KIND == 2:
            v = tl.load(before + at, mask=inside, other=0.0).to(tl.float32)
            d *= 0.5 * (1.0 + tl.erf(v * 0.7071067811865476)) + v * (0.3989422804014327 * tl.exp(-0.5 * v * v))
        if KIND:
            found = d.to(dy.dtype.element_ty)
            tl.store(dy + at, found, mask=inside)
            d = found.to(tl.float32)
        total += tl.where(inside, d, 0.0)
    place = sums + start_at * 128 + part * (line * 128) + first * 128 + column
    tl.store(place, tl.sum(total, 0), mask=column < width)


@triton.jit(do_not_specialize=["one", "one_rows", "start_at", "other", "other_rows"])
def finish_sums(sums, out, one, one_rows, start_at, other, other_rows, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """out [(one + other) slots] = the sums of the columns of two arrays: [one_rows, one slots], and [other_rows, other slots] from slot
    `start_at` on."""
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
