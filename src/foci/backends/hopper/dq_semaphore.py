# mypy: ignore-errors
"""The order in which tiles of keys add to the sums of dq, and the warp that adds.

Tiles of keys that a tile of queries visits add to it one after the other, from the first to the last, so a sum has one order and the same
bits each time. Where there are several sums, they add to one after the other of them. Programs take tile after tile, each in the order in
which it took them, so the first tile of all that are not done waits for none: those before it are, in every program.

Where each has a program of its own, tiles of keys that began with the same tile of queries would each wait for all before it. There tile r
of R begins at floor(r T / R) of T tiles of queries and goes round (ROUND). A tile of queries is added to in the order in which walks come
by: by the step of the walk, and in one step by r. So a share waits only for shares of an earlier step, or of the same step and a lower r,
and nothing waits in a circle. But tiles wait for those of later programs too, so the launch has to be cooperative: then all run at once.
"""

from typing import Any, NamedTuple

from foci.backends.hopper.bwd_task_queue import has_task, pop_task
from foci.backends.hopper.gluon_compat import gl, gluon, mbarrier, tma, tma_store
from foci.backends.hopper.layouts import pieces
from foci.backends.hopper.smem import sequence_span
from foci.backends.triton.tiles import RECORD, decode, sequence_at
from foci.compat.gluon import begin_add


class Order(NamedTuple):
    """What the order needs; integers are encoded.

    turns: int32 [1 + SUMS * B * Hq * slots] of zeros: the next ticket, then how many tiles of keys have added to a slot.
    slots: tiles of queries of a head. heads: kv heads whose tiles of keys come together. SUMS: sums of a slot, a `tl.constexpr`.
    ranks: as `dq_order` leaves them, where a mask is neither causal nor keeps everything.
    """

    turns: Any
    slots: Any
    heads: Any
    SUMS: Any
    ranks: Any = None


SHARE_LINE = gl.constexpr(256)
"""Numbers of a row of the box as which a tile's share in dq lies in shared memory and in the sums: one copy takes it."""


@gluon.jit
def group_members(size, c):
    """Query heads that share keys, a constant where it is one."""
    if c.GROUPED:
        return decode(size.group)
    else:
        return 1


