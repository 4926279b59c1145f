# mypy: ignore-errors
"""Device functions that all kernels share: find a task, load tiles, dropout, packed sequences, visited tiles.

A task is a tile of queries, or of keys, of a head; `tile` is its number within the sequence. "b" is the batch entry or sequence that mask
and score functions see, "memory_b" the batch entry in memory, 0 for packed sequences.
"""

from typing import Any, NamedTuple

import triton.language as tl

from foci.compat.jit import triton_jit

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
HEAD_GROUP = tl.constexpr(8)
GRADIENT_GROUP = tl.constexpr(2)
FORCED = tl.constexpr(1 << 30)
FAR = tl.constexpr(1 << 30)
"""Rows that the descriptor of packed sequences declares, see `tensor_descriptors.packed_dims`."""
RECORD = tl.constexpr(8)
"""int32 numbers of a task record of packed sequences, see `tile_table_kernels.assign_tasks`."""
TICKETS = tl.constexpr(2)
"""Index of the ticket counter in the first record: tasks that persistent programs took besides their first. 0 between kernels."""


class HeadRows(NamedTuple):
    """Rows of one head that belong to one sequence, in memory."""

    b: Any  # batch entry in memory
    h: Any  # head
    start: Any  # first row of the sequence
    length: Any  # rows of the sequence


class KeysValues(NamedTuple):
    """Keys and values in memory: pointers, or tensor descriptors."""

    k: Any
    v: Any


class PackedRows(NamedTuple):
    """Rows of a head of packed sequences, in memory; between sequences there may be gaps."""

    starts: Any  # first row of each sequence
    lengths: Any
    sequences: Any  # their number, encoded
    count: Any  # all rows


class Place(NamedTuple):
    """Place of a task, see `find_task`."""

    b: Any  # batch entry or sequence that mask and score functions see; < 0 for a spare task
    memory_b: Any  # batch entry in memory
    h: Any  # head
    task: Any  # number of the task in its head
    tile: Any  # number of the tile in its sequence; of a spare task, its number among those


class Position(NamedTuple):
    """Coordinates of a tile of scores, as mask and score functions take them; they broadcast together."""

    b: Any  # batch entry or sequence
    h: Any  # query head
    q_idx: Any
    kv_idx: Any
    q_len: Any
    kv_len: Any
    tile: Any  # number of the tile, which carries the flag FORCED where the caller's blocks attend to all of it


class TaskTiles(NamedTuple):
    """Tiles that a task visits, see `tile_runs`."""

    row: Any  # row of the tile table
    full_first: Any  # first full tile; with MODE "lists" its index in the row's list
    full: Any  # number of full tiles
    part_first: Any  # first partial tile, or its index
    before: Any  # partial tiles before the gap
    gap: Any  # tiles that partial ones skip
    part: Any  # number of partial tiles


class TileRun(NamedTuple):
    """Tiles that a loop visits, see `nth_visited`."""

    row: Any  # row of the tile table
    first: Any  # first tile; with MODE "lists" its index in the row's list
    before: Any  # tiles before the gap
    gap: Any  # tiles in the gap
    low: Any  # the loop counts visited tiles from low to high
    high: Any


@triton_jit
def decode(x):
    """Inverse of `kernel_args.encode`."""
    return x >> 2


@triton_jit
def nth_head_task(n, heads, tasks, TOGETHER: tl.constexpr):
    """(head, task) of the n-th program. Heads come in groups of TOGETHER, whose tasks alternate, so that their keys stay in L2."""
    group = n // (TOGETHER * tasks)
    within = n - group * TOGETHER * tasks
    members = tl.minimum(TOGETHER, heads - group * TOGETHER)
    task = within // members
    return group * TOGETHER + within - task * members, task


@triton_jit
def nth_place(n, size, LONGEST_FIRST: tl.constexpr, TOGETHER: tl.constexpr):
    """(batch entry, head, task) of the n-th program, see `nth_head_task`. LONGEST_FIRST: last tiles first, the longest under a causal
    mask."""
    tasks = decode(size.tasks)
    bh, task = nth_head_task(n, decode(size.batch) * decode(size.heads), tasks, TOGETHER)
    b = bh // decode(size.heads)
    h = bh - b * decode(size.heads)
    if LONGEST_FIRST:
        task = tasks - 1 - task
    return b, h, task


