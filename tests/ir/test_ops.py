"""Every row of the op table: torch against Python numbers, derivative against autograd, decomposition, range."""

import math

import pytest
import torch

from foci.ir.derivative import capture_derivatives, score_derivative
from foci.ir.eager import SPELLING, Env, evaluate
from foci.ir.emit import decompose
from foci.ir.expr import DType, const, load, node, param, variable
from foci.ir.interval import Grid, bounds
from foci.ir.ops import OPS, Typing, apply, cast
from foci.ir.ranges import Range

ROWS = sorted(OPS)
Q = variable("q_idx")
N = 64
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 7.0, math.inf, -math.inf, math.nan)
# Where the derivative exists and a function is defined: the interval of each operand.
DOMAIN = {
    "asin": [(-0.9, 0.9)], "acos": [(-0.9, 0.9)], "log": [(0.1, 5.0)], "log2": [(0.1, 5.0)], "log1p": [(-0.5, 5.0)],
    "sqrt": [(0.1, 5.0)], "rsqrt": [(0.1, 5.0)], "pow": [(0.2, 3.0), (-2.0, 3.0)], "div": [(-3.0, 3.0), (0.3, 3.0)],
    "floordiv": [(-3.0, 3.0), (0.3, 3.0)], "mod": [(-3.0, 3.0), (0.3, 3.0)], "fmod": [(-3.0, 3.0), (0.3, 3.0)], "tan": [(-1.4, 1.4)],
}  # fmt: skip


def kinds(name):
    """The types that operands of an operation may have."""
    return {
        Typing.ARITHMETIC: (DType.INT32, DType.INT64, DType.FLOAT),
        Typing.FLOATING: (DType.FLOAT,),
        Typing.COMPARISON: (DType.BOOL, DType.INT32, DType.INT64, DType.FLOAT),
        Typing.BITWISE: (DType.BOOL, DType.INT32, DType.INT64),
        Typing.SHIFT: (DType.INT32, DType.INT64),
        Typing.PREDICATE: (DType.FLOAT,),
        Typing.SELECT: (DType.BOOL, DType.INT32, DType.FLOAT),
    }[OPS[name].typing]


def operands(name, kind, seed=0):
    """Tensors [N] to apply `name` to, of `kind`, within its domain."""
    make = torch.Generator().manual_seed(seed)
    tensors = []
    for i in range(OPS[name].arity):
        if kind is DType.BOOL or (name == "where" and i == 0):
            tensors.append(torch.rand(N, generator=make) < 0.5)
        elif kind is DType.FLOAT:
            lo, hi = DOMAIN[name][i] if name in DOMAIN else (-3.0, 3.0)
            tensors.append(torch.rand(N, generator=make, dtype=torch.float64) * (hi - lo) + lo)
        else:
            lo = {"shl": 0, "shr": 0, "floordiv": 1, "mod": 1, "fmod": 1}.get(name, -9) if i == 1 else -9
            dtype = torch.int64 if kind is DType.INT64 else torch.int32
            tensors.append(torch.randint(lo, 9, (N,), generator=make, dtype=dtype))
    return tensors


def loads(tensors):
    names = {torch.bool: DType.BOOL, torch.int32: DType.INT32, torch.int64: DType.INT64, torch.float64: DType.FLOAT}
    return [load(i, (Q,), names[t.dtype]) for i, t in enumerate(tensors)]


def env_of(tensors, **variables):
    return Env({"q_idx": torch.arange(N), **variables}, tensors, dtype=torch.float64)


CASES = [(name, kind) for name in ROWS for kind in kinds(name)]


@pytest.mark.parametrize("name, kind", CASES, ids=[f"{name}-{kind.value}" for name, kind in CASES])
def test_folding_is_what_torch_computes(name, kind):
    tensors = operands(name, kind)
    eager = evaluate([apply(name, *loads(tensors))], env_of(tensors))[0]
    for i in range(N):
        numbers = [cast(const(t[i].item()), e.dtype) for t, e in zip(tensors, loads(tensors))]
        folded = apply(name, *numbers)
        assert folded.op == "const", f"{name} of {numbers} did not fold"
        assert folded.value == pytest.approx(eager[i].item(), rel=1e-12, abs=1e-15, nan_ok=True)


