# mypy: ignore-errors
"""Masks of partial tiles as bits, and which of the tiles 64 rows need, found once and read by every head and call that they serve.

A thread holds columns 8 i + 2 l + j of a row, l its lane's place among the four of a row. Bit 2 i + j of word l says whether a column
is attended to, so that a mask costs a kernel the same whatever it reads. Rows are queries in the forward, keys in the backward.
"""

import triton
import triton.language as tl

from foci.backends.triton.tiles import FORCED, RECORD, number, sequence

__all__ = ["pack_masks", "pack_queries"]


@triton.jit
def place_of(size, heads, TILE: tl.constexpr):
    """(which 64 rows of a tile the program has, row of the table, task, batch entry, head)."""
    part = tl.program_id(0) % (TILE // 64)
    row = tl.program_id(0) // (TILE // 64)
    task = row % number(size.tasks)
    line = row // number(size.tasks)
    b = line // number(heads)
    return part, row, task, b, line - b * number(heads)


@triton.jit
def packed(keep, column, COLUMNS: tl.constexpr):
    """The four words of each of 64 rows."""
    bits = keep.to(tl.int32) << (column // 8 * 2 + column % 2)
    return tl.sum(tl.sum(bits.reshape(64, COLUMNS // 8, 4, 2), 3), 1)


@triton.jit
def pack_masks(words, limits, table, size, spans, env, heads, c, mask: tl.constexpr, SPLIT: tl.constexpr):
    """Words of the partial tiles of 64 rows of a task; each of SPLIT programs takes every SPLIT-th of them.

    words: int32 [rows of the lists, entries of a list, c.TILE_Q, 4]. limits: int32 zeros [rows of the lists, c.TILE_Q // 64, 2]; of
    the partial tiles that hold a bit, how many come from the first of them on, and up to the last. `heads`: those that the lists
    tell apart, encoded.
    """
    part, row, task, b, h = place_of(size, heads, c.TILE_Q)
    tile = task
    if c.JAGGED:
        b = tl.load(spans.tasks + RECORD * task)
        tile = tl.load(spans.tasks + RECORD * task + 1)
        if b < 0:
            return
    q_start, q_len, kv_start, kv_len = sequence(spans, size, b, c)
    counts = table.counts + row.to(tl.int64) * 4
    full = tl.load(counts)
    first = row.to(tl.int64) * number(table.width) + full
    q_idx = tile * c.TILE_Q + part * 64 + tl.arange(0, 64)[:, None]
    column = tl.arange(0, c.TILE_KV)[None, :]
    at = (part * 64 + tl.arange(0, 64))[:, None] * 4 + tl.arange(0, 4)[None, :]
    partial = tl.load(counts + 1)
    limit = limits + (row * (c.TILE_Q // 64) + part) * 2
    for i in range(tl.program_id(1), partial, SPLIT):
        entry = tl.load(table.lists + first + i)
        forced = entry < 0
        if c.BLOCKS:
            forced = entry >= FORCED
            entry = entry & (FORCED - 1)
        kv_idx = entry * c.TILE_KV + column
        keep = mask(b, h, tl.minimum(q_idx, q_len - 1), tl.minimum(kv_idx, kv_len - 1), q_len, kv_len, env)
        keep = (keep | forced) & (q_idx < q_len) & (kv_idx < kv_len)
        word = packed(keep, column, c.TILE_KV)
        tl.store(words + (first + i) * (c.TILE_Q * 4) + at, word)
        some = tl.max(tl.max(keep.to(tl.int32), 1), 0) > 0
        tl.atomic_max(limit, partial - i, mask=some)
        tl.atomic_max(limit + 1, i + 1, mask=some)


@triton.jit
def pack_queries(words, table, size, spans, env, heads, c, mask: tl.constexpr, SPLIT: tl.constexpr):
    """Words of the partial tiles of queries that 64 keys of a tile visit; of all where keys are not there.

    words: [rows of the table, its width, c.TILE_KV, 4] of integers that hold c.TILE_Q / 4 bits. Others as for `pack_masks`.
    """
    part, row, task, b, h = place_of(size, heads, c.TILE_KV)
    q_start, q_len, kv_start, kv_len = sequence(spans, size, b, c)
    counts = table.counts + row.to(tl.int64) * 4
    first = tl.load(counts)
    before = tl.load(counts + 1)
    gap = first
    count = before
    if c.MODE == "ranges":
        gap = tl.load(counts + 2) - before
        before -= first
        count = tl.load(counts + 3) - first - gap
    if (task + 1) * c.TILE_KV > kv_len:
        count += gap
        gap = gap * 0
    kv_idx = task * c.TILE_KV + part * 64 + tl.arange(0, 64)[:, None]
    column = tl.arange(0, c.TILE_Q)[None, :]
    at = (part * 64 + tl.arange(0, 64))[:, None] * 4 + tl.arange(0, 4)[None, :]
    for i in range(tl.program_id(1), count, SPLIT):
        if c.MODE == "ranges":
            tile = first + i + tl.where(i >= before, gap, 0)
        else:
            tile = tl.load(table.lists + row.to(tl.int64) * number(table.width) + gap + i)
        q_idx = tile * c.TILE_Q + column
        keep = mask(b, h, tl.minimum(q_idx, q_len - 1), tl.minimum(kv_idx, kv_len - 1), q_len, kv_len, env)
        keep = keep & (q_idx < q_len) & (kv_idx < kv_len)
        word = packed(keep, column, c.TILE_Q)
        place = (row.to(tl.int64) * number(table.width) + tile) * (c.TILE_KV * 4)
        tl.store(words + place + at, word.to(words.dtype.element_ty))
