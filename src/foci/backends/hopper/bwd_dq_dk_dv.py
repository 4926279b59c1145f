# mypy: ignore-errors
"""dq, dk and dv of a tile of keys in one pass: five products instead of the seven of two kernels.

Two warpgroups hold 64 keys each, as in `bwd_dk_dv`. They exchange the gradients of their scores through shared memory, and
each computes half of the tile's share in dq, 64 columns of 128 or 64 rows of 128, or a piece of the columns where there are two, and
leaves it in shared memory. From there a warp adds it to float32 sums in device memory by TMA, in a fixed order (`dq_semaphore`), while
the warpgroups go on.

Which tiles are visited is found by arithmetic without a mask and under the causal one; else they come from a table, with their ranks.
Scores are any functions that read nothing for each pair of positions; with dropout, the product and what is added to it.
"""

from foci.backends.hopper.bwd_task_queue import allocate_task_queue, has_task, pop_task, push_end, push_task
from foci.backends.hopper.bwd_tile_math import recompute_weights, row_line, scale_dscore
from foci.backends.hopper.dq_semaphore import (
    SHARE_LINE,
    count_query_tiles,
    find_key_task,
    group_members,
    nth_tile,
    query_runs,
    reduce_dq_shares,
    share_columns,
    store_dq_share,
    tile_at,
)
from foci.backends.hopper.dropout import apply_dropout, drops_by_key, load_dropout_params
from foci.backends.hopper.gluon_compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    tma,
    tma_load,
    view_smem,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from foci.backends.hopper.layouts import mma_layout, smem_layout
from foci.backends.hopper.masking import add_affine_columns, keep_columns, keep_marked, load_mask_bits
from foci.backends.hopper.mma import begin_pv, begin_scores, scale_accumulators, wait_accumulators, zero_accumulators
from foci.backends.hopper.smem import allocate_tiles, load_pieces, make_barriers, opaque_zero, sequence_span, store_pieces, tile_pieces
from foci.backends.hopper.softmax import round_weights
from foci.backends.hopper.task_queue import broadcast_ticket, fetch_ticket
from foci.backends.triton.tiles import decode

ROWS = gl.constexpr(64)


@gluon.jit
def load_keys(k, v, held, bars, place, span, n, c):
    """Keys and values of the n-th task, once those before are read no more."""
    k_tiles, v_tiles = held
    kv_full, kv_empty = bars
    b, memory_b, kv_h, tile, task = place[:5]
    kv_start, kv_len = span[2:]
    mbarrier.wait(kv_empty, (n & 1) ^ 1)
    mbarrier.expect(kv_full, 2 * ROWS * 2 * (c.D_PAD + c.DV_PAD))
    for half in gl.static_range(2):
        own = tile * c.TILE_KV + half * ROWS
        load_pieces(k, memory_b, kv_h, own, kv_start, kv_len, kv_full, tile_pieces(k_tiles, half), c.JAGGED)
        load_pieces(v, memory_b, kv_h, own, kv_start, kv_len, kv_full, tile_pieces(v_tiles, half), c.JAGGED)


