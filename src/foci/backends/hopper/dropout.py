# mypy: ignore-errors
"""Which weights of a tile dropout drops, as bits: two words of 32 a thread at most, made while products run.

One evaluation of Philox serves four neighbouring keys, which several threads hold. Evaluations are spread over the threads of a warp so
that none is made twice; threads hand each other bits, not words. A thread's word is as `foci.backends.hopper.mask_bits` has it: bit 2 i + j
of word l of a row says whether column 8 i + 2 l + j is dropped.
"""

from foci.backends.hopper.gluon_compat import gl, gluon
from foci.backends.hopper.masking import by_column
from foci.backends.hopper.smem import opaque_zero
from foci.backends.triton.tiles import random_words, tile_start

__all__ = ["apply_dropout", "drop_bits", "drops_by_key", "drops_by_query", "load_dropout_params"]


@gluon.constexpr_function
def along_axis(layout, rank, axis):
    """Of numbers along one axis of a tensor of such a layout."""
    for other in reversed([n for n in range(rank) if n != axis]):
        layout = gl.SliceLayout(other, layout)
    return layout


@gluon.constexpr_function
def by_query(quads):
    """Of [64 queries, quads of keys]: lanes that share a row take every second eight keys, the lower or the upper half of them."""
    more = [[0, 4 << n] for n in range(quads.bit_length() - 3)]
    return gl.DistributedLinearLayout([[8, 0], *more], [[0, 2], [0, 1], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, quads])


