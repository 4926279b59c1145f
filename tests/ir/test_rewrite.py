"""Substitution and the levels of nested reductions; constants become parameters."""

import pytest
import torch
from expressions import BATCH, COLUMN, HEAD, ROW, SCORE, anything, environment, floats
from hypothesis import given, settings

from foci.ir.eager import Env, evaluate
from foci.ir.expr import DType, axis, const, load, param, reduce, size
from foci.ir.lift_constants import lift_constants
from foci.ir.ops import apply, cast
from foci.ir.rewrite import canonical_levels, rewrite, substitute
from foci.ir.simplify import simplify
from foci.ir.text import to_infix, to_text
from foci.ir.verify import verify

q, kv = ROW, COLUMN


def row(level, slot=4):
    return load(slot, (kv, axis(level)), DType.FLOAT)


EXTENT = size(4, 1)
DOT = reduce("sum", 0, apply("mul", row(0), row(0)), EXTENT)
OUTER = reduce("max", 0, apply("mul", row(0), SCORE), EXTENT)


def test_a_reduction_moved_into_a_reduction_is_above_it():
    moved = substitute(OUTER, {SCORE: DOT})
    assert to_infix(moved) == (
        "max(c4[kv_idx, r1] * sum(c4[kv_idx, r0] * c4[kv_idx, r0] for r0 in range(c4.shape[1])) for r1 in range(c4.shape[1]))"
    )
    verify(moved, 6)


def test_deep_nests_keep_their_axes_apart():
    # three loops around a score that becomes a loop itself
    body = apply("mul", apply("mul", row(0), row(1)), apply("mul", row(2), SCORE))
    nest = reduce("sum", 2, reduce("sum", 1, reduce("sum", 0, body, EXTENT), EXTENT), EXTENT)
    env = environment()
    result = substitute(nest, {SCORE: DOT})
    verify(result, 6)
    dot = evaluate([DOT], env)[0]
    wanted = evaluate([nest], Env({**env.variables, "score": dot}, env.captures, dtype=env.dtype))[0]
    torch.testing.assert_close(evaluate([result], env)[0], wanted)


def test_a_reduction_that_goes_lowers_those_around_it():
    nest = substitute(OUTER, {SCORE: DOT})
    assert substitute(nest, {DOT: SCORE}) is OUTER


def test_levels_are_counted_from_the_innermost():
    loose = reduce("sum", 7, reduce("max", 3, apply("add", row(3), row(7)), EXTENT), EXTENT)
    assert canonical_levels(loose) is reduce("sum", 1, reduce("max", 0, apply("add", row(0), row(1)), EXTENT), EXTENT)


def test_one_level_may_be_bound_twice():
    # the inner reduction binds its own axis 3; the outer one the rest
    inner = reduce("max", 3, row(3), EXTENT)
    loose = reduce("sum", 3, apply("mul", row(3), inner), EXTENT)
    expected = reduce("sum", 1, apply("mul", row(1), reduce("max", 0, row(0), EXTENT)), EXTENT)
    assert canonical_levels(loose) is expected


def test_free_axes_stay_as_they_are():
    open_body = apply("mul", row(-4), reduce("sum", 5, apply("mul", row(5), row(-1)), EXTENT))
    closed = canonical_levels(open_body)
    assert closed.free == {-4, -1}
    bound = substitute(closed, {axis(-1): axis(9)})
    assert bound.free == {-4, 9}


@settings(max_examples=100, deadline=None)
@given(floats(3), floats(3))
def test_substitution_is_composition(outer, inner):
    env = environment()
    composed = substitute(outer, {SCORE: inner})
    verify(composed, 6)
    value = evaluate([inner], env)[0].expand(2, 3, 6, 5)
    wanted = evaluate([outer], Env({**env.variables, "score": value}, env.captures, env.ints, env.floats, env.dtype))[0]
    actual = evaluate([composed], env)[0]
    torch.testing.assert_close(*torch.broadcast_tensors(actual, wanted), equal_nan=True)


def test_substitution_types_again():
    # an INT64 parameter in place of an INT32 constant widens what it meets
    result = substitute(apply("add", q, 3), {const(3): param(0, DType.INT64)})
    assert result is apply("add", q, param(0, DType.INT64))
    assert result.dtype is DType.INT64


