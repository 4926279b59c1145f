# mypy: ignore-errors
"""dq of a tile of queries: two warpgroups of 64 queries each, and one producer warp that loads tiles of keys by TMA.

    B, Hq, Hkv, Sq, Skv, D, Dv    as in `foci.backends.hopper.forward`
    q, do, dq                     TMA descriptors [B, Hq, Sq, D or Dv] of 64 rows; do is the gradient of out
    k, v                          TMA descriptors [B, Hkv, Skv, D or Dv] of TILE_KV rows
    lse, delta                    pointers [B, Hq, Sq] float32: logsumexp in base 2, and sum(out * do) - dlse
    S, P, dP, dS                  [64 queries, TILE_KV], in registers
    ds_scratch                    TMA descriptor of dS^T in memory, see `ds_scratch`

`attention_query_gradient` computes dS again. `attention_kept_gradient` reads it where `bwd_dk_dv` stored it: what is left is one product
of tiles from shared memory, with nothing to recompute, so the two share no loop.
"""

from typing import Any, NamedTuple

from foci.backends.gpu.tiles import decode, nth_visited, sequence_at, tile_start
from foci.backends.hopper.bwd_producer import (
    PairPlace,
    PairSmem,
    PairSources,
    StationaryPair,
    allocate_pair,
    load_stationary,
    make_ring,
    stream_run,
)
from foci.backends.hopper.bwd_tile_math import (
    begin_s_dp,
    column_idx,
    find_backward_task,
    load_row_values,
    recompute_weights,
    report_nan,
    scale_dscore,
    split_runs,
)
from foci.backends.hopper.ds_scratch import ds_rows, find_chunk_task
from foci.backends.hopper.gluon_compat import fence_async_shared, gl, mbarrier, tma, tma_load, warpgroup_mma, warpgroup_mma_wait
from foci.backends.hopper.kernel_args import Position
from foci.backends.hopper.layouts import mma_layout, smem_layout
from foci.backends.hopper.mma import begin_pv, scale_accumulators, wait_accumulators, zero_accumulators
from foci.backends.hopper.smem import allocate_tiles, load_pieces, make_barriers, reshape_to_box, store_pieces, tile_pieces
from foci.compat.gluon import gluon_jit


class QueryContext(NamedTuple):
    """A warpgroup's 64 queries; q_idx, lse2 and delta are [64, 1]."""

    b: Any
    h: Any
    q_idx: Any
    q_len: Any
    kv_len: Any
    lse2: Any
    delta: Any
    aux: Any  # from the function `pre`


