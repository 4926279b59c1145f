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

from typing import Any, NamedTuple

from foci.backends.gpu.tiles import decode
from foci.backends.hopper.bwd_producer import PairPlace, PairSources, StationaryPair, allocate_pair, load_stationary, make_ring, stream_pair
from foci.backends.hopper.bwd_tile_math import begin_s_dp, column_idx, recompute_weights, report_nan, row_idx, row_line, scale_dscore
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
    mbarrier,
    thread_barrier,
    tma,
    view_smem,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from foci.backends.hopper.kernel_args import Position
from foci.backends.hopper.layouts import mma_layout, smem_layout
from foci.backends.hopper.masking import add_affine_columns, fill_unset_bits, load_mask_bits, zero_outside
from foci.backends.hopper.mma import begin_pv, scale_accumulators, wait_accumulators, zero_accumulators
from foci.backends.hopper.smem import make_barriers, opaque_value, sequence_span, store_pieces, tile_pieces
from foci.backends.hopper.softmax import round_weights
from foci.backends.hopper.task_queue import (
    allocate_queue,
    broadcast_ticket,
    fetch_ticket,
    has_task,
    pop_key_task,
    push_key_task,
    push_last,
)
from foci.compat.gluon import gluon_jit

ROWS = gl.constexpr(64)


class FusedSmem(NamedTuple):
    """Shared memory and barriers. `dq_semaphore.reduce_dq_shares` reads shares."""

    pair: Any  # keys and values of both warpgroups
    ring: Any  # queries
    ds_tiles: Any
    shares: Any
    kv_empty: Any
    ds_full: Any  # of two tiles of dS
    share_full: Any  # of two shares
    share_empty: Any


class FusedParams(NamedTuple):
    """`BackwardParams`, and the numbers of dropout."""

    size: Any
    spans: Any
    table: Any
    scale: Any
    numbers: Any
    env: Any
    found_nan: Any


class FusedContext(NamedTuple):
    """A warpgroup's 64 keys."""

    b: Any
    h: Any  # first query head that shares the keys
    kv_idx: Any  # [64, 1]
    q_len: Any
    kv_len: Any
    first: Any  # first key
    query_bounds: Any  # (first query, last query) of each key, if c.BOUNDED
    before: Any  # query tiles of the tasks before
    group: Any  # query heads that share the keys
    aux: Any  # from the function `pre`
    dropout: Any  # from `dropout.load_dropout_params`


@gluon_jit
def load_keys(sources, smem, keys, first, n, c):
    """Load keys and values of the n-th task, once those of the previous task are no longer read."""
    mbarrier.wait(smem.kv_empty, (n & 1) ^ 1)
    load_stationary(sources, smem.pair, keys, first, c)


