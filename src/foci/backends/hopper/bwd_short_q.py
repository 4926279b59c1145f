# mypy: ignore-errors
"""All gradients of a head of few queries in one program, which holds them all and goes through its keys once; or in several of a share of
the keys each, whose sums of dq are added afterwards.

Two warpgroups hold 64 queries each, and a warp brings tiles of keys and values by TMA. A warpgroup sums dq of its queries in registers.
Both leave their weights and gradients of scores in shared memory, where one finds what dv of the tile needs, the other what dk needs. No
other program has these keys, so both leave finished: no turns, and float32 sums in memory of nothing but shares of dq.

A tile's dv and dk are computed a tile later, beside the scores of the next one: so neither warpgroup waits for the other's.
"""

from typing import Any, NamedTuple

from foci.backends.hopper.bwd_tile_math import recompute_weights, scale_dscore
from foci.backends.hopper.gluon_compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from foci.backends.hopper.layouts import mma_layout, smem_layout
from foci.backends.hopper.mma import begin_pv, begin_scores, scale_accumulators, wait_accumulators, zero_accumulators
from foci.backends.hopper.smem import allocate_tiles, load_pieces, make_barriers, opaque_zero, store_pieces, tile_pieces
from foci.backends.triton.tiles import decode

ROWS = gl.constexpr(64)


class SplitKVPartials(NamedTuple):
    """Where several programs take the keys of a head: `count` of them, encoded, of `tiles` tiles of keys each, encoded, the last of what is
    left; dq without its scale goes to `sums`, float32 [B, H, count, 128, D_PAD]."""

    sums: Any
    count: Any
    tiles: Any


