# mypy: ignore-errors
"""Kernels before and after the backward: row statistics laid out for TMA and zeroed counters before; dq from its float32 accumulators
after.

B, Hq, Hkv, Sq, Skv, D, Dv    as in `foci.backends.hopper.forward`
out, dout                     [B, Hq, Sq, Dv]
lse, dlse, lse2, delta        [B, Hq, Sq] float32: logsumexp, its gradient or None, logsumexp in base 2, sum(out * dout) - dlse
"""

from typing import Any, NamedTuple

import triton.language as tl

from foci.backends.gpu.excluded_products import is_finite
from foci.backends.gpu.row_stats import prepare_row_stats
from foci.backends.gpu.tiles import PackedRows, clear_gaps, decode, find_task, load_tile, row_offsets, rows_pointer, sequence_at
from foci.backends.hopper.dq_semaphore import slot_size
from foci.compat.jit import triton_jit


class RowInputs(NamedTuple):
    """Tensors that row statistics are made of, see the legend above."""

    out: Any
    dout: Any
    lse: Any
    dlse: Any


class Counters(NamedTuple):
    """Counters that a later kernel expects to be zero."""

    turns: Any  # int32, or None
    count: int  # their number, encoded
    found_nan: Any  # int32 [1], or None: see `bwd_tile_math.report_nan`


class Heads(NamedTuple):
    """Sizes of the heads, sequences in them, and how padded row statistics are laid out."""

    size: Any
    kv_heads: int  # encoded
    spans: Any
    pitch: int  # elements of a head in padded row statistics, encoded


@triton_jit
def clear_head_gaps(grads, strides, size, kv_heads, spans, h, c):
    """Zero the rows of a head's packed gradients that belong to no sequence."""
    dq, dk, dv = grads
    if dq is not None:
        packed = PackedRows(spans.q_start, spans.q_length, spans.sequences, decode(size.rows))
        clear_gaps(dq, strides.dq, packed, h * 0, h, c, 16, c.D, c.D_PAD)
    if h < decode(kv_heads):
        packed_keys = PackedRows(spans.kv_start, spans.kv_length, spans.sequences, decode(size.columns))
        if dk is not None:
            clear_gaps(dk, strides.dk, packed_keys, h * 0, h, c, 16, c.D, c.D_PAD)
        if dv is not None:
            clear_gaps(dv, strides.dv, packed_keys, h * 0, h, c, 16, c.DV, c.DV_PAD)


