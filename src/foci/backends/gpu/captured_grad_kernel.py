# mypy: ignore-errors
"""Gradients of captured tensors, repeatable: sums in a fixed order, or in integers, whose order does not matter.

`grad[slot][indices] += dscore * weight` over b, h, q and kv, where dscore = p (dp - delta) is the gradient of the score function's value,
and weight the derivative of the score with respect to one read. If the read is inside a reduction over a captured row, the sum also runs
over the row's entries. Tiles are recomputed: nothing of size Sq x Skv is stored but the gradient itself.

    q, k, v, do, lse2, delta    as in `foci.backends.gpu.backward`
    g, x                        [TILE_Q, TILE_KV]: dscore, and the scaled product that the score function is given
    part                        generated function: (weight, offset in the gradient) of one read
    args                        `CaptureArgs`
"""

from typing import Any, NamedTuple

import triton.language as tl

from foci.backends.gpu.backward import recompute_weights, value_product
from foci.backends.gpu.dweights import with_flow
from foci.backends.gpu.row_stats import load_row_stats
from foci.backends.gpu.tile_table_kernels import EMPTY, FULL, PARTIAL
from foci.backends.gpu.tiles import FORCED, HeadRows, Position, decode, keep_tile, load_streamed_tile, sequence
from foci.compat.jit import triton_jit


class BlockShape(NamedTuple):
    """Layout of the classes of the caller's block mask; encoded."""

    b_stride: int
    h_stride: int
    width: int  # blocks of a row
    per_q: int  # tiles of a block of queries
    per_kv: int  # tiles of a block of keys


class CaptureLoops(NamedTuple):
    """Counts of programs and of a program's loops, encoded."""

    batches: int  # of programs
    heads: int  # of programs
    q_tiles: int
    kv_tiles: int
    inner_b: int  # batch entries that a program sums over
    inner_h: int  # heads that a program sums over
    q_limit: int  # longest lengths
    kv_limit: int
    entries: int  # of a reduction


class CaptureArgs(NamedTuple):
    """A call's arguments, as in `foci.backends.gpu.kernel_args.CallArgs`, and those of the read."""

    lse2: Any
    delta: Any
    out: Any  # the gradient, or sums of it
    limit: Any  # float64 [1]: the unit of "scatter", or None
    block_classes: Any  # classes of the caller's block mask, or None
    shape: Any  # their `BlockShape`, or None
    strides: Any
    size: Any
    spans: Any
    loops: CaptureLoops
    out_strides: Any
    numbers: Any
    env: Any


class Gather(NamedTuple):
    """How contributions are gathered, see `capture_gradient`; each field is a `tl.constexpr`."""

    HOW: Any
    CONTIGUOUS: Any
    ENTRIES: Any


class Streams(NamedTuple):
    """Queries, keys, values and gradients of out in memory: pointers, or tensor descriptors."""

    q: Any
    k: Any
    v: Any
    do: Any


class TilePlace(NamedTuple):
    """A tile of scores, and its sequence in memory."""

    b: Any  # batch entry or sequence
    memory_b: Any  # batch entry in memory
    h: Any
    q_first: Any  # first query of the tile
    kv_tile: Any  # number of the tile of keys, which may carry the flag FORCED, see `tiles.tile_start`
    q_start: Any
    q_len: Any
    kv_start: Any
    kv_len: Any


class ScoreTile(NamedTuple):
    """The gradient of a tile of scores, and what a read's derivative depends on."""

    g: Any  # dscore, 0 where masked
    x: Any  # the scaled product
    q_idx: Any
    kv_idx: Any


