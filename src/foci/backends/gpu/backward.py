# mypy: ignore-errors
"""Backward: one kernel for dq over tiles of queries, one for dk and dv over tiles of keys. No atomics, so repeatable.

    B, Hq, Hkv, Sq, Skv, D, Dv    as in `foci.backends.gpu.forward`
    q, k, v, dq, dk, dv           as the forward's q, k, v
    out, do                       [B, Hq, Sq, Dv]; do is the gradient of out
    lse, dlse                     [B, Hq, Sq] float32: natural logsumexp and its gradient, or None
    lse2, delta                   [B, Hq, Sq] float32: logsumexp in base 2, and sum(out * do) - dlse
    qk, p, dp, ds                 products, weights, and gradients of weights and scores of a tile
    args, c                       `foci.backends.gpu.kernel_args.CallArgs` and `Config`

With dp = do v^T, the gradient of a score is p * (dp - delta), delta = sum_j p dp = sum(out * do) - dlse (Dao et al., "FlashAttention",
2022, appendix B). The chain rule through the score function multiplies it by the function's derivative, `slope`.
"""

from typing import Any, NamedTuple

import triton.language as tl

from foci.backends.gpu.dweights import with_flow
from foci.backends.gpu.excluded_products import exact_product, finite_part, report_nan, report_none
from foci.backends.gpu.row_stats import load_row_stats, prepare_row_stats
from foci.backends.gpu.tiles import (
    FORCED,
    LOG2E,
    HeadRows,
    KeysValues,
    PackedRows,
    Position,
    TileRun,
    affine_columns,
    affine_line,
    clear_gaps,
    decode,
    every_tile,
    find_for_gradient,
    keep_tile,
    load_streamed_tile,
    load_tile,
    nth_visited,
    product,
    rows_pointer,
    sequence_at,
    tile_offsets,
    tile_runs,
    tile_start,
)
from foci.compat.jit import triton_jit


class RowInputs(NamedTuple):
    """Results of the forward and their gradients, in memory, and where the kernel of dq stores row statistics."""

    out: Any
    do: Any
    lse: Any
    dlse: Any  # or None
    lse2: Any
    delta: Any


class RowStats(NamedTuple):
    """Row statistics in memory, as the kernel of dq stored them."""

    lse2: Any
    delta: Any


class KeyGradients(NamedTuple):
    """Gradients of keys and values in memory; one of them may be None."""

    dk: Any
    dv: Any


class QueryTile(NamedTuple):
    """A tile of queries, and what its loops over tiles of keys read."""

    q: Any  # [TILE_Q, D_PAD]
    do: Any  # [TILE_Q, DV_PAD]
    lse2: Any  # [TILE_Q]
    delta: Any  # [TILE_Q]
    b: Any  # batch entry or sequence
    memory_b: Any  # batch entry in memory
    h: Any
    kv_h: Any
    first: Any  # first query
    q_idx: Any  # [TILE_Q, 1]
    q_len: Any
    kv_start: Any  # first key of the sequence in memory
    kv_len: Any
    affine: Any  # (start, slope per key) of an affine score function, see `affine_line`


class KeyTile(NamedTuple):
    """A tile of keys and values, and what its loops over tiles of a head's queries read."""

    k: Any  # [TILE_KV, D_PAD]
    v: Any  # [TILE_KV, DV_PAD]
    b: Any  # batch entry or sequence
    memory_b: Any  # batch entry in memory
    h: Any
    stats_start: Any  # where the head's sequence begins in `lse2` and `delta`
    first: Any  # first key
    q_start: Any  # first query of the sequence in memory
    q_len: Any
    kv_len: Any
    affine: Any  # (start, slope per key, slope per query) of an affine score function


class KeyPlace(NamedTuple):
    """Where a task's keys are."""

    b: Any  # batch entry or sequence
    memory_b: Any  # batch entry in memory
    kv_h: Any
    task: Any
    q_start: Any  # first query of the sequence in memory
    q_len: Any
    kv_start: Any  # first key of the sequence in memory
    kv_len: Any


