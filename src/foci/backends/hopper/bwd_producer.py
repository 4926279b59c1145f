# mypy: ignore-errors
"""Producer of the backward kernels: one warp loads a stationary pair of tiles, then streams pairs of tiles through STAGES stages.

    kernel                     stationary pair    streamed pair
    bwd_dq, bwd_short_q        q, do              k, v
    bwd_dk_dv, bwd_dq_dk_dv    k, v               q with lse, do with delta

S is a product of first tiles, q and k ("qk"), and dP one of second tiles, do and v ("do_v").
"""

from typing import Any, NamedTuple

from foci.backends.gpu.tiles import nth_visited, tile_start
from foci.backends.hopper.gluon_compat import gl, mbarrier, tma_load
from foci.backends.hopper.smem import allocate_tiles, load_pieces, make_barriers, tile_pieces
from foci.compat.gluon import gluon_jit


class PairSources(NamedTuple):
    """TMA descriptors of a pair. A tuple with None is built inside the call that it is passed to, see `kernel_args`."""

    qk: Any  # of q or of k
    do_v: Any  # of do or of v; None where dP is not needed
    lse: Any  # None unless queries stream
    delta: Any  # None unless queries stream and dP is needed


class StationaryPair(NamedTuple):
    """Stationary tiles of 64 rows in shared memory."""

    qk_tiles: Any
    do_v_tiles: Any
    full: Any  # one barrier for all


class PairRing(NamedTuple):
    """STAGES streamed pairs in shared memory, and barriers of each stage."""

    qk_tiles: Any
    do_v_tiles: Any
    lse_rows: Any  # empty where keys stream, as delta_rows
    delta_rows: Any
    qk_full: Any
    do_v_full: Any
    empty: Any


class PairSmem(NamedTuple):
    """Shared memory of a kernel without other exchanges."""

    pair: Any  # `StationaryPair`
    ring: Any  # `PairRing`


class PairPlace(NamedTuple):
    """A head of a sequence, whose rows are loaded."""

    memory_b: Any
    h: Any
    start: Any  # of the sequence in packed memory
    length: Any
    line: Any  # of streamed queries: `bwd_tile_math.row_line`


@gluon_jit
def allocate_pair(dtype: gl.constexpr, n: gl.constexpr, rows: gl.constexpr, c):
    """Allocate n tiles [rows, D] and n tiles [rows, Dv]."""
    return allocate_tiles(dtype, n, rows, c.D_PAD), allocate_tiles(dtype, n, rows, c.DV_PAD)


@gluon_jit
def make_ring(qk_tiles, do_v_tiles, lse_rows, delta_rows, c):
    """Allocate the barriers of a ring; two warpgroups free a stage."""
    bars = (make_barriers(c.STAGES, 1), make_barriers(c.STAGES, 1), make_barriers(c.STAGES, 2))
    return PairRing(qk_tiles, do_v_tiles, lse_rows, delta_rows, *bars)


@gluon_jit
def load_stationary(sources, pair, place, row, c):
    """Load the stationary pair from `row` of its sequence on."""
    TILES: gl.constexpr = pair.qk_tiles[0].shape[0]
    HAS_DO_V: gl.constexpr = sources.do_v is not None
    mbarrier.expect(pair.full, TILES * 64 * 2 * (c.D_PAD + (c.DV_PAD if HAS_DO_V else 0)))
    b, h, start, length, line = place
    for n in gl.static_range(TILES):
        load_pieces(sources.qk, b, h, row + n * 64, start, length, pair.full, tile_pieces(pair.qk_tiles, n), c.JAGGED)
        if HAS_DO_V:
            load_pieces(sources.do_v, b, h, row + n * 64, start, length, pair.full, tile_pieces(pair.do_v_tiles, n), c.JAGGED)


@gluon_jit
def stream_pair(sources, ring, place, row, line_row, n, c):
    """Load the n-th streamed pair, from `row` of its sequence on, once its stage is free. lse and delta begin at `place.line + line_row`:
    `line_row` is `row`, or 0 where `place.line` includes it."""
    ROWS: gl.constexpr = ring.qk_tiles[0].shape[1]
    b, h, start, length, line = place
    stage = n % c.STAGES
    mbarrier.wait(ring.empty.index(stage), ((n // c.STAGES) & 1) ^ 1)
    full = ring.qk_full.index(stage)
    mbarrier.expect(full, ROWS * (c.D_PAD * 2 + (0 if sources.lse is None else 4)))
    load_pieces(sources.qk, b, h, row, start, length, full, tile_pieces(ring.qk_tiles, stage), c.JAGGED)
    if sources.lse is not None:
        tma_load(sources.lse, [line + line_row], full, ring.lse_rows.index(stage))
    full = ring.do_v_full.index(stage)
    mbarrier.expect(full, ROWS * (c.DV_PAD * 2 + (0 if sources.delta is None else 4)))
    load_pieces(sources.do_v, b, h, row, start, length, full, tile_pieces(ring.do_v_tiles, stage), c.JAGGED)
    if sources.delta is not None:
        tma_load(sources.delta, [line + line_row], full, ring.delta_rows.index(stage))


@gluon_jit
def stream_run(sources, ring, place, run, n, table, c):
    """Load the pairs of a `VisitRun`; `n` pairs came before. Returns the number of pairs so far."""
    ROWS: gl.constexpr = ring.qk_tiles[0].shape[1]
    for i in range(0, run.count):
        row = tile_start(nth_visited(table, run.row, i, run.first, run.before, run.gap, c), c, ROWS)
        stream_pair(sources, ring, place, row, row, n, c)
        n += 1
    return n
