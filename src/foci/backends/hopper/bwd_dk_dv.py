# mypy: ignore-errors
"""dk and dv of a tile of keys: two warpgroups of 64 keys each, and one producer warp that loads tiles of queries by TMA.

    B, Hq, Hkv, Sq, Skv, D, Dv    as in `foci.backends.hopper.forward`
    q, do                         TMA descriptors [B, Hq, Sq, D], [B, Hq, Sq, Dv] of TILE_Q rows; do is the gradient of out
    k, v, dk, dv                  TMA descriptors [B, Hkv, Skv, D or Dv] of 64 rows; dk or dv may be None
    lse, delta                    TMA descriptors, float32, one value per query: logsumexp in base 2, and sum(out * do) - dlse
    S^T, P^T, dP^T, dS^T          [64 keys, TILE_Q], in registers
    ds_scratch                    None, or the memory that `bwd_dq_from_ds` reads dS^T from

Scores are transposed, keys as rows, so that P^T and dS^T are the left operands of dV += P^T dO and dK += dS^T Q straight from registers. A
warpgroup accumulates over all queries and all query heads that share its keys: no atomics.
"""

from typing import Any, NamedTuple

from foci.backends.gpu.tiles import decode, nth_visited, sequence_at, tile_runs, tile_start
from foci.backends.hopper.bwd_dq_from_ds import ROWS, DsStore, ds_layouts, find_chunk_task, store_ds
from foci.backends.hopper.bwd_tile_math import find_backward_task, recompute_weights, row_line, scale_dscore
from foci.backends.hopper.gluon_compat import fence_async_shared, gl, gluon, mbarrier, tma, tma_load, warpgroup_mma_wait
from foci.backends.hopper.kernel_args import Position, Task, VisitRun
from foci.backends.hopper.layouts import mma_layout, smem_layout
from foci.backends.hopper.mma import begin_pv, begin_scores, scale_accumulators, wait_accumulators, zero_accumulators
from foci.backends.hopper.smem import allocate_tiles, load_pieces, make_barriers, opaque_value, store_pieces, tile_pieces


class KeySources(NamedTuple):
    """Descriptors that the producer loads from."""

    q: Any
    do: Any
    lse: Any
    delta: Any
    k: Any
    v: Any


class KeySmem(NamedTuple):
    """Shared memory: keys and values of both warpgroups, STAGES tiles of queries, and barriers."""

    k_tiles: Any
    v_tiles: Any
    q_tiles: Any
    do_tiles: Any
    lse_rows: Any
    delta_rows: Any
    kv_full: Any
    q_full: Any  # barriers of each stage
    do_full: Any
    empty: Any


class QueryHead(NamedTuple):
    """A head whose queries are loaded."""

    h: Any
    memory_b: Any
    line: Any  # `bwd_tile_math.row_line`
    q_start: Any
    q_len: Any


class KeyContext(NamedTuple):
    """A warpgroup's 64 keys, and a query head that reads them."""

    b: Any
    h: Any
    kv_idx: Any  # [64, 1]
    q_len: Any
    kv_len: Any
    aux: Any  # from the function `pre`
    ds_target: Any  # from `bwd_dq_from_ds.ds_layouts`, empty if dS is not stored


@gluon.jit
def split_query_runs(table, b, h, task, first, q_len, kv_len, c):
    """Query tiles that a key tile visits: (full run, masked run)."""
    row, full_first, full, part_first, before, gap, part = tile_runs(table, b, h, task, q_len, c, c.TILE_Q)
    if first + c.TILE_KV > kv_len:
        # the key tile overhangs the keys: mask every query tile
        part_first = part_first if c.MODE == "ranges" else full_first
        part += full
        full = full * 0
        gap = gap * 0
    return VisitRun(row, full_first, full * 0, full * 0, full), VisitRun(row, part_first, before, gap, part)


