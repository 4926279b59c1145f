# mypy: ignore-errors
"""dq, dk and dv of a tile of keys in one pass: five products instead of the seven of two kernels.

Two warpgroups hold 64 keys each, as in `backward_keys`. They exchange the gradients of their scores through shared memory, and
each computes half of the tile's share in dq, 64 columns of 128 or 64 rows of 128, and adds it to float32 sums in device memory.
Tiles of keys add to a tile of queries one after the other, from the first to the last, the even ones to one sum and the odd ones
to another, so a sum has one order and the same bits each time: one warp waits for the tile's turn, another passes it on. Programs
take their tiles in the order in which they start, so nothing waits for a tile that has not begun.

It holds where the tiles of keys that a tile of queries visits are the first so many: without a mask, and under the causal one.
"""

from foci.backends.hopper.backward_tiles import keep_places, line_of, score_gradient, weights_of
from foci.backends.hopper.interface import fence_async_shared, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from foci.backends.hopper.layouts import operand, product, shared
from foci.backends.hopper.tiles import barriers, copy_in, copy_out
from foci.backends.triton.tiles import number, place, sequence

ROWS = gl.constexpr(64)
AHEAD = gl.constexpr(4)
"""Tiles whose turns are known before the first of them has been passed on."""


@gluon.jit
def take_place(turns, size, spans, c):
    """(b that functions are told, batch entry in memory, kv head, tile of keys) in the order in which programs start.

    Tiles of a head, or of a sequence, come from the first to the last.
    """
    ticket = gl.atomic_add(turns, 1, sem="relaxed")
    memory_b, h, task = place(ticket, size, False)
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
def first_slot(memory_b, h, b, q_start, tile, slots, size, c):
    """Where the tiles of queries of a head, or of a sequence in it, begin among all: `slots` of them to a head.

    Tiles of keys add in turn to the first and to the second of two sums.
    """
    heads = number(size.heads) * number(size.group)
    head = ((tile % 2 * number(size.batch) + memory_b) * heads + h) * slots
    if c.JAGGED:
        return head + q_start // c.TILE_Q + b
    else:
        return head


