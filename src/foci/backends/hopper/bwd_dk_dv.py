# mypy: ignore-errors
"""dk and dv of a tile of keys: two warpgroups of 64 keys each, and one warp that brings tiles of queries by TMA.

Scores are held turned, keys as rows, so that the weights and the score's gradient are the first operand of the products
that sum into dv and dk, straight from registers. A warpgroup sums over all rows and grouped heads alone: no atomics.
"""

from foci.backends.hopper.bwd_dq_from_ds import ROWS, ds_layouts, find_chunk_task, store_ds
from foci.backends.hopper.bwd_tile_math import recompute_weights, row_line, scale_dscore
from foci.backends.hopper.gluon_compat import fence_async_shared, gl, gluon, mbarrier, tma, tma_load, warpgroup_mma_wait
from foci.backends.hopper.layouts import mma_layout, smem_layout
from foci.backends.hopper.mma import begin_pv, begin_scores, scale_accumulators, wait_accumulators, zero_accumulators
from foci.backends.hopper.smem import allocate_tiles, load_pieces, make_barriers, opaque_zero, store_pieces, tile_pieces
from foci.backends.triton.tiles import decode, find_task, nth_visited, sequence_at, tile_runs, tile_start


@gluon.jit
def query_runs_of_keys(table, b, h, task, first, q_len, kv_len, c):
    """(row, (first, before, gap, tiles) of whole tiles of queries, the same of masked ones) that a tile of keys visits."""
    line, full_first, full, part_first, before, gap, part = tile_runs(table, b, h, task, q_len, c, c.TILE_Q)
    if first + c.TILE_KV > kv_len:
        # keys that are not there must not be looked up: every tile is an edge
        part_first = part_first if c.MODE == "ranges" else full_first
        part += full
        full = full * 0
        gap = gap * 0
    return line, (full_first, full * 0, full * 0, full), (part_first, before, gap, part)


