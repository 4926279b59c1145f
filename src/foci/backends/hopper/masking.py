# mypy: ignore-errors
"""Scores of a tile, -inf where masked.

By a row's first and last key, or by the words of a partial tile (`foci.backends.hopper.mask_bits`), columns are constants to a
thread: a score costs a comparison and a choice. Masks that have neither are computed.
"""

from foci.backends.hopper.gluon_compat import gl, gluon, thread_barrier
from foci.backends.hopper.layouts import mma_layout
from foci.backends.hopper.smem import first_key
from foci.backends.triton.tiles import FORCED, decode

__all__ = [
    "BOTH",
    "LOWER",
    "ROWS",
    "SOME",
    "UPPER",
    "WHOLE",
    "add_affine_columns",
    "affine_terms",
    "keep_columns",
    "keep_marked",
    "load_mask_bits",
    "load_tile_bits",
    "tile_scores",
]  # fmt: skip

ROWS = gl.constexpr(64)
# what is masked of a tile: nothing, keys behind a row's last, keys before its first, or both
WHOLE = gl.constexpr(0)
UPPER = gl.constexpr(1)
LOWER = gl.constexpr(2)
BOTH = gl.constexpr(3)
# the same, if the tile is partial
SOME = gl.constexpr(4)


@gluon.jit
def by_column(x):
    """(tile as [rows, n, 4, 2], 4 the lanes of a row; columns that one thread holds [1, n, 1, 2]; first column of a lane [1, 1, 4, 1])."""
    y = x.reshape([ROWS, x.shape[1] // 8, 4, 2])
    LAYOUT: gl.constexpr = y.type.layout
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    eight = gl.arange(0, x.shape[1] // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    one = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    return y, 8 * eight[None, :, None, None] + one[None, None, None, :], 2 * lane[None, None, :, None]


@gluon.jit
def by_rows(limit, y):
    """A number a row, for a tile that `by_column` gave."""
    LAYOUT: gl.constexpr = y.type.layout
    return gl.convert_layout(limit, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))[:, None, None, None]


@gluon.jit
def mask_after_last(x, limit):
    """-inf behind the last key of a row, `limit` from the tile's first."""
    y, column, lane = by_column(x)
    y = gl.where(column <= by_rows(limit, y) - lane, y, float("-inf"))
    return gl.convert_layout(y.reshape([ROWS, x.shape[1]]), x.type.layout, assert_trivial=True)


@gluon.jit
def mask_before_first(x, limit):
    """-inf before the first key of a row."""
    y, column, lane = by_column(x)
    y = gl.where(column >= by_rows(limit, y) - lane, y, float("-inf"))
    return gl.convert_layout(y.reshape([ROWS, x.shape[1]]), x.type.layout, assert_trivial=True)


@gluon.jit
def keep_columns(x, first, last):
    """0 before the first and behind the last column of a row."""
    y, column, lane = by_column(x)
    y = gl.where((column >= by_rows(first, y) - lane) & (column <= by_rows(last, y) - lane), y, 0.0)
    return gl.convert_layout(y.reshape([ROWS, x.shape[1]]), x.type.layout, assert_trivial=True)


@gluon.jit
def keep_marked(x, words, OTHER: gl.constexpr):
    """OTHER where the words have no bit."""
    y, column, lane = by_column(x)
    bit = column // 8 * 2 + column % 2
    y = gl.where(((gl.expand_dims(gl.expand_dims(words, 1), 3) >> bit) & 1) != 0, y, OTHER)
    return gl.convert_layout(y.reshape([ROWS, x.shape[1]]), x.type.layout, assert_trivial=True)


@gluon.jit
def load_mask_bits(words, some, COLUMNS: gl.constexpr):
    """Words [rows, 4] of a tile, which lie one after the other; all bits where it has none."""
    LAYOUT: gl.constexpr = gl.zeros([ROWS, COLUMNS], gl.float32, mma_layout(COLUMNS)).reshape([ROWS, COLUMNS // 8, 4, 2]).type.layout
    WORDS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))
    place = gl.arange(0, ROWS, gl.SliceLayout(1, WORDS))[:, None] * 4 + gl.arange(0, 4, gl.SliceLayout(0, WORDS))[None, :]
    return gl.load(words + place, mask=place < gl.where(some, ROWS * 4, 0), other=-1)


@gluon.jit
def affine_terms(tile, at, env, c, line: gl.constexpr):
    """What a score adds to a tile of products: a number for each lane of a row, and a slope times columns that are constants."""
    b, h, q_idx, q_len, kv_len, first, aux, factor, low, high, narrow = at
    y, column, lane = by_column(gl.zeros([ROWS, c.TILE_KV], gl.float32, mma_layout(c.TILE_KV)))
    LANES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, y.type.layout))
    rows = gl.convert_layout(gl.max(q_idx, 1), gl.SliceLayout(1, LANES))[:, None]
    columns = first_key(tile, c) + 2 * gl.arange(0, 4, gl.SliceLayout(0, LANES))[None, :]
    lead, rise = line(b, h, rows, columns, q_len, kv_len, env, aux)
    y = gl.expand_dims(gl.expand_dims(lead, 1), 3) + column.to(gl.float32) * rise
    return gl.convert_layout(y.reshape([ROWS, c.TILE_KV]), mma_layout(c.TILE_KV), assert_trivial=True)


