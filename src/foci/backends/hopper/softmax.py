# mypy: ignore-errors
"""The softmax of the forward: weights of a tile against the largest score so far, dropped, and packed.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018). Exponentials are in base 2.
"""

from foci.backends.hopper.interface import gl, gluon
from foci.backends.hopper.masking import ROWS

__all__ = ["by_thread", "fold_softmax", "packed", "rescaled", "rounded", "unpacked"]


@gluon.jit
def by_thread(p):
    """Sums over the columns that one thread holds, so that threads meet once, at the end."""
    return gl.sum(p.reshape([ROWS, p.shape[1] // 8, 8]), 1)


@gluon.jit
def fold_softmax(x, most, total, factor, SKIPS: gl.constexpr):
    """(weights of a tile, factor of what was summed before, what it is all weighed against, new totals of each thread's columns).

    That is the largest score, or, where SKIPS, one that it exceeds by no more than 2^8, as FlashAttention-4 has it: sums and totals
    refer to the same score, which their quotient does not depend on, and rounding is relative, so it costs no precision.
    """
    higher = gl.maximum(most, gl.max(x, 1))
    if SKIPS:
        higher = gl.where((higher - most) * factor <= 8.0, most, higher)
    # beyond 2^30 a rounded product could exceed the largest: a power of two as the factor keeps products exact, and weights the same
    exact = (factor.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    steep = gl.where(gl.abs(higher) * factor < 1073741824.0, factor, exact)
    shift = gl.where(higher == float("-inf"), 0.0, higher * steep)
    p = gl.exp2(x * steep[:, None] - shift[:, None])
    alpha = gl.exp2(most * steep - shift)
    if SKIPS:
        # exactly 1 where it stays: a fused product less the rounded one is not 0
        alpha = gl.where(higher == most, 1.0, alpha)
    sums = by_thread(p)
    LAYOUT: gl.constexpr = sums.type.layout
    return p, alpha, higher, total * gl.convert_layout(alpha, gl.SliceLayout(1, LAYOUT))[:, None] + sums


@gluon.jit
def rounded(p, dtype: gl.constexpr, c):
    """Weights as a product takes them."""
    if c.DROPOUT:
        # rounded two by two: else what is dropped is chosen among rounded weights, one by one
        return unpacked(packed(p, dtype, c), dtype)
    else:
        return p.to(dtype)


@gluon.jit
def packed(p, dtype: gl.constexpr, c):
    """Weights rounded, two to a register: carried one by one from step to step, each would take a register, and two moves.

    With dropout a weight with a minus is dropped.
    """
    low, high = gl.split(p.reshape([ROWS, p.shape[1] // 2, 2]))
    KIND: gl.constexpr = ("relu." if c.DROPOUT else "") + ("bf16" if dtype == gl.bfloat16 else "f16")
    return gl.inline_asm_elementwise("cvt.rn." + KIND + "x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpacked(words, dtype: gl.constexpr):
    """What `packed` took."""
    low, high = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1)
    return gl.join(low, high).reshape([ROWS, words.shape[1] * 2]).to(dtype, bitcast=True)


@gluon.jit
def by_row(x, acc):
    """One number a row, for a tile of products."""
    return gl.convert_layout(x, gl.SliceLayout(1, acc.type.layout))[:, None]


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
def _rescaled_seldom(x, factor):
    N: gl.constexpr = min(x.shape[1] // 2, 64)
    TEXT: gl.constexpr = _if_any(N)
    return gl.inline_asm_elementwise(TEXT, _operands(N), [x, factor], dtype=gl.float32, is_pure=True, pack=N)


@gluon.jit
def rescaled(acc, alpha, SKIPS: gl.constexpr):
    """The pieces of the result, each row times its number; where SKIPS, a warp whose numbers are all 1 passes over it."""
    scaled = ()
    for i in gl.static_range(len(acc)):
        factor = by_row(alpha, acc[i])
        scaled = scaled + (_rescaled_seldom(acc[i], factor) if SKIPS else acc[i] * factor,)
    return scaled
