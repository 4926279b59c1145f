# mypy: ignore-errors
"""What a row's weights are measured against: a number that follows its largest score, and is raised where a score exceeds it by 2^8.

As FlashAttention-4 has it: sums and totals refer to the same number, which their quotient does not depend on, and rounding is relative,
so it costs no precision. After a few tiles hardly any row is raised. So a warp asks whether any of its rows has to be, and if none
passes over all that follows from it: maxima over the lanes of a row, the new number, and the factor of what was summed before.

To ask, scores are compared as integers, of which the multiprocessor takes three at a time. Integers order floats from 0 on and put all
others before these, so a row whose limit is below 0 is looked at in any case. Whether a row that is looked at is raised
depends on nothing but the row: it has the same result whatever the other rows of its warp are.

`kept`, four numbers for each lane of a row, [rows, 4], the same in all four: the number; the factor of scores; what is subtracted from
their products with it; and the least integer that a score has to be for the row to be looked at.
"""

from foci.backends.hopper.gluon_compat import gl, gluon
from foci.backends.hopper.layouts import mma_layout
from foci.backends.hopper.masking import ROWS, by_column

__all__ = ["broadcast_lanes", "eight_columns", "exp2_scores", "init_row_state", "rescales_acc", "row_max_of_state", "update_row_max"]

# by how much scores may exceed the number, as a power of two: 8.0 as assemblers write it
SLACK = gl.constexpr("0f41000000")


@gluon.constexpr_function
def _pairs(first, n):
    """Places of n numbers of a thread from `first` on, in pairs of one of each row: two columns of one come first, then of the other."""
    return [(first + i, first + i + 2) for i in range(n) if i % 4 < 2]


@gluon.constexpr_function
def _limit(number, factor, slack):
    """What a score may be: the number and 2^slack; -inf where the number is."""
    if not slack:
        return [f"mov.f32 limit, {number};"]
    return [
        f"rcp.approx.ftz.f32 d, {factor}; fma.rn.f32 limit, d, {slack}, {number};",
        f"setp.eq.f32 q, {number}, 0fFF800000; selp.f32 limit, 0fFF800000, limit, q;",
    ]


