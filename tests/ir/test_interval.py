"""Interval analysis: sound for every expression, exact for the usual masks, small for long sequences."""

import time
import weakref
from dataclasses import replace

import pytest
import torch
from expressions import BATCH, COLUMN, HEAD, ROW, SCORE, anything, environment
from hypothesis import given, settings
from hypothesis import strategies as st

from foci.ir.eager import Env, evaluate
from foci.ir.expr import DType, axis, const, load, param, reduce, size, variable
from foci.ir.interval import Grid, bounds
from foci.ir.ops import apply, cast
from foci.ir.ranges import Range
from foci.ir.segment_minmax import segment_range
from foci.ir.simplify import simplify
from foci.ir.text import to_infix

q, kv = ROW, COLUMN


def point(value):
    at = torch.tensor(float(value), dtype=torch.float64)
    return Range(at, at)


def grid_of(sizes, block, captures=(), *, ints=(), floats=()):
    """The grid of blocks of B, H, Sq, Skv; blocks may overhang and are cut off."""
    B, H, *lengths = sizes

    def part(length, step, dims):
        first = torch.arange(0, length, step, dtype=torch.float64)
        last = (first + step - 1).clamp(max=length - 1)
        return Range(first[(...,) + (None,) * dims], last[(...,) + (None,) * dims])

    ranges = {"b": part(B, 1, 3), "h": part(H, 1, 2), "q_idx": part(lengths[0], block[0], 1), "kv_idx": part(lengths[1], block[1], 0)}
    for name, length in zip(("q_len", "kv_len"), lengths):
        ranges[name] = point(length)
    return Grid(ranges, captures, ints, floats)


def env_of(sizes, captures=(), *, ints=(), floats=(), dtype=torch.float32):
    B, H, Sq, Skv = sizes
    variables = {
        "b": torch.arange(B)[:, None, None, None], "h": torch.arange(H)[:, None, None], "q_idx": torch.arange(Sq)[:, None],
        "kv_idx": torch.arange(Skv), "q_len": torch.tensor(Sq), "kv_len": torch.tensor(Skv),
    }  # fmt: skip
    return Env({k: v.int() for k, v in variables.items()}, captures, ints, floats, dtype)


def truth(mask, sizes, block, captures=(), **numbers):
    """lo and hi of a BOOL expression over blocks, by evaluating every pair."""
    B, H, Sq, Skv = sizes
    dense = evaluate([mask], env_of(sizes, captures, **numbers))[0].expand(B, H, Sq, Skv).double()
    if block == (1, 1):
        return dense, dense
    nq, nk = -(-Sq // block[0]), -(-Skv // block[1])
    lo, hi = torch.ones(B, H, nq, nk), torch.zeros(B, H, nq, nk)
    for i in range(nq):
        for j in range(nk):
            part = dense[:, :, i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            lo[:, :, i, j], hi[:, :, i, j] = part.amin((2, 3)), part.amax((2, 3))
    return lo.double(), hi.double()


@settings(max_examples=150, deadline=None)
@given(anything(3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 3))
def test_no_value_leaves_its_range(expr, block_q, block_kv, seed):
    for dtype in (torch.float64, torch.float32):
        env = environment(seed, dtype)
        grid = grid_of((2, 3, 6, 5), (block_q, block_kv), env.captures)
        score = env.variables["score"].double()
        grid = Grid({**grid.ranges, "score": Range(score.min(), score.max())}, env.captures)
        interval = bounds(expr, grid)
        value = evaluate([expr], env)[0].double().expand(2, 3, 6, 5)
        rows, columns = torch.arange(6) // block_q, torch.arange(5) // block_kv
        shape = (2, 3, int(rows.max()) + 1, int(columns.max()) + 1)
        lo, hi = (x.expand(shape)[:, :, rows][..., columns] for x in (interval.lo, interval.hi))
        inside = ((lo <= value) & (value <= hi)) | value.isnan()
        assert inside.all(), f"{to_infix(expr)}: {value[~inside][0]} outside {lo[~inside][0]} .. {hi[~inside][0]}"


@settings(max_examples=200, deadline=None)
@given(anything(3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 3))
def test_what_may_be_nan_decides_nothing(expr, block_q, block_kv, seed):
    env = environment(seed, torch.float32)
    make = torch.Generator().manual_seed(seed)
    odd = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])
    captures = tuple(
        torch.where(torch.rand(c.shape, generator=make) < 0.5, odd[torch.randint(0, 4, c.shape, generator=make)], c)
        if c.is_floating_point()
        else c
        for c in env.captures
    )
    grid = grid_of((2, 3, 6, 5), (block_q, block_kv), captures)
    score = env.variables["score"].double()
    interval = bounds(expr, Grid({**grid.ranges, "score": Range(score.min(), score.max())}, captures))
    value = evaluate([expr], replace(env, captures=captures))[0].double().expand(2, 3, 6, 5)
    rows, columns = torch.arange(6) // block_q, torch.arange(5) // block_kv
    shape = (2, 3, int(rows.max()) + 1, int(columns.max()) + 1)
    lo, hi = (x.expand(shape)[:, :, rows][..., columns] for x in (interval.lo, interval.hi))
    inside = torch.where(value.isnan(), (lo == -torch.inf) & (hi == torch.inf), (lo <= value) & (value <= hi))
    assert inside.all(), f"{to_infix(expr)}: {value[~inside][0]} outside {lo[~inside][0]} .. {hi[~inside][0]}"