def test_rewrite_sees_every_node_once():
    seen = []
    part = apply("tanh", SCORE)
    expr = apply("mul", part, apply("add", part, 1.0))
    assert rewrite(expr, lambda e: seen.append(e)) is expr
    assert len(seen) == len(set(seen)) == 5


# Constants ----------------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(anything(3))
def test_lifting_keeps_values(expr):
    env = environment()
    (lifted,), ints, numbers = lift_constants([expr])
    verify(lifted, 6)
    assert lifted.dtype is expr.dtype
    before = evaluate([expr], env)[0]
    after = evaluate([lifted], Env(env.variables, env.captures, ints, numbers, env.dtype))[0]
    torch.testing.assert_close(*torch.broadcast_tensors(before, after), equal_nan=True, rtol=0, atol=0)


def test_slots_count_by_first_appearance_and_are_shared():
    a = apply("lt", apply("sub", q, kv), 128)
    b = apply("lt", apply("add", q, 40), apply("mul", kv, 128))
    exprs, ints, numbers = lift_constants([a, b, apply("add", apply("mul", SCORE, 3.5), 3.5)])
    assert [to_infix(e) for e in exprs] == ["q_idx - kv_idx < i0", "q_idx + i1 < kv_idx * i0", "score * f0 + f0"]
    assert (ints, numbers) == ((128, 40), (3.5,))


KEPT = [0, 1, -1, 2, 0.0, 1.0, -1.0, 0.5, 2.0, float("inf"), float("-inf"), float("nan")]


@pytest.mark.parametrize("number", KEPT, ids=repr)
def test_tiny_constants_stay(number):
    expr = apply("add", SCORE if isinstance(number, float) else q, number)
    assert lift_constants([expr]) == ((expr,), (), ())


STRUCTURAL = [
    apply("floordiv", q, 64), apply("mod", q, 64), apply("fmod", q, 64), apply("shl", q, 3), apply("shr", q, 3), apply("pow", SCORE, 3.0),
]  # fmt: skip


@pytest.mark.parametrize("expr", STRUCTURAL, ids=to_infix)
def test_constants_that_decide_the_code_stay(expr):
    number = expr.args[1].value
    assert lift_constants([expr]) == ((expr,), (), ())
    beside = (
        apply("and", apply("lt", q, number), apply("eq", cast(expr, DType.INT32), 0))
        if isinstance(number, int)
        else apply("mul", expr, number)
    )
    (lifted,), ints, numbers = lift_constants([beside])
    assert (*ints, *numbers) == (number,)  # elsewhere the same number is lifted
    assert expr in lifted.walk()


def test_a_wide_integer_keeps_its_type():
    wide = apply("add", load(5, (BATCH, const(0)), DType.INT64), 2**40)
    (lifted,), ints, _ = lift_constants([wide])
    assert ints == (2**40,)
    assert param(0, DType.INT64) in lifted.walk()


def test_a_lone_constant():
    assert lift_constants([const(7.5), const(True), const(9)]) == (
        (param(0, DType.FLOAT), const(True), param(0, DType.INT32)),
        (9,),
        (7.5,),
    )


def test_parameters_already_there_keep_their_slots():
    expr = apply("add", apply("mul", q, param(1_000_000, DType.INT32)), 77)
    (lifted,), ints, _ = lift_constants([expr])
    assert to_infix(lifted) == "q_idx * i1000000 + i0" and ints == (77,)
    with pytest.raises(ValueError, match="a parameter i0 already"):
        lift_constants([apply("add", param(0, DType.INT32), 77)])


def test_new_numbers_are_the_same_function():
    # window sizes, lengths and caps
    def text(window, cap, slope):
        mask = apply("and", apply("le", kv, q), apply("lt", apply("sub", q, kv), window))
        score = apply("add", apply("mul", apply("tanh", apply("div", SCORE, cap)), cap), apply("mul", cast(HEAD, DType.FLOAT), slope))
        return to_text(lift_constants([simplify(score), simplify(mask)])[0])

    assert len({text(w, c, s) for w in (5, 128, 4096) for c in (20.0, 30.5) for s in (0.3, -0.25)}) == 1
