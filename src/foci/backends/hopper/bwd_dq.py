# mypy: ignore-errors
"""dq of a tile of queries: two warpgroups of 64 queries each, and one producer warp that loads tiles of keys and values by TMA.

B, Hq, Hkv, Sq, Skv, D, Dv    as in `foci.backends.hopper.forward`
q, do, dq                     TMA descriptors [B, Hq, Sq, D or Dv] of 64 rows; do is the gradient of out
k, v                          TMA descriptors [B, Hkv, Skv, D or Dv] of TILE_KV rows
lse, delta                    pointers [B, Hq, Sq] float32: logsumexp in base 2, and sum(out * do) - dlse
S, P, dP, dS                  [64 queries, TILE_KV], in registers
"""

from foci.backends.gpu.tiles import decode, find_task, nth_visited, sequence_at, tile_runs, tile_start
from foci.backends.hopper.bwd_tile_math import recompute_weights, scale_dscore
from foci.backends.hopper.gluon_compat import fence_async_shared, gl, gluon, mbarrier, tma, warpgroup_mma_wait
from foci.backends.hopper.layouts import mma_layout
from foci.backends.hopper.mma import begin_pv, begin_scores, scale_accumulators, wait_accumulators, zero_accumulators
from foci.backends.hopper.smem import allocate_tiles, load_pieces, make_barriers, store_pieces, tile_pieces