@gluon.constexpr_function
def words_by_query():
    """Of words [64 queries, half of eight keys, pair of them]."""
    return gl.DistributedLinearLayout(
        [[8, 0, 0]], [[0, 0, 1], [0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [[16, 0, 0], [32, 0, 0]], [], [64, 2, 2]
    )


@gluon.constexpr_function
def by_key(queries):
    """Of [16 quads of keys, queries]: the lanes of a quad take every fourth eight queries."""
    more = [[0, 32 << n] for n in range(queries.bit_length() - 6)]
    return gl.DistributedLinearLayout(
        [[0, 1], [2, 0], *more], [[0, 2], [0, 4], [0, 8], [0, 16], [1, 0]], [[4, 0], [8, 0]], [], [16, queries]
    )


@gluon.constexpr_function
def words_by_key():
    """Of words [warp, half of its quads, quad, key, pair of queries]."""
    return gl.DistributedLinearLayout(
        [[0, 1, 0, 0, 0]],
        [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 1, 0, 0]],
        [[1, 0, 0, 0, 0], [2, 0, 0, 0, 0]], [], [4, 2, 2, 4, 4],
    )  # fmt: skip


@gluon.constexpr_function
def words_layout(columns):
    """Of the words [64, 4] of a product's rows."""
    more = [[0, 1 << n, 0, 0] for n in range(columns.bit_length() - 4)]
    whole = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [8, 0, 0, 0], *more],
        [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [[16, 0, 0, 0], [32, 0, 0, 0]], [], [64, columns // 8, 4, 2],
    )  # fmt: skip
    return gl.SliceLayout(1, gl.SliceLayout(3, whole))


@gluon.jit
def load_dropout_params(numbers, c):
    """(low word of the seed, high word, least word that is kept), read once a task."""
    if c.DROPOUT:
        seed = gl.load(numbers.seed)
        least = ((numbers.threshold - (1 << 40)) >> 5).to(gl.uint32)
        return seed.to(gl.int32), (seed >> 32).to(gl.int32), least
    else:
        return 0


@gluon.jit
def philox_keys(odds):
    """The seed's words: the keys of seven rounds, which follow from them, take more registers than it costs to make them."""
    return opaque_zero(odds[0]).to(gl.uint32), opaque_zero(odds[1]).to(gl.uint32)


@gluon.jit
def by_eight(word, odds, FIRST: gl.constexpr):
    """Bits [64, lane, half] of words [64, quads of keys]; a lane's eights are every second one."""
    y = word.reshape([64, word.shape[1] // 4, 2, 2])
    two = gl.arange(0, word.shape[1] // 4, along_axis(y.type.layout, 4, 1))[None, :, None, None]
    return gl.sum((y < odds[2]).to(gl.int32) << (4 * two + FIRST), 1)


@gluon.jit
def words_of_lanes(bits):
    """Words [64, half of eight keys] of what each lane found."""
    lane = gl.arange(0, 2, along_axis(bits.type.layout, 3, 1))[None, :, None]
    words = gl.sum(bits << (2 * lane), 1)
    return gl.expand_dims(gl.convert_layout(words, gl.SliceLayout(2, words_by_query()), assert_trivial=True), 2)


@gluon.jit
def drops_by_query(first, here, b, h, odds, COLUMNS: gl.constexpr):
    """Words [64, 4] of the 64 queries from `first`, over COLUMNS keys from `here`."""
    PART: gl.constexpr = min(COLUMNS, 64)
    layout: gl.constexpr = by_query(PART // 4)
    row = (first + gl.arange(0, 64, gl.SliceLayout(1, layout)))[:, None]
    quad = (opaque_zero(here) // 4 + gl.arange(0, PART // 4, gl.SliceLayout(0, layout)))[None, :]
    key = philox_keys(odds)
    for part in gl.static_range(COLUMNS // PART):
        w0, w1, w2, w3 = random_words(key, quad + part * (PART // 4), row, h, b)
        low = by_eight(w0, odds, part * (PART // 4)) + by_eight(w1, odds, part * (PART // 4) + 1)
        high = by_eight(w2, odds, part * (PART // 4)) + by_eight(w3, odds, part * (PART // 4) + 1)
        if part == 0:
            lower = low
            upper = high
        else:
            lower += low
            upper += high
    pair = gl.arange(0, 2, along_axis(words_by_query(), 3, 2))[None, None, :]
    words = gl.where(pair == 0, words_of_lanes(lower), words_of_lanes(upper))
    return gl.convert_layout(words.reshape([64, 4]), words_layout(COLUMNS), assert_trivial=True)


@gluon.jit
def append_drop_bit(bits, word, least, bit):
    """Bits, with one more where a word is below the least that is kept: two instructions, where a choice takes three."""
    ASM: gl.constexpr = "{ .reg .pred drops; setp.lt.u32 drops, $2, $3; @drops or.b32 $0, $0, $4; }"
    word = gl.convert_layout(word.reshape([4, 2, 2, 4, 4]), words_by_key(), assert_trivial=True)
    return gl.inline_asm_elementwise(ASM, "=r,0,r,r,r", [bits, word, least, bit], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def by_four(bits, word, least, bit):
    """Bits [warp, half of its quads, quad, lane, pair] of a key, with those of words [quads of keys, queries]; `bit`: a lane's first."""
    FOURS: gl.constexpr = word.shape[1] // 32
    even, odd = gl.split(word.reshape([4, 2, 2, FOURS, 4, 4, 2]))
    if FOURS == 1:
        return append_drop_bit(append_drop_bit(bits, even, least, bit), odd, least, bit << 1)
    else:
        low_even, high_even = gl.split(even.permute([0, 1, 2, 4, 5, 3]))
        low_odd, high_odd = gl.split(odd.permute([0, 1, 2, 4, 5, 3]))
        bits = append_drop_bit(append_drop_bit(bits, low_even, least, bit), low_odd, least, bit << 1)
        return append_drop_bit(append_drop_bit(bits, high_even, least, bit << 8), high_odd, least, bit << 9)


@gluon.jit
def by_fours(bits, words, least, bit):
    """The same of four keys."""
    return (
        by_four(bits[0], words[0], least, bit), by_four(bits[1], words[1], least, bit),
        by_four(bits[2], words[2], least, bit), by_four(bits[3], words[3], least, bit),
    )  # fmt: skip


@gluon.constexpr_function
def _of_lane(bit):
    return f"shfl.sync.bfly.b32 $0, $1, {bit}, 31, 0xffffffff;"


@gluon.jit
def shuffle_xor(x, BIT: gl.constexpr):
    """What the lane has whose number differs in such a bit."""
    TEXT: gl.constexpr = _of_lane(BIT)
    return gl.inline_asm_elementwise(TEXT, "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def gather_key_words(found, lane):
    """Words of what four lanes found of each of four keys, one key's to a lane."""
    n0, n1, n2, n3 = found
    high = lane >= 2
    own = gl.where(high, n2, n0) | shuffle_xor(gl.where(high, n0, n2), 8)
    next = gl.where(high, n3, n1) | shuffle_xor(gl.where(high, n1, n3), 8)
    odd = lane % 2 == 1
    return gl.where(odd, next, own) | shuffle_xor(gl.where(odd, own, next), 4)


@gluon.jit
def drops_by_key(first, here, b, h, odds, COLUMNS: gl.constexpr, AT_ONCE: gl.constexpr):
    """Words [64, 4] of the 64 keys from `first`, over COLUMNS queries from `here`, AT_ONCE (32 or 64) of them at a time."""
    layout: gl.constexpr = by_key(AT_ONCE)
    quad = (opaque_zero(first) // 4 + gl.arange(0, 16, gl.SliceLayout(1, layout)))[:, None]
    column = (opaque_zero(here) + gl.arange(0, AT_ONCE, gl.SliceLayout(0, layout)))[None, :]
    key = philox_keys(odds)
    lane = gl.arange(0, 4, along_axis(words_by_key(), 5, 3))[None, None, None, :, None]
    bit = gl.to_tensor(1) << (2 * lane)
    n0 = gl.zeros([4, 2, 2, 4, 4], gl.int32, words_by_key())
    found = (n0, n0, n0, n0)
    if COLUMNS == AT_ONCE:
        found = by_fours(found, random_words(key, quad, column, h, b), odds[2], bit)
    else:
        # a loop at run time: written out, it would not fit the instruction caches beside the rest
        for _part in range(0, opaque_zero(COLUMNS // AT_ONCE)):
            found = by_fours(found, random_words(key, quad, column, h, b), odds[2], bit)
            column += AT_ONCE
            bit = bit << (AT_ONCE // 4)
    words = gather_key_words(found, lane)
    return gl.convert_layout(words.reshape([64, 4]), words_layout(COLUMNS), assert_trivial=True)


@gluon.jit
def drop_bits(tile, at, odds, c):
    """Words of a tile of keys."""
    if c.DROPOUT:
        return drops_by_query(at[5], tile_start(tile, c, c.TILE_KV), at[0], at[1], odds, c.TILE_KV)
    else:
        return 0


@gluon.jit
def apply_dropout(p, words, c):
    """Weights, those that dropout drops with a minus before them: `pack_weights` rounds these to zero."""
    if c.DROPOUT:
        y, column, lane = by_column(p)
        place = column // 8 * 2 + column % 2
        sign = (gl.expand_dims(gl.expand_dims(words, 1), 3) << (31 - place)) & -2147483648
        y = (y.to(gl.int32, bitcast=True) | sign).to(gl.float32, bitcast=True)
        return gl.convert_layout(y.reshape([64, p.shape[1]]), p.type.layout, assert_trivial=True)
    else:
        return p
