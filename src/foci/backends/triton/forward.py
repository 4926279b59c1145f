# mypy: ignore-errors
"""Forward: one program per tile of queries, online softmax over the tiles of keys it visits.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao, "FlashAttention-2" (2023). Exponentials
are in base 2. Tiles that the mask leaves whole take no mask work at all.
"""

import triton
import triton.language as tl

from foci.backends.triton.tiles import (
    FORCED,
    LN2,
    LOG2E,
    affine_line,
    clear_gaps,
    decode,
    fill_gaps,
    find_task,
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

HUGE = tl.constexpr(float(1 << 30))
"""Scores in base 2 from which on a product with LOG2E, rounded, is off by more than an exponent may be: a power of two takes
the factor's place, whose products are exact. Keys whose scores differ at all are then too far apart to share weight."""


@triton.jit
def tile_scores(qk, where, numbers, env, c, score: tl.constexpr, mask: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr):
    """Scores of a tile, -inf where masked. When the score is plain they lack the factor `scale`."""
    b, h, q_idx, kv_idx, q_len, kv_len, tile = where
    x = qk
    column = kv_idx
    if EDGE:
        inside = kv_idx < kv_len
        kv_idx = tl.minimum(kv_idx, kv_len - 1)
    if not c.PLAIN:
        x = score(qk * numbers.scale, b, h, q_idx, kv_idx, q_len, kv_len, env)
    if MASKED:
        keep = mask(b, h, q_idx, column if c.BOUNDED else kv_idx, q_len, kv_len, env)
        if c.BLOCKS:
            keep = keep | (tile >= FORCED)
        if EDGE and not c.BOUNDED:
            keep = keep & inside
        x = tl.where(keep, x, float("-inf"))
    elif EDGE:
        x = tl.where(inside, x, float("-inf"))
    return x


@triton.jit
def accumulate_tiles(state, q, k, v, at, run, given, c, score: tl.constexpr, mask: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr):
    """Folds tiles `run` = (row, first, before, gap, low, high) into the `state`: accumulator, weight total, maximum, and the maximum in
    base 2, which accumulator and total are relative to. `given`: strides, table, numbers, environment."""
    acc, total, most, base = state
    strides, table, numbers, env = given
    b, h, memory_b, kv_h, q_idx, q_len, kv_start, kv_len, factor, round_factor, q_first, line = at
    row, first, before, gap, low, high = run
    tile = nth_visited(table, row, low, first, before, gap, c)
    # what the mask of a list reads is loaded ahead as well, and has the room of a tile, or a second program would lack a few bytes
    STAGES: tl.constexpr = 1 if EDGE and not MASKED else min(c.STAGES, 2) if MASKED and c.MODE == "lists" else c.STAGES
    for i in tl.range(low, high, num_stages=STAGES):
        current = tile
        here = tile_start(tile, c, c.TILE_KV)
        tile = nth_visited(table, row, i + 1, first, before, gap, c)
        keys = load_streamed_tile(k, strides.k, memory_b, kv_h, kv_start, here, kv_len, c, EDGE, c.TILE_KV, c.D, c.D_PAD)
        qk = product(q, keys, here - q_first, line, c)
        kv_idx = here + tl.arange(0, c.TILE_KV)[None, :]
        x = tile_scores(qk, (b, h, q_idx, kv_idx, q_len, kv_len, current), numbers, env, c, score, mask, MASKED, EDGE)
        higher = tl.maximum(most, tl.max(x, 1))
        steep = tl.where(tl.abs(higher) * factor < HUGE, factor, round_factor)
        relative = higher * steep
        shift = tl.where(higher == float("-inf"), 0.0, relative)
        p = tl.exp2(x * steep[:, None] - shift[:, None])
        alpha = tl.exp2(base - shift)
        total = total * alpha + tl.sum(p, 1)
        if c.DROPOUT:
            p = tl.where(keep_tile(numbers, b, h, q_idx, here, c.TILE_KV), p, 0.0)
        acc = acc * alpha[:, None]
        values = load_streamed_tile(v, strides.v, memory_b, kv_h, kv_start, here, kv_len, c, EDGE, c.TILE_KV, c.DV, c.DV_PAD)
        acc = tl.dot(p.to(values.dtype), values, acc, input_precision=c.PRECISION)
        most = higher
        base = relative
    return acc, total, most, base


@triton.jit
def attention_forward(q, k, v, out, lse, row_max, strides, size, spans, table, numbers, env, c, score: tl.constexpr, mask: tl.constexpr):
    """Attention of one tile of queries. Shapes as in `foci.problem.Operands` and `Results`."""
    b, memory_b, h, task, tile = find_task(size, spans, c, True)
    q_start, q_len, kv_start, kv_len = sequence_at(spans, size, b, task, c)
    if c.JAGGED and b < 0:
        if tile == 0:
            clear_gaps(out, strides.out, spans.q_start, spans.q_length, spans, memory_b, h, decode(size.rows), c, 16, c.DV, c.DV_PAD)
            head = (memory_b * decode(size.heads) + h).to(tl.int64) * decode(size.rows)
            fill_gaps(lse + head, spans.q_start, spans.q_length, spans, decode(size.rows), float("-inf"), 128)
            if row_max is not None:
                fill_gaps(row_max + head, spans.q_start, spans.q_length, spans, decode(size.rows), float("-inf"), 128)
        return
    kv_h = h // decode(size.group)
    first = tile * c.TILE_Q
    offsets = tile_offsets(strides.q, c, c.TILE_Q, c.D_PAD)
    queries = load_tile(rows_pointer(q, strides.q, memory_b, h, q_start + first, c), offsets, q_len - first, True, c.TILE_Q, c.D, c.D_PAD)
    if c.NEGATIVE:
        queries = -queries
    rows = first + tl.arange(0, c.TILE_Q)
    q_idx = tl.minimum(rows, q_len - 1)[:, None]
    factor = LOG2E
    round_factor = 1.0
    if c.PLAIN:
        factor = numbers.scale * LOG2E
        round_factor = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    from_first = (0.0, 0.0)
    leaning = tl.zeros([c.TILE_Q], tl.float32)
    if c.AFFINE:
        # from its first query's line: what a row has more is the same for all keys, so that weights do not know it
        start, rise, across = affine_line(b, h, first, q_len, kv_len, numbers, env, score)
        from_first = (start, rise)
        leaning = tl.arange(0, c.TILE_Q).to(tl.float32) * across
    at = (b, h, memory_b, kv_h, q_idx, q_len, kv_start, kv_len, factor, round_factor, first, from_first)
    acc = tl.zeros([c.TILE_Q, c.DV_PAD], tl.float32)
    total = tl.zeros([c.TILE_Q], tl.float32)
    most = tl.full([c.TILE_Q], float("-inf"), tl.float32)
    state = (acc, total, most, most)
    given = (strides, table, numbers, env)
    line, full_first, full, part_first, before, gap, part = tile_runs(table, b, h, task, kv_len, c, c.TILE_KV)
    MASKED: tl.constexpr = c.MODE != "all"
    EDGE: tl.constexpr = not c.SPLIT_EDGE or not MASKED
    run = (line, full_first, full, full * 0, full * 0, full)
    state = accumulate_tiles(state, queries, k, v, at, run, given, c, score, mask, False, False)
    whole = part
    if not EDGE:
        last = nth_visited(table, line, tl.maximum(part - 1, 0), part_first, before, gap, c)
        whole = part - tl.where((part > 0) & (tile_start(last, c, c.TILE_KV) + c.TILE_KV > kv_len), 1, 0)
    run = (line, part_first, before, gap, whole * 0, whole)
    state = accumulate_tiles(state, queries, k, v, at, run, given, c, score, mask, MASKED, EDGE)
    if not EDGE:
        run = (line, part_first, before, gap, whole, part)
        state = accumulate_tiles(state, queries, k, v, at, run, given, c, score, mask, True, True)
    store_rows(state, out, lse, row_max, strides, size, memory_b, h, rows, q_start, q_len, numbers, factor, leaning, c)


@triton.jit
def store_rows(state, out, lse, row_max, strides, size, memory_b, h, rows, q_start, q_len, numbers, factor, leaning, c):
    """Writes a finished tile: out, natural logsumexp and largest score, which lack what all scores of a row lean by; a row without keys is
    zeros and -inf."""
    acc, total, most, base = state
    weight = tl.where(total == 0.0, 0.0, 1.0 / total)
    if c.DROPOUT:
        weight = weight * numbers.keep_factor
    acc = acc * weight[:, None]
    inside = rows < q_len
    pointer = rows_pointer(out, strides.out, memory_b, h, q_start + tl.min(rows, 0), c)
    offsets = tile_offsets(strides.out, c, c.TILE_Q, c.DV_PAD)
    tl.store(pointer + offsets, acc.to(out.dtype.element_ty), mask=inside[:, None] & (tl.arange(0, c.DV_PAD)[None, :] < c.DV))
    head = (memory_b * decode(size.heads) + h).to(tl.int64) * decode(size.rows) + q_start
    natural = tl.where(tl.abs(most) * factor < HUGE, base * LN2, most * (factor * LN2))
    if c.AFFINE:
        natural += leaning
    tl.store(lse + head + rows, tl.where(total == 0.0, float("-inf"), natural + tl.log(total)), mask=inside)
    if row_max is not None:
        tl.store(row_max + head + rows, tl.where(total == 0.0, float("-inf"), natural), mask=inside)
