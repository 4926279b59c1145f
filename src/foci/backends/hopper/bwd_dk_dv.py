# mypy: ignore-errors
"""dk and dv of a tile of keys: two warpgroups, and one producer warp that loads tiles of queries by TMA.

    B, Hq, Hkv, Sq, Skv, D, Dv    as in `foci.backends.hopper.forward`
    q, do                         TMA descriptors [B, Hq, Sq, D], [B, Hq, Sq, Dv] of TILE_Q rows; do is the gradient of out
    k, v, dk, dv                  TMA descriptors [B, Hkv, Skv, D or Dv] of 64 rows; dk or dv may be None
    lse, delta                    TMA descriptors, float32, one value per query: logsumexp in base 2, and sum(out * do) - dlse
    S^T, P^T, dP^T, dS^T          [64 keys, TILE_Q], in registers
    ds_scratch                    None, or the memory that `bwd_dq` reads dS^T from

Scores are transposed, keys as rows, so that P^T and dS^T are the left operands of dV += P^T dO and dK += dS^T Q straight from registers. A
warpgroup accumulates over all queries and all query heads that share its keys: no atomics.

With tiles of 128 keys each warpgroup accumulates dk and dv of 64 keys. With tiles of 64 keys, for wide heads, one warpgroup accumulates dv
and the other dk, since one's registers cannot hold both. The dv warpgroup computes P and passes it on through shared memory, so that both
gradients take four products; a kernel for each would take five and load q and do twice.
"""

from typing import Any, NamedTuple

from foci.backends.gpu.tiles import decode, nth_visited, sequence_at, tile_start
from foci.backends.hopper.bwd_producer import PairPlace, PairSources, StationaryPair, allocate_pair, load_stationary, make_ring, stream_run
from foci.backends.hopper.bwd_tile_math import (
    begin_s_dp,
    column_idx,
    find_backward_task,
    recompute_weights,
    report_nan,
    row_idx,
    row_line,
    scale_dscore,
    split_runs,
)
from foci.backends.hopper.ds_scratch import DsStore, begin_store_ds, ds_layouts, find_chunk_task, store_ds
from foci.backends.hopper.gluon_compat import fence_async_shared, gl, mbarrier, tma, view_smem, warpgroup_mma_wait
from foci.backends.hopper.kernel_args import Position, Task, VisitRun
from foci.backends.hopper.layouts import mma_layout, operand_layout, smem_layout
from foci.backends.hopper.mma import begin_pv, begin_scores, scale_accumulators, wait_accumulators, zero_accumulators
from foci.backends.hopper.smem import allocate_tiles, make_barriers, opaque_value, store_pieces, tile_pieces
from foci.compat.gluon import gluon_jit

ROWS = gl.constexpr(64)
# wider heads, D + Dv, leave no shared memory to stage dS in: the buffers of P take it
STAGED_DIMS = gl.constexpr(448)


class KeySmem(NamedTuple):
    """Shared memory and barriers."""

    pair: Any  # keys and values, 64 of each warpgroup or 64 in all
    ring: Any  # queries
    handover: Any  # `Handover` with tiles of 64 keys, else empty


class Handover(NamedTuple):
    """Weights that the dv warpgroup passes on to the dk warpgroup, two tiles in turn, and barriers."""

    p_smem: Any
    p_full: Any  # of each tile
    p_empty: Any
    done: Any  # of both warpgroups, after their last product


class KeyContext(NamedTuple):
    """A warpgroup's 64 keys, and a query head that reads them."""

    b: Any
    h: Any
    kv_idx: Any  # [64, 1]
    q_len: Any
    kv_len: Any
    aux: Any  # from the function `pre`
    ds_target: Any  # from `ds_scratch.ds_layouts`, empty if dS is not stored


@gluon_jit
def split_query_runs(table, b, h, task, first, q_len, kv_len, c):
    """`split_runs` of the query tiles that a key tile visits."""
    full, masked = split_runs(table, b, h, task, q_len, c, c.TILE_Q)
    if first + c.TILE_KV > kv_len:
        # the key tile overhangs the keys: mask every query tile
        masked_first = masked.first if c.MODE == "ranges" else full.first
        masked = VisitRun(masked.row, masked_first, masked.before, masked.gap * 0, masked.count + full.count)
        full = VisitRun(full.row, full.first, full.before, full.gap, full.count * 0)
    return full, masked