PREFIX = load(0, (BATCH,), DType.INT32)
DOCUMENT = apply("eq", load(0, (q,), DType.INT64), load(0, (kv,), DType.INT64))
CAUSAL = apply("le", kv, q)
WINDOW = apply("and", CAUSAL, apply("le", apply("sub", q, kv), param(0, DType.INT32)))
EXACT = {
    "causal": (CAUSAL, ()),
    "inverse causal": (apply("lt", q, kv), ()),
    "lower right": (apply("le", apply("add", kv, apply("sub", variable("q_len"), variable("kv_len"))), q), ()),
    "window": (WINDOW, ()),
    "band": (apply("le", apply("abs", apply("sub", q, kv)), param(0, DType.INT32)), ()),
    "prefix": (apply("or", apply("lt", kv, PREFIX), CAUSAL), (torch.tensor([70, 200], dtype=torch.int32),)),
    "padding": (apply("lt", kv, PREFIX), (torch.tensor([70, 130], dtype=torch.int32),)),
    "document": (DOCUMENT, (torch.repeat_interleave(torch.arange(5), torch.tensor([30, 64, 100, 6, 56])),)),
    "causal document": (apply("and", CAUSAL, DOCUMENT), (torch.repeat_interleave(torch.arange(4), 64),)),
    "chunks": (apply("eq", apply("floordiv", q, 48), apply("floordiv", kv, 48)), ()),
    "sink": (apply("or", apply("lt", kv, 4), WINDOW), ()),
    "head window": (apply("lt", apply("sub", q, kv), load(0, (HEAD,), DType.INT32)), (torch.tensor([10, 200], dtype=torch.int32),)),
    "causal by batch": (
        apply("where", load(0, (BATCH,), DType.BOOL), CAUSAL, True),
        (torch.tensor([True, False]),),
    ),
    "float slope": (apply("lt", apply("mul", cast(apply("sub", q, kv), DType.FLOAT), 0.1), 7.05), ()),
}


