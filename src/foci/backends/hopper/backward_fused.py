# mypy: ignore-errors
"""dq, dk and dv of a tile of keys in one pass: five products instead of the seven of two kernels.

Two warpgroups hold 64 keys each, as in `backward_keys`. They exchange the gradients of their scores through shared memory, and
each computes half of the tile's share in dq, 64 columns of 128 or 64 rows of 128, or a piece of the columns where there are two, and
leaves it in shared memory. From there a warp adds it to float32 sums in device memory by TMA, in a fixed order (`backward_turns`), while
the warpgroups go on.

Which tiles are visited is found by arithmetic without a mask and under the causal one; else they come from a table, with their ranks.
Scores are any functions that read nothing for each pair of positions; with dropout, the product and what is added to it.
"""

from foci.backends.hopper.backward_posts import is_posted, post_end, post_task, posts_of, take_task
from foci.backends.hopper.backward_tiles import line_of, steepened, weights_of
from foci.backends.hopper.backward_turns import (
    SHARE_LINE,
    add_shares,
    count_of,
    members_of,
    nth_tile,
    place_of,
    put_share,
    query_runs,
    share_columns,
    tile_at,
)
from foci.backends.hopper.dropping import dropped, drops_by_key, odds_of
from foci.backends.hopper.interface import (
    bring,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    tma,
    viewed,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from foci.backends.hopper.layouts import product, shared
from foci.backends.hopper.masking import kept, leaned, marked, words_at
from foci.backends.hopper.posts import answer, ask
from foci.backends.hopper.products import begin_scores, begin_sums, finish_sums, no_sums, scaled
from foci.backends.hopper.softmax import rounded
from foci.backends.hopper.tiles import barriers, buffers_of, copy_pieces_in, copy_pieces_out, here_and_now, nth, span_of
from foci.backends.triton.tiles import number

ROWS = gl.constexpr(64)


@gluon.jit
def bring_keys(k, v, held, bars, place, span, n, c):
    """Keys and values of the n-th task, once those before are read no more."""
    k_tiles, v_tiles = held
    kv_full, kv_empty = bars
    b, memory_b, kv_h, tile, task = place[:5]
    kv_start, kv_len = span[2:]
    mbarrier.wait(kv_empty, (n & 1) ^ 1)
    mbarrier.expect(kv_full, 2 * ROWS * 2 * (c.D_PAD + c.DV_PAD))
    for half in gl.static_range(2):
        own = tile * c.TILE_KV + half * ROWS
        copy_pieces_in(k, memory_b, kv_h, own, kv_start, kv_len, kv_full, nth(k_tiles, half), c.JAGGED)
        copy_pieces_in(v, memory_b, kv_h, own, kv_start, kv_len, kv_full, nth(v_tiles, half), c.JAGGED)


@gluon.jit
def fused_producer(sources, held, buffers, bars, posted, order, spans, size, pitch, table, c):
    """One warp: of task after task keys and values once, and the queries of each head that shares them, each tile for one after the other.
    The first queries come before the keys, which wait until the task before is done."""
    q, do, lse, delta, k, v = sources
    q_tiles, do_tiles, lse_rows, delta_rows, ds_tiles, shares = buffers
    kv_bars, q_full, do_full, empty, ds_full, share_bars = bars
    group = members_of(size, c)
    tickets = number(size.batch) * number(size.heads) * number(size.tasks)
    tasks = 0
    before = 0
    # where tiles wait for those of later programs, each has a program of its own
    ticket = gl.program_id(0) if c.ROUND else answer(ask(order.turns, False))
    while ticket < tickets:
        place = place_of(ticket, order, size, spans, c)
        b, memory_b, kv_h, tile, task = place[:5]
        if b >= 0:
            span = span_of(place, spans, size, c)
            q_start, q_len, kv_start, kv_len = span
            runs = query_runs(table, order.ranks, place, kv_h * group, q_len, kv_len, c)
            post_task(posted, tasks, place, runs)
            count = count_of(runs) * group
            if count == 0:
                bring_keys(k, v, held, kv_bars, place, span, tasks, c)
            for i in range(0, count):
                n = before + i
                h = kv_h * group + i % group
                here = nth_tile(table, runs, i // group, c) * c.TILE_Q
                at = line_of(b, memory_b, h, number(size.heads) * group, q_start, pitch, c) + here
                stage = n % c.STAGES
                mbarrier.wait(empty.index(stage), ((n // c.STAGES) & 1) ^ 1)
                ready = q_full.index(stage)
                mbarrier.expect(ready, c.TILE_Q * (c.D_PAD * 2 + 4))
                copy_pieces_in(q, memory_b, h, here, q_start, q_len, ready, nth(q_tiles, stage), c.JAGGED)
                bring(lse, [at], ready, lse_rows.index(stage))
                ready = do_full.index(stage)
                mbarrier.expect(ready, c.TILE_Q * (c.DV_PAD * 2 + 4))
                copy_pieces_in(do, memory_b, h, here, q_start, q_len, ready, nth(do_tiles, stage), c.JAGGED)
                bring(delta, [at], ready, delta_rows.index(stage))
                if i == 0:
                    bring_keys(k, v, held, kv_bars, place, span, tasks, c)
            before += count
            tasks += 1
        ticket = tickets if c.ROUND else answer(ask(order.turns, False))
    post_end(posted, tasks)


@gluon.jit
def begin_share(ds_tiles, k_tiles, two, nought, c, half: gl.constexpr):
    """Begins this warpgroup's half of a tile's share in dq: the gradients of both warpgroups' scores by all the keys. `nought`: see
    `fold_fused`."""
    COLUMNS: gl.constexpr = share_columns(c.TILE_Q, c.D_PAD, half)
    none = gl.zeros([64, COLUMNS], gl.float32, product(COLUMNS))
    first_ds, second_ds = ds_tiles.index(two * 2), ds_tiles.index(two * 2 + 1)
    if len(k_tiles) == 2:
        first_k, second_k = k_tiles[half].index(nought), k_tiles[half].index(1 + nought)
    else:
        first_k, second_k = k_tiles[0].index(nought), k_tiles[0].index(1 + nought)
    if c.TILE_Q == 64 and len(k_tiles) == 1:
        first_k, second_k = first_k.slice(half * 64, 64, dim=1), second_k.slice(half * 64, 64, dim=1)
    elif c.TILE_Q == 128:
        first_ds, second_ds = first_ds.slice(half * 64, 64, dim=1), second_ds.slice(half * 64, 64, dim=1)
    share = warpgroup_mma(first_ds.permute((1, 0)), first_k, none, use_acc=False, is_async=True)
    return warpgroup_mma(second_ds.permute((1, 0)), second_k, share, is_async=True)


@gluon.jit
def fold_fused(
    sums, held, buffers, bars, at, run, n, table, group, scale, odds, env, aux, c,
    half: gl.constexpr, both: gl.constexpr, mask: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Adds one run of tiles of queries to (dk, dv) of 64 keys, and their share to dq. MASKED tiles may also overhang."""
    S: gl.constexpr = product(c.TILE_Q)
    dk, dv = sums
    k_tiles, v_tiles = held
    q_tiles, do_tiles, lse_rows, delta_rows, ds_tiles, shares = buffers
    kv_bars, q_full, do_full, empty, ds_full, share_bars = bars
    b, h, kv_idx, q_len, kv_len, first, ends, before = at
    line, last, count = run
    BARE: gl.constexpr = c.BOUNDED or c.WORDS
    MASK: gl.constexpr = MASKED and c.MODE != "all"
    # whether registers are left for what is told of rows while products run
    EARLY: gl.constexpr = c.TILE_Q == 64
    zero = gl.zeros([ROWS, c.TILE_Q], gl.float32, S)
    for i in range(0, count * group):
        tile = tile_at(table, line, last - i // group, c)
        stage = n % c.STAGES
        phase = (n // c.STAGES) & 1
        two = n % 2
        # where keys and values lie is found anew for each tile: kept for each product instead, it takes registers that there are not
        nought = here_and_now(0)
        queries = nth(q_tiles, stage)
        douts = nth(do_tiles, stage)
        mbarrier.wait(q_full.index(stage), phase)
        s = begin_scores(nth(k_tiles, half + nought), queries, zero, False)
        mbarrier.wait(do_full.index(stage), phase)
        dp = begin_scores(nth(v_tiles, half + nought), douts, zero, False)
        if MASKED and c.WORDS:
            words = words_at(table.words + ((line * number(table.width) + tile) * 2 + half) * (ROWS * 4), True, c.TILE_Q)
        if c.DROPOUT:
            drops = drops_by_key(first, tile * c.TILE_Q, b, h + i % group, odds, c.TILE_Q, c.AT_ONCE)
        if EARLY:
            lse2 = lse_rows.index(stage).load(gl.SliceLayout(0, S))
        s = warpgroup_mma_wait(len(douts), deps=[s])
        q_idx = tile * c.TILE_Q + gl.expand_dims(gl.arange(0, c.TILE_Q, layout=gl.SliceLayout(0, S)), 0)
        if not EARLY:
            lse2 = lse_rows.index(stage).load(gl.SliceLayout(0, S))
        if c.LINE:
            lead, rise = both(b, h, tile * c.TILE_Q, kv_idx, q_len, kv_len, env, aux)
            lse2 = gl.expand_dims(leaned(lse2, rise), 0) - lead
        else:
            lse2 = gl.expand_dims(lse2, 0)
        where = (b, h, q_idx, kv_idx, q_len, kv_len, tile)
        p, slope = weights_of(s, lse2, where, scale, env, aux, c, both, mask, MASK and not BARE, MASKED and not BARE)
        if MASKED and c.BOUNDED:
            p = kept(p, ends[0] - tile * c.TILE_Q, ends[1] - tile * c.TILE_Q)
        elif MASKED and c.WORDS:
            p = marked(p, words.to(gl.int32), 0.0)
        if c.DROPOUT:
            p = dropped(p, drops, c)
        weights = rounded(p, douts[0].dtype, c)
        steep = steepened(p, slope, c, MASKED)
        if EARLY:
            delta = gl.expand_dims(delta_rows.index(stage).load(gl.SliceLayout(0, S)), 0)
        dp = warpgroup_mma_wait(0, deps=[dp])
        if not EARLY:
            delta = gl.expand_dims(delta_rows.index(stage).load(gl.SliceLayout(0, S)), 0)
        if c.DROPOUT:
            ds = (gl.maximum(p, 0.0) * dp - gl.abs(p) * delta).to(queries[0].dtype)
        else:
            ds = (steep * (dp - delta)).to(queries[0].dtype)
        # the other warpgroup has read what lay here: it arrived for the tile before after that
        ds_tiles.index(two * 2 + half).store(ds)
        # runs while the warpgroups wait for each other
        dv = begin_sums(weights, douts, dv)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(two), count=1)
        if c.DEFERS:
            # one fence for both: that of the share which the tile before left
            mbarrier.arrive(share_bars[0].index(1 - two), count=1, pred=n > before)
        mbarrier.wait(ds_full.index(two), (n // 2) & 1)
        share = begin_share(ds_tiles, k_tiles, two, nought, c, half)
        dk = begin_sums(ds, queries, dk)
        found = warpgroup_mma_wait(len(dk), deps=(share,) + dv)
        share, dv = found[0], found[1:]
        put_share(shares, share, share_bars, n, half)
        if not c.DEFERS:
            fence_async_shared()
            mbarrier.arrive(share_bars[0].index(two), count=1)
        dk = finish_sums(dk)
        mbarrier.arrive(empty.index(stage), count=1)
        n += 1
    return dk, dv, n


@gluon.jit
def fused_consumer(
    half: gl.constexpr, held, buffers, bars, outputs, posted, told, c,
    pre: gl.constexpr, both: gl.constexpr, mask: gl.constexpr, bounds: gl.constexpr,
):  # fmt: skip
    """One warpgroup: of task after task dk and dv of 64 keys, over every head that shares them, and half of their share in dq."""
    tasks = 0
    before = 0
    while is_posted(posted, tasks, 4):
        place, runs = take_task(posted, tasks, c, 4)
        before = fold_task(half, held, buffers, bars, outputs, place, runs, tasks, before, told, c, pre, both, mask, bounds)
        tasks += 1
    tma.store_wait(0)


@gluon.jit
def fold_task(
    half: gl.constexpr, held, buffers, bars, outputs, place, runs, tasks, before, told, c,
    pre: gl.constexpr, both: gl.constexpr, mask: gl.constexpr, bounds: gl.constexpr,
):  # fmt: skip
    """One task, with so many tasks and tiles of queries before it; returns how many tiles there were then."""
    S: gl.constexpr = product(c.TILE_Q)
    # whether dk and dv have room where gradients of scores lie, so that the next keys and values come while they leave
    LEAVES: gl.constexpr = c.TILE_Q >= c.D_PAD + c.DV_PAD
    spans, size, table, scale, numbers, env = told
    dk_out, dv_out = outputs
    k_tiles, v_tiles = held
    q_tiles, do_tiles, lse_rows, delta_rows, ds_tiles, shares = buffers
    kv_bars, q_full, do_full, empty, ds_full, share_bars = bars
    b, memory_b, kv_h, tile, task = place[:5]
    q_start, q_len, kv_start, kv_len = span_of(place, spans, size, c)
    first = tile * c.TILE_KV
    own = first + half * ROWS
    kv_idx = own + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, S)), 1)
    dk = no_sums(ROWS, c.D_PAD)
    dv = no_sums(ROWS, c.DV_PAD)
    mbarrier.wait(kv_bars[0], tasks & 1)
    if LEAVES:
        # until what the task before left has been read
        tma.store_wait(0)
        thread_barrier()
    n = before
    group = members_of(size, c)
    # a mask that tells heads apart comes with one head to a group
    h = kv_h * group
    aux = pre(b, h, gl.minimum(kv_idx, kv_len - 1), q_len, kv_len, scale, env)
    ends = 0
    if c.BOUNDED:
        keys = own + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
        low, high = bounds(b, h, gl.minimum(keys, kv_len - 1), q_len, kv_len, env)
        ends = (low, gl.where(keys < kv_len, high, -1))
    at = (b, h, kv_idx, q_len, kv_len, own, ends, before)
    odds = odds_of(numbers, c)
    line, last, ending, whole_last, whole, leading_last, leading = runs[:7]
    again_last, again = (runs[7], runs[8]) if c.ROUND else (whole_last, 0)
    # masked tiles, whole ones, masked ones, whole ones
    for part in range(0, 2):
        run = (line, gl.where(part == 0, last, leading_last), gl.where(part == 0, ending, leading))
        dk, dv, n = fold_fused((dk, dv), held, buffers, bars, at, run, n, table, group, scale, odds, env, aux, c, half, both, mask, True)
        run = (line, gl.where(part == 0, whole_last, again_last), gl.where(part == 0, whole, again))
        dk, dv, n = fold_fused((dk, dv), held, buffers, bars, at, run, n, table, group, scale, odds, env, aux, c, half, both, mask, False)
    if c.DEFERS:
        fence_async_shared()
        mbarrier.arrive(share_bars[0].index((n + 1) % 2), count=1, pred=n > before)
    dk = scaled(dk, scale)
    if LEAVES:
        mbarrier.arrive(kv_bars[1], count=1)
        # read for the last time by the products of the last tile but one, which both warpgroups have done
        free = viewed(ds_tiles.index(n % 2 * 2 + half), ds_tiles.dtype, [c.TILE_Q // c.D_PAD, ROWS, c.D_PAD], shared(ROWS, c.D_PAD))
        copy_pieces_out(dv_out, memory_b, kv_h, own, kv_start, kv_len, (free.index(0),), dv, c.JAGGED)
        copy_pieces_out(dk_out, memory_b, kv_h, own, kv_start, kv_len, (free.index(1),), dk, c.JAGGED)
    else:
        # values are read no more, each half by its own warpgroup alone; keys may still be, for the other's share
        v = nth(v_tiles, half)
        copy_pieces_out(dv_out, memory_b, kv_h, own, kv_start, kv_len, v, dv, c.JAGGED)
        tma.store_wait(0)
        copy_pieces_out(dk_out, memory_b, kv_h, own, kv_start, kv_len, v, dk, c.JAGGED)
        tma.store_wait(0)
        # by all threads, before one says so
        thread_barrier()
        mbarrier.arrive(kv_bars[1], count=1)
    return n


@gluon.jit
def attention_gradients(
    q, k, v, do, lse, delta, pitch, dq, dk, dv, order, size, spans, table, scale, numbers, env, c,
    pre: gl.constexpr, both: gl.constexpr, mask: gl.constexpr, bounds: gl.constexpr,
):  # fmt: skip
    """dk and dv of tiles of keys, one after the other, and their shares in the float32 sums `dq` of each tile of queries:
    [SUMS * B * Hq * slots * rows, 256], a slot of so many `rows` as its descriptor has to a tile. Tensors come as descriptors, lse in
    base 2 and delta as `backward_sums.begin_gradients` leaves them."""
    k_tiles = buffers_of(k.dtype, 2, ROWS, c.D_PAD)
    v_tiles = buffers_of(v.dtype, 2, ROWS, c.DV_PAD)
    q_tiles = buffers_of(q.dtype, c.STAGES, c.TILE_Q, c.D_PAD)
    do_tiles = buffers_of(do.dtype, c.STAGES, c.TILE_Q, c.DV_PAD)
    ds_tiles = gl.allocate_shared_memory(q.dtype, [4, ROWS, c.TILE_Q], shared(ROWS, c.TILE_Q))
    lse_rows = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.TILE_Q], lse.layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.TILE_Q], lse.layout)
    whole_shares = gl.allocate_shared_memory(gl.float32, [2, dq.block_shape[0], SHARE_LINE], dq.layout)
    shares = viewed(whole_shares, gl.float32, [4, dq.block_shape[0] * SHARE_LINE // 2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    share_bars = (barriers(2, 2), barriers(2, 1))
    bars = (
        (barriers(1, 1).index(0), barriers(1, 2).index(0)), barriers(c.STAGES, 1), barriers(c.STAGES, 1), barriers(c.STAGES, 2),
        barriers(2, 2), share_bars,
    )  # fmt: skip
    posted = posts_of()
    fence_async_shared()
    held = (k_tiles, v_tiles)
    buffers = (q_tiles, do_tiles, lse_rows, delta_rows, ds_tiles, shares)
    told = (spans, size, table, scale, numbers, env)
    gl.warp_specialize(
        [
            (fused_consumer, (0, held, buffers, bars, (dk, dv), posted, told, c, pre, both, mask, bounds)),
            (fused_consumer, (1, held, buffers, bars, (dk, dv), posted, told, c, pre, both, mask, bounds)),
            (fused_producer, ((q, do, lse, delta, k, v), held, buffers, bars, posted, order, spans, size, pitch, table, c)),
            (add_shares, (dq, order, whole_shares, share_bars, posted, spans, size, table, c, 0)),
            (add_shares, (dq, order, whole_shares, share_bars, posted, spans, size, table, c, 1)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