@gluon.jit
def find_key_task(ticket, order, size, spans, c):
    """(b that functions are told, batch entry in memory, kv head, tile of keys, its task) in the order in which they are taken, and packed
    where the sequence lies; b < 0 for a spare task.

    Tiles of a head, or of a sequence, come from the first to the last, those of `order.heads` heads together.
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
        # tasks count a sequence's tiles down
        left = gl.load(spans.tasks + RECORD * task + 1)
        tile = (span[3] + c.TILE_KV - 1) // c.TILE_KV - 1 - left
        return (b, memory_b, h, tile, task + left - tile) + span
    else:
        return memory_b, memory_b, h, task, task


@gluon.jit
def query_runs(table, ranks, place, h, q_len, kv_len, c):
    """Tiles of queries that a tile of keys visits, in three runs: (line of the table, last place of masked ones, how many, of whole ones,
    of masked ones before these), and where it goes round of whole ones again. Each goes from its last place down; a place is a tile, or one
    in the lists (`tile_at`)."""
    b, memory_b, kv_h, tile, task = place[:5]
    first = tile * c.TILE_KV
    if c.MODE == "ranges" or c.MODE == "lists":
        line = (b * decode(table.b_stride) + h * decode(table.h_stride) + task).to(gl.int64)
        counts = table.counts + line * 4
        if c.MODE == "ranges":
            low = gl.load(counts)
            whole_last = gl.load(counts + 2) - 1
            whole = whole_last + 1 - gl.load(counts + 1)
            last = gl.load(counts + 3) - 1
            ending = last - whole_last
            before_last = whole_last - whole
            before = before_last + 1 - low
        else:
            whole = gl.load(counts)
            part = gl.load(counts + 1)
            last = whole + part - 1
            ending = gl.load(ranks + (line + 1) * decode(table.width) - 1)
            whole_last = whole - 1
            before_last = last - ending
            before = part - ending
    else:
        line = tile.to(gl.int64)
        count = (q_len + c.TILE_Q - 1) // c.TILE_Q
        low = count * 0
        whole_from = count * 0
        if c.MODE == "causal":
            low = gl.minimum(first // c.TILE_Q, count)
            whole_from = gl.minimum((first + c.TILE_KV - 1 + c.TILE_Q - 1) // c.TILE_Q, count)
        over = gl.where(q_len % c.TILE_Q != 0, 1, 0)
        last = count - 1
        ending = gl.minimum(over, count - low)
        whole_last = last - ending
        whole = gl.maximum(count - ending - whole_from, 0)
        before_last = whole_last - whole
        before = count - ending - whole - low
    if first + c.TILE_KV > kv_len:
        # keys that are not there must not be looked up: every tile is an edge
        ending = ending + whole + before
        whole = whole * 0
        before = before * 0
    if c.ROUND:
        # from a tile of its own down, then from the last one down: masked ones are the last, whole ones all others
        own = tile * (last + 1) // ((kv_len + c.TILE_KV - 1) // c.TILE_KV)
        soon = gl.minimum(own + 1, whole)
        return line, own, own + 1 - soon, soon - 1, soon, last, ending - (own + 1 - soon), whole - 1, whole - soon
    else:
        return line, last, ending, whole_last, whole, before_last, before


@gluon.jit
def count_query_tiles(runs):
    """How many tiles of queries all runs have."""
    count = runs[2]
    for i in gl.static_range(4, len(runs), 2):
        count += runs[i]
    return count


@gluon.jit
def tile_at(table, line, place, c):
    """The tile of queries at a place of a run."""
    if c.MODE == "lists":
        return gl.load(table.lists + line * decode(table.width) + place)
    else:
        return place


@gluon.jit
def nth_tile(table, runs, i, c):
    """The i-th tile of queries of all runs."""
    line, last, ending, whole_last, whole, before_last, before = runs[:7]
    place = last - i
    if c.ROUND:
        place += gl.where(place < 0, count_query_tiles(runs), 0)
    if c.MODE == "lists":
        place = gl.where(i < ending, place, gl.where(i < ending + whole, whole_last + ending - i, before_last + ending + whole - i))
    return tile_at(table, line, place, c)


@gluon.jit
def dq_rank(order, table, line, tile, query_tile, q_len, kv_len, c):
    """How many tiles of keys before this one visit a tile of queries."""
    if c.MODE == "ranges" or c.MODE == "lists":
        return gl.load(order.ranks + line * decode(table.width) + query_tile)
    elif c.ROUND:
        # the first to come by is the first that begins no earlier
        count = (q_len + c.TILE_Q - 1) // c.TILE_Q
        tiles = (kv_len + c.TILE_KV - 1) // c.TILE_KV
        return (tile + tiles - (query_tile * tiles + count - 1) // count) % tiles
    else:
        return tile


@gluon.jit
def at_semaphore(instructions: gl.constexpr, turn, count):
    """Runs instructions on $1, the address of a turn, and $2, a count; they leave a number in $0, which nothing reads."""
    gl.inline_asm_elementwise(instructions, "=r,l,r", [turn, count], dtype=gl.int32, is_pure=False, pack=1)


# waits until so many tiles of keys have added; copies that begin afterwards see what they added
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
# waits until what this warp has begun to add is in memory (`tma.store_wait` only until shared memory has been read), and says that so
# many have added
RELEASE_DQ_TURN = gl.constexpr(
    """cp.async.bulk.wait_group 0;
    fence.proxy.async.global;
    bar.warp.sync 0xffffffff;
    st.release.gpu.global.u32 [$1], $2;
    mov.u32 $0, 0;"""
)


@gluon.jit
def reduce_dq_shares(sums, order, shares, bars, queue, spans, size, table, c, WHICH: gl.constexpr):
    """One of two warps: adds every second share of tiles of keys in dq to the sums, each in its turn.

    While it waits until what it added is in memory, the other goes on.
    """
    share_full, share_empty = bars
    group = group_members(size, c)
    slots = decode(order.slots)
    heads = decode(size.heads) * group
    tasks = 0
    before = 0
    while has_task(queue, tasks, 1):
        place, runs = pop_task(queue, tasks, c, 1)
        b, memory_b, kv_h, tile, task = place[:5]
        q_start, q_len, kv_start, kv_len = sequence_span(place, spans, size, c)
        count = count_query_tiles(runs) * group
        for i in range((before + WHICH) % 2, count, 2):
            query_tile = nth_tile(table, runs, i // group, c)
            rank = dq_rank(order, table, runs[0], tile, query_tile, q_len, kv_len, c)
            turn = rank // order.SUMS
            slot = ((rank % order.SUMS * decode(size.batch) + memory_b) * heads + kv_h * group + i % group) * slots + query_tile
            if c.JAGGED:
                slot += q_start // c.TILE_Q + b
            at_semaphore(WAIT_DQ_TURN, order.turns + 1 + slot, turn)
            mbarrier.wait(share_full.index(WHICH), ((before + i) // 2) & 1)
            # the first to be there stores, so that sums need not be cleared
            if turn == 0:
                tma_store(sums, [slot * sums.block_shape[0], 0], shares.index(WHICH))
            else:
                begin_add(sums, [slot * sums.block_shape[0], 0], shares.index(WHICH))
            tma.store_wait(0)
            mbarrier.arrive(share_empty.index(WHICH), count=1)
            at_semaphore(RELEASE_DQ_TURN, order.turns + 1 + slot, turn + 1)
        before += count
        tasks += 1


@gluon.constexpr_function
def share_columns(rows, width, half):
    """Columns of a half of a share in dq: of tiles of 128 rows each has 64 rows, of tiles of 64 half of the columns, or a piece."""
    return min(64, width) if rows == 128 or len(pieces(width)) == 1 else pieces(width)[half]


@gluon.constexpr_function
def slot_size(rows, width):
    """Numbers of a slot of the sums: two halves of 64 rows, both as wide as the first is."""
    return 2 * 64 * share_columns(rows, width, 0)


@gluon.jit
def store_dq_share(shares, share, bars, n, half: gl.constexpr):
    """Puts half of the n-th share, [64, columns], where the warp that adds it will find it.

    It lies as the threads hold it, four numbers of a thread in a row, so that no two write to one bank.
    """
    share_full, share_empty = bars
    at = n % 2
    mbarrier.wait(share_empty.index(at), ((n // 2) & 1) ^ 1)
    turned = share.reshape([4, 2, 8, share.shape[1] // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([64 * share.shape[1]])
    to = shares.index(at * 2 + half)
    if share.shape[1] != 64:
        to = to.slice(0, 64 * share.shape[1])
    to.store(turned)