class QueryStream(NamedTuple):
    """Queries, gradients of out and row statistics, in memory, and which gradients are computed from them."""

    q: Any  # a pointer or a tensor descriptor, as `do`
    do: Any
    lse2: Any
    delta: Any
    DK: Any  # a `tl.constexpr`, as DV
    DV: Any


@triton_jit
def recompute_weights(
    qk, lse2, position, args, c, both: tl.constexpr, mask: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, CUT: tl.constexpr
):
    """Recompute (weights, slope of the score function) of a tile from its products.

    Queries past the end have lse2 = inf. CUT: set weights of keys past the end to 0 here; else the mask does, or they do no harm.
    """
    b, h, q_len, kv_len = position.b, position.h, position.q_len, position.kv_len
    inside = position.kv_idx < kv_len
    q_idx = position.q_idx
    kv_idx = position.kv_idx
    if EDGE:
        q_idx = tl.minimum(q_idx, q_len - 1)
        kv_idx = tl.minimum(kv_idx, kv_len - 1)
    if c.PLAIN:
        slope = 1.0
        p = tl.exp2(qk * (args.numbers.scale * LOG2E) - lse2)
    else:
        exponent, slope = both(qk, args.numbers.scale, lse2, b, h, q_idx, kv_idx, q_len, kv_len, args.env)
        p = tl.exp2(exponent)
    if MASKED:
        keep = mask(b, h, q_idx, position.kv_idx if c.BOUNDED else kv_idx, q_len, kv_len, args.env)
        if c.BLOCKS:
            keep = keep | (position.tile >= FORCED)
        if EDGE and CUT:
            keep = keep & inside
        p = tl.where(keep, p, 0.0)
    elif EDGE and CUT:
        p = tl.where(inside, p, 0.0)
    return p, slope


@triton_jit
def score_gradient(p, dp, slope, c, CLEAN: tl.constexpr, EXACT: tl.constexpr):
    """ds = p * dp * slope, dp already without delta. CLEAN: a masked position may have an infinite slope. EXACT: or a dp that is NaN."""
    ds = p * dp
    if not c.PLAIN:
        ds = ds * slope
    if EXACT or (CLEAN and not c.PLAIN):
        ds = tl.where(p == 0.0, 0.0, ds)
    return ds


@triton_jit
def accumulate_dq(
    dq, kv, queries, run, args, c, both: tl.constexpr, mask: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, EXACT: tl.constexpr
):
    """Accumulate the tiles of a `TileRun` into dq of one tile of queries. `kv`: `KeysValues`. `queries`: `QueryTile`. EXACT: what excluded
    positions hold reaches nothing."""
    b, h, memory_b, q_idx = queries.b, queries.h, queries.memory_b, queries.q_idx
    q_len, kv_len = queries.q_len, queries.kv_len
    head = HeadRows(memory_b, queries.kv_h, queries.kv_start, kv_len)
    tile = nth_visited(args.table, run.row, run.low, run.first, run.before, run.gap, c)
    for i in tl.range(run.low, run.high, num_stages=1 if EXACT or (EDGE and not MASKED) else c.STAGES):
        kv_first = tile_start(tile, c, c.TILE_KV)
        current = tile
        tile = nth_visited(args.table, run.row, i + 1, run.first, run.before, run.gap, c)
        # S = Q K^T and dP = dO V^T
        keys = load_streamed_tile(kv.k, args.strides.k, head, kv_first, c, EDGE, c.TILE_KV, c.D, c.D_PAD)
        qk = product(queries.q, keys, kv_first - queries.first, queries.affine, c)
        values = load_streamed_tile(kv.v, args.strides.v, head, kv_first, c, EDGE, c.TILE_KV, c.DV, c.DV_PAD)
        dp = tl.dot(queries.do, tl.trans(values), input_precision=c.PRECISION)
        # P = exp2(S - lse), masked
        position = Position(b, h, q_idx, kv_first + tl.arange(0, c.TILE_KV)[None, :], q_len, kv_len, current)
        CUT: tl.constexpr = not (MASKED and c.BOUNDED)
        p, slope = recompute_weights(qk, queries.lse2[:, None], position, args, c, both, mask, MASKED, EDGE, CUT)
        if c.DROPOUT:
            dp = tl.where(keep_tile(args.numbers, b, h, q_idx, kv_first, c.TILE_KV), dp * args.numbers.keep_factor, 0.0)
        dp = with_flow(dp, args.numbers, b, h, memory_b, q_idx, kv_first + tl.arange(0, c.TILE_KV)[None, :], q_len, kv_len)
        # dS = P * slope * (dP - delta), then dQ += dS K
        ds = score_gradient(p, dp - queries.delta[:, None], slope, c, MASKED or EDGE, EXACT)
        if EXACT:
            # where a key that is attended to is not finite, lse is NaN, and so is ds
            keys = finite_part(keys)
        dq = tl.dot(ds.to(keys.dtype), keys, dq, input_precision=c.PRECISION)
    return dq