FLOATS = [name for name in ROWS if DType.FLOAT in kinds(name)]


@pytest.mark.parametrize("name", FLOATS)
def test_folding_special_numbers_is_what_torch_computes(name):
    # where Python raises (1 / 0, log(-1)) nothing folds: the device's own answer stands
    arity = OPS[name].arity
    rest = (2.0, -0.5, 0.0, math.inf, math.nan)
    cases = [
        (x, *pair) for x in SPECIAL for pair in ((), *((y,) for y in rest), *((y, z) for y in rest for z in rest)) if len(pair) == arity - 1
    ]
    for numbers in cases:
        inputs = [bool(numbers[0]), *numbers[1:]] if name == "where" else list(numbers)
        folded = apply(name, *inputs)
        if folded.op != "const":
            continue
        tensors = [torch.tensor([x], dtype=torch.bool if isinstance(x, bool) else torch.float64) for x in inputs]
        env = Env({"q_idx": torch.tensor([0])}, tensors, dtype=torch.float64)
        eager = evaluate([apply(name, *loads(tensors))], env)[0].item()
        assert folded.value == pytest.approx(eager, rel=1e-12, nan_ok=True), f"{name}{tuple(inputs)}"


def test_integers_fold_as_they_wrap():
    assert apply("add", 2**31 - 1, 1).value == -(2**31)
    assert apply("mul", 2**16, 2**16).value == 0
    assert apply("neg", cast(const(-(2**31)), DType.INT32)).value == -(2**31)
    assert apply("shl", 1, 31).value == -(2**31)


@pytest.mark.parametrize("name", [name for name in ROWS if OPS[name].partials])
def test_partials_are_what_autograd_finds(name):
    tensors = operands(name, DType.FLOAT, seed=1)
    for i in (i for i, t in enumerate(tensors) if t.is_floating_point()):
        args = loads(tensors)
        args[i] = variable("score")
        expr = apply(name, *args)
        score = tensors[i].clone().requires_grad_()
        captured = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
        env = env_of(captured, score=score)
        value = evaluate([expr], env)[0]
        leaves = [t for j, t in enumerate(captured) if t.requires_grad and j != i]
        wanted = torch.autograd.grad(value.sum(), [score, *leaves], retain_graph=True)
        torch.testing.assert_close(evaluate([score_derivative(expr)], env)[0].expand(N), wanted[0], rtol=1e-10, atol=1e-12)
        weights = {d.slot: d.weight for d in capture_derivatives(expr)}
        for slot, gradient in zip([j for j, t in enumerate(captured) if t.requires_grad and j != i], wanted[1:]):
            torch.testing.assert_close(evaluate([weights[slot]], env)[0].expand(N), gradient, rtol=1e-10, atol=1e-12)
        assert torch.autograd.gradcheck(lambda s: evaluate([expr], env_of(tensors, score=s))[0], [tensors[i].clone().requires_grad_()])


@pytest.mark.parametrize("name", [name for name in FLOATS if not OPS[name].partials])
def test_rows_without_partials_have_derivative_zero(name):
    tensors = operands(name, DType.FLOAT)
    expr = cast(apply(name, *[variable("score")] * OPS[name].arity), DType.FLOAT)
    assert score_derivative(expr) is const(0.0)
    score = tensors[0].clone().requires_grad_()
    value = evaluate([expr], env_of(tensors, score=score))[0]
    if value.requires_grad:
        assert not torch.autograd.grad(value.sum(), score, allow_unused=True)[0].any()


@pytest.mark.parametrize("name", ["min", "max"])
def test_ties_are_split_as_in_torch(name):
    tensors = [torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)]
    expr = apply(name, variable("score"), load(0, (Q,), DType.FLOAT))
    score = torch.full((3,), 2.0, dtype=torch.float64, requires_grad=True)
    env = Env({"q_idx": torch.arange(3), "score": score}, tensors, dtype=torch.float64)
    wanted = torch.autograd.grad(evaluate([expr], env)[0].sum(), score)[0]
    assert evaluate([score_derivative(expr)], env)[0].tolist() == wanted.tolist()


