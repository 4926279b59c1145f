# mypy: ignore-errors
"""Tile arithmetic that the backward kernels share: recomputed weights, and the gradient of scores.

With P the weights and dP = dO V^T, the gradient of the scores is P * (dP - delta), delta = sum_j P dP = sum(out * do) - dlse (Dao et al.,
"FlashAttention", 2022, appendix B). The chain rule through the score function multiplies it by the function's derivative, `slope`.
"""

from foci.backends.gpu.tiles import FORCED, LOG2E, decode, find_task, tile_runs
from foci.backends.hopper.gluon_compat import gl, mbarrier
from foci.backends.hopper.kernel_args import Task, VisitRun
from foci.backends.hopper.layouts import mma_layout
from foci.backends.hopper.mma import begin_scores
from foci.backends.hopper.smem import tile_pieces
from foci.compat.gluon import gluon_jit


@gluon_jit
def find_backward_task(size, spans, c, LONGEST_FIRST: gl.constexpr):
    """`Task` of this program."""
    place = find_task(size, spans, c, LONGEST_FIRST)
    return Task(place.b, place.memory_b, place.h, place.tile, place.task)


@gluon_jit
def row_line(b, memory_b, h, heads, q_start, pitch, c):
    """Offset of a head's first row, or of a sequence's in it, in the padded lse and delta of `bwd_preprocess.begin_gradients`."""
    head = (memory_b * heads + h) * decode(pitch)
    if c.JAGGED:
        return head + (q_start // 128 + b) * 128
    else:
        return head


@gluon_jit
def report_nan(found_nan, acc):
    """Set `found_nan` if the accumulators hold a NaN or an infinity: `foci.backends.gpu.mend` then looks at the results. None: nothing
    is excluded, so nothing would change. Where both dv and dk are computed, only dk need be reported: dv holds a NaN where a gradient of
    the result does, and then so do dP, dS and dk."""
    if found_nan is not None:
        for i in gl.static_range(len(acc)):
            # NaN where the row has a NaN or an infinity, else 0
            row = gl.sum(acc[i] * 0.0, 1)
            at = gl.arange(0, acc[i].shape[0], row.type.layout) * 0
            gl.store(found_nan + at, at + 1, mask=row != row)


@gluon_jit
def split_runs(table, b, h, task, length, c, TILE: gl.constexpr):
    """Streamed tiles that a task visits: (full run, masked run), each a `VisitRun`."""
    tiles = tile_runs(table, b, h, task, length, c, TILE)
    full = VisitRun(tiles.row, tiles.full_first, tiles.full * 0, tiles.full * 0, tiles.full)
    return full, VisitRun(tiles.row, tiles.part_first, tiles.before, tiles.gap, tiles.part)


@gluon_jit
def column_idx(first, COLUMNS: gl.constexpr):
    """Indices [1, COLUMNS] of the streamed tile that begins at `first`."""
    return first + gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, mma_layout(COLUMNS))), 0)


@gluon_jit
def row_idx(first, COLUMNS: gl.constexpr):
    """Indices [64, 1] of stationary rows from `first`, beside streamed tiles of COLUMNS."""
    return first + gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, mma_layout(COLUMNS))), 1)


@gluon_jit
def load_row_values(row_values, head, row, q_len):
    """(lse in base 2, delta) of rows of a head, [64, 1] each. Rows past the end get lse = inf, so that their weights are 0."""
    lse_rows, delta_rows = row_values
    lse2 = gl.expand_dims(gl.load(lse_rows + head + row, mask=row < q_len, other=float("inf")), 1)
    return lse2, gl.expand_dims(gl.load(delta_rows + head + row, mask=row < q_len, other=0.0), 1)


@gluon_jit
def begin_s_dp(pair, half, opaque, ring, qk, stage, phase, HAS_DP: gl.constexpr = True):
    """Begin S and dP of a warpgroup's stationary tiles and the streamed pair of a stage, each when its tile has arrived. Both are
    asynchronous. `opaque` is 0, or `smem.opaque_value(0)`, so that stationary addresses are recomputed for each tile: hoisted, they would
    take registers through the loop."""
    COLUMNS: gl.constexpr = ring.qk_tiles[0].shape[1]
    zero = gl.zeros([64, COLUMNS], gl.float32, mma_layout(COLUMNS))
    mbarrier.wait(ring.qk_full.index(stage), phase)
    s = begin_scores(tile_pieces(pair.qk_tiles, half + opaque), qk, zero, False)
    mbarrier.wait(ring.do_v_full.index(stage), phase)
    dp = zero
    if HAS_DP:
        dp = begin_scores(tile_pieces(pair.do_v_tiles, half + opaque), tile_pieces(ring.do_v_tiles, stage), zero, False)
    return s, dp


@gluon_jit
def recompute_weights(raw, lse2, position, params, c, functions, MASKED: gl.constexpr, EDGE: gl.constexpr):
    """Recompute (P, slope of the score function) of a tile from S without its scale.

    MASKED: apply the mask function. EDGE: some positions may not exist. The caller has already subtracted the offset of an affine score
    function from lse2.
    """
    b, h, q_idx, kv_idx, q_len, kv_len, tile, aux = position
    env = params.env
    inside = (q_idx < q_len) & (kv_idx < kv_len)
    if EDGE:
        q_idx = gl.minimum(q_idx, q_len - 1)
        kv_idx = gl.minimum(kv_idx, kv_len - 1)
    if c.PLAIN or c.AFFINE:
        slope = 1.0
        p = gl.exp2(raw * (params.scale * LOG2E) - lse2)
    else:
        x, slope = functions.both(raw, lse2, b, h, q_idx, kv_idx, q_len, kv_len, env, aux)
        p = gl.exp2(x)
    if MASKED:
        keep = functions.mask(b, h, q_idx, kv_idx, q_len, kv_len, env, aux)
        if c.BLOCKS:
            keep = keep | (tile >= FORCED)
        if EDGE:
            keep = keep & inside
        p = gl.where(keep, p, 0.0)
    elif EDGE:
        p = gl.where(inside, p, 0.0)
    return p, slope


@gluon_jit
def scale_dscore(p, slope, c, CLEAN: gl.constexpr):
    """P * slope, computed before dP arrives: P and slope would take twice the registers. CLEAN: a masked position may have an infinite
    slope."""
    if c.PLAIN or c.AFFINE:
        return p
    elif CLEAN:
        return gl.where(p == 0.0, 0.0, p * slope)
    else:
        return p * slope
