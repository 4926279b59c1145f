# mypy: ignore-errors
"""Deterministic dq: a semaphore per accumulator fixes the order in which key tiles add to it, and a dedicated warp does the adding.

The key tiles that visit a query tile add to its accumulator one after another, from the first to the last, so the sum has one order and the
same bits every time. With several accumulators key tiles use them in turn. Programs take key tiles in increasing order, so the first
unfinished tile never waits: all tiles before it are done.

ROUND: where every key tile has a program of its own, tiles that began with the same query tile would each wait for all before it. So key
tile r of R begins at query tile floor(r T / R) of T and wraps around. A query tile is added to in the order in which key tiles reach it: by
the step, and within a step by r. A share waits only for shares of an earlier step, or of the same step and a lower r, so there is no cycle.
But key tiles wait for those of later programs too: the launch is cooperative, so that all programs run at once.
"""

from typing import Any, NamedTuple

from foci.backends.gpu.tiles import RECORD, decode, sequence_at
from foci.backends.hopper.gluon_compat import gl, gluon, mbarrier, tma, tma_store
from foci.backends.hopper.kernel_args import PackedTask, Task
from foci.backends.hopper.layouts import pieces
from foci.backends.hopper.smem import sequence_span
from foci.backends.hopper.task_queue import QueryRuns, RoundQueryRuns, has_task, pop_key_task
from foci.compat.gluon import begin_add, gluon_jit


class Order(NamedTuple):
    """Arguments of the semaphores. Integers are encoded."""

    turns: Any  # int32 [1 + sums * B * Hq * slots] of zeros: the next ticket, then how many key tiles have added to each slot
    slots: Any  # query tiles of a head
    heads: Any  # kv heads whose key tiles alternate
    sums: Any  # accumulators of a query tile
    ranks: Any = None  # from `dq_order`, unless the mask is causal or keeps everything


SHARE_LINE = gl.constexpr(256)
"""Elements in a row of the TMA box of a share of dq: shares are stored as [rows, 256], so that one copy moves a whole share."""


@gluon_jit
def group_members(size, c):
    """Query heads that share keys; a constant 1 unless GROUPED."""
    if c.GROUPED:
        return decode(size.group)
    else:
        return 1


@gluon_jit
def find_key_task(ticket, order, size, spans, c):
    """`Task` of a ticket, or `PackedTask`: a key tile.

    Tiles of a head, or of a sequence, come from the first to the last; those of `order.heads` heads alternate.
    """
    heads = decode(size.batch) * decode(size.heads)
    tasks = decode(size.tasks)
    together = decode(order.heads)
    group = ticket // (together * tasks)
    within = ticket - group * together * tasks
    members = gl.minimum(together, heads - group * together)
    task = within // members
    head = group * together + within - task * members
    memory_b = head // decode(size.heads)
    h = head - memory_b * decode(size.heads)
    if c.JAGGED:
        b = gl.load(spans.tasks + RECORD * task)
        span = sequence_at(spans, size, b, task, c)
        # a sequence's tasks count its tiles down
        left = gl.load(spans.tasks + RECORD * task + 1)
        tile = (span[3] + c.TILE_KV - 1) // c.TILE_KV - 1 - left
        return PackedTask(b, memory_b, h, tile, task + left - tile, *span)
    else:
        return Task(memory_b, memory_b, h, task, task)


