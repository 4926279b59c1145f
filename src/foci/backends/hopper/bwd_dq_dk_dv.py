# mypy: ignore-errors
"""dq, dk and dv in one pass over tiles of keys: five products a tile instead of the seven of two kernels.

    B, Hq, Hkv, Sq, Skv, D, Dv    as in `foci.backends.hopper.forward`
    q, do                         TMA descriptors [B, Hq, Sq, D], [B, Hq, Sq, Dv] of TILE_Q rows; do is the gradient of out
    k, v, dk, dv                  TMA descriptors [B, Hkv, Skv, D or Dv] of 64 rows
    lse, delta                    TMA descriptors, float32, one value per query: logsumexp in base 2, and sum(out * do) - dlse
    dq                            TMA descriptor of float32 accumulators, a slot for each tile of queries, see `attention_gradients`
    S^T, P^T, dP^T, dS^T          [64 keys, TILE_Q], in registers of a warpgroup
    ds_tiles                      dS^T of both warpgroups, two tiles each, in shared memory
    shares                        a key tile's contribution to dq of one query tile, float32, in shared memory

Two warpgroups hold 64 keys each, as in `bwd_dk_dv`. They exchange dS through shared memory, and each computes half of the key tile's share
of dq (64 columns of TILE_Q = 64 rows, 64 rows of TILE_Q = 128, or one piece where the width is split in two) and writes it to shared
memory. Another warp adds it to float32 accumulators in device memory by TMA, in a fixed order (`dq_semaphore`), while the warpgroups
continue.

Without a mask and under the causal mask the visited tiles are computed; other masks bring a table of tiles and their ranks. Score functions
must not read memory for each pair of positions; with dropout they may only add to the product.
"""

