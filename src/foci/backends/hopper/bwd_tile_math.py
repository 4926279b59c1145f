# mypy: ignore-errors
"""What the backward kernels share: weights and their gradient in a tile, and which tiles are visited how.

With p the weights and dp = do v^T, the score's gradient is p (dp - delta), delta = sum_j p dp = sum(out * do) - dlse
(Dao et al., "FlashAttention", 2022, appendix B). The slope of the score function, derived from it, does the rest.
"""

from foci.backends.hopper.gluon_compat import gl, gluon
from foci.backends.triton.tiles import FORCED, LOG2E, decode


@gluon.jit
def row_line(b, memory_b, h, heads, q_start, pitch, c):
    """Where the rows of a head, or of a sequence in it, begin in `bwd_preprocess.begin_gradients`' lines."""
    head = (memory_b * heads + h) * decode(pitch)
    if c.JAGGED:
        return head + (q_start // 128 + b) * 128
    else:
        return head


@gluon.jit
def recompute_weights(
    raw, lse2, where, scale, env, aux, c, both: gl.constexpr, mask: gl.constexpr, MASKED: gl.constexpr, EDGE: gl.constexpr
):
    """(weights, slope of the score function) of a tile of products without their scale.

    `where` is (b, h, q_idx, kv_idx, q_len, kv_len, tile). MASKED: the mask is asked; EDGE: some places may not exist.
    What a line adds to the scores has been taken off lse2.
    """
    b, h, q_idx, kv_idx, q_len, kv_len, tile = where
    inside = (q_idx < q_len) & (kv_idx < kv_len)
    if EDGE:
        q_idx = gl.minimum(q_idx, q_len - 1)
        kv_idx = gl.minimum(kv_idx, kv_len - 1)
    if c.PLAIN or c.LINE:
        slope = 1.0
        p = gl.exp2(raw * (scale * LOG2E) - lse2)
    else:
        x, slope = both(raw, lse2, b, h, q_idx, kv_idx, q_len, kv_len, env, aux)
        p = gl.exp2(x)
    if MASKED:
        keep = mask(b, h, q_idx, kv_idx, q_len, kv_len, env, aux)
        if c.BLOCKS:
            keep = keep | (tile >= FORCED)
        if EDGE:
            keep = keep & inside
        p = gl.where(keep, p, 0.0)
    elif EDGE:
        p = gl.where(inside, p, 0.0)
    return p, slope


@gluon.jit
def scale_dscore(p, slope, c, CLEAN: gl.constexpr):
    """Weights times slopes of the score function, before their gradients come: both would take twice the registers. CLEAN where a masked
    place may hold an infinite slope."""
    if c.PLAIN or c.LINE:
        return p
    elif CLEAN:
        return gl.where(p == 0.0, 0.0, p * slope)
    else:
        return p * slope
