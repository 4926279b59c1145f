# mypy: ignore-errors
"""wgmma of tiles whose width is split into pieces, powers of two (`foci.backends.hopper.layouts`).

A product that sums over the width accumulates piece after piece; a product with the width as columns is one product per piece.
"""

from foci.backends.hopper.gluon_compat import gl, warpgroup_mma, warpgroup_mma_wait
from foci.backends.hopper.layouts import mma_layout, operand_layout, piece, pieces
from foci.compat.gluon import gluon_jit

__all__ = ["begin_pv", "begin_scores", "scale_accumulators", "wait_accumulators", "zero_accumulators"]


@gluon_jit
def begin_scores(rows, columns, scores, ADDS: gl.constexpr):
    """Begin rows @ columns^T, one asynchronous wgmma per piece. ADDS: accumulate onto `scores` instead of overwriting it."""
    for i in gl.static_range(len(rows)):
        scores = warpgroup_mma(rows[i], columns[i].permute((1, 0)), scores, use_acc=ADDS or i > 0, is_async=True)
    return scores


@gluon_jit
def zero_accumulators(rows: gl.constexpr, width: gl.constexpr):
    """Zero accumulators [rows, columns], one for each piece of the width."""
    acc = ()
    for i in gl.static_range(len(pieces(width))):
        acc = acc + (gl.zeros([rows, piece(width, i)], gl.float32, mma_layout(piece(width, i))),)
    return acc


@gluon_jit
def begin_pv(p, tile, acc):
    """Begin acc += p @ tile, one asynchronous wgmma per piece; p is read from the registers it is in."""
    pending = ()
    for i in gl.static_range(len(acc)):
        factor = gl.convert_layout(p, operand_layout(acc[i].shape[1]), assert_trivial=True)
        pending = pending + (warpgroup_mma(factor, tile[i], acc[i], is_async=True),)
    return pending


@gluon_jit
def wait_accumulators(pending, LEFT: gl.constexpr = 0):
    """Wait until at most LEFT products are in flight; return the accumulators."""
    if len(pending) == 1:
        return (warpgroup_mma_wait(LEFT, deps=[pending[0]]),)
    else:
        return warpgroup_mma_wait(LEFT, deps=pending)


@gluon_jit
def scale_accumulators(acc, factor):
    """Multiply accumulators by a number."""
    scaled = ()
    for i in gl.static_range(len(acc)):
        scaled = scaled + (acc[i] * factor,)
    return scaled