@triton_jit
def begin_gradients(inputs, rows, lines, keep, counters, grads, strides, heads, c):
    """Prepare the other backward kernels, in one launch. A task is 128 rows of a head; program (task, n) takes the n-th TILE_Q of them.

    Args:
        rows: (lse2, delta) to fill, see `prepare_row_stats`.
        lines: (lse2, delta) as TMA loads them, whose rows must begin at multiples of 16 bytes: each sequence padded to a multiple of 128
            rows (inf and 0), or `rows` themselves.
        keep: None, or dropout's factor of kept weights. It is folded into the padded lse2, so that recomputed weights contain it, and
            divided out of the padded delta.
        grads: (dq, dk, dv), any of them None; rows of them that belong to no sequence become zeros.
    """
    size, spans, pitch = heads.size, heads.spans, heads.pitch
    out, dout, lse, dlse = inputs
    turns, count = counters.turns, counters.count
    if counters.found_nan is not None:
        tl.store(counters.found_nan, 0, mask=tl.program_id(0) + tl.program_id(1) == 0)
    if turns is not None:
        n = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        for start in range(n * 128, decode(count), tl.num_programs(0) * tl.num_programs(1) * 128):
            at = start + tl.arange(0, 128)
            tl.store(turns + at, tl.zeros([128], tl.int32), mask=at < decode(count))
    place = find_task(size, spans, c, False)
    b, memory_b, h, task, tile = place.b, place.memory_b, place.h, place.task, place.tile
    if c.JAGGED and b < 0:
        if tile == 0 and tl.program_id(1) == 0:
            clear_head_gaps(grads, strides, size, heads.kv_heads, spans, h, c)
        return
    q_start, q_len, kv_start, kv_len = sequence_at(spans, size, b, task, c)
    lse2, delta = rows
    head = (memory_b * decode(size.heads) + h).to(tl.int64)
    first = tile * 128 + tl.program_id(1) * c.TILE_Q
    limit = q_len - first
    at = tl.arange(0, c.TILE_Q)
    # clamp rows past the end instead of masking: predicated loads are not all issued at once
    there = tl.minimum(at, limit - 1)
    offsets = row_offsets(there, strides.out, c, c.DV_PAD)
    o = load_tile(rows_pointer(out, strides.out, memory_b, h, q_start + first, c), offsets, limit, False, c.TILE_Q, c.DV, c.DV_PAD)
    offsets = row_offsets(there, strides.dout, c, c.DV_PAD)
    do = load_tile(rows_pointer(dout, strides.dout, memory_b, h, q_start + first, c), offsets, limit, False, c.TILE_Q, c.DV, c.DV_PAD)
    base2, d = prepare_row_stats(o, do, lse, dlse, lse2, delta, head * decode(size.rows) + q_start + first + at, at < limit)
    lse2_lines, delta_lines = lines
    d = tl.where(at < limit, d, 0.0)
    if keep is not None:
        base2 -= tl.log2(keep)
        d = tl.where(keep > 0.0, d / tl.maximum(keep, 1.0), 0.0)
    to = head * decode(pitch) + first + at
    if c.JAGGED:
        to += (q_start // 128 + b) * 128
    # where `lines` are `rows` themselves, a head's padding would be the next head's rows
    inside = first + at < decode(pitch)
    tl.store(lse2_lines + to, base2, mask=inside)
    tl.store(delta_lines + to, d, mask=inside)


@triton_jit
def finish_query_gradient(sums, order, dq, found_nan, strides, size, spans, scale, c, UNIT: tl.constexpr, COLS: tl.constexpr):
    """dq = scale * (sum of its accumulators), in the dtype of dq. A task is a query tile of a head; program (task, n) writes
    the n-th group of COLS columns of 64 rows. A tile that no key visits has no accumulators, and dq = 0.

    Args:
        sums: float32, `order.sums` slots for each tile, each two halves as `dq_semaphore.store_dq_share` lays them out, of equal size.
        order: `dq_semaphore.Order`, whose counters say which slots were written.
        dq: [B, Hq, Sq, D], its last dimension contiguous; strides are encoded, in units of UNIT.
        found_nan: set if a sum is NaN or infinite, see `bwd_tile_math.report_nan`; or None.
    """
    place = find_task(size, spans, c, False)
    b, memory_b, h, task, tile = place.b, place.memory_b, place.h, place.task, place.tile
    if c.JAGGED and b < 0:
        return
    q_start, q_len, kv_start, kv_len = sequence_at(spans, size, b, task, c)
    slot = (memory_b * decode(size.heads) + h) * decode(order.slots) + tile
    if c.JAGGED:
        slot += q_start // c.TILE_Q + b
    total = decode(size.batch) * decode(size.heads) * decode(order.slots)
    head = memory_b.to(tl.int64) * (decode(strides.b) * UNIT) + h.to(tl.int64) * (decode(strides.h) * UNIT)
    SLOT: tl.constexpr = slot_size(c.TILE_Q, c.D_PAD)
    # programs of a half
    PARTS: tl.constexpr = SLOT // (2 * 64 * COLS)
    # a half is stored as groups of COLS columns of 64 rows
    at = tl.program_id(1) * (64 * COLS) + tl.arange(0, 64 * COLS)
    total_dq = tl.zeros([64 * COLS], tl.float32)
    # two accumulators at a time: most problems have one or two
    for first in range(0, decode(order.sums), 2):
        second = tl.minimum(first + 1, decode(order.sums) - 1)
        # issue all loads before waiting for any; slots that were not written are discarded afterwards
        one = tl.load(sums + (first * total + slot).to(tl.int64) * SLOT + at)
        other = tl.load(sums + (second * total + slot).to(tl.int64) * SLOT + at, mask=second > first + 0 * at, other=0.0)
        has_one = tl.load(order.turns + 1 + first * total + slot) > 0
        has_other = (second > first) & (tl.load(order.turns + 1 + second * total + slot) > 0)
        total_dq += tl.where(has_one, one, 0.0)
        total_dq += tl.where(has_other, other, 0.0)
    share = total_dq.reshape(COLS // 8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(64, COLS) * scale
    rows = tile * c.TILE_Q + tl.arange(0, 64)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    if c.TILE_Q == 128:
        rows += tl.program_id(1) // PARTS * 64
        cols = tl.program_id(1) % PARTS * COLS + tl.arange(0, COLS)
    inside = (rows < q_len)[:, None] & (cols < c.D)[None, :]
    at = head + (q_start + rows).to(tl.int64) * (decode(strides.s) * UNIT)
    tl.store(dq + at[:, None] + cols[None, :], share.to(dq.dtype.element_ty), mask=inside)
    if found_nan is not None:
        is_bad = tl.max(tl.where(is_finite(total_dq), 0, 1), 0) > 0
        tl.store(found_nan, 1, mask=is_bad)


@triton_jit
def reduce_dq_partials(
    partials, dq, found_nan, strides, size, count, scale, c, UNIT: tl.constexpr, NUMBERS: tl.constexpr, PARTIALS_AT_ONCE: tl.constexpr
):
    """dq = scale * (sum of partials), for heads whose keys several programs shared (`bwd_short_q`). Partials are added in order; a program
    writes NUMBERS elements of a head.

    Args:
        partials: float32 [B, H, count, 128, D_PAD]; `count` is encoded.
        dq: [B, H, Sq, D], its last dimension contiguous; strides are encoded, in units of UNIT.
        found_nan: as in `finish_query_gradient`.
        PARTIALS_AT_ONCE: partials loaded together.
    """
    head = tl.program_id(0)
    b = head // decode(size.heads)
    h = head - b * decode(size.heads)
    at = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    acc = tl.zeros([NUMBERS], tl.float32)
    for start in range(0, decode(count), PARTIALS_AT_ONCE):
        n = start + tl.arange(0, PARTIALS_AT_ONCE)
        slot = (head * decode(count) + n).to(tl.int64) * (128 * c.D_PAD)
        acc += tl.sum(tl.load(partials + slot[:, None] + at[None, :], mask=(n < decode(count))[:, None], other=0.0), 0)
    row, column = at // c.D_PAD, at % c.D_PAD
    to = b.to(tl.int64) * (decode(strides.b) * UNIT) + h.to(tl.int64) * (decode(strides.h) * UNIT)
    to += row.to(tl.int64) * (decode(strides.s) * UNIT) + column
    inside = (row < decode(size.rows)) & (column < c.D)
    tl.store(dq + to, (acc * scale).to(dq.dtype.element_ty), mask=inside)
    if found_nan is not None:
        is_bad = tl.max(tl.where(is_finite(acc), 0, 1), 0) > 0
        tl.store(found_nan, 1, mask=is_bad)