@gluon.jit
def few_producer(sources, held, buffers, bars, at, c):
    """One warp: queries and gradients of out once, then tiles of keys and values."""
    q, do, k, v = sources
    q_tiles, do_tiles = held
    k_tiles, v_tiles = buffers
    q_full, k_full, v_full, empty, handed_full = bars
    b, h, q_len, kv_len, low, count = at
    mbarrier.expect(q_full, 2 * ROWS * 2 * (c.D_PAD + c.DV_PAD))
    for half in gl.static_range(2):
        load_pieces(q, b, h, half * ROWS, 0, q_len, q_full, tile_pieces(q_tiles, half), c.JAGGED)
        load_pieces(do, b, h, half * ROWS, 0, q_len, q_full, tile_pieces(do_tiles, half), c.JAGGED)
    for i in range(0, count):
        stage = i % c.STAGES
        mbarrier.wait(empty.index(stage), ((i // c.STAGES) & 1) ^ 1)
        mbarrier.expect(k_full.index(stage), c.TILE_KV * c.D_PAD * 2)
        load_pieces(k, b, h, (low + i) * c.TILE_KV, 0, kv_len, k_full.index(stage), tile_pieces(k_tiles, stage), c.JAGGED)
        mbarrier.expect(v_full.index(stage), c.TILE_KV * c.DV_PAD * 2)
        load_pieces(v, b, h, (low + i) * c.TILE_KV, 0, kv_len, v_full.index(stage), tile_pieces(v_tiles, stage), c.JAGGED)


@gluon.jit
def begin_dk_dv(handed, rows, n, handed_full, nought, c):
    """Begins dv, or dk without its scale, of the n-th tile of keys: what both warpgroups have handed over by their rows. Two products to
    wait for per piece. Of the tile before the first, for which nobody waits, it is made of whatever lies there."""
    mbarrier.wait(handed_full.index(n & 1), (n >> 1) & 1)
    first, second = handed.index((n & 1) * 2).permute((1, 0)), handed.index((n & 1) * 2 + 1).permute((1, 0))
    none = zero_accumulators(c.TILE_KV, c.D_PAD)
    begun = ()
    for i in gl.static_range(len(rows)):
        found = warpgroup_mma(first, rows[i].index(nought), none[i], use_acc=False, is_async=True)
        begun = begun + (warpgroup_mma(second, rows[i].index(1 + nought), found, is_async=True),)
    return begun


@gluon.jit
def store_dk_dv(target, room, found, n, at, factor, c):
    """Begins to copy dv or dk of the n-th tile of keys to memory, once the one before has left this room."""
    b, h, q_len, kv_len, low, count = at
    tma.store_wait(0)
    thread_barrier()
    store_pieces(target, b, h, (low + n) * c.TILE_KV, 0, kv_len, room, scale_accumulators(found, factor), c.JAGGED)


@gluon.jit
def accumulate_short_q(
    dq, held, buffers, bars, handed, leaving, rows, at, run, scale, env, aux, c, half: gl.constexpr, both: gl.constexpr, mask: gl.constexpr,
    EDGE: gl.constexpr,
):  # fmt: skip
    """Adds tiles of keys to dq of 64 queries, and leaves dv or dk of those one before. EDGE: some places may not exist."""
    S: gl.constexpr = mma_layout(c.TILE_KV)
    q_tiles, do_tiles = held
    k_tiles, v_tiles = buffers
    q_full, k_full, v_full, empty, handed_full = bars
    target, room, factor = leaving
    lse2, delta, q_idx = rows
    b, h, q_len, kv_len, low, count = at
    first, end = run
    zero = gl.zeros([ROWS, c.TILE_KV], gl.float32, S)
    for i in range(first, end):
        stage = i % c.STAGES
        phase = (i // c.STAGES) & 1
        mine = (i & 1) * 2 + half
        # where queries lie is found anew for each tile, and takes no registers over the loop
        nought = opaque_zero(0)
        keys = tile_pieces(k_tiles, stage)
        mbarrier.wait(k_full.index(stage), phase)
        s = begin_scores(tile_pieces(q_tiles, half + nought), keys, zero, False)
        mbarrier.wait(v_full.index(stage), phase)
        dp = begin_scores(tile_pieces(do_tiles, half + nought), tile_pieces(v_tiles, stage), zero, False)
        found = begin_dk_dv(handed[half], held[1 - half], i - 1, handed_full, nought, c)
        s = warpgroup_mma_wait(len(keys) + 2 * len(found), deps=[s])
        kv_idx = (low + i) * c.TILE_KV + gl.expand_dims(gl.arange(0, c.TILE_KV, layout=gl.SliceLayout(0, S)), 0)
        p, slope = recompute_weights(s, lse2, (b, h, q_idx, kv_idx, q_len, kv_len, low + i), scale, env, aux, c, both, mask, False, EDGE)
        # both warpgroups have read what lay here: they handed the tile before over after that
        handed[0].index(mine).store(p.to(keys[0].dtype))
        steep = scale_dscore(p, slope, c, EDGE)
        dp = warpgroup_mma_wait(2 * len(found), deps=[dp])
        ds = (steep * (dp - delta)).to(keys[0].dtype)
        handed[1].index(mine).store(ds)
        dq = begin_pv(ds, keys, dq)
        found = wait_accumulators(found, len(keys))
        fence_async_shared()
        mbarrier.arrive(handed_full.index(i & 1), count=1)
        if i > 0:
            store_dk_dv(target, room, found, i - 1, at, factor, c)
        dq = wait_accumulators(dq)
        mbarrier.arrive(empty.index(stage), count=1)
    return dq


@gluon.jit
def few_consumer(
    half: gl.constexpr, held, buffers, bars, handed, rooms, outputs, row_values, at, told, c,
    pre: gl.constexpr, both: gl.constexpr, mask: gl.constexpr,
):  # fmt: skip
    """One warpgroup: dq of 64 queries, and dv of all keys of the program or dk of all of them."""
    S: gl.constexpr = mma_layout(c.TILE_KV)
    heads, slot, scale, env = told
    dq_out, dk_out, dv_out, shares = outputs
    lse_rows, delta_rows = row_values
    b, h, q_len, kv_len, low, count = at
    row = half * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
    head = (b * heads + h).to(gl.int64) * q_len
    # rows that are not there have no weights
    lse2 = gl.expand_dims(gl.load(lse_rows + head + row, mask=row < q_len, other=float("inf")), 1)
    delta = gl.expand_dims(gl.load(delta_rows + head + row, mask=row < q_len, other=0.0), 1)
    q_idx = gl.expand_dims(row, 1)
    aux = pre(b, h, gl.minimum(q_idx, q_len - 1), q_len, kv_len, scale, env)
    dq = zero_accumulators(ROWS, c.D_PAD)
    room = tile_pieces(rooms, half)
    if half == 0:
        leaving = (dv_out, room, 1.0)
    else:
        leaving = (dk_out, room, scale)
    whole = gl.minimum(kv_len // c.TILE_KV - low, count)
    if not c.PLAIN:
        # a function may make of rows that are not there what no weight makes zero
        whole = gl.where(q_len < 2 * ROWS, 0, whole)
    mbarrier.wait(bars[0], 0)
    rows = (lse2, delta, q_idx)
    dq = accumulate_short_q(dq, held, buffers, bars, handed, leaving, rows, at, (0, whole), scale, env, aux, c, half, both, mask, False)
    dq = accumulate_short_q(dq, held, buffers, bars, handed, leaving, rows, at, (whole, count), scale, env, aux, c, half, both, mask, True)
    found = wait_accumulators(begin_dk_dv(handed[half], held[1 - half], count - 1, bars[4], opaque_zero(0), c))
    store_dk_dv(leaving[0], room, found, count - 1, at, leaving[2], c)
    if shares is None:
        tma.store_wait(0)
        thread_barrier()
        store_pieces(dq_out, b, h, half * ROWS, 0, q_len, room, scale_accumulators(dq, scale), c.JAGGED)
    else:
        store_partial_dq(shares.sums + slot * (2 * ROWS * c.D_PAD), dq, half, q_len, c)
    tma.store_wait(0)


@gluon.jit
def store_partial_dq(sums, dq, half: gl.constexpr, q_len, c):
    """Leaves a program's sums of 64 queries where `sums` says."""
    at = 0
    for i in gl.static_range(len(dq)):
        store_dq_columns(sums + at, dq[i], half, q_len, c.D_PAD, dq[i].shape[1])
        at = at + dq[i].shape[1]


@gluon.jit
def store_dq_columns(sums, found, half: gl.constexpr, q_len, pitch, WIDTH: gl.constexpr):
    """WIDTH columns of them, in lines of `pitch`."""
    row = half * ROWS + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma_layout(WIDTH))), 1)
    column = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, mma_layout(WIDTH))), 0)
    gl.store(sums + row * pitch + column, found, mask=row + column * 0 < q_len)


