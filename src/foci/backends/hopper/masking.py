# mypy: ignore-errors
"""Scores of a tile: score function, then -inf where masked.

A tile is masked by each row's first and last key, if the mask has such bounds; by its precomputed bits (`foci.backends.hopper.mask_bits`);
or by evaluating the mask function. In the first two ways a thread's columns are compile-time constants, and a score costs a comparison and
a select.
"""

from foci.backends.gpu.tiles import FORCED, decode
from foci.backends.hopper.gluon_compat import gl, gluon, thread_barrier
from foci.backends.hopper.layouts import mma_layout
from foci.backends.hopper.smem import first_key
from foci.compat.gluon import gluon_jit

__all__ = [
    "BOTH",
    "IF_PARTIAL",
    "LOWER",
    "ROWS",
    "UNMASKED",
    "UPPER",
    "add_affine_columns",
    "affine_terms",
    "fill_unset_bits",
    "load_mask_bits",
    "load_tile_mask_bits",
    "tile_scores",
    "zero_outside",
]  # fmt: skip

ROWS = gl.constexpr(64)
# what to mask in a tile: nothing, keys after a row's last, keys before a row's first, or both
UNMASKED = gl.constexpr(0)
UPPER = gl.constexpr(1)
LOWER = gl.constexpr(2)
BOTH = gl.constexpr(3)
# decided at run time: both if the tile is partial, nothing else
IF_PARTIAL = gl.constexpr(4)


@gluon_jit
def split_columns(x):
    """View a tile by thread. Returns (tile as [rows, n, 4, 2], 4 being the lanes of a row; column of each value relative to its lane,
    [1, n, 1, 2], a constant to a thread; first column of each lane, [1, 1, 4, 1])."""
    y = x.reshape([ROWS, x.shape[1] // 8, 4, 2])
    LAYOUT: gl.constexpr = y.type.layout
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    eight = gl.arange(0, x.shape[1] // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    one = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    return y, 8 * eight[None, :, None, None] + one[None, None, None, :], 2 * lane[None, None, :, None]


@gluon_jit
def broadcast_rows(limit, y):
    """Broadcast a value per row over a tile from `split_columns`."""
    LAYOUT: gl.constexpr = y.type.layout
    return gl.convert_layout(limit, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))[:, None, None, None]


@gluon_jit
def mask_after_last(x, limit):
    """-inf after each row's last key; `limit` counts from the tile's first key."""
    y, column, lane = split_columns(x)
    y = gl.where(column <= broadcast_rows(limit, y) - lane, y, float("-inf"))
    return gl.convert_layout(y.reshape([ROWS, x.shape[1]]), x.type.layout, assert_trivial=True)


@gluon_jit
def mask_before_first(x, limit):
    """-inf before each row's first key."""
    y, column, lane = split_columns(x)
    y = gl.where(column >= broadcast_rows(limit, y) - lane, y, float("-inf"))
    return gl.convert_layout(y.reshape([ROWS, x.shape[1]]), x.type.layout, assert_trivial=True)


@gluon_jit
def zero_outside(x, first, last):
    """0 before the first and after the last column of each row."""
    y, column, lane = split_columns(x)
    y = gl.where((column >= broadcast_rows(first, y) - lane) & (column <= broadcast_rows(last, y) - lane), y, 0.0)
    return gl.convert_layout(y.reshape([ROWS, x.shape[1]]), x.type.layout, assert_trivial=True)


@gluon_jit
def fill_unset_bits(x, words, OTHER: gl.constexpr):
    """OTHER where the mask bit is not set."""
    y, column, lane = split_columns(x)
    bit = column // 8 * 2 + column % 2
    y = gl.where(((gl.expand_dims(gl.expand_dims(words, 1), 3) >> bit) & 1) != 0, y, OTHER)
    return gl.convert_layout(y.reshape([ROWS, x.shape[1]]), x.type.layout, assert_trivial=True)


@gluon_jit
def load_mask_bits(words, some, COLUMNS: gl.constexpr):
    """Load a tile's mask bits, [rows, 4] words, contiguous; all ones if not `some`."""
    LAYOUT: gl.constexpr = gl.zeros([ROWS, COLUMNS], gl.float32, mma_layout(COLUMNS)).reshape([ROWS, COLUMNS // 8, 4, 2]).type.layout
    WORDS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))
    place = gl.arange(0, ROWS, gl.SliceLayout(1, WORDS))[:, None] * 4 + gl.arange(0, 4, gl.SliceLayout(0, WORDS))[None, :]
    return gl.load(words + place, mask=place < gl.where(some, ROWS * 4, 0), other=-1)


@gluon_jit
def affine_terms(tile, row_ctx, env, c, line: gl.constexpr):
    """Initial accumulator of an affine score function: a value for each lane of a row, plus slope times column, a constant to a thread."""
    y, column, lane = split_columns(gl.zeros([ROWS, c.TILE_KV], gl.float32, mma_layout(c.TILE_KV)))
    LANES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, y.type.layout))
    rows = gl.convert_layout(gl.max(row_ctx.q_idx, 1), gl.SliceLayout(1, LANES))[:, None]
    columns = first_key(tile, c) + 2 * gl.arange(0, 4, gl.SliceLayout(0, LANES))[None, :]
    row_bias, slope = line(row_ctx.b, row_ctx.h, rows, columns, row_ctx.q_len, row_ctx.kv_len, env, row_ctx.aux)
    y = gl.expand_dims(gl.expand_dims(row_bias, 1), 3) + column.to(gl.float32) * slope
    return gl.convert_layout(y.reshape([ROWS, c.TILE_KV]), mma_layout(c.TILE_KV), assert_trivial=True)