@gluon_jit
def fused_producer(key_sources, query_sources, smem, queue, order, params, pitch, c):
    """Producer warp: for task after task K and V once, and each query tile for all heads that share them in turn.
    The first queries are requested before K and V, whose buffers are free only when the previous task is done."""
    size, spans, table = params.size, params.spans, params.table
    group = group_members(size, c)
    tickets = decode(size.batch) * decode(size.heads) * decode(size.tasks)
    tasks = 0
    before = 0
    # with ROUND, key tiles wait for key tiles of later programs, so each has a program of its own
    ticket = gl.program_id(0) if c.ROUND else broadcast_ticket(fetch_ticket(order.turns, False))
    while ticket < tickets:
        task = find_key_task(ticket, order, size, spans, c)
        if task.b >= 0:
            q_start, q_len, kv_start, kv_len = sequence_span(task, spans, size, c)
            runs = find_query_runs(table, order.ranks, task, task.h * group, q_len, kv_len, c)
            push_key_task(queue, tasks, task, runs)
            keys = PairPlace(task.memory_b, task.h, kv_start, kv_len, 0)
            first = task.tile * c.TILE_KV
            count = count_query_tiles(runs) * group
            if count == 0:
                load_keys(key_sources, smem, keys, first, tasks, c)
            for i in range(0, count):
                n = before + i
                h = task.h * group + i % group
                row = nth_tile(table, runs, i // group, c) * c.TILE_Q
                line = row_line(task.b, task.memory_b, h, decode(size.heads) * group, q_start, pitch, c) + row
                stream_pair(query_sources, smem.ring, PairPlace(task.memory_b, h, q_start, q_len, line), row, 0, n, c)
                if i == 0:
                    load_keys(key_sources, smem, keys, first, tasks, c)
            before += count
            tasks += 1
        ticket = tickets if c.ROUND else broadcast_ticket(fetch_ticket(order.turns, False))
    push_last(queue, tasks)


@gluon_jit
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


@gluon_jit
def accumulate_fused(sums, n, smem, key_ctx, run, params, c, half: gl.constexpr, functions, MASKED: gl.constexpr):
    """Accumulate one run of query tiles into (dk, dv) of 64 keys, and hand over their shares of dq. MASKED tiles may also overhang."""
    S: gl.constexpr = mma_layout(c.TILE_Q)
    dk, dv = sums
    ring, table, group, query_bounds = smem.ring, params.table, key_ctx.group, key_ctx.query_bounds
    b, h, kv_idx, q_len, kv_len, aux = key_ctx.b, key_ctx.h, key_ctx.kv_idx, key_ctx.q_len, key_ctx.kv_len, key_ctx.aux
    line, last, count = run
    MASKS_AFTER: gl.constexpr = c.BOUNDED or c.MASK_BITS
    MASK: gl.constexpr = MASKED and c.MODE != "all"
    # load lse and delta while products run, if registers are left for them
    EARLY: gl.constexpr = c.TILE_Q == 64
    for i in range(0, count * group):
        tile = tile_at(table, line, last - i // group, c)
        stage = n % c.STAGES
        phase = (n // c.STAGES) & 1
        parity = n % 2
        opaque = opaque_value(0)
        queries = tile_pieces(ring.qk_tiles, stage)
        douts = tile_pieces(ring.do_v_tiles, stage)
        # S^T = K Q^T and dP^T = V dO^T, both asynchronous
        s, dp = begin_s_dp(smem.pair, half, opaque, ring, queries, stage, phase)
        if MASKED and c.MASK_BITS:
            words = load_mask_bits(table.bits + ((line * decode(table.width) + tile) * 2 + half) * (ROWS * 4), True, c.TILE_Q)
        if c.DROPOUT:
            drops = drops_by_key(key_ctx.first, tile * c.TILE_Q, b, h + i % group, key_ctx.dropout, c.TILE_Q, c.DROPOUT_QUERIES)
        if EARLY:
            lse2 = ring.lse_rows.index(stage).load(gl.SliceLayout(0, S))
        s = warpgroup_mma_wait(len(douts), deps=[s])
        q_idx = column_idx(tile * c.TILE_Q, c.TILE_Q)
        if not EARLY:
            lse2 = ring.lse_rows.index(stage).load(gl.SliceLayout(0, S))
        # P^T = exp2(S^T - lse), masked; dropped weights get a negative sign
        if c.AFFINE:
            row_bias, query_slope = functions.both(b, h, tile * c.TILE_Q, kv_idx, q_len, kv_len, params.env, aux)
            lse2 = gl.expand_dims(add_affine_columns(lse2, query_slope), 0) - row_bias
        else:
            lse2 = gl.expand_dims(lse2, 0)
        position = Position(b, h, q_idx, kv_idx, q_len, kv_len, tile, aux)
        p, slope = recompute_weights(s, lse2, position, params, c, functions, MASK and not MASKS_AFTER, MASKED and not MASKS_AFTER)
        if MASKED and c.BOUNDED:
            p = zero_outside(p, query_bounds[0] - tile * c.TILE_Q, query_bounds[1] - tile * c.TILE_Q)
        elif MASKED and c.MASK_BITS:
            p = fill_unset_bits(p, words.to(gl.int32), 0.0)
        if c.DROPOUT:
            p = apply_dropout(p, drops, c)
        p_half = round_weights(p, douts[0].dtype, c)
        dscore_scaled = scale_dscore(p, slope, c, MASKED)
        if EARLY:
            delta = gl.expand_dims(ring.delta_rows.index(stage).load(gl.SliceLayout(0, S)), 0)
        # dS^T = P^T * slope * (dP^T - delta)
        dp = warpgroup_mma_wait(0, deps=[dp])
        if not EARLY:
            delta = gl.expand_dims(ring.delta_rows.index(stage).load(gl.SliceLayout(0, S)), 0)
        if c.DROPOUT:
            ds = (gl.maximum(p, 0.0) * dp - gl.abs(p) * delta).to(queries[0].dtype)
        else:
            ds = (dscore_scaled * (dp - delta)).to(queries[0].dtype)
        # this buffer was read for tile n - 2; both warpgroups finished that before they arrived for tile n - 1
        smem.ds_tiles.index(parity * 2 + half).store(ds)
        # dV += P^T dO runs while the warpgroups wait for each other's dS
        dv = begin_pv(p_half, douts, dv)
        fence_async_shared()
        mbarrier.arrive(smem.ds_full.index(parity), count=1)
        if c.DEFERS_DQ:
            # the fence above also covers the previous tile's share: hand it over now
            mbarrier.arrive(smem.share_full.index(1 - parity), count=1, pred=n > key_ctx.before)
        mbarrier.wait(smem.ds_full.index(parity), (n // 2) & 1)
        # this warpgroup's half of dQ = dS K, then dK += dS^T Q
        share = begin_dq_share(smem.ds_tiles, smem.pair.qk_tiles, parity, opaque, c, half)
        dk = begin_pv(ds, queries, dk)
        results = warpgroup_mma_wait(len(dk), deps=(share,) + dv)
        share, dv = results[0], results[1:]
        store_dq_share(smem.shares, share, smem.share_empty, n, half)
        if not c.DEFERS_DQ:
            fence_async_shared()
            mbarrier.arrive(smem.share_full.index(parity), count=1)
        dk = wait_accumulators(dk)
        mbarrier.arrive(ring.empty.index(stage), count=1)
        n += 1
    return dk, dv, n


@gluon_jit
def fused_consumer(half: gl.constexpr, smem, outputs, queue, params, c, functions, bounds: gl.constexpr):
    """One warpgroup: for task after task dk and dv of 64 keys, and half of each share of dq."""
    tasks = 0
    before = 0
    while has_task(queue, tasks, 4):
        before = accumulate_task(half, smem, outputs, pop_key_task(queue, tasks, c, 4), tasks, before, params, c, functions, bounds)
        tasks += 1
    tma.store_wait(0)


@gluon_jit
def accumulate_task(half: gl.constexpr, smem, outputs, key_task, tasks, before, params, c, functions, bounds: gl.constexpr):
    """Compute one task, (task, its query runs); `tasks` tasks and `before` query tiles preceded it. Returns the number of query tiles so
    far."""
    S: gl.constexpr = mma_layout(c.TILE_Q)
    # stage dk and dv in the dS buffers if they fit: K and V of the next task then load while dk and dv are stored
    REUSES_DS: gl.constexpr = c.TILE_Q >= c.D_PAD + c.DV_PAD
    size, scale, env = params.size, params.scale, params.env
    dk_out, dv_out = outputs
    task, runs = key_task
    b, memory_b, kv_h, tile = task.b, task.memory_b, task.h, task.tile
    q_start, q_len, kv_start, kv_len = sequence_span(task, params.spans, size, c)
    first = tile * c.TILE_KV
    half_first = first + half * ROWS
    kv_idx = row_idx(half_first, c.TILE_Q)
    dk = zero_accumulators(ROWS, c.D_PAD)
    dv = zero_accumulators(ROWS, c.DV_PAD)
    mbarrier.wait(smem.pair.full, tasks & 1)
    if REUSES_DS:
        # the previous task's dk and dv, staged in the dS buffers, must have been read by TMA
        tma.store_wait(0)
        thread_barrier()
    n = before
    group = group_members(size, c)
    # a mask that depends on the head is only taken with one query head per key head
    h = kv_h * group
    aux = functions.pre(b, h, gl.minimum(kv_idx, kv_len - 1), q_len, kv_len, scale, env)
    query_bounds = 0
    if c.BOUNDED:
        keys = half_first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
        first_query, last_query = bounds(b, h, gl.minimum(keys, kv_len - 1), q_len, kv_len, env)
        query_bounds = (first_query, gl.where(keys < kv_len, last_query, -1))
    dropout = load_dropout_params(params.numbers, c)
    key_ctx = FusedContext(b, h, kv_idx, q_len, kv_len, half_first, query_bounds, before, group, aux, dropout)
    wrap_last, wrap = (runs.wrap_last, runs.wrap) if c.ROUND else (runs.full_last, 0)
    # a masked run, a full one, a masked one, and with ROUND a full one: a loop over both pairs, so that the code is there once
    for part in range(0, 2):
        run = (runs.row, gl.where(part == 0, runs.high_last, runs.low_last), gl.where(part == 0, runs.high, runs.low))
        dk, dv, n = accumulate_fused((dk, dv), n, smem, key_ctx, run, params, c, half, functions, True)
        run = (runs.row, gl.where(part == 0, runs.full_last, wrap_last), gl.where(part == 0, runs.full, wrap))
        dk, dv, n = accumulate_fused((dk, dv), n, smem, key_ctx, run, params, c, half, functions, False)
    if c.DEFERS_DQ:
        fence_async_shared()
        mbarrier.arrive(smem.share_full.index((n + 1) % 2), count=1, pred=n > before)
    dk = scale_accumulators(dk, scale)
    if REUSES_DS:
        mbarrier.arrive(smem.kv_empty, count=1)
        # these buffers were last read by the products of the last tile but one, which both warpgroups have finished
        buffer = smem.ds_tiles.index(n % 2 * 2 + half)
        free = view_smem(buffer, buffer.dtype, [c.TILE_Q // c.D_PAD, ROWS, c.D_PAD], smem_layout(ROWS, c.D_PAD))
        store_pieces(dv_out, memory_b, kv_h, half_first, kv_start, kv_len, (free.index(0),), dv, c.JAGGED)
        store_pieces(dk_out, memory_b, kv_h, half_first, kv_start, kv_len, (free.index(1),), dk, c.JAGGED)
        report_nan(params.found_nan, dk)
    else:
        # stage both in this warpgroup's half of V, which no one else reads; the other warpgroup may still read K for dq
        v = tile_pieces(smem.pair.do_v_tiles, half)
        store_pieces(dv_out, memory_b, kv_h, half_first, kv_start, kv_len, v, dv, c.JAGGED)
        tma.store_wait(0)
        store_pieces(dk_out, memory_b, kv_h, half_first, kv_start, kv_len, v, dk, c.JAGGED)
        report_nan(params.found_nan, dk)
        tma.store_wait(0)
        # all threads must be done before one arrives
        thread_barrier()
        mbarrier.arrive(smem.kv_empty, count=1)
    return n


@gluon_jit
def attention_gradients(q, k, v, do, lse, delta, pitch, dq, dk, dv, order, call_params, c, functions, bounds: gl.constexpr):
    """dq, dk and dv of key tile after key tile. Shapes are in the legend above; `lse` and `delta` are laid out by
    `bwd_preprocess.begin_gradients`.

    dq: float32 accumulators [SUMS * B * Hq * slots * rows, 256]; a slot of `rows` rows, the rows of the descriptor's box, for each query
    tile.
    """
    k_tiles, v_tiles = allocate_pair(k.dtype, 2, ROWS, c)
    q_tiles, do_tiles = allocate_pair(q.dtype, c.STAGES, c.TILE_Q, c)
    ds_tiles = gl.allocate_shared_memory(q.dtype, [4, ROWS, c.TILE_Q], smem_layout(ROWS, c.TILE_Q))
    lse_rows = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.TILE_Q], lse.layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.TILE_Q], lse.layout)
    share_boxes = gl.allocate_shared_memory(gl.float32, [2, dq.block_shape[0], SHARE_LINE], dq.layout)
    shares = view_smem(share_boxes, gl.float32, [4, dq.block_shape[0] * SHARE_LINE // 2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    share_full = make_barriers(2, 2)
    share_empty = make_barriers(2, 1)
    pair = StationaryPair(k_tiles, v_tiles, make_barriers(1, 1).index(0))
    kv_empty = make_barriers(1, 2).index(0)
    ring = make_ring(q_tiles, do_tiles, lse_rows, delta_rows, c)
    smem = FusedSmem(pair, ring, ds_tiles, shares, kv_empty, make_barriers(2, 2), share_full, share_empty)
    queue = allocate_queue()
    fence_async_shared()
    share_bars = (share_full, share_empty)
    gl.warp_specialize(
        [
            (fused_consumer, (0, smem, (dk, dv), queue, call_params, c, functions, bounds)),
            (fused_consumer, (1, smem, (dk, dv), queue, call_params, c, functions, bounds)),
            (fused_producer, (PairSources(k, v, None, None), PairSources(q, do, lse, delta), smem, queue, order, call_params, pitch, c)),
            (reduce_dq_shares, (dq, order, share_boxes, share_bars, queue, call_params, c, 0)),
            (reduce_dq_shares, (dq, order, share_boxes, share_bars, queue, call_params, c, 1)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
