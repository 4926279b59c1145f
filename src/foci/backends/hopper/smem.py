# mypy: ignore-errors
"""Tiles in shared memory: allocation, TMA loads and stores, and which tiles of keys a task visits."""

from typing import Any, NamedTuple

from foci.backends.gpu.tiles import FAR, nth_visited, sequence, tile_runs, tile_start
from foci.backends.hopper.gluon_compat import fence_async_shared, gl, gluon, mbarrier, tma_load, tma_store, view_smem
from foci.backends.hopper.kernel_args import KeyBounds
from foci.backends.hopper.layouts import operand_layout, piece, pieces, smem_layout, tma_columns
from foci.compat.gluon import gluon_jit

__all__ = [
    "FAR",
    "KVRing",
    "QuerySmem",
    "allocate_tiles",
    "first_key",
    "load_pieces",
    "load_q_registers",
    "make_barriers",
    "opaque_value",
    "reuses_q_smem",
    "sequence_span",
    "step_to_tile",
    "store_pieces",
    "tile_pieces",
    "tile_run",
    "tiles_within",
]


class QuerySmem(NamedTuple):
    """Tiles of queries in shared memory, one for each consumer."""

    tiles: Any
    full: Any  # barriers "filled"
    free: Any  # barriers "free", see `foci.backends.hopper.barriers`


class KVRing(NamedTuple):
    """STAGES tiles of keys and of values in shared memory, and their barriers "filled" and "free"."""

    k_tiles: Any
    v_tiles: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any


@gluon_jit
def opaque_value(x):
    """Return x as a value that the compiler cannot see through, so that it neither hoists what depends on it nor keeps that over a loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [gl.to_tensor(x)], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def make_barriers(n: gl.constexpr, count: gl.constexpr):
    """Allocate n mbarriers, each of which completes after `count` arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(barriers.index(i), count=count)
    return barriers


@gluon_jit
def allocate_tiles(dtype: gl.constexpr, n: gl.constexpr, rows: gl.constexpr, width: gl.constexpr):
    """Allocate n tiles [rows, width], as one buffer [n, rows, columns] for each power of two that the width is split into."""
    tiles = ()
    for i in gl.static_range(len(pieces(width))):
        tiles = tiles + (gl.allocate_shared_memory(dtype, [n, rows, piece(width, i)], smem_layout(rows, tma_columns(width))),)
    return tiles


@gluon_jit
def tile_pieces(buffers, n):
    """View the n-th tile: a buffer for each piece of its width."""
    views = ()
    for i in gl.static_range(len(buffers)):
        views = views + (buffers[i].index(n),)
    return views


