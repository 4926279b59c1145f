# mypy: ignore-errors
"""Softmax of the forward: weights of a tile relative to the running row max, dropout, and rounding to the dtype of wgmma operands.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from typing import Any, NamedTuple

from foci.backends.hopper.gluon_compat import gl, gluon
from foci.backends.hopper.masking import ROWS, split_columns
from foci.backends.hopper.online_softmax import broadcast_lanes, column_groups, exp2_scores, update_row_max
from foci.compat.gluon import gluon_jit

__all__ = [
    "pack_weights",
    "rescale_acc",
    "round_weights",
    "round_weights_in_place",
    "scale_rows",
    "softmax_tile",
    "sum_by_thread",
    "unpack_weights",
]


class TileSoftmax(NamedTuple):
    """Weights of a tile, and the state of the online softmax after it."""

    p: Any  # weights
    acc: Any
    alpha: Any  # factor of the accumulators
    row_state: Any
    row_sum: Any


@gluon_jit
def sum_by_thread(p):
    """Sum the columns that each thread holds; threads combine once, at the end. Written out because `gl.sum` adds in pairs from Triton 3.8
    on, which keeps more exponentials in registers."""
    y, column, lane = split_columns(p)
    groups = column_groups(y)
    total = groups[0]
    for i in gl.static_range(1, len(groups)):
        total = total + groups[i]
    return total.reshape([ROWS, 8])


@gluon_jit
def softmax_tile(x, acc, row_state, row_sum, factor, c):
    """Online softmax of one tile. acc is rescaled already if `online_softmax.rescales_acc`; else the caller multiplies it by alpha."""
    acc, alpha, row_state, row_sum = update_row_max(x, acc, row_state, row_sum, factor, c.EXACT_MAX)
    p = exp2_scores(x, row_state)
    return TileSoftmax(p, acc, alpha, row_state, row_sum + sum_by_thread(p))


@gluon_jit
def round_weights(p, dtype: gl.constexpr, c):
    """Round weights to the operand dtype."""
    if c.DROPOUT:
        # dropped weights have their sign bit set; packed conversion zeroes two at a time (cvt.relu)
        return unpack_weights(pack_weights(p, dtype, c), dtype)
    else:
        return p.to(dtype)


@gluon_jit
def round_weights_in_place(p, dtype: gl.constexpr, c):
    """Round weights here: a plain cast may be moved behind the next wait (it is from Triton 3.8 on)."""
    return unpack_weights(pack_weights(p, dtype, c, PURE=False), dtype)


@gluon_jit
def pack_weights(p, dtype: gl.constexpr, c, PURE: gl.constexpr = True):
    """Round weights to 16 bits, two to a register: carried through the loop one by one, each would take a register and two moves.

    With dropout, weights with the sign bit set become 0. PURE=False keeps the conversion in place among waits.
    """
    low, high = gl.split(p.reshape([ROWS, p.shape[1] // 2, 2]))
    KIND: gl.constexpr = ("relu." if c.DROPOUT else "") + ("bf16" if dtype == gl.bfloat16 else "f16")
    return gl.inline_asm_elementwise("cvt.rn." + KIND + "x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=PURE, pack=1)


@gluon_jit
def unpack_weights(words, dtype: gl.constexpr):
    """Inverse of `pack_weights`, without the lost precision."""
    low, high = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1)
    return gl.join(low, high).reshape([ROWS, words.shape[1] * 2]).to(dtype, bitcast=True)


@gluon.constexpr_function
def _rescale_text(n):
    """PTX that multiplies a thread's n values, of two rows, by the rows' factors; a warp whose factors are all 1 skips it."""
    text = f"{{ .reg .pred p, q; setp.neu.f32 p, ${2 * n}, 0f3F800000; setp.neu.or.f32 p, ${2 * n + 2}, 0f3F800000, p;"
    text += " vote.sync.any.pred q, p, 0xffffffff; @!q bra.uni skip; "
    return text + "".join(f"mul.f32 ${i}, ${i}, ${2 * n + i}; " for i in range(n)) + "skip: }"


@gluon.constexpr_function
def _operands(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon_jit
def _rescale_if_needed(x, alpha):
    y, column, lane = split_columns(x)
    N: gl.constexpr = min(x.shape[1] // 2, 64)
    TEXT: gl.constexpr = _rescale_text(N)
    LAYOUT: gl.constexpr = y.type.layout
    y = gl.inline_asm_elementwise(TEXT, _operands(N), [y, broadcast_lanes(alpha, LAYOUT)], dtype=gl.float32, is_pure=True, pack=N)
    return gl.convert_layout(y.reshape([ROWS, x.shape[1]]), x.type.layout, assert_trivial=True)


@gluon_jit
def rescale_acc(acc, alpha):
    """Multiply each row of the accumulators by alpha; a warp whose factors are all 1 skips it."""
    scaled = ()
    for i in gl.static_range(len(acc)):
        scaled = scaled + (_rescale_if_needed(acc[i], alpha),)
    return scaled


@gluon_jit
def scale_rows(acc, factor):
    """Multiply each row of the accumulators by its factor."""
    scaled = ()
    for i in gl.static_range(len(acc)):
        scaled = scaled + (acc[i] * gl.convert_layout(factor, gl.SliceLayout(1, acc[i].type.layout))[:, None],)
    return scaled
