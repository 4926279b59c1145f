# mypy: ignore-errors
"""Gradients of captured tensors, repeatable: sums in a fixed order, or in whole numbers, whose order does not matter.

`grad[slot][indices] += dscore * weight` over b, h, q and kv, with dscore = p (dp - delta) the gradient of the score
function's value. Tiles are computed anew: nothing of size Sq x Skv is kept but the gradient itself.
"""

import triton
import triton.language as tl

from foci.backends.triton.backward import weights_of
from foci.backends.triton.flow import with_flow
from foci.backends.triton.tiles import keep_tile, number, sequence, stream_tile


@triton.jit
def contribution(
    q,
    k,
    v,
    do,
    lse2,
    delta,
    strides,
    size,
    b,
    h,
    q_tile,
    kv_tile,
    span,
    numbers,
    env,
    c,
    part: tl.constexpr,
    mask: tl.constexpr,
    score: tl.constexpr,
    EDGE: tl.constexpr,
):
    """(contribution of each place of a tile, 0 where masked; its offset in the gradient, for a scatter)."""
    q_start, q_len, kv_start, kv_len, memory_b = span
    kv_h = h // number(size.group)
    q_first = q_tile * c.TILE_Q
    kv_first = kv_tile * c.TILE_KV
    rows = q_first + tl.arange(0, c.TILE_Q)
    queries = stream_tile(q, strides.q, memory_b, h, q_start, q_first, q_len, c, EDGE, c.TILE_Q, c.D, c.D_PAD)
    keys = stream_tile(k, strides.k, memory_b, kv_h, kv_start, kv_first, kv_len, c, EDGE, c.TILE_KV, c.D, c.D_PAD)
    values = stream_tile(v, strides.v, memory_b, kv_h, kv_start, kv_first, kv_len, c, EDGE, c.TILE_KV, c.DV, c.DV_PAD)
    douts = stream_tile(do, strides.dout, memory_b, h, q_start, q_first, q_len, c, EDGE, c.TILE_Q, c.DV, c.DV_PAD)
    head = (memory_b * number(size.heads) + h).to(tl.int64) * number(size.rows) + q_start
    if EDGE:
        row_lse = tl.load(lse2 + head + rows, mask=rows < q_len, other=float("inf"))
        row_delta = tl.load(delta + head + rows, mask=rows < q_len, other=0.0)
    else:
        row_lse = tl.load(lse2 + head + rows)
        row_delta = tl.load(delta + head + rows)
    qk = tl.dot(queries, tl.trans(keys), input_precision=c.PRECISION)
    if c.NEGATIVE:
        qk = -qk
    dp = tl.dot(douts, tl.trans(values), input_precision=c.PRECISION)
    q_idx = rows[:, None]
    kv_idx = (kv_first + tl.arange(0, c.TILE_KV))[None, :]
    where = (b, h, q_idx, kv_idx, q_len, kv_len, kv_tile)
    p, _ = weights_of(qk, row_lse[:, None], where, numbers, env, c, score, mask, True, EDGE)
    inner_q = q_idx
    inner_kv = kv_idx
    if EDGE:
        inner_q = tl.minimum(q_idx, q_len - 1)
        inner_kv = tl.minimum(kv_idx, kv_len - 1)
    if c.DROPOUT:
        dp = tl.where(keep_tile(numbers, b, h, inner_q, kv_first, c.TILE_KV), dp * numbers.keep_factor, 0.0)
    dp = with_flow(dp, numbers, b, h, memory_b, q_idx, kv_idx, q_len, kv_len)
    weight, offset = part(qk * numbers.scale, b, h, inner_q, inner_kv, q_len, kv_len, env)
    return tl.where(p != 0.0, p * (dp - row_delta[:, None]) * weight, 0.0), offset


