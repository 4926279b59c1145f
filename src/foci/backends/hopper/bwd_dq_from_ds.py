# mypy: ignore-errors
"""dq = dS K, where the kernel of dk and dv stores dS in memory: five products a tile in place of seven.

    B, Hq, Hkv, Sq, Skv, D    as in `foci.backends.hopper.forward`
    ds_scratch                [1, heads of a chunk, rows, columns]: dS^T without the scale; rows are keys, columns queries, in tiles of 128
    k, dq                     TMA descriptors [B, Hkv, Skv, D] of TILE_KV rows, [B, Hq, Sq, D] of 64 rows

Memory bounds how many heads are stored at a time (`backward_schedules.ds_chunk_heads`): one launch computes dk and dv of a chunk of heads,
the next their dq, and the next chunk overwrites the scratch.

Without a mask all of it is written, with zeros for keys past the end. Under the causal mask a key tile stores only the query tiles from its
own on, and two key tiles share a row (`ds_rows`): half the memory. What was not written is never multiplied, except into rows of queries
past the end, which are not stored.
"""

from typing import Any, NamedTuple

from foci.backends.gpu.tiles import HEAD_GROUP, decode, nth_head_task
from foci.backends.hopper.gluon_compat import fence_async_shared, gl, gluon, mbarrier, tma, tma_load, tma_store, warpgroup_mma
from foci.backends.hopper.layouts import smem_layout
from foci.backends.hopper.mma import scale_accumulators, wait_accumulators, zero_accumulators
from foci.backends.hopper.smem import allocate_tiles, load_pieces, make_barriers, reshape_to_box, store_pieces, tile_pieces

ROWS = gl.constexpr(64)
TILE = gl.constexpr(128)


class HeadChunk(NamedTuple):
    """Heads of a launch, counted over batch entries. All fields are encoded (`foci.backends.gpu.kernel_args.encode`)."""

    first: int  # first head
    heads: int  # number of heads
    tiles: int  # query tiles of 128


class DsStore(NamedTuple):
    """Scratch that a task of dk and dv stores its dS to."""

    ds_scratch: Any
    staged: Any  # staging tiles in shared memory
    chunk: Any  # `HeadChunk`
    head: Any  # number of the head in the chunk


class DsTarget(NamedTuple):
    """Part of the scratch for the dS of 64 keys and one query head."""

    ds_scratch: Any
    staged: Any
    head: Any
    row: Any  # of the first key in the scratch
    first_query: Any  # query of that row's first column


class QueryTile(NamedTuple):
    """A tile of queries of a chunk of heads."""

    b: Any
    h: Any
    slot: Any  # number of the head in the chunk
    first: Any  # first query
    group: Any  # query heads that share keys


@gluon.jit
def find_chunk_task(chunk, size, LONGEST_FIRST: gl.constexpr):
    """(batch entry, head, task, number of the head in the chunk) of this program. LONGEST_FIRST reverses the tasks of a head."""
    tasks = decode(size.tasks)
    n, task = nth_head_task(gl.program_id(0), decode(chunk.heads), tasks, HEAD_GROUP)
    head = decode(chunk.first) + n
    b = head // decode(size.heads)
    if LONGEST_FIRST:
        task = tasks - 1 - task
    return b, head - b * decode(size.heads), task, n


@gluon.jit
def ds_rows(chunk, key, c):
    """(row of a key in the scratch, query of that row's first column). Causal: of n query tiles a key tile t needs the last n - t; a key
    tile after the middle uses the columns that tile n - t leaves free in its row."""
    if c.MODE == "all":
        return key, key * 0
    else:
        tiles = decode(chunk.tiles)
        tile = key // TILE
        is_behind = tile > tiles // 2
        return gl.where(is_behind, key + (tiles - 2 * tile) * TILE, key), gl.where(is_behind, tile * TILE, 0)


@gluon.jit
def ds_layouts(ds_store, member, group, key, c):
    """Where `store_ds` stores 64 keys of a member of the head's group: a `DsTarget`. `ds_store` is a `DsStore`, or empty if dS is not
    stored; then so is the result."""
    if len(ds_store) > 0:
        row, first_query = ds_rows(ds_store.chunk, key, c)
        return DsTarget(ds_store.ds_scratch, ds_store.staged, ds_store.head * group + member, row, first_query)
    else:
        return ds_store


@gluon.jit
def begin_store_ds(ds_target, tile, query, values):
    """Write dS, [64 keys, queries], to a staging tile and begin its TMA store. Its fence also lets later TMA loads overwrite what was read
    from shared memory before."""
    tile.store(values)
    fence_async_shared()
    tma_store(ds_target.ds_scratch, [0, ds_target.head, ds_target.row, query - ds_target.first_query], reshape_to_box(tile, False))