@triton_jit
def nth_packed_place(n, size, spans, TOGETHER: tl.constexpr):
    """(head, task) of the n-th program of a packed call. With `spans.together` all heads alternate, because whole rows of tokens load
    faster than parts of many rows; else groups of TOGETHER."""
    heads = decode(size.heads)
    if decode(spans.together) > 0:
        task = n // heads
        h = n - task * heads
    else:
        b, h, task = nth_place(n, size, False, TOGETHER)
    return h, task


@triton_jit
def find_task(size, spans, c, LONGEST_FIRST: tl.constexpr):
    """`find_nth_task` of this program."""
    return find_nth_task(tl.program_id(0), size, spans, c, LONGEST_FIRST)


@triton_jit
def find_for_gradient(size, spans, c, LONGEST_FIRST: tl.constexpr):
    """`find_task` for the backward: it streams twice as much, so L2 holds fewer heads."""
    return find_task_among(tl.program_id(0), size, spans, c, LONGEST_FIRST, GRADIENT_GROUP)


@triton_jit
def find_nth_task(n, size, spans, c, LONGEST_FIRST: tl.constexpr):
    """`Place` of the n-th program."""
    return find_task_among(n, size, spans, c, LONGEST_FIRST, HEAD_GROUP)


@triton_jit
def read_task_record(spans, b, task, c):
    """(batch entry, tile) of a task: from its record if packed, with b < 0 for a spare one; else (b, task)."""
    if c.JAGGED:
        return tl.load(spans.tasks + RECORD * task), tl.load(spans.tasks + RECORD * task + 1)
    else:
        return b, task


@triton_jit
def find_task_among(n, size, spans, c, LONGEST_FIRST: tl.constexpr, TOGETHER: tl.constexpr):
    """`find_nth_task` with TOGETHER heads alternating. Packed tasks are sorted already."""
    if c.JAGGED:
        h, task = nth_packed_place(n, size, spans, TOGETHER)
        b, tile = read_task_record(spans, h, task, c)
        return Place(b, h * 0, h, task, tile)
    else:
        b, h, task = nth_place(n, size, LONGEST_FIRST, TOGETHER)
        return Place(b, b, h, task, task)


@triton_jit
def rows_pointer(base, strides, b, h, first, c):
    """Pointer to row `first` of head h of batch entry b, in 64 bits."""
    offset = b.to(tl.int64) * (decode(strides.b) * c.UNIT) + h.to(tl.int64) * (decode(strides.h) * c.UNIT)
    return base + (offset + first.to(tl.int64) * (decode(strides.s) * c.UNIT))


