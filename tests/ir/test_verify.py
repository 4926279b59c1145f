"""The verifier accepts what the language builds and refuses the rest, by name."""

import pytest
from expressions import BATCH, COLUMN, HEAD, ROW, SCORE, anything
from hypothesis import given, settings

from foci.ir.expr import DType, axis, const, load, node, param, reduce, size, variable
from foci.ir.ops import apply
from foci.ir.verify import IllFormedExpression, verify

q, kv = ROW, COLUMN


@settings(max_examples=100, deadline=None)
@given(anything(3))
def test_random_expressions_are_well_formed(expr):
    verify(expr, 6)


F, INT, L, T = DType.FLOAT, DType.INT32, DType.INT64, DType.BOOL
SIZE = size(0, 1)
BROKEN = [
    (node("frobnicate", (SCORE,), F), "no operation 'frobnicate'"),
    (node("add", (SCORE,), F), "add takes 2 operands, got 1"),
    (node("add", (SCORE, q), F), r"add takes \(float, float\), got \(float, i32\)"),
    (node("add", (q, kv), F), r"add of \(i32, i32\) is i32, not float"),
    (node("add", (SCORE, SCORE), F, 3), "add takes no value, got 3"),
    (node("exp", (q,), F), r"exp takes \(float\), got \(i32\)"),
    (node("and", (SCORE, SCORE), F), r"and takes \(i32, i32\), got \(float, float\)"),
    (node("where", (q, SCORE, SCORE), F), r"where takes \(bool, float, float\), got \(i32, float, float\)"),
    (node("lt", (q, kv), INT), r"lt of \(i32, i32\) is bool, not i32"),
    (node("shl", (const(True), const(True)), T), r"shl takes \(i32, i32\), got \(bool, bool\)"),
    (node("const", (), F, 1), "a float constant holds a float, got 1"),
    (node("const", (), INT, True), "a i32 constant holds a int, got True"),
    (node("const", (), INT, 2**31), "constant 2147483648 does not fit i32"),
    (node("var", (), INT, "row"), "no variable 'row'"),
    (node("var", (), INT, "score"), "score is float, not i32"),
    (node("var", (), L, "q_idx"), "q_idx is i32, not i64"),
    (param(-1, INT), "a param has a slot, 0 or more, got -1"),
    (param(0, T), "a param is an integer or float, not bool"),
    (node("size", (), INT, (0,)), r"a size is i32 with \(slot, dim\), got \(0,\)"),
    (load(0, (SCORE,), F), "index 0 of a load is float, not an integer"),
    (load(7, (q,), F), "slot 7 of 2 captured tensors"),
    (size(2, 0), "slot 2 of 2 captured tensors"),
    (apply("add", load(0, (q,), F), load(0, (q, kv), F)), "c0 is read with 2 indices as float, and with 1 as float"),
    (node("cast", (q,), F, "i32"), "a cast takes one operand and its own type as value"),
    (node("round_to", (SCORE,), F, "float8"), "round_to rounds to float16, bfloat16 or float32, got 'float8'"),
    (node("round_to", (q,), F, "float16"), "round_to takes and gives a float"),
    (axis(0), "no reduction binds r0"),
    (apply("add", q, axis(2)), "no reduction binds r2"),
    (reduce("sum", 1, load(0, (axis(1),), F), SIZE), "its level must be 0"),
    (reduce("sum", 0, reduce("sum", 0, load(0, (axis(0),), F), SIZE), SIZE), "its level must be 1"),
    (reduce("prod", 0, load(0, (axis(0),), F), SIZE), "kind one of sum, max, min, any, all"),
    (reduce("any", 0, load(0, (axis(0),), F), SIZE), "any of a float body cannot be float"),
    (reduce("sum", 0, load(0, (axis(0),), T), SIZE), "sum of a bool body cannot be bool"),
    (node("reduce", (SCORE,), F, ("sum", 0)), "a reduce takes a body and an integer extent"),
    (reduce("sum", 0, load(0, (axis(0),), F), SCORE), "a reduce takes a body and an integer extent"),
    (node("axis", (), L, 0), "an axis is i32 with a level"),
]


@pytest.mark.parametrize("expr, message", BROKEN, ids=[message for _, message in BROKEN])
def test_broken_expressions_are_refused(expr, message):
    with pytest.raises(IllFormedExpression, match=message):
        verify(expr, 2)


def test_a_broken_part_is_shown():
    with pytest.raises(IllFormedExpression, match=r"in: add\(q_idx\)$"):
        verify(apply("mul", node("add", (q,), INT), 2), 0)


def test_variables_are_known():
    for name in ("score", "b", "h", "q_idx", "kv_idx", "q_len", "kv_len"):
        verify(variable(name), 0)
    assert BATCH is variable("b") and HEAD is variable("h")
