# mypy: ignore-errors
"""dq, dk and dv of a head with at most 128 queries: one program holds all queries and loops over the keys once (split-KV with several).

    B, H, Sq, Skv, D, Dv    as in `foci.backends.hopper.forward`; as many query heads as key heads
    q, do, dq               TMA descriptors [B, H, Sq, D or Dv] of 64 rows; do is the gradient of out
    k, v, dk, dv            TMA descriptors [B, H, Skv, D or Dv] of 64 rows
    lse, delta              pointers [B, H, Sq] float32: logsumexp in base 2, and sum(out * do) - dlse
    S, P, dP, dS            [64 queries, TILE_KV], in registers
    exchange                (P, dS) in shared memory: two tiles of keys by both warpgroups, [64, TILE_KV] each

Two warpgroups hold 64 queries each; a producer warp loads tiles of keys and values by TMA. Each warpgroup accumulates dq of its queries in
registers. Both write P and dS to shared memory; one warpgroup computes dv of the tile from there, the other dk. No other program has these
keys, so dk and dv are final: no semaphores, and no float32 accumulators in memory except partial dq where several programs share a head.

dv and dk of a tile are computed one tile later, beside the scores of the next one, so that neither warpgroup waits for the other.
"""

from typing import Any, NamedTuple

from foci.backends.gpu.tiles import decode
from foci.backends.hopper.bwd_producer import PairPlace, PairSources, StationaryPair, allocate_pair, load_stationary, make_ring, stream_pair
from foci.backends.hopper.bwd_tile_math import begin_s_dp, column_idx, load_row_values, recompute_weights, report_nan, scale_dscore
from foci.backends.hopper.gluon_compat import (
    fence_async_shared,
    gl,
    mbarrier,
    thread_barrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from foci.backends.hopper.kernel_args import Position
from foci.backends.hopper.layouts import mma_layout, smem_layout
from foci.backends.hopper.mma import begin_pv, scale_accumulators, wait_accumulators, zero_accumulators
from foci.backends.hopper.smem import allocate_tiles, make_barriers, opaque_value, store_pieces, tile_pieces
from foci.compat.gluon import gluon_jit

ROWS = gl.constexpr(64)


class SplitKVPartials(NamedTuple):
    """Partial dq of a head whose keys several programs share. Integers are encoded."""

    sums: Any  # dq without its scale, float32 [B, H, count, 128, D_PAD]
    count: Any  # programs of a head
    tiles: Any  # key tiles of a program; the last one has what is left


class ShortQSmem(NamedTuple):
    """Tiles in shared memory, and barriers."""

    pair: Any  # q and do
    ring: Any  # keys and values
    exchange_full: Any  # of two tiles of keys
    exchange: Any  # see the legend above
    out: Any  # a staging tile for each warpgroup


class KeySpan(NamedTuple):
    """A head, and the tiles of its keys that a program loops over."""

    b: Any
    h: Any
    q_len: Any
    kv_len: Any
    first_tile: Any
    count: Any


class ShortQContext(NamedTuple):
    """A warpgroup's 64 queries, and the keys of the program."""

    q_idx: Any  # [64, 1], as are lse2 and delta
    lse2: Any
    delta: Any
    aux: Any  # from the function `pre`
    span: Any  # `KeySpan`


class ShortQParams(NamedTuple):
    """Values that a program reads besides tensors."""

    heads: Any
    slot: Any  # number of the program
    scale: Any
    env: Any
    found_nan: Any  # see `bwd_tile_math.report_nan`


@gluon_jit
def short_q_producer(query_sources, key_sources, smem, span, c):
    """Producer warp: q and do once, then K and V tile by tile."""
    b, h, q_len, kv_len, first_tile, count = span
    load_stationary(query_sources, smem.pair, PairPlace(b, h, 0, q_len, 0), 0, c)
    for i in range(0, count):
        stream_pair(key_sources, smem.ring, PairPlace(b, h, 0, kv_len, 0), (first_tile + i) * c.TILE_KV, 0, i, c)


@gluon_jit
def begin_dk_dv(smem, half: gl.constexpr, n, opaque, c):
    """Begin dv = P^T dO, or dk = dS^T Q, of the n-th tile of keys, over the queries of both warpgroups: two products per piece.

    For n = -1 it multiplies whatever is in the buffers; the caller drops that result.
    """
    exchange = smem.exchange[half]
    rows = smem.pair.qk_tiles if half == 1 else smem.pair.do_v_tiles
    mbarrier.wait(smem.exchange_full.index(n & 1), (n >> 1) & 1)
    first, second = exchange.index((n & 1) * 2).permute((1, 0)), exchange.index((n & 1) * 2 + 1).permute((1, 0))
    none = zero_accumulators(c.TILE_KV, c.D_PAD)
    pending = ()
    for i in gl.static_range(len(rows)):
        dkv = warpgroup_mma(first, rows[i].index(opaque), none[i], use_acc=False, is_async=True)
        pending = pending + (warpgroup_mma(second, rows[i].index(1 + opaque), dkv, is_async=True),)
    return pending


@gluon_jit
def store_dk_dv(output, dkv, n, span, found_nan, c):
    """Begin a TMA store of dv or dk of the n-th tile of keys, once the previous store has read the staging tile. `output`: (target, staging
    tile, factor)."""
    target, out_tile, factor = output
    tma.store_wait(0)
    thread_barrier()
    row = (span.first_tile + n) * c.TILE_KV
    store_pieces(target, span.b, span.h, row, 0, span.kv_len, out_tile, scale_accumulators(dkv, factor), c.JAGGED)
    report_nan(found_nan, dkv)


@gluon_jit
def accumulate_short_q(dq, smem, output, query_ctx, steps, params, c, half: gl.constexpr, functions, EDGE: gl.constexpr):
    """Accumulate key tiles into dq of 64 queries, and store dv or dk of the tile before each. EDGE: some positions may not exist."""
    q_idx, lse2, delta, aux, span = query_ctx
    b, h, q_len, kv_len, first_tile, count = span
    first, end = steps
    for i in range(first, end):
        stage = i % c.STAGES
        phase = (i // c.STAGES) & 1
        slot = (i & 1) * 2 + half
        opaque = opaque_value(0)
        keys = tile_pieces(smem.ring.qk_tiles, stage)
        # S = Q K^T and dP = dO V^T, and dv or dk of the previous tile, all asynchronous
        s, dp = begin_s_dp(smem.pair, half, opaque, smem.ring, keys, stage, phase)
        dkv = begin_dk_dv(smem, half, i - 1, opaque, c)
        s = warpgroup_mma_wait(len(keys) + 2 * len(dkv), deps=[s])
        # P = exp2(S - lse), masked
        kv_idx = column_idx((first_tile + i) * c.TILE_KV, c.TILE_KV)
        position = Position(b, h, q_idx, kv_idx, q_len, kv_len, first_tile + i, aux)
        p, slope = recompute_weights(s, lse2, position, params, c, functions, False, EDGE)
        # this buffer was read for tile i - 2; both warpgroups finished that before they handed over tile i - 1
        smem.exchange[0].index(slot).store(p.to(keys[0].dtype))
        dscore_scaled = scale_dscore(p, slope, c, EDGE)
        # dS = P * slope * (dP - delta), then dQ += dS K
        dp = warpgroup_mma_wait(2 * len(dkv), deps=[dp])
        ds = (dscore_scaled * (dp - delta)).to(keys[0].dtype)
        smem.exchange[1].index(slot).store(ds)
        dq = begin_pv(ds, keys, dq)
        dkv = wait_accumulators(dkv, len(keys))
        fence_async_shared()
        mbarrier.arrive(smem.exchange_full.index(i & 1), count=1)
        if i > 0:
            store_dk_dv(output, dkv, i - 1, span, params.found_nan if half == 1 else None, c)
        dq = wait_accumulators(dq)
        mbarrier.arrive(smem.ring.empty.index(stage), count=1)
    return dq


@gluon_jit
def short_q_consumer(half: gl.constexpr, smem, outputs, row_values, span, params, c, functions):
    """One warpgroup: dq of 64 queries; and dv of all keys of the program (half 0) or dk (half 1)."""
    S: gl.constexpr = mma_layout(c.TILE_KV)
    heads, slot, scale, env = params.heads, params.slot, params.scale, params.env
    dq_out, dk_out, dv_out, partials = outputs
    b, h, q_len, kv_len, first_tile, count = span
    row = half * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
    head = (b * heads + h).to(gl.int64) * q_len
    lse2, delta = load_row_values(row_values, head, row, q_len)
    q_idx = gl.expand_dims(row, 1)
    aux = functions.pre(b, h, gl.minimum(q_idx, q_len - 1), q_len, kv_len, scale, env)
    dq = zero_accumulators(ROWS, c.D_PAD)
    out_tile = tile_pieces(smem.out, half)
    if half == 0:
        output = (dv_out, out_tile, 1.0)
    else:
        output = (dk_out, out_tile, scale)
    full = gl.minimum(kv_len // c.TILE_KV - first_tile, count)
    if not c.PLAIN:
        # a score function may give rows past the end an infinite slope, and 0 * inf is NaN: mask them in every tile
        full = gl.where(q_len < 2 * ROWS, 0, full)
    mbarrier.wait(smem.pair.full, 0)
    query_ctx = ShortQContext(q_idx, lse2, delta, aux, span)
    dq = accumulate_short_q(dq, smem, output, query_ctx, (0, full), params, c, half, functions, False)
    dq = accumulate_short_q(dq, smem, output, query_ctx, (full, count), params, c, half, functions, True)
    dkv = wait_accumulators(begin_dk_dv(smem, half, count - 1, opaque_value(0), c))
    store_dk_dv(output, dkv, count - 1, span, params.found_nan if half == 1 else None, c)
    if partials is None:
        tma.store_wait(0)
        thread_barrier()
        store_pieces(dq_out, b, h, half * ROWS, 0, q_len, out_tile, scale_accumulators(dq, scale), c.JAGGED)
        report_nan(params.found_nan, dq)
    else:
        store_partial_dq(partials.sums + slot * (2 * ROWS * c.D_PAD), dq, half, q_len, c)
    tma.store_wait(0)


@gluon_jit
def store_partial_dq(sums, dq, half: gl.constexpr, q_len, c):
    """Store a program's partial dq of 64 queries."""
    at = 0
    for i in gl.static_range(len(dq)):
        store_dq_columns(sums + at, dq[i], half, q_len, c.D_PAD, dq[i].shape[1])
        at = at + dq[i].shape[1]


@gluon_jit
def store_dq_columns(sums, dq_piece, half: gl.constexpr, q_len, pitch, WIDTH: gl.constexpr):
    """Store WIDTH columns of partial dq, rows `pitch` apart."""
    row = half * ROWS + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma_layout(WIDTH))), 1)
    column = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, mma_layout(WIDTH))), 0)
    gl.store(sums + row * pitch + column, dq_piece, mask=row + column * 0 < q_len)


