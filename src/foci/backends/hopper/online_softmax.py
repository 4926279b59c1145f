# mypy: ignore-errors
"""Online softmax with a lazy running row max, as in FlashAttention-4.

The row's reference is raised only when a score exceeds it by more than 8 in base 2, so that rescaling is rare. Accumulators and row sums
refer to the same reference, which cancels in their quotient; rounding is relative, so a reference below the max costs no precision. After
a few tiles hardly any row is raised. A warp votes whether any of its rows must be, and otherwise skips the row max over lanes, the new
reference and the rescaling.

For the vote, scores are compared as integers, with the three-input integer max of sm_90. Integers order floats >= 0 correctly and put all
others below, so a row whose limit is below 0 always takes the exact path. Whether that path raises a row depends on the row alone: a row
has the same result whatever the other rows of its warp are.

`row_state`: four values for each lane of a row, [rows, 4] each, equal in the four lanes of a row: the reference; the factor of scores in
the exponent; what is subtracted from score * factor; and the least score, as an integer, that sends the row to the exact path.
"""

from foci.backends.hopper.gluon_compat import gl, gluon
from foci.backends.hopper.layouts import mma_layout
from foci.backends.hopper.masking import ROWS, split_columns
from foci.compat.gluon import gluon_jit

__all__ = ["broadcast_lanes", "column_groups", "exp2_scores", "init_row_state", "read_row_max", "rescales_acc", "update_row_max"]

# by how much a score may exceed the reference in base 2: 8.0 as PTX writes it
SLACK = gl.constexpr("0f41000000")


@gluon.constexpr_function
def _row_pairs(first, n):
    """Operand numbers of a thread's n scores from `first` on, as pairs (first row, second row): columns come two of one row, two of the
    other."""
    return [(first + i, first + i + 2) for i in range(n) if i % 4 < 2]


@gluon.constexpr_function
def _limit_text(number, factor, slack):
    """PTX of the largest score that raises nothing: reference + slack / factor, or -inf where the reference is."""
    if not slack:
        return [f"mov.f32 limit, {number};"]
    return [
        f"rcp.approx.ftz.f32 d, {factor}; fma.rn.f32 limit, d, {slack}, {number};",
        f"setp.eq.f32 q, {number}, 0fFF800000; selp.f32 limit, 0fFF800000, limit, q;",
    ]