@triton_jit
def attention_query_gradient(q, k, v, inputs, dq, flags, args, c, both: tl.constexpr, mask: tl.constexpr):
    """dq of one tile of queries; also stores its lse2 and delta, which the kernel of dk and dv reads. `inputs`: `RowInputs`.
    `flags`: see `excluded_products.report_nan`."""
    strides, size, spans, table = args.strides, args.size, args.spans, args.table
    place = find_for_gradient(size, spans, c, True)
    b, memory_b, h, task = place.b, place.memory_b, place.h, place.task
    q_start, q_len, kv_start, kv_len = sequence_at(spans, size, b, task, c)
    if c.JAGGED and b < 0:
        if place.tile == 0:
            packed = PackedRows(spans.q_start, spans.q_length, spans.sequences, decode(size.rows))
            clear_gaps(dq, strides.dq, packed, memory_b, h, c, 16, c.D, c.D_PAD)
        report_none(flags)
        return
    kv_h = h // decode(size.group)
    first = place.tile * c.TILE_Q
    limit = q_len - first
    q_offsets = tile_offsets(strides.q, c, c.TILE_Q, c.D_PAD)
    q_tile = load_tile(rows_pointer(q, strides.q, memory_b, h, q_start + first, c), q_offsets, limit, True, c.TILE_Q, c.D, c.D_PAD)
    if c.NEGATIVE:
        q_tile = -q_tile
    do_offsets = tile_offsets(strides.dout, c, c.TILE_Q, c.DV_PAD)
    do_pointer = rows_pointer(inputs.do, strides.dout, memory_b, h, q_start + first, c)
    douts = load_tile(do_pointer, do_offsets, limit, True, c.TILE_Q, c.DV, c.DV_PAD)
    rows = first + tl.arange(0, c.TILE_Q)
    head = (memory_b * decode(size.heads) + h).to(tl.int64) * decode(size.rows) + q_start
    out_offsets = tile_offsets(strides.out, c, c.TILE_Q, c.DV_PAD)
    out_pointer = rows_pointer(inputs.out, strides.out, memory_b, h, q_start + first, c)
    outs = load_tile(out_pointer, out_offsets, limit, True, c.TILE_Q, c.DV, c.DV_PAD)
    row_lse, row_delta = prepare_row_stats(outs, douts, inputs.lse, inputs.dlse, inputs.lse2, inputs.delta, head + rows, rows < q_len)
    q_idx = tl.minimum(rows, q_len - 1)[:, None]
    affine = (0.0, 0.0)
    if c.AFFINE:
        start, kv_slope, q_slope = affine_line(b, h, first, q_len, kv_len, args.numbers, args.env, both)
        affine = (start, kv_slope)
        row_lse -= tl.arange(0, c.TILE_Q).to(tl.float32) * (q_slope * LOG2E)
    queries = QueryTile(q_tile, douts, row_lse, row_delta, b, memory_b, h, kv_h, first, q_idx, q_len, kv_start, kv_len, affine)
    acc = tl.zeros([c.TILE_Q, c.D_PAD], tl.float32)
    tiles = tile_runs(table, b, h, task, kv_len, c, c.TILE_KV)
    MASKED: tl.constexpr = c.MODE != "all"
    EDGE: tl.constexpr = not c.SPLIT_EDGE or not MASKED
    run = TileRun(tiles.row, tiles.full_first, tiles.full, tiles.full * 0, tiles.full * 0, tiles.full)
    acc = accumulate_dq(acc, KeysValues(k, v), queries, run, args, c, both, mask, False, False, False)
    part_inside = tiles.part
    if not EDGE:
        last = nth_visited(table, tiles.row, tl.maximum(tiles.part - 1, 0), tiles.part_first, tiles.before, tiles.gap, c)
        part_inside = tiles.part - tl.where((tiles.part > 0) & (tile_start(last, c, c.TILE_KV) + c.TILE_KV > kv_len), 1, 0)
    run = TileRun(tiles.row, tiles.part_first, tiles.before, tiles.gap, part_inside * 0, part_inside)
    acc = accumulate_dq(acc, KeysValues(k, v), queries, run, args, c, both, mask, MASKED, EDGE, False)
    if not EDGE:
        run = TileRun(tiles.row, tiles.part_first, tiles.before, tiles.gap, part_inside, tiles.part)
        acc = accumulate_dq(acc, KeysValues(k, v), queries, run, args, c, both, mask, True, True, False)
    store_dq(acc, dq, queries, first, rows, q_start, args, c)
    report_nan(flags, acc)


