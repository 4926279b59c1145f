# mypy: ignore-errors
"""Gradients of captured tensors, repeatable: sums in a fixed order, or in whole numbers, whose order does not matter.

`grad[slot][indices] += dscore * weight` over b, h, q and kv, with dscore = p (dp - delta) the gradient of the score
function's value; where the read is inside a reduction over a captured row, over the row's entries too. Tiles are computed
anew: nothing of size Sq x Skv is kept but the gradient itself.
"""

import triton
import triton.language as tl

from foci.backends.triton.backward import load_row_stats, recompute_weights, value_product
from foci.backends.triton.dweights import with_flow
from foci.backends.triton.tile_table_kernels import EMPTY, FULL, PARTIAL
from foci.backends.triton.tiles import FORCED, decode, keep_tile, load_streamed_tile, sequence


@triton.jit
def dscore(
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
    q_first,
    kv_tile,
    span,
    numbers,
    env,
    c,
    mask: tl.constexpr,
    score: tl.constexpr,
    EDGE: tl.constexpr,
):
    """(gradient of the score function's value at each place of a tile, 0 where masked; the scaled product; q_idx; kv_idx).

    kv_tile counts as FORCED says in `tiles.tile_start`.
    """
    q_start, q_len, kv_start, kv_len, memory_b = span
    kv_h = h // decode(size.group)
    kv_first = (kv_tile & (FORCED - 1)) * c.TILE_KV
    rows = q_first + tl.arange(0, c.TILE_Q)
    queries = load_streamed_tile(q, strides.q, memory_b, h, q_start, q_first, q_len, c, EDGE, c.TILE_Q, c.D, c.D_PAD)
    keys = load_streamed_tile(k, strides.k, memory_b, kv_h, kv_start, kv_first, kv_len, c, EDGE, c.TILE_KV, c.D, c.D_PAD)
    values = load_streamed_tile(v, strides.v, memory_b, kv_h, kv_start, kv_first, kv_len, c, EDGE, c.TILE_KV, c.DV, c.DV_PAD)
    douts = load_streamed_tile(do, strides.dout, memory_b, h, q_start, q_first, q_len, c, EDGE, c.TILE_Q, c.DV, c.DV_PAD)
    head = (memory_b * decode(size.heads) + h).to(tl.int64) * decode(size.rows) + q_start
    row_lse, row_delta = load_row_stats(lse2, delta, head, rows, q_len, c, EDGE)
    qk = tl.dot(queries, tl.trans(keys), input_precision=c.PRECISION)
    if c.NEGATIVE:
        qk = -qk
    dp = value_product(douts, values, row_delta, 1, c)
    q_idx = rows[:, None]
    kv_idx = (kv_first + tl.arange(0, c.TILE_KV))[None, :]
    p, _ = recompute_weights(
        qk, row_lse[:, None], (b, h, q_idx, kv_idx, q_len, kv_len, kv_tile), numbers, env, c, score, mask, True, EDGE, True
    )
    inner_q = q_idx
    inner_kv = kv_idx
    if EDGE:
        inner_q = tl.minimum(q_idx, q_len - 1)
        inner_kv = tl.minimum(kv_idx, kv_len - 1)
    if c.DROPOUT:
        dp = tl.where(keep_tile(numbers, b, h, inner_q, kv_first, c.TILE_KV), dp * numbers.keep_factor, 0.0) - row_delta[:, None]
    dp = with_flow(dp, numbers, b, h, memory_b, q_idx, kv_idx, q_len, kv_len)
    return tl.where(p != 0.0, p * dp, 0.0), qk * numbers.scale, inner_q, inner_kv


@triton.jit
def contribution(g, x, b, h, q_idx, kv_idx, span, entry, env, part: tl.constexpr):
    """(contribution of each place, its offset in the gradient); entry counts through the rows that reductions read."""
    weight, offset = part(x, b, h, q_idx, kv_idx, span[1], span[3], env, entry)
    return tl.where(g != 0.0, g * weight, 0.0), offset