@gluon.constexpr_function
def _softmax_text(n, parts, sums, slack):
    """PTX of `update_row_max`. Operands: `sums` accumulator values, updated in place; n outputs; `parts` times n scores; and n times each
    of `row_state`, the row sums and the factor, of which the first of each row are read. The outputs hold, for each of the thread's two
    rows, the new `row_state`, two row sums, and alpha, by which accumulators are multiplied."""
    out, scores = sums, 2 * sums + n
    *row_state, total, factor = (scores + n * (parts + k) for k in range(6))
    row_max, threshold = row_state[0], row_state[3]
    pairs = [pair for part in range(parts) for pair in _row_pairs(scores + n * part, n)]
    lines = ["{ .reg .pred p, q, far; .reg .b32 a0, a1, bits; .reg .f32 m0, m1, w0, w1, high, limit, exact, s, d;"]
    # outputs default to the old state, alpha to 1
    for row in (0, 2):
        places = [out + row + place for place in (0, 1, 4, 5, 8, 9)]
        sources = [*(place + row for place in row_state), total + row, total + row + 1]
        lines += [f"mov.f32 ${to}, ${place};" for to, place in zip(places, sources, strict=True)]
        lines.append(f"mov.f32 ${out + row + 12}, 0f3F800000;")
    # vote: does any row of the warp have a score above its threshold?
    for k, pair in enumerate(pairs):
        for i, place in enumerate(pair):
            lines.append(f"mov.b32 a{i}, ${place};" if k == 0 else f"mov.b32 bits, ${place}; max.s32 a{i}, a{i}, bits;")
    lines.append(f"mov.b32 bits, ${threshold}; setp.ge.s32 p, a0, bits; mov.b32 bits, ${threshold + 2}; setp.ge.or.s32 p, a1, bits, p;")
    lines.append("vote.sync.any.pred q, p, 0xffffffff; @!q bra.uni done;")
    # exact path: row max over the thread's columns, then over the four lanes of a row
    for k, pair in enumerate(pairs):
        for i, place in enumerate(pair):
            lines.append(f"mov.f32 m{i}, ${place};" if k == 0 else f"max.f32 m{i}, m{i}, ${place};")
    for i, row in enumerate((0, 2)):
        lines += [f"shfl.sync.bfly.b32 s, m{i}, {lane}, 0x1f, 0xffffffff; max.f32 m{i}, m{i}, s;" for lane in (2, 1)]
        lines += [
            *_limit_text(f"${row_max + row}", f"${factor + row}", slack),
            f"setp.gt.f32 p, m{i}, limit; selp.f32 high, m{i}, ${row_max + row}, p; mov.f32 ${out + row}, high;",
            # above 2^30 a rounded score * factor could exceed the rounded maximum: a power of two as the factor makes products exact
            f"mov.b32 bits, ${factor + row}; and.b32 bits, bits, 0x7F800000; mov.b32 exact, bits;",
            f"mul.f32 s, high, ${factor + row}; abs.f32 d, s; setp.ge.f32 far, d, 0f4E800000;",
            f"selp.f32 d, exact, ${factor + row}, far; mov.f32 ${out + row + 1}, d;",
            # keep it finite: a row without keys has -inf, and -inf - -inf would be NaN
            f"mul.f32 exact, high, exact; selp.f32 s, exact, s, far; max.f32 s, s, 0fFF7FFFFF; mov.f32 ${out + row + 4}, s;",
            # alpha is exactly 1 where nothing is raised: fma(x, f, -round(x f)) need not be 0
            f"neg.f32 s, s; fma.rn.f32 s, ${row_max + row}, d, s; ex2.approx.ftz.f32 s, s; selp.f32 w{i}, s, 0f3F800000, p;",
            *_limit_text("high", f"${factor + row}", slack),
            "mov.b32 bits, limit; setp.ge.f32 p, limit, 0f00000000; add.s32 bits, bits, 1; selp.b32 bits, bits, 0x80000000, p;",
            f"mov.b32 ${out + row + 5}, bits; mov.f32 ${out + row + 12}, w{i};",
            *(f"mul.f32 ${out + row + 8 + one}, ${total + row + one}, w{i};" for one in (0, 1)),
        ]
    lines += [f"mul.f32 ${i}, ${i}, w{i // 2 % 2};" for i in range(sums)]
    return " ".join(lines) + " done: }"


@gluon.constexpr_function
def _operands(n, parts, sums):
    # outputs are written before all inputs are read, so they need registers of their own (early clobber)
    return ",".join(["=f"] * sums + ["=&f"] * n + [str(i) for i in range(sums)] + ["f"] * ((parts + 6) * n))


@gluon_jit
def broadcast_lanes(x, LAYOUT: gl.constexpr):
    """Broadcast values of lanes, [rows, 4], over a tile [rows, n, 4, 2]."""
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)), assert_trivial=True)
    return gl.expand_dims(gl.expand_dims(x, 1), 3)


