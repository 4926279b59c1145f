# mypy: ignore-errors
"""Which tiles each task visits, found on the device without synchronisation.

A tile of the score matrix is EMPTY, PARTIAL or FULL (`foci.blocks`). Every task gets either a list of its tiles, full
ones first, or, where the mask attends to an interval of keys for each query (and the reverse), four numbers: partial
tiles run from p0 to p1 except the full ones from f0 to f1.
"""

import triton
import triton.language as tl

from foci.backends.triton.tiles import FORCED, RECORD, TICKETS, decode, read_task_record, sequence_at

EMPTY = tl.constexpr(0)
PARTIAL = tl.constexpr(1)
FULL = tl.constexpr(2)


@triton.jit
def classify_tiles(classes, given, size, spans, env, shape, c, mask: tl.constexpr, KEYS: tl.constexpr):
    """Class of each tile by evaluating the mask; `given` classes of larger blocks decide first, where there are any.

    classes: int8 [batch, heads, tasks, width]. `shape` is (heads, tasks, width, b and h stride and width of `given`, tiles per given
    block of queries and of keys), encoded. KEYS: tasks are tiles of queries and keys stream by; otherwise the reverse.
    One program for each tile.
    """
    heads, tasks, width, given_b, given_h, given_width, per_q, per_kv = shape
    pid = tl.program_id(0).to(tl.int64)
    column = (pid % decode(width)).to(tl.int32)
    line = pid // decode(width)
    task = (line % decode(tasks)).to(tl.int32)
    bh = line // decode(tasks)
    h = (bh % decode(heads)).to(tl.int32)
    b = (bh // decode(heads)).to(tl.int32)
    b, tile = read_task_record(spans, b, task, c)
    if c.JAGGED:  # noqa: SIM102  known when the kernel is compiled
        if b < 0:
            return
    q_tile = tile if KEYS else column
    kv_tile = column if KEYS else tile
    q_start, q_len, kv_start, kv_len = sequence_at(spans, size, b, task, c)
    known = PARTIAL + 0 * column
    if given is not None:
        block = (q_tile // decode(per_q)) * decode(given_width) + kv_tile // decode(per_kv)
        known = tl.load(given + b * decode(given_b) + h * decode(given_h) + block).to(tl.int32)
    if known == PARTIAL:
        # a few rows at a time: code of few instructions compiles sooner. Ranges are powers of two, a tile of 192 keys is not
        ROWS: tl.constexpr = 16
        KEYS_AT_ONCE: tl.constexpr = c.TILE_KV & -c.TILE_KV
        attended = tl.zeros([ROWS, KEYS_AT_ONCE], tl.int32)
        there = tl.zeros([ROWS, KEYS_AT_ONCE], tl.int32)
        for i in range(0, c.TILE_Q, ROWS):
            for j in range(0, c.TILE_KV, KEYS_AT_ONCE):
                q_idx = q_tile * c.TILE_Q + i + tl.arange(0, ROWS)[:, None]
                kv_idx = kv_tile * c.TILE_KV + j + tl.arange(0, KEYS_AT_ONCE)[None, :]
                inside = (q_idx < q_len) & (kv_idx < kv_len)
                keep = mask(b, h, tl.minimum(q_idx, q_len - 1), tl.minimum(kv_idx, kv_len - 1), q_len, kv_len, env)
                attended += (inside & keep).to(tl.int32)
                there += inside.to(tl.int32)
        kept = tl.sum(tl.sum(attended, 1), 0)
        known = tl.where(kept == 0, EMPTY, tl.where(kept == tl.sum(tl.sum(there, 1), 0), FULL, PARTIAL))
    known = tl.where((q_tile * c.TILE_Q >= q_len) | (kv_tile * c.TILE_KV >= kv_len), EMPTY, known)
    tl.store(classes + pid, known.to(tl.int8))


@triton.jit
def reduce_classes(row, at, width, lines, shape):
    """(whether any, whether all) classes within tiles `at` of a task are other than EMPTY, and FULL; neither beyond the last."""
    step, stride, per_task, per_tile, columns = shape
    some = at < 0
    whole = (at >= 0) & (at < width)
    for i in range(0, tl.minimum(decode(per_task), lines)):
        for j in range(0, decode(per_tile)):
            column = at * decode(per_tile) + j
            lies = row + i * decode(step) + column.to(tl.int64) * decode(stride)
            known = tl.load(lies, mask=column < decode(columns), other=0).to(tl.int32)
            some = some | (known != EMPTY)
            whole = whole & ((known == FULL) | (column >= decode(columns)))
    return some, whole


@triton.jit
def list_tiles(classes, counts, lists, size, spans, shape, grid, c, CHUNK: tl.constexpr):
    """Lists and ranges of each task from the classes of what its tiles are made of. A tile that overhangs what streams by is never full.

    `shape` is (heads, tiles of a task, width of a list, rows or keys of a tile that streams by, whether those are keys); `grid` says
    where classes lie: (classes of a head, of the tasks' side of a head, step from one such to the next, stride along a task, how many
    of each a task and a tile have, how many there are along a task), all encoded.
    """
    heads, width, list_width, tile, is_by_query = shape
    area, lines, step, stride, per_task, per_tile, columns = grid
    pid = tl.program_id(0).to(tl.int64)
    task = pid % decode(size.tasks)
    bh = pid // decode(size.tasks)
    b = (bh // decode(heads)).to(tl.int32)
    if c.JAGGED:
        b = tl.load(spans.tasks + RECORD * task)
        if b < 0:
            return
    q_start, q_len, kv_start, kv_len = sequence_at(spans, size, b, task, c)
    complete = tl.where(decode(is_by_query) > 0, kv_len, q_len) // decode(tile)
    first_line = task * decode(per_task)
    row = classes + bh * decode(area) + first_line * decode(step)
    left = (decode(lines) - first_line).to(tl.int32)
    inner = (step, stride, per_task, per_tile, columns)
    full = 0
    first = 1 << 30
    last = 0
    full_first = 1 << 30
    full_last = 0
    for start in range(0, decode(width), CHUNK):
        at = start + tl.arange(0, CHUNK)
        some, whole = reduce_classes(row, at, decode(width), left, inner)
        is_full = whole & (at < complete)
        full += tl.sum(is_full.to(tl.int32), 0)
        first = tl.minimum(first, tl.min(tl.where(some, at, 1 << 30), 0))
        last = tl.maximum(last, tl.max(tl.where(some, at + 1, 0), 0))
        full_first = tl.minimum(full_first, tl.min(tl.where(is_full, at, 1 << 30), 0))
        full_last = tl.maximum(full_last, tl.max(tl.where(is_full, at + 1, 0), 0))
    if c.MODE == "ranges":
        first = tl.minimum(first, last)
        tl.store(counts + pid * 4, first)
        tl.store(counts + pid * 4 + 1, tl.where(full > 0, full_first, first))
        tl.store(counts + pid * 4 + 2, tl.where(full > 0, full_last, first))
        tl.store(counts + pid * 4 + 3, last)
    else:
        out = lists + pid * decode(list_width)
        fulls = 0
        parts = full
        for start in range(0, decode(width), CHUNK):
            at = start + tl.arange(0, CHUNK)
            some, whole = reduce_classes(row, at, decode(width), left, inner)
            is_full = (whole & (at < complete)).to(tl.int32)
            is_part = tl.where(some, 1 - is_full, 0)
            entry = at
            if c.BLOCKS:
                entry = at + tl.where(whole, FORCED, 0)
            tl.store(out + fulls + tl.cumsum(is_full, 0) - 1, entry, mask=is_full == 1)
            tl.store(out + parts + tl.cumsum(is_part, 0) - 1, entry, mask=is_part == 1)
            fulls += tl.sum(is_full, 0)
            parts += tl.sum(is_part, 0)
        tl.store(out + parts, 0)
        tl.store(counts + pid * 4, full)
        tl.store(counts + pid * 4 + 1, parts - full)


@triton.jit
def place_sequences(ends, given, starts, lengths, sequences, BLOCK: tl.constexpr):
    """Where packed sequences begin and how long they are, int32: by cumulative lengths, and by lengths that were `given`, or None."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < decode(sequences)
    start = tl.load(ends + i, mask=inside, other=0).to(tl.int32)
    length = start
    if given is not None:
        length = tl.load(given + i, mask=inside, other=0).to(tl.int32)
    else:
        length = tl.load(ends + i + 1, mask=inside, other=0).to(tl.int32) - start
    tl.store(starts + i, start, mask=inside)
    tl.store(lengths + i, length, mask=inside)


@triton.jit
def count_before(counts, works, mine, is_earlier):
    """How many tasks, so many of each work, come before some of `mine`: of more work, or of as much and earlier."""
    ahead = (works[None, :] > mine[:, None]) | ((works[None, :] == mine[:, None]) & is_earlier)
    return tl.sum(tl.where(ahead, counts[None, :], 0), 1)


@triton.jit
def count_work(lengths, others, TILE: tl.constexpr, OTHER: tl.constexpr):
    """(whole tiles of each sequence, the work of one, tiles of fewer rows, none or one, its work): rows are worked on 64 at a time, and to
    go through `others`, OTHER at a time, costs as much as 64 rows do. Without OTHER all tiles are whole, and work is the length."""
    count = (lengths + TILE - 1) // TILE
    if OTHER == 0:
        return count, lengths, count * 0, count * 0
    else:
        parts = (lengths % TILE + 63) // 64
        short = ((parts > 0) & (parts < TILE // 64)).to(tl.int32)
        steps = (others + OTHER - 1) // OTHER
        return count - short, steps * (1 + TILE // 64), short, steps * (1 + parts)


@triton.jit
def assign_tasks(
    tasks, lengths, others, places, sequences, total,
    TILE: tl.constexpr, OTHER: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Tasks of a jagged call, those of most work first, see `count_work`: RECORD numbers each, of which the first six are sequence,
    tile and `places`, where the sequence's queries begin, how many they are, and
    its keys. The first and those left over are spare, (-1, n); the
    first has tickets besides, zero.

    Each program places BLOCK sequences: a sequence's whole tiles come after all of more work, or of as much and earlier ones, and so does
    its last one where that has fewer rows. The first program marks the spare tasks. What a wrong bound of lengths leaves no room for is
    left out.
    """
    n = decode(sequences)
    me = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(lengths + me, mask=me < n, other=0)
    q_start, q_length, kv_start, kv_length = places
    q_first = tl.load(q_start + me, mask=me < n, other=0)
    q_count = tl.load(q_length + me, mask=me < n, other=0)
    kv_first = tl.load(kv_start + me, mask=me < n, other=0)
    kv_count = tl.load(kv_length + me, mask=me < n, other=0)
    whole, work, short, less = count_work(mine, tl.load(others + me, mask=me < n, other=0), TILE, OTHER)
    before = tl.zeros([BLOCK], tl.int32) + 1
    late = before
    used = 1
    for start in range(0, n, CHUNK):
        other = start + tl.arange(0, CHUNK)
        theirs = tl.load(lengths + other, mask=other < n, other=0)
        whole_there, work_there, short_there, less_there = count_work(theirs, tl.load(others + other, mask=other < n, other=0), TILE, OTHER)
        used += tl.sum(whole_there + short_there, 0)
        is_earlier = other[None, :] < me[:, None]
        before += count_before(whole_there, work_there, work, is_earlier)
        if OTHER > 0:
            before += count_before(short_there, less_there, work, is_earlier)
            late += count_before(whole_there, work_there, less, other[None, :] <= me[:, None])
            late += count_before(short_there, less_there, less, is_earlier)
    most = tl.max(whole + short, 0)
    for i in range(0, most):
        # the last tile first: under a causal mask it is the longest
        is_short = i >= whole
        at = tl.where(is_short, late, before + i)
        record = tasks + RECORD * at
        inside = (i < whole + short) & (at < decode(total))
        tl.store(record, me, mask=inside)
        tl.store(record + 1, tl.where(is_short, whole, whole - 1 - i), mask=inside)
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