@gluon.jit
def fused_producer(sources, held, buffers, bars, queue, order, spans, size, pitch, table, c):
    """One warp: of task after task keys and values once, and the queries of each head that shares them, each tile for one after the other.
    The first queries come before the keys, which wait until the task before is done."""
    q, do, lse, delta, k, v = sources
    q_tiles, do_tiles, lse_rows, delta_rows, ds_tiles, shares = buffers
    kv_bars, q_full, do_full, empty, ds_full, share_bars = bars
    group = group_members(size, c)
    tickets = decode(size.batch) * decode(size.heads) * decode(size.tasks)
    tasks = 0
    before = 0
    # where tiles wait for those of later programs, each has a program of its own
    ticket = gl.program_id(0) if c.ROUND else broadcast_ticket(fetch_ticket(order.turns, False))
    while ticket < tickets:
        place = find_key_task(ticket, order, size, spans, c)
        b, memory_b, kv_h, tile, task = place[:5]
        if b >= 0:
            span = sequence_span(place, spans, size, c)
            q_start, q_len, kv_start, kv_len = span
            runs = query_runs(table, order.ranks, place, kv_h * group, q_len, kv_len, c)
            push_task(queue, tasks, place, runs)
            count = count_query_tiles(runs) * group
            if count == 0:
                load_keys(k, v, held, kv_bars, place, span, tasks, c)
            for i in range(0, count):
                n = before + i
                h = kv_h * group + i % group
                here = nth_tile(table, runs, i // group, c) * c.TILE_Q
                at = row_line(b, memory_b, h, decode(size.heads) * group, q_start, pitch, c) + here
                stage = n % c.STAGES
                mbarrier.wait(empty.index(stage), ((n // c.STAGES) & 1) ^ 1)
                ready = q_full.index(stage)
                mbarrier.expect(ready, c.TILE_Q * (c.D_PAD * 2 + 4))
                load_pieces(q, memory_b, h, here, q_start, q_len, ready, tile_pieces(q_tiles, stage), c.JAGGED)
                tma_load(lse, [at], ready, lse_rows.index(stage))
                ready = do_full.index(stage)
                mbarrier.expect(ready, c.TILE_Q * (c.DV_PAD * 2 + 4))
                load_pieces(do, memory_b, h, here, q_start, q_len, ready, tile_pieces(do_tiles, stage), c.JAGGED)
                tma_load(delta, [at], ready, delta_rows.index(stage))
                if i == 0:
                    load_keys(k, v, held, kv_bars, place, span, tasks, c)
            before += count
            tasks += 1
        ticket = tickets if c.ROUND else broadcast_ticket(fetch_ticket(order.turns, False))
    push_end(queue, tasks)


@gluon.jit
def begin_dq_share(ds_tiles, k_tiles, two, nought, c, half: gl.constexpr):
    """Begins this warpgroup's half of a tile's share in dq: the gradients of both warpgroups' scores by all the keys. `nought`: see
    `accumulate_fused`."""
    COLUMNS: gl.constexpr = share_columns(c.TILE_Q, c.D_PAD, half)
    none = gl.zeros([64, COLUMNS], gl.float32, mma_layout(COLUMNS))
    first_ds, second_ds = ds_tiles.index(two * 2), ds_tiles.index(two * 2 + 1)
    if len(k_tiles) == 2:
        first_k, second_k = k_tiles[half].index(nought), k_tiles[half].index(1 + nought)
    else:
        first_k, second_k = k_tiles[0].index(nought), k_tiles[0].index(1 + nought)
    if c.TILE_Q == 64 and len(k_tiles) == 1:
        first_k, second_k = first_k.slice(half * 64, 64, dim=1), second_k.slice(half * 64, 64, dim=1)
    elif c.TILE_Q == 128:
        first_ds, second_ds = first_ds.slice(half * 64, 64, dim=1), second_ds.slice(half * 64, 64, dim=1)
    share = warpgroup_mma(first_ds.permute((1, 0)), first_k, none, use_acc=False, is_async=True)
    return warpgroup_mma(second_ds.permute((1, 0)), second_k, share, is_async=True)


@gluon.jit
def accumulate_fused(
    sums, held, buffers, bars, at, run, n, table, group, scale, odds, env, aux, c,
    half: gl.constexpr, both: gl.constexpr, mask: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Adds one run of tiles of queries to (dk, dv) of 64 keys, and their share to dq. MASKED tiles may also overhang."""
    S: gl.constexpr = mma_layout(c.TILE_Q)
    dk, dv = sums
    k_tiles, v_tiles = held
    q_tiles, do_tiles, lse_rows, delta_rows, ds_tiles, shares = buffers
    kv_bars, q_full, do_full, empty, ds_full, share_bars = bars
    b, h, kv_idx, q_len, kv_len, first, ends, before = at
    line, last, count = run
    BARE: gl.constexpr = c.BOUNDED or c.WORDS
    MASK: gl.constexpr = MASKED and c.MODE != "all"
    # whether registers are left for what is told of rows while products run
    EARLY: gl.constexpr = c.TILE_Q == 64
    zero = gl.zeros([ROWS, c.TILE_Q], gl.float32, S)
    for i in range(0, count * group):
        tile = tile_at(table, line, last - i // group, c)
        stage = n % c.STAGES
        phase = (n // c.STAGES) & 1
        two = n % 2
        # where keys and values lie is found anew for each tile: kept for each product instead, it takes registers that there are not
        nought = opaque_zero(0)
        queries = tile_pieces(q_tiles, stage)
        douts = tile_pieces(do_tiles, stage)
        mbarrier.wait(q_full.index(stage), phase)
        s = begin_scores(tile_pieces(k_tiles, half + nought), queries, zero, False)
        mbarrier.wait(do_full.index(stage), phase)
        dp = begin_scores(tile_pieces(v_tiles, half + nought), douts, zero, False)
        if MASKED and c.WORDS:
            words = load_mask_bits(table.words + ((line * decode(table.width) + tile) * 2 + half) * (ROWS * 4), True, c.TILE_Q)
        if c.DROPOUT:
            drops = drops_by_key(first, tile * c.TILE_Q, b, h + i % group, odds, c.TILE_Q, c.AT_ONCE)
        if EARLY:
            lse2 = lse_rows.index(stage).load(gl.SliceLayout(0, S))
        s = warpgroup_mma_wait(len(douts), deps=[s])
        q_idx = tile * c.TILE_Q + gl.expand_dims(gl.arange(0, c.TILE_Q, layout=gl.SliceLayout(0, S)), 0)
        if not EARLY:
            lse2 = lse_rows.index(stage).load(gl.SliceLayout(0, S))
        if c.LINE:
            lead, rise = both(b, h, tile * c.TILE_Q, kv_idx, q_len, kv_len, env, aux)
            lse2 = gl.expand_dims(add_affine_columns(lse2, rise), 0) - lead
        else:
            lse2 = gl.expand_dims(lse2, 0)
        where = (b, h, q_idx, kv_idx, q_len, kv_len, tile)
        p, slope = recompute_weights(s, lse2, where, scale, env, aux, c, both, mask, MASK and not BARE, MASKED and not BARE)
        if MASKED and c.BOUNDED:
            p = keep_columns(p, ends[0] - tile * c.TILE_Q, ends[1] - tile * c.TILE_Q)
        elif MASKED and c.WORDS:
            p = keep_marked(p, words.to(gl.int32), 0.0)
        if c.DROPOUT:
            p = apply_dropout(p, drops, c)
        weights = round_weights(p, douts[0].dtype, c)
        steep = scale_dscore(p, slope, c, MASKED)
        if EARLY:
            delta = gl.expand_dims(delta_rows.index(stage).load(gl.SliceLayout(0, S)), 0)
        dp = warpgroup_mma_wait(0, deps=[dp])
        if not EARLY:
            delta = gl.expand_dims(delta_rows.index(stage).load(gl.SliceLayout(0, S)), 0)
        if c.DROPOUT:
            ds = (gl.maximum(p, 0.0) * dp - gl.abs(p) * delta).to(queries[0].dtype)
        else:
            ds = (steep * (dp - delta)).to(queries[0].dtype)
        # the other warpgroup has read what lay here: it arrived for the tile before after that
        ds_tiles.index(two * 2 + half).store(ds)
        # runs while the warpgroups wait for each other
        dv = begin_pv(weights, douts, dv)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(two), count=1)
        if c.DEFERS:
            # one fence for both: that of the share which the tile before left
            mbarrier.arrive(share_bars[0].index(1 - two), count=1, pred=n > before)
        mbarrier.wait(ds_full.index(two), (n // 2) & 1)
        share = begin_dq_share(ds_tiles, k_tiles, two, nought, c, half)
        dk = begin_pv(ds, queries, dk)
        found = warpgroup_mma_wait(len(dk), deps=(share,) + dv)
        share, dv = found[0], found[1:]
        store_dq_share(shares, share, share_bars, n, half)
        if not c.DEFERS:
            fence_async_shared()
            mbarrier.arrive(share_bars[0].index(two), count=1)
        dk = wait_accumulators(dk)
        mbarrier.arrive(empty.index(stage), count=1)
        n += 1
    return dk, dv, n


@gluon.jit
def fused_consumer(
    half: gl.constexpr, held, buffers, bars, outputs, queue, told, c,
    pre: gl.constexpr, both: gl.constexpr, mask: gl.constexpr, bounds: gl.constexpr,
):  # fmt: skip
    """One warpgroup: of task after task dk and dv of 64 keys, over every head that shares them, and half of their share in dq."""
    tasks = 0
    before = 0
    while has_task(queue, tasks, 4):
        place, runs = pop_task(queue, tasks, c, 4)
        before = fold_task(half, held, buffers, bars, outputs, place, runs, tasks, before, told, c, pre, both, mask, bounds)
        tasks += 1
    tma.store_wait(0)


@gluon.jit
def fold_task(
    half: gl.constexpr, held, buffers, bars, outputs, place, runs, tasks, before, told, c,
    pre: gl.constexpr, both: gl.constexpr, mask: gl.constexpr, bounds: gl.constexpr,
):  # fmt: skip
    """One task, with so many tasks and tiles of queries before it; returns how many tiles there were then."""
    S: gl.constexpr = mma_layout(c.TILE_Q)
    # whether dk and dv have room where gradients of scores lie, so that the next keys and values come while they leave
    LEAVES: gl.constexpr = c.TILE_Q >= c.D_PAD + c.DV_PAD
    spans, size, table, scale, numbers, env = told
    dk_out, dv_out = outputs
    k_tiles, v_tiles = held
    q_tiles, do_tiles, lse_rows, delta_rows, ds_tiles, shares = buffers
    kv_bars, q_full, do_full, empty, ds_full, share_bars = bars
    b, memory_b, kv_h, tile, task = place[:5]
    q_start, q_len, kv_start, kv_len = sequence_span(place, spans, size, c)
    first = tile * c.TILE_KV
    own = first + half * ROWS
    kv_idx = own + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, S)), 1)
    dk = zero_accumulators(ROWS, c.D_PAD)
    dv = zero_accumulators(ROWS, c.DV_PAD)
    mbarrier.wait(kv_bars[0], tasks & 1)
    if LEAVES:
        # until what the task before left has been read
        tma.store_wait(0)
        thread_barrier()
    n = before
    group = group_members(size, c)
    # a mask that tells heads apart comes with one head to a group
    h = kv_h * group
    aux = pre(b, h, gl.minimum(kv_idx, kv_len - 1), q_len, kv_len, scale, env)
    ends = 0
    if c.BOUNDED:
        keys = own + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
        low, high = bounds(b, h, gl.minimum(keys, kv_len - 1), q_len, kv_len, env)
        ends = (low, gl.where(keys < kv_len, high, -1))
    at = (b, h, kv_idx, q_len, kv_len, own, ends, before)
    odds = load_dropout_params(numbers, c)
    line, last, ending, whole_last, whole, leading_last, leading = runs[:7]
    again_last, again = (runs[7], runs[8]) if c.ROUND else (whole_last, 0)
    # masked tiles, whole ones, masked ones, whole ones
    for part in range(0, 2):
        run = (line, gl.where(part == 0, last, leading_last), gl.where(part == 0, ending, leading))
        dk, dv, n = accumulate_fused(
            (dk, dv), held, buffers, bars, at, run, n, table, group, scale, odds, env, aux, c, half, both, mask, True
        )
        run = (line, gl.where(part == 0, whole_last, again_last), gl.where(part == 0, whole, again))
        dk, dv, n = accumulate_fused(
            (dk, dv), held, buffers, bars, at, run, n, table, group, scale, odds, env, aux, c, half, both, mask, False
        )
    if c.DEFERS:
        fence_async_shared()
        mbarrier.arrive(share_bars[0].index((n + 1) % 2), count=1, pred=n > before)
    dk = scale_accumulators(dk, scale)
    if LEAVES:
        mbarrier.arrive(kv_bars[1], count=1)
        # read for the last time by the products of the last tile but one, which both warpgroups have done
        free = view_smem(ds_tiles.index(n % 2 * 2 + half), ds_tiles.dtype, [c.TILE_Q // c.D_PAD, ROWS, c.D_PAD], smem_layout(ROWS, c.D_PAD))
        store_pieces(dv_out, memory_b, kv_h, own, kv_start, kv_len, (free.index(0),), dv, c.JAGGED)
        store_pieces(dk_out, memory_b, kv_h, own, kv_start, kv_len, (free.index(1),), dk, c.JAGGED)
    else:
        # values are read no more, each half by its own warpgroup alone; keys may still be, for the other's share
        v = tile_pieces(v_tiles, half)
        store_pieces(dv_out, memory_b, kv_h, own, kv_start, kv_len, v, dv, c.JAGGED)
        tma.store_wait(0)
        store_pieces(dk_out, memory_b, kv_h, own, kv_start, kv_len, v, dk, c.JAGGED)
        tma.store_wait(0)
        # by all threads, before one says so
        thread_barrier()
        mbarrier.arrive(kv_bars[1], count=1)
    return n


@gluon.jit
def attention_gradients(
    q, k, v, do, lse, delta, pitch, dq, dk, dv, order, size, spans, table, scale, numbers, env, c,
    pre: gl.constexpr, both: gl.constexpr, mask: gl.constexpr, bounds: gl.constexpr,
):  # fmt: skip
    """dk and dv of tiles of keys, one after the other, and their shares in the float32 sums `dq` of each tile of queries:
    [SUMS * B * Hq * slots * rows, 256], a slot of so many `rows` as its descriptor has to a tile. Tensors come as descriptors, lse in
    base 2 and delta as `bwd_preprocess.begin_gradients` leaves them."""
    k_tiles = allocate_tiles(k.dtype, 2, ROWS, c.D_PAD)
    v_tiles = allocate_tiles(v.dtype, 2, ROWS, c.DV_PAD)
    q_tiles = allocate_tiles(q.dtype, c.STAGES, c.TILE_Q, c.D_PAD)
    do_tiles = allocate_tiles(do.dtype, c.STAGES, c.TILE_Q, c.DV_PAD)
    ds_tiles = gl.allocate_shared_memory(q.dtype, [4, ROWS, c.TILE_Q], smem_layout(ROWS, c.TILE_Q))
    lse_rows = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.TILE_Q], lse.layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.TILE_Q], lse.layout)
    whole_shares = gl.allocate_shared_memory(gl.float32, [2, dq.block_shape[0], SHARE_LINE], dq.layout)
    shares = view_smem(whole_shares, gl.float32, [4, dq.block_shape[0] * SHARE_LINE // 2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    share_bars = (make_barriers(2, 2), make_barriers(2, 1))
    bars = (
        (make_barriers(1, 1).index(0), make_barriers(1, 2).index(0)), make_barriers(c.STAGES, 1), make_barriers(c.STAGES, 1),
        make_barriers(c.STAGES, 2), make_barriers(2, 2), share_bars,
    )  # fmt: skip
    queue = allocate_task_queue()
    fence_async_shared()
    held = (k_tiles, v_tiles)
    buffers = (q_tiles, do_tiles, lse_rows, delta_rows, ds_tiles, shares)
    told = (spans, size, table, scale, numbers, env)
    gl.warp_specialize(
        [
            (fused_consumer, (0, held, buffers, bars, (dk, dv), queue, told, c, pre, both, mask, bounds)),
            (fused_consumer, (1, held, buffers, bars, (dk, dv), queue, told, c, pre, both, mask, bounds)),
            (fused_producer, ((q, do, lse, delta, k, v), held, buffers, bars, queue, order, spans, size, pitch, table, c)),
            (reduce_dq_shares, (dq, order, whole_shares, share_bars, queue, spans, size, table, c, 0)),
            (reduce_dq_shares, (dq, order, whole_shares, share_bars, queue, spans, size, table, c, 1)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
