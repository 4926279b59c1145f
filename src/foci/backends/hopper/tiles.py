# mypy: ignore-errors
"""What every kernel does with tiles: how they come and go, and which are visited."""

from foci.backends.hopper.interface import bring, fence_async_shared, gl, gluon, mbarrier, send
from foci.backends.triton.tiles import visited, visits

__all__ = ["FAR", "barriers", "copy_in", "copy_out", "run_of", "step", "tiles_within"]

FAR = gl.constexpr(1 << 30)


@gluon.jit
def barriers(n: gl.constexpr, count: gl.constexpr):
    """n barriers, each for so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(made.index(i), count=count)
    return made


@gluon.jit
def copy_in(source, b, h, row, start, length, barrier, buffer, JAGGED: gl.constexpr):
    """Begins to copy the tile at `row` of a sequence into a [rows, width] buffer; rows beyond the sequence are zeros."""
    rows: gl.constexpr = buffer.shape[0]
    width: gl.constexpr = buffer.shape[1]
    if JAGGED:
        bring(source, [FAR, start + length, h, FAR - length + row, 0], barrier, buffer.reshape([1, 1, 1, rows, width]))
    else:
        bring(source, [b, h, row, 0], barrier, buffer.reshape([1, 1, rows, width]))


@gluon.jit
def copy_out(target, b, h, row, start, length, buffer, values, JAGGED: gl.constexpr):
    """Leaves [rows, width] values in a buffer and begins to copy them to `row` of a sequence; rows beyond it are not written."""
    buffer.store(values.to(buffer.dtype))
    fence_async_shared()
    rows: gl.constexpr = buffer.shape[0]
    width: gl.constexpr = buffer.shape[1]
    if JAGGED:
        send(target, [FAR, start + length, h, FAR - length + row, 0], buffer.reshape([1, 1, 1, rows, width]))
    else:
        send(target, [b, h, row, 0], buffer.reshape([1, 1, rows, width]))


@gluon.jit
def tiles_within(first, rows: gl.constexpr, b, h, q_len, kv_len, env, c, bounds: gl.constexpr, WARPS: gl.constexpr):
    """Tiles of keys that rows from `first` attend to: (first partial, first whole, behind the last whole, behind the last), and
    whether a tile may hold both a row's first key and a row's last."""
    # each warp holds all rows, so that none waits for another
    q_idx = gl.minimum(first + gl.arange(0, rows, gl.BlockedLayout([rows // 32], [32], [WARPS], [0])), q_len - 1)
    low, high = bounds(b, h, q_idx, q_len, kv_len, env)
    least = gl.min(low, 0)
    most = gl.max(high, 0)
    there = (least <= most) & (first < q_len)
    start = gl.where(there, least // c.TILE_KV, 1 << 24)
    end = gl.where(there, most // c.TILE_KV + 1, 0)
    whole = gl.minimum(gl.maximum((gl.max(low, 0) + c.TILE_KV - 1) // c.TILE_KV, start), end)
    last = (gl.min(high, 0) + 1) // c.TILE_KV
    ending = gl.minimum(gl.maximum(last, whole), end)
    return start, whole, ending, end, gl.where(last < whole, 1, 0)


@gluon.jit
def run_of(table, b, h, task, kv_len, c):
    """Tiles of keys of a task by the lists: (row, first full, full, first partial, partial before the gap, gap, partial)."""
    return visits(table, b, h, task, kv_len, c, c.TILE_KV)


@gluon.jit
def step(table, run, i, c):
    """The i-th tile that a program visits: by bounds from the last to the first, else partial ones before full ones."""
    row, full_first, full, part_first, before, gap, part = run
    if c.MODE == "bounds":
        return row - 1 - i
    elif c.MODE == "lists":
        if i < part:
            at = part_first + i
        else:
            at = full_first + i - part
        return visited(table, row, at, at * 0, before, gap, c)
    else:
        back = part - 1 - i
        tile = part_first + back + gl.where(back >= before, gap, 0)
        return gl.where(i < part, tile, full_first + full - 1 - (i - part))
