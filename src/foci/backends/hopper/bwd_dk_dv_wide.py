# mypy: ignore-errors
"""dk and dv of a tile of 64 keys of wide heads: one warpgroup sums dv, the other dk, as both would not fit the registers of one.

The first computes the weights and leaves them in shared memory for the second, so that the two gradients take four products; a kernel
for each would take five, and bring queries and gradients of out twice.
"""

from foci.backends.hopper.bwd_dk_dv import load_query_runs, query_runs_of_keys
from foci.backends.hopper.bwd_dq_from_ds import begin_store_ds, ds_layouts, find_chunk_task, store_ds
from foci.backends.hopper.bwd_tile_math import recompute_weights, row_line, scale_dscore
from foci.backends.hopper.gluon_compat import fence_async_shared, gl, gluon, mbarrier, tma, view_smem, warpgroup_mma_wait
from foci.backends.hopper.layouts import mma_layout, operand_layout, smem_layout
from foci.backends.hopper.mma import begin_pv, begin_scores, scale_accumulators, wait_accumulators, zero_accumulators
from foci.backends.hopper.smem import allocate_tiles, load_pieces, make_barriers, store_pieces, tile_pieces
from foci.backends.triton.tiles import decode, find_task, nth_visited, sequence_at, tile_start

ROWS = gl.constexpr(64)


@gluon.jit
def to_line(x):
    """A [64, 64] product as threads hold it, four numbers of a thread in a row, so that no two write to one bank."""
    return x.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([4096])