@gluon.jit
def fused_producer(sources, held, buffers, bars, place, spans, size, pitch, c):
    """One warp: keys and values once, then the queries of each head that shares them, from the last to the first."""
    q, do, lse, delta, k, v = sources
    k_tiles, v_tiles = held
    q_tiles, do_tiles, lse_rows, delta_rows, ds_tiles = buffers
    kv_full, q_full, do_full, empty, ds_full, turn, added, passed = bars
    b, memory_b, kv_h, tile = place
    q_start, q_len, kv_start, kv_len = sequence(spans, size, b, c)
    first = tile * c.TILE_KV
    mbarrier.expect(kv_full, 2 * ROWS * 2 * (c.D_PAD + c.DV_PAD))
    for half in gl.static_range(2):
        copy_in(k, memory_b, kv_h, first + half * ROWS, kv_start, kv_len, kv_full, k_tiles.index(half), c.JAGGED)
        copy_in(v, memory_b, kv_h, first + half * ROWS, kv_start, kv_len, kv_full, v_tiles.index(half), c.JAGGED)
    last, ending, whole, diagonal = query_runs(first, q_len, kv_len, c)
    count = ending + whole + diagonal
    group = number(size.group)
    for n in range(0, count * group):
        h = kv_h * group + n // count
        here = (last - n % count) * c.TILE_Q
        stage = n % c.STAGES
        mbarrier.wait(empty.index(stage), ((n // c.STAGES) & 1) ^ 1)
        at = line_of(b, memory_b, h, number(size.heads) * group, q_start, pitch, c) + here
        ready = q_full.index(stage)
        mbarrier.expect(ready, c.TILE_Q * (c.D_PAD * 2 + 4))
        copy_in(q, memory_b, h, here, q_start, q_len, ready, q_tiles.index(stage), c.JAGGED)
        tma.async_copy_global_to_shared(lse, [at], ready, lse_rows.index(stage))
        ready = do_full.index(stage)
        mbarrier.expect(ready, c.TILE_Q * (c.DV_PAD * 2 + 4))
        copy_in(do, memory_b, h, here, q_start, q_len, ready, do_tiles.index(stage), c.JAGGED)
        tma.async_copy_global_to_shared(delta, [at], ready, delta_rows.index(stage))


@gluon.jit
def await_turns(turns, bars, place, spans, size, slots, c):
    """One warp: sees that every earlier tile of keys has added to a tile of queries, and lets this one add."""
    kv_full, q_full, do_full, empty, ds_full, turn, added, passed = bars
    b, memory_b, kv_h, tile = place
    q_start, q_len, kv_start, kv_len = sequence(spans, size, b, c)
    last, ending, whole, diagonal = query_runs(tile * c.TILE_KV, q_len, kv_len, c)
    count = ending + whole + diagonal
    group = number(size.group)
    for n in range(0, count * group):
        h = kv_h * group + n // count
        slot = first_slot(memory_b, h, b, q_start, tile, slots, size, c) + last - n % count
        mbarrier.wait(passed.index(n % AHEAD), ((n // AHEAD) & 1) ^ 1)
        gl.inline_asm_elementwise(
            """{
            .reg .pred done;
            .reg .u32 seen;
            again:
            ld.acquire.gpu.global.u32 seen, [$1];
            setp.ge.u32 done, seen, $2;
            @!done bra again;
            mov.u32 $0, seen;
            }""",
            "=r,l,r",
            [turns + 1 + slot, tile // 2],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
        mbarrier.arrive(turn.index(n % AHEAD), count=1)


@gluon.jit
def pass_turns(turns, bars, place, spans, size, slots, c):
    """One warp: lets the next tile of keys add to each tile of queries."""
    kv_full, q_full, do_full, empty, ds_full, turn, added, passed = bars
    b, memory_b, kv_h, tile = place
    q_start, q_len, kv_start, kv_len = sequence(spans, size, b, c)
    last, ending, whole, diagonal = query_runs(tile * c.TILE_KV, q_len, kv_len, c)
    count = ending + whole + diagonal
    group = number(size.group)
    for n in range(0, count * group):
        h = kv_h * group + n // count
        slot = first_slot(memory_b, h, b, q_start, tile, slots, size, c) + last - n % count
        mbarrier.wait(added.index(n % AHEAD), (n // AHEAD) & 1)
        gl.inline_asm_elementwise(
            """st.release.gpu.global.u32 [$1], $2;
            mov.u32 $0, 0;""",
            "=r,l,r",
            [turns + 1 + slot, tile // 2 + 1],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
        mbarrier.arrive(passed.index(n % AHEAD), count=1)


@gluon.jit
def add_share(sums, share, how):
    """Adds a warpgroup's [64, 64] share to the sums at `sums`, which lie as the threads hold them, four to a thread in a row.

    `how`: 0 to add, 1 to store what is the first to be there.
    """
    A: gl.constexpr = product(64)
    row = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, A)), 1)
    col = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, A)), 0)
    thread = (row // 16) * 32 + (row % 8) * 4 + (col % 8) // 2
    offset = ((col // 8) * 128 + thread) * 4 + ((row // 8) % 2) * 2 + col % 2
    gl.inline_asm_elementwise(
        """{
        .reg .u64 at;
        .reg .pred adds, stores;
        mad.wide.u32 at, $8, 4, $4;
        setp.eq.u32 adds, $16, 0;
        setp.eq.u32 stores, $16, 1;
        @stores st.global.v4.f32 [at], {$12, $13, $14, $15};
        @adds red.relaxed.gpu.global.add.v4.f32 [at], {$12, $13, $14, $15};
        mov.u32 $0, 0;
        mov.u32 $1, 0;
        mov.u32 $2, 0;
        mov.u32 $3, 0;
        }""",
        "=r,=r,=r,=r,l,l,l,l,r,r,r,r,f,f,f,f,r,r,r,r",
        [sums.to(gl.int64, bitcast=True), offset, share, how],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def begin_share(ds_tiles, k_tiles, two, none, c, half: gl.constexpr):
    """Begins this warpgroup's half of a tile's share in dq: the gradients of both warpgroups' scores by all the keys."""
    first_ds, second_ds = ds_tiles.index(two * 2), ds_tiles.index(two * 2 + 1)
    first_k, second_k = k_tiles.index(0), k_tiles.index(1)
    if c.D_PAD == 128:
        first_k, second_k = first_k.slice(half * 64, 64, dim=1), second_k.slice(half * 64, 64, dim=1)
    else:
        first_ds, second_ds = first_ds.slice(half * 64, 64, dim=1), second_ds.slice(half * 64, 64, dim=1)
    share = warpgroup_mma(first_ds.permute((1, 0)), first_k, none, use_acc=False, is_async=True)
    return warpgroup_mma(second_ds.permute((1, 0)), second_k, share, is_async=True)


@gluon.jit
def fold_fused(
    sums, tiles, buffers, bars, at, run, n, dq, scale, numbers, env, aux, c,
    half: gl.constexpr, both: gl.constexpr, mask: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Adds one run of tiles of queries to (dk, dv) of 64 keys, and their share to dq. MASKED tiles may also overhang."""
    S: gl.constexpr = product(c.TILE_Q)
    dk, dv = sums
    k_tiles, v_tiles = tiles
    q_tiles, do_tiles, lse_rows, delta_rows, ds_tiles = buffers
    kv_full, q_full, do_full, empty, ds_full, turn, added, passed = bars
    b, h, kv_idx, q_len, kv_len, how, slot = at
    last, count = run
    MASK: gl.constexpr = MASKED and c.MODE != "all"
    k = k_tiles.index(half)
    v = v_tiles.index(half)
    zero = gl.zeros([ROWS, c.TILE_Q], gl.float32, S)
    none = gl.zeros([64, 64], gl.float32, product(64))
    for i in range(0, count):
        tile = last - i
        stage = n % c.STAGES
        phase = (n // c.STAGES) & 1
        two = n % 2
        queries = q_tiles.index(stage)
        douts = do_tiles.index(stage)
        mbarrier.wait(q_full.index(stage), phase)
        s = warpgroup_mma(k, queries.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(do_full.index(stage), phase)
        dp = warpgroup_mma(v, douts.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        q_idx = tile * c.TILE_Q + gl.expand_dims(gl.arange(0, c.TILE_Q, layout=gl.SliceLayout(0, S)), 0)
        lse2 = gl.expand_dims(lse_rows.index(stage).load(gl.SliceLayout(0, S)), 0)
        p, slope = weights_of(s, lse2, (b, h, q_idx, kv_idx, q_len, kv_len, tile), scale, env, aux, c, both, mask, MASK, MASKED)
        if c.DROPOUT:
            keep = keep_places(numbers, b, h, q_idx, kv_idx)
        dropped = p
        if c.DROPOUT:
            dropped = gl.where(keep, p * numbers.keep_factor, 0.0)
        dropped = gl.convert_layout(dropped.to(douts.dtype), operand(c.DV_PAD), assert_trivial=True)
        dv = warpgroup_mma(dropped, douts, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        delta = gl.expand_dims(delta_rows.index(stage).load(gl.SliceLayout(0, S)), 0)
        if c.DROPOUT:
            dp = gl.where(keep, dp * numbers.keep_factor, 0.0)
        ds = score_gradient(p, dp, delta, slope, c, MASKED).to(queries.dtype)
        # the other warpgroup has read what lay here: it arrived for the tile before after that
        ds_tiles.index(two * 2 + half).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(two), count=1)
        dk = warpgroup_mma(gl.convert_layout(ds, operand(c.D_PAD), assert_trivial=True), queries, dk, is_async=True)
        mbarrier.wait(ds_full.index(two), (n // 2) & 1)
        share = begin_share(ds_tiles, k_tiles, two, none, c, half)
        dk, dv = warpgroup_mma_wait(2, deps=[dk, dv])
        mbarrier.arrive(empty.index(stage), count=1)
        share = warpgroup_mma_wait(0, deps=[share])
        mbarrier.wait(turn.index(n % AHEAD), (n // AHEAD) & 1)
        add_share(dq + (slot + tile).to(gl.int64) * 8192 + half * 4096, share, how)
        mbarrier.arrive(added.index(n % AHEAD), count=1)
        n += 1
    return dk, dv, n


@gluon.jit
def fused_consumer(
    half: gl.constexpr,
    held,
    buffers,
    bars,
    outputs,
    place,
    told,
    c,
    pre: gl.constexpr,
    both: gl.constexpr,
    mask: gl.constexpr,
):
    """One warpgroup: dk and dv of 64 keys, over every head that shares them, and half of their share in dq."""
    S: gl.constexpr = product(c.TILE_Q)
    spans, size, slots, numbers, scale, env = told
    dq, dk_out, dv_out = outputs
    k_tiles, v_tiles = held
    kv_full, q_full, do_full, empty, ds_full, turn, added, passed = bars
    b, memory_b, kv_h, tile = place
    q_start, q_len, kv_start, kv_len = sequence(spans, size, b, c)
    first = tile * c.TILE_KV
    own = first + half * ROWS
    kv_idx = own + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, S)), 1)
    dk = gl.zeros([ROWS, c.D_PAD], gl.float32, product(c.D_PAD))
    dv = gl.zeros([ROWS, c.DV_PAD], gl.float32, product(c.DV_PAD))
    last, ending, whole, diagonal = query_runs(first, q_len, kv_len, c)
    how = (tile < 2).to(gl.int32)
    mbarrier.wait(kv_full, 0)
    n = 0
    group = number(size.group)
    for member in range(0, group):
        h = kv_h * group + member
        slot = first_slot(memory_b, h, b, q_start, tile, slots, size, c)
        aux = pre(b, h, gl.minimum(kv_idx, kv_len - 1), q_len, kv_len, scale, env)
        at = (b, h, kv_idx, q_len, kv_len, how, slot)
        dk, dv, n = fold_fused(
            (dk, dv), held, buffers, bars, at, (last, ending), n, dq, scale, numbers, env, aux, c, half, both, mask, True
        )
        dk, dv, n = fold_fused(
            (dk, dv), held, buffers, bars, at, (last - ending, whole), n, dq, scale, numbers, env, aux, c, half, both, mask, False
        )
        dk, dv, n = fold_fused(
            (dk, dv), held, buffers, bars, at, (last - ending - whole, diagonal), n, dq, scale, numbers, env, aux, c,
            half, both, mask, True,
        )  # fmt: skip
    # values are read no more, each half by its own warpgroup alone; keys may still be, for the other's share
    v = v_tiles.index(half)
    v.store(dv.to(v.dtype))
    fence_async_shared()
    copy_out(dv_out, memory_b, kv_h, own, kv_start, kv_len, v, c.JAGGED)
    tma.store_wait(0)
    v.store((dk * scale).to(v.dtype))
    fence_async_shared()
    copy_out(dk_out, memory_b, kv_h, own, kv_start, kv_len, v, c.JAGGED)
    tma.store_wait(0)


@gluon.jit
def attention_gradients(
    q, k, v, do, lse, delta, pitch, dq, dk, dv, turns, slots, size, spans, numbers, scale, env, c,
    pre: gl.constexpr, both: gl.constexpr, mask: gl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys, and its share in the float32 sums `dq` of each tile of queries, a slot to a tile.

    `turns` is int32 [1 + 2 * B * Hq * slots] of zeros: the next place to take, and how many tiles of keys have added to a
    slot of each of two sums.
    """
    place = take_place(turns, size, spans, c)
    if place[0] < 0:
        return
    slots = number(slots)
    k_tiles = gl.allocate_shared_memory(k.dtype, [2, ROWS, c.D_PAD], shared(ROWS, c.D_PAD))
    v_tiles = gl.allocate_shared_memory(v.dtype, [2, ROWS, c.DV_PAD], shared(ROWS, c.DV_PAD))
    q_tiles = gl.allocate_shared_memory(q.dtype, [c.STAGES, c.TILE_Q, c.D_PAD], shared(c.TILE_Q, c.D_PAD))
    do_tiles = gl.allocate_shared_memory(do.dtype, [c.STAGES, c.TILE_Q, c.DV_PAD], shared(c.TILE_Q, c.DV_PAD))
    ds_tiles = gl.allocate_shared_memory(q.dtype, [4, ROWS, c.TILE_Q], shared(ROWS, c.TILE_Q))
    lse_rows = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.TILE_Q], lse.layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.TILE_Q], lse.layout)
    bars = (
        barriers(1, 1).index(0), barriers(c.STAGES, 1), barriers(c.STAGES, 1), barriers(c.STAGES, 2),
        barriers(2, 2), barriers(AHEAD, 1), barriers(AHEAD, 2), barriers(AHEAD, 1),
    )  # fmt: skip
    fence_async_shared()
    held = (k_tiles, v_tiles)
    buffers = (q_tiles, do_tiles, lse_rows, delta_rows, ds_tiles)
    outputs = (dq, dk, dv)
    told = (spans, size, slots, numbers, scale, env)
    gl.warp_specialize(
        [
            (fused_consumer, (0, held, buffers, bars, outputs, place, told, c, pre, both, mask)),
            (fused_consumer, (1, held, buffers, bars, outputs, place, told, c, pre, both, mask)),
            (fused_producer, ((q, do, lse, delta, k, v), held, buffers, bars, place, spans, size, pitch, c)),
            (await_turns, (turns, bars, place, spans, size, slots, c)),
            (pass_turns, (turns, bars, place, spans, size, slots, c)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
