# mypy: ignore-errors
"""Kernels that precompute mask bits of partial tiles, and which tiles 64 rows need. All heads and calls with the same mask reuse the
result.

words     4 for each row of a tile. A thread holds columns 8 i + 2 l + j of a row, l its lane among the four of the row; bit 2 i + j of
          word l says whether the column is attended to. So a mask costs a kernel the same whatever it reads.
rows      queries in the forward, keys in the backward
table     lists of visited tiles, see `foci.backends.gpu.tile_table_kernels`
"""

from typing import Any, NamedTuple

import triton.language as tl

from foci.backends.gpu.tiles import FORCED, decode, read_task_record, sequence
from foci.compat.jit import triton_jit

__all__ = ["PackedMask", "cover_keys", "mark_keys", "order_tasks", "pack_masks", "pack_queries"]


class PackedMask(NamedTuple):
    """Mask bits of the partial tiles of lists."""

    words: Any  # int32 [rows of the lists, entries of a list, c.TILE_Q, 4]
    # int32 zeros [rows of the lists, c.TILE_Q // 64, 2]: the number of partial tiles from the first with a set bit on, and the number up to
    # the last one. 64 rows skip the others
    limits: Any


class RowsPlace(NamedTuple):
    """Which rows of which task a program takes."""

    part: Any  # which 64 rows of the tile
    row: Any  # row of the tile table
    task: Any  # number of the task in its head
    b: Any  # batch entry of the lists
    h: Any  # head of the lists