@gluon_jit
def find_query_runs(table, ranks, key_task, h, q_len, kv_len, c):
    """`QueryRuns` of a key tile, or `RoundQueryRuns`."""
    b, tile, task = key_task.b, key_task.tile, key_task.index
    first = tile * c.TILE_KV
    if c.MODE == "ranges" or c.MODE == "lists":
        line = (b * decode(table.b_stride) + h * decode(table.h_stride) + task).to(gl.int64)
        counts = table.counts + line * 4
        if c.MODE == "ranges":
            first_tile = gl.load(counts)
            full_last = gl.load(counts + 2) - 1
            full = full_last + 1 - gl.load(counts + 1)
            high_last = gl.load(counts + 3) - 1
            high = high_last - full_last
            low_last = full_last - full
            low = low_last + 1 - first_tile
        else:
            full = gl.load(counts)
            part = gl.load(counts + 1)
            high_last = full + part - 1
            high = gl.load(ranks + (line + 1) * decode(table.width) - 1)
            full_last = full - 1
            low_last = high_last - high
            low = part - high
    else:
        line = tile.to(gl.int64)
        count = (q_len + c.TILE_Q - 1) // c.TILE_Q
        first_tile = count * 0
        full_first = count * 0
        if c.MODE == "causal":
            first_tile = gl.minimum(first // c.TILE_Q, count)
            full_first = gl.minimum((first + c.TILE_KV - 1 + c.TILE_Q - 1) // c.TILE_Q, count)
        overhangs = gl.where(q_len % c.TILE_Q != 0, 1, 0)
        high_last = count - 1
        high = gl.minimum(overhangs, count - first_tile)
        full_last = high_last - high
        full = gl.maximum(count - high - full_first, 0)
        low_last = full_last - full
        low = count - high - full - first_tile
    if first + c.TILE_KV > kv_len:
        # the key tile overhangs the keys: mask every query tile
        high = high + full + low
        full = full * 0
        low = low * 0
    if c.ROUND:
        # from the start tile down to 0, then from the last tile down; masked tiles are the last ones
        start = tile * (high_last + 1) // ((kv_len + c.TILE_KV - 1) // c.TILE_KV)
        until_wrap = gl.minimum(start + 1, full)
        masked = start + 1 - until_wrap
        return RoundQueryRuns(
            line, start, masked, until_wrap - 1, until_wrap, high_last, high - masked, full - 1, full - until_wrap
        )  # fmt: skip
    else:
        return QueryRuns(line, high_last, high, full_last, full, low_last, low)


@gluon_jit
def count_query_tiles(runs):
    """Number of query tiles in all runs."""
    count = runs.high
    for i in gl.static_range(4, len(runs), 2):
        count += runs[i]
    return count


@gluon_jit
def tile_at(table, line, place, c):
    """Query tile at a place of a run."""
    if c.MODE == "lists":
        return gl.load(table.lists + line * decode(table.width) + place)
    else:
        return place


@gluon_jit
def nth_tile(table, runs, i, c):
    """The i-th query tile that a key tile visits."""
    high, full = runs.high, runs.full
    place = runs.high_last - i
    if c.ROUND:
        place += gl.where(place < 0, count_query_tiles(runs), 0)
    if c.MODE == "lists":
        place = gl.where(i < high, place, gl.where(i < high + full, runs.full_last + high - i, runs.low_last + high + full - i))
    return tile_at(table, runs.row, place, c)


@gluon_jit
def dq_rank(order, table, line, tile, query_tile, q_len, kv_len, c):
    """Rank of this key tile among those that visit a query tile."""
    if c.MODE == "ranges" or c.MODE == "lists":
        return gl.load(order.ranks + line * decode(table.width) + query_tile)
    elif c.ROUND:
        # the first to reach a query tile is the first key tile that starts at or after it
        count = (q_len + c.TILE_Q - 1) // c.TILE_Q
        tiles = (kv_len + c.TILE_KV - 1) // c.TILE_KV
        return (tile + tiles - (query_tile * tiles + count - 1) // count) % tiles
    else:
        return tile


@gluon_jit
def run_semaphore_asm(instructions: gl.constexpr, turn, count):
    """Run PTX on $1, the address of a semaphore, and $2, a count. $0 is a dummy result."""
    gl.inline_asm_elementwise(instructions, "=r,l,r", [turn, count], dtype=gl.int32, is_pure=False, pack=1)


# spin until $2 key tiles have added; the proxy fence orders TMA reductions issued afterwards behind theirs
WAIT_DQ_TURN = gl.constexpr(
    """{
    .reg .pred done;
    .reg .u32 seen;
    again:
    ld.acquire.gpu.global.u32 seen, [$1];
    setp.ge.u32 done, seen, $2;
    @!done bra again;
    fence.proxy.async.global;
    mov.u32 $0, seen;
    }"""
)
# wait until this warp's TMA reductions are in memory (`tma.store_wait` waits only until shared memory has been read), then publish that $2
# key tiles have added
RELEASE_DQ_TURN = gl.constexpr(
    """cp.async.bulk.wait_group 0;
    fence.proxy.async.global;
    bar.warp.sync 0xffffffff;
    st.release.gpu.global.u32 [$1], $2;
    mov.u32 $0, 0;"""
)


@gluon_jit
def reduce_dq_shares(sums, order, shares, bars, queue, params, c, WHICH: gl.constexpr):
    """One of two warps: add every second share of dq to its accumulator by TMA, in semaphore order.

    While one warp waits for its reduction to reach memory, the other continues.
    """
    share_full, share_empty = bars
    size, table = params.size, params.table
    group = group_members(size, c)
    slots = decode(order.slots)
    accumulators = decode(order.sums)
    heads = decode(size.heads) * group
    tasks = 0
    before = 0
    while has_task(queue, tasks, 1):
        task, runs = pop_key_task(queue, tasks, c, 1)
        b, memory_b, kv_h, tile = task.b, task.memory_b, task.h, task.tile
        q_start, q_len, kv_start, kv_len = sequence_span(task, params.spans, size, c)
        count = count_query_tiles(runs) * group
        for i in range((before + WHICH) % 2, count, 2):
            query_tile = nth_tile(table, runs, i // group, c)
            rank = dq_rank(order, table, runs.row, tile, query_tile, q_len, kv_len, c)
            turn = rank // accumulators
            slot = (((rank - turn * accumulators) * decode(size.batch) + memory_b) * heads + kv_h * group + i % group) * slots + query_tile
            if c.JAGGED:
                slot += q_start // c.TILE_Q + b
            run_semaphore_asm(WAIT_DQ_TURN, order.turns + 1 + slot, turn)
            mbarrier.wait(share_full.index(WHICH), ((before + i) // 2) & 1)
            # the first key tile stores instead of adding, so accumulators need not be zeroed
            if turn == 0:
                tma_store(sums, [slot * sums.block_shape[0], 0], shares.index(WHICH))
            else:
                begin_add(sums, [slot * sums.block_shape[0], 0], shares.index(WHICH))
            tma.store_wait(0)
            mbarrier.arrive(share_empty.index(WHICH), count=1)
            run_semaphore_asm(RELEASE_DQ_TURN, order.turns + 1 + slot, turn + 1)
        before += count
        tasks += 1


@gluon.constexpr_function
def share_columns(rows, width, half):
    """Columns of half a share of dq: a half is 64 of 128 rows, or with 64 rows half of the columns, or one piece of a split width."""
    return min(64, width) if rows == 128 or len(pieces(width)) == 1 else pieces(width)[half]


@gluon.constexpr_function
def slot_size(rows, width):
    """Elements of an accumulator slot: two halves of 64 rows, both as wide as the first."""
    return 2 * 64 * share_columns(rows, width, 0)


@gluon_jit
def store_dq_share(shares, share, share_empty, n, half: gl.constexpr):
    """Write half of the n-th share, [64, columns], to shared memory for the warp that adds it.

    It is stored in the order in which threads hold it, four values of a thread in a row: no bank conflicts.
    """
    parity = n % 2
    mbarrier.wait(share_empty.index(parity), ((n // 2) & 1) ^ 1)
    by_thread = share.reshape([4, 2, 8, share.shape[1] // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([64 * share.shape[1]])
    target = shares.index(parity * 2 + half)
    if share.shape[1] != 64:
        target = target.slice(0, 64 * share.shape[1])
    target.store(by_thread)
