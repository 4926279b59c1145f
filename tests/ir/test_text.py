"""Canonical text reads back exactly; infix text is for people."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from expressions import BATCH, COLUMN, HEAD, LOADS, ROW, SCORE, anything
from hypothesis import given, settings
from hypothesis import strategies as st

from foci.ir import expr as expr_module
from foci.ir.expr import DType, axis, const, load, node, param, reduce, size, variable
from foci.ir.ops import apply, cast, round_to
from foci.ir.text import from_text, to_infix, to_text

q, kv = ROW, COLUMN


@settings(max_examples=150, deadline=None)
@given(st.lists(anything(3), min_size=0, max_size=3))
def test_random_expressions_read_back(exprs):
    text = to_text(exprs)
    assert from_text(text) == tuple(exprs)
    assert to_text(from_text(text)) == text


NUMBERS = [0.0, -0.0, 0.1, 1e300, 5e-324, math.inf, -math.inf, math.nan, 1 / 3, 0, 1, -1, 2**31 - 1, -(2**31), 2**31, -(2**62), True, False]


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_numbers_read_back(number):
    expr = const(number)
    assert from_text(to_text([expr])) == (expr,)
    assert type(expr.value) is type(number)


def test_numbers_that_compare_equal_stay_apart():
    same = [const(0), const(0.0), const(-0.0), const(False), cast(const(0), DType.INT64)]
    assert len(set(same)) == 5
    assert from_text(to_text(same)) == tuple(same)


@settings(max_examples=50, deadline=None)
@given(st.floats())
def test_floats_read_back(number):
    assert from_text(to_text([const(number)])) == (const(number),)


def test_shared_nodes_are_written_once():
    part = apply("tanh", SCORE)
    text = to_text([apply("mul", part, part), apply("add", part, 1.0)])
    assert text.splitlines() == [
        "%0 = var[score] float",
        "%1 = tanh float %0",
        "%2 = mul float %1 %1",
        "%3 = const[1.0] float",
        "%4 = add float %1 %3",
        "return %2 %4",
    ]


BROKEN = [
    "",
    "%0 = var[score] float",
    "return %0",
    "%0 = nonsense float\nreturn %0",
    "%0 = var[score] double\nreturn %0",
    "%0 = add float %1 %2\nreturn %0",
    "%0 = const[x] float\nreturn %0",
    "%0 = const[1] bool\nreturn %0",
    "%0 = size[1] i32\nreturn %0",
    "%0 = var[score float\nreturn %0",
    "%0 = var[score] float\n%1 = abs[3] float %0\nreturn %1",
]


@pytest.mark.parametrize("text", BROKEN, ids=repr)
def test_broken_text_is_refused(text):
    with pytest.raises(ValueError, match="line"):
        from_text(text)


INFIX = [
    (
        apply(
            "where", apply("le", kv, q), apply("add", SCORE, apply("mul", LOADS["h"], cast(apply("sub", kv, q), DType.FLOAT))), -math.inf
        ),
        "where(kv_idx <= q_idx, score + c0[h] * float(kv_idx - q_idx), -inf)",
    ),
    (load(1, (BATCH, HEAD), DType.FLOAT), "c1[b, h]"),
    (load(1, (), DType.FLOAT), "c1"),
    (apply("sub", q, apply("sub", kv, 1)), "q_idx - (kv_idx - 1)"),
    (apply("sub", apply("sub", q, kv), 1), "q_idx - kv_idx - 1"),
    (apply("mul", apply("add", q, kv), -2), "(q_idx + kv_idx) * -2"),
    (apply("and", apply("le", kv, q), apply("not", LOADS["bool"])), "(kv_idx <= q_idx) & ~c3[b, kv_idx]"),
    (apply("eq", apply("le", kv, q), apply("le", q, kv)), "(kv_idx <= q_idx) == (q_idx <= kv_idx)"),
    (apply("pow", apply("pow", SCORE, 3.0), apply("neg", SCORE)), "(score ** 3.0) ** (-score)"),
    (apply("neg", apply("add", SCORE, 1.0)), "-(score + 1.0)"),
    (cast(cast(q, DType.INT64), DType.FLOAT), "float(int64(q_idx))"),
    (round_to(SCORE, torch.bfloat16), "bfloat16(score)"),
    (apply("add", param(0, DType.INT32), cast(param(1, DType.FLOAT), DType.INT32)), None),
    (apply("mul", param(1, DType.FLOAT), cast(param(0, DType.INT32), DType.FLOAT)), "f1 * float(i0)"),
    (
        reduce("any", 0, apply("eq", load(0, (BATCH, axis(0)), DType.INT32), kv), size(0, 1)),
        "any(c0[b, r0] == kv_idx for r0 in range(c0.shape[1]))",
    ),
    (apply("floordiv", apply("mul", q, variable("kv_len")), variable("q_len")), "q_idx * kv_len // q_len"),
]


@pytest.mark.parametrize("expr, text", [row for row in INFIX if row[1]], ids=[row[1] for row in INFIX if row[1]])
def test_infix(expr, text):
    assert to_infix(expr) == text
    assert repr(expr) == text


def test_infix_of_much_sharing_stays_short():
    expr = SCORE
    for _ in range(60):
        expr = apply("add", expr, apply("mul", expr, expr))
    text = to_infix(expr)
    assert len(text) < 4000
    assert text.startswith("t0 = score + score * score; t1 = t0 + t0 * t0; ")


def test_unknown_variables_are_refused():
    with pytest.raises(ValueError, match="no variable 'row'; the variables are score, b, h"):
        variable("row")


def test_two_threads_that_make_one_node_have_one(monkeypatch):
    """The other makes it while this one does."""
    new, nodes = expr_module._new, []

    def slow(*args):
        if not nodes:
            nodes.append(None)
            with ThreadPoolExecutor(1) as pool:
                nodes[0] = pool.submit(node, "add", parts, DType.FLOAT).result()
        return new(*args)

    parts = SCORE, apply("mul", SCORE, 0.8125)
    monkeypatch.setattr(expr_module, "_new", slow)
    assert node("add", parts, DType.FLOAT) is nodes[0]
    assert node("add", parts, DType.FLOAT) is nodes[0]


def test_nodes_are_immutable_and_shared():
    import copy
    import pickle

    expr = apply("add", SCORE, 1.0)
    assert node("add", expr.args, DType.FLOAT) is expr
    assert pickle.loads(pickle.dumps(expr)) is expr
    assert copy.deepcopy(expr) is expr
    with pytest.raises(AttributeError, match="immutable"):
        expr.op = "sub"