@gluon.jit
def load_key_runs(k, v, buffers, bars, at, run, line, n, table, c):
    """Producer: load the K/V tiles of one run, each into the next stage. Returns the number of tiles loaded so far."""
    k_tiles, v_tiles = buffers
    k_full, v_full, empty = bars
    memory_b, kv_h, kv_start, kv_len = at
    first, before, gap, count = run
    for i in range(0, count):
        here = tile_start(nth_visited(table, line, i, first, before, gap, c), c, c.TILE_KV)
        stage = n % c.STAGES
        mbarrier.wait(empty.index(stage), ((n // c.STAGES) & 1) ^ 1)
        mbarrier.expect(k_full.index(stage), c.TILE_KV * c.D_PAD * 2)
        load_pieces(k, memory_b, kv_h, here, kv_start, kv_len, k_full.index(stage), tile_pieces(k_tiles, stage), c.JAGGED)
        mbarrier.expect(v_full.index(stage), c.TILE_KV * c.DV_PAD * 2)
        load_pieces(v, memory_b, kv_h, here, kv_start, kv_len, v_full.index(stage), tile_pieces(v_tiles, stage), c.JAGGED)
        n += 1
    return n


@gluon.jit
def query_producer(sources, q_do_smem, buffers, bars, task, spans, size, table, c):
    """Producer warp: q and do once, then K and V tile by tile."""
    q, do, k, v = sources
    q_tiles, do_tiles = q_do_smem
    q_full, k_full, v_full, empty = bars
    b, memory_b, h, tile, index = task
    q_start, q_len, kv_start, kv_len = sequence_at(spans, size, b, index, c)
    first = tile * c.TILE_Q
    mbarrier.expect(q_full, c.TILE_Q * 2 * (c.D_PAD + c.DV_PAD))
    for half in gl.static_range(c.CONSUMERS):
        load_pieces(q, memory_b, h, first + half * 64, q_start, q_len, q_full, tile_pieces(q_tiles, half), c.JAGGED)
        load_pieces(do, memory_b, h, first + half * 64, q_start, q_len, q_full, tile_pieces(do_tiles, half), c.JAGGED)
    line, full_first, full, part_first, before, gap, part = tile_runs(table, b, h, index, kv_len, c, c.TILE_KV)
    at = (memory_b, h // decode(size.group), kv_start, kv_len)
    n = full * 0
    n = load_key_runs(k, v, buffers, (k_full, v_full, empty), at, (full_first, full * 0, full * 0, full), line, n, table, c)
    n = load_key_runs(k, v, buffers, (k_full, v_full, empty), at, (part_first, before, gap, part), line, n, table, c)


@gluon.jit
def accumulate_dq(
    dq, tiles, rows, buffers, bars, at, run, line, n, table, scale, env, aux, c,
    both: gl.constexpr, mask: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Accumulate one run of key tiles into dq of 64 queries. MASKED tiles may also overhang the keys."""
    S: gl.constexpr = mma_layout(c.TILE_KV)
    q, do = tiles
    lse2, delta = rows
    k_tiles, v_tiles = buffers
    k_full, v_full, empty = bars
    b, h, q_idx, q_len, kv_len = at
    first, before, gap, count = run
    MASK: gl.constexpr = MASKED and c.MODE != "all"
    zero = gl.zeros([64, c.TILE_KV], gl.float32, S)
    for i in range(0, count):
        tile = nth_visited(table, line, i, first, before, gap, c)
        stage = n % c.STAGES
        phase = (n // c.STAGES) & 1
        keys = tile_pieces(k_tiles, stage)
        # S = Q K^T and dP = dO V^T, both asynchronous
        mbarrier.wait(k_full.index(stage), phase)
        s = begin_scores(q, keys, zero, False)
        mbarrier.wait(v_full.index(stage), phase)
        dp = begin_scores(do, tile_pieces(v_tiles, stage), zero, False)
        s = warpgroup_mma_wait(len(do), deps=[s])
        # P = exp2(S - lse), masked, and the derivative of the score function
        kv_idx = tile_start(tile, c, c.TILE_KV) + gl.expand_dims(gl.arange(0, c.TILE_KV, layout=gl.SliceLayout(0, S)), 0)
        p, slope = recompute_weights(s, lse2, (b, h, q_idx, kv_idx, q_len, kv_len, tile), scale, env, aux, c, both, mask, MASK, MASKED)
        dscore_scaled = scale_dscore(p, slope, c, MASKED)
        # dS = P * slope * (dP - delta)
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = (dscore_scaled * (dp - delta)).to(keys[0].dtype)
        # dQ += dS K
        dq = wait_accumulators(begin_pv(ds, keys, dq))
        mbarrier.arrive(empty.index(stage), count=1)
        n += 1
    return dq, n


@gluon.jit
def query_consumer(
    half: gl.constexpr, q_do_smem, buffers, bars, dq_out, row_values, task, params, c,
    pre: gl.constexpr, both: gl.constexpr, mask: gl.constexpr,
):  # fmt: skip
    """One warpgroup: dq of 64 queries."""
    S: gl.constexpr = mma_layout(c.TILE_KV)
    spans, size, table, scale, env = params
    lse_rows, delta_rows = row_values
    q_tiles, do_tiles = q_do_smem
    q_full, k_full, v_full, empty = bars
    b, memory_b, h, tile, index = task
    q_start, q_len, kv_start, kv_len = sequence_at(spans, size, b, index, c)
    first = tile * c.TILE_Q + half * 64
    row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, S))
    head = (memory_b * decode(size.heads) + h).to(gl.int64) * decode(size.rows) + q_start
    lse2 = gl.expand_dims(gl.load(lse_rows + head + row, mask=row < q_len, other=float("inf")), 1)
    delta = gl.expand_dims(gl.load(delta_rows + head + row, mask=row < q_len, other=0.0), 1)
    q_idx = gl.expand_dims(gl.minimum(row, q_len - 1), 1)
    q = tile_pieces(q_tiles, half)
    do = tile_pieces(do_tiles, half)
    dq = zero_accumulators(64, c.D_PAD)
    aux = pre(b, h, q_idx, q_len, kv_len, scale, env)
    line, full_first, full, part_first, before, gap, part = tile_runs(table, b, h, index, kv_len, c, c.TILE_KV)
    at = (b, h, q_idx, q_len, kv_len)
    mbarrier.wait(q_full, 0)
    n = full * 0
    dq, n = accumulate_dq(
        dq, (q, do), (lse2, delta), buffers, (k_full, v_full, empty), at, (full_first, full * 0, full * 0, full), line, n,
        table, scale, env, aux, c, both, mask, False,
    )  # fmt: skip
    dq, n = accumulate_dq(
        dq, (q, do), (lse2, delta), buffers, (k_full, v_full, empty), at, (part_first, before, gap, part), line, n,
        table, scale, env, aux, c, both, mask, True,
    )  # fmt: skip
    # stage dq in the query tile: only this warpgroup reads its 64 queries, and it is done
    store_pieces(dq_out, memory_b, h, first, q_start, q_len, q, scale_accumulators(dq, scale), c.JAGGED)
    tma.store_wait(0)


@gluon.jit
def attention_query_gradient(
    q, k, v, do, lse, delta, dq, size, spans, table, scale, env, c,
    pre: gl.constexpr, both: gl.constexpr, mask: gl.constexpr,
):  # fmt: skip
    """dq of one tile of queries. Shapes are in the legend above."""
    b, memory_b, h, index, tile = find_task(size, spans, c, True)
    if c.JAGGED and b < 0:
        return
    DTYPE: gl.constexpr = q.dtype
    q_tiles = allocate_tiles(DTYPE, c.CONSUMERS, 64, c.D_PAD)
    do_tiles = allocate_tiles(DTYPE, c.CONSUMERS, 64, c.DV_PAD)
    k_tiles = allocate_tiles(DTYPE, c.STAGES, c.TILE_KV, c.D_PAD)
    v_tiles = allocate_tiles(DTYPE, c.STAGES, c.TILE_KV, c.DV_PAD)
    bars = (make_barriers(1, 1).index(0), make_barriers(c.STAGES, 1), make_barriers(c.STAGES, 1), make_barriers(c.STAGES, c.CONSUMERS))
    fence_async_shared()
    q_do_smem = (q_tiles, do_tiles)
    buffers = (k_tiles, v_tiles)
    task = (b, memory_b, h, tile, index)
    rows = (lse, delta)
    params = (spans, size, table, scale, env)
    gl.warp_specialize(
        [
            (query_consumer, (0, q_do_smem, buffers, bars, dq, rows, task, params, c, pre, both, mask)),
            (query_consumer, (1, q_do_smem, buffers, bars, dq, rows, task, params, c, pre, both, mask)),
            (query_producer, ((q, do, k, v), q_do_smem, buffers, bars, task, spans, size, table, c)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