@triton_jit
def store_dq(acc, dq, queries, first, rows, q_start, args, c):
    """Scale and store `rows` of dq, which begin at row `first`."""
    sign = -1.0 if c.NEGATIVE else 1.0
    pointer = rows_pointer(dq, args.strides.dq, queries.memory_b, queries.h, q_start + first, c)
    store = tile_offsets(args.strides.dq, c, rows.shape[0], c.D_PAD)
    inside = (rows < queries.q_len)[:, None] & (tl.arange(0, c.D_PAD)[None, :] < c.D)
    tl.store(pointer + store, (acc * (args.numbers.scale * sign)).to(dq.dtype.element_ty), mask=inside)


@triton_jit
def value_product(a, b, row_delta, AXIS: tl.constexpr, c):
    """a b^T - delta, with -delta as the initial accumulator, so that it takes no registers later. With dropout a b^T alone."""
    if c.DROPOUT:
        return tl.dot(a, tl.trans(b), input_precision=c.PRECISION)
    else:
        seed = tl.zeros([a.shape[0], b.shape[0]], tl.float32) - tl.expand_dims(row_delta, AXIS)
        return tl.dot(a, tl.trans(b), seed, input_precision=c.PRECISION)


@triton_jit
def key_product(queries, k, kv_slope, c):
    """Products of a tile of queries and one of keys, as rows of queries if TURNED, else as rows of keys. An affine score function,
    relative to the first key, is the initial accumulator."""
    if c.AFFINE:
        sign = -1.0 if c.NEGATIVE else 1.0
        seed_columns = tl.arange(0, c.TILE_KV).to(tl.float32) * (kv_slope * sign)
        if c.TURNED:
            seed = tl.broadcast_to(seed_columns[None, :], [c.TILE_Q, c.TILE_KV])
            return tl.dot(queries, tl.trans(k), seed, input_precision=c.PRECISION)
        else:
            seed = tl.broadcast_to(seed_columns[:, None], [c.TILE_KV, c.TILE_Q])
            return tl.dot(k, tl.trans(queries), seed, input_precision=c.PRECISION)
    elif c.TURNED:
        return tl.dot(queries, tl.trans(k), input_precision=c.PRECISION)
    else:
        return tl.dot(k, tl.trans(queries), input_precision=c.PRECISION)


@triton_jit
def transpose_scores(x, c):
    """Transpose a tile [queries, keys] to the layout of this kernel: see `Config.TURNED`."""
    if c.TURNED:
        return x
    else:
        return tl.trans(x)