DECOMPOSED = [(name, kind) for name, kind in CASES if OPS[name].decomposed is not None]


@pytest.mark.parametrize("name, kind", DECOMPOSED, ids=[f"{name}-{kind.value}" for name, kind in DECOMPOSED])
def test_decompositions_agree_with_their_operation(name, kind):
    tensors = operands(name, kind, seed=2)
    if kind is DType.FLOAT and name not in DOMAIN:
        tensors[0][:8] = torch.tensor([0.0, 1e-12, -1e-12, 1e-3, -1e-3, 30.0, -30.0, 2.5], dtype=torch.float64)
    expr = apply(name, *loads(tensors))
    other = decompose(expr, {row: None for row in OPS if row != name})
    assert all(e.op != name for e in other.walk())
    plain, decomposed = evaluate([expr, other], env_of(tensors))
    if kind is DType.FLOAT and plain.is_floating_point():
        torch.testing.assert_close(decomposed, plain, rtol=1e-12, atol=1e-300, equal_nan=True)
    else:
        assert torch.equal(plain, decomposed.to(plain.dtype))


@pytest.mark.parametrize("name", ROWS)
def test_every_row_has_an_eager_spelling(name):
    assert name in SPELLING.ops


def _boxes(name, kind, seed):
    """For each operand, sorted captured values and 40 intervals of places in them."""
    make = torch.Generator().manual_seed(seed)
    tensors = [t if t.dtype is torch.bool else t.sort()[0] for t in operands(name, kind, seed)]
    ends = [torch.randint(0, N, (40, 2), generator=make).sort(1)[0] for _ in tensors]
    ends = [torch.stack([e[:, 0], torch.minimum(e[:, 1], e[:, 0] + 5)], 1) for e in ends]
    return tensors, ends


@pytest.mark.parametrize("name, kind", CASES, ids=[f"{name}-{kind.value}" for name, kind in CASES])
def test_ranges_are_sound(name, kind):
    for seed in range(3):
        tensors, ends = _boxes(name, kind, seed)
        if kind is DType.FLOAT and name in ("log", "sqrt", "rsqrt", "asin", "pow", "div", "mod", "fmod", "floordiv") and seed == 2:
            tensors = [t if t.dtype is torch.bool else (t - 1.5).sort()[0] for t in tensors]  # over the edge of the domain
        places = [variable(v) for v in ("q_idx", "kv_idx", "h")]
        args = [load(i, (places[i],), loads(tensors)[i].dtype) for i in range(len(tensors))]
        expr = node(name, *_typed(name, args))
        box = {str(p.value): Range(e[:, 0].double(), e[:, 1].double()) for p, e in zip(places, ends)}
        interval = bounds(expr, Grid(box, tensors))
        lo, hi = interval.lo.expand(40), interval.hi.expand(40)
        for _ in range(60):
            at = {v: e[:, 0] + (torch.rand(40) * (e[:, 1] - e[:, 0] + 1)).long() for v, e in zip(box, ends)}
            for dtype in (torch.float64, torch.float32):
                value = evaluate([expr], Env(at, tensors, dtype=dtype))[0].double().expand(40)
                inside = ((lo <= value) & (value <= hi)) | torch.isnan(value)
                assert inside.all(), f"{name} {kind}: {value[~inside]} outside {lo[~inside]} .. {hi[~inside]}"


def _typed(name, args):
    typed = apply(name, *args)
    return typed.args, typed.dtype


@pytest.mark.parametrize("name", ["and", "or", "xor", "not", "shl", "shr"])
def test_bitwise_operations_refuse_floats(name):
    with pytest.raises(TypeError, match=f"{name} takes (booleans or )?integers, got float"):
        apply(name, *[param(0, DType.FLOAT)] * OPS[name].arity)


def test_arity_is_checked():
    with pytest.raises(TypeError, match="add takes 2 operands, got 1"):
        apply("add", 1)
