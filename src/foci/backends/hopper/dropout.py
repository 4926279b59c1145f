# mypy: ignore-errors
"""Dropout bits of a tile: at most two 32-bit words a thread, computed while products run.

One evaluation of Philox gives the random words of four neighbouring keys, which several threads hold. Evaluations are spread over the
threads of a warp so that each is done once; threads exchange bits, not random words. A thread's word has the layout of
`foci.backends.hopper.mask_bits`: bit 2 i + j of word l of a row says whether column 8 i + 2 l + j is dropped.

"Quads" are groups of four neighbouring keys, "eights" of eight. Shapes in comments are [rows, ...] of one warpgroup's 64 rows.
"""

from foci.backends.gpu.tiles import random_words, tile_start
from foci.backends.hopper.gluon_compat import gl, gluon
from foci.backends.hopper.masking import split_columns
from foci.backends.hopper.smem import opaque_value
from foci.compat.gluon import gluon_jit

__all__ = ["apply_dropout", "drop_bits", "drops_by_key", "drops_by_query", "load_dropout_params"]


@gluon.constexpr_function
def axis_layout(layout, rank, axis):
    """Layout of a 1-D tensor along one axis of a tensor with this layout."""
    for other in reversed([n for n in range(rank) if n != axis]):
        layout = gl.SliceLayout(other, layout)
    return layout


@gluon.constexpr_function
def quads_by_query(quads):
    """Layout of [64 queries, quads of keys]: of the four lanes of a row, each takes every second eight keys, and of these the lower or
    the upper quad."""
    more = [[0, 4 << n] for n in range(quads.bit_length() - 3)]
    return gl.DistributedLinearLayout([[8, 0], *more], [[0, 2], [0, 1], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, quads])


