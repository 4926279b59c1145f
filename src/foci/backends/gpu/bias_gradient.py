# mypy: ignore-errors
"""dq together with the gradient of a captured tensor that is read at each (q, kv), such as a bias that requires grad: both need the same
tiles.

    q, k, v, do, lse2, delta    as in `foci.backends.gpu.backward`
    target                      [B or 1, Hq, Sq, Skv]: the gradient of the bias, summed over batch entries if the bias is shared
    g                           [TILE_Q, TILE_KV]: gradient of the score function's value, p * (dp - delta)

A program has one tile of queries of every batch entry that the gradient is summed over, one after another. It takes a range of key tiles
at a time ("stretch"): the range's partial sums, and each entry's dq, wait in memory of the program's own until they are complete, in
float32 and always in the same order.
"""

from typing import Any, NamedTuple

import triton.language as tl

from foci.backends.gpu.backward import recompute_weights, score_gradient
from foci.backends.gpu.dweights import with_flow
from foci.backends.gpu.excluded_products import is_finite
from foci.backends.gpu.row_stats import prepare_row_stats
from foci.backends.gpu.tiles import (
    HeadRows,
    KeysValues,
    Position,
    decode,
    keep_tile,
    load_streamed_tile,
    load_tile,
    rows_pointer,
    tile_offsets,
)
from foci.compat.jit import triton_jit

__all__ = ["BiasGradArgs", "BiasLoops", "BiasOutputs", "attention_bias_gradient"]


class BiasLoops(NamedTuple):
    """Counts of a program's loops, encoded."""

    entries: int  # batch entries of a program
    stretch: int  # tiles of keys at a time


class BiasGradArgs(NamedTuple):
    """A call's arguments, as in `foci.backends.gpu.kernel_args.CallArgs`, and those of the bias."""

    strides: Any
    target_strides: Any  # in units of 8 elements if rows are contiguous
    size: Any
    loops: BiasLoops
    numbers: Any
    env: Any


class BiasOutputs(NamedTuple):
    """dq and the gradient of the bias, in memory."""

    dq: Any
    target: Any
    sums: Any  # float32 [programs, tiles of a stretch, TILE_Q * TILE_KV], in the order of registers; None where nothing is summed
    dq_partials: Any  # float32 [programs, entries, TILE_Q, D_PAD], or None
    flags: Any  # whether a program's dq holds a NaN, or None: see `excluded_products.report_nan`


class QueryTile(NamedTuple):
    """A tile of queries of one batch entry, and what its loops over tiles of keys read."""

    q: Any  # [TILE_Q, D_PAD]
    do: Any  # [TILE_Q, DV_PAD]
    lse2: Any  # [TILE_Q]
    delta: Any  # [TILE_Q]
    b: Any
    h: Any
    kv_h: Any
    rows: Any  # [TILE_Q], which may be past the end
    q_len: Any
    kv_len: Any
    target: Any  # the head's gradient of the bias, in memory


class KeyRun(NamedTuple):
    """Tiles of keys that a loop visits for one batch entry."""

    low: Any
    high: Any
    is_back: Any  # whether from the last tile to the first
    is_first: Any  # whether the batch entry is the first of those summed
    is_last: Any
    sums: Any  # partial sums of tile `low`, in memory, or None


