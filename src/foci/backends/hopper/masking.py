# mypy: ignore-errors
"""Scores of a tile, -inf where masked.

By a row's first and last key, or by the words of a partial tile (`foci.backends.hopper.words`), columns are constants to a
thread: a score costs a comparison and a choice. Masks that have neither are computed.
"""

from foci.backends.hopper.interface import gl, gluon, thread_barrier
from foci.backends.hopper.layouts import product
from foci.backends.triton.tiles import FORCED, number, start_of

__all__ = [
    "BOTH", "LOWER", "ROWS", "UPPER", "WHOLE",
    "along_line", "kept", "leaned", "marked", "marks_of", "masked", "scored", "scores_of", "words_at",
]  # fmt: skip

ROWS = gl.constexpr(64)
# what is masked of a tile: nothing, keys behind a row's last, keys before its first, or both
WHOLE = gl.constexpr(0)
UPPER = gl.constexpr(1)
LOWER = gl.constexpr(2)
BOTH = gl.constexpr(3)


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
def up_to_last(x, limit):
    """-inf behind the last key of a row, `limit` from the tile's first."""
    y, column, lane = by_column(x)
    y = gl.where(column <= by_rows(limit, y) - lane, y, float("-inf"))
    return gl.convert_layout(y.reshape([ROWS, x.shape[1]]), x.type.layout, assert_trivial=True)


@gluon.jit
def from_first(x, limit):
    """-inf before the first key of a row."""
    y, column, lane = by_column(x)
    y = gl.where(column >= by_rows(limit, y) - lane, y, float("-inf"))
    return gl.convert_layout(y.reshape([ROWS, x.shape[1]]), x.type.layout, assert_trivial=True)


@gluon.jit
def kept(x, first, last):
    """0 before the first and behind the last column of a row."""
    y, column, lane = by_column(x)
    y = gl.where((column >= by_rows(first, y) - lane) & (column <= by_rows(last, y) - lane), y, 0.0)
    return gl.convert_layout(y.reshape([ROWS, x.shape[1]]), x.type.layout, assert_trivial=True)


@gluon.jit
def marked(x, words, OTHER: gl.constexpr):
    """OTHER where the words have no bit."""
    y, column, lane = by_column(x)
    bit = column // 8 * 2 + column % 2
    y = gl.where(((gl.expand_dims(gl.expand_dims(words, 1), 3) >> bit) & 1) != 0, y, OTHER)
    return gl.convert_layout(y.reshape([ROWS, x.shape[1]]), x.type.layout, assert_trivial=True)


@gluon.jit
def words_at(words, some, COLUMNS: gl.constexpr):
    """Words [rows, 4] of a tile, which lie one after the other; all bits where it has none."""
    LAYOUT: gl.constexpr = gl.zeros([ROWS, COLUMNS], gl.float32, product(COLUMNS)).reshape([ROWS, COLUMNS // 8, 4, 2]).type.layout
    WORDS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))
    place = gl.arange(0, ROWS, gl.SliceLayout(1, WORDS))[:, None] * 4 + gl.arange(0, 4, gl.SliceLayout(0, WORDS))[None, :]
    return gl.load(words + place, mask=place < gl.where(some, ROWS * 4, 0), other=-1)


@gluon.jit
def along_line(tile, at, env, c, line: gl.constexpr):
    """What a score adds to a tile of products: a number for each lane of a row, and a slope times columns that are constants."""
    b, h, q_idx, q_len, kv_len, first, aux, factor, low, high, narrow = at
    y, column, lane = by_column(gl.zeros([ROWS, c.TILE_KV], gl.float32, product(c.TILE_KV)))
    LANES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, y.type.layout))
    rows = gl.convert_layout(gl.max(q_idx, 1), gl.SliceLayout(1, LANES))[:, None]
    columns = start_of(tile, c, c.TILE_KV) + 2 * gl.arange(0, 4, gl.SliceLayout(0, LANES))[None, :]
    lead, rise = line(b, h, rows, columns, q_len, kv_len, env, aux)
    y = gl.expand_dims(gl.expand_dims(lead, 1), 3) + column.to(gl.float32) * rise
    return gl.convert_layout(y.reshape([ROWS, c.TILE_KV]), product(c.TILE_KV), assert_trivial=True)


