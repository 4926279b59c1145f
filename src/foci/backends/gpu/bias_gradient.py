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

import triton
import triton.language as tl

from foci.backends.gpu.backward import prepare_row_stats, recompute_weights, score_gradient
from foci.backends.gpu.dweights import with_flow
from foci.backends.gpu.tiles import decode, keep_tile, load_streamed_tile, load_tile, rows_pointer, tile_offsets

__all__ = ["attention_bias_gradient"]


@triton.jit
def flatten_tile(x, c):
    """Flatten a tile in the order of registers: in an mma product a thread has pairs of columns, in rows eight apart. So memory accesses
    coalesce."""
    parts = tl.reshape(x, [c.TILE_Q // 16, 2, 8, c.TILE_KV // 8, 4, 2])
    return tl.reshape(tl.permute(parts, [3, 0, 2, 4, 1, 5]), [c.TILE_Q * c.TILE_KV])


@triton.jit
def unflatten_tile(x, c):
    """Inverse of `flatten_tile`."""
    parts = tl.reshape(x, [c.TILE_KV // 8, c.TILE_Q // 16, 8, 4, 2, 2])
    return tl.reshape(tl.permute(parts, [1, 4, 2, 0, 3, 5]), [c.TILE_Q, c.TILE_KV])


@triton.jit
def accumulate_bias_gradient(
    dq, queries, k, v, target, sums, at, run, params, c, both: tl.constexpr, mask: tl.constexpr, SUMMED: tl.constexpr,
    CONTIGUOUS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Accumulate tiles of keys `run` into dq of one tile of queries, as `backward.accumulate_dq`, and g into `sums`; the last entry's
    total goes to `target`. `params`: strides, strides of the target, numbers, environment."""
    q, do, lse2, delta = queries
    strides, out_strides, numbers, env = params
    b, h, kv_h, rows, q_len, kv_len = at
    low, high, is_back, is_first, is_last = run
    q_idx = tl.minimum(rows, q_len - 1)[:, None]
    for i in tl.range(low, high, num_stages=1 if EDGE else c.STAGES):
        # every second entry goes backwards: what the previous one stored last is still in the cache
        tile = tl.where(is_back, low + high - 1 - i, i) if SUMMED else b * 0 + i
        here = tile * c.TILE_KV
        # S = Q K^T and dP = dO V^T
        keys = load_streamed_tile(k, strides.k, b, kv_h, here * 0, here, kv_len, c, EDGE, c.TILE_KV, c.D, c.D_PAD)
        qk = tl.dot(q, tl.trans(keys), input_precision=c.PRECISION)
        if c.NEGATIVE:
            qk = -qk
        values = load_streamed_tile(v, strides.v, b, kv_h, here * 0, here, kv_len, c, EDGE, c.TILE_KV, c.DV, c.DV_PAD)
        dp = tl.dot(do, tl.trans(values), input_precision=c.PRECISION)
        columns = here + tl.arange(0, c.TILE_KV)
        kv_idx = columns[None, :]
        # P = exp2(S - lse), then g = P * (dP - delta)
        p, slope = recompute_weights(
            qk, lse2[:, None], (b, h, q_idx, kv_idx, q_len, kv_len, tile), numbers, env, c, both, mask, False, EDGE, True
        )
        if c.DROPOUT:
            dp = tl.where(keep_tile(numbers, b, h, q_idx, here, c.TILE_KV), dp * numbers.keep_factor, 0.0)
        dp = with_flow(dp, numbers, b, h, b, q_idx, columns[None, :], q_len, kv_len) - delta[:, None]
        g = p * dp
        if EDGE:
            g = tl.where(p == 0.0, 0.0, g)
        # add the earlier entries' sums; the last entry stores the total
        if SUMMED:
            partial = sums + (tile - low) * (c.TILE_Q * c.TILE_KV) + tl.arange(0, c.TILE_Q * c.TILE_KV)
            all_lanes = tl.full([c.TILE_Q * c.TILE_KV], 1, tl.int1)
            g += unflatten_tile(tl.load(partial, mask=all_lanes & (is_first == 0), other=0.0), c)
            tl.store(partial, flatten_tile(g, c), mask=all_lanes & (is_last == 0))
        if CONTIGUOUS:
            pointer = target + rows.to(tl.int64)[:, None] * (decode(out_strides.s) * 8) + columns[None, :]
        else:
            pointer = target + rows.to(tl.int64)[:, None] * decode(out_strides.s) + columns.to(tl.int64)[None, :] * decode(out_strides.d)
        store_mask = (rows < q_len)[:, None] & (is_last != 0)
        if EDGE:
            store_mask = store_mask & (columns < kv_len)[None, :]
        tl.store(pointer, g.to(target.dtype.element_ty), mask=store_mask)
        # dQ += dS K
        ds = score_gradient(p, dp, slope, c, EDGE)
        dq = tl.dot(ds.to(keys.dtype), keys, dq, input_precision=c.PRECISION)
    return dq


@triton.jit
def attention_bias_gradient(
    q,
    k,
    v,
    out,
    do,
    lse,
    dlse,
    lse2,
    delta,
    dq,
    target,
    sums,
    dq_partials,
    strides,
    out_strides,
    size,
    loops,
    numbers,
    env,
    c,
    both: tl.constexpr,
    mask: tl.constexpr,
    SUMMED: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
):
    """dq of one tile of queries of each batch entry that the gradient is summed over, those rows of the gradient, and their lse2 and delta.

    SUMMED: several entries; `sums` is float32 [programs, tiles of a stretch, TILE_Q * TILE_KV] in the order of registers, and `dq_partials`
    float32 [programs, entries, TILE_Q, D_PAD]. Else both are None. `loops`: (batch entries of a program, tiles of a stretch), encoded.
    """
    entries, stretch = loops
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
    here = target + outer.to(tl.int64) * (decode(out_strides.b) * unit) + h.to(tl.int64) * (decode(out_strides.h) * unit)
    q_offsets = tile_offsets(strides.q, c, c.TILE_Q, c.D_PAD)
    do_offsets = tile_offsets(strides.dout, c, c.TILE_Q, c.DV_PAD)
    out_offsets = tile_offsets(strides.out, c, c.TILE_Q, c.DV_PAD)
    store = tile_offsets(strides.dq, c, c.TILE_Q, c.D_PAD)
    inside = (rows < q_len)[:, None] & (tl.arange(0, c.D_PAD)[None, :] < c.D)
    offsets = tl.arange(0, c.TILE_Q)[:, None] * c.D_PAD + tl.arange(0, c.D_PAD)[None, :]
    sign = -1.0 if c.NEGATIVE else 1.0
    partials = sums
    if SUMMED:
        partials = sums + tl.program_id(0).to(tl.int64) * decode(stretch) * (c.TILE_Q * c.TILE_KV)
    full_tiles = kv_len // c.TILE_KV
    tiles_each = decode(stretch)
    tiles_of_keys = tl.cdiv(kv_len, c.TILE_KV)
    for low in range(0, tiles_of_keys, tiles_each):
        high = tl.minimum(low + tiles_each, full_tiles)
        is_end = low + tiles_each >= tiles_of_keys
        for step in range(0, decode(entries)):
            b = outer * decode(entries) + step
            queries = load_tile(rows_pointer(q, strides.q, b, h, first, c), q_offsets, q_len - first, True, c.TILE_Q, c.D, c.D_PAD)
            douts = load_tile(rows_pointer(do, strides.dout, b, h, first, c), do_offsets, q_len - first, True, c.TILE_Q, c.DV, c.DV_PAD)
            outs = load_tile(rows_pointer(out, strides.out, b, h, first, c), out_offsets, q_len - first, True, c.TILE_Q, c.DV, c.DV_PAD)
            head = (b * decode(size.heads) + h).to(tl.int64) * q_len
            row_lse, row_delta = prepare_row_stats(outs, douts, lse, dlse, lse2, delta, head + rows, rows < q_len)
            acc = tl.zeros([c.TILE_Q, c.D_PAD], tl.float32)
            if SUMMED:
                dq_partial = dq_partials + (tl.program_id(0).to(tl.int64) * decode(entries) + step) * (c.TILE_Q * c.D_PAD)
                acc = tl.load(dq_partial + offsets, mask=(offsets >= 0) & (b * 0 + low > 0), other=0.0)
            at = (b, h, kv_h, rows, q_len, kv_len)
            entry = b - outer * decode(entries)
            is_first = (entry == 0).to(tl.int32)
            is_last = (entry == decode(entries) - 1).to(tl.int32)
            is_back = entry % 2 != 0
            run = (low, high, is_back, is_first, is_last)
            q_do = (queries, douts, row_lse, row_delta)
            params = (strides, out_strides, numbers, env)
            acc = accumulate_bias_gradient(acc, q_do, k, v, here, partials, at, run, params, c, both, mask, SUMMED, CONTIGUOUS, False)
            edge_partials = partials
            if SUMMED:
                edge_partials = partials + (full_tiles - low) * (c.TILE_Q * c.TILE_KV)
            edge_run = (low * 0 + full_tiles, tl.where(is_end, tiles_of_keys, full_tiles), is_back, is_first, is_last)
            acc = accumulate_bias_gradient(
                acc, q_do, k, v, here, edge_partials, at, edge_run, params, c, both, mask, SUMMED, CONTIGUOUS, True
            )
            if SUMMED:
                tl.store(dq_partial + offsets, acc, mask=(offsets >= 0) & (is_end == 0))
                # other threads read these partial sums for the next entry
                tl.debug_barrier()
            pointer = rows_pointer(dq, strides.dq, b, h, first, c)
            tl.store(pointer + store, (acc * (numbers.scale * sign)).to(dq.dtype.element_ty), mask=inside & is_end)