@triton.jit
def capture_gradient(
    q,
    k,
    v,
    do,
    lse2,
    delta,
    out,
    limit,
    strides,
    size,
    spans,
    loops,
    out_strides,
    numbers,
    env,
    c,
    part: tl.constexpr,
    mask: tl.constexpr,
    score: tl.constexpr,
    HOW: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
):
    """Gradient of one read of a captured tensor.

    HOW: "tile", the read varies over q and kv; "rows" or "columns", over one of them at most: sums over the other; "largest", the
    largest size of a contribution; "scatter", anywhere: contributions as whole multiples of `limit`'s unit, added in any order.
    CONTIGUOUS: a tile's rows lie 8 n elements apart, n given as their stride, and its columns side by side. `loops` is (batch
    entries, heads, tiles of queries, tiles of keys, batch entries and heads summed here, longest lengths), encoded.
    """
    batches, heads, q_tiles, kv_tiles, inner_b, inner_h, row_limit, column_limit = loops
    pid = tl.program_id(0)
    if HOW == "tile":
        kv_tile = pid % number(kv_tiles)
        pid = pid // number(kv_tiles)
    if HOW != "columns":
        q_tile = pid % number(q_tiles)
        pid = pid // number(q_tiles)
    else:
        kv_tile = pid % number(kv_tiles)
        pid = pid // number(kv_tiles)
    first_h = (pid % number(heads)) * number(inner_h)
    first_b = (pid // number(heads)) * number(inner_b)
    if HOW == "tile":
        acc = tl.zeros([c.TILE_Q, c.TILE_KV], tl.float32)
        steps = number(inner_b) * number(inner_h)
    elif HOW == "columns":
        acc = tl.zeros([c.TILE_KV], tl.float32)
        steps = number(q_tiles)
    else:
        acc = tl.zeros([c.TILE_Q], tl.float32)
        steps = number(kv_tiles)
    b = first_b
    h = first_h
    for step in range(0, steps):
        if HOW == "tile":
            b = first_b + step // number(inner_h)
            h = first_h + step % number(inner_h)
        elif HOW == "columns":
            q_tile = step
        else:
            kv_tile = step
        q_start, q_len, kv_start, kv_len = sequence(spans, size, b, c)
        span = (q_start, q_len, kv_start, kv_len, b * 0 if c.JAGGED else b)
        if (q_tile * c.TILE_Q < q_len) & (kv_tile * c.TILE_KV < kv_len):
            if ((q_tile + 1) * c.TILE_Q <= q_len) & ((kv_tile + 1) * c.TILE_KV <= kv_len):
                g, offset = contribution(
                    q, k, v, do, lse2, delta, strides, size, b, h, q_tile, kv_tile, span, numbers, env, c, part, mask, score, False
                )
            else:
                g, offset = contribution(
                    q, k, v, do, lse2, delta, strides, size, b, h, q_tile, kv_tile, span, numbers, env, c, part, mask, score, True
                )
            if HOW == "tile":
                acc += g
            elif HOW == "columns":
                acc += tl.sum(g, 0)
            elif HOW == "rows":
                acc += tl.sum(g, 1)
            elif HOW == "largest":
                acc = tl.maximum(acc, tl.max(tl.abs(g), 1))
            else:
                units = tl.load(limit)
                tl.atomic_add(out + (g * 0.0).to(tl.int64) + offset, (g.to(tl.float64) * units).to(tl.int64), mask=g != 0.0, sem="relaxed")
    rows = tl.arange(0, c.TILE_Q)
    columns = tl.arange(0, c.TILE_KV)
    if HOW != "scatter":
        base = out + first_b.to(tl.int64) * number(out_strides.b) + first_h.to(tl.int64) * number(out_strides.h)
        if HOW == "tile":
            rows = q_tile * c.TILE_Q + rows
            columns = kv_tile * c.TILE_KV + columns
            inside = (rows < number(row_limit))[:, None] & (columns < number(column_limit))[None, :]
            if CONTIGUOUS:
                at = base + rows.to(tl.int64)[:, None] * (number(out_strides.s) * 8) + columns[None, :]
            else:
                at = base + rows.to(tl.int64)[:, None] * number(out_strides.s) + columns.to(tl.int64)[None, :] * number(out_strides.d)
            if ((q_tile + 1) * c.TILE_Q <= number(row_limit)) & ((kv_tile + 1) * c.TILE_KV <= number(column_limit)):
                tl.store(at, acc.to(out.dtype.element_ty))
            else:
                tl.store(at, acc.to(out.dtype.element_ty), mask=inside)
        elif HOW == "columns":
            columns = kv_tile * c.TILE_KV + columns
            tl.store(base + columns, acc)
        else:
            rows = q_tile * c.TILE_Q + rows
            tl.store(base + rows, acc)
