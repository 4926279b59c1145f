# mypy: ignore-errors
"""Which tiles of keys a program of the forward visits, and which of them each of its consumers folds."""

from foci.backends.hopper.gluon_compat import gl, gluon
from foci.backends.hopper.masking import ROWS
from foci.backends.hopper.smem import sequence_span, tile_run, tiles_within
from foci.backends.triton.tiles import decode, find_task_among, nth_head_task, nth_packed_place, read_task_record, sequence_at

__all__ = ["find_task", "plan_tiles"]


@gluon.jit
def find_task(n, size, spans, table, c):
    """Place of the n-th task: (b that functions are told, batch entry in memory, head, task, tile), and packed where the sequence lies,
    which one look tells with it; b < 0 for a spare one. Dense tasks come in the order of the table, if it has one; the last ones of all
    heads may come late."""
    if table.late is not None:
        heads, late = decode(size.heads), decode(table.late)
        tasks = decode(size.tasks) - late
        before = decode(size.batch) * heads * tasks
        is_late = n >= before
        bh, task = nth_head_task(gl.where(is_late, 0, n), decode(size.batch) * heads, tasks, c.TOGETHER)
        bh = gl.where(is_late, n - before, bh)
        task = gl.where(is_late, tasks, tasks - 1 - task)
        b = bh // heads
        return b, b, bh - b * heads, task, task
    else:
        if c.JAGGED:
            # the first is spare, and comes last
            h, task = nth_packed_place(n, size, spans, c.TOGETHER)
            task = gl.where(task + 1 < decode(size.tasks), task + 1, 0)
            b, tile = read_task_record(spans, h, task, c)
            place = (b, h * 0, h, task, tile) + sequence_at(spans, size, b, task, c)
        else:
            place = find_task_among(n, size, spans, c, True, c.TOGETHER)
            if table.order is not None:
                b, memory_b, h, task, tile = place
                task = gl.load(table.order + (b * decode(table.b_stride) + h * decode(table.h_stride) + task))
                place = (b, memory_b, h, task, task)
        return place


@gluon.jit
def plan_tiles(place, spans, size, table, env, c, bounds: gl.constexpr, WARPS: gl.constexpr):
    """(tiles that the program visits, and for each consumer where its partial, full and partial ones begin and end)."""
    b, memory_b, h, task, block = place[:5]
    q_start, q_len, kv_start, kv_len = sequence_span(place, spans, size, c)
    if c.MODE == "bounds":
        first = block * c.TILE_Q
        start0, whole0, ending0, end0, narrow0 = tiles_within(first, ROWS, b, h, q_len, kv_len, env, c, bounds, WARPS)
        start1, whole1, ending1, end1, narrow1 = tiles_within(first + ROWS, ROWS, b, h, q_len, kv_len, env, c, bounds, WARPS)
        start2, whole2, ending2, end2, narrow2 = start1, whole1, ending1, end1, narrow1
        if c.CONSUMERS == 3:
            start2, whole2, ending2, end2, narrow2 = tiles_within(first + 2 * ROWS, ROWS, b, h, q_len, kv_len, env, c, bounds, WARPS)
        start = gl.minimum(gl.minimum(start0, start1), start2)
        top = gl.maximum(gl.maximum(end0, end1), end2)
        count = gl.maximum(top - start, 0)
        zero = count * 0
        run = (top, zero, zero, zero, zero, zero, count)
        cuts0 = split_range(top, start0, whole0, ending0, end0, count, narrow0)
        cuts1 = split_range(top, start1, whole1, ending1, end1, count, narrow1)
        cuts2 = split_range(top, start2, whole2, ending2, end2, count, narrow2)
    else:
        run = tile_run(table, b, h, task, kv_len, c)
        cuts0 = split_list(0, run, table, c)
        cuts1 = split_list(1, run, table, c)
        cuts2 = split_list(c.CONSUMERS - 1, run, table, c)
    return run, (cuts0, cuts1, cuts2)


@gluon.jit
def split_range(top, start, whole, ending, end, count, narrow):
    """Of tiles from the last to the first: where a consumer's begin, whole ones begin and end, all end; and their number."""
    there = end > start
    begin = gl.where(there, top - end, count)
    stop = gl.where(there, top - start, count)
    return begin, gl.where(there, top - ending, count), gl.where(there, top - whole, count), stop, count, narrow


@gluon.jit
def split_list(me, run, table, c):
    """The same of a list: a consumer begins with the first partial tile that it needs, and ends with the last if none is whole."""
    row, full_first, full, part_first, before, gap, part = run
    count = full + part
    start = count * 0
    end = count
    if c.WORDS:
        limit = table.limits + (row * c.CONSUMERS + me) * 2
        start = part - gl.load(limit)
        end = gl.where(full > 0, count, gl.maximum(gl.load(limit + 1), start))
    return start, gl.minimum(part, end), end, end, count, count * 0