@triton_jit
def accumulate_dk_dv(
    grads, stream, keys, run, args, c, both: tl.constexpr, mask: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, EXACT: tl.constexpr
):
    """Accumulate the tiles of a `TileRun` of one head's queries into `grads`, (dk, dv) of one tile of keys. `stream`: `QueryStream`.
    `keys`: `KeyTile`. EXACT: what excluded positions hold reaches nothing."""
    dk, dv = grads
    b, h, memory_b, affine = keys.b, keys.h, keys.memory_b, keys.affine
    q_len, kv_len = keys.q_len, keys.kv_len
    head = HeadRows(memory_b, h, keys.q_start, q_len)
    KEY_AXIS: tl.constexpr = 0 if c.TURNED else 1
    ROW_AXIS: tl.constexpr = 1 if c.TURNED else 0
    KEYS: tl.constexpr = keys.k.shape[0]
    kv_idx = tl.expand_dims(keys.first + tl.arange(0, KEYS), KEY_AXIS)
    tile = nth_visited(args.table, run.row, run.low, run.first, run.before, run.gap, c)
    for i in tl.range(run.low, run.high, num_stages=1 if EXACT or (EDGE and not MASKED) else c.STAGES):
        q_first = tile_start(tile, c, c.TILE_Q)
        current = tile
        tile = nth_visited(args.table, run.row, i + 1, run.first, run.before, run.gap, c)
        # S = Q K^T
        queries = load_streamed_tile(stream.q, args.strides.q, head, q_first, c, EDGE, c.TILE_Q, c.D, c.D_PAD)
        qk = key_product(queries, keys.k, affine[1], c)
        if c.NEGATIVE:
            qk = -qk
        rows = q_first + tl.arange(0, c.TILE_Q)
        row_lse, row_delta = load_row_stats(stream.lse2, stream.delta, keys.stats_start, rows, q_len, c, EDGE)
        if c.AFFINE:
            start, kv_slope, q_slope = affine
            row_lse -= affine_columns(start + (q_first - keys.first).to(tl.float32) * q_slope, q_slope, c.TILE_Q)
        position = Position(b, h, tl.expand_dims(rows, ROW_AXIS), kv_idx, q_len, kv_len, current)
        # P = exp2(S - lse), masked. Keys past the end only reach rows of dk and dv that are not stored
        p, slope = recompute_weights(qk, tl.expand_dims(row_lse, ROW_AXIS), position, args, c, both, mask, MASKED, EDGE, False)
        douts = load_streamed_tile(stream.do, args.strides.dout, head, q_first, c, EDGE, c.TILE_Q, c.DV, c.DV_PAD)
        if c.DROPOUT:
            # mark dropped weights by their sign until both products are done: a separate tile of bits would spill
            keep = transpose_scores(keep_tile(args.numbers, b, h, tl.minimum(rows, q_len - 1)[:, None], keys.first, KEYS), c)
            p = tl.where(keep, p, -p)
        if stream.DV:
            # dV += P^T dO
            dropped = p
            if c.DROPOUT:
                dropped = tl.maximum(p, 0.0, propagate_nan=tl.PropagateNan.ALL)
            if EXACT:
                dv = exact_product(tl.trans(dropped) if c.TURNED else dropped, douts, dv, c.PRECISION)
            else:
                dropped = dropped.to(douts.dtype)
                dv = tl.dot(tl.trans(dropped) if c.TURNED else dropped, douts, dv, input_precision=c.PRECISION)
        if stream.DK:
            # dS = P * slope * (dP - delta), then dK += dS^T Q
            dp = value_product(douts if c.TURNED else keys.v, keys.v if c.TURNED else douts, row_delta, ROW_AXIS, c)
            if c.DROPOUT:
                dp = tl.where(p > 0.0, dp * args.numbers.keep_factor, 0.0) - tl.expand_dims(row_delta, ROW_AXIS)
                p = tl.abs(p)
            dp = with_flow(dp, args.numbers, b, h, memory_b, tl.expand_dims(rows, ROW_AXIS), kv_idx, q_len, kv_len)
            ds = score_gradient(p, dp, slope, c, MASKED or EDGE, EXACT).to(queries.dtype)
            if EXACT:
                # where a query attends to this key and is not finite, its lse is NaN, and so is ds
                queries = finite_part(queries)
            dk = tl.dot(tl.trans(ds) if c.TURNED else ds, queries, dk, input_precision=c.PRECISION)
    return dk, dv