@gluon.jit
def store_ds(ds_target, n, query, values):
    """Store dS through the n-th staging tile, of two in turn: at most one earlier store may still read its tile."""
    tma.store_wait(1)
    begin_store_ds(ds_target, ds_target.staged.index(n), query, values)


@gluon.jit
def ds_producer(ds_scratch, k, tiles, bars, place, chunk, count, c):
    """Producer warp: a tile of dS and one of K per stage."""
    ds_tiles, k_tiles = tiles
    full, empty = bars
    for i in range(0, count):
        stage = i % c.STAGES
        mbarrier.wait(empty.index(stage), ((i // c.STAGES) & 1) ^ 1)
        ready = full.index(stage)
        mbarrier.expect(ready, c.TILE_KV * 2 * (c.TILE_Q + c.D_PAD))
        row, first_query = ds_rows(chunk, i * c.TILE_KV, c)
        for half in gl.static_range(2):
            tma_load(
                ds_scratch,
                [0, place.slot, row, place.first - first_query + half * ROWS],
                ready,
                reshape_to_box(ds_tiles.index(stage * 2 + half), False),
            )
        load_pieces(k, place.b, place.h // place.group, i * c.TILE_KV, 0, 0, ready, tile_pieces(k_tiles, stage), False)


@gluon.jit
def begin_dq_product(rows, keys, sums):
    """Begin sums += rows @ keys, rows and keys in shared memory, one asynchronous wgmma per piece."""
    pending = ()
    for i in gl.static_range(len(sums)):
        pending = pending + (warpgroup_mma(rows, keys[i], sums[i], is_async=True),)
    return pending


@gluon.jit
def ds_consumer(half: gl.constexpr, tiles, bars, dq, place, count, scale, c):
    """One warpgroup: dq of 64 queries, one product in flight."""
    ds_tiles, k_tiles, out_tiles = tiles
    full, empty = bars
    half_first = place.first + half * ROWS
    dq_sums = zero_accumulators(ROWS, c.D_PAD)
    if c.MODE == "causal":
        # dS of later keys was not written
        count = gl.minimum(count, (half_first + ROWS + c.TILE_KV - 1) // c.TILE_KV)
    for i in range(0, count):
        stage = i % c.STAGES
        mbarrier.wait(full.index(stage), (i // c.STAGES) & 1)
        pending = begin_dq_product(ds_tiles.index(stage * 2 + half).permute((1, 0)), tile_pieces(k_tiles, stage), dq_sums)
        # the previous tile's products are done: free its stage
        dq_sums = wait_accumulators(pending, len(pending))
        mbarrier.arrive(empty.index((i + c.STAGES - 1) % c.STAGES), count=1, pred=i > 0)
    dq_sums = wait_accumulators(dq_sums)
    mbarrier.arrive(empty.index((count + c.STAGES - 1) % c.STAGES), count=1)
    store_pieces(dq, place.b, place.h, half_first, 0, 0, tile_pieces(out_tiles, half), scale_accumulators(dq_sums, scale), False)
    tma.store_wait(0)


@gluon.jit
def attention_kept_gradient(ds_scratch, k, dq, size, chunk, scale, c):
    """dq of one tile of 128 queries of a chunk of heads. Shapes are in the legend above."""
    b, h, task, slot = find_chunk_task(chunk, size, True)
    first = task * c.TILE_Q
    count = (decode(size.columns) + c.TILE_KV - 1) // c.TILE_KV
    if c.MODE == "causal":
        count = gl.minimum(count, (first + c.TILE_Q) // c.TILE_KV)
    ds_tiles = gl.allocate_shared_memory(ds_scratch.dtype, [c.STAGES * 2, c.TILE_KV, ROWS], smem_layout(c.TILE_KV, ROWS))
    k_tiles = allocate_tiles(k.dtype, c.STAGES, c.TILE_KV, c.D_PAD)
    out_tiles = allocate_tiles(k.dtype, 2, ROWS, c.D_PAD)
    bars = (make_barriers(c.STAGES, 1), make_barriers(c.STAGES, 2))
    fence_async_shared()
    place = QueryTile(b, h, slot, first, decode(size.group))
    gl.warp_specialize(
        [
            (ds_consumer, (0, (ds_tiles, k_tiles, out_tiles), bars, dq, place, count, scale, c)),
            (ds_consumer, (1, (ds_tiles, k_tiles, out_tiles), bars, dq, place, count, scale, c)),
            (ds_producer, (ds_scratch, k, (ds_tiles, k_tiles), bars, place, chunk, count, c)),
        ],
        [4, 1],
        [240, 24],
    )