@triton_jit
def dscore(streams, at, args, c, mask: tl.constexpr, score: tl.constexpr, EDGE: tl.constexpr):
    """Compute the `ScoreTile` at a `TilePlace`. `streams`: `Streams`."""
    b, h, memory_b, q_first = at.b, at.h, at.memory_b, at.q_first
    q_len, kv_len = at.q_len, at.kv_len
    strides, size = args.strides, args.size
    kv_h = h // decode(size.group)
    kv_first = (at.kv_tile & (FORCED - 1)) * c.TILE_KV
    q_head = HeadRows(memory_b, h, at.q_start, q_len)
    kv_head = HeadRows(memory_b, kv_h, at.kv_start, kv_len)
    rows = q_first + tl.arange(0, c.TILE_Q)
    queries = load_streamed_tile(streams.q, strides.q, q_head, q_first, c, EDGE, c.TILE_Q, c.D, c.D_PAD)
    keys = load_streamed_tile(streams.k, strides.k, kv_head, kv_first, c, EDGE, c.TILE_KV, c.D, c.D_PAD)
    values = load_streamed_tile(streams.v, strides.v, kv_head, kv_first, c, EDGE, c.TILE_KV, c.DV, c.DV_PAD)
    douts = load_streamed_tile(streams.do, strides.dout, q_head, q_first, c, EDGE, c.TILE_Q, c.DV, c.DV_PAD)
    head = (memory_b * decode(size.heads) + h).to(tl.int64) * decode(size.rows) + at.q_start
    row_lse, row_delta = load_row_stats(args.lse2, args.delta, head, rows, q_len, c, EDGE)
    # S = Q K^T and dP = dO V^T - delta
    qk = tl.dot(queries, tl.trans(keys), input_precision=c.PRECISION)
    if c.NEGATIVE:
        qk = -qk
    dp = value_product(douts, values, row_delta, 1, c)
    q_idx = rows[:, None]
    kv_idx = (kv_first + tl.arange(0, c.TILE_KV))[None, :]
    # P = exp2(S - lse), masked
    position = Position(b, h, q_idx, kv_idx, q_len, kv_len, at.kv_tile)
    p, _ = recompute_weights(qk, row_lse[:, None], position, args, c, score, mask, True, EDGE, True)
    inner_q = q_idx
    inner_kv = kv_idx
    if EDGE:
        inner_q = tl.minimum(q_idx, q_len - 1)
        inner_kv = tl.minimum(kv_idx, kv_len - 1)
    if c.DROPOUT:
        keep = keep_tile(args.numbers, b, h, inner_q, kv_first, c.TILE_KV)
        dp = tl.where(keep, dp * args.numbers.keep_factor, 0.0) - row_delta[:, None]
    dp = with_flow(dp, args.numbers, b, h, memory_b, q_idx, kv_idx, q_len, kv_len)
    return ScoreTile(tl.where(p != 0.0, p * dp, 0.0), qk * args.numbers.scale, inner_q, inner_kv)


@triton_jit
def contribution(tile, at, entry, env, part: tl.constexpr):
    """(contribution of each position, its offset in the gradient). `tile`: `ScoreTile`. entry: index into the row that a reduction
    reads."""
    weight, offset = part(tile.x, at.b, at.h, tile.q_idx, tile.kv_idx, at.q_len, at.kv_len, env, entry)
    return tl.where(tile.g != 0.0, tile.g * weight, 0.0), offset


@triton_jit
def accumulate_contribution(acc, tile, at, sums_at, args, part: tl.constexpr, gather):
    """Add one tile's contributions: to `acc`, or with ENTRIES to the program's own sums in memory, at `out + sums_at`."""
    if not gather.ENTRIES:
        if gather.HOW == "scatter":
            scatter_contribution(args.out, contribution(tile, at, 0, args.env, part), args.limit)
            return acc
        else:
            return reduce_contribution(acc, contribution(tile, at, 0, args.env, part)[0], gather.HOW)
    else:
        for entry in range(0, decode(args.loops.entries)):
            part_value = contribution(tile, at, entry, args.env, part)
            if gather.HOW == "scatter":
                scatter_contribution(args.out, part_value, args.limit)
            elif gather.HOW == "largest":
                acc = reduce_contribution(acc, part_value[0], gather.HOW)
            else:
                here = args.out + sums_at * decode(args.loops.entries) + entry
                tl.store(here, reduce_contribution(tl.load(here), part_value[0], gather.HOW))
        return acc


@triton_jit
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


@triton_jit
def scatter_contribution(out, part_value, limit):
    """Add each contribution atomically, as an integer multiple of a unit, so that the order does not matter."""
    g, offset = part_value
    units = tl.load(limit)
    tl.atomic_add(out + (g * 0.0).to(tl.int64) + offset, (g.to(tl.float64) * units).to(tl.int64), mask=g != 0.0, sem="relaxed")