@gluon_jit
def attention_few_gradients(q, k, v, do, row_values, dq, dk, dv, partials, size, scale, env, found_nan, c, functions):
    """dq, dk and dv of one head, or of a part of its keys. Shapes are in the legend above.

    row_values: (lse, delta). partials: None, or `SplitKVPartials`; then dq is None.
    """
    DTYPE: gl.constexpr = q.dtype
    q_tiles, do_tiles = allocate_pair(DTYPE, 2, ROWS, c)
    k_tiles, v_tiles = allocate_pair(DTYPE, c.STAGES, c.TILE_KV, c)
    out_smem = allocate_tiles(DTYPE, 2, ROWS, c.D_PAD)
    # P and dS of two tiles of keys, by each warpgroup
    p_smem = gl.allocate_shared_memory(DTYPE, [4, ROWS, c.TILE_KV], smem_layout(ROWS, c.TILE_KV))
    ds_smem = gl.allocate_shared_memory(DTYPE, [4, ROWS, c.TILE_KV], smem_layout(ROWS, c.TILE_KV))
    pair = StationaryPair(q_tiles, do_tiles, make_barriers(1, 1).index(0))
    ring = make_ring(k_tiles, v_tiles, (), (), c)
    smem = ShortQSmem(pair, ring, make_barriers(2, 2), (p_smem, ds_smem), out_smem)
    fence_async_shared()
    heads = decode(size.heads)
    kv_len = decode(size.columns)
    tiles = (kv_len + c.TILE_KV - 1) // c.TILE_KV
    head = gl.program_id(0)
    first_tile = 0
    count = tiles
    if partials is not None:
        head = head // decode(partials.count)
        first_tile = (gl.program_id(0) - head * decode(partials.count)) * decode(partials.tiles)
        count = gl.minimum(tiles - first_tile, decode(partials.tiles))
    b = head // heads
    span = KeySpan(b, head - b * heads, decode(size.rows), kv_len, first_tile, count)
    params = ShortQParams(heads, gl.program_id(0), scale, env, found_nan)
    outputs = (dq, dk, dv, partials)
    gl.warp_specialize(
        [
            (short_q_consumer, (0, smem, outputs, row_values, span, params, c, functions)),
            (short_q_consumer, (1, smem, outputs, row_values, span, params, c, functions)),
            (short_q_producer, (PairSources(q, do, None, None), PairSources(k, v, None, None), smem, span, c)),
        ],
        [4, 1],
        [240, 24],
    )
