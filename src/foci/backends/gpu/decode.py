# mypy: ignore-errors
"""Decode: split-KV attention of short queries. Several programs each process part of the keys; a second kernel combines their results.

Dao et al., "Flash-Decoding for long-context inference" (2023).

    B, Hq, Hkv, Sq, Skv, D, Dv    as in `foci.backends.gpu.forward`; the query heads of a group share tiles (GQA)
    r                             row of a tile: query r % Sq of the group's head r // Sq
    partial                       [B, Hkv, splits, rows, DV_PAD] float32: unnormalised results
    partial_max, partial_total    [B, Hkv, splits, rows] float32: row max and row sum
    acc, l_i, m_i                 accumulator, row sum, row max of one program
    args, c                       `SplitArgs`, and `foci.backends.gpu.kernel_args.Config`
"""

from typing import Any, NamedTuple

import triton.language as tl

from foci.backends.gpu.excluded_products import ROWS, exact_product, has_nan, is_finite
from foci.backends.gpu.forward import tile_scores
from foci.backends.gpu.tiles import (
    LN2,
    LOG2E,
    HeadRows,
    Position,
    TileRun,
    decode,
    every_tile,
    keep_tile,
    load_streamed_tile,
    load_tile,
    nth_visited,
    rows_pointer,
    tile_offsets,
    tile_runs,
    tile_start,
)
from foci.compat.jit import triton_jit


class Pages(NamedTuple):
    """Page table of a paged KV cache."""

    lengths: Any  # integers [B], at most `Size.columns`
    table: Any  # integers [B, pages of a row]
    stride: int  # of the table's rows, encoded
    step: int  # of its columns, encoded
    SIZE: Any  # tokens of a page, a `tl.constexpr`


class SplitArgs(NamedTuple):
    """A call's arguments, as in `foci.backends.gpu.kernel_args.CallArgs`, and the number of splits."""

    strides: Any
    size: Any
    table: Any  # None for the kernel that combines the splits, as `env`
    numbers: Any
    env: Any
    splits: int  # encoded


class Partials(NamedTuple):
    """Unnormalised results of the splits, in memory."""

    acc: Any  # `partial` of the legend
    row_max: Any  # `partial_max`
    total: Any  # `partial_total`


class KVCache(NamedTuple):
    """Keys and values in memory."""

    k: Any  # a pointer or a tensor descriptor, as `v`
    v: Any
    pages: Any  # `Pages`, or None


class SplitPlace(NamedTuple):
    """Which rows and keys a program takes."""

    b: Any
    kv_h: Any
    first: Any  # first row of the group
    kv_len: Any
    full_run: Any  # `TileRun` of its full tiles, where these have a loop of their own
    run: Any  # of its other tiles, or of all
    slot: Any  # where its rows begin in `Partials`


class QueryTile(NamedTuple):
    """A tile of rows of a group of heads, and what its loops over tiles of keys read."""

    q: Any  # [TILE_Q, D_PAD]
    b: Any
    h: Any  # [TILE_Q, 1]: query heads
    kv_h: Any
    q_idx: Any  # [TILE_Q, 1]
    q_len: Any
    kv_len: Any
    factor: Any  # from scores to exponents in base 2


