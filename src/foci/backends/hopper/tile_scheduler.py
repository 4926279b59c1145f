# mypy: ignore-errors
"""Tile scheduler of the forward: the n-th task, the tiles of keys it visits, and which of them each consumer accumulates."""

from foci.backends.gpu.tiles import TaskTiles, decode, find_task_among, nth_head_task, nth_packed_place, read_task_record, sequence_at
from foci.backends.hopper.gluon_compat import gl
from foci.backends.hopper.kernel_args import PackedPlace, Place, Segments
from foci.backends.hopper.masking import ROWS
from foci.backends.hopper.smem import sequence_span, tile_run, tiles_within
from foci.compat.gluon import gluon_jit

__all__ = ["find_task", "plan_tiles"]


@gluon_jit
def find_task(n, size, spans, table, c):
    """`Place` of the n-th task, or `PackedPlace`: a packed sequence comes with the same load.

    `table.order` permutes dense tasks. `table.short_last` puts the last, shorter task of each head after all others.
    """
    if table.short_last is not None:
        heads, late = decode(size.heads), decode(table.short_last)
        tasks = decode(size.tasks) - late
        before = decode(size.batch) * heads * tasks
        is_late = n >= before
        bh, task = nth_head_task(gl.where(is_late, 0, n), decode(size.batch) * heads, tasks, c.HEADS_TOGETHER)
        bh = gl.where(is_late, n - before, bh)
        task = gl.where(is_late, tasks, tasks - 1 - task)
        b = bh // heads
        return Place(b, b, bh - b * heads, task, task)
    else:
        if c.JAGGED:
            # task 0 is spare; take it last
            h, task = nth_packed_place(n, size, spans, c.HEADS_TOGETHER)
            task = gl.where(task + 1 < decode(size.tasks), task + 1, 0)
            b, tile = read_task_record(spans, h, task, c)
            place = PackedPlace(b, h * 0, h, task, tile, *sequence_at(spans, size, b, task, c))
        else:
            place = find_task_among(n, size, spans, c, True, c.HEADS_TOGETHER)
            if table.order is not None:
                task = gl.load(table.order + (place.b * decode(table.b_stride) + place.h * decode(table.h_stride) + place.task))
                place = Place(place.b, place.memory_b, place.h, task, task)
        return place


@gluon_jit
def plan_tiles(place, params, c, bounds: gl.constexpr, WARPS: gl.constexpr):
    """(`TaskTiles` of the task, `Segments` of each consumer)."""
    b, h, table, env = place.b, place.h, params.table, params.env
    q_start, q_len, kv_start, kv_len = sequence_span(place, params.spans, params.size, c)
    if c.MODE == "bounds":
        first = place.tile * c.TILE_Q
        bounds0 = tiles_within(first, ROWS, b, h, q_len, kv_len, env, c, bounds, WARPS)
        bounds1 = tiles_within(first + ROWS, ROWS, b, h, q_len, kv_len, env, c, bounds, WARPS)
        bounds2 = bounds1
        if c.CONSUMERS == 3:
            bounds2 = tiles_within(first + 2 * ROWS, ROWS, b, h, q_len, kv_len, env, c, bounds, WARPS)
        start = gl.minimum(gl.minimum(bounds0.start, bounds1.start), bounds2.start)
        top = gl.maximum(gl.maximum(bounds0.end, bounds1.end), bounds2.end)
        count = gl.maximum(top - start, 0)
        zero = count * 0
        run = TaskTiles(top, zero, zero, zero, zero, zero, count)
        segments0 = split_range(top, bounds0, count)
        segments1 = split_range(top, bounds1, count)
        segments2 = split_range(top, bounds2, count)
    else:
        run = tile_run(table, b, h, place.task, kv_len, c)
        segments0 = split_list(0, run, table, c)
        segments1 = split_list(1, run, table, c)
        segments2 = split_list(c.CONSUMERS - 1, run, table, c)
    return run, (segments0, segments1, segments2)


@gluon_jit
def split_range(top, tiles, count):
    """`Segments` of one consumer, whose rows have the `KeyBounds` `tiles`, in a run of consecutive tiles, from the last to the first."""
    has_keys = tiles.end > tiles.start
    begin = gl.where(has_keys, top - tiles.end, count)
    stop = gl.where(has_keys, top - tiles.start, count)
    full_begin = gl.where(has_keys, top - tiles.full_end, count)
    return Segments(begin, full_begin, gl.where(has_keys, top - tiles.full_start, count), stop, count, tiles.narrow)


@gluon_jit
def split_list(me, run, table, c):
    """Segments of one consumer in a list, partial tiles before full ones. With mask bits it skips partial tiles that hold none of its
    bits."""
    count = run.full + run.part
    start = count * 0
    end = count
    if c.MASK_BITS:
        limit = table.limits + (run.row * c.CONSUMERS + me) * 2
        start = run.part - gl.load(limit)
        end = gl.where(run.full > 0, count, gl.maximum(gl.load(limit + 1), start))
    return Segments(start, gl.minimum(run.part, end), end, end, count, count * 0)