@gluon.constexpr_function
def _text(n, parts, sums, slack):
    """Operands: `sums` numbers of the result, written in place; n places to leave numbers in; `parts` times n scores; and n times each of
    `kept`, of totals, and of the factor, of which a row's first are taken. In a row's places are left: `kept`, two totals, and what
    sums are to be multiplied by."""
    out, scores = sums, 2 * sums + n
    *kept, total, factor = (scores + n * (parts + k) for k in range(6))
    most, enough = kept[0], kept[3]
    pairs = [pair for part in range(parts) for pair in _pairs(scores + n * part, n)]
    lines = ["{ .reg .pred p, q, far; .reg .b32 a0, a1, bits; .reg .f32 m0, m1, w0, w1, high, limit, exact, s, d;"]
    for row in (0, 2):
        places = [out + row + place for place in (0, 1, 4, 5, 8, 9)]
        given = [*(place + row for place in kept), total + row, total + row + 1]
        lines += [f"mov.f32 ${to}, ${place};" for to, place in zip(places, given, strict=True)]
        lines.append(f"mov.f32 ${out + row + 12}, 0f3F800000;")
    for k, pair in enumerate(pairs):
        for i, place in enumerate(pair):
            lines.append(f"mov.b32 a{i}, ${place};" if k == 0 else f"mov.b32 bits, ${place}; max.s32 a{i}, a{i}, bits;")
    lines.append(f"mov.b32 bits, ${enough}; setp.ge.s32 p, a0, bits; mov.b32 bits, ${enough + 2}; setp.ge.or.s32 p, a1, bits, p;")
    lines.append("vote.sync.any.pred q, p, 0xffffffff; @!q bra.uni done;")
    for k, pair in enumerate(pairs):
        for i, place in enumerate(pair):
            lines.append(f"mov.f32 m{i}, ${place};" if k == 0 else f"max.f32 m{i}, m{i}, ${place};")
    for i, row in enumerate((0, 2)):
        lines += [f"shfl.sync.bfly.b32 s, m{i}, {lane}, 0x1f, 0xffffffff; max.f32 m{i}, m{i}, s;" for lane in (2, 1)]
        lines += [
            *_limit(f"${most + row}", f"${factor + row}", slack),
            f"setp.gt.f32 p, m{i}, limit; selp.f32 high, m{i}, ${most + row}, p; mov.f32 ${out + row}, high;",
            # beyond 2^30 a rounded product could exceed the largest: with a power of two products are exact, and weights the same
            f"mov.b32 bits, ${factor + row}; and.b32 bits, bits, 0x7F800000; mov.b32 exact, bits;",
            f"mul.f32 s, high, ${factor + row}; abs.f32 d, s; setp.ge.f32 far, d, 0f4E800000;",
            f"selp.f32 d, exact, ${factor + row}, far; mov.f32 ${out + row + 1}, d;",
            # finite: -inf, of a row without keys, less itself would be none
            f"mul.f32 exact, high, exact; selp.f32 s, exact, s, far; max.f32 s, s, 0fFF7FFFFF; mov.f32 ${out + row + 4}, s;",
            # exactly 1 where it stays: a fused product less the rounded one is not 0
            f"neg.f32 s, s; fma.rn.f32 s, ${most + row}, d, s; ex2.approx.ftz.f32 s, s; selp.f32 w{i}, s, 0f3F800000, p;",
            *_limit("high", f"${factor + row}", slack),
            "mov.b32 bits, limit; setp.ge.f32 p, limit, 0f00000000; add.s32 bits, bits, 1; selp.b32 bits, bits, 0x80000000, p;",
            f"mov.b32 ${out + row + 5}, bits; mov.f32 ${out + row + 12}, w{i};",
            *(f"mul.f32 ${out + row + 8 + one}, ${total + row + one}, w{i};" for one in (0, 1)),
        ]
    lines += [f"mul.f32 ${i}, ${i}, w{i // 2 % 2};" for i in range(sums)]
    return " ".join(lines) + " done: }"


@gluon.constexpr_function
def _operands(n, parts, sums):
    # what is left is written before all is read: in registers of its own
    return ",".join(["=f"] * sums + ["=&f"] * n + [str(i) for i in range(sums)] + ["f"] * ((parts + 6) * n))


@gluon.jit
def broadcast_lanes(x, LAYOUT: gl.constexpr):
    """Numbers of lanes, [rows, 4], for a tile [rows, n, 4, 2] of a layout."""
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)), assert_trivial=True)
    return gl.expand_dims(gl.expand_dims(x, 1), 3)


