# mypy: ignore-errors
"""dq where the kernel of dk and dv leaves the gradients of its scores in memory: a product of these and the keys.

Only some heads at a time are so kept (`backward_schedules.kept_heads`): a launch for dk and dv of a chunk of heads, one for their dq, and
the next chunk writes over what lies there. A row of what is kept belongs to a key, a column to a query, both in tiles of 128.

Without a mask all of it is written, zeros for keys that are not there. Under the causal mask it is the tiles of queries from a tile of keys
on, so that two tiles of keys share a row (`rows_of`): half the memory. What was not written is not multiplied, but for rows of queries
that are not there, of which nothing is kept.
"""

from typing import NamedTuple

from foci.backends.hopper.interface import bring, fence_async_shared, gl, gluon, mbarrier, send, tma, warpgroup_mma
from foci.backends.hopper.layouts import shared
from foci.backends.hopper.products import finish_sums, no_sums, scaled
from foci.backends.hopper.tiles import barriers, boxed, buffers_of, copy_pieces_in, copy_pieces_out, nth
from foci.backends.triton.tiles import HEAD_GROUP, number, turn

ROWS = gl.constexpr(64)
TILE = gl.constexpr(128)


class Chunk(NamedTuple):
    """Heads of a launch, counted over batch entries, encoded: the first, and how many; and tiles of queries."""

    first: int
    heads: int
    tiles: int


@gluon.jit
def find_in(chunk, size, LONGEST_FIRST: gl.constexpr):
    """(batch entry, head, task, which of the chunk's heads it is) of this program; the last tasks first where they are longest."""
    tasks = number(size.tasks)
    n, task = turn(gl.program_id(0), number(chunk.heads), tasks, HEAD_GROUP)
    head = number(chunk.first) + n
    b = head // number(size.heads)
    if LONGEST_FIRST:
        task = tasks - 1 - task
    return b, head - b * number(size.heads), task, n


@gluon.jit
def rows_of(chunk, key, c):
    """(row where a key lies, first query of that row) of what is kept. Of n tiles of queries a tile of keys t has the last n - t; those
    behind the middle take what is free before tile n - t."""
    if c.MODE == "all":
        return key, key * 0
    else:
        tiles = number(chunk.tiles)
        tile = key // TILE
        is_behind = tile > tiles // 2
        return gl.where(is_behind, key + (tiles - 2 * tile) * TILE, key), gl.where(is_behind, tile * TILE, 0)


@gluon.jit
def lying(keeping, member, group, key, c):
    """Of (what is kept, tiles in shared memory, chunk, head of keys in it) what `leave` takes, for 64 keys and a member of the head's
    group; nothing of nothing."""
    if len(keeping) > 0:
        kept, staged, chunk, head = keeping
        row, beginning = rows_of(chunk, key, c)
        return kept, staged, head * group + member, row, beginning
    else:
        return keeping


@gluon.jit
def leave(here, n, query, values):
    """Begins to copy gradients of scores, [64 keys, queries], to where they are kept, by the n-th tile in shared memory, of two that come
    in turn. What was read of shared memory before may then be written by copies."""
    kept, staged, head, row, beginning = here
    tile = staged.index(n)
    tma.store_wait(1)
    tile.store(values)
    fence_async_shared()
    send(kept, [0, head, row, query - beginning], boxed(tile, False))


