"""Derivatives by score and by captured values against autograd."""

# FLEX-04

import math

import pytest
import torch
from expressions import BATCH, COLUMN, LOADS, ROW, SCORE, B, H, K, Q, environment, floats
from hypothesis import given, settings

from foci.ir.derivative import capture_derivatives, score_derivative
from foci.ir.eager import Env, evaluate
from foci.ir.expr import DType, axis, const, load, param, reduce, size
from foci.ir.ops import apply, cast, round_to
from foci.ir.text import to_infix
from foci.ir.verify import verify

FULL = (B, H, Q, K)


def with_grad(env):
    score = env.variables["score"].clone().requires_grad_()
    captures = tuple(c.clone().requires_grad_(c.is_floating_point()) for c in env.captures)
    return Env({**env.variables, "score": score}, captures, env.ints, env.floats, env.dtype), score, captures


def autograd(expr, env, cotangent):
    env, score, captures = with_grad(env)
    value = evaluate([expr], env)[0].expand(FULL)
    inputs = [score, *(c for c in captures if c.requires_grad)]
    if not value.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    grads = torch.autograd.grad(value, inputs, cotangent, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads)]


def gathered(expr, env, cotangent):
    """Gradients of the captured float tensors as `CaptureDerivative` describes them."""
    grads = {slot: torch.zeros_like(c) for slot, c in enumerate(env.captures) if c.is_floating_point()}
    for derivative in capture_derivatives(expr):
        axes, shape = {}, list(FULL)
        for _, extent in derivative.axes:
            shape.append(int(evaluate([extent], env)[0]))
        for n, (level, _) in enumerate(derivative.axes):
            axes[level] = torch.arange(shape[4 + n])[(...,) + (None,) * (len(derivative.axes) - 1 - n)]
        inside = {name: v[(...,) + (None,) * len(derivative.axes)] for name, v in env.variables.items()}
        inner = Env(inside, env.captures, env.ints, env.floats, env.dtype, axes)
        weight, *indices = evaluate((derivative.weight, *derivative.indices), inner)
        amount = cotangent[(...,) + (None,) * len(derivative.axes)] * weight
        places = tuple(i.expand(shape).reshape(-1).long() for i in indices)
        amount = amount.expand(shape).reshape(-1)
        grads[derivative.slot].index_put_(places, amount, accumulate=True)
    return list(grads.values())


def check(expr, seed=0):
    env = environment(seed)
    cotangent = torch.randn(FULL, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    wanted_score, *wanted = autograd(expr, env, cotangent)
    derivative = score_derivative(expr)
    verify(derivative, len(env.captures))
    assert derivative.dtype is DType.FLOAT
    found_score = evaluate([derivative], env)[0].expand(FULL) * cotangent
    torch.testing.assert_close(found_score, wanted_score, rtol=1e-8, atol=1e-9)
    for mine, theirs in zip(gathered(expr, env, cotangent), wanted):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)


@settings(max_examples=200, deadline=None)
@given(floats(4))
def test_random_expressions(expr):
    # round_to rounds gradients too under autograd, and at a rounding boundary floats jump
    if any(e.op == "round_to" for e in expr.walk()):
        return
    check(expr)


ROWS = load(4, (COLUMN, axis(0)), DType.FLOAT)
EXTENT = size(4, 1)


def rows(kind, body, extent=EXTENT):
    return reduce(kind, 0, body, extent)


NESTED = reduce("sum", 1, apply("mul", load(4, (COLUMN, axis(1)), DType.FLOAT), rows("max", apply("mul", ROWS, SCORE))), EXTENT)
TWICE = apply("mul", rows("sum", apply("tanh", apply("mul", ROWS, SCORE))), rows("max", ROWS))
REDUCTIONS = [
    rows("sum", ROWS),
    rows("sum", apply("mul", ROWS, SCORE)),
    rows("max", ROWS),
    rows("min", apply("mul", ROWS, SCORE)),
    rows("max", apply("abs", ROWS)),
    rows("sum", apply("exp", apply("sub", ROWS, rows("max", ROWS).args[0]))),
    apply("add", SCORE, rows("sum", apply("mul", ROWS, LOADS["bq"]))),
    apply("log", rows("sum", apply("exp", apply("mul", ROWS, SCORE)))),
    rows("sum", apply("mul", SCORE, LOADS["h"])),
    rows("max", apply("min", ROWS, LOADS["bq"])),
    apply("where", rows("any", apply("lt", ROWS, SCORE)), apply("mul", SCORE, LOADS["h"]), SCORE),
    TWICE,
    NESTED,
    reduce("max", 1, apply("add", load(4, (COLUMN, axis(1)), DType.FLOAT), rows("sum", apply("mul", ROWS, SCORE))), EXTENT),
    reduce("sum", 1, rows("sum", apply("mul", apply("mul", ROWS, load(4, (COLUMN, axis(1)), DType.FLOAT)), SCORE)), EXTENT),
]


@pytest.mark.parametrize("expr", REDUCTIONS, ids=to_infix)
def test_reductions(expr):
    check(expr)