@triton_jit
def key_tile(source, strides, pages, head, first, c, EDGE: tl.constexpr, DIM: tl.constexpr, COLS: tl.constexpr):
    """Load TILE_KV rows of keys or values from row `first` on; 0 past the end of `head`, a `HeadRows`. Without EDGE no row is past it."""
    if pages is None:
        return load_streamed_tile(source, strides, head, first, c, EDGE, c.TILE_KV, DIM, COLS)
    else:
        row = pages.table + head.b.to(tl.int64) * decode(pages.stride)
        if pages.SIZE % c.TILE_KV == 0:
            page = tl.load(row + (first // pages.SIZE) * decode(pages.step)).to(tl.int32)
            return page_tile(source, strides, page, head.h, first % pages.SIZE, head.length - first, c, DIM, COLS)
        else:
            return scattered_tile(source, strides, row, head.h, first, head.length, pages, c, DIM, COLS)


@triton_jit
def page_tile(source, strides, page, h, first, limit, c, DIM: tl.constexpr, COLS: tl.constexpr):
    """Load a tile that is inside one page."""
    if c.DESCRIPTORS:
        tile = source.load([page, h, first, 0]).reshape(c.TILE_KV, COLS)
        return tl.where(tl.arange(0, c.TILE_KV)[:, None] < limit, tile, 0.0)
    else:
        pointer = rows_pointer(source, strides, page, h, first, c)
        return load_tile(pointer, tile_offsets(strides, c, c.TILE_KV, COLS), limit, True, c.TILE_KV, DIM, COLS)


@triton_jit
def scattered_tile(source, strides, row, h, first, length, pages, c, DIM: tl.constexpr, COLS: tl.constexpr):
    """Load a tile that crosses pages: each row is looked up. `row` points to the page table's row."""
    n = first + tl.arange(0, c.TILE_KV)
    page = tl.load(row + (n // pages.SIZE) * decode(pages.step), mask=n < length, other=0)
    at = page.to(tl.int64) * (decode(strides.b) * c.UNIT) + (n % pages.SIZE).to(tl.int64) * (decode(strides.s) * c.UNIT)
    d = tl.arange(0, COLS)[None, :]
    step = 1 if c.UNIT == 8 else decode(strides.d)
    pointer = source + h.to(tl.int64) * (decode(strides.h) * c.UNIT) + at[:, None] + d * step
    return tl.load(pointer, mask=(n < length)[:, None] & (d < DIM), other=0.0)


@triton_jit
def accumulate_split(
    state,
    cache,
    queries,
    run,
    args,
    c,
    score: tl.constexpr,
    mask: tl.constexpr,
    MASKED: tl.constexpr,
    EDGE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Accumulate the tiles of a `TileRun` into `state` = (acc, l_i, m_i). `cache`: `KVCache`. `queries`: `QueryTile`. EXACT: with
    `exact_product`."""
    acc, l_i, m_i = state
    b, h, q_idx, kv_len, factor = queries.b, queries.h, queries.q_idx, queries.kv_len, queries.factor
    head = HeadRows(b, queries.kv_h, b * 0, kv_len)
    tile = nth_visited(args.table, run.row, run.low, run.first, run.before, run.gap, c)
    for i in tl.range(run.low, run.high, num_stages=1 if EXACT else c.STAGES):
        current = tile
        kv_first = tile_start(tile, c, c.TILE_KV)
        tile = nth_visited(args.table, run.row, i + 1, run.first, run.before, run.gap, c)
        # S = Q K^T
        keys = key_tile(cache.k, args.strides.k, cache.pages, head, kv_first, c, EDGE, c.D, c.D_PAD)
        qk = tl.dot(queries.q, tl.trans(keys), input_precision=c.PRECISION)
        # score function and mask
        kv_idx = kv_first + tl.arange(0, c.TILE_KV)[None, :]
        position = Position(b, h, q_idx, kv_idx, queries.q_len, kv_len, current)
        x = tile_scores(qk, position, args, c, score, mask, MASKED, EDGE)
        # online softmax
        m_new = tl.maximum(m_i, tl.max(x, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2((x - shift[:, None]) * factor)
        alpha = tl.exp2((m_i - shift) * factor)
        l_i = l_i * alpha + tl.sum(p, 1)
        if c.DROPOUT:
            p = tl.where(keep_tile(args.numbers, b, h, q_idx, kv_first, c.TILE_KV), p, 0.0)
        # O = alpha O + P V
        values = key_tile(cache.v, args.strides.v, cache.pages, head, kv_first, c, EDGE, c.DV, c.DV_PAD)
        acc = acc * alpha[:, None]
        if EXACT:
            acc = exact_product(p, values, acc, c.PRECISION)
        else:
            acc = tl.dot(p.to(values.dtype), values, acc, input_precision=c.PRECISION)
        m_i = m_new
    return acc, l_i, m_i


@triton_jit
def attend_to_split(
    cache, queries, full_run, run, args, c, score: tl.constexpr, mask: tl.constexpr, APART: tl.constexpr, EXACT: tl.constexpr
):
    """(acc, l_i, m_i) of the tiles of two `TileRun`s: with APART full tiles, and others. `cache`, `queries`: as in `accumulate_split`."""
    ROWS: tl.constexpr = queries.q.shape[0]
    acc = tl.zeros([ROWS, c.DV_PAD], tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    state = (acc, l_i, m_i)
    if APART:
        state = accumulate_split(state, cache, queries, full_run, args, c, score, mask, False, False, EXACT)
    return accumulate_split(state, cache, queries, run, args, c, score, mask, c.MODE != "all", True, EXACT)


@triton_jit
def load_group_rows(q, place, first, args, c, ROWS: tl.constexpr):
    """`QueryTile` of ROWS rows of a `SplitPlace` from its row `first` on."""
    strides, size, b, kv_h = args.strides, args.size, place.b, place.kv_h
    q_len = decode(size.rows)
    r = place.first + first + tl.arange(0, ROWS)
    used = r < decode(size.group) * q_len
    inside = tl.where(used, r, 0)
    h = (kv_h * decode(size.group) + inside // q_len)[:, None]
    q_idx = (inside % q_len)[:, None]
    d = tl.arange(0, c.D_PAD)[None, :]
    at = h.to(tl.int64) * (decode(strides.q.h) * c.UNIT) + q_idx.to(tl.int64) * (decode(strides.q.s) * c.UNIT)
    step = 1 if c.UNIT == 8 else decode(strides.q.d)
    pointer = rows_pointer(q, strides.q, b, b * 0, b * 0, c)
    q_tile = tl.load(pointer + at + d * step, mask=used[:, None] & (d < c.D), other=0.0)
    if c.NEGATIVE:
        q_tile = -q_tile
    factor = LOG2E
    if c.PLAIN:
        factor = args.numbers.scale * LOG2E
    return QueryTile(q_tile, b, h, kv_h, q_idx, q_len, place.kv_len, factor)


@triton_jit
def store_partials(state, partials, first, c):
    """Store `state` = (acc, l_i, m_i) from slot `first` on."""
    acc, l_i, m_i = state
    slots = first + tl.arange(0, l_i.shape[0])
    tl.store(partials.acc + slots[:, None] * c.DV_PAD + tl.arange(0, c.DV_PAD)[None, :], acc)
    tl.store(partials.row_max + slots, m_i)
    tl.store(partials.total + slots, l_i)


@triton_jit
def find_split(args, c, APART: tl.constexpr, pages):
    """`SplitPlace` of this program. Tiles of rows of one split, which read the same keys, run together."""
    size = args.size
    pid = tl.program_id(0)
    program = pid // decode(size.tasks)
    split = program % decode(args.splits)
    bh = program // decode(args.splits)
    kv_heads = decode(size.heads) // decode(size.group)
    b = bh // kv_heads
    kv_h = bh - b * kv_heads
    kv_len = decode(size.columns)
    if pages is not None:
        kv_len = tl.minimum(tl.load(pages.lengths + b), kv_len).to(tl.int32)
    # one row of the table serves all queries of the group
    tiles = tile_runs(args.table, b, kv_h, 0, kv_len, c, c.TILE_KV)
    full = tiles.full
    count = full + tiles.part
    tiles_each = tl.cdiv(count, decode(args.splits))
    low = tl.minimum(split * tiles_each, count)
    high = tl.minimum(low + tiles_each, count)
    full_run = TileRun(tiles.row, tiles.full_first, full, full * 0, full * 0, full * 0)
    if APART:
        full_run = TileRun(tiles.row, tiles.full_first, full, full * 0, tl.minimum(low, full), tl.minimum(high, full))
        run = TileRun(tiles.row, tiles.part_first, tiles.before, tiles.gap, tl.maximum(low, full) - full, tl.maximum(high, full) - full)
    else:
        run = every_tile(tiles, c)
        run = TileRun(run.row, run.first, run.before, run.gap, low, high)
    return SplitPlace(b, kv_h, pid % decode(size.tasks) * c.TILE_Q, kv_len, full_run, run, pid.to(tl.int64) * c.TILE_Q)


@triton_jit
def attention_decode(q, k, v, partials, args, c, score: tl.constexpr, mask: tl.constexpr, APART: tl.constexpr, pages=None):
    """Unnormalised attention of one tile of rows of a group over one split of the keys. Shapes are in the legend above.

    pages: None, or `Pages`. APART: full tiles have a loop of their own, without a mask.
    """
    place = find_split(args, c, APART, pages)
    queries = load_group_rows(q, place, 0, args, c, c.TILE_Q)
    acc, l_i, m_i = attend_to_split(KVCache(k, v, pages), queries, place.full_run, place.run, args, c, score, mask, APART, False)
    if c.EXCLUDES:  # noqa: SIM102  known when the kernel is compiled
        # the sum of a row that attends to a NaN is NaN
        if has_nan(acc, l_i == l_i):
            acc, l_i, m_i = attend_to_split(KVCache(k, v, pages), queries, place.full_run, place.run, args, c, score, mask, APART, True)
    store_partials((acc, l_i, m_i), partials, place.slot, c)


@triton_jit
def store_exact_partials(q, cache, partials, place, args, c, score: tl.constexpr, mask: tl.constexpr, APART: tl.constexpr):
    """Compute the results of a program of `attention_decode` once more, where excluded positions reach nothing. `cache`: `KVCache`."""
    for first in range(0, c.TILE_Q, ROWS):
        queries = load_group_rows(q, place, first, args, c, ROWS)
        state = attend_to_split(cache, queries, place.full_run, place.run, args, c, score, mask, APART, True)
        store_partials(state, partials, place.slot + first, c)


@triton_jit
def mend_splits(q, k, v, partials, args, c, score: tl.constexpr, mask: tl.constexpr, APART: tl.constexpr, pages=None):
    """Compute results of `attention_decode` that hold a NaN once more, launched as it is: as `mend.mend_rows` does for the forward, by the
    first row of each tile."""
    columns = tl.arange(0, c.DV_PAD)
    first_row = tl.load(partials.acc + tl.program_id(0).to(tl.int64) * c.TILE_Q * c.DV_PAD + columns)
    if tl.max(tl.where(is_finite(first_row), 0, 1)) > 0:
        place = find_split(args, c, APART, pages)
        store_exact_partials(q, KVCache(k, v, pages), partials, place, args, c, score, mask, APART)


@triton_jit
def combine_splits(partials, out, lse, row_max, args, c, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """Combine COLUMNS columns of one row's splits, in order: rescale each to the common row max, add, normalize."""
    strides, size, numbers = args.strides, args.size, args.numbers
    splits = args.splits
    pid = tl.program_id(0)
    q_len = decode(size.rows)
    heads = decode(size.heads)
    query = pid % q_len
    bh = pid // q_len
    h = bh % heads
    b = bh // heads
    kv_h = h // decode(size.group)
    row = (h % decode(size.group)) * q_len + query
    base = ((b * (heads // decode(size.group)) + kv_h) * decode(splits)).to(tl.int64)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    factor = LOG2E
    if c.PLAIN:
        factor = numbers.scale * LOG2E
    acc = tl.zeros([COLUMNS], tl.float32)
    l_i = 0.0
    m_i = float("-inf")
    for start in range(0, decode(splits), CHUNK):
        s = start + tl.arange(0, CHUNK)
        slot = (base + s) * (decode(size.tasks) * c.TILE_Q) + row
        m = tl.load(partials.row_max + slot, mask=s < decode(splits), other=float("-inf"))
        t = tl.load(partials.total + slot, mask=s < decode(splits), other=0.0)
        m_new = tl.maximum(m_i, tl.max(m, 0))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        # subtract before scaling: the product of a large score with the factor would be rounded
        alpha = tl.exp2((m_i - shift) * factor)
        weight = tl.exp2((m - shift) * factor)
        rows = tl.load(partials.acc + slot[:, None] * c.DV_PAD + d[None, :], mask=(s < decode(splits))[:, None], other=0.0)
        acc = acc * alpha + tl.sum(rows * weight[:, None], 0)
        l_i = l_i * alpha + tl.sum(t * weight, 0)
        m_i = m_new
    weight = tl.where(l_i == 0.0, 0.0, 1.0 / l_i)
    if c.DROPOUT:
        weight = weight * numbers.keep_factor
    pointer = rows_pointer(out, strides.out, b, h, query, c)
    step = 1 if c.UNIT == 8 else decode(strides.out.d)
    tl.store(pointer + d * step, (acc * weight).to(out.dtype.element_ty), mask=d < c.DV)
    if tl.program_id(1) != 0:
        return
    at = bh.to(tl.int64) * q_len + query
    row_max_nat = m_i * (factor * LN2)
    tl.store(lse + at, tl.where(l_i == 0.0, float("-inf"), row_max_nat + tl.log(l_i)))
    if row_max is not None:
        tl.store(row_max + at, tl.where(l_i == 0.0, float("-inf"), row_max_nat))