@gluon.jit
def attention_few_gradients(
    q, k, v, do, lse, delta, dq, dk, dv, shares, size, scale, env, c, pre: gl.constexpr, both: gl.constexpr, mask: gl.constexpr
):
    """dq, dk and dv of one head of up to 128 queries, as many query heads as heads of keys. Tensors come as descriptors of 64 rows or
    keys; lse in base 2 and delta [B, H, Sq] as pointers. `shares`: None, or `SplitKVPartials`, and then no dq."""
    DTYPE: gl.constexpr = q.dtype
    q_tiles = allocate_tiles(DTYPE, 2, ROWS, c.D_PAD)
    do_tiles = allocate_tiles(DTYPE, 2, ROWS, c.DV_PAD)
    k_tiles = allocate_tiles(DTYPE, c.STAGES, c.TILE_KV, c.D_PAD)
    v_tiles = allocate_tiles(DTYPE, c.STAGES, c.TILE_KV, c.DV_PAD)
    rooms = allocate_tiles(DTYPE, 2, ROWS, c.D_PAD)
    # weights, and gradients of scores: of two tiles of keys, by each warpgroup
    weights = gl.allocate_shared_memory(DTYPE, [4, ROWS, c.TILE_KV], smem_layout(ROWS, c.TILE_KV))
    steps = gl.allocate_shared_memory(DTYPE, [4, ROWS, c.TILE_KV], smem_layout(ROWS, c.TILE_KV))
    bars = (
        make_barriers(1, 1).index(0),
        make_barriers(c.STAGES, 1),
        make_barriers(c.STAGES, 1),
        make_barriers(c.STAGES, 2),
        make_barriers(2, 2),
    )
    fence_async_shared()
    heads = decode(size.heads)
    kv_len = decode(size.columns)
    tiles = (kv_len + c.TILE_KV - 1) // c.TILE_KV
    head = gl.program_id(0)
    low = 0
    count = tiles
    if shares is not None:
        head = head // decode(shares.count)
        low = (gl.program_id(0) - head * decode(shares.count)) * decode(shares.tiles)
        count = gl.minimum(tiles - low, decode(shares.tiles))
    b = head // heads
    at = (b, head - b * heads, decode(size.rows), kv_len, low, count)
    held, buffers, handed, rows = (q_tiles, do_tiles), (k_tiles, v_tiles), (weights, steps), (lse, delta)
    told = (heads, gl.program_id(0), scale, env)
    gl.warp_specialize(
        [
            (few_consumer, (0, held, buffers, bars, handed, rooms, (dq, dk, dv, shares), rows, at, told, c, pre, both, mask)),
            (few_consumer, (1, held, buffers, bars, handed, rooms, (dq, dk, dv, shares), rows, at, told, c, pre, both, mask)),
            (few_producer, ((q, do, k, v), held, buffers, bars, at, c)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