@triton.jit
def accumulate_contribution(
    acc, out, g, x, b, h, q_idx, kv_idx, span, env, limit, at, entries, part: tl.constexpr, HOW: tl.constexpr, ENTRIES: tl.constexpr
):
    """Adds what one tile contributes: to `acc`, or with ENTRIES of a row to the program's own sums in memory, at `out + at`."""
    if not ENTRIES:
        if HOW == "scatter":
            scatter_contribution(out, contribution(g, x, b, h, q_idx, kv_idx, span, 0, env, part), limit)
            return acc
        else:
            return reduce_contribution(acc, contribution(g, x, b, h, q_idx, kv_idx, span, 0, env, part)[0], HOW)
    else:
        for entry in range(0, decode(entries)):
            found = contribution(g, x, b, h, q_idx, kv_idx, span, entry, env, part)
            if HOW == "scatter":
                scatter_contribution(out, found, limit)
            elif HOW == "largest":
                acc = reduce_contribution(acc, found[0], HOW)
            else:
                here = out + at * decode(entries) + entry
                tl.store(here, reduce_contribution(tl.load(here), found[0], HOW))
        return acc


@triton.jit
def reduce_contribution(acc, g, HOW: tl.constexpr):
    """`acc` with a tile's contributions summed as HOW says."""
    if HOW == "tile":
        return acc + g
    elif HOW == "columns":
        return acc + tl.sum(g, 0)
    elif HOW == "rows":
        return acc + tl.sum(g, 1)
    else:
        return tl.maximum(acc, tl.max(tl.abs(g), 1))


@triton.jit
def scatter_contribution(out, found, limit):
    """Adds each contribution where it belongs, in whole multiples of a unit, so that their order does not matter."""
    g, offset = found
    units = tl.load(limit)
    tl.atomic_add(out + (g * 0.0).to(tl.int64) + offset, (g.to(tl.float64) * units).to(tl.int64), mask=g != 0.0, sem="relaxed")


