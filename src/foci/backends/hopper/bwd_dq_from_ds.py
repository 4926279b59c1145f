# mypy: ignore-errors
"""dq where the kernel of dk and dv leaves the gradients of its scores in memory: a product of these and the keys.

Five products in place of seven. Only some heads at a time are so kept (`backward_schedules.kept_heads`): a launch for dk and dv of a chunk
of heads, one for their dq, and the next chunk writes over what lies there. A row of what is kept belongs to a key, a column to a query,
both in tiles of 128.

Without a mask all of it is written, zeros for keys that are not there. Under the causal mask it is the tiles of queries from a tile of keys
on, so that two tiles of keys share a row (`ds_rows`): half the memory. What was not written is not multiplied, but into rows of queries
that are not there.
"""

from typing import NamedTuple

from foci.backends.hopper.gluon_compat import fence_async_shared, gl, gluon, mbarrier, tma, tma_load, tma_store, warpgroup_mma
from foci.backends.hopper.layouts import smem_layout
from foci.backends.hopper.mma import scale_accumulators, wait_accumulators, zero_accumulators
from foci.backends.hopper.smem import allocate_tiles, load_pieces, make_barriers, store_pieces, tile_pieces, to_box
from foci.backends.triton.tiles import HEAD_GROUP, decode, nth_head_task

ROWS = gl.constexpr(64)
TILE = gl.constexpr(128)


class HeadChunk(NamedTuple):
    """Heads of a launch, counted over batch entries, encoded: the first, and how many; and tiles of queries."""

    first: int
    heads: int
    tiles: int


@gluon.jit
def find_chunk_task(chunk, size, LONGEST_FIRST: gl.constexpr):
    """(batch entry, head, task, which of the chunk's heads it is) of this program; the last tasks first where they are longest."""
    tasks = decode(size.tasks)
    n, task = nth_head_task(gl.program_id(0), decode(chunk.heads), tasks, HEAD_GROUP)
    head = decode(chunk.first) + n
    b = head // decode(size.heads)
    if LONGEST_FIRST:
        task = tasks - 1 - task
    return b, head - b * decode(size.heads), task, n


@gluon.jit
def ds_rows(chunk, key, c):
    """(row where a key lies, first query of that row) of what is kept. Of n tiles of queries a tile of keys t has the last n - t; those
    behind the middle take what is free before tile n - t."""
    if c.MODE == "all":
        return key, key * 0
    else:
        tiles = decode(chunk.tiles)
        tile = key // TILE
        is_behind = tile > tiles // 2
        return gl.where(is_behind, key + (tiles - 2 * tile) * TILE, key), gl.where(is_behind, tile * TILE, 0)


@gluon.jit
def ds_layouts(keeping, member, group, key, c):
    """Of (what is kept, tiles in shared memory, chunk, head of keys in it) what `store_ds` takes, for 64 keys and a member of the head's
    group; nothing of nothing."""
    if len(keeping) > 0:
        kept, staged, chunk, head = keeping
        row, beginning = ds_rows(chunk, key, c)
        return kept, staged, head * group + member, row, beginning
    else:
        return keeping


@gluon.jit
def begin_store_ds(here, tile, query, values):
    """Begins to copy gradients of scores, [64 keys, queries], to where they are kept, by a tile in shared memory. What was read of shared
    memory before may then be written by copies."""
    kept, staged, head, row, beginning = here
    tile.store(values)
    fence_async_shared()
    tma_store(kept, [0, head, row, query - beginning], to_box(tile, False))


@gluon.jit
def store_ds(here, n, query, values):
    """The same by the n-th tile, of two that come in turn."""
    tma.store_wait(1)
    begin_store_ds(here, here[1].index(n), query, values)