@triton_jit
def find_place(size, heads, TILE: tl.constexpr):
    """`RowsPlace` of this program."""
    part = tl.program_id(0) % (TILE // 64)
    row = tl.program_id(0) // (TILE // 64)
    task = row % decode(size.tasks)
    line = row // decode(size.tasks)
    b = line // decode(heads)
    return RowsPlace(part, row, task, b, line - b * decode(heads))


@triton_jit
def pack_words(keep, column, COLUMNS: tl.constexpr):
    """Pack a [64, COLUMNS] mask into four words for each row."""
    bits = keep.to(tl.int32) << (column // 8 * 2 + column % 2)
    return tl.sum(tl.sum(bits.reshape(64, COLUMNS // 8, 4, 2), 3), 1)


@triton_jit
def mark_keys(keys, table, size, spans, env, heads, c, mask: tl.constexpr, SPLIT: tl.constexpr):
    """Mark the keys of a task's visited tiles: 1 if any row attends to the key, 3 if all do. Each of SPLIT programs takes every SPLIT-th
    tile.

    keys: int8 zeros [rows of the lists, entries of a list, c.TILE_KV]. Others as for `pack_masks`.
    """
    program = find_place(size, heads, 64)
    row, h = program.row, program.h
    b, tile = read_task_record(spans, program.b, program.task, c)
    if c.JAGGED:  # noqa: SIM102  known when the kernel is compiled
        if b < 0:
            return
    q_start, q_len, kv_start, kv_len = sequence(spans, size, b, c)
    counts = table.counts + row.to(tl.int64) * 4
    first = row.to(tl.int64) * decode(table.width)
    full = tl.load(counts)
    column = tl.arange(0, c.TILE_KV)
    for i in range(tl.program_id(1), full + tl.load(counts + 1), SPLIT):
        entry = tl.load(table.lists + first + i)
        kv_idx = entry * c.TILE_KV + column[None, :]
        some = tl.zeros([c.TILE_KV], tl.int32) + tl.where(i < full, 1, 0)
        every = tl.zeros([c.TILE_KV], tl.int32) + 1
        if i >= full:
            for part in range(0, c.TILE_Q, 64):
                q_idx = tile * c.TILE_Q + part + tl.arange(0, 64)[:, None]
                keep = mask(b, h, tl.minimum(q_idx, q_len - 1), tl.minimum(kv_idx, kv_len - 1), q_len, kv_len, env)
                keep = keep & (kv_idx < kv_len)
                some = tl.maximum(some, tl.max((keep & (q_idx < q_len)).to(tl.int32), 0))
                every = tl.minimum(every, tl.min((keep | (q_idx >= q_len)).to(tl.int32), 0))
        tl.store(keys + (first + entry) * c.TILE_KV + column, (some + 2 * every * some).to(tl.int8))


@triton_jit
def cover_keys(starts, counts, keys, table, size, spans, c, WIDTH: tl.constexpr, AHEAD: tl.constexpr):
    """Move a task's tiles: each begins at the first attended key after the tile before, if that takes fewer tiles. A run of keys that
    begins inside one aligned tile and ends inside another often needs one tile less.

    starts: int32, like the lists of the table, full tiles first. counts: int32 [rows of the lists, 4]. keys: from `mark_keys`. WIDTH: a
    power of two, at least the entries of a list. AHEAD: keys read together, at least c.TILE_KV.
    """
    row = tl.program_id(0)
    b, tile = read_task_record(spans, row * 0, row % decode(size.tasks), c)
    if c.JAGGED:  # noqa: SIM102  known when the kernel is compiled
        if b < 0:
            return
    q_start, q_len, kv_start, kv_len = sequence(spans, size, b, c)
    first = row.to(tl.int64) * decode(table.width)
    full = tl.load(table.counts + row.to(tl.int64) * 4)
    part = tl.load(table.counts + row.to(tl.int64) * 4 + 1)
    entry = tl.arange(0, WIDTH)
    begins = tl.load(table.lists + first + entry, mask=entry < full + part, other=0) * c.TILE_KV
    new_starts = tl.zeros([WIDTH], tl.int32)
    is_full = tl.zeros([WIDTH], tl.int32)
    at = tl.min(tl.where(entry < full + part, begins, kv_len), 0)
    column = tl.arange(0, AHEAD)
    n = 0
    # stop at as many tiles as before: no gain
    while (at < kv_len) & (n < full + part):
        marks = tl.load(keys + first * c.TILE_KV + at + column, mask=at + column < kv_len, other=0).to(tl.int32)
        ahead = tl.min(tl.where(marks > 0, column, AHEAD), 0)
        if ahead == 0:
            covers = tl.min(tl.where(column < c.TILE_KV, marks, 3), 0) == 3
            new_starts = tl.where(entry == n, at, new_starts)
            is_full = tl.where(entry == n, covers.to(tl.int32), is_full)
            n += 1
            at += c.TILE_KV
        else:
            at += ahead
    if n < full + part:
        partial = tl.where(entry < n, 1 - is_full, 0)
        place = tl.where(is_full > 0, tl.cumsum(is_full, 0) - 1, tl.sum(is_full, 0) + tl.cumsum(partial, 0) - 1)
        begins = new_starts
        full = tl.sum(is_full, 0)
        part = n - full
    else:
        place = entry
    tl.store(starts + first + place, begins, mask=entry < full + part)
    tl.store(counts + row.to(tl.int64) * 4, full)
    tl.store(counts + row.to(tl.int64) * 4 + 1, part)


@triton_jit
def order_tasks(order, counts, size, BLOCK: tl.constexpr):
    """Sort the tasks of each head of the lists by their number of tiles, most last, ties in order. A program ranks BLOCK of them.

    order: int32 [rows of the lists].
    """
    tasks = decode(size.tasks)
    first = tl.program_id(0).to(tl.int64) * tasks
    me = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = counts + (first + me) * 4
    mine = tl.load(here, mask=me < tasks, other=0) + tl.load(here + 1, mask=me < tasks, other=0)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, tasks, BLOCK):
        other = start + tl.arange(0, BLOCK)
        there = counts + (first + other) * 4
        theirs = tl.load(there, mask=other < tasks, other=0) + tl.load(there + 1, mask=other < tasks, other=0)
        less = (theirs[None, :] < mine[:, None]) | ((theirs[None, :] == mine[:, None]) & (other[None, :] < me[:, None]))
        before += tl.sum((less & (other[None, :] < tasks)).to(tl.int32), 1)
    tl.store(order + first + before, me, mask=me < tasks)


@triton_jit
def pack_masks(packed, table, size, spans, env, heads, c, mask: tl.constexpr, SPLIT: tl.constexpr, KEY_STARTS: tl.constexpr):
    """Pack the mask of a task's partial tiles, 64 rows each program. Each of SPLIT programs takes every SPLIT-th tile.

    packed: `PackedMask`, to fill.
    heads: heads of the lists, encoded.
    KEY_STARTS: the lists are those of `cover_keys`.
    """
    program = find_place(size, heads, c.TILE_Q)
    part, row, h = program.part, program.row, program.h
    b, tile = read_task_record(spans, program.b, program.task, c)
    if c.JAGGED:  # noqa: SIM102  known when the kernel is compiled
        if b < 0:
            return
    q_start, q_len, kv_start, kv_len = sequence(spans, size, b, c)
    counts = table.counts + row.to(tl.int64) * 4
    full = tl.load(counts)
    first = row.to(tl.int64) * decode(table.width) + full
    q_idx = tile * c.TILE_Q + part * 64 + tl.arange(0, 64)[:, None]
    column = tl.arange(0, c.TILE_KV)[None, :]
    at = (part * 64 + tl.arange(0, 64))[:, None] * 4 + tl.arange(0, 4)[None, :]
    partial = tl.load(counts + 1)
    limit = packed.limits + (row * (c.TILE_Q // 64) + part) * 2
    for i in range(tl.program_id(1), partial, SPLIT):
        entry = tl.load(table.lists + first + i)
        forced = entry < 0
        if c.BLOCKS:
            forced = entry >= FORCED
            entry = entry & (FORCED - 1)
        kv_idx = entry * (1 if KEY_STARTS else c.TILE_KV) + column
        keep = mask(b, h, tl.minimum(q_idx, q_len - 1), tl.minimum(kv_idx, kv_len - 1), q_len, kv_len, env)
        keep = (keep | forced) & (q_idx < q_len) & (kv_idx < kv_len)
        word = pack_words(keep, column, c.TILE_KV)
        tl.store(packed.words + (first + i) * (c.TILE_Q * 4) + at, word)
        some = tl.max(tl.max(keep.to(tl.int32), 1), 0) > 0
        tl.atomic_max(limit, partial - i, mask=some)
        tl.atomic_max(limit + 1, i + 1, mask=some)


@triton_jit
def pack_queries(words, table, size, spans, env, heads, c, mask: tl.constexpr, SPLIT: tl.constexpr):
    """Pack the mask of the partial query tiles that 64 keys of a tile visit; of all its query tiles if the tile overhangs the keys.

    words: [rows of the table, its width, c.TILE_KV, 4] of integers with c.TILE_Q / 4 bits. Others as for `pack_masks`.
    """
    program = find_place(size, heads, c.TILE_KV)
    part, row, task, b, h = program.part, program.row, program.task, program.b, program.h
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
            tile = tl.load(table.lists + row.to(tl.int64) * decode(table.width) + gap + i)
        q_idx = tile * c.TILE_Q + column
        keep = mask(b, h, tl.minimum(q_idx, q_len - 1), tl.minimum(kv_idx, kv_len - 1), q_len, kv_len, env)
        keep = keep & (q_idx < q_len) & (kv_idx < kv_len)
        word = pack_words(keep, column, c.TILE_Q)
        place = (row.to(tl.int64) * decode(table.width) + tile) * (c.TILE_KV * 4)
        tl.store(words + place + at, word.to(words.dtype.element_ty))
