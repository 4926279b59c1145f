# mypy: ignore-errors
"""What every kernel does with tiles: how they come and go, and which are visited."""

from foci.backends.hopper.gluon_compat import fence_async_shared, gl, gluon, mbarrier, tma_load, tma_store, view_smem
from foci.backends.hopper.layouts import piece, pieces, smem_layout, tma_columns
from foci.backends.triton.tiles import FAR, nth_visited, sequence, tile_runs, tile_start

__all__ = [
    "FAR",
    "allocate_tiles",
    "first_key",
    "load_pieces",
    "make_barriers",
    "opaque_zero",
    "sequence_span",
    "step_to_tile",
    "store_pieces",
    "tile_pieces",
    "tile_run",
    "tiles_within",
]


@gluon.jit
def opaque_zero(x):
    """A number that the compiler takes as it comes, where it stands: what follows from it is neither made earlier nor kept over a loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [gl.to_tensor(x)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def make_barriers(n: gl.constexpr, count: gl.constexpr):
    """n barriers, each for so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(made.index(i), count=count)
    return made


@gluon.jit
def allocate_tiles(dtype: gl.constexpr, n: gl.constexpr, rows: gl.constexpr, width: gl.constexpr):
    """n tiles [rows, width]: [n, rows, columns] for each piece of the width."""
    made = ()
    for i in gl.static_range(len(pieces(width))):
        made = made + (gl.allocate_shared_memory(dtype, [n, rows, piece(width, i)], smem_layout(rows, tma_columns(width))),)
    return made


@gluon.jit
def tile_pieces(buffers, n):
    """The pieces of the n-th tile."""
    found = ()
    for i in gl.static_range(len(buffers)):
        found = found + (buffers[i].index(n),)
    return found


@gluon.jit
def nth_columns(piece, i: gl.constexpr, columns: gl.constexpr):
    """The i-th so many columns of a piece, which lie together."""
    if piece.shape[1] == columns:
        return piece
    else:
        rows: gl.constexpr = piece.shape[0]
        apart = view_smem(piece, piece.dtype, [piece.shape[1] // columns, rows, columns], smem_layout(rows, columns))
        return apart.index(i)


@gluon.jit
def place(b, h, row, start, length, at, JAGGED: gl.constexpr):
    """Where columns from `at` of the rows from `row` of a sequence lie, as the copy engine's maps count."""
    if JAGGED:
        return [FAR, start + length, h, FAR - length + row, at]
    else:
        return [b, h, row, at]


@gluon.jit
def to_box(part, JAGGED: gl.constexpr):
    """[rows, columns] with the dims of a map."""
    if JAGGED:
        return part.reshape([1, 1, 1, part.shape[0], part.shape[1]])
    else:
        return part.reshape([1, 1, part.shape[0], part.shape[1]])


@gluon.jit
def load_pieces(source, b, h, row, start, length, barrier, tile, JAGGED: gl.constexpr):
    """Begins to copy the tile at `row` of a sequence into the pieces of one; rows beyond the sequence are zeros."""
    columns: gl.constexpr = source.block_shape[len(source.block_shape) - 1]
    at = 0
    for i in gl.static_range(len(tile)):
        for j in gl.static_range(tile[i].shape[1] // columns):
            tma_load(source, place(b, h, row, start, length, at, JAGGED), barrier, to_box(nth_columns(tile[i], j, columns), JAGGED))
            at = at + columns


@gluon.jit
def store_pieces(target, b, h, row, start, length, tile, values, JAGGED: gl.constexpr):
    """Leaves values in the pieces of a tile and begins to copy them to `row` of a sequence; rows beyond it are not written."""
    columns: gl.constexpr = target.block_shape[len(target.block_shape) - 1]
    at = 0
    for i in gl.static_range(len(values)):
        tile[i].store(values[i].to(tile[i].dtype))
        fence_async_shared()
        for j in gl.static_range(tile[i].shape[1] // columns):
            tma_store(target, place(b, h, row, start, length, at, JAGGED), to_box(nth_columns(tile[i], j, columns), JAGGED))
            at = at + columns


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
def sequence_span(place, spans, size, c):
    """Where the sequence of a program's place lies, see `triton.tiles.sequence`: packed, the place ends with it."""
    if c.JAGGED:
        return place[len(place) - 4 :]
    else:
        return sequence(spans, size, place[0], c)


@gluon.jit
def tile_run(table, b, h, task, kv_len, c):
    """Tiles of keys of a task by the lists: (row, first full, full, first partial, partial before the gap, gap, partial)."""
    return tile_runs(table, b, h, task, kv_len, c, c.TILE_KV)


@gluon.jit
def step_to_tile(table, run, i, c):
    """The i-th tile that a program visits: by bounds from the last to the first, else partial ones before full ones."""
    row, full_first, full, part_first, before, gap, part = run
    if c.MODE == "bounds":
        return row - 1 - i
    elif c.MODE == "lists":
        if i < part:
            at = part_first + i
        else:
            at = full_first + i - part
        return nth_visited(table, row, at, at * 0, before, gap, c)
    else:
        back = part - 1 - i
        tile = part_first + back + gl.where(back >= before, gap, 0)
        return gl.where(i < part, tile, full_first + full - 1 - (i - part))


@gluon.jit
def first_key(tile, c):
    """First key of a tile that `step_to_tile` gave."""
    if c.STARTS:
        return tile
    else:
        return tile_start(tile, c, c.TILE_KV)