@gluon.jit
def send_weights(passed, weights, bars, n):
    """Leaves the n-th tile of weights, [64, 64], where the other warpgroup finds it."""
    full, empty = bars
    mbarrier.wait(empty.index(n % 2), ((n // 2) & 1) ^ 1)
    passed.index(n % 2).store(to_line(weights))
    mbarrier.arrive(full.index(n % 2), count=1)


@gluon.jit
def receive_weights(passed, bars, n, FREES: gl.constexpr):
    """The n-th tile of weights that the other warpgroup left, which may then leave the next but one there."""
    full, empty = bars
    LINE: gl.constexpr = to_line(gl.zeros([64, 64], gl.float32, mma_layout(64))).type.layout
    mbarrier.wait(full.index(n % 2), (n // 2) & 1)
    line = passed.index(n % 2).load(LINE)
    weights = line.reshape([8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([64, 64])
    weights = gl.convert_layout(weights, mma_layout(64), assert_trivial=True)
    if FREES:
        mbarrier.arrive(empty.index(n % 2), count=1)
    return weights


@gluon.jit
def store_ds_in_place(here, passed, bars, n, query, values):
    """`bwd_dq_from_ds.store_ds` by where the n-th tile of weights lay, which is free a tile later."""
    tma.store_wait(0)
    mbarrier.arrive(bars[1].index((n + 1) % 2), count=1, pred=n > 0)
    tile = view_smem(passed.index(n % 2), values.dtype, [2, ROWS, ROWS], smem_layout(ROWS, ROWS)).index(0)
    begin_store_ds(here, tile, query, values)


@gluon.jit
def split_producer(sources, held, buffers, bars, task, spans, size, pitch, table, c):
    """One warp: keys and values once, then the queries of each head that shares them."""
    q, do, lse, delta, k, v = sources
    kv_full, q_full, do_full, empty, passing, done = bars
    b, memory_b, kv_h, tile, index = task
    q_start, q_len, kv_start, kv_len = sequence_at(spans, size, b, index, c)
    first = tile * ROWS
    mbarrier.expect(kv_full, ROWS * 2 * (c.D_PAD + c.DV_PAD))
    load_pieces(k, memory_b, kv_h, first, kv_start, kv_len, kv_full, held[0], c.JAGGED)
    load_pieces(v, memory_b, kv_h, first, kv_start, kv_len, kv_full, held[1], c.JAGGED)
    n = 0
    group = decode(size.group)
    for member in range(0, group):
        h = kv_h * group + member
        head = row_line(b, memory_b, h, decode(size.heads) * group, q_start, pitch, c)
        line, whole, masked = query_runs_of_keys(table, b, h, index, first, q_len, kv_len, c)
        at = (h, memory_b, head, q_start, q_len)
        n = load_query_runs((q, do, lse, delta), buffers[:4], (q_full, do_full, empty), at, whole, line, n, table, c, True)
        n = load_query_runs((q, do, lse, delta), buffers[:4], (q_full, do_full, empty), at, masked, line, n, table, c, True)


@gluon.jit
def accumulate_dv(
    dv, k, buffers, bars, at, run, line, n, table, scale, env, aux, c,
    both: gl.constexpr, mask: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Adds one run of tiles of queries to dv of 64 keys, and passes on weights times slopes of the score function."""
    S: gl.constexpr = mma_layout(c.TILE_Q)
    q_tiles, do_tiles, lse_rows, delta_rows, passed = buffers
    kv_full, q_full, do_full, empty, passing, done = bars
    b, h, kv_idx, q_len, kv_len = at
    first, before, gap, count = run
    MASK: gl.constexpr = MASKED and c.MODE != "all"
    zero = gl.zeros([ROWS, c.TILE_Q], gl.float32, S)
    for i in range(0, count):
        tile = nth_visited(table, line, i, first, before, gap, c)
        stage = n % c.STAGES
        phase = (n // c.STAGES) & 1
        douts = tile_pieces(do_tiles, stage)
        mbarrier.wait(q_full.index(stage), phase)
        s = begin_scores(k, tile_pieces(q_tiles, stage), zero, False)
        s = warpgroup_mma_wait(0, deps=[s])
        q_idx = tile_start(tile, c, c.TILE_Q) + gl.expand_dims(gl.arange(0, c.TILE_Q, layout=gl.SliceLayout(0, S)), 0)
        lse2 = gl.expand_dims(lse_rows.index(stage).load(gl.SliceLayout(0, S)), 0)
        p, slope = recompute_weights(s, lse2, (b, h, q_idx, kv_idx, q_len, kv_len, tile), scale, env, aux, c, both, mask, MASK, MASKED)
        send_weights(passed, scale_dscore(p, slope, c, MASKED), passing, n)
        mbarrier.wait(do_full.index(stage), phase)
        dv = wait_accumulators(begin_pv(p.to(douts[0].dtype), douts, dv))
        fence_async_shared()
        mbarrier.arrive(empty.index(stage), count=1)
        n += 1
    return dv, n


@gluon.jit
def accumulate_dk(dk, v, buffers, bars, keeping, run, line, n, table, c):
    """Adds one run of tiles of queries to dk of 64 keys, with the weights of the other warpgroup. `keeping`: as in
    `bwd_dk_dv.accumulate_dk_dv`."""
    S: gl.constexpr = mma_layout(c.TILE_Q)
    q_tiles, do_tiles, lse_rows, delta_rows, passed = buffers
    kv_full, q_full, do_full, empty, passing, done = bars
    first, before, gap, count = run
    IN_PLACE: gl.constexpr = c.D_PAD + c.DV_PAD > 448
    zero = gl.zeros([ROWS, c.TILE_Q], gl.float32, S)
    for i in range(0, count):
        stage = n % c.STAGES
        phase = (n // c.STAGES) & 1
        queries = tile_pieces(q_tiles, stage)
        mbarrier.wait(do_full.index(stage), phase)
        dp = begin_scores(v, tile_pieces(do_tiles, stage), zero, False)
        p = receive_weights(passed, passing, n, len(keeping) == 0 or not IN_PLACE)
        delta = gl.expand_dims(delta_rows.index(stage).load(gl.SliceLayout(0, S)), 0)
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = (p * (dp - delta)).to(queries[0].dtype)
        mbarrier.wait(q_full.index(stage), phase)
        dk = begin_pv(ds, queries, dk)
        if len(keeping) > 0:
            query = tile_start(nth_visited(table, line, i, first, before, gap, c), c, c.TILE_Q)
            if IN_PLACE:
                store_ds_in_place(keeping, passed, passing, n, query, ds)
            else:
                store_ds(keeping, n % 2, query, ds)
        dk = wait_accumulators(dk)
        if len(keeping) == 0:
            fence_async_shared()
        mbarrier.arrive(empty.index(stage), count=1)
        n += 1
    return dk, n


@gluon.jit
def to_registers(tile, c):
    """A tile as the left factor of products with TILE_Q columns."""
    found = ()
    for i in gl.static_range(len(tile)):
        found = found + (tile[i].load(operand_layout(c.TILE_Q)),)
    return found


@gluon.jit
def split_consumer(
    VALUE: gl.constexpr, held, buffers, bars, out, keeping, task, told, c,
    pre: gl.constexpr, both: gl.constexpr, mask: gl.constexpr,
):  # fmt: skip
    """One warpgroup: dv, or dk, of 64 keys, over every head that shares them."""
    S: gl.constexpr = mma_layout(c.TILE_Q)
    WIDTH: gl.constexpr = c.DV_PAD if VALUE else c.D_PAD
    spans, size, table, scale, env = told
    b, memory_b, kv_h, tile, index = task
    q_start, q_len, kv_start, kv_len = sequence_at(spans, size, b, index, c)
    first = tile * ROWS
    k, v = held
    kv_idx = first + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, S)), 1)
    total = zero_accumulators(ROWS, WIDTH)
    done = bars[5]
    mbarrier.wait(bars[0], 0)
    factor = k if VALUE else v
    if c.D_PAD + c.DV_PAD <= 384:
        # registers are left: products then read shared memory for one factor, not for two, which they would wait for
        factor = to_registers(factor, c)
    n = 0
    group = decode(size.group)
    for member in range(0, group):
        h = kv_h * group + member
        line, whole, masked = query_runs_of_keys(table, b, h, index, first, q_len, kv_len, c)
        if VALUE:
            aux = pre(b, h, gl.minimum(kv_idx, kv_len - 1), q_len, kv_len, scale, env)
            at = (b, h, kv_idx, q_len, kv_len)
            total, n = accumulate_dv(total, factor, buffers, bars, at, whole, line, n, table, scale, env, aux, c, both, mask, False)
            total, n = accumulate_dv(total, factor, buffers, bars, at, masked, line, n, table, scale, env, aux, c, both, mask, True)
        else:
            here = ds_layouts(keeping, member, group, first, c)
            total, n = accumulate_dk(total, factor, buffers, bars, here, whole, line, n, table, c)
            total, n = accumulate_dk(total, factor, buffers, bars, here, masked, line, n, table, c)
    # keys and values make room for their gradients once neither is read
    mbarrier.arrive(done, count=1)
    mbarrier.wait(done, 0)
    if VALUE:
        store_pieces(out, memory_b, kv_h, first, kv_start, kv_len, v, total, c.JAGGED)
    else:
        store_pieces(out, memory_b, kv_h, first, kv_start, kv_len, k, scale_accumulators(total, scale), c.JAGGED)
    tma.store_wait(0)


@gluon.jit
def attention_split_gradient(
    q, k, v, do, lse, delta, pitch, dk, dv, kept, chunk, size, spans, table, scale, env, c,
    pre: gl.constexpr, both: gl.constexpr, mask: gl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys, summed over the query heads that share it. Tensors as `attention_key_gradient` takes them."""
    if kept is None:
        b, memory_b, kv_h, index, tile = find_task(size, spans, c, False)
    else:
        b, kv_h, tile, place = find_chunk_task(chunk, size, False)
        memory_b = b
        index = tile
    if c.JAGGED and b < 0:
        return
    k_tile = tile_pieces(allocate_tiles(k.dtype, 1, ROWS, c.D_PAD), 0)
    v_tile = tile_pieces(allocate_tiles(v.dtype, 1, ROWS, c.DV_PAD), 0)
    q_tiles = allocate_tiles(q.dtype, c.STAGES, c.TILE_Q, c.D_PAD)
    do_tiles = allocate_tiles(do.dtype, c.STAGES, c.TILE_Q, c.DV_PAD)
    lse_rows = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.TILE_Q], lse.layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.TILE_Q], lse.layout)
    passed = gl.allocate_shared_memory(gl.float32, [2, ROWS * c.TILE_Q], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    passing = (make_barriers(2, 1), make_barriers(2, 1))
    done = make_barriers(1, 2).index(0)
    bars = (make_barriers(1, 1).index(0), make_barriers(c.STAGES, 1), make_barriers(c.STAGES, 1), make_barriers(c.STAGES, 2), passing, done)
    keeping = ()
    if kept is not None:
        # of the widest heads shared memory has no room for more tiles
        staged = passed
        if c.D_PAD + c.DV_PAD <= 448:
            staged = gl.allocate_shared_memory(q.dtype, [2, ROWS, c.TILE_Q], smem_layout(ROWS, c.TILE_Q))
        keeping = (kept, staged, chunk, place)
    fence_async_shared()
    buffers = (q_tiles, do_tiles, lse_rows, delta_rows, passed)
    task = (b, memory_b, kv_h, tile, index)
    told = (spans, size, table, scale, env)
    held = (k_tile, v_tile)
    gl.warp_specialize(
        [
            (split_consumer, (True, held, buffers, bars, dv, (), task, told, c, pre, both, mask)),
            (split_consumer, (False, held, buffers, bars, dk, keeping, task, told, c, pre, both, mask)),
            (split_producer, ((q, do, lse, delta, k, v), held, buffers, bars, task, spans, size, pitch, table, c)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