@gluon_jit
def query_producer(query_sources, key_sources, smem, task, params, c):
    """Producer warp: q and do once, then K and V tile by tile."""
    b, memory_b, h, tile, index = task
    q_start, q_len, kv_start, kv_len = sequence_at(params.spans, params.size, b, index, c)
    load_stationary(query_sources, smem.pair, PairPlace(memory_b, h, q_start, q_len, 0), tile * c.TILE_Q, c)
    full_run, masked_run = split_runs(params.table, b, h, index, kv_len, c, c.TILE_KV)
    keys = PairPlace(memory_b, h // decode(params.size.group), kv_start, kv_len, 0)
    n = stream_run(key_sources, smem.ring, keys, full_run, full_run.count * 0, params.table, c)
    stream_run(key_sources, smem.ring, keys, masked_run, n, params.table, c)


@gluon_jit
def accumulate_dq(dq, n, half: gl.constexpr, smem, query_ctx, run, params, c, functions, MASKED: gl.constexpr):
    """Accumulate one run of key tiles into dq of 64 queries; `n` tiles came before. MASKED tiles may also overhang the keys."""
    b, h, q_idx, q_len, kv_len, lse2, delta, aux = query_ctx
    MASK: gl.constexpr = MASKED and c.MODE != "all"
    for i in range(0, run.count):
        tile = nth_visited(params.table, run.row, i, run.first, run.before, run.gap, c)
        stage = n % c.STAGES
        phase = (n // c.STAGES) & 1
        keys = tile_pieces(smem.ring.qk_tiles, stage)
        # S = Q K^T and dP = dO V^T, both asynchronous
        s, dp = begin_s_dp(smem.pair, half, 0, smem.ring, keys, stage, phase)
        s = warpgroup_mma_wait(len(smem.ring.do_v_tiles), deps=[s])
        # P = exp2(S - lse), masked, and the derivative of the score function
        kv_idx = column_idx(tile_start(tile, c, c.TILE_KV), c.TILE_KV)
        position = Position(b, h, q_idx, kv_idx, q_len, kv_len, tile, aux)
        p, slope = recompute_weights(s, lse2, position, params, c, functions, MASK, MASKED)
        dscore_scaled = scale_dscore(p, slope, c, MASKED)
        # dS = P * slope * (dP - delta)
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = (dscore_scaled * (dp - delta)).to(keys[0].dtype)
        # dQ += dS K
        dq = wait_accumulators(begin_pv(ds, keys, dq))
        mbarrier.arrive(smem.ring.empty.index(stage), count=1)
        n += 1
    return dq, n


@gluon_jit
def query_consumer(half: gl.constexpr, smem, dq_out, row_values, task, params, c, functions):
    """One warpgroup: dq of 64 queries."""
    S: gl.constexpr = mma_layout(c.TILE_KV)
    size, scale = params.size, params.scale
    b, memory_b, h, tile, index = task
    q_start, q_len, kv_start, kv_len = sequence_at(params.spans, size, b, index, c)
    first = tile * c.TILE_Q + half * 64
    row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, S))
    head = (memory_b * decode(size.heads) + h).to(gl.int64) * decode(size.rows) + q_start
    lse2, delta = load_row_values(row_values, head, row, q_len)
    q_idx = gl.expand_dims(gl.minimum(row, q_len - 1), 1)
    dq = zero_accumulators(64, c.D_PAD)
    aux = functions.pre(b, h, q_idx, q_len, kv_len, scale, params.env)
    full_run, masked_run = split_runs(params.table, b, h, index, kv_len, c, c.TILE_KV)
    query_ctx = QueryContext(b, h, q_idx, q_len, kv_len, lse2, delta, aux)
    mbarrier.wait(smem.pair.full, 0)
    n = full_run.count * 0
    dq, n = accumulate_dq(dq, n, half, smem, query_ctx, full_run, params, c, functions, False)
    dq, n = accumulate_dq(dq, n, half, smem, query_ctx, masked_run, params, c, functions, True)
    # stage dq in the query tile: only this warpgroup reads its 64 queries, and it is done
    store_pieces(dq_out, memory_b, h, first, q_start, q_len, tile_pieces(smem.pair.qk_tiles, half), scale_accumulators(dq, scale), c.JAGGED)
    report_nan(params.found_nan, dq)
    tma.store_wait(0)


@gluon_jit
def attention_query_gradient(q, k, v, do, lse, delta, dq, call_params, c, functions):
    """dq of one tile of queries. Shapes are in the legend above."""
    task = find_backward_task(call_params.size, call_params.spans, c, True)
    if c.JAGGED and task.b < 0:
        return
    DTYPE: gl.constexpr = q.dtype
    q_tiles, do_tiles = allocate_pair(DTYPE, 2, 64, c)
    k_tiles, v_tiles = allocate_pair(DTYPE, c.STAGES, c.TILE_KV, c)
    pair = StationaryPair(q_tiles, do_tiles, make_barriers(1, 1).index(0))
    smem = PairSmem(pair, make_ring(k_tiles, v_tiles, (), (), c))
    fence_async_shared()
    gl.warp_specialize(
        [
            (query_consumer, (0, smem, dq, (lse, delta), task, call_params, c, functions)),
            (query_consumer, (1, smem, dq, (lse, delta), task, call_params, c, functions)),
            (query_producer, (PairSources(q, do, None, None), PairSources(k, v, None, None), smem, task, call_params, c)),
        ],
        [4, 1],
        [240, 24],
    )


# ---- dq = dS K from stored dS ----


class QueryTile(NamedTuple):
    """A tile of queries of a chunk of heads."""

    b: Any
    h: Any
    slot: Any  # number of the head in the chunk
    first: Any  # first query
    group: Any  # query heads that share keys