@triton.jit
def tile_class(given, shape, b, h, q_tile, kv_tile):
    """Class of a tile by the caller's blocks, PARTIAL where there are none. `shape`: see `captured_grad`."""
    known = q_tile * 0 + PARTIAL
    if given is not None:
        b_stride, h_stride, width, per_q, per_kv = shape
        block = (q_tile // decode(per_q)) * decode(width) + kv_tile // decode(per_kv)
        known = tl.load(given + b.to(tl.int64) * decode(b_stride) + h * decode(h_stride) + block).to(tl.int32)
    return known


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
    given,
    shape,
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
    ENTRIES: tl.constexpr,
):
    """Gradient of one read of a captured tensor.

    HOW: "tile", the read varies over q and kv; "rows" or "columns", over one of them at most: sums over the other; "largest", the
    largest size of a contribution; "scatter", anywhere: contributions as whole multiples of `limit`'s unit, added in any order.
    ENTRIES: the read is inside a reduction; rows and columns have as many sums, side by side, as `loops` says, and start as zeros.
    CONTIGUOUS: a tile's rows lie 8 n elements apart, n given as their stride, and its columns side by side. `loops` is (batch
    entries, heads, tiles of queries, tiles of keys, batch entries and heads summed here, longest lengths, entries), encoded.
    `given`: classes of the caller's blocks, or None.
    """
    batches, heads, q_tiles, kv_tiles, inner_b, inner_h, row_limit, column_limit, entries = loops
    pid = tl.program_id(0)
    if HOW == "tile":
        kv_tile = pid % decode(kv_tiles)
        pid = pid // decode(kv_tiles)
    if HOW != "columns":
        q_tile = pid % decode(q_tiles)
        pid = pid // decode(q_tiles)
    else:
        kv_tile = pid % decode(kv_tiles)
        pid = pid // decode(kv_tiles)
    first_h = (pid % decode(heads)) * decode(inner_h)
    first_b = (pid // decode(heads)) * decode(inner_b)
    base = first_b.to(tl.int64) * decode(out_strides.b) + first_h.to(tl.int64) * decode(out_strides.h)
    if HOW == "tile":
        acc = tl.zeros([c.TILE_Q, c.TILE_KV], tl.float32)
        steps = decode(inner_b) * decode(inner_h)
        at = base
    elif HOW == "columns":
        acc = tl.zeros([c.TILE_KV], tl.float32)
        steps = decode(q_tiles)
        at = base + kv_tile * c.TILE_KV + tl.arange(0, c.TILE_KV)
    else:
        acc = tl.zeros([c.TILE_Q], tl.float32)
        steps = decode(kv_tiles)
        at = base + q_tile * c.TILE_Q + tl.arange(0, c.TILE_Q)
    b = first_b
    h = first_h
    for step in range(0, steps):
        if HOW == "tile":
            b = first_b + step // decode(inner_h)
            h = first_h + step % decode(inner_h)
        elif HOW == "columns":
            q_tile = step
        else:
            kv_tile = step
        q_start, q_len, kv_start, kv_len = sequence(spans, size, b, c)
        span = (q_start, q_len, kv_start, kv_len, b * 0 if c.JAGGED else b)
        known = tile_class(given, shape, b, h, q_tile, kv_tile)
        if (q_tile * c.TILE_Q < q_len) & (kv_tile * c.TILE_KV < kv_len) & (known != EMPTY):
            tile = kv_tile + tl.where(known == FULL, FORCED, 0)
            first = q_tile * c.TILE_Q
            if ((q_tile + 1) * c.TILE_Q <= q_len) & ((kv_tile + 1) * c.TILE_KV <= kv_len):
                g, x, q_idx, kv_idx = dscore(
                    q, k, v, do, lse2, delta, strides, size, b, h, first, tile, span, numbers, env, c, mask, score, False
                )
                acc = accumulate_contribution(acc, out, g, x, b, h, q_idx, kv_idx, span, env, limit, at, entries, part, HOW, ENTRIES)
            else:
                g, x, q_idx, kv_idx = dscore(
                    q, k, v, do, lse2, delta, strides, size, b, h, first, tile, span, numbers, env, c, mask, score, True
                )
                acc = accumulate_contribution(acc, out, g, x, b, h, q_idx, kv_idx, span, env, limit, at, entries, part, HOW, ENTRIES)
    if HOW == "tile":
        store_tile(acc, out + base, out_strides, q_tile, kv_tile, decode(row_limit), decode(column_limit), c, CONTIGUOUS)
    elif HOW == "largest" or (HOW != "scatter" and not ENTRIES):
        tl.store(out + at, acc)


@triton.jit
def store_tile(acc, base, out_strides, q_tile, kv_tile, row_limit, column_limit, c, CONTIGUOUS: tl.constexpr):
    """Writes a tile of a gradient that q and kv index."""
    rows = q_tile * c.TILE_Q + tl.arange(0, c.TILE_Q)
    columns = kv_tile * c.TILE_KV + tl.arange(0, c.TILE_KV)
    if CONTIGUOUS:
        at = base + rows.to(tl.int64)[:, None] * (decode(out_strides.s) * 8) + columns[None, :]
    else:
        at = base + rows.to(tl.int64)[:, None] * decode(out_strides.s) + columns.to(tl.int64)[None, :] * decode(out_strides.d)
    if ((q_tile + 1) * c.TILE_Q <= row_limit) & ((kv_tile + 1) * c.TILE_KV <= column_limit):
        tl.store(at, acc.to(base.dtype.element_ty))
    else:
        tl.store(at, acc.to(base.dtype.element_ty), mask=(rows < row_limit)[:, None] & (columns < column_limit)[None, :])