@gluon.jit
def eight_columns(y, N: gl.constexpr):
    """[rows, 4, 2], the N-th eight columns of a tile [rows, n, 4, 2]."""
    z = y.permute((0, 2, 3, 1))
    for i in gl.static_range(y.shape[1].bit_length() - 1):
        even, odd = gl.split(z.reshape([ROWS, 4, 2, z.shape[3] // 2, 2]))
        if (N >> i) & 1:
            z = odd
        else:
            z = even
    return z.reshape([ROWS, 4, 2])


@gluon.jit
def halves(y, LAYOUT: gl.constexpr):
    """A tile [rows, n, 4, 2] as two, every second eight columns each."""
    even, odd = gl.split(y.reshape([ROWS, y.shape[1] // 2, 2, 4, 2]).permute((0, 1, 3, 4, 2)))
    return gl.convert_layout(even, LAYOUT, assert_trivial=True), gl.convert_layout(odd, LAYOUT, assert_trivial=True)


@gluon.jit
def lane_pair(y, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Two numbers of each lane."""
    first, second = gl.split(eight_columns(y, N))
    return gl.convert_layout(first, LAYOUT, assert_trivial=True), gl.convert_layout(second, LAYOUT, assert_trivial=True)


@gluon.jit
def init_row_state(COLUMNS: gl.constexpr):
    """What is kept of a row before its first tile."""
    y, column, lane = by_column(gl.zeros([ROWS, COLUMNS], gl.float32, mma_layout(COLUMNS)))
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, y.type.layout))
    none = gl.full([ROWS, 4], 0.0, gl.float32, LAYOUT)
    any_score = gl.full([ROWS, 4], -2147483648, gl.int32, LAYOUT).to(gl.float32, bitcast=True)
    return gl.full([ROWS, 4], float("-inf"), gl.float32, LAYOUT), none, none, any_score


@gluon.jit
def row_max_of_state(kept, COLUMNS: gl.constexpr):
    """The number of each row."""
    return gl.convert_layout(gl.max(kept[0], 1), gl.SliceLayout(1, mma_layout(COLUMNS)))


@gluon.constexpr_function
def rescales_acc(acc, columns):
    """Whether `update_row_max` rescales sums itself: those of one piece, of as many columns as a tile of scores has, or half of them."""
    return len(acc) == 1 and acc[0].shape[1] in (columns, columns // 2) and acc[0].shape[1] >= 32


@gluon.jit
def update_row_max(x, acc, kept, total, factor, EXACT: gl.constexpr):
    """(sums, rescaled where `rescales_acc`; else their factor for each lane; what is kept; totals) with the scores x of a tile. EXACT: the
    number is the largest score."""
    y, column, lane = by_column(x)
    HAS_SUMS: gl.constexpr = rescales_acc(acc, x.shape[1])
    if HAS_SUMS:
        a, column, lane = by_column(acc[0])
    else:
        a = y
    LAYOUT: gl.constexpr = a.type.layout
    N: gl.constexpr = a.shape[1] * 4
    PARTS: gl.constexpr = y.shape[1] // a.shape[1]
    text: gl.constexpr = _text(N, PARTS, N if HAS_SUMS else 0, None if EXACT else SLACK)
    kinds: gl.constexpr = _operands(N, PARTS, N if HAS_SUMS else 0)
    k0, k1, k2, k3 = (
        broadcast_lanes(kept[0], LAYOUT),
        broadcast_lanes(kept[1], LAYOUT),
        broadcast_lanes(kept[2], LAYOUT),
        broadcast_lanes(kept[3], LAYOUT),
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
            even, odd = halves(y, LAYOUT)
            a, r = gl.inline_asm_elementwise(
                text, kinds, [a, even, odd, k0, k1, k2, k3, t, factor], dtype=(gl.float32, gl.float32), is_pure=True, pack=N
            )
        acc = (gl.convert_layout(a.reshape([ROWS, acc[0].shape[1]]), acc[0].type.layout, assert_trivial=True),)
    KEPT: gl.constexpr = kept[0].type.layout
    most, steep = lane_pair(r, 0, KEPT)
    shift, enough = lane_pair(r, 1, KEPT)
    alpha, none = lane_pair(r, 3, KEPT)
    total = gl.convert_layout(eight_columns(r, 2).reshape([ROWS, 8]), total.type.layout, assert_trivial=True)
    return acc, alpha, (most, steep, shift, enough), total


@gluon.jit
def exp2_scores(x, kept):
    """Weights of a tile of scores. Exponentials are in base 2."""
    y, column, lane = by_column(x)
    LAYOUT: gl.constexpr = y.type.layout
    p = gl.exp2(y * broadcast_lanes(kept[1], LAYOUT) - broadcast_lanes(kept[2], LAYOUT))
    return gl.convert_layout(p.reshape([ROWS, x.shape[1]]), x.type.layout, assert_trivial=True)
