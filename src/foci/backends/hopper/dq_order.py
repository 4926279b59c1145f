# mypy: ignore-errors
"""Ranks of key tiles: how many earlier ones visit the same query tile. `dq_semaphore` adds to dq in this order."""

import triton.language as tl

from foci.backends.gpu.tiles import RECORD, decode
from foci.compat.jit import triton_jit


@triton_jit
def mark_tiles(ranks, table, c, CHUNK: tl.constexpr):
    """Write 1 where a key tile visits a query tile. One program per row of the table.

    ranks: int32 [rows, width], zeros for lists. The last column counts a list's partial tiles that come after all its full ones.
    table: query tiles that key tiles visit. c: only MODE is read.
    """
    row = tl.program_id(0).to(tl.int64)
    width = decode(table.width)
    counts = table.counts + row * 4
    line = ranks + row * width
    if c.MODE == "ranges":
        first = tl.load(counts)
        behind = tl.load(counts + 3)
        for start in range(0, width - 1, CHUNK):
            at = start + tl.arange(0, CHUNK)
            tl.store(line + at, ((at >= first) & (at < behind)).to(tl.int32), mask=at < width - 1)
    else:
        full_count = tl.load(counts)
        count = full_count + tl.load(counts + 1)
        entries = table.lists + row * width
        last = tl.load(entries + full_count - 1, mask=full_count > 0, other=-1)
        ending = 0
        for start in range(0, count, CHUNK):
            at = start + tl.arange(0, CHUNK)
            tile = tl.load(entries + at, mask=at < count, other=-1)
            tl.store(line + tile, tl.full([CHUNK], 1, tl.int32), mask=at < count)
            ending += tl.sum(((at >= full_count) & (tile > last)).to(tl.int32), 0)
        tl.store(line + width - 1, ending)


@triton_jit
def rank_tiles(ranks, table, tasks, CHUNK: tl.constexpr):
    """Replace the marks of `mark_tiles` by their exclusive prefix sums over key tiles. Programs: batch entries and heads of the table;
    CHUNK query tiles. `tasks`: number of key tiles, encoded."""
    width = decode(table.width)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = at < width - 1
    line = ranks + tl.program_id(0).to(tl.int64) * decode(tasks) * width + at
    rank = tl.zeros([CHUNK], tl.int32)
    for _ in range(0, decode(tasks)):
        mark = tl.load(line, mask=inside, other=0)
        tl.store(line, rank, mask=inside)
        rank += mark
        line += width


@triton_jit
def rank_packed(ranks, table, spans, tasks, CHUNK: tl.constexpr, BEFORE: tl.constexpr):
    """Ranks for packed sequences, whose tables have ranges: each key tile counts the earlier tiles of its sequence. One program per row.

    ranks: int32 [rows, width], filled where a key tile visits a query tile. `tasks`: key tiles of a head, encoded. A sequence's tasks
    count its tiles down, so earlier tiles come later in the table.
    """
    row = tl.program_id(0).to(tl.int64)
    record = spans.tasks + RECORD * (row % decode(tasks))
    if tl.load(record) < 0:
        return
    tile = tl.load(record + 1)
    counts = table.counts + row * 4
    behind = tl.load(counts + 3)
    for start in range(tl.load(counts), behind, CHUNK):
        at = start + tl.arange(0, CHUNK)
        rank = tl.zeros([CHUNK], tl.int32)
        for n in range(1, tile + 1, BEFORE):
            other = n + tl.arange(0, BEFORE)
            first = tl.load(counts + other * 4, mask=other <= tile, other=0)[:, None]
            last = tl.load(counts + other * 4 + 3, mask=other <= tile, other=0)[:, None]
            rank += tl.sum(((at[None, :] >= first) & (at[None, :] < last)).to(tl.int32), 0)
        tl.store(ranks + row * decode(table.width) + at, rank, mask=at < behind)
