# mypy: ignore-errors
"""Results computed once more, where an excluded position is NaN or infinite: see `excluded_products`.

`mend_rows` runs after the forward, `mend_gradients` after the backward, with the loops of the portable kernels, whichever kernels computed
the results. They look for NaN and infinities first, and return at once where there are none: all other kernels stay as small and as fast as
if nothing were excluded. The letters are those of `foci.backends.gpu.forward` and `foci.backends.gpu.backward`. DEPENDENT: launched while
the previous kernel ends.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from foci.backends.gpu.backward import KeyPlace, QueryStream, accumulate_dq, store_dq, store_key_gradients, sum_key_gradients
from foci.backends.gpu.backward import QueryTile as GradientTile
from foci.backends.gpu.excluded_products import ROWS, has_nan, is_finite
from foci.backends.gpu.forward import QueryTile, accumulate_tiles, score_factors, store_out
from foci.backends.gpu.tiles import (
    KeysValues,
    decode,
    every_tile,
    find_nth_task,
    load_tile,
    row_offsets,
    rows_pointer,
    sequence_at,
    tile_offsets,
    tile_runs,
)
from foci.compat.jit import triton_jit

__all__ = ["TILE", "TILES_AT_ONCE", "NanFlags", "mend_gradients", "mend_rows"]

TILE = tl.constexpr(64)
"""Most rows that forward kernels multiply together. A NaN or an infinity among the values that these read, excluded or not, reaches all
rows, so the first row of a tile tells of all."""

TILES_AT_ONCE = tl.constexpr(16)
"""Tiles whose first rows a program of `mend_rows` looks at together."""


@triton_jit
def wait_for_previous_kernel(DEPENDENT: tl.constexpr):
    """Wait until the previous kernel on the stream has ended and its writes are visible."""
    if DEPENDENT:
        gdc_wait()


@triton_jit
def count_tasks(size):
    return decode(size.batch) * decode(size.heads) * decode(size.tasks)


@triton_jit
def store_exact_rows(q, kv, outputs, queries, run, q_start, args, c, score: tl.constexpr, mask: tl.constexpr, MASKED: tl.constexpr):
    """Compute rows of a tile that hold a NaN once more, with `exact_product`, and store them over the first ones. `outputs`: `RowOutputs`.
    `run`: all tiles of the task."""
    strides, q_len = args.strides, queries.q_len
    head = (queries.memory_b * decode(args.size.heads) + queries.h).to(tl.int64) * decode(args.size.rows) + q_start
    for first in range(queries.first, tl.minimum(queries.first + c.TILE_Q, q_len), ROWS):
        rows = first + tl.arange(0, ROWS)
        lse = tl.load(outputs.lse + head + rows, mask=rows < q_len, other=0.0)
        pointer = rows_pointer(outputs.out, strides.out, queries.memory_b, queries.h, q_start + first, c)
        stored = load_tile(pointer, tile_offsets(strides.out, c, ROWS, c.DV_PAD), q_len - first, True, ROWS, c.DV, c.DV_PAD)
        # the lse of a row that attends to a NaN is NaN
        if has_nan(stored, lse == lse):
            pointer = rows_pointer(q, strides.q, queries.memory_b, queries.h, q_start + first, c)
            q_tile = load_tile(pointer, tile_offsets(strides.q, c, ROWS, c.D_PAD), q_len - first, True, ROWS, c.D, c.D_PAD)
            if c.NEGATIVE:
                q_tile = -q_tile
            part = QueryTile(
                q_tile, queries.b, queries.memory_b, queries.h, queries.kv_h, queries.first, tl.minimum(rows, q_len - 1)[:, None], q_len,
                queries.kv_start, queries.kv_len, queries.factor, queries.round_factor, queries.affine,
            )  # fmt: skip
            m_i = tl.full([ROWS], float("-inf"), tl.float32)
            state = (tl.zeros([ROWS, c.DV_PAD], tl.float32), tl.zeros([ROWS], tl.float32), m_i, m_i)
            state = accumulate_tiles(state, kv, part, run, args, c, score, mask, MASKED, True, True)
            store_out(state[0], state[1], outputs.out, part, rows, q_start, args, c)


@triton_jit
def mend_task(q, kv, outputs, place, args, c, score: tl.constexpr, mask: tl.constexpr):
    """Compute rows of a tile of results that hold a NaN once more. `outputs`: `RowOutputs`. `place`: `Place`."""
    b, h = place.b, place.h
    q_start, q_len, kv_start, kv_len = sequence_at(args.spans, args.size, b, place.task, c)
    run = every_tile(tile_runs(args.table, b, h, place.task, kv_len, c, c.TILE_KV), c)
    factor, round_factor = score_factors(args, c)
    # `store_exact_rows` loads queries itself
    queries = QueryTile(
        0.0, b, place.memory_b, h, h // decode(args.size.group), place.tile * c.TILE_Q, 0, q_len, kv_start, kv_len, factor, round_factor,
        (0.0, 0.0),
    )  # fmt: skip
    store_exact_rows(q, kv, outputs, queries, run, q_start, args, c, score, mask, c.MODE != "all")


@triton_jit
def mend_rows(q, k, v, outputs, args, c, score: tl.constexpr, mask: tl.constexpr, DEPENDENT: tl.constexpr):
    """Compute rows of results that hold a NaN once more. `outputs`: `RowOutputs`. `args`: `CallArgs`, whose tasks are c.TILE_Q rows."""
    PARTS: tl.constexpr = max(c.TILE_Q // TILE, 1)
    size, strides = args.size, args.strides
    total = count_tasks(size)
    wait_for_previous_kernel(DEPENDENT)
    for begin in range(tl.program_id(0) * TILES_AT_ONCE, total * PARTS, tl.num_programs(0) * TILES_AT_ONCE):
        n = begin + tl.arange(0, TILES_AT_ONCE)
        places = find_nth_task(tl.minimum(n // PARTS, total - 1), size, args.spans, c, False)
        q_start, q_len, kv_start, kv_len = sequence_at(args.spans, size, places.b, places.task, c)
        row = places.tile * c.TILE_Q + n % PARTS * TILE
        pointer = rows_pointer(outputs.out, strides.out, places.memory_b, places.h, q_start + row, c)
        offsets = row_offsets(tl.zeros([1], tl.int32), strides.out, c, c.DV_PAD)
        inside = (n < total * PARTS) & (places.b >= 0) & (row < q_len)
        inside = inside[:, None] & (tl.arange(0, c.DV_PAD) < c.DV)[None, :]
        first_rows = tl.load(pointer[:, None] + offsets, mask=inside, other=0.0)
        if tl.max(tl.where(is_finite(first_rows), 0, 1)) > 0:
            for task in range(begin // PARTS, tl.minimum(tl.cdiv(begin + TILES_AT_ONCE, PARTS), total)):
                place = find_nth_task(task, size, args.spans, c, False)
                if place.b >= 0:
                    mend_task(q, KeysValues(k, v), outputs, place, args, c, score, mask)


@triton_jit
def store_exact_dq(q, kv, inputs, dq, queries, run, q_start, args, c, both: tl.constexpr, mask: tl.constexpr):
    """Compute rows of a tile that hold a NaN once more, where excluded positions reach nothing, and store them over the first ones.
    `inputs`: `RowInputs`. `run`: all tiles of the task."""
    strides, q_len = args.strides, queries.q_len
    head = (queries.memory_b * decode(args.size.heads) + queries.h).to(tl.int64) * decode(args.size.rows) + q_start
    for first in range(queries.first, tl.minimum(queries.first + c.TILE_Q, q_len), ROWS):
        rows = first + tl.arange(0, ROWS)
        row_lse = tl.load(inputs.lse2 + head + rows, mask=rows < q_len, other=float("inf"))
        row_delta = tl.load(inputs.delta + head + rows, mask=rows < q_len, other=0.0)
        pointer = rows_pointer(dq, strides.dq, queries.memory_b, queries.h, q_start + first, c)
        stored = load_tile(pointer, tile_offsets(strides.dq, c, ROWS, c.D_PAD), q_len - first, True, ROWS, c.D, c.D_PAD)
        if has_nan(stored, is_free_of_nan(row_lse, row_delta)):
            pointer = rows_pointer(q, strides.q, queries.memory_b, queries.h, q_start + first, c)
            q_tile = load_tile(pointer, tile_offsets(strides.q, c, ROWS, c.D_PAD), q_len - first, True, ROWS, c.D, c.D_PAD)
            if c.NEGATIVE:
                q_tile = -q_tile
            pointer = rows_pointer(inputs.do, strides.dout, queries.memory_b, queries.h, q_start + first, c)
            douts = load_tile(pointer, tile_offsets(strides.dout, c, ROWS, c.DV_PAD), q_len - first, True, ROWS, c.DV, c.DV_PAD)
            part = GradientTile(
                q_tile, douts, row_lse, row_delta, queries.b, queries.memory_b, queries.h, queries.kv_h, queries.first,
                tl.minimum(rows, q_len - 1)[:, None], q_len, queries.kv_start, queries.kv_len, queries.affine,
            )  # fmt: skip
            acc = tl.zeros([ROWS, c.D_PAD], tl.float32)
            acc = accumulate_dq(acc, kv, part, run, args, c, both, mask, c.MODE != "all", True, True)
            store_dq(acc, dq, part, first, rows, q_start, args, c)


@triton_jit
def is_free_of_nan(row_lse, row_delta):
    """Whether a row attends to no NaN: if it does, a NaN is in its statistics. A row without keys has row_lse = inf, and attends to
    nothing."""
    return (row_lse == row_lse) & ((row_delta == row_delta) | (row_lse == float("inf")))


@triton_jit
def mend_dq(q, kv, inputs, dq, place, args, c, both: tl.constexpr, mask: tl.constexpr):
    """Compute rows of a tile of dq that hold a NaN once more. `inputs`: `RowInputs`. `place`: `Place`."""
    b, h = place.b, place.h
    q_start, q_len, kv_start, kv_len = sequence_at(args.spans, args.size, b, place.task, c)
    run = every_tile(tile_runs(args.table, b, h, place.task, kv_len, c, c.TILE_KV), c)
    # what `store_exact_dq` loads itself is 0 here
    queries = GradientTile(
        0.0, 0.0, 0.0, 0.0, b, place.memory_b, h, h // decode(args.size.group), place.tile * c.TILE_Q, 0, q_len, kv_start, kv_len,
        (0.0, 0.0),
    )  # fmt: skip
    store_exact_dq(q, kv, inputs, dq, queries, run, q_start, args, c, both, mask)


@triton_jit
def store_exact_key_gradients(kv, stream, grads, place, first, args, c, both: tl.constexpr, mask: tl.constexpr):
    """Compute dk and dv that hold a NaN, of the tile of keys from key `first` on, once more, where excluded positions reach nothing, and
    store them over the first ones. Arguments are those of `sum_key_gradients` and `store_key_gradients`."""
    strides, kv_len = args.strides, place.kv_len
    for part in range(first, tl.minimum(first + c.TILE_KV, kv_len), ROWS):
        inside = part + tl.arange(0, ROWS) < kv_len
        is_nan = first < 0
        if stream.DK:
            pointer = rows_pointer(grads.dk, strides.dk, place.memory_b, place.kv_h, place.kv_start + part, c)
            stored = load_tile(pointer, tile_offsets(strides.dk, c, ROWS, c.D_PAD), kv_len - part, True, ROWS, c.D, c.D_PAD)
            is_nan = is_nan | has_nan(stored, inside)
        if stream.DV:
            pointer = rows_pointer(grads.dv, strides.dv, place.memory_b, place.kv_h, place.kv_start + part, c)
            stored = load_tile(pointer, tile_offsets(strides.dv, c, ROWS, c.DV_PAD), kv_len - part, True, ROWS, c.DV, c.DV_PAD)
            is_nan = is_nan | has_nan(stored, inside)
        if is_nan:
            sums = sum_key_gradients(kv, stream, place, part, args, c, both, mask, ROWS, True)
            store_key_gradients(sums, grads, place, part, args, c, ROWS)


@triton_jit
def mend_dk_dv(q, kv, inputs, grads, place, args, c, both: tl.constexpr, mask: tl.constexpr):
    """Compute rows of a tile of dk and dv that hold a NaN once more. `inputs`: `RowInputs`. `grads`: `KeyGradients`. `place`: `Place`."""
    q_start, q_len, kv_start, kv_len = sequence_at(args.spans, args.size, place.b, place.task, c)
    key_place = KeyPlace(place.b, place.memory_b, place.h, place.task, q_start, q_len, kv_start, kv_len)
    store_exact_key_gradients(
        kv, QueryStream(q, inputs.do, inputs.lse2, inputs.delta, grads.dk is not None, grads.dv is not None), grads, key_place,
        place.tile * c.TILE_KV, args, c, both, mask,
    )  # fmt: skip


class NanFlags(NamedTuple):
    """Flags by which a kernel's programs tell that their results hold a NaN."""

    flags: Any  # int32
    count: Any  # encoded


