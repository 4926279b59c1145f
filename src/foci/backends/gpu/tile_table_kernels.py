# mypy: ignore-errors
"""Kernels that build tile tables on the device, without synchronisation: which tiles each task visits.

A tile of the score matrix is EMPTY, PARTIAL or FULL (`foci.blocks`). MODE "lists": each task has a list of its tiles, full ones first, and
their counts. MODE "ranges", if the mask keeps one interval of keys for each query and the reverse: four numbers (p0, f0, f1, p1); tiles
from p0 to p1 are visited, of which f0 to f1 are full.
"""

from typing import NamedTuple

import triton.language as tl

from foci.backends.gpu.tiles import FORCED, RECORD, TICKETS, decode, read_task_record, sequence_at
from foci.compat.jit import triton_jit

EMPTY = tl.constexpr(0)
PARTIAL = tl.constexpr(1)
FULL = tl.constexpr(2)


class TileGrid(NamedTuple):
    """Tiles that are classified, and the layout of the classes of the caller's blocks; encoded."""

    heads: int
    tasks: int  # of a head
    width: int  # tiles of a task
    blocks_b: int  # strides of the blocks' classes
    blocks_h: int
    blocks_width: int
    per_q: int  # tiles of a block of queries
    per_kv: int  # tiles of a block of keys


class ListShape(NamedTuple):
    """Tiles that are listed; encoded."""

    heads: int
    width: int  # streamed tiles
    list_width: int  # numbers of a list
    tile: int  # rows of a streamed tile
    is_by_query: int  # whether keys stream


class ClassGrid(NamedTuple):
    """Layout of the classes that a list is made of; encoded."""

    area: int  # classes of a head
    lines: int  # lines of a head
    step: int  # stride of lines
    stride: int  # stride of columns
    per_task: int  # lines of a task
    per_tile: int  # columns of a streamed tile
    columns: int