@gluon.jit
def add_affine_columns(row, rise):
    """A number for each column of a tile, less `rise` for each column before it: columns are constants to a thread."""
    y = row.reshape([row.shape[0] // 8, 4, 2])
    LAYOUT: gl.constexpr = y.type.layout
    eight = gl.arange(0, row.shape[0] // 8, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    one = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    column = 8 * eight[:, None, None] + one[None, None, :]
    y = y - (2 * lane)[None, :, None].to(gl.float32) * rise - column.to(gl.float32) * rise
    return gl.convert_layout(y.reshape([row.shape[0]]), row.type.layout, assert_trivial=True)


@gluon.jit
def load_tile_bits(table, run, i, at, c, MASKED: gl.constexpr):
    """Words [rows, 4] of the i-th tile that a program visits, where it has some; asked for while its product is not yet there."""
    if c.WORDS and MASKED:
        row, full_first, full, part_first, before, gap, part = run
        first = (row * decode(table.width) + part_first + i) * (c.TILE_Q * 4) + at[5] % c.TILE_Q * 4
        # a full tile, which has none, is attended to
        return load_mask_bits(table.words + first, i < part, c.TILE_KV)
    else:
        return i


@gluon.constexpr_function
def _branch(n, kind):
    """Of the n scores of a thread, -inf in the place of those that are masked, if the tile is partial: else they stay untouched, where a
    branch of the language would copy them. A thread has two rows: two columns of the first, two of the second, and so on, from eight
    columns to the next; for each row a word has a bit for each of its columns, or is made of the "last" or the "first" and last of them."""
    flag, lines = (4 if kind == "both" else 3) * n, []
    for row in range(2):
        if kind == "words":
            lines.append(f"mov.b32 word{row}, ${2 * n + 2 * row};")
        else:
            lines += _below(f"${2 * n + 2 * row}", f"word{row}")
        if kind == "both":
            lines += [
                f"sub.s32 number, ${3 * n + 2 * row}, 1;",
                *_below("number", "other"),
                f"not.b32 other, other; and.b32 word{row}, word{row}, other;",
            ]
    for i in range(n):
        lines.append(
            f"and.b32 bit, word{i // 2 % 2}, {1 << (i // 4 * 2 + i % 2)}; setp.eq.s32 p, bit, 0; selp.f32 ${i}, 0fFF800000, ${i}, p;"
        )
    named = ".reg .pred p; .reg .b32 bit, word0, word1, other, number, part;"
    return f"{{ {named} setp.eq.s32 p, ${flag}, 0; @p bra.uni done; {' '.join(lines)} done: }}"


@gluon.constexpr_function
def _below(limit, word):
    """Bits of the columns up to a limit, of which there are two in eight."""
    return [
        f"and.b32 part, {limit}, 7; add.s32 part, part, 1; min.s32 part, part, 2; shr.s32 number, {limit}, 3; shl.b32 number, number, 1;",
        f"add.s32 number, number, part; max.s32 number, number, 0; shl.b32 {word}, 1, number; sub.s32 {word}, {word}, 1;",
    ]


@gluon.constexpr_function
def _operands(n, others):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["r"] * (n * others))


@gluon.jit
def mask_scores(partial, x, here, marks, at, c):
    """Scores of a tile, which is partial or not, by its words or by its rows' first and last keys."""
    b, h, q_idx, q_len, kv_len, first, aux, factor, low, high, narrow = at
    y, column, lane = by_column(x)
    N: gl.constexpr = x.shape[1] // 2
    KIND: gl.constexpr = "words" if c.WORDS else "both" if c.LOW else "last"
    text: gl.constexpr = _branch(N, KIND)
    flag = gl.to_tensor(partial).to(gl.int32)
    if c.WORDS:
        words = gl.expand_dims(gl.expand_dims(marks, 1), 3)
        y = gl.inline_asm_elementwise(text, _operands(N, 2), [y, words, flag], dtype=gl.float32, is_pure=True, pack=N)
    else:
        last = by_rows(high - here, y) - lane
        if c.LOW:
            low = by_rows(low - here, y) - lane
            y = gl.inline_asm_elementwise(text, _operands(N, 3), [y, last, low, flag], dtype=gl.float32, is_pure=True, pack=N)
        else:
            y = gl.inline_asm_elementwise(text, _operands(N, 2), [y, last, flag], dtype=gl.float32, is_pure=True, pack=N)
    return gl.convert_layout(y.reshape([ROWS, x.shape[1]]), x.type.layout, assert_trivial=True)


@gluon.jit
def evaluate_mask(x, tile, kv_idx, column, at, env, c, mask: gl.constexpr):
    """Scores, -inf where the mask itself says so."""
    b, h, q_idx, q_len, kv_len, first, aux, factor, low, high, narrow = at
    keep = mask(b, h, q_idx, kv_idx, q_len, kv_len, env, aux)
    if c.BLOCKS:
        keep = keep | (tile >= FORCED)
    return gl.where(keep & (column < kv_len), x, float("-inf"))


@gluon.jit
def tile_scores(raw, tile, marks, partial, at, env, c, score: gl.constexpr, mask: gl.constexpr, MASKED: gl.constexpr):
    """Scores of a tile of products, -inf where masked, without a factor that `at` holds: the scale if they are plain."""
    b, h, q_idx, q_len, kv_len, first, aux, factor, low, high, narrow = at
    x = raw
    here = first_key(tile, c)
    column = (here + gl.arange(0, c.TILE_KV, gl.SliceLayout(0, mma_layout(c.TILE_KV))))[None, :]
    kv_idx = column
    if MASKED:
        kv_idx = gl.minimum(column, kv_len - 1)
    if not c.PLAIN and not c.LINE:
        x = score(raw, b, h, q_idx, kv_idx, q_len, kv_len, env, aux)
    if MASKED == SOME and (c.MODE == "bounds" or c.WORDS):
        x = mask_scores(partial, x, here, marks, at, c)
    elif MASKED and c.MODE == "bounds":
        if c.LOW and MASKED != UPPER:
            x = mask_before_first(x, low - here)
        if MASKED != LOWER:
            x = mask_after_last(x, high - here)
        elif narrow > 0:
            thread_barrier()
            x = mask_after_last(x, high - here)
    elif MASKED and c.WORDS:
        x = keep_marked(x, marks, float("-inf"))
    elif MASKED == SOME:
        if partial:
            # the barrier keeps the branch: else both results are computed, and one chosen
            thread_barrier()
            x = evaluate_mask(x, tile, kv_idx, column, at, env, c, mask)
    elif MASKED:
        x = evaluate_mask(x, tile, kv_idx, column, at, env, c, mask)
    return x