@gluon.jit
def load_query_runs(sources, smem, head, run, n, table, c, KEY: gl.constexpr):
    """Producer: load the query tiles of one run of one head, each into the next stage. Returns the number of tiles loaded so far."""
    for i in range(0, run.count):
        here = tile_start(nth_visited(table, run.row, i, run.first, run.before, run.gap, c), c, c.TILE_Q)
        stage = n % c.STAGES
        mbarrier.wait(smem.empty.index(stage), ((n // c.STAGES) & 1) ^ 1)
        ready = smem.q_full.index(stage)
        mbarrier.expect(ready, c.TILE_Q * (c.D_PAD * 2 + 4))
        q_tile = tile_pieces(smem.q_tiles, stage)
        load_pieces(sources.q, head.memory_b, head.h, here, head.q_start, head.q_len, ready, q_tile, c.JAGGED)
        tma_load(sources.lse, [head.line + here], ready, smem.lse_rows.index(stage))
        ready = smem.do_full.index(stage)
        mbarrier.expect(ready, c.TILE_Q * (c.DV_PAD * 2 + (4 if KEY else 0)))
        do_tile = tile_pieces(smem.do_tiles, stage)
        load_pieces(sources.do, head.memory_b, head.h, here, head.q_start, head.q_len, ready, do_tile, c.JAGGED)
        if KEY:
            tma_load(sources.delta, [head.line + here], ready, smem.delta_rows.index(stage))
        n += 1
    return n


@gluon.jit
def key_producer(sources, smem, task, params, pitch, c, KEY: gl.constexpr):
    """One warp: keys and values once, then the queries of each head that shares them."""
    kv_full, table = smem.kv_full, params.table
    b, memory_b, kv_h, tile, index = task
    q_start, q_len, kv_start, kv_len = sequence_at(params.spans, params.size, b, index, c)
    first = tile * c.TILE_KV
    mbarrier.expect(kv_full, c.TILE_KV * 2 * (c.D_PAD + (c.DV_PAD if KEY else 0)))
    for half in gl.static_range(2):
        half_first = first + half * (c.TILE_KV // 2)
        load_pieces(sources.k, memory_b, kv_h, half_first, kv_start, kv_len, kv_full, tile_pieces(smem.k_tiles, half), c.JAGGED)
        if KEY:
            load_pieces(sources.v, memory_b, kv_h, half_first, kv_start, kv_len, kv_full, tile_pieces(smem.v_tiles, half), c.JAGGED)
    n = 0
    group = decode(params.size.group)
    for member in range(0, group):
        h = kv_h * group + member
        line = row_line(b, memory_b, h, decode(params.size.heads) * group, q_start, pitch, c)
        full_run, masked_run = split_query_runs(table, b, h, index, first, q_len, kv_len, c)
        head = QueryHead(h, memory_b, line, q_start, q_len)
        n = load_query_runs(sources, smem, head, full_run, n, table, c, KEY)
        n = load_query_runs(sources, smem, head, masked_run, n, table, c, KEY)


@gluon.jit
def accumulate_dk_dv(sums, n, smem, key_ctx, run, params, c, half: gl.constexpr, functions, MASKED: gl.constexpr):
    """Accumulate one run of query tiles into `sums`: (dk, dv), empty where not wanted. `n` query tiles came before. MASKED tiles may also
    overhang queries or keys."""
    S: gl.constexpr = mma_layout(c.TILE_Q)
    dk, dv = sums
    KEY: gl.constexpr = len(dk) > 0
    VALUE: gl.constexpr = len(dv) > 0
    b, h, kv_idx, q_len, kv_len, aux, ds_target = key_ctx
    MASK: gl.constexpr = MASKED and c.MODE != "all"
    # wide accumulators leave few registers: round P for dV only after dS, when its float32 values are no longer needed
    LATE: gl.constexpr = KEY and VALUE and c.D_PAD + c.DV_PAD > 256
    zero = gl.zeros([c.TILE_KV // 2, c.TILE_Q], gl.float32, S)
    for i in range(0, run.count):
        tile = nth_visited(params.table, run.row, i, run.first, run.before, run.gap, c)
        stage = n % c.STAGES
        phase = (n // c.STAGES) & 1
        # recompute the addresses of K and V for each tile: hoisted, they would take registers through the loop
        opaque = opaque_value(0)
        queries = tile_pieces(smem.q_tiles, stage)
        douts = tile_pieces(smem.do_tiles, stage)
        # S^T = K Q^T and dP^T = V dO^T, both asynchronous
        mbarrier.wait(smem.q_full.index(stage), phase)
        s = begin_scores(tile_pieces(smem.k_tiles, half + opaque), queries, zero, False)
        mbarrier.wait(smem.do_full.index(stage), phase)
        if KEY:
            dp = begin_scores(tile_pieces(smem.v_tiles, half + opaque), douts, zero, False)
        s = warpgroup_mma_wait(len(douts) if KEY else 0, deps=[s])
        # P^T = exp2(S^T - lse), masked, and the derivative of the score function
        q_idx = tile_start(tile, c, c.TILE_Q) + gl.expand_dims(gl.arange(0, c.TILE_Q, layout=gl.SliceLayout(0, S)), 0)
        lse2 = gl.expand_dims(smem.lse_rows.index(stage).load(gl.SliceLayout(0, S)), 0)
        position = Position(b, h, q_idx, kv_idx, q_len, kv_len, tile, aux)
        p, slope = recompute_weights(s, lse2, position, params, c, functions, MASK, MASKED)
        dscore_scaled = scale_dscore(p, slope, c, MASKED)
        # dV += P^T dO
        if VALUE and not LATE:
            dv = begin_pv(p.to(douts[0].dtype), douts, dv)
        if KEY:
            # dS^T = P^T * slope * (dP^T - delta)
            dp = warpgroup_mma_wait(len(douts) if VALUE and not LATE else 0, deps=[dp])
            delta = gl.expand_dims(smem.delta_rows.index(stage).load(gl.SliceLayout(0, S)), 0)
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
        mbarrier.arrive(smem.empty.index(stage), count=1)
        n += 1
    return dk, dv, n


@gluon.jit
def key_consumer(half: gl.constexpr, smem, outputs, ds_store, task, params, c, functions, KEY: gl.constexpr, VALUE: gl.constexpr):
    """One warpgroup: dk and dv of 64 keys, summed over the query heads that share them."""
    S: gl.constexpr = mma_layout(c.TILE_Q)
    ROWS: gl.constexpr = c.TILE_KV // 2
    size, table, scale, env = params.size, params.table, params.scale, params.env
    dk_out, dv_out = outputs
    b, memory_b, kv_h, tile, index = task
    q_start, q_len, kv_start, kv_len = sequence_at(params.spans, size, b, index, c)
    first = tile * c.TILE_KV
    half_first = first + half * ROWS
    kv_idx = half_first + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, S)), 1)
    dk = ()
    dv = ()
    if KEY:
        dk = zero_accumulators(ROWS, c.D_PAD)
    if VALUE:
        dv = zero_accumulators(ROWS, c.DV_PAD)
    mbarrier.wait(smem.kv_full, 0)
    n = 0
    group = decode(size.group)
    for member in range(0, group):
        h = kv_h * group + member
        here = ds_layouts(ds_store, member, group, half_first, c)
        full_run, masked_run = split_query_runs(table, b, h, index, first, q_len, kv_len, c)
        aux = functions.pre(b, h, gl.minimum(kv_idx, kv_len - 1), q_len, kv_len, scale, env)
        key_ctx = KeyContext(b, h, kv_idx, q_len, kv_len, aux, here)
        dk, dv, n = accumulate_dk_dv((dk, dv), n, smem, key_ctx, full_run, params, c, half, functions, False)
        dk, dv, n = accumulate_dk_dv((dk, dv), n, smem, key_ctx, masked_run, params, c, half, functions, True)
    # stage dk and dv in the K and V tiles: only this warpgroup reads its half of them, and it is done
    if KEY:
        store_pieces(
            dk_out, memory_b, kv_h, half_first, kv_start, kv_len, tile_pieces(smem.k_tiles, half), scale_accumulators(dk, scale), c.JAGGED
        )
    if VALUE:
        store_pieces(dv_out, memory_b, kv_h, half_first, kv_start, kv_len, tile_pieces(smem.v_tiles, half), dv, c.JAGGED)
    tma.store_wait(0)


@gluon.jit
def attention_key_gradient(
    q, k, v, do, lse, delta, pitch, dk, dv, ds_scratch, chunk, call_params, c, functions, KEY: gl.constexpr, VALUE: gl.constexpr
):
    """dk and dv of one tile of keys. Shapes are in the legend above; `lse` and `delta` are laid out by `bwd_preprocess.begin_gradients`.

    chunk: the heads of this launch, if dS is stored.
    """
    if ds_scratch is None:
        task = find_backward_task(call_params.size, call_params.spans, c, False)
    else:
        b, kv_h, tile, number = find_chunk_task(chunk, call_params.size, False)
        task = Task(b, b, kv_h, tile, tile)
    if c.JAGGED and task.b < 0:
        return
    DTYPE: gl.constexpr = q.dtype
    k_tiles = allocate_tiles(DTYPE, 2, c.TILE_KV // 2, c.D_PAD)
    v_tiles = k_tiles
    if KEY or c.DV_PAD != c.D_PAD:
        v_tiles = allocate_tiles(DTYPE, 2, c.TILE_KV // 2, c.DV_PAD)
    q_tiles = allocate_tiles(DTYPE, c.STAGES, c.TILE_Q, c.D_PAD)
    do_tiles = allocate_tiles(DTYPE, c.STAGES, c.TILE_Q, c.DV_PAD)
    lse_rows = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.TILE_Q], lse.layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.TILE_Q], lse.layout)
    kv_full = make_barriers(1, 1).index(0)
    bars = (make_barriers(c.STAGES, 1), make_barriers(c.STAGES, 1), make_barriers(c.STAGES, 2))
    smem = KeySmem(k_tiles, v_tiles, q_tiles, do_tiles, lse_rows, delta_rows, kv_full, *bars)
    ds_store = ()
    if ds_scratch is not None:
        staged = gl.allocate_shared_memory(DTYPE, [4, ROWS, c.TILE_Q], smem_layout(ROWS, c.TILE_Q))
        ds_store = DsStore(ds_scratch, staged, chunk, number)
    fence_async_shared()
    sources = KeySources(q, do, lse, delta, k, v)
    gl.warp_specialize(
        [
            (key_consumer, (0, smem, (dk, dv), ds_store, task, call_params, c, functions, KEY, VALUE)),
            (key_consumer, (1, smem, (dk, dv), ds_store, task, call_params, c, functions, KEY, VALUE)),
            (key_producer, (sources, smem, task, call_params, pitch, c, KEY)),
        ],
        [4, 1],
        [240, 24],
    )