# FLEX-05
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("block", [(32, 32), (16, 64), (1, 1)], ids=str)
def test_usual_masks_are_decided_exactly(name, block):
    mask, captures = EXACT[name]
    sizes = (2, 2, 256, 256)
    interval = bounds(mask, grid_of(sizes, block, captures, ints=(50,)))
    shape = (2, 2, 256 // block[0], 256 // block[1])
    lo, hi = truth(mask, sizes, block, captures, ints=(50,))
    assert torch.equal(interval.lo.expand(shape), lo)
    assert torch.equal(interval.hi.expand(shape), hi)


def test_lengths_that_are_no_multiple_of_the_block():
    sizes, block = (1, 1, 201, 333), (64, 48)
    interval = bounds(WINDOW, grid_of(sizes, block, ints=(50,)))
    lo, hi = truth(WINDOW, sizes, block, ints=(50,))
    assert torch.equal(interval.lo, lo[0, 0]) and torch.equal(interval.hi, hi[0, 0])


def test_selected_blocks():
    # the key blocks that each query block chose, as sparse attention writes it
    topk = torch.randint(0, 8, (2, 2, 8, 3), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    chosen = load(0, (BATCH, HEAD, apply("floordiv", q, 32), axis(0)), DType.INT32)
    mask = reduce("any", 0, apply("eq", chosen, apply("floordiv", kv, 32)), size(0, 3))
    for block in ((32, 32), (16, 32)):
        interval = bounds(mask, grid_of((2, 2, 256, 256), block, (topk,)))
        lo, hi = truth(mask, (2, 2, 256, 256), block, (topk,))
        assert torch.equal(interval.lo, lo) and torch.equal(interval.hi, hi)


@pytest.mark.parametrize("kind", ["sum", "max", "min"])
@pytest.mark.parametrize("length", [5, 200])
def test_reductions_over_captured_rows(kind, length):
    table = torch.randn(64, length, generator=torch.Generator().manual_seed(1))
    expr = reduce(kind, 0, load(0, (q, axis(0)), DType.FLOAT), size(0, 1))
    interval = bounds(expr, grid_of((1, 1, 64, 64), (8, 8), (table,)))
    value = evaluate([expr], env_of((1, 1, 64, 64), (table,)))[0].double().reshape(8, 8)
    assert (interval.lo.reshape(-1) <= value.amin(1)).all() and (value.amax(1) <= interval.hi.reshape(-1)).all()
    if length == 5:
        assert (interval.hi - interval.lo).max() < 20


@pytest.mark.parametrize("kind, empty", [("any", 0.0), ("all", 1.0)])
def test_a_reduction_over_nothing(kind, empty):
    expr = reduce(kind, 0, load(0, (q, axis(0)), DType.BOOL), size(0, 1))
    interval = bounds(expr, grid_of((1, 1, 4, 4), (2, 2), (torch.zeros(4, 0, dtype=torch.bool),)))
    assert interval.lo.eq(empty).all() and interval.hi.eq(empty).all()


def test_a_long_any_is_decided_where_the_row_is_surely_out():
    ids = torch.arange(1000, 1200)[None]
    expr = reduce("any", 0, apply("eq", load(0, (BATCH, axis(0)), DType.INT64), kv), size(0, 1))
    interval = bounds(expr, grid_of((1, 1, 1, 1400), (1, 100), (ids,)))
    assert interval.hi.flatten().tolist() == [0.0] * 10 + [1.0, 1.0] + [0.0] * 2


def test_negative_indices_wrap():
    table = torch.arange(10.0)
    for first, last, lo, hi in ((-3, -1, 7, 9), (-1, 1, 0, 9), (2, 4, 2, 4), (-10, -8, 0, 2), (8, 40, 8, 9), (-40, -9, 0, 1)):
        interval = bounds(
            load(0, (q,), DType.FLOAT),
            Grid({"q_idx": Range(torch.tensor(float(first)).double(), torch.tensor(float(last)).double())}, (table,)),
        )
        assert (interval.lo.item(), interval.hi.item()) == (lo, hi)


@pytest.mark.parametrize("block", [(16, 32), (1, 8)], ids=str)
def test_a_captured_mask_is_reduced_in_both_dimensions(block):
    # a bool mask of [B, 1, Sq, Skv]
    make = torch.Generator().manual_seed(0)
    table = (torch.rand(2, 1, 50, 70, generator=make) < 0.5) & (torch.arange(70) < torch.tensor([20, 64]).reshape(2, 1, 1, 1))
    table[1, :, :20, :40] = True
    mask = load(0, (BATCH, const(0), q, kv), DType.BOOL)
    interval = bounds(mask, grid_of((2, 2, 50, 70), block, (table,)))
    lo, hi = truth(mask, (2, 2, 50, 70), block, (table,))
    assert torch.equal(interval.lo.expand_as(lo), lo) and torch.equal(interval.hi.expand_as(hi), hi)
    assert 0 < lo.sum() < hi.sum() < hi.numel()


def test_a_huge_captured_matrix_gives_its_extremes(monkeypatch):
    monkeypatch.setattr("foci.ir.interval._MOST_REDUCED", 63)
    table = torch.arange(64.0).reshape(8, 8)
    interval = bounds(load(0, (q, kv), DType.FLOAT), grid_of((1, 1, 8, 8), (4, 4), (table,)))
    assert interval.lo.eq(0).all() and interval.hi.eq(63).all()


def test_nan_and_infinity_in_a_captured_tensor():
    table = torch.tensor([0.0, -torch.inf, 1.0, torch.nan])
    expr = apply("lt", load(0, (q,), DType.FLOAT), 2.0)
    interval = bounds(expr, grid_of((1, 1, 4, 1), (2, 1), (table,)))
    assert interval.lo.flatten().tolist() == [1.0, 0.0]


def test_integers_that_float64_cannot_hold_are_not_called_equal():
    ids = torch.tensor([2**53, 2**53 + 1])
    expr = apply("eq", load(0, (q,), DType.INT64), load(0, (kv,), DType.INT64))
    interval = bounds(expr, grid_of((1, 1, 2, 2), (1, 1), (ids,)))
    assert interval.lo.max() == 0


def test_float32_rounding_decides_nothing():
    # 0.1 * 3 is over 0.3 in float64, and is 0.3 in float32
    expr = apply("lt", 0.3, apply("mul", cast(q, DType.FLOAT), 0.1))
    interval = bounds(expr, grid_of((1, 1, 5, 1), (1, 1)))
    assert (interval.lo.flatten().tolist(), interval.hi.flatten().tolist()) == ([0, 0, 0, 0, 1], [0, 0, 0, 1, 1])


def test_sums_that_wrap_are_not_decided():
    expr = apply("lt", 0, apply("add", q, 2**31 - 3))
    interval = bounds(expr, grid_of((1, 1, 8, 1), (4, 1)))
    assert interval.lo.max() == 0 and interval.hi.min() == 1


def test_a_missing_variable_is_named():
    with pytest.raises(ValueError, match="the grid gives no range of h; it gives q_idx"):
        bounds(HEAD, Grid({"q_idx": point(0)}))
    assert bounds(SCORE, Grid({})).hi == torch.inf


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 70),
    st.integers(0, 2**30),
    st.sampled_from([torch.float32, torch.bool, torch.int64, torch.float16, torch.uint8]),
)
def test_segments(rows, n, seed, dtype):
    make = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 2 if dtype is torch.bool else 100, (rows, n), generator=make).to(dtype)
    row = torch.randint(0, rows, (4, 1), generator=make)
    ends = torch.randint(0, n, (4, 6, 2), generator=make).sort(-1)[0]
    interval = segment_range(table, row, ends[..., 0], ends[..., 1])
    for i in range(4):
        for j in range(6):
            part = table[row[i, 0], ends[i, j, 0] : ends[i, j, 1] + 1].double()
            assert (interval.lo[i, j], interval.hi[i, j]) == (part.min(), part.max())