@gluon_jit
def key_producer(key_sources, query_sources, smem, task, params, pitch, c):
    """Producer warp: K and V once, then q and do of each query head that shares them."""
    b, memory_b, kv_h, tile, index = task
    q_start, q_len, kv_start, kv_len = sequence_at(params.spans, params.size, b, index, c)
    first = tile * c.TILE_KV
    load_stationary(key_sources, smem.pair, PairPlace(memory_b, kv_h, kv_start, kv_len, 0), first, c)
    n = 0
    group = decode(params.size.group)
    for member in range(0, group):
        h = kv_h * group + member
        line = row_line(b, memory_b, h, decode(params.size.heads) * group, q_start, pitch, c)
        full_run, masked_run = split_query_runs(params.table, b, h, index, first, q_len, kv_len, c)
        queries = PairPlace(memory_b, h, q_start, q_len, line)
        n = stream_run(query_sources, smem.ring, queries, full_run, n, params.table, c)
        n = stream_run(query_sources, smem.ring, queries, masked_run, n, params.table, c)


@gluon_jit
def accumulate_dk_dv(sums, n, smem, key_ctx, run, params, c, half: gl.constexpr, functions, MASKED: gl.constexpr):
    """Accumulate one run of query tiles into `sums`: (dk, dv), empty where not wanted. `n` query tiles came before. MASKED tiles may also
    overhang queries or keys."""
    S: gl.constexpr = mma_layout(c.TILE_Q)
    dk, dv = sums
    KEY: gl.constexpr = len(dk) > 0
    VALUE: gl.constexpr = len(dv) > 0
    ring = smem.ring
    b, h, kv_idx, q_len, kv_len, aux, ds_target = key_ctx
    MASK: gl.constexpr = MASKED and c.MODE != "all"
    # wide accumulators leave few registers: round P for dV only after dS, when its float32 values are no longer needed
    LATE: gl.constexpr = KEY and VALUE and c.D_PAD + c.DV_PAD > 256
    for i in range(0, run.count):
        tile = nth_visited(params.table, run.row, i, run.first, run.before, run.gap, c)
        stage = n % c.STAGES
        phase = (n // c.STAGES) & 1
        opaque = opaque_value(0)
        queries = tile_pieces(ring.qk_tiles, stage)
        douts = tile_pieces(ring.do_v_tiles, stage)
        # S^T = K Q^T and dP^T = V dO^T, both asynchronous
        s, dp = begin_s_dp(smem.pair, half, opaque, ring, queries, stage, phase, KEY)
        s = warpgroup_mma_wait(len(douts) if KEY else 0, deps=[s])
        # P^T = exp2(S^T - lse), masked, and the derivative of the score function
        q_idx = column_idx(tile_start(tile, c, c.TILE_Q), c.TILE_Q)
        lse2 = gl.expand_dims(ring.lse_rows.index(stage).load(gl.SliceLayout(0, S)), 0)
        position = Position(b, h, q_idx, kv_idx, q_len, kv_len, tile, aux)
        p, slope = recompute_weights(s, lse2, position, params, c, functions, MASK, MASKED)
        dscore_scaled = scale_dscore(p, slope, c, MASKED)
        # dV += P^T dO
        if VALUE and not LATE:
            dv = begin_pv(p.to(douts[0].dtype), douts, dv)
        if KEY:
            # dS^T = P^T * slope * (dP^T - delta)
            dp = warpgroup_mma_wait(len(douts) if VALUE and not LATE else 0, deps=[dp])
            delta = gl.expand_dims(ring.delta_rows.index(stage).load(gl.SliceLayout(0, S)), 0)
            ds = (dscore_scaled * (dp - delta)).to(queries[0].dtype)
            if LATE:
                dv = begin_pv(p.to(douts[0].dtype), douts, dv)
            # dK += dS^T Q
            dk = begin_pv(ds, queries, dk)
            if len(ds_target) > 0:
                store_ds(ds_target, half * 2 + n % 2, tile_start(tile, c, c.TILE_Q), ds)
        grads = wait_accumulators(dk + dv)
        dk, dv = grads[: len(dk)], grads[len(dk) :]
        if len(ds_target) == 0:
            fence_async_shared()
        mbarrier.arrive(ring.empty.index(stage), count=1)
        n += 1
    return dk, dv, n


# ---- tiles of 64 keys: one warpgroup accumulates dv, the other dk ----


@gluon_jit
def flatten_by_thread(x):
    """Flatten a [64, 64] product in the order in which threads hold it, four values of a thread in a row: no bank conflicts."""
    return x.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([4096])


@gluon_jit
def send_weights(handover, weights, n):
    """Pass the n-th tile of weights, [64, 64], to the other warpgroup."""
    mbarrier.wait(handover.p_empty.index(n % 2), ((n // 2) & 1) ^ 1)
    handover.p_smem.index(n % 2).store(flatten_by_thread(weights))
    mbarrier.arrive(handover.p_full.index(n % 2), count=1)


@gluon_jit
def receive_weights(handover, n, FREES: gl.constexpr):
    """Receive the n-th tile of weights. FREES: the other warpgroup may overwrite it afterwards with tile n + 2."""
    LINE: gl.constexpr = flatten_by_thread(gl.zeros([64, 64], gl.float32, mma_layout(64))).type.layout
    mbarrier.wait(handover.p_full.index(n % 2), (n // 2) & 1)
    line = handover.p_smem.index(n % 2).load(LINE)
    weights = line.reshape([8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([64, 64])
    weights = gl.convert_layout(weights, mma_layout(64), assert_trivial=True)
    if FREES:
        mbarrier.arrive(handover.p_empty.index(n % 2), count=1)
    return weights


@gluon_jit
def store_ds_in_place(ds_target, handover, n, query, values):
    """Store dS as `ds_scratch.store_ds` does, staged in the buffer of the n-th tile of weights, which is freed one tile later."""
    tma.store_wait(0)
    mbarrier.arrive(handover.p_empty.index((n + 1) % 2), count=1, pred=n > 0)
    tile = view_smem(handover.p_smem.index(n % 2), values.dtype, [2, ROWS, ROWS], smem_layout(ROWS, ROWS)).index(0)
    begin_store_ds(ds_target, tile, query, values)


@gluon_jit
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
        send_weights(smem.handover, scale_dscore(p, slope, c, MASKED), n)
        # dV += P^T dO
        mbarrier.wait(smem.ring.do_v_full.index(stage), phase)
        dv = wait_accumulators(begin_pv(p.to(douts[0].dtype), douts, dv))
        fence_async_shared()
        mbarrier.arrive(smem.ring.empty.index(stage), count=1)
        n += 1
    return dv, n


@gluon_jit
def accumulate_dk(dk, v, n, smem, ds_target, run, table, c):
    """Accumulate one run of query tiles into dk of 64 keys, with P from the dv warpgroup.

    `ds_target`: as in `KeyContext`.
    """
    S: gl.constexpr = mma_layout(c.TILE_Q)
    IN_PLACE: gl.constexpr = c.D_PAD + c.DV_PAD > STAGED_DIMS
    zero = gl.zeros([ROWS, c.TILE_Q], gl.float32, S)
    for i in range(0, run.count):
        stage = n % c.STAGES
        phase = (n // c.STAGES) & 1
        queries = tile_pieces(smem.ring.qk_tiles, stage)
        # dP^T = V dO^T
        mbarrier.wait(smem.ring.do_v_full.index(stage), phase)
        dp = begin_scores(v, tile_pieces(smem.ring.do_v_tiles, stage), zero, False)
        p = receive_weights(smem.handover, n, len(ds_target) == 0 or not IN_PLACE)
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
                store_ds_in_place(ds_target, smem.handover, n, query, ds)
            else:
                store_ds(ds_target, n % 2, query, ds)
        dk = wait_accumulators(dk)
        if len(ds_target) == 0:
            fence_async_shared()
        mbarrier.arrive(smem.ring.empty.index(stage), count=1)
        n += 1
    return dk, n


@gluon_jit
def load_registers(tile, c):
    """Load a tile into registers as the left operand of products with TILE_Q columns."""
    parts = ()
    for i in gl.static_range(len(tile)):
        parts = parts + (tile[i].load(operand_layout(c.TILE_Q)),)
    return parts


# ---- the kernel ----


@gluon_jit
def key_consumer(half: gl.constexpr, smem, outputs, ds_store, task, params, c, functions):
    """One warpgroup: dk and dv of 64 keys, or one of them, summed over the query heads that share them."""
    SPLIT: gl.constexpr = c.TILE_KV == ROWS
    AT: gl.constexpr = 0 if SPLIT else half
    size, table, scale, env = params.size, params.table, params.scale, params.env
    dk_out, dv_out = outputs
    KEY: gl.constexpr = dk_out is not None
    VALUE: gl.constexpr = dv_out is not None
    b, memory_b, kv_h, tile, index = task
    q_start, q_len, kv_start, kv_len = sequence_at(params.spans, size, b, index, c)
    first = tile * c.TILE_KV
    half_first = first + AT * ROWS
    kv_idx = row_idx(half_first, c.TILE_Q)
    dk = ()
    dv = ()
    if KEY:
        dk = zero_accumulators(ROWS, c.D_PAD)
    if VALUE:
        dv = zero_accumulators(ROWS, c.DV_PAD)
    mbarrier.wait(smem.pair.full, 0)
    if SPLIT:
        factor = tile_pieces(smem.pair.qk_tiles if VALUE else smem.pair.do_v_tiles, 0)
        if c.D_PAD + c.DV_PAD <= 384:
            # registers are left to hold K or V: wgmma then reads shared memory for one operand only, by which it is bound here
            factor = load_registers(factor, c)
    n = 0
    group = decode(size.group)
    for member in range(0, group):
        h = kv_h * group + member
        ds_target = ds_layouts(ds_store, member, group, half_first, c)
        full_run, masked_run = split_query_runs(table, b, h, index, first, q_len, kv_len, c)
        if SPLIT and KEY:
            dk, n = accumulate_dk(dk, factor, n, smem, ds_target, full_run, table, c)
            dk, n = accumulate_dk(dk, factor, n, smem, ds_target, masked_run, table, c)
        else:
            aux = functions.pre(b, h, gl.minimum(kv_idx, kv_len - 1), q_len, kv_len, scale, env)
            key_ctx = KeyContext(b, h, kv_idx, q_len, kv_len, aux, ds_target)
            if SPLIT:
                dv, n = accumulate_dv(dv, factor, n, smem, key_ctx, full_run, params, c, functions, False)
                dv, n = accumulate_dv(dv, factor, n, smem, key_ctx, masked_run, params, c, functions, True)
            else:
                dk, dv, n = accumulate_dk_dv((dk, dv), n, smem, key_ctx, full_run, params, c, half, functions, False)
                dk, dv, n = accumulate_dk_dv((dk, dv), n, smem, key_ctx, masked_run, params, c, half, functions, True)
    # stage dk and dv in the K and V tiles, whose last product is done
    if SPLIT:
        # both warpgroups read them
        mbarrier.arrive(smem.handover.done, count=1)
        mbarrier.wait(smem.handover.done, 0)
    if KEY:
        k_tile = tile_pieces(smem.pair.qk_tiles, AT)
        store_pieces(dk_out, memory_b, kv_h, half_first, kv_start, kv_len, k_tile, scale_accumulators(dk, scale), c.JAGGED)
    if VALUE:
        store_pieces(dv_out, memory_b, kv_h, half_first, kv_start, kv_len, tile_pieces(smem.pair.do_v_tiles, AT), dv, c.JAGGED)
    report_nan(params.found_nan, dk if KEY else dv)
    tma.store_wait(0)


@gluon_jit
def attention_key_gradient(q, k, v, do, lse, delta, pitch, dk, dv, ds_scratch, chunk, call_params, c, functions):
    """dk and dv of one tile of keys. Shapes are in the legend above; `lse` and `delta` are laid out by `bwd_preprocess.begin_gradients`.

    chunk: the heads of this launch, if dS is stored.
    """
    SPLIT: gl.constexpr = c.TILE_KV == ROWS
    KEY: gl.constexpr = dk is not None
    if ds_scratch is None:
        task = find_backward_task(call_params.size, call_params.spans, c, False)
    else:
        b, kv_h, tile, number = find_chunk_task(chunk, call_params.size, False)
        task = Task(b, b, kv_h, tile, tile)
    if c.JAGGED and task.b < 0:
        return
    DTYPE: gl.constexpr = q.dtype
    k_tiles = allocate_tiles(DTYPE, c.TILE_KV // ROWS, ROWS, c.D_PAD)
    v_tiles = k_tiles
    if KEY or c.DV_PAD != c.D_PAD:
        v_tiles = allocate_tiles(DTYPE, c.TILE_KV // ROWS, ROWS, c.DV_PAD)
    q_tiles, do_tiles = allocate_pair(DTYPE, c.STAGES, c.TILE_Q, c)
    lse_rows = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.TILE_Q], lse.layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.TILE_Q], lse.layout)
    handover = ()
    if SPLIT:
        p_smem = gl.allocate_shared_memory(gl.float32, [2, ROWS * c.TILE_Q], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        handover = Handover(p_smem, make_barriers(2, 1), make_barriers(2, 1), make_barriers(1, 2).index(0))
    pair = StationaryPair(k_tiles, v_tiles, make_barriers(1, 1).index(0))
    smem = KeySmem(pair, make_ring(q_tiles, do_tiles, lse_rows, delta_rows, c), handover)
    ds_store = ()
    if ds_scratch is not None:
        if SPLIT and c.D_PAD + c.DV_PAD > STAGED_DIMS:
            staged = p_smem
        else:
            staged = gl.allocate_shared_memory(DTYPE, [c.TILE_KV // 32, ROWS, c.TILE_Q], smem_layout(ROWS, c.TILE_Q))
        ds_store = DsStore(ds_scratch, staged, chunk, number)
    fence_async_shared()
    gl.warp_specialize(
        [
            (key_consumer, (0, smem, (None if SPLIT else dk, dv), () if SPLIT else ds_store, task, call_params, c, functions)),
            (key_consumer, (1, smem, (dk, None if SPLIT else dv), ds_store, task, call_params, c, functions)),
            (key_producer,
             (PairSources(k, v if KEY else None, None, None), PairSources(q, do, lse, delta if KEY else None), smem, task, call_params,
              pitch, c)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