@triton_jit
def attention_key_gradient(q, k, v, do, stats, grads, flags, args, c, both: tl.constexpr, mask: tl.constexpr):
    """dk and dv of one tile of keys, summed over the query heads that share it. `stats`: `RowStats`. `grads`: `KeyGradients`.
    `flags`: see `excluded_products.report_nan`; dv holds a NaN only where dk does."""
    strides, size, spans = args.strides, args.size, args.spans
    place = find_for_gradient(size, spans, c, False)
    b, memory_b, kv_h, task = place.b, place.memory_b, place.h, place.task
    q_start, q_len, kv_start, kv_len = sequence_at(spans, size, b, task, c)
    if c.JAGGED and b < 0:
        if place.tile == 0:
            packed = PackedRows(spans.kv_start, spans.kv_length, spans.sequences, decode(size.columns))
            if grads.dk is not None:
                clear_gaps(grads.dk, strides.dk, packed, memory_b, kv_h, c, 16, c.D, c.D_PAD)
            if grads.dv is not None:
                clear_gaps(grads.dv, strides.dv, packed, memory_b, kv_h, c, 16, c.DV, c.DV_PAD)
        report_none(flags)
        return
    first = place.tile * c.TILE_KV
    DK: tl.constexpr = grads.dk is not None
    DV: tl.constexpr = grads.dv is not None
    keys = KeyPlace(b, memory_b, kv_h, task, q_start, q_len, kv_start, kv_len)
    dk_acc, dv_acc = sum_key_gradients(
        KeysValues(k, v), QueryStream(q, do, stats.lse2, stats.delta, DK, DV), keys, first, args, c, both, mask, c.TILE_KV, False
    )
    store_key_gradients((dk_acc, dv_acc), grads, keys, first, args, c, c.TILE_KV)
    report_nan(flags, dk_acc if DK else dv_acc)