@triton_jit
def tile_offsets(strides, c, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Offsets of a [ROWS, COLS] tile from its first element."""
    return row_offsets(tl.arange(0, ROWS), strides, c, COLS)


@triton_jit
def row_offsets(rows, strides, c, COLS: tl.constexpr):
    """Offsets of the first COLS elements of `rows`."""
    row = rows[:, None]
    col = tl.arange(0, COLS)[None, :]
    if c.WIDE:
        row = row.to(tl.int64)
        col = col.to(tl.int64)
    if c.UNIT == 1:
        return row * decode(strides.s) + col * decode(strides.d)
    else:
        return row * (decode(strides.s) * c.UNIT) + col


@triton_jit
def load_tile(pointer, offsets, limit, CHECK: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, COLS: tl.constexpr):
    """Load a [ROWS, COLS] tile; 0 beyond DIM columns, and with CHECK beyond `limit` rows."""
    if CHECK:
        rows = tl.arange(0, ROWS)[:, None] < limit
        if DIM == COLS:
            return tl.load(pointer + offsets, mask=rows, other=0.0)
        else:
            return tl.load(pointer + offsets, mask=rows & (tl.arange(0, COLS)[None, :] < DIM), other=0.0)
    else:
        if DIM == COLS:
            return tl.load(pointer + offsets)
        else:
            return tl.load(pointer + offsets, mask=tl.arange(0, COLS)[None, :] < DIM, other=0.0)


@triton_jit
def load_streamed_tile(source, strides, head, first, c, EDGE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, COLS: tl.constexpr):
    """Load rows first .. first + ROWS of a sequence; `head`: its `HeadRows`. Rows past its end are 0 with EDGE, and always with a
    descriptor, see `tensor_descriptors.packed_dims`."""
    if c.DESCRIPTORS and c.JAGGED:
        return source.load([FAR, head.start + head.length, head.h, FAR - head.length + first, 0]).reshape(ROWS, COLS)
    elif c.DESCRIPTORS:
        return source.load([head.b, head.h, head.start + first, 0]).reshape(ROWS, COLS)
    else:
        pointer = rows_pointer(source, strides, head.b, head.h, head.start + first, c)
        return load_tile(pointer, tile_offsets(strides, c, ROWS, COLS), head.length - first, EDGE, ROWS, DIM, COLS)


@triton_jit
def affine_columns(start, slope, COUNT: tl.constexpr):
    """start + slope * column at COUNT columns, `start` given at columns 0, 2, 4 and 6, where the four lanes of a row begin. A thread's
    columns are constants relative to those, so each costs one operation."""
    column = 8 * tl.arange(0, COUNT // 8)[:, None, None] + tl.arange(0, 2)[None, None, :]
    return tl.reshape(start[None, :, None] + column.to(tl.float32) * slope, [COUNT])


@triton_jit
def affine_line(b, h, first, q_len, kv_len, numbers, env, line: tl.constexpr):
    """Affine score function at query and key `first`: (start for `affine_columns`, slope per key, slope per query). The first two are
    divided by the scale, so that they can be added to q k^T."""
    start, kv_slope, q_slope = line(b, h, first, first + 2 * tl.arange(0, 4), q_len, kv_len, env)
    return start / numbers.scale, kv_slope / numbers.scale, q_slope


@triton_jit
def product(q, keys, distance, affine, c):
    """q k^T of a tile of keys. An affine score function is the initial accumulator; `distance`: the tile's first key from where it
    starts."""
    if c.AFFINE:
        start, slope = affine
        seed = affine_columns(start + distance.to(tl.float32) * slope, slope, c.TILE_KV)
        return tl.dot(q, tl.trans(keys), tl.broadcast_to(seed[None, :], [c.TILE_Q, c.TILE_KV]), input_precision=c.PRECISION)
    else:
        return tl.dot(q, tl.trans(keys), input_precision=c.PRECISION)


@triton_jit
def wide_product(a, factor: tl.constexpr):
    """(upper word, lower word) of a 32 x 32-bit product."""
    product = a.to(tl.uint64) * factor
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton_jit
def random_words(key, quad, row, h, b):
    """Four words of Philox4x32-7 at counter (quad, row, h, b). Values are broadcast to a tile only once they depend on row and column."""
    k0, k1 = key
    c0 = quad.to(tl.uint32)
    c1 = row.to(tl.uint32)
    c2 = h.to(tl.uint32)
    c3 = b.to(tl.uint32)
    for _ in tl.static_range(7):
        upper0, lower0 = wide_product(c0, 0xD2511F53)
        upper1, lower1 = wide_product(c2, 0xCD9E8D57)
        c0 = upper1 ^ c1 ^ k0
        c1 = lower1
        c2 = upper0 ^ c3 ^ k1
        c3 = lower0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton_jit
def keep_tile(numbers, b, h, q_idx, kv_first, KV: tl.constexpr):
    """Which weights of a [Q, KV] tile dropout keeps: Philox4x32-7 of (kv // 4, q, h, b), word kv % 4."""
    seed = tl.load(numbers.seed)
    quad = kv_first // 4 + tl.arange(0, KV // 4)[None, :]
    w0, w1, w2, w3 = random_words((seed.to(tl.uint32), (seed >> 32).to(tl.uint32)), quad, q_idx, h, b)
    least = ((numbers.threshold - (1 << 40)) >> 5).to(tl.uint32)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(q_idx.shape[0], KV)
    return words >= least


@triton_jit
def sequence(spans, size, b, c):
    """(q_start, q_len, kv_start, kv_len) of a batch entry or sequence."""
    if c.JAGGED:
        return tl.load(spans.q_start + b), tl.load(spans.q_length + b), tl.load(spans.kv_start + b), tl.load(spans.kv_length + b)
    elif spans.kv_length is not None:
        return b * 0, decode(size.rows), b * 0, tl.minimum(tl.load(spans.kv_length + b), decode(size.columns)).to(tl.int32)
    else:
        return b * 0, decode(size.rows), b * 0, decode(size.columns)


@triton_jit
def sequence_at(spans, size, b, task, c):
    """`sequence` of a task. Packed, it is in the task record, which needs no load of b first; that of a spare task is undefined."""
    if c.JAGGED:
        record = spans.tasks + RECORD * task
        return tl.load(record + 2), tl.load(record + 3), tl.load(record + 4), tl.load(record + 5)
    else:
        return sequence(spans, size, b, c)


@triton_jit
def sequence_gap(starts, lengths, count, i, rows):
    """Rows between sequence i - 1 and sequence i as (first, end); i = count is the gap after the last sequence."""
    low = tl.load(starts + i - 1, mask=i > 0, other=0) + tl.load(lengths + i - 1, mask=i > 0, other=0)
    return low, tl.where(i < count, tl.load(starts + i, mask=i < count, other=0), rows)


@triton_jit
def widest_gap(starts, lengths, count, first, rows, CHUNK: tl.constexpr):
    """Rows of the widest of CHUNK gaps from gap `first` on."""
    i = first + tl.arange(0, CHUNK)
    low = tl.load(starts + i - 1, mask=(i > 0) & (i <= count), other=0) + tl.load(lengths + i - 1, mask=(i > 0) & (i <= count), other=0)
    high = tl.where(i < count, tl.load(starts + i, mask=i < count, other=0), rows)
    return tl.max(tl.where(i <= count, high - low, 0), 0)


@triton_jit
def clear_gaps(target, strides, packed, b, h, c, ROWS: tl.constexpr, DIM: tl.constexpr, COLS: tl.constexpr):
    """Zero the rows of a head that belong to no sequence. A spare task does this; usually there are none. `packed`: `PackedRows`."""
    starts, lengths, rows = packed.starts, packed.lengths, packed.count
    count = decode(packed.sequences)
    offsets = tile_offsets(strides, c, ROWS, COLS)
    zeros = tl.zeros([ROWS, COLS], target.dtype.element_ty)
    for chunk in range(0, count + 1, 128):
        if widest_gap(starts, lengths, count, chunk, rows, 128) > 0:
            for i in range(chunk, tl.minimum(chunk + 128, count + 1)):
                low, high = sequence_gap(starts, lengths, count, i, rows)
                for first in range(low, high, ROWS):
                    inside = (tl.arange(0, ROWS)[:, None] < high - first) & (tl.arange(0, COLS)[None, :] < DIM)
                    tl.store(rows_pointer(target, strides, b, h, low * 0 + first, c) + offsets, zeros, mask=inside)


@triton_jit
def fill_gaps(target, packed, value, ROWS: tl.constexpr):
    """Fill the rows that belong to no sequence, of a tensor with one value a row. `packed`: `PackedRows`."""
    starts, lengths, rows = packed.starts, packed.lengths, packed.count
    count = decode(packed.sequences)
    for chunk in range(0, count + 1, 128):
        if widest_gap(starts, lengths, count, chunk, rows, 128) > 0:
            for i in range(chunk, tl.minimum(chunk + 128, count + 1)):
                low, high = sequence_gap(starts, lengths, count, i, rows)
                for first in range(low, high, ROWS):
                    at = first + tl.arange(0, ROWS)
                    tl.store(target + at, tl.zeros([ROWS], tl.float32) + value, mask=at < high)


@triton_jit
def tile_runs(table, b, h, task, length, c, TILE: tl.constexpr):
    """`TaskTiles` of a task."""
    if c.MODE == "all":
        full = length // TILE
        return TaskTiles(task, full * 0, full, full, full * 0, full * 0, tl.cdiv(length, TILE) - full)
    elif c.MODE == "every":
        count = tl.cdiv(length, TILE)
        return TaskTiles(task, count * 0, count * 0, count * 0, count, count * 0, count)
    else:
        row = (b * decode(table.b_stride) + h * decode(table.h_stride) + task).to(tl.int64)
        counts = table.counts + row * 4
        if c.MODE == "ranges":
            p0 = tl.load(counts)
            f0 = tl.load(counts + 1)
            f1 = tl.load(counts + 2)
            p1 = tl.load(counts + 3)
            return TaskTiles(row, f0, f1 - f0, p0, f0 - p0, f1 - f0, (f0 - p0) + (p1 - f1))
        else:
            full = tl.load(counts)
            return TaskTiles(row, full * 0, full, full, full * 0, full * 0, tl.load(counts + 1))


@triton_jit
def every_tile(tiles, c):
    """All tiles of a task as one `TileRun`. `tiles`: its `TaskTiles`."""
    count = tiles.full + tiles.part
    return TileRun(tiles.row, tiles.part_first if c.MODE == "ranges" else tiles.full_first, count, count * 0, count * 0, count)


@triton_jit
def nth_visited(table, row, i, first, before, gap, c):
    """The i-th tile of a run; after `before` tiles it skips `gap` tiles."""
    if c.MODE == "lists":
        return tl.load(table.lists + row * decode(table.width) + first + i)
    else:
        return first + i + tl.where(i >= before, gap, 0)


@triton_jit
def tile_start(tile, c, TILE: tl.constexpr):
    """First row of a tile that `nth_visited` returned."""
    if c.BLOCKS:
        tile = tile & (FORCED - 1)
    return tile * TILE