@gluon.constexpr_function
def words_by_query():
    """Layout of words [64 queries, quad of an eight, pair of a quad]."""
    return gl.DistributedLinearLayout(
        [[8, 0, 0]], [[0, 0, 1], [0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [[16, 0, 0], [32, 0, 0]], [], [64, 2, 2]
    )


@gluon.constexpr_function
def quads_by_key(queries):
    """Layout of [16 quads of keys, queries]: each lane of a quad takes every fourth eight queries."""
    more = [[0, 32 << n] for n in range(queries.bit_length() - 6)]
    return gl.DistributedLinearLayout(
        [[0, 1], [2, 0], *more], [[0, 2], [0, 4], [0, 8], [0, 16], [1, 0]], [[4, 0], [8, 0]], [], [16, queries]
    )


@gluon.constexpr_function
def words_by_key():
    """Layout of words [warp, half of its quads, quad, key of the quad, pair of queries]."""
    return gl.DistributedLinearLayout(
        [[0, 1, 0, 0, 0]],
        [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 1, 0, 0]],
        [[1, 0, 0, 0, 0], [2, 0, 0, 0, 0]], [], [4, 2, 2, 4, 4],
    )  # fmt: skip


@gluon.constexpr_function
def words_layout(columns):
    """Layout of the words [64, 4] that belong to the rows of a product."""
    more = [[0, 1 << n, 0, 0] for n in range(columns.bit_length() - 4)]
    full_layout = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [8, 0, 0, 0], *more],
        [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [[16, 0, 0, 0], [32, 0, 0, 0]], [], [64, columns // 8, 4, 2],
    )  # fmt: skip
    return gl.SliceLayout(1, gl.SliceLayout(3, full_layout))


@gluon_jit
def load_dropout_params(numbers, c):
    """Read (low word of the seed, high word, least random word that is kept), once a task."""
    if c.DROPOUT:
        seed = gl.load(numbers.seed)
        least = ((numbers.threshold - (1 << 40)) >> 5).to(gl.uint32)
        return seed.to(gl.int32), (seed >> 32).to(gl.int32), least
    else:
        return 0


@gluon_jit
def philox_keys(dropout_params):
    """Words of the seed, opaque so that the keys of Philox's rounds are recomputed: kept, they would take too many registers."""
    return opaque_value(dropout_params[0]).to(gl.uint32), opaque_value(dropout_params[1]).to(gl.uint32)


@gluon_jit
def compare_eights(word, dropout_params, FIRST: gl.constexpr):
    """Drop bits [64, lane, half] from random words [64, quads of keys]; a lane's eights are every second one."""
    y = word.reshape([64, word.shape[1] // 4, 2, 2])
    two = gl.arange(0, word.shape[1] // 4, axis_layout(y.type.layout, 4, 1))[None, :, None, None]
    return gl.sum((y < dropout_params[2]).to(gl.int32) << (4 * two + FIRST), 1)


@gluon_jit
def merge_lane_bits(bits):
    """Combine the bits of both lanes into words [64, half of eight keys]."""
    lane = gl.arange(0, 2, axis_layout(bits.type.layout, 3, 1))[None, :, None]
    words = gl.sum(bits << (2 * lane), 1)
    return gl.expand_dims(gl.convert_layout(words, gl.SliceLayout(2, words_by_query()), assert_trivial=True), 2)


@gluon_jit
def drops_by_query(first, key0, b, h, dropout_params, COLUMNS: gl.constexpr):
    """Drop bits [64, 4] of the 64 queries from `first`, over COLUMNS keys from `key0`."""
    PART: gl.constexpr = min(COLUMNS, 64)
    layout: gl.constexpr = quads_by_query(PART // 4)
    row = (first + gl.arange(0, 64, gl.SliceLayout(1, layout)))[:, None]
    quad = (opaque_value(key0) // 4 + gl.arange(0, PART // 4, gl.SliceLayout(0, layout)))[None, :]
    key = philox_keys(dropout_params)
    for part in gl.static_range(COLUMNS // PART):
        w0, w1, w2, w3 = random_words(key, quad + part * (PART // 4), row, h, b)
        low = compare_eights(w0, dropout_params, part * (PART // 4)) + compare_eights(w1, dropout_params, part * (PART // 4) + 1)
        high = compare_eights(w2, dropout_params, part * (PART // 4)) + compare_eights(w3, dropout_params, part * (PART // 4) + 1)
        if part == 0:
            lower = low
            upper = high
        else:
            lower += low
            upper += high
    pair = gl.arange(0, 2, axis_layout(words_by_query(), 3, 2))[None, None, :]
    words = gl.where(pair == 0, merge_lane_bits(lower), merge_lane_bits(upper))
    return gl.convert_layout(words.reshape([64, 4]), words_layout(COLUMNS), assert_trivial=True)


@gluon_jit
def append_drop_bit(bits, word, least, bit):
    """Set a bit where the random word is below the least that is kept: two instructions, where a select takes three."""
    ASM: gl.constexpr = "{ .reg .pred drops; setp.lt.u32 drops, $2, $3; @drops or.b32 $0, $0, $4; }"
    word = gl.convert_layout(word.reshape([4, 2, 2, 4, 4]), words_by_key(), assert_trivial=True)
    return gl.inline_asm_elementwise(ASM, "=r,0,r,r,r", [bits, word, least, bit], dtype=gl.int32, is_pure=True, pack=1)


@gluon_jit
def append_quad_bits(bits, word, least, bit):
    """Add the bits of one key's random words [quads of keys, queries] to bits [warp, half of its quads, quad, lane, pair]. `bit`: the first
    bit of each lane."""
    FOURS: gl.constexpr = word.shape[1] // 32
    even, odd = gl.split(word.reshape([4, 2, 2, FOURS, 4, 4, 2]))
    if FOURS == 1:
        return append_drop_bit(append_drop_bit(bits, even, least, bit), odd, least, bit << 1)
    else:
        low_even, high_even = gl.split(even.permute([0, 1, 2, 4, 5, 3]))
        low_odd, high_odd = gl.split(odd.permute([0, 1, 2, 4, 5, 3]))
        bits = append_drop_bit(append_drop_bit(bits, low_even, least, bit), low_odd, least, bit << 1)
        return append_drop_bit(append_drop_bit(bits, high_even, least, bit << 8), high_odd, least, bit << 9)


@gluon_jit
def append_four_keys(bits, words, least, bit):
    """`append_quad_bits` for the four keys of a quad."""
    return (
        append_quad_bits(bits[0], words[0], least, bit), append_quad_bits(bits[1], words[1], least, bit),
        append_quad_bits(bits[2], words[2], least, bit), append_quad_bits(bits[3], words[3], least, bit),
    )  # fmt: skip


@gluon.constexpr_function
def _shuffle_text(bit):
    return f"shfl.sync.bfly.b32 $0, $1, {bit}, 31, 0xffffffff;"


@gluon_jit
def shuffle_xor(x, BIT: gl.constexpr):
    """Value of the lane whose number differs in this bit."""
    TEXT: gl.constexpr = _shuffle_text(BIT)
    return gl.inline_asm_elementwise(TEXT, "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon_jit
def gather_key_words(key_bits, lane):
    """Transpose: four lanes hold bits of four keys each; afterwards each lane holds the whole word of one key."""
    n0, n1, n2, n3 = key_bits
    high = lane >= 2
    here = gl.where(high, n2, n0) | shuffle_xor(gl.where(high, n0, n2), 8)
    neighbor = gl.where(high, n3, n1) | shuffle_xor(gl.where(high, n1, n3), 8)
    odd = lane % 2 == 1
    return gl.where(odd, neighbor, here) | shuffle_xor(gl.where(odd, here, neighbor), 4)


@gluon_jit
def drops_by_key(first, query0, b, h, dropout_params, COLUMNS: gl.constexpr, AT_ONCE: gl.constexpr):
    """Drop bits [64, 4] of the 64 keys from `first`, over COLUMNS queries from `query0`, AT_ONCE (32 or 64) of them at a time."""
    layout: gl.constexpr = quads_by_key(AT_ONCE)
    quad = (opaque_value(first) // 4 + gl.arange(0, 16, gl.SliceLayout(1, layout)))[:, None]
    column = (opaque_value(query0) + gl.arange(0, AT_ONCE, gl.SliceLayout(0, layout)))[None, :]
    key = philox_keys(dropout_params)
    lane = gl.arange(0, 4, axis_layout(words_by_key(), 5, 3))[None, None, None, :, None]
    bit = gl.to_tensor(1) << (2 * lane)
    n0 = gl.zeros([4, 2, 2, 4, 4], gl.int32, words_by_key())
    key_bits = (n0, n0, n0, n0)
    if COLUMNS == AT_ONCE:
        key_bits = append_four_keys(key_bits, random_words(key, quad, column, h, b), dropout_params[2], bit)
    else:
        # not unrolled: it would not fit the instruction cache beside the rest of the kernel
        for _part in range(0, opaque_value(COLUMNS // AT_ONCE)):
            key_bits = append_four_keys(key_bits, random_words(key, quad, column, h, b), dropout_params[2], bit)
            column += AT_ONCE
            bit = bit << (AT_ONCE // 4)
    words = gather_key_words(key_bits, lane)
    return gl.convert_layout(words.reshape([64, 4]), words_layout(COLUMNS), assert_trivial=True)


@gluon_jit
def drop_bits(tile, row_ctx, c):
    """Drop bits of a tile of keys for this consumer's 64 queries."""
    if c.DROPOUT:
        return drops_by_query(row_ctx.first, tile_start(tile, c, c.TILE_KV), row_ctx.b, row_ctx.h, row_ctx.dropout, c.TILE_KV)
    else:
        return 0


@gluon_jit
def apply_dropout(p, words, c):
    """Set the sign bit of dropped weights; `pack_weights` rounds negative weights to 0."""
    if c.DROPOUT:
        y, column, lane = split_columns(p)
        place = column // 8 * 2 + column % 2
        sign = (gl.expand_dims(gl.expand_dims(words, 1), 3) << (31 - place)) & -2147483648
        y = (y.to(gl.int32, bitcast=True) | sign).to(gl.float32, bitcast=True)
        return gl.convert_layout(y.reshape([64, p.shape[1]]), p.type.layout, assert_trivial=True)
    else:
        return p
