# mypy: ignore-errors
"""Tile arithmetic that the backward kernels share: recomputed weights, and the gradient of scores.

With P the weights and dP = dO V^T, the gradient of the scores is P * (dP - delta), delta = sum_j P dP = sum(out * do) - dlse (Dao et al.,
"FlashAttention", 2022, appendix B). The chain rule through the score function multiplies it by the function's derivative, `slope`.
"""

from foci.backends.gpu.tiles import FORCED, LOG2E, decode, find_task
from foci.backends.hopper.gluon_compat import gl, gluon
from foci.backends.hopper.kernel_args import Task


@gluon.jit
def find_backward_task(size, spans, c, LONGEST_FIRST: gl.constexpr):
    """`Task` of this program."""
    b, memory_b, h, index, tile = find_task(size, spans, c, LONGEST_FIRST)
    return Task(b, memory_b, h, tile, index)


@gluon.jit
def row_line(b, memory_b, h, heads, q_start, pitch, c):
    """Offset of a head's first row, or of a sequence's in it, in the padded lse and delta of `bwd_preprocess.begin_gradients`."""
    head = (memory_b * heads + h) * decode(pitch)
    if c.JAGGED:
        return head + (q_start // 128 + b) * 128
    else:
        return head


@gluon.jit
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


@gluon.jit
def scale_dscore(p, slope, c, CLEAN: gl.constexpr):
    """P * slope, computed before dP arrives: P and slope would take twice the registers. CLEAN: a masked position may have an infinite
    slope."""
    if c.PLAIN or c.AFFINE:
        return p
    elif CLEAN:
        return gl.where(p == 0.0, 0.0, p * slope)
    else:
        return p * slope