@gluon_jit
def add_affine_columns(row, slope):
    """row - slope * column, for each column of a tile; columns are constants to a thread."""
    y = row.reshape([row.shape[0] // 8, 4, 2])
    LAYOUT: gl.constexpr = y.type.layout
    eight = gl.arange(0, row.shape[0] // 8, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    one = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    column = 8 * eight[:, None, None] + one[None, None, :]
    y = y - (2 * lane)[None, :, None].to(gl.float32) * slope - column.to(gl.float32) * slope
    return gl.convert_layout(y.reshape([row.shape[0]]), row.type.layout, assert_trivial=True)


@gluon_jit
def load_tile_mask_bits(table, run, i, row_ctx, c, MASKED: gl.constexpr):
    """Load the mask bits of the i-th visited tile, before its product is there, to hide the latency."""
    if c.MASK_BITS and MASKED:
        first = (run.row * decode(table.width) + run.part_first + i) * (c.TILE_Q * 4) + row_ctx.first % c.TILE_Q * 4
        # a full tile has no bits: all ones
        return load_mask_bits(table.bits + first, i < run.part, c.TILE_KV)
    else:
        return i


@gluon.constexpr_function
def _mask_text(n, kind):
    """PTX that sets masked ones of a thread's n scores to -inf, and skips a tile that is not partial: a branch in Gluon would copy the
    scores.

    A thread has two rows: two columns of the first, two of the second, and so on, from eight columns to the next. Each row has a word with
    a bit for each of its columns: given ("words"), or made of the last key ("last") or of the first and last key ("both").
    """
    flag, lines = (4 if kind == "both" else 3) * n, []
    for row in range(2):
        if kind == "words":
            lines.append(f"mov.b32 word{row}, ${2 * n + 2 * row};")
        else:
            lines += _bits_up_to(f"${2 * n + 2 * row}", f"word{row}")
        if kind == "both":
            lines += [
                f"sub.s32 number, ${3 * n + 2 * row}, 1;",
                *_bits_up_to("number", "other"),
                f"not.b32 other, other; and.b32 word{row}, word{row}, other;",
            ]
    for i in range(n):
        lines.append(
            f"and.b32 bit, word{i // 2 % 2}, {1 << (i // 4 * 2 + i % 2)}; setp.eq.s32 p, bit, 0; selp.f32 ${i}, 0fFF800000, ${i}, p;"
        )
    named = ".reg .pred p; .reg .b32 bit, word0, word1, other, number, part;"
    return f"{{ {named} setp.eq.s32 p, ${flag}, 0; @p bra.uni done; {' '.join(lines)} done: }}"


@gluon.constexpr_function
def _bits_up_to(limit, word):
    """PTX that makes the word of all columns up to `limit`; a thread has two columns in eight."""
    return [
        f"and.b32 part, {limit}, 7; add.s32 part, part, 1; min.s32 part, part, 2; shr.s32 number, {limit}, 3; shl.b32 number, number, 1;",
        f"add.s32 number, number, part; max.s32 number, number, 0; shl.b32 {word}, 1, number; sub.s32 {word}, {word}, 1;",
    ]


@gluon.constexpr_function
def _operands(n, registers):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["r"] * (n * registers))


@gluon_jit
def mask_scores(partial, x, tile_key, mask_bits, row_ctx, c):
    """Mask the scores of a tile that may be partial, by mask bits or by each row's first and last key."""
    y, column, lane = split_columns(x)
    N: gl.constexpr = x.shape[1] // 2
    KIND: gl.constexpr = "words" if c.MASK_BITS else "both" if c.LOW else "last"
    text: gl.constexpr = _mask_text(N, KIND)
    flag = gl.to_tensor(partial).to(gl.int32)
    if c.MASK_BITS:
        words = gl.expand_dims(gl.expand_dims(mask_bits, 1), 3)
        y = gl.inline_asm_elementwise(text, _operands(N, 2), [y, words, flag], dtype=gl.float32, is_pure=True, pack=N)
    else:
        last = broadcast_rows(row_ctx.high - tile_key, y) - lane
        if c.LOW:
            low = broadcast_rows(row_ctx.low - tile_key, y) - lane
            y = gl.inline_asm_elementwise(text, _operands(N, 3), [y, last, low, flag], dtype=gl.float32, is_pure=True, pack=N)
        else:
            y = gl.inline_asm_elementwise(text, _operands(N, 2), [y, last, flag], dtype=gl.float32, is_pure=True, pack=N)
    return gl.convert_layout(y.reshape([ROWS, x.shape[1]]), x.type.layout, assert_trivial=True)


@gluon_jit
def evaluate_mask(x, tile, kv_idx, column, row_ctx, env, c, mask: gl.constexpr):
    """Mask scores by evaluating the mask function."""
    keep = mask(row_ctx.b, row_ctx.h, row_ctx.q_idx, kv_idx, row_ctx.q_len, row_ctx.kv_len, env, row_ctx.aux)
    if c.BLOCKS:
        keep = keep | (tile >= FORCED)
    return gl.where(keep & (column < row_ctx.kv_len), x, float("-inf"))


@gluon_jit
def tile_scores(raw, tile, mask_bits, partial, row_ctx, env, c, score: gl.constexpr, mask: gl.constexpr, MASKED: gl.constexpr):
    """Apply score function and mask to a tile of Q K^T. A constant factor, such as the scale, is left to the exponential
    (`row_ctx.factor`)."""
    x = raw
    tile_key = first_key(tile, c)
    column = (tile_key + gl.arange(0, c.TILE_KV, gl.SliceLayout(0, mma_layout(c.TILE_KV))))[None, :]
    kv_idx = column
    if MASKED:
        kv_idx = gl.minimum(column, row_ctx.kv_len - 1)
    if not c.PLAIN and not c.AFFINE:
        x = score(raw, row_ctx.b, row_ctx.h, row_ctx.q_idx, kv_idx, row_ctx.q_len, row_ctx.kv_len, env, row_ctx.aux)
    if MASKED == IF_PARTIAL and (c.MODE == "bounds" or c.MASK_BITS):
        x = mask_scores(partial, x, tile_key, mask_bits, row_ctx, c)
    elif MASKED and c.MODE == "bounds":
        if c.LOW and MASKED != UPPER:
            x = mask_before_first(x, row_ctx.low - tile_key)
        if MASKED != LOWER:
            x = mask_after_last(x, row_ctx.high - tile_key)
        elif row_ctx.narrow > 0:
            thread_barrier()
            x = mask_after_last(x, row_ctx.high - tile_key)
    elif MASKED and c.MASK_BITS:
        x = fill_unset_bits(x, mask_bits, float("-inf"))
    elif MASKED == IF_PARTIAL:
        if partial:
            # the barrier keeps the branch: without it the compiler computes both sides and selects
            thread_barrier()
            x = evaluate_mask(x, tile, kv_idx, column, row_ctx, env, c, mask)
    elif MASKED:
        x = evaluate_mask(x, tile, kv_idx, column, row_ctx, env, c, mask)
    return x