@triton_jit
def sum_key_gradients(kv, stream, place, first, args, c, both: tl.constexpr, mask: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr):
    """(dk, dv) of KEYS keys from key `first` on, summed over the query heads that share them. `kv`: `KeysValues`. `stream`: `QueryStream`.
    `place`: `KeyPlace`. EXACT: what excluded positions hold reaches nothing."""
    strides, size, table = args.strides, args.size, args.table
    b, memory_b, kv_h, q_start, q_len = place.b, place.memory_b, place.kv_h, place.q_start, place.q_len
    kv_start, kv_len = place.kv_start, place.kv_len
    limit = kv_len - first
    k_offsets = tile_offsets(strides.k, c, KEYS, c.D_PAD)
    v_offsets = tile_offsets(strides.v, c, KEYS, c.DV_PAD)
    k_tile = load_tile(rows_pointer(kv.k, strides.k, memory_b, kv_h, kv_start + first, c), k_offsets, limit, True, KEYS, c.D, c.D_PAD)
    v_tile = 0.0
    dk_acc = 0.0
    dv_acc = 0.0
    if stream.DK:
        v_tile = load_tile(rows_pointer(kv.v, strides.v, memory_b, kv_h, kv_start + first, c), v_offsets, limit, True, KEYS, c.DV, c.DV_PAD)
        dk_acc = tl.zeros([KEYS, c.D_PAD], tl.float32)
    if stream.DV:
        dv_acc = tl.zeros([KEYS, c.DV_PAD], tl.float32)
    MASKED: tl.constexpr = c.MODE != "all"
    EDGE: tl.constexpr = not c.SPLIT_EDGE or not MASKED
    for member in range(0, decode(size.group)):
        h = kv_h * decode(size.group) + member
        stats_start = (memory_b * decode(size.heads) * decode(size.group) + h).to(tl.int64) * decode(size.rows) + q_start
        tiles = tile_runs(table, b, h, place.task, q_len, c, c.TILE_Q)
        full, part_first, gap, part = tiles.full, tiles.part_first, tiles.gap, tiles.part
        if first + KEYS > kv_len:
            # the key tile overhangs the keys: mask every query tile
            part_first = part_first if c.MODE == "ranges" else tiles.full_first
            part += full
            full = full * 0
            gap = gap * 0
        affine = (0.0, 0.0, 0.0)
        if c.AFFINE:
            # the affine function at the tile's first key goes into each query's lse, the rest into the products
            start, kv_slope, q_slope = both(b, h, first + 2 * tl.arange(0, 4), first, q_len, kv_len, args.env)
            affine = (start * LOG2E + tl.zeros([4], tl.float32), kv_slope / args.numbers.scale, q_slope * LOG2E)
        keys = KeyTile(k_tile, v_tile, b, memory_b, h, stats_start, first, q_start, q_len, kv_len, affine)
        if EXACT:
            dk_acc, dv_acc = accumulate_dk_dv((dk_acc, dv_acc), stream, keys, every_tile(tiles, c), args, c, both, mask, MASKED, True, True)
        else:
            run = TileRun(tiles.row, tiles.full_first, full, full * 0, full * 0, full)
            dk_acc, dv_acc = accumulate_dk_dv((dk_acc, dv_acc), stream, keys, run, args, c, both, mask, False, False, False)
            part_inside = part
            if not EDGE:
                last = nth_visited(table, tiles.row, tl.maximum(part - 1, 0), part_first, tiles.before, gap, c)
                part_inside = part - tl.where((part > 0) & (tile_start(last, c, c.TILE_Q) + c.TILE_Q > q_len), 1, 0)
                if first + KEYS > kv_len:
                    part_inside = part_inside * 0
            run = TileRun(tiles.row, part_first, tiles.before, gap, part_inside * 0, part_inside)
            dk_acc, dv_acc = accumulate_dk_dv((dk_acc, dv_acc), stream, keys, run, args, c, both, mask, MASKED, EDGE, False)
            if not EDGE:
                run = TileRun(tiles.row, part_first, tiles.before, gap, part_inside, part)
                dk_acc, dv_acc = accumulate_dk_dv((dk_acc, dv_acc), stream, keys, run, args, c, both, mask, True, True, False)
    return dk_acc, dv_acc


@triton_jit
def store_key_gradients(sums, grads, place, first, args, c, KEYS: tl.constexpr):
    """Scale and store `sums`, (dk, dv) of KEYS keys from key `first` on. `grads`: `KeyGradients`. `place`: `KeyPlace`."""
    strides = args.strides
    dk_acc, dv_acc = sums
    row = place.kv_start + first
    rows = (tl.arange(0, KEYS) < place.kv_len - first)[:, None]
    sign = -1.0 if c.NEGATIVE else 1.0
    if grads.dk is not None:
        dk_at = rows_pointer(grads.dk, strides.dk, place.memory_b, place.kv_h, row, c) + tile_offsets(strides.dk, c, KEYS, c.D_PAD)
        dk_out = (dk_acc * (args.numbers.scale * sign)).to(grads.dk.dtype.element_ty)
        tl.store(dk_at, dk_out, mask=rows & (tl.arange(0, c.D_PAD)[None, :] < c.D))
    if grads.dv is not None:
        if c.DROPOUT:
            dv_acc = dv_acc * args.numbers.keep_factor
        dv_at = rows_pointer(grads.dv, strides.dv, place.memory_b, place.kv_h, row, c) + tile_offsets(strides.dv, c, KEYS, c.DV_PAD)
        tl.store(dv_at, dv_acc.to(grads.dv.dtype.element_ty), mask=rows & (tl.arange(0, c.DV_PAD)[None, :] < c.DV))