@triton_jit
def tile_class(args, b, h, q_tile, kv_tile):
    """Class of a tile by the caller's block mask; PARTIAL without one."""
    tile_kind = q_tile * 0 + PARTIAL
    if args.block_classes is not None:
        shape = args.shape
        block = (q_tile // decode(shape.per_q)) * decode(shape.width) + kv_tile // decode(shape.per_kv)
        line = args.block_classes + b.to(tl.int64) * decode(shape.b_stride) + h * decode(shape.h_stride)
        tile_kind = tl.load(line + block).to(tl.int32)
    return tile_kind


@triton_jit
def capture_gradient(q, k, v, do, args, c, part: tl.constexpr, mask: tl.constexpr, score: tl.constexpr, gather):
    """Gradient of one read of a captured tensor. `gather`: `Gather`.

    HOW:
        "tile": the read depends on q and kv.
        "rows", "columns": on one of them at most; the kernel sums over the other.
        "largest": the largest size of a contribution, which fixes the unit of "scatter".
        "scatter": anywhere; contributions are added as integer multiples of `limit`'s unit, in any order.
    ENTRIES: the read is inside a reduction; each row or column has as many sums, side by side, as `loops` says, initially 0.
    CONTIGUOUS: rows of a tile are 8 n elements apart, n given as their stride, and columns adjacent.
    """
    loops, out_strides = args.loops, args.out_strides
    pid = tl.program_id(0)
    if gather.HOW == "tile":
        kv_tile = pid % decode(loops.kv_tiles)
        pid = pid // decode(loops.kv_tiles)
    if gather.HOW != "columns":
        q_tile = pid % decode(loops.q_tiles)
        pid = pid // decode(loops.q_tiles)
    else:
        kv_tile = pid % decode(loops.kv_tiles)
        pid = pid // decode(loops.kv_tiles)
    first_h = (pid % decode(loops.heads)) * decode(loops.inner_h)
    first_b = (pid // decode(loops.heads)) * decode(loops.inner_b)
    base = first_b.to(tl.int64) * decode(out_strides.b) + first_h.to(tl.int64) * decode(out_strides.h)
    if gather.HOW == "tile":
        acc = tl.zeros([c.TILE_Q, c.TILE_KV], tl.float32)
        steps = decode(loops.inner_b) * decode(loops.inner_h)
        sums_at = base
    elif gather.HOW == "columns":
        acc = tl.zeros([c.TILE_KV], tl.float32)
        steps = decode(loops.q_tiles)
        sums_at = base + kv_tile * c.TILE_KV + tl.arange(0, c.TILE_KV)
    else:
        acc = tl.zeros([c.TILE_Q], tl.float32)
        steps = decode(loops.kv_tiles)
        sums_at = base + q_tile * c.TILE_Q + tl.arange(0, c.TILE_Q)
    b = first_b
    h = first_h
    for step in range(0, steps):
        if gather.HOW == "tile":
            b = first_b + step // decode(loops.inner_h)
            h = first_h + step % decode(loops.inner_h)
        elif gather.HOW == "columns":
            q_tile = step
        else:
            kv_tile = step
        q_start, q_len, kv_start, kv_len = sequence(args.spans, args.size, b, c)
        memory_b = b * 0 if c.JAGGED else b
        tile_kind = tile_class(args, b, h, q_tile, kv_tile)
        if (q_tile * c.TILE_Q < q_len) & (kv_tile * c.TILE_KV < kv_len) & (tile_kind != EMPTY):
            tile = kv_tile + tl.where(tile_kind == FULL, FORCED, 0)
            at = TilePlace(b, memory_b, h, q_tile * c.TILE_Q, tile, q_start, q_len, kv_start, kv_len)
            if ((q_tile + 1) * c.TILE_Q <= q_len) & ((kv_tile + 1) * c.TILE_KV <= kv_len):
                score_tile = dscore(Streams(q, k, v, do), at, args, c, mask, score, False)
                acc = accumulate_contribution(acc, score_tile, at, sums_at, args, part, gather)
            else:
                score_tile = dscore(Streams(q, k, v, do), at, args, c, mask, score, True)
                acc = accumulate_contribution(acc, score_tile, at, sums_at, args, part, gather)
    if gather.HOW == "tile":
        store_tile(acc, args.out + base, out_strides, q_tile, kv_tile, decode(loops.q_limit), decode(loops.kv_limit), c, gather.CONTIGUOUS)
    elif gather.HOW == "largest" or (gather.HOW != "scatter" and not gather.ENTRIES):
        tl.store(args.out + sums_at, acc)


@triton_jit
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
