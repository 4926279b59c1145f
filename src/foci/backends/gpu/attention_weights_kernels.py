# mypy: ignore-errors
"""Kernels for outputs that need normalised weights: a second pass over the visited tiles, with weights recomputed from lse.

    q, k                as in `foci.backends.gpu.forward`
    lse                 [B, Hq, Sq] float32
    args, c             `foci.backends.gpu.kernel_args.CallArgs` and `Config`
    columns, weights    [B, Hq, Skv] float32 sums over queries, [B, Hq, Sq, Skv]; each may be None

Each sum belongs to one program, in the order of its tiles, so results are bitwise repeatable.
"""

import triton.language as tl

from foci.backends.gpu.backward import recompute_weights
from foci.backends.gpu.dweights import with_flow
from foci.backends.gpu.tiles import (
    LOG2E,
    HeadRows,
    Position,
    decode,
    find_task,
    load_streamed_tile,
    load_tile,
    nth_visited,
    rows_pointer,
    sequence_at,
    tile_offsets,
    tile_runs,
    tile_start,
)
from foci.compat.jit import triton_jit

__all__ = ["weigh_columns", "weigh_rows"]


@triton_jit
def tile_run(table, b, h, task, length, c, TILE: tl.constexpr):
    """(row of the table, first tile, tiles) of a task, full and partial tiles alike."""
    tiles = tile_runs(table, b, h, task, length, c, TILE)
    return tiles.row, tiles.part_first if c.MODE == "ranges" else tiles.full_first, tiles.full + tiles.part


@triton_jit
def tile_weights(queries, keys, lse, at, args, c, both: tl.constexpr, mask: tl.constexpr):
    """Recompute the weights of a tile; 0 where masked and past the end of queries or keys. `at`: the `Position` of the tile, with q_idx
    [TILE_Q] and kv_idx [TILE_KV]."""
    qk = tl.dot(queries, tl.trans(keys), input_precision=c.PRECISION)
    if c.NEGATIVE:
        qk = -qk
    lse_nat = tl.load(lse + at.q_idx, mask=at.q_idx < at.q_len, other=float("-inf"))
    lse2 = tl.where(lse_nat == float("-inf"), float("inf"), lse_nat * LOG2E)
    position = Position(at.b, at.h, at.q_idx[:, None], at.kv_idx[None, :], at.q_len, at.kv_len, at.tile)
    p, _ = recompute_weights(qk, lse2[:, None], position, args, c, both, mask, c.MODE != "all", True, True)
    return p


@triton_jit
def weigh_columns(q, k, lse, columns, weights, args, c, both: tl.constexpr, mask: tl.constexpr):
    """Column sums and weights of one tile of keys. Shapes are in the legend above."""
    strides, size, spans = args.strides, args.size, args.spans
    place = find_task(size, spans, c, False)
    b, memory_b, h, task = place.b, place.memory_b, place.h, place.task
    if c.JAGGED and b < 0:
        return
    kv_h = h // decode(size.group)
    q_start, q_len, kv_start, kv_len = sequence_at(spans, size, b, task, c)
    first = place.tile * c.TILE_KV
    kv_idx = first + tl.arange(0, c.TILE_KV)
    pointer = rows_pointer(k, strides.k, memory_b, kv_h, kv_start + first, c)
    keys = load_tile(pointer, tile_offsets(strides.k, c, c.TILE_KV, c.D_PAD), kv_len - first, True, c.TILE_KV, c.D, c.D_PAD)
    line = (memory_b * decode(size.heads) + h).to(tl.int64)
    sums = tl.zeros([c.TILE_KV], tl.float32)
    row, start, count = tile_run(args.table, b, h, task, q_len, c, c.TILE_Q)
    for i in range(0, count):
        current = nth_visited(args.table, row, i, start, count, count, c)
        here = tile_start(current, c, c.TILE_Q)
        rows = here + tl.arange(0, c.TILE_Q)
        queries = load_streamed_tile(q, strides.q, HeadRows(memory_b, h, q_start, q_len), here, c, True, c.TILE_Q, c.D, c.D_PAD)
        head = lse + line * decode(size.rows) + q_start
        p = tile_weights(queries, keys, head, Position(b, h, rows, kv_idx, q_len, kv_len, current), args, c, both, mask)
        sums += tl.sum(p, 0)
        if weights is not None:
            at = (line * decode(size.rows) + rows[:, None]) * decode(size.columns) + kv_idx[None, :]
            tl.store(weights + at, p.to(weights.dtype.element_ty), mask=(rows[:, None] < q_len) & (kv_idx[None, :] < kv_len))
    if columns is not None:
        tl.store(columns + line * decode(size.columns) + kv_start + kv_idx, sums, mask=kv_idx < kv_len)


@triton_jit
def weigh_rows(q, k, lse, flowing, args, c, both: tl.constexpr, mask: tl.constexpr):
    """flowing [B, Hq, Sq] = sum_j p g of one tile of queries, g the gradient of the weights: their contribution to delta."""
    strides, size, spans = args.strides, args.size, args.spans
    place = find_task(size, spans, c, True)
    b, memory_b, h, task = place.b, place.memory_b, place.h, place.task
    if c.JAGGED and b < 0:
        return
    kv_h = h // decode(size.group)
    q_start, q_len, kv_start, kv_len = sequence_at(spans, size, b, task, c)
    first = place.tile * c.TILE_Q
    rows = first + tl.arange(0, c.TILE_Q)
    pointer = rows_pointer(q, strides.q, memory_b, h, q_start + first, c)
    queries = load_tile(pointer, tile_offsets(strides.q, c, c.TILE_Q, c.D_PAD), q_len - first, True, c.TILE_Q, c.D, c.D_PAD)
    head = (memory_b * decode(size.heads) + h).to(tl.int64) * decode(size.rows) + q_start
    sums = tl.zeros([c.TILE_Q], tl.float32)
    row, start, count = tile_run(args.table, b, h, task, kv_len, c, c.TILE_KV)
    for i in range(0, count):
        current = nth_visited(args.table, row, i, start, count, count, c)
        here = tile_start(current, c, c.TILE_KV)
        kv_idx = here + tl.arange(0, c.TILE_KV)
        keys = load_streamed_tile(k, strides.k, HeadRows(memory_b, kv_h, kv_start, kv_len), here, c, True, c.TILE_KV, c.D, c.D_PAD)
        p = tile_weights(queries, keys, lse + head, Position(b, h, rows, kv_idx, q_len, kv_len, current), args, c, both, mask)
        g = with_flow(p * 0.0, args.numbers, b, h, memory_b, rows[:, None], kv_idx[None, :], q_len, kv_len)
        sums += tl.sum(tl.where(p != 0.0, p * g, 0.0), 1)
    tl.store(flowing + head + rows, sums, mask=rows < q_len)
