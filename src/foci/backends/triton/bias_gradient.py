# mypy: ignore-errors
"""dq with the gradient of a captured tensor that is read at each (q, kv), a learned bias: the tiles of both are the same.

One program has a tile of queries of every batch entry that the gradient is summed over, one after the other. Of the keys it takes
a stretch at a time: the sums of a stretch, and each entry's dq, wait in memory of the program's own until they are whole, in float32
and always in the same order.
"""

import triton
import triton.language as tl

from foci.backends.triton.backward import prepare_row_stats, recompute_weights, score_gradient
from foci.backends.triton.dweights import with_flow
from foci.backends.triton.tiles import decode, keep_tile, load_streamed_tile, load_tile, rows_pointer, tile_offsets

__all__ = ["attention_bias_gradient"]


@triton.jit
def flatten_tile(x, c):
    """A tile of scores as registers hold it: of a product on tensor cores a thread has pairs of columns, in rows eight apart."""
    parts = tl.reshape(x, [c.TILE_Q // 16, 2, 8, c.TILE_KV // 8, 4, 2])
    return tl.reshape(tl.permute(parts, [3, 0, 2, 4, 1, 5]), [c.TILE_Q * c.TILE_KV])


@triton.jit
def unflatten_tile(x, c):
    """Undoes `flatten_tile`."""
    parts = tl.reshape(x, [c.TILE_KV // 8, c.TILE_Q // 16, 8, 4, 2, 2])
    return tl.reshape(tl.permute(parts, [1, 4, 2, 0, 3, 5]), [c.TILE_Q, c.TILE_KV])


@triton.jit
def accumulate_bias_gradient(
    dq, queries, k, v, target, sums, at, run, given, c, both: tl.constexpr, mask: tl.constexpr, SUMMED: tl.constexpr,
    CONTIGUOUS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Adds the tiles of keys `run` to dq of a tile of `queries`, as `backward.accumulate_dq` has them, and their scores' gradients to
    `sums`; the last entry's to `target`. `given`: strides, those of the target, numbers, environment."""
    q, do, lse2, delta = queries
    strides, out_strides, numbers, env = given
    b, h, kv_h, rows, q_len, kv_len = at
    low, high, is_back, is_first, is_last = run
    q_idx = tl.minimum(rows, q_len - 1)[:, None]
    for i in tl.range(low, high, num_stages=1 if EDGE else c.STAGES):
        # every other entry goes back: what the one before it left last is still in the cache
        tile = tl.where(is_back, low + high - 1 - i, i) if SUMMED else b * 0 + i
        here = tile * c.TILE_KV
        keys = load_streamed_tile(k, strides.k, b, kv_h, here * 0, here, kv_len, c, EDGE, c.TILE_KV, c.D, c.D_PAD)
        qk = tl.dot(q, tl.trans(keys), input_precision=c.PRECISION)
        if c.NEGATIVE:
            qk = -qk
        values = load_streamed_tile(v, strides.v, b, kv_h, here * 0, here, kv_len, c, EDGE, c.TILE_KV, c.DV, c.DV_PAD)
        dp = tl.dot(do, tl.trans(values), input_precision=c.PRECISION)
        columns = here + tl.arange(0, c.TILE_KV)
        kv_idx = columns[None, :]
        p, slope = recompute_weights(
            qk, lse2[:, None], (b, h, q_idx, kv_idx, q_len, kv_len, tile), numbers, env, c, both, mask, False, EDGE, True
        )
        if c.DROPOUT:
            dp = tl.where(keep_tile(numbers, b, h, q_idx, here, c.TILE_KV), dp * numbers.keep_factor, 0.0)
        dp = with_flow(dp, numbers, b, h, b, q_idx, columns[None, :], q_len, kv_len) - delta[:, None]
        g = p * dp
        if EDGE:
            g = tl.where(p == 0.0, 0.0, g)
        if SUMMED:
            own = sums + (tile - low) * (c.TILE_Q * c.TILE_KV) + tl.arange(0, c.TILE_Q * c.TILE_KV)
            whole = tl.full([c.TILE_Q * c.TILE_KV], 1, tl.int1)
            g += unflatten_tile(tl.load(own, mask=whole & (is_first == 0), other=0.0), c)
            tl.store(own, flatten_tile(g, c), mask=whole & (is_last == 0))
        if CONTIGUOUS:
            place = target + rows.to(tl.int64)[:, None] * (decode(out_strides.s) * 8) + columns[None, :]
        else:
            place = target + rows.to(tl.int64)[:, None] * decode(out_strides.s) + columns.to(tl.int64)[None, :] * decode(out_strides.d)
        there = (rows < q_len)[:, None] & (is_last != 0)
        if EDGE:
            there = there & (columns < kv_len)[None, :]
        tl.store(place, g.to(target.dtype.element_ty), mask=there)
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
    waiting,
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
    """dq of one tile of queries of each batch entry that a gradient is summed over, the gradient's rows, and the rows' numbers.

    `target` is the gradient, [B or 1, Hq, Sq, Skv] by `out_strides`. SUMMED: its programs' sums, float32 [programs, tiles of a stretch,
    TILE_Q * TILE_KV] in the order of registers, and dq on the way, float32 [programs, entries, TILE_Q, D_PAD]; else None. `loops`:
    batch entries of a program, tiles of a stretch, encoded.
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
    lying = tl.arange(0, c.TILE_Q)[:, None] * c.D_PAD + tl.arange(0, c.D_PAD)[None, :]
    sign = -1.0 if c.NEGATIVE else 1.0
    own = sums
    if SUMMED:
        own = sums + tl.program_id(0).to(tl.int64) * decode(stretch) * (c.TILE_Q * c.TILE_KV)
    whole = kv_len // c.TILE_KV
    per = decode(stretch)
    tiles_of_keys = tl.cdiv(kv_len, c.TILE_KV)
    for low in range(0, tiles_of_keys, per):
        high = tl.minimum(low + per, whole)
        is_end = low + per >= tiles_of_keys
        for step in range(0, decode(entries)):
            b = outer * decode(entries) + step
            queries = load_tile(rows_pointer(q, strides.q, b, h, first, c), q_offsets, q_len - first, True, c.TILE_Q, c.D, c.D_PAD)
            douts = load_tile(rows_pointer(do, strides.dout, b, h, first, c), do_offsets, q_len - first, True, c.TILE_Q, c.DV, c.DV_PAD)
            outs = load_tile(rows_pointer(out, strides.out, b, h, first, c), out_offsets, q_len - first, True, c.TILE_Q, c.DV, c.DV_PAD)
            head = (b * decode(size.heads) + h).to(tl.int64) * q_len
            row_lse, row_delta = prepare_row_stats(outs, douts, lse, dlse, lse2, delta, head + rows, rows < q_len)
            acc = tl.zeros([c.TILE_Q, c.D_PAD], tl.float32)
            if SUMMED:
                kept = waiting + (tl.program_id(0).to(tl.int64) * decode(entries) + step) * (c.TILE_Q * c.D_PAD)
                acc = tl.load(kept + lying, mask=(lying >= 0) & (b * 0 + low > 0), other=0.0)
            at = (b, h, kv_h, rows, q_len, kv_len)
            turn = b - outer * decode(entries)
            is_first = (turn == 0).to(tl.int32)
            is_last = (turn == decode(entries) - 1).to(tl.int32)
            is_back = turn % 2 != 0
            run = (low, high, is_back, is_first, is_last)
            mine = (queries, douts, row_lse, row_delta)
            given = (strides, out_strides, numbers, env)
            acc = accumulate_bias_gradient(acc, mine, k, v, here, own, at, run, given, c, both, mask, SUMMED, CONTIGUOUS, False)
            past = own
            if SUMMED:
                past = own + (whole - low) * (c.TILE_Q * c.TILE_KV)
            last = (low * 0 + whole, tl.where(is_end, tiles_of_keys, whole), is_back, is_first, is_last)
            acc = accumulate_bias_gradient(acc, mine, k, v, here, past, at, last, given, c, both, mask, SUMMED, CONTIGUOUS, True)
            if SUMMED:
                tl.store(kept + lying, acc, mask=(lying >= 0) & (is_end == 0))
                # what one entry leaves in memory, threads of the next read
                tl.debug_barrier()
            pointer = rows_pointer(dq, strides.dq, b, h, first, c)
            tl.store(pointer + store, (acc * (numbers.scale * sign)).to(dq.dtype.element_ty), mask=inside & is_end)
