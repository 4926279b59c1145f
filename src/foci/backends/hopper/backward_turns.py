# mypy: ignore-errors
"""The order in which tiles of keys add to the sums of dq, and the warp that adds.

Tiles of keys add to a tile of queries one after the other, from the first to the last, so a sum has one order and the same bits each
time. Where there are two sums, the even tiles add to one and the odd ones to the other. Programs take their tiles in the order in which
they start, so nothing waits for a tile that has not begun.
"""

from typing import Any, NamedTuple

from foci.backends.hopper.interface import gl, gluon, mbarrier, send, tma
from foci.backends.hopper.reduction import begin_add
from foci.backends.triton.tiles import number, sequence


class Order(NamedTuple):
    """What the order needs; integers are encoded.

    turns: int32 [1 + SUMS * B * Hq * slots] of zeros: the next place to take, then how many tiles of keys have added to a slot.
    slots: tiles of queries of a head. heads: kv heads whose tiles of keys come together. SUMS: sums of a slot, a `tl.constexpr`.
    """

    turns: Any
    slots: Any
    heads: Any
    SUMS: Any


SHARE = gl.constexpr((32, 256))
"""How a tile's share in dq, 8192 numbers, lies in shared memory and in the sums: in the order of `put_share`, a box that one copy takes."""


@gluon.jit
def take_place(order, size, spans, c):
    """(b that functions are told, batch entry in memory, kv head, tile of keys) in the order in which programs start.

    Tiles of a head, or of a sequence, come from the first to the last, those of `order.heads` heads together.
    """
    ticket = gl.atomic_add(order.turns, 1, sem="relaxed")
    heads = number(size.batch) * number(size.heads)
    tasks = number(size.tasks)
    together = number(order.heads)
    group = ticket // (together * tasks)
    within = ticket - group * together * tasks
    members = gl.minimum(together, heads - group * together)
    task = within // members
    head = group * together + within - task * members
    memory_b = head // number(size.heads)
    h = head - memory_b * number(size.heads)
    b = memory_b
    tile = task
    if c.JAGGED:
        b = gl.load(spans.tasks + 2 * task)
        # tasks count a sequence's tiles down
        tile = gl.load(spans.tasks + 2 * task + 1)
        if b >= 0:
            tile = (gl.load(spans.kv_length + b) + c.TILE_KV - 1) // c.TILE_KV - 1 - tile
    return b, memory_b, h, tile


@gluon.jit
def query_runs(first, q_len, kv_len, c):
    """Tiles of queries from the last to the first: (last, masked at the end, whole, masked at the diagonal)."""
    count = (q_len + c.TILE_Q - 1) // c.TILE_Q
    low = count * 0
    whole_from = count * 0
    if c.MODE == "causal":
        low = gl.minimum(first // c.TILE_Q, count)
        whole_from = gl.minimum((first + c.TILE_KV - 1 + c.TILE_Q - 1) // c.TILE_Q, count)
    over = gl.where(q_len % c.TILE_Q != 0, 1, 0)
    ending = gl.minimum(over, count - low)
    whole = gl.maximum(count - ending - whole_from, 0)
    diagonal = count - ending - whole - low
    if first + c.TILE_KV > kv_len:
        # keys that are not there must not be looked up: every tile is an edge
        ending = count - low
        whole = whole * 0
        diagonal = diagonal * 0
    return count - 1, ending, whole, diagonal


@gluon.jit
def await_turn(turn, count):
    """Waits until `count` tiles of keys have added; copies that begin afterwards see what they added."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred done;
        .reg .u32 seen;
        again:
        ld.acquire.gpu.global.u32 seen, [$1];
        setp.ge.u32 done, seen, $2;
        @!done bra again;
        fence.proxy.async.global;
        mov.u32 $0, seen;
        }""",
        "=r,l,r",
        [turn, count],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def pass_turn(turn, count):
    """Waits until what this warp has begun to add is in memory, and says that `count` tiles of keys have added.

    `tma.store_wait` waits only until shared memory has been read.
    """
    gl.inline_asm_elementwise(
        """cp.async.bulk.wait_group 0;
        fence.proxy.async.global;
        bar.warp.sync 0xffffffff;
        st.release.gpu.global.u32 [$1], $2;
        mov.u32 $0, 0;""",
        "=r,l,r",
        [turn, count],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def add_shares(sums, order, shares, bars, place, spans, size, c):
    """One warp: adds the shares of a tile of keys in dq to the sums, each in its turn."""
    share_full, share_empty = bars
    b, memory_b, kv_h, tile = place
    q_start, q_len, kv_start, kv_len = sequence(spans, size, b, c)
    last, ending, whole, diagonal = query_runs(tile * c.TILE_KV, q_len, kv_len, c)
    count = ending + whole + diagonal
    group = number(size.group)
    slots = number(order.slots)
    # the sum, the batch entry, the first of the heads that share these keys
    first = (tile % order.SUMS * number(size.batch) + memory_b) * number(size.heads) * group + kv_h * group
    turn = tile // order.SUMS
    for n in range(0, count * group):
        slot = (first + n // count) * slots + last - n % count
        if c.JAGGED:
            slot += q_start // c.TILE_Q + b
        at = n % 2
        await_turn(order.turns + 1 + slot, turn)
        mbarrier.wait(share_full.index(at), (n // 2) & 1)
        # the first to be there stores, so that sums need not be cleared
        if turn == 0:
            send(sums, [slot * SHARE[0], 0], shares.index(at))
        else:
            begin_add(sums, [slot * SHARE[0], 0], shares.index(at))
        tma.store_wait(0)
        mbarrier.arrive(share_empty.index(at), count=1)
        pass_turn(order.turns + 1 + slot, turn + 1)


@gluon.jit
def put_share(shares, share, bars, n, half: gl.constexpr):
    """Puts half of the n-th share, [64, 64], where the warp that adds it will find it.

    It lies as the threads hold it, four numbers of a thread in a row, so that no two write to one bank.
    """
    share_full, share_empty = bars
    at = n % 2
    mbarrier.wait(share_empty.index(at), ((n // 2) & 1) ^ 1)
    turned = share.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([4096])
    shares.index(at * 2 + half).store(turned)
