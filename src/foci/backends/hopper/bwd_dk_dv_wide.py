# mypy: ignore-errors
"""dk and dv of a tile of 64 keys with wide heads: one warpgroup accumulates dv, the other dk, since one's registers cannot hold both.

The legend is that of `bwd_dk_dv`. The dv warpgroup computes P and passes it on through shared memory (`p_smem`), so that both gradients
take four products; a kernel for each would take five and load q and do twice.
"""

from typing import Any, NamedTuple

from foci.backends.gpu.tiles import decode, nth_visited, sequence_at, tile_start
from foci.backends.hopper.bwd_dk_dv import KeyContext, split_query_runs, stream_queries
from foci.backends.hopper.bwd_dq_from_ds import DsStore, begin_store_ds, ds_layouts, find_chunk_task, store_ds
from foci.backends.hopper.bwd_producer import PairSources, make_ring
from foci.backends.hopper.bwd_tile_math import column_idx, find_backward_task, recompute_weights, row_idx, scale_dscore
from foci.backends.hopper.gluon_compat import fence_async_shared, gl, gluon, mbarrier, tma, view_smem, warpgroup_mma_wait
from foci.backends.hopper.kernel_args import Position, Task
from foci.backends.hopper.layouts import mma_layout, operand_layout, smem_layout
from foci.backends.hopper.mma import begin_pv, begin_scores, scale_accumulators, wait_accumulators, zero_accumulators
from foci.backends.hopper.smem import allocate_tiles, load_pieces, make_barriers, store_pieces, tile_pieces

ROWS = gl.constexpr(64)


class SplitSmem(NamedTuple):
    """Shared memory and barriers."""

    k: Any
    v: Any
    kv_full: Any
    ring: Any  # queries
    p_smem: Any
    p_full: Any  # of each tile of weights
    p_empty: Any
    done: Any  # of both warpgroups, after their last product


@gluon.jit
def flatten_by_thread(x):
    """Flatten a [64, 64] product in the order in which threads hold it, four values of a thread in a row: no bank conflicts."""
    return x.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([4096])