@gluon.jit
def load_query_runs(sources, buffers, bars, at, run, line, n, table, c, KEY: gl.constexpr):
    """Producer: the tiles of one run of one head, each into the next stage; returns how many stages were used so far."""
    q, do, lse, delta = sources
    q_tiles, do_tiles, lse_rows, delta_rows = buffers
    q_full, do_full, empty = bars
    h, memory_b, head, q_start, q_len = at
    first, before, gap, count = run
    for i in range(0, count):
        here = tile_start(nth_visited(table, line, i, first, before, gap, c), c, c.TILE_Q)
        stage = n % c.STAGES
        mbarrier.wait(empty.index(stage), ((n // c.STAGES) & 1) ^ 1)
        ready = q_full.index(stage)
        mbarrier.expect(ready, c.TILE_Q * (c.D_PAD * 2 + 4))
        load_pieces(q, memory_b, h, here, q_start, q_len, ready, tile_pieces(q_tiles, stage), c.JAGGED)
        tma_load(lse, [head + here], ready, lse_rows.index(stage))
        ready = do_full.index(stage)
        mbarrier.expect(ready, c.TILE_Q * (c.DV_PAD * 2 + (4 if KEY else 0)))
        load_pieces(do, memory_b, h, here, q_start, q_len, ready, tile_pieces(do_tiles, stage), c.JAGGED)
        if KEY:
            tma_load(delta, [head + here], ready, delta_rows.index(stage))
        n += 1
    return n


@gluon.jit
def key_producer(sources, stationary, buffers, bars, task, spans, size, pitch, table, c, KEY: gl.constexpr):
    """One warp: keys and values once, then the queries of each head that shares them."""
    q, do, lse, delta, k, v = sources
    k_tiles, v_tiles = stationary
    kv_full, q_full, do_full, empty = bars
    b, memory_b, kv_h, tile, index = task
    q_start, q_len, kv_start, kv_len = sequence_at(spans, size, b, index, c)
    first = tile * c.TILE_KV
    mbarrier.expect(kv_full, c.TILE_KV * 2 * (c.D_PAD + (c.DV_PAD if KEY else 0)))
    for half in gl.static_range(2):
        own = first + half * (c.TILE_KV // 2)
        load_pieces(k, memory_b, kv_h, own, kv_start, kv_len, kv_full, tile_pieces(k_tiles, half), c.JAGGED)
        if KEY:
            load_pieces(v, memory_b, kv_h, own, kv_start, kv_len, kv_full, tile_pieces(v_tiles, half), c.JAGGED)
    n = 0
    group = decode(size.group)
    for member in range(0, group):
        h = kv_h * group + member
        head = row_line(b, memory_b, h, decode(size.heads) * group, q_start, pitch, c)
        line, whole, masked = query_runs_of_keys(table, b, h, index, first, q_len, kv_len, c)
        at = (h, memory_b, head, q_start, q_len)
        n = load_query_runs((q, do, lse, delta), buffers, (q_full, do_full, empty), at, whole, line, n, table, c, KEY)
        n = load_query_runs((q, do, lse, delta), buffers, (q_full, do_full, empty), at, masked, line, n, table, c, KEY)


@gluon.jit
def accumulate_dk_dv(
    sums, held, buffers, bars, keeping, at, run, line, n, table, scale, env, aux, c,
    half: gl.constexpr, both: gl.constexpr, mask: gl.constexpr, MASKED: gl.constexpr, KEY: gl.constexpr, VALUE: gl.constexpr,
):  # fmt: skip
    """Adds one run of tiles of queries to (dk, dv) of 64 keys. MASKED tiles may also overhang rows or keys. `keeping`: as
    `bwd_dq_from_ds.ds_layouts` has it, empty where gradients of scores are not kept."""
    S: gl.constexpr = mma_layout(c.TILE_Q)
    dk, dv = sums
    k_tiles, v_tiles = held
    q_tiles, do_tiles, lse_rows, delta_rows = buffers
    q_full, do_full, empty = bars
    b, h, kv_idx, q_len, kv_len = at
    first, before, gap, count = run
    MASK: gl.constexpr = MASKED and c.MODE != "all"
    # wide sums leave few registers for a tile's scores: weights are rounded once they are read no more
    LATE: gl.constexpr = KEY and VALUE and c.D_PAD + c.DV_PAD > 256
    zero = gl.zeros([c.TILE_KV // 2, c.TILE_Q], gl.float32, S)
    for i in range(0, count):
        tile = nth_visited(table, line, i, first, before, gap, c)
        stage = n % c.STAGES
        phase = (n // c.STAGES) & 1
        # where keys and values lie is found anew for each tile, and takes no registers over the loop
        nought = opaque_zero(0)
        queries = tile_pieces(q_tiles, stage)
        douts = tile_pieces(do_tiles, stage)
        mbarrier.wait(q_full.index(stage), phase)
        s = begin_scores(tile_pieces(k_tiles, half + nought), queries, zero, False)
        mbarrier.wait(do_full.index(stage), phase)
        if KEY:
            dp = begin_scores(tile_pieces(v_tiles, half + nought), douts, zero, False)
        s = warpgroup_mma_wait(len(douts) if KEY else 0, deps=[s])
        q_idx = tile_start(tile, c, c.TILE_Q) + gl.expand_dims(gl.arange(0, c.TILE_Q, layout=gl.SliceLayout(0, S)), 0)
        lse2 = gl.expand_dims(lse_rows.index(stage).load(gl.SliceLayout(0, S)), 0)
        p, slope = recompute_weights(s, lse2, (b, h, q_idx, kv_idx, q_len, kv_len, tile), scale, env, aux, c, both, mask, MASK, MASKED)
        steep = scale_dscore(p, slope, c, MASKED)
        if VALUE and not LATE:
            dv = begin_pv(p.to(douts[0].dtype), douts, dv)
        if KEY:
            dp = warpgroup_mma_wait(len(douts) if VALUE and not LATE else 0, deps=[dp])
            delta = gl.expand_dims(delta_rows.index(stage).load(gl.SliceLayout(0, S)), 0)
            ds = (steep * (dp - delta)).to(queries[0].dtype)
            if LATE:
                dv = begin_pv(p.to(douts[0].dtype), douts, dv)
            dk = begin_pv(ds, queries, dk)
            if len(keeping) > 0:
                store_ds(keeping, half * 2 + n % 2, tile_start(tile, c, c.TILE_Q), ds)
        found = wait_accumulators(dk + dv)
        dk, dv = found[: len(dk)], found[len(dk) :]
        if len(keeping) == 0:
            fence_async_shared()
        mbarrier.arrive(empty.index(stage), count=1)
        n += 1
    return dk, dv, n


@gluon.jit
def key_consumer(
    half: gl.constexpr, stationary, buffers, bars, outputs, keeping, task, told, c,
    pre: gl.constexpr, both: gl.constexpr, mask: gl.constexpr, KEY: gl.constexpr, VALUE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: dk and dv of 64 keys, over every head that shares them."""
    S: gl.constexpr = mma_layout(c.TILE_Q)
    ROWS: gl.constexpr = c.TILE_KV // 2
    spans, size, table, scale, env = told
    dk_out, dv_out = outputs
    k_tiles, v_tiles = stationary
    kv_full, q_full, do_full, empty = bars
    b, memory_b, kv_h, tile, index = task
    q_start, q_len, kv_start, kv_len = sequence_at(spans, size, b, index, c)
    first = tile * c.TILE_KV
    own = first + half * ROWS
    kv_idx = own + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, S)), 1)
    dk = ()
    dv = ()
    if KEY:
        dk = zero_accumulators(ROWS, c.D_PAD)
    if VALUE:
        dv = zero_accumulators(ROWS, c.DV_PAD)
    mbarrier.wait(kv_full, 0)
    n = 0
    group = decode(size.group)
    for member in range(0, group):
        h = kv_h * group + member
        here = ds_layouts(keeping, member, group, own, c)
        line, whole, masked = query_runs_of_keys(table, b, h, index, first, q_len, kv_len, c)
        aux = pre(b, h, gl.minimum(kv_idx, kv_len - 1), q_len, kv_len, scale, env)
        at = (b, h, kv_idx, q_len, kv_len)
        dk, dv, n = accumulate_dk_dv(
            (dk, dv), stationary, buffers, (q_full, do_full, empty), here, at, whole, line, n, table, scale, env, aux, c,
            half, both, mask, False, KEY, VALUE,
        )  # fmt: skip
        dk, dv, n = accumulate_dk_dv(
            (dk, dv), stationary, buffers, (q_full, do_full, empty), here, at, masked, line, n, table, scale, env, aux, c,
            half, both, mask, True, KEY, VALUE,
        )  # fmt: skip
    # the tiles of keys and values are read no more, each half by its own warpgroup alone
    if KEY:
        store_pieces(dk_out, memory_b, kv_h, own, kv_start, kv_len, tile_pieces(k_tiles, half), scale_accumulators(dk, scale), c.JAGGED)
    if VALUE:
        store_pieces(dv_out, memory_b, kv_h, own, kv_start, kv_len, tile_pieces(v_tiles, half), dv, c.JAGGED)
    tma.store_wait(0)


@gluon.jit
def attention_key_gradient(
    q, k, v, do, lse, delta, pitch, dk, dv, kept, chunk, size, spans, table, scale, env, c,
    pre: gl.constexpr, both: gl.constexpr, mask: gl.constexpr, KEY: gl.constexpr, VALUE: gl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys, summed over the query heads that share it. Tensors come as descriptors, lse in base 2 and delta as
    `bwd_preprocess.begin_gradients` leaves them.

    kept: None, or where gradients of the scores are left for `bwd_dq_from_ds`, by heads of keys of a `chunk`.
    """
    if kept is None:
        b, memory_b, kv_h, index, tile = find_task(size, spans, c, False)
    else:
        b, kv_h, tile, place = find_chunk_task(chunk, size, False)
        memory_b = b
        index = tile
    if c.JAGGED and b < 0:
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
    bars = (make_barriers(1, 1).index(0), make_barriers(c.STAGES, 1), make_barriers(c.STAGES, 1), make_barriers(c.STAGES, 2))
    keeping = ()
    if kept is not None:
        keeping = (kept, gl.allocate_shared_memory(DTYPE, [4, ROWS, c.TILE_Q], smem_layout(ROWS, c.TILE_Q)), chunk, place)
    fence_async_shared()
    buffers = (q_tiles, do_tiles, lse_rows, delta_rows)
    task = (b, memory_b, kv_h, tile, index)
    told = (spans, size, table, scale, env)
    held = (k_tiles, v_tiles)
    gl.warp_specialize(
        [
            (key_consumer, (0, held, buffers, bars, (dk, dv), keeping, task, told, c, pre, both, mask, KEY, VALUE)),
            (key_consumer, (1, held, buffers, bars, (dk, dv), keeping, task, told, c, pre, both, mask, KEY, VALUE)),
            (key_producer, ((q, do, lse, delta, k, v), held, buffers, bars, task, spans, size, pitch, table, c, KEY)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
