# mypy: ignore-errors
"""dq of a tile of queries: two warpgroups of 64 queries each, and one producer warp that loads tiles of keys and values by TMA.

B, Hq, Hkv, Sq, Skv, D, Dv    as in `foci.backends.hopper.forward`
q, do, dq                     TMA descriptors [B, Hq, Sq, D or Dv] of 64 rows; do is the gradient of out
k, v                          TMA descriptors [B, Hkv, Skv, D or Dv] of TILE_KV rows
lse, delta                    pointers [B, Hq, Sq] float32: logsumexp in base 2, and sum(out * do) - dlse
S, P, dP, dS                  [64 queries, TILE_KV], in registers
"""

from typing import Any, NamedTuple

from foci.backends.gpu.tiles import decode, nth_visited, sequence_at, tile_runs, tile_start
from foci.backends.hopper.bwd_tile_math import find_backward_task, recompute_weights, scale_dscore
from foci.backends.hopper.gluon_compat import fence_async_shared, gl, gluon, mbarrier, tma, warpgroup_mma_wait
from foci.backends.hopper.kernel_args import Position, VisitRun
from foci.backends.hopper.layouts import mma_layout
from foci.backends.hopper.mma import begin_pv, begin_scores, scale_accumulators, wait_accumulators, zero_accumulators
from foci.backends.hopper.smem import allocate_tiles, load_pieces, make_barriers, store_pieces, tile_pieces


class QuerySources(NamedTuple):
    """Descriptors that the producer loads from."""

    q: Any
    do: Any
    k: Any
    v: Any


class QuerySmem(NamedTuple):
    """Shared memory: q and do of both warpgroups, STAGES tiles of keys and of values, and barriers."""

    q_tiles: Any
    do_tiles: Any
    k_tiles: Any
    v_tiles: Any
    q_full: Any
    k_full: Any  # barriers of each stage
    v_full: Any
    empty: Any


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


@gluon.jit
def split_key_runs(table, b, h, task, kv_len, c):
    """Key tiles that a query tile visits: (full run, masked run)."""
    row, full_first, full, part_first, before, gap, part = tile_runs(table, b, h, task, kv_len, c, c.TILE_KV)
    return VisitRun(row, full_first, full * 0, full * 0, full), VisitRun(row, part_first, before, gap, part)


