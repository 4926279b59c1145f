# mypy: ignore-errors
"""The softmax of the forward: weights of a tile against what follows the largest score so far, dropped, and packed.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from foci.backends.hopper.gluon_compat import gl, gluon
from foci.backends.hopper.masking import ROWS, by_column
from foci.backends.hopper.online_softmax import broadcast_lanes, eight_columns, exp2_scores, update_row_max

__all__ = [
    "by_thread",
    "pack_weights",
    "rescale_acc",
    "round_weights",
    "round_weights_in_place",
    "scale_rows",
    "softmax_tile",
    "unpack_weights",
]


@gluon.jit
def by_thread(p):
    """Sums over the columns that one thread holds, so that threads meet once, at the end: one after the other, as exponentials come.
    Triton 3.8 and later add in pairs, for which more of them wait in registers."""
    y, column, lane = by_column(p)
    total = eight_columns(y, 0)
    for i in gl.static_range(1, p.shape[1] // 8):
        total = total + eight_columns(y, i)
    return total.reshape([ROWS, 8])


@gluon.jit
def softmax_tile(x, acc, kept, total, factor, c):
    """(weights of a tile, sums rescaled or not, the factor of those that are not, what is kept, new totals of each thread's columns):
    see `foci.backends.hopper.online_softmax`."""
    acc, alpha, kept, total = update_row_max(x, acc, kept, total, factor, c.EXACT)
    p = exp2_scores(x, kept)
    return p, acc, alpha, kept, total + by_thread(p)


@gluon.jit
def round_weights(p, dtype: gl.constexpr, c):
    """Weights as a product takes them."""
    if c.DROPOUT:
        # rounded two by two: else what is dropped is chosen among rounded weights, one by one
        return unpack_weights(pack_weights(p, dtype, c), dtype)
    else:
        return p.to(dtype)


@gluon.jit
def round_weights_in_place(p, dtype: gl.constexpr, c):
    """The same, between the exponentials before it: a cast may become instructions behind the next wait (from Triton 3.8 on it does)."""
    return unpack_weights(pack_weights(p, dtype, c, PURE=False), dtype)


@gluon.jit
def pack_weights(p, dtype: gl.constexpr, c, PURE: gl.constexpr = True):
    """Weights rounded, two to a register: carried one by one from step to step, each would take a register, and two moves.

    With dropout a weight with a minus is dropped. What is not PURE stays where it stands among waits.
    """
    low, high = gl.split(p.reshape([ROWS, p.shape[1] // 2, 2]))
    KIND: gl.constexpr = ("relu." if c.DROPOUT else "") + ("bf16" if dtype == gl.bfloat16 else "f16")
    return gl.inline_asm_elementwise("cvt.rn." + KIND + "x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=PURE, pack=1)


@gluon.jit
def unpack_weights(words, dtype: gl.constexpr):
    """What `pack_weights` took."""
    low, high = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1)
    return gl.join(low, high).reshape([ROWS, words.shape[1] * 2]).to(dtype, bitcast=True)


@gluon.constexpr_function
def _if_any(n):
    """Products of the n numbers of a thread, which are of two rows, with those of the rows, unless these are 1 in the whole warp."""
    text = f"{{ .reg .pred p, q; setp.neu.f32 p, ${2 * n}, 0f3F800000; setp.neu.or.f32 p, ${2 * n + 2}, 0f3F800000, p;"
    text += " vote.sync.any.pred q, p, 0xffffffff; @!q bra.uni skip; "
    return text + "".join(f"mul.f32 ${i}, ${i}, ${2 * n + i}; " for i in range(n)) + "skip: }"


@gluon.constexpr_function
def _operands(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def _rescaled_seldom(x, alpha):
    y, column, lane = by_column(x)
    N: gl.constexpr = min(x.shape[1] // 2, 64)
    TEXT: gl.constexpr = _if_any(N)
    LAYOUT: gl.constexpr = y.type.layout
    y = gl.inline_asm_elementwise(TEXT, _operands(N), [y, broadcast_lanes(alpha, LAYOUT)], dtype=gl.float32, is_pure=True, pack=N)
    return gl.convert_layout(y.reshape([ROWS, x.shape[1]]), x.type.layout, assert_trivial=True)


@gluon.jit
def rescale_acc(acc, alpha):
    """The pieces of the result, each row times what its lanes hold; a warp whose numbers are all 1 passes over it."""
    scaled = ()
    for i in gl.static_range(len(acc)):
        scaled = scaled + (_rescaled_seldom(acc[i], alpha),)
    return scaled


@gluon.jit
def scale_rows(acc, weight):
    """The pieces of the result, each row times its number."""
    scaled = ()
    for i in gl.static_range(len(acc)):
        scaled = scaled + (acc[i] * gl.convert_layout(weight, gl.SliceLayout(1, acc[i].type.layout))[:, None],)
    return scaled
