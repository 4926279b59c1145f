# mypy: ignore-errors
"""Row statistics of the backward: lse2, the logsumexp in base 2, and delta = sum(out * do) - dlse. The letters are those of
`foci.backends.gpu.backward`."""

import triton.language as tl

from foci.backends.gpu.tiles import LOG2E, decode, load_tile, rows_pointer, tile_offsets
from foci.compat.jit import triton_jit

__all__ = ["load_row_stats", "prepare_row_stats", "prepare_rows"]


@triton_jit
def prepare_row_stats(o, do, lse, dlse, lse2, delta, at, inside):
    """Compute (lse in base 2, delta) of a tile of rows and store them to `lse2` and `delta`. Rows without keys get lse2 = inf, so that
    their weights are 0."""
    # issue this load before waiting for the tiles
    lse_nat = tl.load(lse + at, mask=inside, other=float("-inf"))
    d = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if dlse is not None:
        # whatever flows into the logsumexp of a row that attends to nothing reaches nothing
        d -= tl.where(lse_nat == float("-inf"), 0.0, tl.load(dlse + at, mask=inside, other=0.0))
    # a huge lse is too coarse to recompute weights from: such rows pass no gradient on, instead of an infinite one
    base2 = tl.where((lse_nat == float("-inf")) | (tl.abs(lse_nat) > 1e9), float("inf"), lse_nat * LOG2E)
    tl.store(lse2 + at, base2, mask=inside)
    tl.store(delta + at, d, mask=inside)
    return base2, d


@triton_jit
def prepare_rows(out, dout, lse, dlse, lse2, delta, strides, size, c):
    """`prepare_row_stats` as a kernel, for a backward without dq."""
    tiles = tl.cdiv(decode(size.rows), c.TILE_Q)
    bh = tl.program_id(0) // tiles
    first = (tl.program_id(0) - bh * tiles) * c.TILE_Q
    b = bh // decode(size.heads)
    h = bh - b * decode(size.heads)
    limit = decode(size.rows) - first
    offsets = tile_offsets(strides.out, c, c.TILE_Q, c.DV_PAD)
    o = load_tile(rows_pointer(out, strides.out, b, h, first, c), offsets, limit, True, c.TILE_Q, c.DV, c.DV_PAD)
    offsets = tile_offsets(strides.dout, c, c.TILE_Q, c.DV_PAD)
    do = load_tile(rows_pointer(dout, strides.dout, b, h, first, c), offsets, limit, True, c.TILE_Q, c.DV, c.DV_PAD)
    at = bh.to(tl.int64) * decode(size.rows) + first + tl.arange(0, c.TILE_Q)
    prepare_row_stats(o, do, lse, dlse, lse2, delta, at, tl.arange(0, c.TILE_Q) < limit)


@triton_jit
def load_row_stats(lse2, delta, at, rows, q_len, c, EDGE: tl.constexpr):
    """Load (lse2, delta) of a tile of rows; inf and 0 past the end. Row 0 is at offset `at`."""
    if c.TILE_Q <= 64:
        # fewer rows than threads: loaded as one [rows, 2] tile each value is fetched once; as two vectors every thread fetches all it
        # needs. Programs with many keys have threads to load every value twice
        TWICE: tl.constexpr = c.TILE_KV >= 128
        side = tl.arange(0, 4 if TWICE else 2)[None, :] % 2
        distance = (delta.to(tl.int64) - lse2.to(tl.int64)) // 4
        pair = lse2 + at + rows[:, None] + side * distance
        if EDGE:
            inside = (rows < q_len)[:, None]
            pairs = tl.where(inside, tl.load(pair, mask=inside, other=0.0), tl.where(side == 0, float("inf"), 0.0))
        else:
            pairs = tl.load(pair)
        if TWICE:
            row_lse, row_delta = tl.split(tl.reshape(pairs, [c.TILE_Q, 2, 2]))
            return tl.split(row_lse)[0], tl.split(row_delta)[0]
        else:
            return tl.split(pairs)
    elif EDGE:
        row_lse = tl.load(lse2 + at + rows, mask=rows < q_len, other=float("inf"))
        return row_lse, tl.load(delta + at + rows, mask=rows < q_len, other=0.0)
    else:
        return tl.load(lse2 + at + rows), tl.load(delta + at + rows)
