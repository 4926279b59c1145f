# mypy: ignore-errors
"""Memory for dS of some heads at a time: `bwd_dk_dv` stores it, `bwd_dq` multiplies it by the keys, so that both take five products a tile
in place of seven.

    ds_scratch    [1, heads of a chunk, rows, columns]: dS^T without the scale; rows are keys, columns queries, in tiles of 128

Memory bounds how many heads are stored at a time (`backward_schedules.ds_chunk_heads`): one launch computes dk and dv of a chunk of heads,
the next their dq, and the next chunk overwrites the scratch.

Without a mask all of it is written, with zeros for keys past the end. Under the causal mask a key tile stores only the query tiles from its
own on, and two key tiles share a row (`ds_rows`): half the memory. What was not written is never multiplied, except into rows of queries
past the end, which are not stored.
"""

from typing import Any, NamedTuple

from foci.backends.gpu.tiles import HEAD_GROUP, decode, nth_head_task
from foci.backends.hopper.gluon_compat import fence_async_shared, gl, tma, tma_store
from foci.backends.hopper.smem import reshape_to_box
from foci.compat.gluon import gluon_jit

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


@gluon_jit
def find_chunk_task(chunk, size, LONGEST_FIRST: gl.constexpr):
    """(batch entry, head, task, number of the head in the chunk) of this program. LONGEST_FIRST reverses the tasks of a head."""
    tasks = decode(size.tasks)
    n, task = nth_head_task(gl.program_id(0), decode(chunk.heads), tasks, HEAD_GROUP)
    head = decode(chunk.first) + n
    b = head // decode(size.heads)
    if LONGEST_FIRST:
        task = tasks - 1 - task
    return b, head - b * decode(size.heads), task, n


@gluon_jit
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


@gluon_jit
def ds_layouts(ds_store, member, group, key, c):
    """Where `store_ds` stores 64 keys of a member of the head's group: a `DsTarget`. `ds_store` is a `DsStore`, or empty if dS is not
    stored; then so is the result."""
    if len(ds_store) > 0:
        row, first_query = ds_rows(ds_store.chunk, key, c)
        return DsTarget(ds_store.ds_scratch, ds_store.staged, ds_store.head * group + member, row, first_query)
    else:
        return ds_store


@gluon_jit
def begin_store_ds(ds_target, tile, query, values):
    """Write dS, [64 keys, queries], to a staging tile and begin its TMA store. Its fence also lets later TMA loads overwrite what was read
    from shared memory before."""
    tile.store(values)
    fence_async_shared()
    tma_store(ds_target.ds_scratch, [0, ds_target.head, ds_target.row, query - ds_target.first_query], reshape_to_box(tile, False))


@gluon_jit
def store_ds(ds_target, n, query, values):
    """Store dS through the n-th staging tile, of two in turn: at most one earlier store may still read its tile."""
    tma.store_wait(1)
    begin_store_ds(ds_target, ds_target.staged.index(n), query, values)