@gluon_jit
def nth_columns(piece, i: gl.constexpr, columns: gl.constexpr):
    """View the i-th group of `columns` columns of a piece; each group is contiguous in shared memory."""
    if piece.shape[1] == columns:
        return piece
    else:
        rows: gl.constexpr = piece.shape[0]
        slabs = view_smem(piece, piece.dtype, [piece.shape[1] // columns, rows, columns], smem_layout(rows, columns))
        return slabs.index(i)


@gluon_jit
def tma_coordinates(b, h, row, start, length, at, JAGGED: gl.constexpr):
    """TMA coordinates of column `at` in `row` of a sequence. Packed, the map is 5-D so that rows past the sequence's end are out of
    bounds."""
    if JAGGED:
        return [FAR, start + length, h, FAR - length + row, at]
    else:
        return [b, h, row, at]


@gluon_jit
def reshape_to_box(part, JAGGED: gl.constexpr):
    """Reshape [rows, columns] to the rank of a TMA box."""
    if JAGGED:
        return part.reshape([1, 1, 1, part.shape[0], part.shape[1]])
    else:
        return part.reshape([1, 1, part.shape[0], part.shape[1]])


@gluon_jit
def load_pieces(source, b, h, row, start, length, barrier, tile, JAGGED: gl.constexpr):
    """Begin a TMA load of the tile at `row` of a sequence; rows past the sequence are filled with zeros."""
    columns: gl.constexpr = source.block_shape[len(source.block_shape) - 1]
    column = 0
    for i in gl.static_range(len(tile)):
        for j in gl.static_range(tile[i].shape[1] // columns):
            tma_load(
                source,
                tma_coordinates(b, h, row, start, length, column, JAGGED),
                barrier,
                reshape_to_box(nth_columns(tile[i], j, columns), JAGGED),
            )
            column = column + columns


@gluon_jit
def store_pieces(target, b, h, row, start, length, tile, values, JAGGED: gl.constexpr):
    """Write values to a tile in shared memory and begin a TMA store to `row` of a sequence; rows past the sequence are not written."""
    columns: gl.constexpr = target.block_shape[len(target.block_shape) - 1]
    column = 0
    for i in gl.static_range(len(values)):
        tile[i].store(values[i].to(tile[i].dtype))
        fence_async_shared()
        for j in gl.static_range(tile[i].shape[1] // columns):
            tma_store(
                target, tma_coordinates(b, h, row, start, length, column, JAGGED), reshape_to_box(nth_columns(tile[i], j, columns), JAGGED)
            )
            column = column + columns


@gluon_jit
def tiles_within(first, rows: gl.constexpr, b, h, q_len, kv_len, env, c, bounds: gl.constexpr, WARPS: gl.constexpr):
    """`KeyBounds` of `rows` rows from `first`, by the mask's bounds."""
    # every warp holds all rows: the reductions need no exchange between warps
    q_idx = gl.minimum(first + gl.arange(0, rows, gl.BlockedLayout([rows // 32], [32], [WARPS], [0])), q_len - 1)
    low, high = bounds(b, h, q_idx, q_len, kv_len, env)
    least = gl.min(low, 0)
    most = gl.max(high, 0)
    has_keys = (least <= most) & (first < q_len)
    start = gl.where(has_keys, least // c.TILE_KV, 1 << 24)
    end = gl.where(has_keys, most // c.TILE_KV + 1, 0)
    full_start = gl.minimum(gl.maximum((gl.max(low, 0) + c.TILE_KV - 1) // c.TILE_KV, start), end)
    last = (gl.min(high, 0) + 1) // c.TILE_KV
    full_end = gl.minimum(gl.maximum(last, full_start), end)
    return KeyBounds(start, full_start, full_end, end, gl.where(last < full_start, 1, 0))


@gluon_jit
def sequence_span(place, spans, size, c):
    """(q_start, q_len, kv_start, kv_len) of a task, see `triton.tiles.sequence`; a `PackedPlace` has them."""
    if c.JAGGED:
        return place.q_start, place.q_len, place.kv_start, place.kv_len
    else:
        return sequence(spans, size, place.b, c)


@gluon_jit
def tile_run(table, b, h, task, kv_len, c):
    """Tiles of keys of a task."""
    return tile_runs(table, b, h, task, kv_len, c, c.TILE_KV)


@gluon_jit
def step_to_tile(table, run, i, c):
    """The i-th tile that a task visits: from the last to the first with bounds, else partial ones before full ones."""
    if c.MODE == "bounds":
        return run.row - 1 - i
    elif c.MODE == "lists":
        if i < run.part:
            at = run.part_first + i
        else:
            at = run.full_first + i - run.part
        return nth_visited(table, run.row, at, at * 0, run.before, run.gap, c)
    else:
        n = run.part - 1 - i
        tile = run.part_first + n + gl.where(n >= run.before, run.gap, 0)
        return gl.where(i < run.part, tile, run.full_first + run.full - 1 - (i - run.part))


@gluon_jit
def first_key(tile, c):
    """First key of a tile that `step_to_tile` returned."""
    if c.KEY_STARTS:
        return tile
    else:
        return tile_start(tile, c, c.TILE_KV)


@gluon_jit
def load_q_registers(tile, c):
    """Load a query tile into registers as the left operand of wgmma, which then reads shared memory for keys alone."""
    parts = ()
    for i in gl.static_range(len(tile)):
        parts = parts + (tile[i].load(operand_layout(c.TILE_KV)),)
    # the producer may overwrite the tile by TMA after this
    fence_async_shared()
    return parts


@gluon.constexpr_function
def reuses_q_smem(width, out_width, is_persistent):
    """Whether a consumer stages its result in its query tile: wide heads leave no room for another, and a single task needs none."""
    fits = pieces(width)[: len(pieces(out_width))] == pieces(out_width)
    return fits and min(64, tma_columns(width)) == min(64, tma_columns(out_width)) and (width > 128 or not is_persistent)