from foci.backends.gpu.tiles import decode
from foci.backends.hopper.bwd_task_queue import allocate_task_queue, has_task, pop_task, push_end, push_task
from foci.backends.hopper.bwd_tile_math import recompute_weights, row_line, scale_dscore
from foci.backends.hopper.dq_semaphore import (
    SHARE_LINE,
    count_query_tiles,
    find_key_task,
    find_query_runs,
    group_members,
    nth_tile,
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
from foci.backends.hopper.masking import add_affine_columns, fill_unset_bits, load_mask_bits, zero_outside
from foci.backends.hopper.mma import begin_pv, begin_scores, scale_accumulators, wait_accumulators, zero_accumulators
from foci.backends.hopper.smem import allocate_tiles, load_pieces, make_barriers, opaque_value, sequence_span, store_pieces, tile_pieces
from foci.backends.hopper.softmax import round_weights
from foci.backends.hopper.task_queue import broadcast_ticket, fetch_ticket

ROWS = gl.constexpr(64)


@gluon.jit
def load_keys(k, v, kv_smem, bars, place, span, n, c):
    """Load keys and values of the n-th task, once those of the previous task are no longer read."""
    k_tiles, v_tiles = kv_smem
    kv_full, kv_empty = bars
    b, memory_b, kv_h, tile, task = place[:5]
    kv_start, kv_len = span[2:]
    mbarrier.wait(kv_empty, (n & 1) ^ 1)
    mbarrier.expect(kv_full, 2 * ROWS * 2 * (c.D_PAD + c.DV_PAD))
    for half in gl.static_range(2):
        half_first = tile * c.TILE_KV + half * ROWS
        load_pieces(k, memory_b, kv_h, half_first, kv_start, kv_len, kv_full, tile_pieces(k_tiles, half), c.JAGGED)
        load_pieces(v, memory_b, kv_h, half_first, kv_start, kv_len, kv_full, tile_pieces(v_tiles, half), c.JAGGED)


@gluon.jit
def fused_producer(sources, kv_smem, buffers, bars, queue, order, spans, size, pitch, table, c):
    """Producer warp: for task after task K and V once, and each query tile for all heads that share them in turn.
    The first queries are requested before K and V, whose buffers are free only when the previous task is done."""
    q, do, lse, delta, k, v = sources
    q_tiles, do_tiles, lse_rows, delta_rows, ds_tiles, shares = buffers
    kv_bars, q_full, do_full, empty, ds_full, share_bars = bars
    group = group_members(size, c)
    tickets = decode(size.batch) * decode(size.heads) * decode(size.tasks)
    tasks = 0
    before = 0
    # with ROUND, key tiles wait for key tiles of later programs, so each has a program of its own
    ticket = gl.program_id(0) if c.ROUND else broadcast_ticket(fetch_ticket(order.turns, False))
    while ticket < tickets:
        place = find_key_task(ticket, order, size, spans, c)
        b, memory_b, kv_h, tile, task = place[:5]
        if b >= 0:
            span = sequence_span(place, spans, size, c)
            q_start, q_len, kv_start, kv_len = span
            runs = find_query_runs(table, order.ranks, place, kv_h * group, q_len, kv_len, c)
            push_task(queue, tasks, place, runs)
            count = count_query_tiles(runs) * group
            if count == 0:
                load_keys(k, v, kv_smem, kv_bars, place, span, tasks, c)
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
                    load_keys(k, v, kv_smem, kv_bars, place, span, tasks, c)
            before += count
            tasks += 1
        ticket = tickets if c.ROUND else broadcast_ticket(fetch_ticket(order.turns, False))
    push_end(queue, tasks)


@gluon.jit
def begin_dq_share(ds_tiles, k_tiles, parity, opaque, c, half: gl.constexpr):
    """Begin this warpgroup's half of dQ = dS K, over all 128 keys. `opaque`: see `accumulate_fused`."""
    COLUMNS: gl.constexpr = share_columns(c.TILE_Q, c.D_PAD, half)
    none = gl.zeros([64, COLUMNS], gl.float32, mma_layout(COLUMNS))
    first_ds, second_ds = ds_tiles.index(parity * 2), ds_tiles.index(parity * 2 + 1)
    if len(k_tiles) == 2:
        first_k, second_k = k_tiles[half].index(opaque), k_tiles[half].index(1 + opaque)
    else:
        first_k, second_k = k_tiles[0].index(opaque), k_tiles[0].index(1 + opaque)
    if c.TILE_Q == 64 and len(k_tiles) == 1:
        first_k, second_k = first_k.slice(half * 64, 64, dim=1), second_k.slice(half * 64, 64, dim=1)
    elif c.TILE_Q == 128:
        first_ds, second_ds = first_ds.slice(half * 64, 64, dim=1), second_ds.slice(half * 64, 64, dim=1)
    share = warpgroup_mma(first_ds.permute((1, 0)), first_k, none, use_acc=False, is_async=True)
    return warpgroup_mma(second_ds.permute((1, 0)), second_k, share, is_async=True)


@gluon.jit
def accumulate_fused(
    sums, kv_smem, buffers, bars, at, run, n, table, group, scale, dropout_params, env, aux, c,
    half: gl.constexpr, both: gl.constexpr, mask: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Accumulate one run of query tiles into (dk, dv) of 64 keys, and hand over their shares of dq. MASKED tiles may also overhang."""
    S: gl.constexpr = mma_layout(c.TILE_Q)
    dk, dv = sums
    k_tiles, v_tiles = kv_smem
    q_tiles, do_tiles, lse_rows, delta_rows, ds_tiles, shares = buffers
    kv_bars, q_full, do_full, empty, ds_full, share_bars = bars
    b, h, kv_idx, q_len, kv_len, first, query_bounds, before = at
    line, last, count = run
    MASKS_AFTER: gl.constexpr = c.BOUNDED or c.MASK_BITS
    MASK: gl.constexpr = MASKED and c.MODE != "all"
    # load lse and delta while products run, if registers are left for them
    EARLY: gl.constexpr = c.TILE_Q == 64
    zero = gl.zeros([ROWS, c.TILE_Q], gl.float32, S)
    for i in range(0, count * group):
        tile = tile_at(table, line, last - i // group, c)
        stage = n % c.STAGES
        phase = (n // c.STAGES) & 1
        parity = n % 2
        # recompute the addresses of K and V for each tile: hoisted, they would take registers that are not there
        opaque = opaque_value(0)
        queries = tile_pieces(q_tiles, stage)
        douts = tile_pieces(do_tiles, stage)
        # S^T = K Q^T and dP^T = V dO^T, both asynchronous
        mbarrier.wait(q_full.index(stage), phase)
        s = begin_scores(tile_pieces(k_tiles, half + opaque), queries, zero, False)
        mbarrier.wait(do_full.index(stage), phase)
        dp = begin_scores(tile_pieces(v_tiles, half + opaque), douts, zero, False)
        if MASKED and c.MASK_BITS:
            words = load_mask_bits(table.bits + ((line * decode(table.width) + tile) * 2 + half) * (ROWS * 4), True, c.TILE_Q)
        if c.DROPOUT:
            drops = drops_by_key(first, tile * c.TILE_Q, b, h + i % group, dropout_params, c.TILE_Q, c.DROPOUT_QUERIES)
        if EARLY:
            lse2 = lse_rows.index(stage).load(gl.SliceLayout(0, S))
        s = warpgroup_mma_wait(len(douts), deps=[s])
        q_idx = tile * c.TILE_Q + gl.expand_dims(gl.arange(0, c.TILE_Q, layout=gl.SliceLayout(0, S)), 0)
        if not EARLY:
            lse2 = lse_rows.index(stage).load(gl.SliceLayout(0, S))
        # P^T = exp2(S^T - lse), masked; dropped weights get a negative sign
        if c.AFFINE:
            row_bias, query_slope = both(b, h, tile * c.TILE_Q, kv_idx, q_len, kv_len, env, aux)
            lse2 = gl.expand_dims(add_affine_columns(lse2, query_slope), 0) - row_bias
        else:
            lse2 = gl.expand_dims(lse2, 0)
        where = (b, h, q_idx, kv_idx, q_len, kv_len, tile)
        p, slope = recompute_weights(s, lse2, where, scale, env, aux, c, both, mask, MASK and not MASKS_AFTER, MASKED and not MASKS_AFTER)
        if MASKED and c.BOUNDED:
            p = zero_outside(p, query_bounds[0] - tile * c.TILE_Q, query_bounds[1] - tile * c.TILE_Q)
        elif MASKED and c.MASK_BITS:
            p = fill_unset_bits(p, words.to(gl.int32), 0.0)
        if c.DROPOUT:
            p = apply_dropout(p, drops, c)
        p_half = round_weights(p, douts[0].dtype, c)
        dscore_scaled = scale_dscore(p, slope, c, MASKED)
        if EARLY:
            delta = gl.expand_dims(delta_rows.index(stage).load(gl.SliceLayout(0, S)), 0)
        # dS^T = P^T * slope * (dP^T - delta)
        dp = warpgroup_mma_wait(0, deps=[dp])
        if not EARLY:
            delta = gl.expand_dims(delta_rows.index(stage).load(gl.SliceLayout(0, S)), 0)
        if c.DROPOUT:
            ds = (gl.maximum(p, 0.0) * dp - gl.abs(p) * delta).to(queries[0].dtype)
        else:
            ds = (dscore_scaled * (dp - delta)).to(queries[0].dtype)
        # this buffer was read for tile n - 2; both warpgroups finished that before they arrived for tile n - 1
        ds_tiles.index(parity * 2 + half).store(ds)
        # dV += P^T dO runs while the warpgroups wait for each other's dS
        dv = begin_pv(p_half, douts, dv)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(parity), count=1)
        if c.DEFERS_DQ:
            # the fence above also covers the previous tile's share: hand it over now
            mbarrier.arrive(share_bars[0].index(1 - parity), count=1, pred=n > before)
        mbarrier.wait(ds_full.index(parity), (n // 2) & 1)
        # this warpgroup's half of dQ = dS K, then dK += dS^T Q
        share = begin_dq_share(ds_tiles, k_tiles, parity, opaque, c, half)
        dk = begin_pv(ds, queries, dk)
        results = warpgroup_mma_wait(len(dk), deps=(share,) + dv)
        share, dv = results[0], results[1:]
        store_dq_share(shares, share, share_bars, n, half)
        if not c.DEFERS_DQ:
            fence_async_shared()
            mbarrier.arrive(share_bars[0].index(parity), count=1)
        dk = wait_accumulators(dk)
        mbarrier.arrive(empty.index(stage), count=1)
        n += 1
    return dk, dv, n


@gluon.jit
def fused_consumer(
    half: gl.constexpr, kv_smem, buffers, bars, outputs, queue, params, c,
    pre: gl.constexpr, both: gl.constexpr, mask: gl.constexpr, bounds: gl.constexpr,
):  # fmt: skip
    """One warpgroup: for task after task dk and dv of 64 keys, and half of each share of dq."""
    tasks = 0
    before = 0
    while has_task(queue, tasks, 4):
        place, runs = pop_task(queue, tasks, c, 4)
        before = accumulate_task(half, kv_smem, buffers, bars, outputs, place, runs, tasks, before, params, c, pre, both, mask, bounds)
        tasks += 1
    tma.store_wait(0)


@gluon.jit
def accumulate_task(
    half: gl.constexpr, kv_smem, buffers, bars, outputs, place, runs, tasks, before, params, c,
    pre: gl.constexpr, both: gl.constexpr, mask: gl.constexpr, bounds: gl.constexpr,
):  # fmt: skip
    """Compute one task; `tasks` tasks and `before` query tiles preceded it. Returns the number of query tiles so far."""
    S: gl.constexpr = mma_layout(c.TILE_Q)
    # stage dk and dv in the dS buffers if they fit: K and V of the next task then load while dk and dv are stored
    REUSES_DS: gl.constexpr = c.TILE_Q >= c.D_PAD + c.DV_PAD
    spans, size, table, scale, numbers, env = params
    dk_out, dv_out = outputs
    k_tiles, v_tiles = kv_smem
    q_tiles, do_tiles, lse_rows, delta_rows, ds_tiles, shares = buffers
    kv_bars, q_full, do_full, empty, ds_full, share_bars = bars
    b, memory_b, kv_h, tile, task = place[:5]
    q_start, q_len, kv_start, kv_len = sequence_span(place, spans, size, c)
    first = tile * c.TILE_KV
    half_first = first + half * ROWS
    kv_idx = half_first + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, S)), 1)
    dk = zero_accumulators(ROWS, c.D_PAD)
    dv = zero_accumulators(ROWS, c.DV_PAD)
    mbarrier.wait(kv_bars[0], tasks & 1)
    if REUSES_DS:
        # the previous task's dk and dv, staged in the dS buffers, must have been read by TMA
        tma.store_wait(0)
        thread_barrier()
    n = before
    group = group_members(size, c)
    # a mask that depends on the head is only taken with one query head per key head
    h = kv_h * group
    aux = pre(b, h, gl.minimum(kv_idx, kv_len - 1), q_len, kv_len, scale, env)
    query_bounds = 0
    if c.BOUNDED:
        keys = half_first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
        first_query, last_query = bounds(b, h, gl.minimum(keys, kv_len - 1), q_len, kv_len, env)
        query_bounds = (first_query, gl.where(keys < kv_len, last_query, -1))
    at = (b, h, kv_idx, q_len, kv_len, half_first, query_bounds, before)
    dropout_params = load_dropout_params(numbers, c)
    line, high_last, high, full_last, full, low_last, low = runs[:7]
    wrap_last, wrap = (runs[7], runs[8]) if c.ROUND else (full_last, 0)
    # a masked run, a full one, a masked one, and with ROUND a full one: a loop over both pairs, so that the code is there once
    for part in range(0, 2):
        run = (line, gl.where(part == 0, high_last, low_last), gl.where(part == 0, high, low))
        dk, dv, n = accumulate_fused(
            (dk, dv), kv_smem, buffers, bars, at, run, n, table, group, scale, dropout_params, env, aux, c, half, both, mask, True
        )
        run = (line, gl.where(part == 0, full_last, wrap_last), gl.where(part == 0, full, wrap))
        dk, dv, n = accumulate_fused(
            (dk, dv), kv_smem, buffers, bars, at, run, n, table, group, scale, dropout_params, env, aux, c, half, both, mask, False
        )
    if c.DEFERS_DQ:
        fence_async_shared()
        mbarrier.arrive(share_bars[0].index((n + 1) % 2), count=1, pred=n > before)
    dk = scale_accumulators(dk, scale)
    if REUSES_DS:
        mbarrier.arrive(kv_bars[1], count=1)
        # these buffers were last read by the products of the last tile but one, which both warpgroups have finished
        free = view_smem(ds_tiles.index(n % 2 * 2 + half), ds_tiles.dtype, [c.TILE_Q // c.D_PAD, ROWS, c.D_PAD], smem_layout(ROWS, c.D_PAD))
        store_pieces(dv_out, memory_b, kv_h, half_first, kv_start, kv_len, (free.index(0),), dv, c.JAGGED)
        store_pieces(dk_out, memory_b, kv_h, half_first, kv_start, kv_len, (free.index(1),), dk, c.JAGGED)
    else:
        # stage both in this warpgroup's half of V, which no one else reads; the other warpgroup may still read K for dq
        v = tile_pieces(v_tiles, half)
        store_pieces(dv_out, memory_b, kv_h, half_first, kv_start, kv_len, v, dv, c.JAGGED)
        tma.store_wait(0)
        store_pieces(dk_out, memory_b, kv_h, half_first, kv_start, kv_len, v, dk, c.JAGGED)
        tma.store_wait(0)
        # all threads must be done before one arrives
        thread_barrier()
        mbarrier.arrive(kv_bars[1], count=1)
    return n


@gluon.jit
def attention_gradients(
    q, k, v, do, lse, delta, pitch, dq, dk, dv, order, size, spans, table, scale, numbers, env, c,
    pre: gl.constexpr, both: gl.constexpr, mask: gl.constexpr, bounds: gl.constexpr,
):  # fmt: skip
    """dq, dk and dv of key tile after key tile. Shapes are in the legend above; `lse` and `delta` are laid out by
    `bwd_preprocess.begin_gradients`.

    dq: float32 accumulators [SUMS * B * Hq * slots * rows, 256]; a slot of `rows` rows, the rows of the descriptor's box, for each query
    tile.
    """
    k_tiles = allocate_tiles(k.dtype, 2, ROWS, c.D_PAD)
    v_tiles = allocate_tiles(v.dtype, 2, ROWS, c.DV_PAD)
    q_tiles = allocate_tiles(q.dtype, c.STAGES, c.TILE_Q, c.D_PAD)
    do_tiles = allocate_tiles(do.dtype, c.STAGES, c.TILE_Q, c.DV_PAD)
    ds_tiles = gl.allocate_shared_memory(q.dtype, [4, ROWS, c.TILE_Q], smem_layout(ROWS, c.TILE_Q))
    lse_rows = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.TILE_Q], lse.layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.TILE_Q], lse.layout)
    share_boxes = gl.allocate_shared_memory(gl.float32, [2, dq.block_shape[0], SHARE_LINE], dq.layout)
    shares = view_smem(share_boxes, gl.float32, [4, dq.block_shape[0] * SHARE_LINE // 2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    share_bars = (make_barriers(2, 2), make_barriers(2, 1))
    bars = (
        (make_barriers(1, 1).index(0), make_barriers(1, 2).index(0)), make_barriers(c.STAGES, 1), make_barriers(c.STAGES, 1),
        make_barriers(c.STAGES, 2), make_barriers(2, 2), share_bars,
    )  # fmt: skip
    queue = allocate_task_queue()
    fence_async_shared()
    kv_smem = (k_tiles, v_tiles)
    buffers = (q_tiles, do_tiles, lse_rows, delta_rows, ds_tiles, shares)
    params = (spans, size, table, scale, numbers, env)
    gl.warp_specialize(
        [
            (fused_consumer, (0, kv_smem, buffers, bars, (dk, dv), queue, params, c, pre, both, mask, bounds)),
            (fused_consumer, (1, kv_smem, buffers, bars, (dk, dv), queue, params, c, pre, both, mask, bounds)),
            (fused_producer, ((q, do, lse, delta, k, v), kv_smem, buffers, bars, queue, order, spans, size, pitch, table, c)),
            (reduce_dq_shares, (dq, order, share_boxes, share_bars, queue, spans, size, table, c, 0)),
            (reduce_dq_shares, (dq, order, share_boxes, share_bars, queue, spans, size, table, c, 1)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