@triton_jit
def any_flag(kernels):
    """Whether a flag is set. `kernels`: `NanFlags` of each."""
    found = 0
    for i in tl.static_range(len(kernels)):
        count = decode(kernels[i].count)
        for start in range(0, count, 1024):
            at = start + tl.arange(0, 1024)
            found += tl.max(tl.load(kernels[i].flags + at, mask=at < count, other=0))
    return found > 0


@triton_jit
def mend_gradients(
    q, k, v, inputs, dq, grads, found, by_query, by_key, c_query, c_key, both: tl.constexpr, mask: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Compute tiles of dq, dk and dv that hold a NaN once more.

    inputs: `RowInputs`. dq: may be None. grads: `KeyGradients`. found: tuple of `NanFlags`. by_query, by_key: `CallArgs` of the tasks of
    queries and of keys; c_query, c_key: their `Config`.
    """
    wait_for_previous_kernel(DEPENDENT)
    if not any_flag(found):
        return
    if dq is not None:
        for n in range(tl.program_id(0), count_tasks(by_query.size), tl.num_programs(0)):
            place = find_nth_task(n, by_query.size, by_query.spans, c_query, False)
            if place.b >= 0:
                mend_dq(q, KeysValues(k, v), inputs, dq, place, by_query, c_query, both, mask)
    if grads.dk is not None or grads.dv is not None:
        for n in range(tl.program_id(0), count_tasks(by_key.size), tl.num_programs(0)):
            place = find_nth_task(n, by_key.size, by_key.spans, c_key, False)
            if place.b >= 0:
                mend_dk_dv(q, KeysValues(k, v), inputs, grads, place, by_key, c_key, both, mask)
