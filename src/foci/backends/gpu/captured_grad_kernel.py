# mypy: ignore-errors
"""Gradients of captured tensors, repeatable: sums in a fixed order, or in integers, whose order does not matter.

`grad[slot][indices] += dscore * weight` over b, h, q and kv, where dscore = p (dp - delta) is the gradient of the score function's value,
and weight the derivative of the score with respect to one read. If the read is inside a reduction over a captured row, the sum also runs
over the row's entries. Tiles are recomputed: nothing of size Sq x Skv is stored but the gradient itself.

    q, k, v, do, lse2, delta    as in `foci.backends.gpu.backward`
    g, x                        [TILE_Q, TILE_KV]: dscore, and the scaled product that the score function is given
    part                        generated function: (weight, offset in the gradient) of one read
"""

import triton
import triton.language as tl

from foci.backends.gpu.backward import load_row_stats, recompute_weights, value_product
from foci.backends.gpu.dweights import with_flow
from foci.backends.gpu.tile_table_kernels import EMPTY, FULL, PARTIAL
from foci.backends.gpu.tiles import FORCED, decode, keep_tile, load_streamed_tile, sequence


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
    """Compute (dscore of a tile, 0 where masked; the scaled product; q_idx; kv_idx).

    kv_tile may carry the flag FORCED, see `tiles.tile_start`.
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
    # S = Q K^T and dP = dO V^T - delta
    qk = tl.dot(queries, tl.trans(keys), input_precision=c.PRECISION)
    if c.NEGATIVE:
        qk = -qk
    dp = value_product(douts, values, row_delta, 1, c)
    q_idx = rows[:, None]
    kv_idx = (kv_first + tl.arange(0, c.TILE_KV))[None, :]
    # P = exp2(S - lse), masked
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
    """(contribution of each position, its offset in the gradient). entry: index into the row that a reduction reads."""
    weight, offset = part(x, b, h, q_idx, kv_idx, span[1], span[3], env, entry)
    return tl.where(g != 0.0, g * weight, 0.0), offset


@triton.jit
def accumulate_contribution(
    acc, out, g, x, b, h, q_idx, kv_idx, span, env, limit, at, entries, part: tl.constexpr, HOW: tl.constexpr, ENTRIES: tl.constexpr
):
    """Add one tile's contributions: to `acc`, or with ENTRIES to the program's own sums in memory, at `out + at`."""
    if not ENTRIES:
        if HOW == "scatter":
            scatter_contribution(out, contribution(g, x, b, h, q_idx, kv_idx, span, 0, env, part), limit)
            return acc
        else:
            return reduce_contribution(acc, contribution(g, x, b, h, q_idx, kv_idx, span, 0, env, part)[0], HOW)
    else:
        for entry in range(0, decode(entries)):
            part_value = contribution(g, x, b, h, q_idx, kv_idx, span, entry, env, part)
            if HOW == "scatter":
                scatter_contribution(out, part_value, limit)
            elif HOW == "largest":
                acc = reduce_contribution(acc, part_value[0], HOW)
            else:
                here = out + at * decode(entries) + entry
                tl.store(here, reduce_contribution(tl.load(here), part_value[0], HOW))
        return acc


@triton.jit
def reduce_contribution(acc, g, HOW: tl.constexpr):
    """Add a tile's contributions to `acc`, reduced as HOW says."""
    if HOW == "tile":
        return acc + g
    elif HOW == "columns":
        return acc + tl.sum(g, 0)
    elif HOW == "rows":
        return acc + tl.sum(g, 1)
    else:
        return tl.maximum(acc, tl.max(tl.abs(g), 1))


@triton.jit
def scatter_contribution(out, part_value, limit):
    """Add each contribution atomically, as an integer multiple of a unit, so that the order does not matter."""
    g, offset = part_value
    units = tl.load(limit)
    tl.atomic_add(out + (g * 0.0).to(tl.int64) + offset, (g.to(tl.float64) * units).to(tl.int64), mask=g != 0.0, sem="relaxed")


@triton.jit
def tile_class(block_classes, shape, b, h, q_tile, kv_tile):
    """Class of a tile by the caller's block mask; PARTIAL without one. `shape`: see `captured_grad`."""
    tile_kind = q_tile * 0 + PARTIAL
    if block_classes is not None:
        b_stride, h_stride, width, per_q, per_kv = shape
        block = (q_tile // decode(per_q)) * decode(width) + kv_tile // decode(per_kv)
        tile_kind = tl.load(block_classes + b.to(tl.int64) * decode(b_stride) + h * decode(h_stride) + block).to(tl.int32)
    return tile_kind


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
    block_classes,
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

    HOW:
        "tile": the read depends on q and kv.
        "rows", "columns": on one of them at most; the kernel sums over the other.
        "largest": the largest size of a contribution, which fixes the unit of "scatter".
        "scatter": anywhere; contributions are added as integer multiples of `limit`'s unit, in any order.
    ENTRIES: the read is inside a reduction; each row or column has as many sums, side by side, as `loops` says, initially 0.
    CONTIGUOUS: rows of a tile are 8 n elements apart, n given as their stride, and columns adjacent.
    loops: (batch entries, heads, query tiles, key tiles, batch entries and heads summed here, longest lengths, entries), encoded.
    block_classes: classes of the caller's block mask, or None.
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
        tile_kind = tile_class(block_classes, shape, b, h, q_tile, kv_tile)
        if (q_tile * c.TILE_Q < q_len) & (kv_tile * c.TILE_KV < kv_len) & (tile_kind != EMPTY):
            tile = kv_tile + tl.where(tile_kind == FULL, FORCED, 0)
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
    """Store a tile of a gradient that is indexed by q and kv."""
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