@gluon.jit
def load_key_runs(sources, smem, task, kv_h, span, run, n, table, c):
    """Producer: load the K/V tiles of one run, each into the next stage. Returns the number of tiles loaded so far."""
    kv_start, kv_len = span
    for i in range(0, run.count):
        here = tile_start(nth_visited(table, run.row, i, run.first, run.before, run.gap, c), c, c.TILE_KV)
        stage = n % c.STAGES
        mbarrier.wait(smem.empty.index(stage), ((n // c.STAGES) & 1) ^ 1)
        full = smem.k_full.index(stage)
        mbarrier.expect(full, c.TILE_KV * c.D_PAD * 2)
        load_pieces(sources.k, task.memory_b, kv_h, here, kv_start, kv_len, full, tile_pieces(smem.k_tiles, stage), c.JAGGED)
        full = smem.v_full.index(stage)
        mbarrier.expect(full, c.TILE_KV * c.DV_PAD * 2)
        load_pieces(sources.v, task.memory_b, kv_h, here, kv_start, kv_len, full, tile_pieces(smem.v_tiles, stage), c.JAGGED)
        n += 1
    return n


@gluon.jit
def query_producer(sources, smem, task, params, c):
    """Producer warp: q and do once, then K and V tile by tile."""
    b, memory_b, h, tile, index = task
    q_start, q_len, kv_start, kv_len = sequence_at(params.spans, params.size, b, index, c)
    first = tile * c.TILE_Q
    mbarrier.expect(smem.q_full, c.TILE_Q * 2 * (c.D_PAD + c.DV_PAD))
    for half in gl.static_range(c.CONSUMERS):
        load_pieces(sources.q, memory_b, h, first + half * 64, q_start, q_len, smem.q_full, tile_pieces(smem.q_tiles, half), c.JAGGED)
        load_pieces(sources.do, memory_b, h, first + half * 64, q_start, q_len, smem.q_full, tile_pieces(smem.do_tiles, half), c.JAGGED)
    full_run, masked_run = split_key_runs(params.table, b, h, index, kv_len, c)
    kv_h = h // decode(params.size.group)
    n = full_run.count * 0
    n = load_key_runs(sources, smem, task, kv_h, (kv_start, kv_len), full_run, n, params.table, c)
    n = load_key_runs(sources, smem, task, kv_h, (kv_start, kv_len), masked_run, n, params.table, c)


@gluon.jit
def accumulate_dq(dq, n, q_do, smem, query_ctx, run, params, c, functions, MASKED: gl.constexpr):
    """Accumulate one run of key tiles into dq of 64 queries; `n` tiles came before. MASKED tiles may also overhang the keys."""
    S: gl.constexpr = mma_layout(c.TILE_KV)
    q, do = q_do
    b, h, q_idx, q_len, kv_len, lse2, delta, aux = query_ctx
    MASK: gl.constexpr = MASKED and c.MODE != "all"
    zero = gl.zeros([64, c.TILE_KV], gl.float32, S)
    for i in range(0, run.count):
        tile = nth_visited(params.table, run.row, i, run.first, run.before, run.gap, c)
        stage = n % c.STAGES
        phase = (n // c.STAGES) & 1
        keys = tile_pieces(smem.k_tiles, stage)
        # S = Q K^T and dP = dO V^T, both asynchronous
        mbarrier.wait(smem.k_full.index(stage), phase)
        s = begin_scores(q, keys, zero, False)
        mbarrier.wait(smem.v_full.index(stage), phase)
        dp = begin_scores(do, tile_pieces(smem.v_tiles, stage), zero, False)
        s = warpgroup_mma_wait(len(do), deps=[s])
        # P = exp2(S - lse), masked, and the derivative of the score function
        kv_idx = tile_start(tile, c, c.TILE_KV) + gl.expand_dims(gl.arange(0, c.TILE_KV, layout=gl.SliceLayout(0, S)), 0)
        position = Position(b, h, q_idx, kv_idx, q_len, kv_len, tile, aux)
        p, slope = recompute_weights(s, lse2, position, params, c, functions, MASK, MASKED)
        dscore_scaled = scale_dscore(p, slope, c, MASKED)
        # dS = P * slope * (dP - delta)
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = (dscore_scaled * (dp - delta)).to(keys[0].dtype)
        # dQ += dS K
        dq = wait_accumulators(begin_pv(ds, keys, dq))
        mbarrier.arrive(smem.empty.index(stage), count=1)
        n += 1
    return dq, n


@gluon.jit
def query_consumer(half: gl.constexpr, smem, dq_out, row_values, task, params, c, functions):
    """One warpgroup: dq of 64 queries."""
    S: gl.constexpr = mma_layout(c.TILE_KV)
    size, scale = params.size, params.scale
    lse_rows, delta_rows = row_values
    b, memory_b, h, tile, index = task
    q_start, q_len, kv_start, kv_len = sequence_at(params.spans, size, b, index, c)
    first = tile * c.TILE_Q + half * 64
    row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, S))
    head = (memory_b * decode(size.heads) + h).to(gl.int64) * decode(size.rows) + q_start
    lse2 = gl.expand_dims(gl.load(lse_rows + head + row, mask=row < q_len, other=float("inf")), 1)
    delta = gl.expand_dims(gl.load(delta_rows + head + row, mask=row < q_len, other=0.0), 1)
    q_idx = gl.expand_dims(gl.minimum(row, q_len - 1), 1)
    q = tile_pieces(smem.q_tiles, half)
    do = tile_pieces(smem.do_tiles, half)
    dq = zero_accumulators(64, c.D_PAD)
    aux = functions.pre(b, h, q_idx, q_len, kv_len, scale, params.env)
    full_run, masked_run = split_key_runs(params.table, b, h, index, kv_len, c)
    query_ctx = QueryContext(b, h, q_idx, q_len, kv_len, lse2, delta, aux)
    mbarrier.wait(smem.q_full, 0)
    n = full_run.count * 0
    dq, n = accumulate_dq(dq, n, (q, do), smem, query_ctx, full_run, params, c, functions, False)
    dq, n = accumulate_dq(dq, n, (q, do), smem, query_ctx, masked_run, params, c, functions, True)
    # stage dq in the query tile: only this warpgroup reads its 64 queries, and it is done
    store_pieces(dq_out, memory_b, h, first, q_start, q_len, q, scale_accumulators(dq, scale), c.JAGGED)
    tma.store_wait(0)


@gluon.jit
def attention_query_gradient(q, k, v, do, lse, delta, dq, call_params, c, functions):
    """dq of one tile of queries. Shapes are in the legend above."""
    task = find_backward_task(call_params.size, call_params.spans, c, True)
    if c.JAGGED and task.b < 0:
        return
    DTYPE: gl.constexpr = q.dtype
    q_tiles = allocate_tiles(DTYPE, c.CONSUMERS, 64, c.D_PAD)
    do_tiles = allocate_tiles(DTYPE, c.CONSUMERS, 64, c.DV_PAD)
    k_tiles = allocate_tiles(DTYPE, c.STAGES, c.TILE_KV, c.D_PAD)
    v_tiles = allocate_tiles(DTYPE, c.STAGES, c.TILE_KV, c.DV_PAD)
    q_full = make_barriers(1, 1).index(0)
    bars = (make_barriers(c.STAGES, 1), make_barriers(c.STAGES, 1), make_barriers(c.STAGES, c.CONSUMERS))
    fence_async_shared()
    smem = QuerySmem(q_tiles, do_tiles, k_tiles, v_tiles, q_full, *bars)
    gl.warp_specialize(
        [
            (query_consumer, (0, smem, dq, (lse, delta), task, call_params, c, functions)),
            (query_consumer, (1, smem, dq, (lse, delta), task, call_params, c, functions)),
            (query_producer, (QuerySources(q, do, k, v), smem, task, call_params, c)),
        ],
        [4, 1],
        [240, 24],
    )