@gluon_jit
def ds_producer(ds_scratch, k, tiles, bars, place, chunk, count, c):
    """Producer warp: a tile of dS and one of K per stage."""
    ds_tiles, k_tiles = tiles
    full, empty = bars
    for i in range(0, count):
        stage = i % c.STAGES
        mbarrier.wait(empty.index(stage), ((i // c.STAGES) & 1) ^ 1)
        ready = full.index(stage)
        mbarrier.expect(ready, c.TILE_KV * 2 * (c.TILE_Q + c.D_PAD))
        row, first_query = ds_rows(chunk, i * c.TILE_KV, c)
        for half in gl.static_range(2):
            tma_load(
                ds_scratch,
                [0, place.slot, row, place.first - first_query + half * 64],
                ready,
                reshape_to_box(ds_tiles.index(stage * 2 + half), False),
            )
        load_pieces(k, place.b, place.h // place.group, i * c.TILE_KV, 0, 0, ready, tile_pieces(k_tiles, stage), False)


@gluon_jit
def begin_dq_product(rows, keys, sums):
    """Begin sums += rows @ keys, rows and keys in shared memory, one asynchronous wgmma per piece."""
    pending = ()
    for i in gl.static_range(len(sums)):
        pending = pending + (warpgroup_mma(rows, keys[i], sums[i], is_async=True),)
    return pending


@gluon_jit
def ds_consumer(half: gl.constexpr, tiles, bars, dq, found_nan, place, count, scale, c):
    """One warpgroup: dq of 64 queries, one product in flight."""
    ds_tiles, k_tiles, out_tiles = tiles
    full, empty = bars
    half_first = place.first + half * 64
    dq_sums = zero_accumulators(64, c.D_PAD)
    if c.MODE == "causal":
        # dS of later keys was not written
        count = gl.minimum(count, (half_first + 64 + c.TILE_KV - 1) // c.TILE_KV)
    for i in range(0, count):
        stage = i % c.STAGES
        mbarrier.wait(full.index(stage), (i // c.STAGES) & 1)
        pending = begin_dq_product(ds_tiles.index(stage * 2 + half).permute((1, 0)), tile_pieces(k_tiles, stage), dq_sums)
        # the previous tile's products are done: free its stage
        dq_sums = wait_accumulators(pending, len(pending))
        mbarrier.arrive(empty.index((i + c.STAGES - 1) % c.STAGES), count=1, pred=i > 0)
    dq_sums = wait_accumulators(dq_sums)
    mbarrier.arrive(empty.index((count + c.STAGES - 1) % c.STAGES), count=1)
    store_pieces(dq, place.b, place.h, half_first, 0, 0, tile_pieces(out_tiles, half), scale_accumulators(dq_sums, scale), False)
    report_nan(found_nan, dq_sums)
    tma.store_wait(0)


@gluon_jit
def attention_kept_gradient(ds_scratch, k, dq, found_nan, size, chunk, scale, c):
    """dq of one tile of 128 queries of a chunk of heads. Shapes are in the legend above."""
    b, h, task, slot = find_chunk_task(chunk, size, True)
    first = task * c.TILE_Q
    count = (decode(size.columns) + c.TILE_KV - 1) // c.TILE_KV
    if c.MODE == "causal":
        count = gl.minimum(count, (first + c.TILE_Q) // c.TILE_KV)
    ds_tiles = gl.allocate_shared_memory(ds_scratch.dtype, [c.STAGES * 2, c.TILE_KV, 64], smem_layout(c.TILE_KV, 64))
    k_tiles = allocate_tiles(k.dtype, c.STAGES, c.TILE_KV, c.D_PAD)
    out_tiles = allocate_tiles(k.dtype, 2, 64, c.D_PAD)
    bars = (make_barriers(c.STAGES, 1), make_barriers(c.STAGES, 2))
    fence_async_shared()
    place = QueryTile(b, h, slot, first, decode(size.group))
    gl.warp_specialize(
        [
            (ds_consumer, (0, (ds_tiles, k_tiles, out_tiles), bars, dq, found_nan, place, count, scale, c)),
            (ds_consumer, (1, (ds_tiles, k_tiles, out_tiles), bars, dq, found_nan, place, count, scale, c)),
            (ds_producer, (ds_scratch, k, (ds_tiles, k_tiles), bars, place, chunk, count, c)),
        ],
        [4, 1],
        [240, 24],
    )