def test_ties_of_a_reduction_share():
    table = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], dtype=torch.float64, requires_grad=True)
    expr = reduce("max", 0, load(0, (ROW, axis(0)), DType.FLOAT), size(0, 1))
    env = Env({"q_idx": torch.arange(2)}, (table,), dtype=torch.float64)
    wanted = torch.autograd.grad(evaluate([expr], env)[0].sum(), table)[0]
    (derivative,) = capture_derivatives(expr)
    ((level, _),) = derivative.axes
    inside = Env({"q_idx": torch.arange(2)[:, None]}, (table.detach(),), dtype=torch.float64, axes={level: torch.arange(3)})
    assert torch.equal(evaluate([derivative.weight], inside)[0], wanted)


VARIANTS = [
    apply("mul", apply("tanh", apply("div", SCORE, 20.0)), 20.0),
    apply("add", SCORE, apply("mul", LOADS["h"], cast(apply("sub", COLUMN, ROW), DType.FLOAT))),
    apply("add", SCORE, load(1, (BATCH, apply("add", apply("sub", ROW, COLUMN), -1)), DType.FLOAT)),  # negative indices wrap
    apply("where", apply("le", COLUMN, ROW), SCORE, -math.inf),
    apply("mul", SCORE, apply("sigmoid", SCORE)),
    apply("add", apply("mul", SCORE, LOADS["h"]), apply("mul", LOADS["h"], LOADS["bq"])),
    apply("div", SCORE, apply("add", apply("mul", LOADS["h"], LOADS["h"]), 1.0)),
    apply("mul", SCORE, param(0, DType.FLOAT)),
]


@pytest.mark.parametrize("expr", VARIANTS, ids=to_infix)
def test_variants(expr):
    check(expr)


def test_the_gradient_passes_a_rounding():
    assert score_derivative(round_to(apply("mul", SCORE, 3.0), torch.bfloat16)) is const(3.0)


@pytest.mark.parametrize(
    "expr", [const(2.0), LOADS["h"], cast(apply("lt", SCORE, 0.0), DType.FLOAT), cast(cast(SCORE, DType.INT32), DType.FLOAT)]
)
def test_no_score_no_derivative(expr):
    assert score_derivative(expr) is const(0.0)


def test_integer_captures_have_no_derivative():
    assert capture_derivatives(apply("mul", SCORE, cast(LOADS["int"], DType.FLOAT))) == ()


UNCHOSEN = [
    apply("where", apply("lt", 0.0, SCORE), apply("log", SCORE), 0.0),
    apply("where", apply("le", SCORE, 0.0), 0.0, apply("sqrt", apply("mul", SCORE, 2.0))),
    apply("min", apply("exp", apply("mul", SCORE, 1000.0)), 5.0),
    apply("max", apply("neg", apply("exp", apply("mul", SCORE, 1000.0))), -5.0),
]


@pytest.mark.parametrize("expr", UNCHOSEN, ids=to_infix)
def test_what_was_not_chosen_may_be_infinite(expr):
    # autograd itself gives nan here: zero times infinity
    score = torch.tensor([0.0, 1.0, 2.0] if expr.op == "where" else [1.0, 2.0, -1.0], dtype=torch.float64)
    value = evaluate([score_derivative(expr)], Env({"score": score}, dtype=torch.float64))[0]
    assert not value.isnan().any()
    assert value[0] == 0


def test_a_softcap_costs_one_tanh():
    cap = param(0, DType.FLOAT)
    derivative = score_derivative(apply("mul", apply("tanh", apply("div", SCORE, cap)), cap))
    assert to_infix(derivative) == "1.0 - tanh(score / f0) * tanh(score / f0)"


def test_gradcheck_of_a_whole_score_function():
    expr = apply("add", VARIANTS[0], apply("mul", rows("sum", apply("mul", ROWS, SCORE)), LOADS["h"]))
    env = environment()

    def function(score, *captures):
        full = list(env.captures)
        full[0], full[4] = captures
        return evaluate([expr], Env({**env.variables, "score": score}, full, env.ints, env.floats, env.dtype))[0]

    inputs = [env.variables["score"][:, :, :2, :2], env.captures[0], env.captures[4]]
    env = Env(
        {**env.variables, "q_idx": env.variables["q_idx"][:2], "kv_idx": env.variables["kv_idx"][:2]},
        env.captures,
        env.ints,
        env.floats,
        env.dtype,
    )
    assert torch.autograd.gradcheck(function, [x.clone().requires_grad_() for x in inputs])


def test_axes_of_nested_loops_are_outermost_first():
    inner_row, outer_row = ROWS, load(4, (COLUMN, axis(1)), DType.FLOAT)
    body = reduce("sum", 0, apply("mul", inner_row, apply("exp", apply("mul", inner_row, outer_row))), EXTENT)
    derivatives = capture_derivatives(reduce("sum", 1, body, EXTENT))
    assert all(d.axes == ((1, EXTENT), (0, EXTENT)) for d in derivatives if axis(0) in d.indices)
    assert {d.indices[1] for d in derivatives} == {axis(0), axis(1)}
