# mypy: ignore-errors
"""dk and dv of a tile of 64 keys of wide heads: one warpgroup sums dv, the other dk, as both would not fit the registers of one.

The first computes the weights and leaves them in shared memory for the second, so that the two gradients take four products; a kernel
for each would take five, and bring queries and gradients of out twice.
"""

from foci.backends.hopper.backward_kept import begin_leaving, find_in, leave, lying
from foci.backends.hopper.backward_keys import bring_queries, key_runs
from foci.backends.hopper.backward_tiles import line_of, steepened, weights_of
from foci.backends.hopper.interface import fence_async_shared, gl, gluon, mbarrier, tma, viewed, warpgroup_mma_wait
from foci.backends.hopper.layouts import operand, product, shared
from foci.backends.hopper.products import begin_scores, begin_sums, finish_sums, no_sums, scaled
from foci.backends.hopper.tiles import barriers, buffers_of, copy_pieces_in, copy_pieces_out, nth
from foci.backends.triton.tiles import find, number, sequence_at, start_of, visited

ROWS = gl.constexpr(64)


@gluon.jit
def in_line(x):
    """A [64, 64] product as threads hold it, four numbers of a thread in a row, so that no two write to one bank."""
    return x.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([4096])


@gluon.jit
def pass_weights(passed, weights, bars, n):
    """Leaves the n-th tile of weights, [64, 64], where the other warpgroup finds it."""
    full, empty = bars
    mbarrier.wait(empty.index(n % 2), ((n // 2) & 1) ^ 1)
    passed.index(n % 2).store(in_line(weights))
    mbarrier.arrive(full.index(n % 2), count=1)


@gluon.jit
def take_weights(passed, bars, n, FREES: gl.constexpr):
    """The n-th tile of weights that the other warpgroup left, which may then leave the next but one there."""
    full, empty = bars
    LINE: gl.constexpr = in_line(gl.zeros([64, 64], gl.float32, product(64))).type.layout
    mbarrier.wait(full.index(n % 2), (n // 2) & 1)
    line = passed.index(n % 2).load(LINE)
    weights = line.reshape([8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([64, 64])
    weights = gl.convert_layout(weights, product(64), assert_trivial=True)
    if FREES:
        mbarrier.arrive(empty.index(n % 2), count=1)
    return weights


@gluon.jit
def leave_in_place(here, passed, bars, n, query, values):
    """`backward_kept.leave` by where the n-th tile of weights lay, which is free a tile later."""
    tma.store_wait(0)
    mbarrier.arrive(bars[1].index((n + 1) % 2), count=1, pred=n > 0)
    tile = viewed(passed.index(n % 2), values.dtype, [2, ROWS, ROWS], shared(ROWS, ROWS)).index(0)
    begin_leaving(here, tile, query, values)


@gluon.jit
def split_producer(sources, held, buffers, bars, task, spans, size, pitch, table, c):
    """One warp: keys and values once, then the queries of each head that shares them."""
    q, do, lse, delta, k, v = sources
    kv_full, q_full, do_full, empty, passing, done = bars
    b, memory_b, kv_h, tile, index = task
    q_start, q_len, kv_start, kv_len = sequence_at(spans, size, b, index, c)
    first = tile * ROWS
    mbarrier.expect(kv_full, ROWS * 2 * (c.D_PAD + c.DV_PAD))
    copy_pieces_in(k, memory_b, kv_h, first, kv_start, kv_len, kv_full, held[0], c.JAGGED)
    copy_pieces_in(v, memory_b, kv_h, first, kv_start, kv_len, kv_full, held[1], c.JAGGED)
    n = 0
    group = number(size.group)
    for member in range(0, group):
        h = kv_h * group + member
        head = line_of(b, memory_b, h, number(size.heads) * group, q_start, pitch, c)
        line, whole, masked = key_runs(table, b, h, index, first, q_len, kv_len, c)
        at = (h, memory_b, head, q_start, q_len)
        n = bring_queries((q, do, lse, delta), buffers[:4], (q_full, do_full, empty), at, whole, line, n, table, c, True)
        n = bring_queries((q, do, lse, delta), buffers[:4], (q_full, do_full, empty), at, masked, line, n, table, c, True)


@gluon.jit
def fold_values(
    dv, k, buffers, bars, at, run, line, n, table, scale, env, aux, c,
    both: gl.constexpr, mask: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Adds one run of tiles of queries to dv of 64 keys, and passes on weights times slopes of the score function."""
    S: gl.constexpr = product(c.TILE_Q)
    q_tiles, do_tiles, lse_rows, delta_rows, passed = buffers
    kv_full, q_full, do_full, empty, passing, done = bars
    b, h, kv_idx, q_len, kv_len = at
    first, before, gap, count = run
    MASK: gl.constexpr = MASKED and c.MODE != "all"
    zero = gl.zeros([ROWS, c.TILE_Q], gl.float32, S)
    for i in range(0, count):
        tile = visited(table, line, i, first, before, gap, c)
        stage = n % c.STAGES
        phase = (n // c.STAGES) & 1
        douts = nth(do_tiles, stage)
        mbarrier.wait(q_full.index(stage), phase)
        s = begin_scores(k, nth(q_tiles, stage), zero, False)
        s = warpgroup_mma_wait(0, deps=[s])
        q_idx = start_of(tile, c, c.TILE_Q) + gl.expand_dims(gl.arange(0, c.TILE_Q, layout=gl.SliceLayout(0, S)), 0)
        lse2 = gl.expand_dims(lse_rows.index(stage).load(gl.SliceLayout(0, S)), 0)
        p, slope = weights_of(s, lse2, (b, h, q_idx, kv_idx, q_len, kv_len, tile), scale, env, aux, c, both, mask, MASK, MASKED)
        pass_weights(passed, steepened(p, slope, c, MASKED), passing, n)
        mbarrier.wait(do_full.index(stage), phase)
        dv = finish_sums(begin_sums(p.to(douts[0].dtype), douts, dv))
        fence_async_shared()
        mbarrier.arrive(empty.index(stage), count=1)
        n += 1
    return dv, n


@gluon.jit
def fold_scores(dk, v, buffers, bars, keeping, run, line, n, table, c):
    """Adds one run of tiles of queries to dk of 64 keys, with the weights of the other warpgroup. `keeping`: as in
    `backward_keys.fold_queries`."""
    S: gl.constexpr = product(c.TILE_Q)
    q_tiles, do_tiles, lse_rows, delta_rows, passed = buffers
    kv_full, q_full, do_full, empty, passing, done = bars
    first, before, gap, count = run
    IN_PLACE: gl.constexpr = c.D_PAD + c.DV_PAD > 448
    zero = gl.zeros([ROWS, c.TILE_Q], gl.float32, S)
    for i in range(0, count):
        stage = n % c.STAGES
        phase = (n // c.STAGES) & 1
        queries = nth(q_tiles, stage)
        mbarrier.wait(do_full.index(stage), phase)
        dp = begin_scores(v, nth(do_tiles, stage), zero, False)
        p = take_weights(passed, passing, n, len(keeping) == 0 or not IN_PLACE)
        delta = gl.expand_dims(delta_rows.index(stage).load(gl.SliceLayout(0, S)), 0)
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = (p * (dp - delta)).to(queries[0].dtype)
        mbarrier.wait(q_full.index(stage), phase)
        dk = begin_sums(ds, queries, dk)
        if len(keeping) > 0:
            query = start_of(visited(table, line, i, first, before, gap, c), c, c.TILE_Q)
            if IN_PLACE:
                leave_in_place(keeping, passed, passing, n, query, ds)
            else:
                leave(keeping, n % 2, query, ds)
        dk = finish_sums(dk)
        if len(keeping) == 0:
            fence_async_shared()
        mbarrier.arrive(empty.index(stage), count=1)
        n += 1
    return dk, n


@gluon.jit
def in_registers(tile, c):
    """A tile as the left factor of products with TILE_Q columns."""
    found = ()
    for i in gl.static_range(len(tile)):
        found = found + (tile[i].load(operand(c.TILE_Q)),)
    return found


@gluon.jit
def split_consumer(
    VALUE: gl.constexpr, held, buffers, bars, out, keeping, task, told, c,
    pre: gl.constexpr, both: gl.constexpr, mask: gl.constexpr,
):  # fmt: skip
    """One warpgroup: dv, or dk, of 64 keys, over every head that shares them."""
    S: gl.constexpr = product(c.TILE_Q)
    WIDTH: gl.constexpr = c.DV_PAD if VALUE else c.D_PAD
    spans, size, table, scale, env = told
    b, memory_b, kv_h, tile, index = task
    q_start, q_len, kv_start, kv_len = sequence_at(spans, size, b, index, c)
    first = tile * ROWS
    k, v = held
    kv_idx = first + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, S)), 1)
    total = no_sums(ROWS, WIDTH)
    done = bars[5]
    mbarrier.wait(bars[0], 0)
    factor = k if VALUE else v
    if c.D_PAD + c.DV_PAD <= 384:
        # registers are left: products then read shared memory for one factor, not for two, which they would wait for
        factor = in_registers(factor, c)
    n = 0
    group = number(size.group)
    for member in range(0, group):
        h = kv_h * group + member
        line, whole, masked = key_runs(table, b, h, index, first, q_len, kv_len, c)
        if VALUE:
            aux = pre(b, h, gl.minimum(kv_idx, kv_len - 1), q_len, kv_len, scale, env)
            at = (b, h, kv_idx, q_len, kv_len)
            total, n = fold_values(total, factor, buffers, bars, at, whole, line, n, table, scale, env, aux, c, both, mask, False)
            total, n = fold_values(total, factor, buffers, bars, at, masked, line, n, table, scale, env, aux, c, both, mask, True)
        else:
            here = lying(keeping, member, group, first, c)
            total, n = fold_scores(total, factor, buffers, bars, here, whole, line, n, table, c)
            total, n = fold_scores(total, factor, buffers, bars, here, masked, line, n, table, c)
    # keys and values make room for their gradients once neither is read
    mbarrier.arrive(done, count=1)
    mbarrier.wait(done, 0)
    if VALUE:
        copy_pieces_out(out, memory_b, kv_h, first, kv_start, kv_len, v, total, c.JAGGED)
    else:
        copy_pieces_out(out, memory_b, kv_h, first, kv_start, kv_len, k, scaled(total, scale), c.JAGGED)
    tma.store_wait(0)


@gluon.jit
def attention_split_gradient(
    q, k, v, do, lse, delta, pitch, dk, dv, kept, chunk, size, spans, table, scale, env, c,
    pre: gl.constexpr, both: gl.constexpr, mask: gl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys, summed over the query heads that share it. Tensors as `attention_key_gradient` takes them."""
    if kept is None:
        b, memory_b, kv_h, index, tile = find(size, spans, c, False)
    else:
        b, kv_h, tile, place = find_in(chunk, size, False)
        memory_b = b
        index = tile
    if c.JAGGED and b < 0:
        return
    k_tile = nth(buffers_of(k.dtype, 1, ROWS, c.D_PAD), 0)
    v_tile = nth(buffers_of(v.dtype, 1, ROWS, c.DV_PAD), 0)
    q_tiles = buffers_of(q.dtype, c.STAGES, c.TILE_Q, c.D_PAD)
    do_tiles = buffers_of(do.dtype, c.STAGES, c.TILE_Q, c.DV_PAD)
    lse_rows = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.TILE_Q], lse.layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.TILE_Q], lse.layout)
    passed = gl.allocate_shared_memory(gl.float32, [2, ROWS * c.TILE_Q], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    passing = (barriers(2, 1), barriers(2, 1))
    done = barriers(1, 2).index(0)
    bars = (barriers(1, 1).index(0), barriers(c.STAGES, 1), barriers(c.STAGES, 1), barriers(c.STAGES, 2), passing, done)
    keeping = ()
    if kept is not None:
        # of the widest heads shared memory has no room for more tiles
        staged = passed
        if c.D_PAD + c.DV_PAD <= 448:
            staged = gl.allocate_shared_memory(q.dtype, [2, ROWS, c.TILE_Q], shared(ROWS, c.TILE_Q))
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
