# mypy: ignore-errors
"""Products of tiles in pieces: those that sum over a width go on from piece to piece, those that have it as columns are a product each."""

from foci.backends.hopper.gluon_compat import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from foci.backends.hopper.layouts import mma_layout, operand_layout, piece, pieces

__all__ = ["begin_pv", "begin_scores", "scale_accumulators", "wait_accumulators", "zero_accumulators"]


@gluon.jit
def begin_scores(rows, columns, scores, ADDS: gl.constexpr):
    """Begins rows . columns of two tiles, on top of what `scores` holds where ADDS: one product to wait for per piece."""
    for i in gl.static_range(len(rows)):
        scores = warpgroup_mma(rows[i], columns[i].permute((1, 0)), scores, use_acc=ADDS or i > 0, is_async=True)
    return scores


@gluon.jit
def zero_accumulators(rows: gl.constexpr, width: gl.constexpr):
    """Zeros [rows, columns] for each piece of a width."""
    sums = ()
    for i in gl.static_range(len(pieces(width))):
        sums = sums + (gl.zeros([rows, piece(width, i)], gl.float32, mma_layout(piece(width, i))),)
    return sums


@gluon.jit
def begin_pv(weights, tile, sums):
    """Begins to add weights . tile, each piece for itself; the weights stay in the registers where they are."""
    begun = ()
    for i in gl.static_range(len(sums)):
        factor = gl.convert_layout(weights, operand_layout(sums[i].shape[1]), assert_trivial=True)
        begun = begun + (warpgroup_mma(factor, tile[i], sums[i], is_async=True),)
    return begun


@gluon.jit
def wait_accumulators(begun, LEFT: gl.constexpr = 0):
    """The sums, once no more than so many products are in flight."""
    if len(begun) == 1:
        return (warpgroup_mma_wait(LEFT, deps=[begun[0]]),)
    else:
        return warpgroup_mma_wait(LEFT, deps=begun)


@gluon.jit
def scale_accumulators(sums, factor):
    """The sums times a number."""
    found = ()
    for i in gl.static_range(len(sums)):
        found = found + (sums[i] * factor,)
    return found