@gluon_jit
def column_groups(y):
    """Split a tile [rows, n, 4, 2] into its n groups of eight columns, each [rows, 4, 2]."""
    groups = (y.permute((0, 2, 3, 1)),)
    for _ in gl.static_range(y.shape[1].bit_length() - 1):
        # each split takes the lowest bit of a column group's number, so that numbers of odd groups follow those of even ones
        evens = ()
        odds = ()
        for g in gl.static_range(len(groups)):
            even, odd = gl.split(groups[g].reshape([ROWS, 4, 2, groups[g].shape[3] // 2, 2]))
            evens = evens + (even,)
            odds = odds + (odd,)
        groups = evens + odds
    result = ()
    for g in gl.static_range(len(groups)):
        result = result + (groups[g].reshape([ROWS, 4, 2]),)
    return result


@gluon_jit
def split_halves(y, LAYOUT: gl.constexpr):
    """Split a tile [rows, n, 4, 2] into its even and its odd groups of eight columns."""
    even, odd = gl.split(y.reshape([ROWS, y.shape[1] // 2, 2, 4, 2]).permute((0, 1, 3, 4, 2)))
    return gl.convert_layout(even, LAYOUT, assert_trivial=True), gl.convert_layout(odd, LAYOUT, assert_trivial=True)


@gluon_jit
def lane_pair(columns, LAYOUT: gl.constexpr):
    """Split eight columns [rows, 4, 2] into two values for each lane."""
    first, second = gl.split(columns)
    return gl.convert_layout(first, LAYOUT, assert_trivial=True), gl.convert_layout(second, LAYOUT, assert_trivial=True)


@gluon_jit
def init_row_state(COLUMNS: gl.constexpr):
    """`row_state` before the first tile."""
    y, column, lane = split_columns(gl.zeros([ROWS, COLUMNS], gl.float32, mma_layout(COLUMNS)))
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, y.type.layout))
    zeros = gl.full([ROWS, 4], 0.0, gl.float32, LAYOUT)
    any_score = gl.full([ROWS, 4], -2147483648, gl.int32, LAYOUT).to(gl.float32, bitcast=True)
    return gl.full([ROWS, 4], float("-inf"), gl.float32, LAYOUT), zeros, zeros, any_score


@gluon_jit
def read_row_max(row_state, COLUMNS: gl.constexpr):
    """Reference of each row, [rows]."""
    return gl.convert_layout(gl.max(row_state[0], 1), gl.SliceLayout(1, mma_layout(COLUMNS)))


@gluon.constexpr_function
def rescales_acc(acc, columns):
    """Whether `update_row_max` rescales the accumulators itself: if they are one piece with as many columns as a score tile, or half."""
    return len(acc) == 1 and acc[0].shape[1] in (columns, columns // 2) and acc[0].shape[1] >= 32


@gluon_jit
def update_row_max(x, acc, row_state, total, factor, EXACT: gl.constexpr):
    """Update the running row max by a tile of scores x. Returns (acc, alpha, row_state, row_sum).

    acc is rescaled if `rescales_acc`; else it must be multiplied by alpha, a value for each lane. EXACT: the reference is the row max
    itself.
    """
    y, column, lane = split_columns(x)
    HAS_SUMS: gl.constexpr = rescales_acc(acc, x.shape[1])
    if HAS_SUMS:
        a, column, lane = split_columns(acc[0])
    else:
        a = y
    LAYOUT: gl.constexpr = a.type.layout
    N: gl.constexpr = a.shape[1] * 4
    PARTS: gl.constexpr = y.shape[1] // a.shape[1]
    text: gl.constexpr = _softmax_text(N, PARTS, N if HAS_SUMS else 0, None if EXACT else SLACK)
    kinds: gl.constexpr = _operands(N, PARTS, N if HAS_SUMS else 0)
    k0, k1, k2, k3 = (
        broadcast_lanes(row_state[0], LAYOUT),
        broadcast_lanes(row_state[1], LAYOUT),
        broadcast_lanes(row_state[2], LAYOUT),
        broadcast_lanes(row_state[3], LAYOUT),
    )
    t = gl.expand_dims(gl.convert_layout(total.reshape([ROWS, 4, 2]), gl.SliceLayout(1, LAYOUT), assert_trivial=True), 1)
    if not HAS_SUMS:
        r = gl.inline_asm_elementwise(text, kinds, [y, k0, k1, k2, k3, t, factor], dtype=gl.float32, is_pure=True, pack=N)
    else:
        if PARTS == 1:
            a, r = gl.inline_asm_elementwise(
                text, kinds, [a, y, k0, k1, k2, k3, t, factor], dtype=(gl.float32, gl.float32), is_pure=True, pack=N
            )
        else:
            even, odd = split_halves(y, LAYOUT)
            a, r = gl.inline_asm_elementwise(
                text, kinds, [a, even, odd, k0, k1, k2, k3, t, factor], dtype=(gl.float32, gl.float32), is_pure=True, pack=N
            )
        acc = (gl.convert_layout(a.reshape([ROWS, acc[0].shape[1]]), acc[0].type.layout, assert_trivial=True),)
    STATE: gl.constexpr = row_state[0].type.layout
    groups = column_groups(r)
    row_max, exp_scale = lane_pair(groups[0], STATE)
    shift, threshold = lane_pair(groups[1], STATE)
    alpha, unused = lane_pair(groups[3], STATE)
    total = gl.convert_layout(groups[2].reshape([ROWS, 8]), total.type.layout, assert_trivial=True)
    return acc, alpha, (row_max, exp_scale, shift, threshold), total


@gluon_jit
def exp2_scores(x, row_state):
    """P = exp2(score * factor - shift), with factor and shift from `row_state`."""
    y, column, lane = split_columns(x)
    LAYOUT: gl.constexpr = y.type.layout
    p = gl.exp2(y * broadcast_lanes(row_state[1], LAYOUT) - broadcast_lanes(row_state[2], LAYOUT))
    return gl.convert_layout(p.reshape([ROWS, x.shape[1]]), x.type.layout, assert_trivial=True)