def test_segments_of_long_rows_are_cells(monkeypatch):
    monkeypatch.setattr("foci.ir.segment_minmax._CELLS", 64)
    table = torch.randint(0, 1000, (2, 333), generator=torch.Generator().manual_seed(0))
    first = torch.arange(0, 320, 16)
    last = first + 15
    interval = segment_range(table, torch.tensor(1), first, last)
    exact = table[1, :320].reshape(20, 16).double()
    assert torch.equal(interval.lo, exact.amin(1)) and torch.equal(interval.hi, exact.amax(1))
    loose = segment_range(table, torch.tensor(0), torch.tensor([5]), torch.tensor([332]))
    assert loose.lo <= table[0, 5:].min() and loose.hi >= table[0, 5:].max()


# FLEX-05
def test_memory_of_a_long_document_mask(monkeypatch):
    # 131072 x 131072 in blocks of 128
    n, block = 131072, 128
    ids = torch.randint(0, 40, (n,), generator=torch.Generator().manual_seed(0)).sort()[0]
    mask = simplify(apply("and", CAUSAL, DOCUMENT))
    grid = grid_of((1, 1, n, n), (block, block), (ids,))
    most = 0
    original = Range.__init__

    def counted(self, lo, hi):
        nonlocal most
        most = max(most, lo.numel() * 8, hi.numel() * 8)
        original(self, lo, hi)

    monkeypatch.setattr(Range, "__init__", counted)
    started = time.perf_counter()
    interval = bounds(mask, grid)
    assert time.perf_counter() - started < 2
    assert most <= (n // block) ** 2 * 8
    sure, possible = interval.lo == 1, interval.hi == 1
    assert 0 < sure.sum() < possible.sum() < (n // block) ** 2 // 10


def test_ranges_are_let_go_when_nothing_needs_them(monkeypatch):
    alive, most, original = weakref.WeakSet(), 0, Range.__init__

    def counted(self, lo, hi):
        nonlocal most
        original(self, lo, hi)
        if lo.numel() == 256:
            alive.add(self)
            most = max(most, len(alive))

    monkeypatch.setattr(Range, "__init__", counted)
    expr = CAUSAL
    for i in range(30):
        expr = apply("and", apply("le", apply("sub", q, kv), 100 + i), apply("not", expr))
    bounds(expr, grid_of((1, 1, 16, 16), (1, 1)))
    assert most < 10