@gluon.jit
def leaned(row, rise):
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
def marks_of(table, run, i, at, c, MASKED: gl.constexpr):
    """Words [rows, 4] of the i-th tile that a program visits, where it has some; asked for while its product is not yet there."""
    if c.WORDS and MASKED:
        row, full_first, full, part_first, before, gap, part = run
        first = (row * number(table.width) + part_first + i) * (c.TILE_Q * 4) + at[5] % c.TILE_Q * 4
        # a full tile, which has none, is attended to
        return words_at(table.words + first, i < part, c.TILE_KV)
    else:
        return i


@gluon.jit
def scores_of(raw, tile, marks, at, env, c, score: gl.constexpr, mask: gl.constexpr, MASKED: gl.constexpr):
    """Scores of a tile of products, -inf where masked, without a factor that `at` holds: the scale if they are plain."""
    b, h, q_idx, q_len, kv_len, first, aux, factor, low, high, narrow = at
    x = raw
    here = start_of(tile, c, c.TILE_KV)
    column = (here + gl.arange(0, c.TILE_KV, gl.SliceLayout(0, product(c.TILE_KV))))[None, :]
    kv_idx = column
    if MASKED:
        kv_idx = gl.minimum(column, kv_len - 1)
    if not c.PLAIN and not c.LINE:
        x = score(raw, b, h, q_idx, kv_idx, q_len, kv_len, env, aux)
    if MASKED and c.MODE == "bounds":
        if c.LOW and MASKED != UPPER:
            x = from_first(x, low - here)
        if MASKED != LOWER:
            x = up_to_last(x, high - here)
        elif narrow > 0:
            # the barrier keeps the branch: else both results are computed, and one chosen
            thread_barrier()
            x = up_to_last(x, high - here)
    elif MASKED and c.WORDS:
        x = marked(x, marks, float("-inf"))
    elif MASKED:
        keep = mask(b, h, q_idx, kv_idx, q_len, kv_len, env, aux)
        if c.BLOCKS:
            keep = keep | (tile >= FORCED)
        x = gl.where(keep & (column < kv_len), x, float("-inf"))
    return x


@gluon.jit
def scored(raw, tile, at, env, c, score: gl.constexpr):
    """Scores of a tile of products, without a factor that `at` holds."""
    if c.PLAIN or c.LINE:
        return raw
    else:
        b, h, q_idx, q_len, kv_len, first, aux, factor, low, high, narrow = at
        column = (start_of(tile, c, c.TILE_KV) + gl.arange(0, c.TILE_KV, gl.SliceLayout(0, product(c.TILE_KV))))[None, :]
        return score(raw, b, h, q_idx, gl.minimum(column, kv_len - 1), q_len, kv_len, env, aux)


@gluon.jit
def opaque(limit):
    """A number that the compiler takes as it comes: else it holds, over a loop, what each column is to be compared with."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [limit], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def masked(x, tile, marks, at, env, c, mask: gl.constexpr):
    """Scores of a partial tile, -inf where masked, by what is known of it."""
    b, h, q_idx, q_len, kv_len, first, aux, factor, low, high, narrow = at
    here = start_of(tile, c, c.TILE_KV)
    if c.MODE == "bounds":
        if c.LOW:
            x = from_first(x, opaque(low - here))
        return up_to_last(x, opaque(high - here))
    elif c.WORDS:
        return marked(x, marks, float("-inf"))
    else:
        column = (here + gl.arange(0, c.TILE_KV, gl.SliceLayout(0, product(c.TILE_KV))))[None, :]
        keep = mask(b, h, q_idx, gl.minimum(column, kv_len - 1), q_len, kv_len, env, aux)
        if c.BLOCKS:
            keep = keep | (tile >= FORCED)
        return gl.where(keep & (column < kv_len), x, float("-inf"))