@gluon.jit
def kept_producer(kept, k, tiles, bars, place, chunk, count, c):
    """One warp: gradients of scores and keys, a tile of each at a time."""
    ds_tiles, k_tiles = tiles
    full, empty = bars
    b, h, slot, first, group = place
    PARTS: gl.constexpr = c.TILE_Q // ROWS
    for i in range(0, count):
        stage = i % c.STAGES
        mbarrier.wait(empty.index(stage), ((i // c.STAGES) & 1) ^ 1)
        ready = full.index(stage)
        mbarrier.expect(ready, c.TILE_KV * 2 * (c.TILE_Q + c.D_PAD))
        row, beginning = rows_of(chunk, i * c.TILE_KV, c)
        for part in gl.static_range(PARTS):
            bring(kept, [0, slot, row, first - beginning + part * ROWS], ready, boxed(ds_tiles.index(stage * PARTS + part), False))
        copy_pieces_in(k, b, h // group, i * c.TILE_KV, 0, 0, ready, nth(k_tiles, stage), False)


@gluon.jit
def begin_rows(sums, ds_tiles, keys, first):
    """Begins to add a tile's share to dq, 64 rows at a time."""
    begun = ()
    PIECES: gl.constexpr = len(keys)
    for i in gl.static_range(len(sums)):
        rows = ds_tiles.index(first + i // PIECES).permute((1, 0))
        begun = begun + (warpgroup_mma(rows, keys[i % PIECES], sums[i], is_async=True),)
    return begun


@gluon.jit
def kept_consumer(me: gl.constexpr, tiles, bars, dq, place, count, scale, c):
    """One warpgroup: dq of half of the queries."""
    ds_tiles, k_tiles, out_tiles = tiles
    full, empty = bars
    b, h, slot, first, group = place
    PARTS: gl.constexpr = c.TILE_Q // ROWS
    OWN: gl.constexpr = PARTS // 2
    PIECES: gl.constexpr = len(k_tiles)
    sums = ()
    for _ in gl.static_range(OWN):
        sums = sums + no_sums(ROWS, c.D_PAD)
    if c.MODE == "causal":
        # of later keys nothing was written here
        count = gl.minimum(count, (first + (me + 1) * OWN * ROWS + c.TILE_KV - 1) // c.TILE_KV)
    for i in range(0, count):
        stage = i % c.STAGES
        mbarrier.wait(full.index(stage), (i // c.STAGES) & 1)
        begun = begin_rows(sums, ds_tiles, nth(k_tiles, stage), stage * PARTS + me * OWN)
        # the products before these are done
        sums = finish_sums(begun, len(begun))
        mbarrier.arrive(empty.index((i + c.STAGES - 1) % c.STAGES), count=1, pred=i > 0)
    sums = finish_sums(sums)
    mbarrier.arrive(empty.index((count + c.STAGES - 1) % c.STAGES), count=1)
    for part in gl.static_range(OWN):
        tma.store_wait(0)
        row = first + (me * OWN + part) * ROWS
        copy_pieces_out(dq, b, h, row, 0, 0, nth(out_tiles, me), scaled(sums[part * PIECES : (part + 1) * PIECES], scale), False)
    tma.store_wait(0)


@gluon.jit
def attention_kept_gradient(kept, k, dq, size, chunk, scale, c):
    """dq of one tile of queries of a chunk of heads. Tensors come as descriptors.

    kept: gradients of scores without their scale, [1, heads of the chunk, rows, columns], as `backward_keys.attention_key_gradient` leaves
        them.
    """
    b, h, task, slot = find_in(chunk, size, True)
    first = task * c.TILE_Q
    count = (number(size.columns) + c.TILE_KV - 1) // c.TILE_KV
    if c.MODE == "causal":
        count = gl.minimum(count, (first + c.TILE_Q) // c.TILE_KV)
    PARTS: gl.constexpr = c.TILE_Q // ROWS
    ds_tiles = gl.allocate_shared_memory(kept.dtype, [c.STAGES * PARTS, c.TILE_KV, ROWS], shared(c.TILE_KV, ROWS))
    k_tiles = buffers_of(k.dtype, c.STAGES, c.TILE_KV, c.D_PAD)
    out_tiles = buffers_of(k.dtype, 2, ROWS, c.D_PAD)
    bars = (barriers(c.STAGES, 1), barriers(c.STAGES, 2))
    fence_async_shared()
    place = (b, h, slot, first, number(size.group))
    gl.warp_specialize(
        [
            (kept_consumer, (0, (ds_tiles, k_tiles, out_tiles), bars, dq, place, count, scale, c)),
            (kept_consumer, (1, (ds_tiles, k_tiles, out_tiles), bars, dq, place, count, scale, c)),
            (kept_producer, (kept, k, (ds_tiles, k_tiles), bars, place, chunk, count, c)),
        ],
        [4, 1],
        [240, 24],
    )