@gluon.jit
def send_weights(smem, weights, n):
    """Pass the n-th tile of weights, [64, 64], to the other warpgroup."""
    mbarrier.wait(smem.p_empty.index(n % 2), ((n // 2) & 1) ^ 1)
    smem.p_smem.index(n % 2).store(flatten_by_thread(weights))
    mbarrier.arrive(smem.p_full.index(n % 2), count=1)


@gluon.jit
def receive_weights(smem, n, FREES: gl.constexpr):
    """Receive the n-th tile of weights. FREES: the other warpgroup may overwrite it afterwards with tile n + 2."""
    LINE: gl.constexpr = flatten_by_thread(gl.zeros([64, 64], gl.float32, mma_layout(64))).type.layout
    mbarrier.wait(smem.p_full.index(n % 2), (n // 2) & 1)
    line = smem.p_smem.index(n % 2).load(LINE)
    weights = line.reshape([8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([64, 64])
    weights = gl.convert_layout(weights, mma_layout(64), assert_trivial=True)
    if FREES:
        mbarrier.arrive(smem.p_empty.index(n % 2), count=1)
    return weights


@gluon.jit
def store_ds_in_place(ds_target, smem, n, query, values):
    """Store dS as `bwd_dq_from_ds.store_ds` does, staged in the buffer of the n-th tile of weights, which is freed one tile later."""
    tma.store_wait(0)
    mbarrier.arrive(smem.p_empty.index((n + 1) % 2), count=1, pred=n > 0)
    tile = view_smem(smem.p_smem.index(n % 2), values.dtype, [2, ROWS, ROWS], smem_layout(ROWS, ROWS)).index(0)
    begin_store_ds(ds_target, tile, query, values)


@gluon.jit
def split_producer(key_sources, query_sources, smem, task, params, pitch, c):
    """Producer warp: K and V once, then q and do of each query head that shares them."""
    b, memory_b, kv_h, tile, index = task
    q_start, q_len, kv_start, kv_len = sequence_at(params.spans, params.size, b, index, c)
    first = tile * ROWS
    mbarrier.expect(smem.kv_full, ROWS * 2 * (c.D_PAD + c.DV_PAD))
    load_pieces(key_sources.qk, memory_b, kv_h, first, kv_start, kv_len, smem.kv_full, smem.k, c.JAGGED)
    load_pieces(key_sources.do_v, memory_b, kv_h, first, kv_start, kv_len, smem.kv_full, smem.v, c.JAGGED)
    stream_queries(query_sources, smem.ring, task, (q_start, q_len, kv_len), params, pitch, c)


@gluon.jit
def accumulate_dv(dv, k, n, smem, key_ctx, run, params, c, functions, MASKED: gl.constexpr):
    """Accumulate one run of query tiles into dv of 64 keys, and pass P * slope to the dk warpgroup. `n`: query tiles before."""
    S: gl.constexpr = mma_layout(c.TILE_Q)
    b, h, kv_idx, q_len, kv_len, aux, unused = key_ctx
    MASK: gl.constexpr = MASKED and c.MODE != "all"
    zero = gl.zeros([ROWS, c.TILE_Q], gl.float32, S)
    for i in range(0, run.count):
        tile = nth_visited(params.table, run.row, i, run.first, run.before, run.gap, c)
        stage = n % c.STAGES
        phase = (n // c.STAGES) & 1
        douts = tile_pieces(smem.ring.do_v_tiles, stage)
        # S^T = K Q^T
        mbarrier.wait(smem.ring.qk_full.index(stage), phase)
        s = begin_scores(k, tile_pieces(smem.ring.qk_tiles, stage), zero, False)
        s = warpgroup_mma_wait(0, deps=[s])
        # P^T = exp2(S^T - lse), masked
        q_idx = column_idx(tile_start(tile, c, c.TILE_Q), c.TILE_Q)
        lse2 = gl.expand_dims(smem.ring.lse_rows.index(stage).load(gl.SliceLayout(0, S)), 0)
        position = Position(b, h, q_idx, kv_idx, q_len, kv_len, tile, aux)
        p, slope = recompute_weights(s, lse2, position, params, c, functions, MASK, MASKED)
        send_weights(smem, scale_dscore(p, slope, c, MASKED), n)
        # dV += P^T dO
        mbarrier.wait(smem.ring.do_v_full.index(stage), phase)
        dv = wait_accumulators(begin_pv(p.to(douts[0].dtype), douts, dv))
        fence_async_shared()
        mbarrier.arrive(smem.ring.empty.index(stage), count=1)
        n += 1
    return dv, n


@gluon.jit
def accumulate_dk(dk, v, n, smem, ds_target, run, table, c):
    """Accumulate one run of query tiles into dk of 64 keys, with P from the dv warpgroup.

    `ds_target`: as in `bwd_dk_dv.KeyContext`.
    """
    S: gl.constexpr = mma_layout(c.TILE_Q)
    # the widest heads leave no shared memory to stage dS in
    IN_PLACE: gl.constexpr = c.D_PAD + c.DV_PAD > 448
    zero = gl.zeros([ROWS, c.TILE_Q], gl.float32, S)
    for i in range(0, run.count):
        stage = n % c.STAGES
        phase = (n // c.STAGES) & 1
        queries = tile_pieces(smem.ring.qk_tiles, stage)
        # dP^T = V dO^T
        mbarrier.wait(smem.ring.do_v_full.index(stage), phase)
        dp = begin_scores(v, tile_pieces(smem.ring.do_v_tiles, stage), zero, False)
        p = receive_weights(smem, n, len(ds_target) == 0 or not IN_PLACE)
        delta = gl.expand_dims(smem.ring.delta_rows.index(stage).load(gl.SliceLayout(0, S)), 0)
        dp = warpgroup_mma_wait(0, deps=[dp])
        # dS^T = P^T * slope * (dP^T - delta)
        ds = (p * (dp - delta)).to(queries[0].dtype)
        # dK += dS^T Q
        mbarrier.wait(smem.ring.qk_full.index(stage), phase)
        dk = begin_pv(ds, queries, dk)
        if len(ds_target) > 0:
            query = tile_start(nth_visited(table, run.row, i, run.first, run.before, run.gap, c), c, c.TILE_Q)
            if IN_PLACE:
                store_ds_in_place(ds_target, smem, n, query, ds)
            else:
                store_ds(ds_target, n % 2, query, ds)
        dk = wait_accumulators(dk)
        if len(ds_target) == 0:
            fence_async_shared()
        mbarrier.arrive(smem.ring.empty.index(stage), count=1)
        n += 1
    return dk, n


@gluon.jit
def load_registers(tile, c):
    """Load a tile into registers as the left operand of products with TILE_Q columns."""
    parts = ()
    for i in gl.static_range(len(tile)):
        parts = parts + (tile[i].load(operand_layout(c.TILE_Q)),)
    return parts


@gluon.jit
def split_consumer(VALUE: gl.constexpr, smem, out, ds_store, task, params, c, functions):
    """One warpgroup: dv (VALUE) or dk of 64 keys, summed over the query heads that share them."""
    WIDTH: gl.constexpr = c.DV_PAD if VALUE else c.D_PAD
    size, table, scale, env = params.size, params.table, params.scale, params.env
    b, memory_b, kv_h, tile, index = task
    q_start, q_len, kv_start, kv_len = sequence_at(params.spans, size, b, index, c)
    first = tile * ROWS
    kv_idx = row_idx(first, c.TILE_Q)
    acc = zero_accumulators(ROWS, WIDTH)
    mbarrier.wait(smem.kv_full, 0)
    factor = smem.k if VALUE else smem.v
    if c.D_PAD + c.DV_PAD <= 384:
        # registers are left to hold K or V: wgmma then reads shared memory for one operand only, by which it is bound here
        factor = load_registers(factor, c)
    n = 0
    group = decode(size.group)
    for member in range(0, group):
        h = kv_h * group + member
        full_run, masked_run = split_query_runs(table, b, h, index, first, q_len, kv_len, c)
        if VALUE:
            aux = functions.pre(b, h, gl.minimum(kv_idx, kv_len - 1), q_len, kv_len, scale, env)
            key_ctx = KeyContext(b, h, kv_idx, q_len, kv_len, aux, ())
            acc, n = accumulate_dv(acc, factor, n, smem, key_ctx, full_run, params, c, functions, False)
            acc, n = accumulate_dv(acc, factor, n, smem, key_ctx, masked_run, params, c, functions, True)
        else:
            ds_target = ds_layouts(ds_store, member, group, first, c)
            acc, n = accumulate_dk(acc, factor, n, smem, ds_target, full_run, table, c)
            acc, n = accumulate_dk(acc, factor, n, smem, ds_target, masked_run, table, c)
    # stage the gradients in the K and V tiles once neither warpgroup reads them
    mbarrier.arrive(smem.done, count=1)
    mbarrier.wait(smem.done, 0)
    if VALUE:
        store_pieces(out, memory_b, kv_h, first, kv_start, kv_len, smem.v, acc, c.JAGGED)
    else:
        store_pieces(out, memory_b, kv_h, first, kv_start, kv_len, smem.k, scale_accumulators(acc, scale), c.JAGGED)
    tma.store_wait(0)


@gluon.jit
def attention_split_gradient(q, k, v, do, lse, delta, pitch, dk, dv, ds_scratch, chunk, call_params, c, functions):
    """dk and dv of one tile of 64 keys. Arguments are those of `bwd_dk_dv.attention_key_gradient`."""
    if ds_scratch is None:
        task = find_backward_task(call_params.size, call_params.spans, c, False)
    else:
        b, kv_h, tile, number = find_chunk_task(chunk, call_params.size, False)
        task = Task(b, b, kv_h, tile, tile)
    if c.JAGGED and task.b < 0:
        return
    k_tile = tile_pieces(allocate_tiles(k.dtype, 1, ROWS, c.D_PAD), 0)
    v_tile = tile_pieces(allocate_tiles(v.dtype, 1, ROWS, c.DV_PAD), 0)
    q_tiles = allocate_tiles(q.dtype, c.STAGES, c.TILE_Q, c.D_PAD)
    do_tiles = allocate_tiles(do.dtype, c.STAGES, c.TILE_Q, c.DV_PAD)
    lse_rows = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.TILE_Q], lse.layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.TILE_Q], lse.layout)
    p_smem = gl.allocate_shared_memory(gl.float32, [2, ROWS * c.TILE_Q], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    p_full = make_barriers(2, 1)
    p_empty = make_barriers(2, 1)
    done = make_barriers(1, 2).index(0)
    kv_full = make_barriers(1, 1).index(0)
    ring = make_ring(q_tiles, do_tiles, lse_rows, delta_rows, c)
    smem = SplitSmem(k_tile, v_tile, kv_full, ring, p_smem, p_full, p_empty, done)
    ds_store = ()
    if ds_scratch is not None:
        # the widest heads stage dS in the buffers of P
        staged = p_smem
        if c.D_PAD + c.DV_PAD <= 448:
            staged = gl.allocate_shared_memory(q.dtype, [2, ROWS, c.TILE_Q], smem_layout(ROWS, c.TILE_Q))
        ds_store = DsStore(ds_scratch, staged, chunk, number)
    fence_async_shared()
    key_sources, query_sources = PairSources(k, v, None, None), PairSources(q, do, lse, delta)
    gl.warp_specialize(
        [
            (split_consumer, (True, smem, dv, (), task, call_params, c, functions)),
            (split_consumer, (False, smem, dk, ds_store, task, call_params, c, functions)),
            (split_producer, (key_sources, query_sources, smem, task, call_params, pitch, c)),
        ],
        [4, 1],
        [240, 24],
    )