@gluon.jit
def kept_producer(kept, k, tiles, bars, place, chunk, count, c):
    """One warp: gradients of scores and keys, a tile of each at a time."""
    ds_tiles, k_tiles = tiles
    full, empty = bars
    b, h, slot, first, group = place
    for i in range(0, count):
        stage = i % c.STAGES
        mbarrier.wait(empty.index(stage), ((i // c.STAGES) & 1) ^ 1)
        ready = full.index(stage)
        mbarrier.expect(ready, c.TILE_KV * 2 * (c.TILE_Q + c.D_PAD))
        row, beginning = ds_rows(chunk, i * c.TILE_KV, c)
        for half in gl.static_range(2):
            tma_load(kept, [0, slot, row, first - beginning + half * ROWS], ready, to_box(ds_tiles.index(stage * 2 + half), False))
        load_pieces(k, b, h // group, i * c.TILE_KV, 0, 0, ready, tile_pieces(k_tiles, stage), False)


@gluon.jit
def begin_dq_product(rows, keys, sums):
    """Begins to add rows, as they lie in shared memory, by keys to sums, each piece for itself."""
    begun = ()
    for i in gl.static_range(len(sums)):
        begun = begun + (warpgroup_mma(rows, keys[i], sums[i], is_async=True),)
    return begun


@gluon.jit
def kept_consumer(half: gl.constexpr, tiles, bars, dq, place, count, scale, c):
    """One warpgroup: dq of 64 queries."""
    ds_tiles, k_tiles, out_tiles = tiles
    full, empty = bars
    b, h, slot, first, group = place
    own = first + half * ROWS
    dq_sums = zero_accumulators(ROWS, c.D_PAD)
    if c.MODE == "causal":
        # of later keys nothing was written here
        count = gl.minimum(count, (own + ROWS + c.TILE_KV - 1) // c.TILE_KV)
    for i in range(0, count):
        stage = i % c.STAGES
        mbarrier.wait(full.index(stage), (i // c.STAGES) & 1)
        begun = begin_dq_product(ds_tiles.index(stage * 2 + half).permute((1, 0)), tile_pieces(k_tiles, stage), dq_sums)
        # the products before these are done
        dq_sums = wait_accumulators(begun, len(begun))
        mbarrier.arrive(empty.index((i + c.STAGES - 1) % c.STAGES), count=1, pred=i > 0)
    dq_sums = wait_accumulators(dq_sums)
    mbarrier.arrive(empty.index((count + c.STAGES - 1) % c.STAGES), count=1)
    store_pieces(dq, b, h, own, 0, 0, tile_pieces(out_tiles, half), scale_accumulators(dq_sums, scale), False)
    tma.store_wait(0)


@gluon.jit
def attention_kept_gradient(kept, k, dq, size, chunk, scale, c):
    """dq of one tile of 128 queries of a chunk of heads. Tensors come as descriptors.

    kept: gradients of scores without their scale, [1, heads of the chunk, rows, columns], as `bwd_dk_dv.attention_key_gradient` leaves
        them.
    """
    b, h, task, slot = find_chunk_task(chunk, size, True)
    first = task * c.TILE_Q
    count = (decode(size.columns) + c.TILE_KV - 1) // c.TILE_KV
    if c.MODE == "causal":
        count = gl.minimum(count, (first + c.TILE_Q) // c.TILE_KV)
    ds_tiles = gl.allocate_shared_memory(kept.dtype, [c.STAGES * 2, c.TILE_KV, ROWS], smem_layout(c.TILE_KV, ROWS))
    k_tiles = allocate_tiles(k.dtype, c.STAGES, c.TILE_KV, c.D_PAD)
    out_tiles = allocate_tiles(k.dtype, 2, ROWS, c.D_PAD)
    bars = (make_barriers(c.STAGES, 1), make_barriers(c.STAGES, 2))
    fence_async_shared()
    place = (b, h, slot, first, decode(size.group))
    gl.warp_specialize(
        [
            (kept_consumer, (0, (ds_tiles, k_tiles, out_tiles), bars, dq, place, count, scale, c)),
            (kept_consumer, (1, (ds_tiles, k_tiles, out_tiles), bars, dq, place, count, scale, c)),
            (kept_producer, (kept, k, (ds_tiles, k_tiles), bars, place, chunk, count, c)),
        ],
        [4, 1],
        [240, 24],
    )