@triton_jit
def flatten_tile(x, c):
    """Flatten a tile in the order of registers: in an mma product a thread has pairs of columns, in rows eight apart. So memory accesses
    coalesce."""
    parts = tl.reshape(x, [c.TILE_Q // 16, 2, 8, c.TILE_KV // 8, 4, 2])
    return tl.reshape(tl.permute(parts, [3, 0, 2, 4, 1, 5]), [c.TILE_Q * c.TILE_KV])


@triton_jit
def unflatten_tile(x, c):
    """Inverse of `flatten_tile`."""
    parts = tl.reshape(x, [c.TILE_KV // 8, c.TILE_Q // 16, 8, 4, 2, 2])
    return tl.reshape(tl.permute(parts, [1, 4, 2, 0, 3, 5]), [c.TILE_Q, c.TILE_KV])


@triton_jit
def accumulate_bias_gradient(
    dq, kv, queries, run, args, c, both: tl.constexpr, mask: tl.constexpr, CONTIGUOUS: tl.constexpr, EDGE: tl.constexpr
):
    """Accumulate the tiles of a `KeyRun` into dq of one tile of queries, as `backward.accumulate_dq`, and g into its `sums`; the last
    entry's total goes to the gradient of the bias. `kv`: `KeysValues`. `queries`: `QueryTile`."""
    b, h, rows, q_len, kv_len = queries.b, queries.h, queries.rows, queries.q_len, queries.kv_len
    low, high, is_first, is_last = run.low, run.high, run.is_first, run.is_last
    SUMMED: tl.constexpr = run.sums is not None
    q_idx = tl.minimum(rows, q_len - 1)[:, None]
    for i in tl.range(low, high, num_stages=1 if EDGE else c.STAGES):
        # every second entry goes backwards: what the previous one stored last is still in the cache
        tile = tl.where(run.is_back, low + high - 1 - i, i) if SUMMED else b * 0 + i
        here = tile * c.TILE_KV
        head = HeadRows(b, queries.kv_h, here * 0, kv_len)
        # S = Q K^T and dP = dO V^T
        keys = load_streamed_tile(kv.k, args.strides.k, head, here, c, EDGE, c.TILE_KV, c.D, c.D_PAD)
        qk = tl.dot(queries.q, tl.trans(keys), input_precision=c.PRECISION)
        if c.NEGATIVE:
            qk = -qk
        values = load_streamed_tile(kv.v, args.strides.v, head, here, c, EDGE, c.TILE_KV, c.DV, c.DV_PAD)
        dp = tl.dot(queries.do, tl.trans(values), input_precision=c.PRECISION)
        columns = here + tl.arange(0, c.TILE_KV)
        kv_idx = columns[None, :]
        # P = exp2(S - lse), then g = P * (dP - delta)
        position = Position(b, h, q_idx, kv_idx, q_len, kv_len, tile)
        p, slope = recompute_weights(qk, queries.lse2[:, None], position, args, c, both, mask, False, EDGE, True)
        if c.DROPOUT:
            dp = tl.where(keep_tile(args.numbers, b, h, q_idx, here, c.TILE_KV), dp * args.numbers.keep_factor, 0.0)
        dp = with_flow(dp, args.numbers, b, h, b, q_idx, columns[None, :], q_len, kv_len) - queries.delta[:, None]
        g = p * dp
        if EDGE or c.EXCLUDES:
            g = tl.where(p == 0.0, 0.0, g)
        # add the earlier entries' sums; the last entry stores the total
        if SUMMED:
            partial = run.sums + (tile - low) * (c.TILE_Q * c.TILE_KV) + tl.arange(0, c.TILE_Q * c.TILE_KV)
            all_lanes = tl.full([c.TILE_Q * c.TILE_KV], 1, tl.int1)
            g += unflatten_tile(tl.load(partial, mask=all_lanes & (is_first == 0), other=0.0), c)
            tl.store(partial, flatten_tile(g, c), mask=all_lanes & (is_last == 0))
        steps = args.target_strides
        if CONTIGUOUS:
            pointer = queries.target + rows.to(tl.int64)[:, None] * (decode(steps.s) * 8) + columns[None, :]
        else:
            pointer = queries.target + rows.to(tl.int64)[:, None] * decode(steps.s) + columns.to(tl.int64)[None, :] * decode(steps.d)
        store_mask = (rows < q_len)[:, None] & (is_last != 0)
        if EDGE:
            store_mask = store_mask & (columns < kv_len)[None, :]
        tl.store(pointer, g.to(queries.target.dtype.element_ty), mask=store_mask)
        # dQ += dS K
        ds = score_gradient(p, dp, slope, c, EDGE, c.EXCLUDES)
        dq = tl.dot(ds.to(keys.dtype), keys, dq, input_precision=c.PRECISION)
    return dq


@triton_jit
def attention_bias_gradient(q, k, v, inputs, outputs, args, c, both: tl.constexpr, mask: tl.constexpr, CONTIGUOUS: tl.constexpr):
    """dq of one tile of queries of each batch entry that the gradient is summed over, those rows of the gradient, and their lse2 and delta.

    `inputs`: `RowInputs`. `outputs`: `BiasOutputs`. `args`: `BiasGradArgs`. CONTIGUOUS: rows of the gradient are contiguous, and its other
    strides multiples of 8 elements.
    """
    strides, size, entries, stretch = args.strides, args.size, args.loops.entries, args.loops.stretch
    SUMMED: tl.constexpr = outputs.sums is not None
    tiles = decode(size.tasks)
    line = tl.program_id(0) // tiles
    first = (tl.program_id(0) - line * tiles) * c.TILE_Q
    outer = line // decode(size.heads)
    h = line - outer * decode(size.heads)
    kv_h = h // decode(size.group)
    q_len = decode(size.rows)
    kv_len = decode(size.columns)
    rows = first + tl.arange(0, c.TILE_Q)
    unit = 8 if CONTIGUOUS else 1
    steps = args.target_strides
    target = outputs.target + outer.to(tl.int64) * (decode(steps.b) * unit) + h.to(tl.int64) * (decode(steps.h) * unit)
    q_offsets = tile_offsets(strides.q, c, c.TILE_Q, c.D_PAD)
    do_offsets = tile_offsets(strides.dout, c, c.TILE_Q, c.DV_PAD)
    out_offsets = tile_offsets(strides.out, c, c.TILE_Q, c.DV_PAD)
    store = tile_offsets(strides.dq, c, c.TILE_Q, c.D_PAD)
    inside = (rows < q_len)[:, None] & (tl.arange(0, c.D_PAD)[None, :] < c.D)
    offsets = tl.arange(0, c.TILE_Q)[:, None] * c.D_PAD + tl.arange(0, c.D_PAD)[None, :]
    sign = -1.0 if c.NEGATIVE else 1.0
    partials = outputs.sums
    if SUMMED:
        partials = outputs.sums + tl.program_id(0).to(tl.int64) * decode(stretch) * (c.TILE_Q * c.TILE_KV)
    full_tiles = kv_len // c.TILE_KV
    tiles_each = decode(stretch)
    tiles_of_keys = tl.cdiv(kv_len, c.TILE_KV)
    bad = 0
    for low in range(0, tiles_of_keys, tiles_each):
        high = tl.minimum(low + tiles_each, full_tiles)
        is_end = low + tiles_each >= tiles_of_keys
        for step in range(0, decode(entries)):
            b = outer * decode(entries) + step
            q_tile = load_tile(rows_pointer(q, strides.q, b, h, first, c), q_offsets, q_len - first, True, c.TILE_Q, c.D, c.D_PAD)
            do_pointer = rows_pointer(inputs.do, strides.dout, b, h, first, c)
            douts = load_tile(do_pointer, do_offsets, q_len - first, True, c.TILE_Q, c.DV, c.DV_PAD)
            out_pointer = rows_pointer(inputs.out, strides.out, b, h, first, c)
            outs = load_tile(out_pointer, out_offsets, q_len - first, True, c.TILE_Q, c.DV, c.DV_PAD)
            head = (b * decode(size.heads) + h).to(tl.int64) * q_len
            row_lse, row_delta = prepare_row_stats(
                outs, douts, inputs.lse, inputs.dlse, inputs.lse2, inputs.delta, head + rows, rows < q_len
            )
            acc = tl.zeros([c.TILE_Q, c.D_PAD], tl.float32)
            if SUMMED:
                dq_partial = outputs.dq_partials + (tl.program_id(0).to(tl.int64) * decode(entries) + step) * (c.TILE_Q * c.D_PAD)
                acc = tl.load(dq_partial + offsets, mask=(offsets >= 0) & (b * 0 + low > 0), other=0.0)
            queries = QueryTile(q_tile, douts, row_lse, row_delta, b, h, kv_h, rows, q_len, kv_len, target)
            entry = b - outer * decode(entries)
            is_first = (entry == 0).to(tl.int32)
            is_last = (entry == decode(entries) - 1).to(tl.int32)
            is_back = entry % 2 != 0
            run = KeyRun(low, high, is_back, is_first, is_last, partials)
            acc = accumulate_bias_gradient(acc, KeysValues(k, v), queries, run, args, c, both, mask, CONTIGUOUS, False)
            edge_partials = partials
            if SUMMED:
                edge_partials = partials + (full_tiles - low) * (c.TILE_Q * c.TILE_KV)
            edge_low = low * 0 + full_tiles
            edge_high = tl.where(is_end, tiles_of_keys, full_tiles)
            edge_run = KeyRun(edge_low, edge_high, is_back, is_first, is_last, edge_partials)
            acc = accumulate_bias_gradient(acc, KeysValues(k, v), queries, edge_run, args, c, both, mask, CONTIGUOUS, True)
            if SUMMED:
                tl.store(dq_partial + offsets, acc, mask=(offsets >= 0) & (is_end == 0))
                # other threads read these partial sums for the next entry
                tl.debug_barrier()
            pointer = rows_pointer(outputs.dq, strides.dq, b, h, first, c)
            tl.store(pointer + store, (acc * (args.numbers.scale * sign)).to(outputs.dq.dtype.element_ty), mask=inside & is_end)
            if outputs.flags is not None:
                bad = tl.maximum(bad, tl.max(tl.where(is_finite(acc), 0, 1)))
    if outputs.flags is not None:
        tl.store(outputs.flags + tl.program_id(0), bad)