@triton_jit
def classify_tiles(classes, block_classes, size, spans, env, grid, c, mask: tl.constexpr, KEYS: tl.constexpr):
    """Classify each tile by evaluating the mask. Where `block_classes` of larger blocks are given, only their PARTIAL ones are evaluated.

    One program per tile.

    classes: int8 [batch, heads, tasks, width].
    grid: `TileGrid`.
    KEYS: tasks are tiles of queries and columns are tiles of keys; else the reverse.
    """
    pid = tl.program_id(0).to(tl.int64)
    column = (pid % decode(grid.width)).to(tl.int32)
    line = pid // decode(grid.width)
    task = (line % decode(grid.tasks)).to(tl.int32)
    bh = line // decode(grid.tasks)
    h = (bh % decode(grid.heads)).to(tl.int32)
    b = (bh // decode(grid.heads)).to(tl.int32)
    b, tile = read_task_record(spans, b, task, c)
    if c.JAGGED:  # noqa: SIM102  known when the kernel is compiled
        if b < 0:
            return
    q_tile = tile if KEYS else column
    kv_tile = column if KEYS else tile
    q_start, q_len, kv_start, kv_len = sequence_at(spans, size, b, task, c)
    tile_class = PARTIAL + 0 * column
    if block_classes is not None:
        block = (q_tile // decode(grid.per_q)) * decode(grid.blocks_width) + kv_tile // decode(grid.per_kv)
        tile_class = tl.load(block_classes + b * decode(grid.blocks_b) + h * decode(grid.blocks_h) + block).to(tl.int32)
    if tile_class == PARTIAL:
        # few rows at a time, so that little code is compiled. tl.arange needs powers of two, and a tile of 192 keys is none
        ROWS: tl.constexpr = 16
        KEYS_AT_ONCE: tl.constexpr = c.TILE_KV & -c.TILE_KV
        attended = tl.zeros([ROWS, KEYS_AT_ONCE], tl.int32)
        existing = tl.zeros([ROWS, KEYS_AT_ONCE], tl.int32)
        for i in range(0, c.TILE_Q, ROWS):
            for j in range(0, c.TILE_KV, KEYS_AT_ONCE):
                q_idx = q_tile * c.TILE_Q + i + tl.arange(0, ROWS)[:, None]
                kv_idx = kv_tile * c.TILE_KV + j + tl.arange(0, KEYS_AT_ONCE)[None, :]
                inside = (q_idx < q_len) & (kv_idx < kv_len)
                keep = mask(b, h, tl.minimum(q_idx, q_len - 1), tl.minimum(kv_idx, kv_len - 1), q_len, kv_len, env)
                attended += (inside & keep).to(tl.int32)
                existing += inside.to(tl.int32)
        kept = tl.sum(tl.sum(attended, 1), 0)
        tile_class = tl.where(kept == 0, EMPTY, tl.where(kept == tl.sum(tl.sum(existing, 1), 0), FULL, PARTIAL))
    tile_class = tl.where((q_tile * c.TILE_Q >= q_len) | (kv_tile * c.TILE_KV >= kv_len), EMPTY, tile_class)
    tl.store(classes + pid, tile_class.to(tl.int8))


@triton_jit
def reduce_classes(row, at, width, lines, grid):
    """(whether any class within tiles `at` of a task is not EMPTY, whether all are FULL); both false past the last tile. `grid`:
    `ClassGrid`."""
    any_kept = at < 0
    all_full = (at >= 0) & (at < width)
    for i in range(0, tl.minimum(decode(grid.per_task), lines)):
        for j in range(0, decode(grid.per_tile)):
            column = at * decode(grid.per_tile) + j
            pointer = row + i * decode(grid.step) + column.to(tl.int64) * decode(grid.stride)
            tile_class = tl.load(pointer, mask=column < decode(grid.columns), other=0).to(tl.int32)
            any_kept = any_kept | (tile_class != EMPTY)
            all_full = all_full & ((tile_class == FULL) | (column >= decode(grid.columns)))
    return any_kept, all_full


@triton_jit
def list_tiles(classes, counts, lists, size, spans, shape, grid, c, CHUNK: tl.constexpr):
    """Build the list or range of each task from classes. A tile that overhangs the streamed side is never full.

    A class may be of a smaller tile than a task or a streamed tile has: a task then spans several lines of classes, a streamed tile several
    columns.

    shape: `ListShape`.
    grid: `ClassGrid`.
    """
    width = shape.width
    pid = tl.program_id(0).to(tl.int64)
    task = pid % decode(size.tasks)
    bh = pid // decode(size.tasks)
    b = (bh // decode(shape.heads)).to(tl.int32)
    if c.JAGGED:
        b = tl.load(spans.tasks + RECORD * task)
        if b < 0:
            return
    q_start, q_len, kv_start, kv_len = sequence_at(spans, size, b, task, c)
    complete = tl.where(decode(shape.is_by_query) > 0, kv_len, q_len) // decode(shape.tile)
    first_line = task * decode(grid.per_task)
    row = classes + bh * decode(grid.area) + first_line * decode(grid.step)
    left = (decode(grid.lines) - first_line).to(tl.int32)
    full = 0
    first = 1 << 30
    last = 0
    full_first = 1 << 30
    full_last = 0
    for start in range(0, decode(width), CHUNK):
        at = start + tl.arange(0, CHUNK)
        any_kept, all_full = reduce_classes(row, at, decode(width), left, grid)
        is_full = all_full & (at < complete)
        full += tl.sum(is_full.to(tl.int32), 0)
        first = tl.minimum(first, tl.min(tl.where(any_kept, at, 1 << 30), 0))
        last = tl.maximum(last, tl.max(tl.where(any_kept, at + 1, 0), 0))
        full_first = tl.minimum(full_first, tl.min(tl.where(is_full, at, 1 << 30), 0))
        full_last = tl.maximum(full_last, tl.max(tl.where(is_full, at + 1, 0), 0))
    if c.MODE == "ranges":
        first = tl.minimum(first, last)
        tl.store(counts + pid * 4, first)
        tl.store(counts + pid * 4 + 1, tl.where(full > 0, full_first, first))
        tl.store(counts + pid * 4 + 2, tl.where(full > 0, full_last, first))
        tl.store(counts + pid * 4 + 3, last)
    else:
        out = lists + pid * decode(shape.list_width)
        fulls = 0
        parts = full
        for start in range(0, decode(width), CHUNK):
            at = start + tl.arange(0, CHUNK)
            any_kept, all_full = reduce_classes(row, at, decode(width), left, grid)
            is_full = (all_full & (at < complete)).to(tl.int32)
            is_part = tl.where(any_kept, 1 - is_full, 0)
            entry = at
            if c.BLOCKS:
                entry = at + tl.where(all_full, FORCED, 0)
            tl.store(out + fulls + tl.cumsum(is_full, 0) - 1, entry, mask=is_full == 1)
            tl.store(out + parts + tl.cumsum(is_part, 0) - 1, entry, mask=is_part == 1)
            fulls += tl.sum(is_full, 0)
            parts += tl.sum(is_part, 0)
        tl.store(out + parts, 0)
        tl.store(counts + pid * 4, full)
        tl.store(counts + pid * 4 + 1, parts - full)


@triton_jit
def place_sequences(ends, given_lengths, starts, lengths, sequences, BLOCK: tl.constexpr):
    """Starts and lengths of packed sequences, int32, from cumulative lengths `ends`; lengths from `given_lengths` unless None."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < decode(sequences)
    start = tl.load(ends + i, mask=inside, other=0).to(tl.int32)
    length = start
    if given_lengths is not None:
        length = tl.load(given_lengths + i, mask=inside, other=0).to(tl.int32)
    else:
        length = tl.load(ends + i + 1, mask=inside, other=0).to(tl.int32) - start
    tl.store(starts + i, start, mask=inside)
    tl.store(lengths + i, length, mask=inside)


@triton_jit
def count_before(counts, works, work, is_earlier):
    """Number of tasks before each of `work`: those of more work, or of as much and earlier. `counts` tasks have each of `works`."""
    ahead = (works[None, :] > work[:, None]) | ((works[None, :] == work[:, None]) & is_earlier)
    return tl.sum(tl.where(ahead, counts[None, :], 0), 1)


@triton_jit
def count_work(lengths, stream_lengths, TILE: tl.constexpr, OTHER: tl.constexpr):
    """(full-height tiles of each sequence, work of one, shorter tiles: 0 or 1, its work). A tile takes as much work as its blocks of 64
    rows, plus one, for each OTHER of `stream_lengths`. OTHER = 0: all tiles count as full-height, and work is the length."""
    count = (lengths + TILE - 1) // TILE
    if OTHER == 0:
        return count, lengths, count * 0, count * 0
    else:
        parts = (lengths % TILE + 63) // 64
        short = ((parts > 0) & (parts < TILE // 64)).to(tl.int32)
        steps = (stream_lengths + OTHER - 1) // OTHER
        return count - short, steps * (1 + TILE // 64), short, steps * (1 + parts)


@triton_jit
def assign_tasks(
    tasks, lengths, stream_lengths, places, sequences, total,
    TILE: tl.constexpr, OTHER: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sort the tasks of a packed call by work, most first (`count_work`), and write their records: (sequence, tile, q_start, q_len,
    kv_start, kv_len, ...). The first record and those left over are spare, (-1, n); the first also holds the ticket counter, 0.

    A program places the tasks of BLOCK sequences. A sequence has full-height tiles, all of the same work, and at most one shorter tile, of
    less work. Full-height tiles come after all tasks of more work, and after tasks of the same work of earlier sequences. The same rule
    places the shorter tile. The first program marks the spare records. There are `total` records, as many as the caller's bound on the
    lengths needs; if the bound is too small, the tasks of least work get no record.
    """
    n = decode(sequences)
    me = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths + me, mask=me < n, other=0)
    q_start, q_length, kv_start, kv_length = places
    q_first = tl.load(q_start + me, mask=me < n, other=0)
    q_count = tl.load(q_length + me, mask=me < n, other=0)
    kv_first = tl.load(kv_start + me, mask=me < n, other=0)
    kv_count = tl.load(kv_length + me, mask=me < n, other=0)
    full_tiles, work, short, short_work = count_work(length, tl.load(stream_lengths + me, mask=me < n, other=0), TILE, OTHER)
    full_at = tl.zeros([BLOCK], tl.int32) + 1
    short_at = full_at
    used = 1
    for start in range(0, n, CHUNK):
        other = start + tl.arange(0, CHUNK)
        other_length = tl.load(lengths + other, mask=other < n, other=0)
        other_full, other_work, other_short, other_short_work = count_work(
            other_length, tl.load(stream_lengths + other, mask=other < n, other=0), TILE, OTHER
        )
        used += tl.sum(other_full + other_short, 0)
        is_earlier = other[None, :] < me[:, None]
        full_at += count_before(other_full, other_work, work, is_earlier)
        if OTHER > 0:
            full_at += count_before(other_short, other_short_work, work, is_earlier)
            short_at += count_before(other_full, other_work, short_work, other[None, :] <= me[:, None])
            short_at += count_before(other_short, other_short_work, short_work, is_earlier)
    most = tl.max(full_tiles + short, 0)
    for i in range(0, most):
        # last tile first: under a causal mask it is the longest
        is_short = i >= full_tiles
        at = tl.where(is_short, short_at, full_at + i)
        record = tasks + RECORD * at
        inside = (i < full_tiles + short) & (at < decode(total))
        tl.store(record, me, mask=inside)
        tl.store(record + 1, tl.where(is_short, full_tiles, full_tiles - 1 - i), mask=inside)
        tl.store(record + 2, q_first, mask=inside)
        tl.store(record + 3, q_count, mask=inside)
        tl.store(record + 4, kv_first, mask=inside)
        tl.store(record + 5, kv_count, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(tasks, -1)
        tl.store(tasks + 1, 0)
        tl.store(tasks + TICKETS, 0)
        for start in range(used, decode(total), CHUNK):
            spare = start + tl.arange(0, CHUNK)
            tl.store(tasks + RECORD * spare, -1, mask=spare < decode(total))
            tl.store(tasks + RECORD * spare + 1, spare - used + 1, mask=spare < decode(total))
