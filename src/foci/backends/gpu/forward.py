# mypy: ignore-errors
"""Forward: one program per tile of queries, online softmax over the tiles of keys it visits.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao, "FlashAttention-2" (2023).

    B, Hq, Hkv, Sq, Skv, D, Dv    batch entries, heads, queries, keys, head dims
    q, out                        [B, Hq, Sq, D], [B, Hq, Sq, Dv]
    k, v                          [B, Hkv, Skv, D], [B, Hkv, Skv, Dv], or tensor descriptors of them
    lse, row_max                  [B, Hq, Sq] float32, contiguous; row_max may be None
    qk, x, p                      [TILE_Q, TILE_KV]: products, scores, weights of a tile
    acc, l_i, m_i                 [TILE_Q, Dv], [TILE_Q], [TILE_Q]: accumulator, row sum, row max
    args, c                       `foci.backends.gpu.kernel_args.CallArgs` and `Config`

Packed sequences have B = 1 in memory and find their first row and length in `spans`. Exponentials are in base 2. Tiles that the mask keeps
entirely skip all mask work.
"""

from typing import Any, NamedTuple

import triton.language as tl

from foci.backends.gpu.excluded_products import exact_product
from foci.backends.gpu.tiles import (
    FORCED,
    LN2,
    LOG2E,
    HeadRows,
    KeysValues,
    PackedRows,
    Position,
    TileRun,
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
from foci.compat.jit import triton_jit

HUGE = tl.constexpr(float(1 << 30))
"""Scores in base 2 from which on the rounding error of a product with LOG2E exceeds what an exponent may be off by. There a power of two
takes the factor's place, which makes products exact; keys whose scores differ at all are then too far apart to share weight."""


class QueryTile(NamedTuple):
    """A tile of queries, and what its loops over tiles of keys read."""

    q: Any  # [TILE_Q, D_PAD]
    b: Any  # batch entry or sequence
    memory_b: Any  # batch entry in memory
    h: Any
    kv_h: Any
    first: Any  # first query
    q_idx: Any  # [TILE_Q, 1]
    q_len: Any
    kv_start: Any  # first key of the sequence in memory
    kv_len: Any
    factor: Any  # from scores to exponents in base 2
    round_factor: Any  # the same for scores from `HUGE` on
    affine: Any  # (start, slope per key) of an affine score function, see `affine_line`


class RowOutputs(NamedTuple):
    """Results of rows, in memory."""

    out: Any
    lse: Any
    row_max: Any  # or None


@triton_jit
def tile_scores(qk, position, args, c, score: tl.constexpr, mask: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr):
    """Apply score function and mask to a tile of products. Without a score function the result lacks the factor `scale`."""
    b, h, q_idx, q_len, kv_len = position.b, position.h, position.q_idx, position.q_len, position.kv_len
    x = qk
    kv_idx = position.kv_idx
    if EDGE:
        inside = kv_idx < kv_len
        kv_idx = tl.minimum(kv_idx, kv_len - 1)
    if not c.PLAIN:
        x = score(qk * args.numbers.scale, b, h, q_idx, kv_idx, q_len, kv_len, args.env)
    if MASKED:
        keep = mask(b, h, q_idx, position.kv_idx if c.BOUNDED else kv_idx, q_len, kv_len, args.env)
        if c.BLOCKS:
            keep = keep | (position.tile >= FORCED)
        if EDGE and not c.BOUNDED:
            keep = keep & inside
        x = tl.where(keep, x, float("-inf"))
    elif EDGE:
        x = tl.where(inside, x, float("-inf"))
    return x


@triton_jit
def accumulate_tiles(
    state, kv, queries, run, args, c, score: tl.constexpr, mask: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, EXACT: tl.constexpr
):
    """Accumulate the tiles of a `TileRun` into `state` = (acc, l_i, m_i, m_base2). m_base2 is m_i in base 2; acc and l_i are relative to
    it. `kv`: `KeysValues`. `queries`: `QueryTile`. EXACT: with `exact_product`."""
    acc, l_i, m_i, m_base2 = state
    head = HeadRows(queries.memory_b, queries.kv_h, queries.kv_start, queries.kv_len)
    tile = nth_visited(args.table, run.row, run.low, run.first, run.before, run.gap, c)
    # with lists the mask's loads are pipelined too and take shared memory: two stages, or a second program would not fit on the SM
    STAGES: tl.constexpr = 1 if EXACT or (EDGE and not MASKED) else min(c.STAGES, 2) if MASKED and c.MODE == "lists" else c.STAGES
    for i in tl.range(run.low, run.high, num_stages=STAGES):
        current = tile
        kv_first = tile_start(tile, c, c.TILE_KV)
        tile = nth_visited(args.table, run.row, i + 1, run.first, run.before, run.gap, c)
        # S = Q K^T
        keys = load_streamed_tile(kv.k, args.strides.k, head, kv_first, c, EDGE, c.TILE_KV, c.D, c.D_PAD)
        qk = product(queries.q, keys, kv_first - queries.first, queries.affine, c)
        # score function and mask
        kv_idx = kv_first + tl.arange(0, c.TILE_KV)[None, :]
        position = Position(queries.b, queries.h, queries.q_idx, kv_idx, queries.q_len, queries.kv_len, current)
        x = tile_scores(qk, position, args, c, score, mask, MASKED, EDGE)
        # online softmax
        m_new = tl.maximum(m_i, tl.max(x, 1))
        exp_scale = tl.where(tl.abs(m_new) * queries.factor < HUGE, queries.factor, queries.round_factor)
        m_scaled = m_new * exp_scale
        # a row without keys yet has m_new = -inf; -inf - -inf would be NaN
        shift = tl.where(m_new == float("-inf"), 0.0, m_scaled)
        p = tl.exp2(x * exp_scale[:, None] - shift[:, None])
        alpha = tl.exp2(m_base2 - shift)
        l_i = l_i * alpha + tl.sum(p, 1)
        if c.DROPOUT:
            p = tl.where(keep_tile(args.numbers, queries.b, queries.h, queries.q_idx, kv_first, c.TILE_KV), p, 0.0)
        # O = alpha O + P V
        acc = acc * alpha[:, None]
        values = load_streamed_tile(kv.v, args.strides.v, head, kv_first, c, EDGE, c.TILE_KV, c.DV, c.DV_PAD)
        if EXACT:
            acc = exact_product(p, values, acc, c.PRECISION)
        else:
            acc = tl.dot(p.to(values.dtype), values, acc, input_precision=c.PRECISION)
        m_i = m_new
        m_base2 = m_scaled
    return acc, l_i, m_i, m_base2


@triton_jit
def score_factors(args, c):
    """(factor, round factor) of a `QueryTile`."""
    factor = LOG2E
    round_factor = 1.0
    if c.PLAIN:
        factor = args.numbers.scale * LOG2E
        round_factor = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return factor, round_factor


@triton_jit
def attention_forward(q, k, v, out, lse, row_max, args, c, score: tl.constexpr, mask: tl.constexpr):
    """Attention of one tile of queries. Shapes are in the legend above; `args`: `CallArgs`."""
    strides, size, spans, table = args.strides, args.size, args.spans, args.table
    place = find_task(size, spans, c, True)
    b, memory_b, h, task = place.b, place.memory_b, place.h, place.task
    q_start, q_len, kv_start, kv_len = sequence_at(spans, size, b, task, c)
    if c.JAGGED and b < 0:
        # spare task: the first one of a head fills rows that belong to no sequence
        if place.tile == 0:
            packed = PackedRows(spans.q_start, spans.q_length, spans.sequences, decode(size.rows))
            clear_gaps(out, strides.out, packed, memory_b, h, c, 16, c.DV, c.DV_PAD)
            head = (memory_b * decode(size.heads) + h).to(tl.int64) * decode(size.rows)
            fill_gaps(lse + head, packed, float("-inf"), 128)
            if row_max is not None:
                fill_gaps(row_max + head, packed, float("-inf"), 128)
        return
    kv_h = h // decode(size.group)
    first = place.tile * c.TILE_Q
    offsets = tile_offsets(strides.q, c, c.TILE_Q, c.D_PAD)
    q_tile = load_tile(rows_pointer(q, strides.q, memory_b, h, q_start + first, c), offsets, q_len - first, True, c.TILE_Q, c.D, c.D_PAD)
    if c.NEGATIVE:
        q_tile = -q_tile
    rows = first + tl.arange(0, c.TILE_Q)
    q_idx = tl.minimum(rows, q_len - 1)[:, None]
    factor, round_factor = score_factors(args, c)
    affine = (0.0, 0.0)
    row_bias = tl.zeros([c.TILE_Q], tl.float32)
    if c.AFFINE:
        # scores relative to the tile's first query: the rest, `row_bias`, is constant over a row, so it cancels in the weights
        start, kv_slope, q_slope = affine_line(b, h, first, q_len, kv_len, args.numbers, args.env, score)
        affine = (start, kv_slope)
        row_bias = tl.arange(0, c.TILE_Q).to(tl.float32) * q_slope
    queries = QueryTile(q_tile, b, memory_b, h, kv_h, first, q_idx, q_len, kv_start, kv_len, factor, round_factor, affine)
    acc = tl.zeros([c.TILE_Q, c.DV_PAD], tl.float32)
    l_i = tl.zeros([c.TILE_Q], tl.float32)
    m_i = tl.full([c.TILE_Q], float("-inf"), tl.float32)
    state = (acc, l_i, m_i, m_i)
    tiles = tile_runs(table, b, h, task, kv_len, c, c.TILE_KV)
    MASKED: tl.constexpr = c.MODE != "all"
    EDGE: tl.constexpr = not c.SPLIT_EDGE or not MASKED
    # full tiles, then partial ones; with SPLIT_EDGE the tile that overhangs the keys has a loop of its own at the end
    run = TileRun(tiles.row, tiles.full_first, tiles.full, tiles.full * 0, tiles.full * 0, tiles.full)
    state = accumulate_tiles(state, KeysValues(k, v), queries, run, args, c, score, mask, False, False, False)
    part_inside = tiles.part
    if not EDGE:
        last = nth_visited(table, tiles.row, tl.maximum(tiles.part - 1, 0), tiles.part_first, tiles.before, tiles.gap, c)
        part_inside = tiles.part - tl.where((tiles.part > 0) & (tile_start(last, c, c.TILE_KV) + c.TILE_KV > kv_len), 1, 0)
    run = TileRun(tiles.row, tiles.part_first, tiles.before, tiles.gap, part_inside * 0, part_inside)
    state = accumulate_tiles(state, KeysValues(k, v), queries, run, args, c, score, mask, MASKED, EDGE, False)
    if not EDGE:
        run = TileRun(tiles.row, tiles.part_first, tiles.before, tiles.gap, part_inside, tiles.part)
        state = accumulate_tiles(state, KeysValues(k, v), queries, run, args, c, score, mask, True, True, False)
    store_rows(state, RowOutputs(out, lse, row_max), queries, rows, q_start, row_bias, args, c)


@triton_jit
def store_out(acc, l_i, out, queries, rows, q_start, args, c):
    """Normalize and store rows of the result; a row without keys gets 0."""
    inv_sum = tl.where(l_i == 0.0, 0.0, 1.0 / l_i)
    if c.DROPOUT:
        inv_sum = inv_sum * args.numbers.keep_factor
    acc = acc * inv_sum[:, None]
    inside = rows < queries.q_len
    pointer = rows_pointer(out, args.strides.out, queries.memory_b, queries.h, q_start + tl.min(rows, 0), c)
    offsets = tile_offsets(args.strides.out, c, rows.shape[0], c.DV_PAD)
    tl.store(pointer + offsets, acc.to(out.dtype.element_ty), mask=inside[:, None] & (tl.arange(0, c.DV_PAD)[None, :] < c.DV))


@triton_jit
def store_rows(state, outputs, queries, rows, q_start, row_bias, args, c):
    """Normalize and store a tile: out, natural lse and row max, both with `row_bias` added back. A row without keys gets 0 and -inf.
    `outputs`: `RowOutputs`."""
    acc, l_i, m_i, m_base2 = state
    store_out(acc, l_i, outputs.out, queries, rows, q_start, args, c)
    inside = rows < queries.q_len
    size = args.size
    head = (queries.memory_b * decode(size.heads) + queries.h).to(tl.int64) * decode(size.rows) + q_start
    row_max_nat = tl.where(tl.abs(m_i) * queries.factor < HUGE, m_base2 * LN2, m_i * (queries.factor * LN2))
    if c.AFFINE:
        row_max_nat += row_bias
    tl.store(outputs.lse + head + rows, tl.where(l_i == 0.0, float("-inf"), row_max_nat + tl.log(l_i)), mask=inside)
    if outputs.row_max is not None:
        tl.store(outputs.row_max + head + rows, tl.where(l_i == 0.0, float("-inf"), row_max_nat), mask=inside)
