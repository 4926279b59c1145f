"""Emission: order, names, sharing, loops and decompositions; the eager source is a golden file.

Run this file as a program to write the golden file anew.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expressions import BATCH, COLUMN, HEAD, ROW, SCORE, anything, environment
from hypothesis import given, settings

from foci.ir.derivative import score_derivative
from foci.ir.eager import Env, _compiled, evaluate, source
from foci.ir.emit import Reduction, Spelling, UnsupportedOperation, emit
from foci.ir.expr import DType, axis, const, load, node, param, reduce, size, variable
from foci.ir.ops import OPS, apply, cast, round_to
from foci.ir.simplify import simplify
from foci.ir.text import to_infix

q, kv = ROW, COLUMN
F, INT, L, T = DType.FLOAT, DType.INT32, DType.INT64, DType.BOOL
CAP = param(0, F)
SOFTCAP = apply("mul", apply("tanh", apply("div", SCORE, CAP)), CAP)
CAUSAL = apply("le", kv, q)
DISTANCE = apply("sub", q, kv)
ROPE = apply("mul", load(0, (BATCH, HEAD, q, axis(0)), F), load(1, (BATCH, kv, axis(0)), F))
CHOSEN = apply("eq", load(0, (BATCH, HEAD, apply("floordiv", q, 64), axis(0)), INT), apply("floordiv", kv, 64))
MOST = reduce("max", 0, apply("mul", SCORE, load(0, (kv, axis(0)), F)), size(0, 1))
WINDOW = apply("and", CAUSAL, apply("lt", DISTANCE, param(0, INT)))
CAPPED = apply("min", SCORE, param(1, F))
VARIANTS = {
    "plain": (SCORE, const(True)),
    "causal alibi": (apply("add", SCORE, apply("mul", load(0, (HEAD,), F), cast(apply("sub", kv, q), F))), CAUSAL),
    "softcap and its derivative": (SOFTCAP, score_derivative(SOFTCAP)),
    "window and document": (apply("and", WINDOW, apply("eq", load(0, (BATCH, q), L), load(0, (BATCH, kv), L))),),
    "relative bias": (apply("add", SCORE, load(0, (HEAD, apply("add", DISTANCE, param(0, INT))), F)),),
    "bool mask": (load(0, (BATCH, const(0), q, kv), T),),
    "selected blocks": (reduce("any", 0, CHOSEN, size(0, 3)),),
    "decoupled rope": (apply("add", SCORE, reduce("sum", 0, ROPE, size(1, 2))),),
    "normalised rows": (reduce("sum", 1, apply("div", load(0, (q, axis(1)), F), apply("add", MOST, 1.0)), size(0, 1)),),
    "half precision and lengths": (
        round_to(apply("add", CAPPED, cast(apply("sub", variable("kv_len"), variable("q_len")), F)), torch.bfloat16),
        apply("where", apply("lt", size(0, 0), param(1, INT)), 1.5, -math.inf),
    ),
}
GOLDEN = Path(__file__).parent / "golden" / "eager.txt"


def golden():
    return "\n".join(f"# {name}\n{source(exprs)}" for name, exprs in VARIANTS.items())


def test_eager_source_is_the_golden_file():
    assert golden() == GOLDEN.read_text(), "run this file as a program if the change is meant"


# A language of scalars and loops: Python itself, so that what is emitted for C++ or Triton can be run here.

REDUCERS = {"sum": "{0} + {1}", "max": "max({0}, {1})", "min": "min({0}, {1})", "any": "{0} or {1}", "all": "{0} and {1}"}
STARTS = {"sum": "0", "max": "-inf", "min": "inf", "any": "False", "all": "True"}


def loop(r: Reduction):
    return (
        f"{r.name} = {STARTS[r.kind]}",
        f"for {r.axis} in range({r.extent}):",
        *(f"    {line}" for line in r.body),
        f"    {r.name} = {REDUCERS[r.kind].format(r.name, r.result)}",
    )


SCALARS = Spelling(
    ops={name: f"fold['{name}']({', '.join(f'{{{i}}}' for i in range(row.arity))})" for name, row in OPS.items()},
    const=lambda e: repr(e.value),
    var=lambda e: str(e.value),
    param=lambda e: f"{'ints' if e.dtype.is_integer else 'floats'}[{e.value}]",
    axis=lambda e: f"i{e.value}",
    size=lambda e: f"captures[{e.value[0]}].shape[{e.value[1]}]",
    load=lambda e, at: f"captures[{e.value}][{', '.join(at)}].item()",
    cast=lambda e, x: f"casts['{e.value}']({x})",
    reduce=loop,
    assign=lambda e, name, text: f"{name} = {text}",
)


def run_scalars(exprs, env, at):
    emitted = emit(exprs, SCALARS)
    casts = {"float": float, "i32": int, "i64": int, "bool": bool, "float16": lambda x: torch.tensor(x).half().item()}
    fold = {name: row.fold for name, row in OPS.items()}
    space = {"fold": fold, "casts": casts, "captures": env.captures, "ints": env.ints, "floats": env.floats, "inf": math.inf, **at}
    exec("\n".join(emitted.lines), space)
    return [eval(result, space) for result in emitted.results]


@settings(max_examples=120, deadline=None)
@given(anything(3), anything(2))
def test_loops_compute_what_eager_computes(a, b):
    env = environment()
    values = [v.expand(2, 3, 6, 5) for v in evaluate([a, b], env)]
    for place in ((0, 0, 0, 0), (1, 2, 5, 4), (0, 1, 3, 2)):
        score = env.variables["score"][place].item()
        at = {"score": score, **dict(zip(("b", "h", "q_idx", "kv_idx"), place))}
        actual = run_scalars([a, b], env, at)
        for value, mine in zip(values, actual):
            assert mine == pytest.approx(value[place].item(), rel=1e-9, abs=1e-12, nan_ok=True)


def row(slot, level):
    return load(slot, (kv, axis(level)), F)


def test_what_a_loop_does_not_change_is_outside_it():
    outside = apply("exp", apply("mul", SCORE, load(0, (HEAD,), F)))
    expr = reduce("sum", 0, apply("mul", row(4, 0), outside), size(4, 1))
    lines = emit([expr], SCALARS).lines
    first = next(i for i, line in enumerate(lines) if line.startswith("for"))
    assert any("exp" in line for line in lines[:first])
    assert not any("exp" in line for line in lines[first:])


def test_common_subexpressions_are_computed_once():
    shared = apply("tanh", SCORE)
    both = [apply("mul", shared, shared), apply("add", shared, 1.0)]
    assert sum("tanh" in line for line in emit(both, SCALARS).lines) == 1
    assert source(both).count("tanh") == 1


def test_two_loops_over_one_axis_are_two_loops():
    dot = reduce("sum", 0, apply("mul", row(4, 0), SCORE), size(4, 1))
    most = reduce("max", 0, apply("mul", row(4, 0), SCORE), size(4, 1))
    expr = apply("sub", dot, most)
    lines = emit([expr], SCALARS).lines
    assert sum(line.startswith("for i0 in range") for line in lines) == 2
    env = environment()
    value = evaluate([expr], env)[0]
    at = {"score": env.variables["score"][1, 0, 0, 3].item(), "kv_idx": 3}
    assert run_scalars([expr], env, at)[0] == pytest.approx(value[1, 0, 0, 3].item())


def test_names_are_v0_v1_and_so_on():
    expr = apply("mul", apply("tanh", SCORE), apply("exp", SCORE))
    assert emit([expr], SCALARS).lines == ("v0 = fold['tanh'](score)", "v1 = fold['exp'](score)", "v2 = fold['mul'](v0, v1)")
    assert emit([expr], SCALARS).results == ("v2",)


def test_what_a_language_lacks_is_decomposed():
    few = {name: SCALARS.ops[name] for name in ("add", "sub", "mul", "div", "exp", "log", "where", "lt", "eq", "or", "le", "abs", "neg")}
    spelling = replace(SCALARS, ops=few)
    lines = emit([apply("tanh", SCORE), apply("log1p", SCORE)], spelling).lines
    assert all(name in few for line in lines for name in [line.split("'")[1]])


def test_an_operation_without_a_decomposition_is_named():
    with pytest.raises(UnsupportedOperation, match="operation 'erf' has neither a spelling in this language nor a decomposition"):
        emit([apply("erf", SCORE)], replace(SCALARS, ops={}))
    with pytest.raises(UnsupportedOperation, match="operation 'exp'"):  # exp and exp2 have only each other
        emit([apply("exp", SCORE)], replace(SCALARS, ops={"mul": "({0} * {1})"}))


def test_a_speller_sees_types():
    spelling = replace(SCALARS, ops={**SCALARS.ops, "min": lambda e, args: f"{'fmin' if e.dtype is F else 'min'}({', '.join(args)})"})
    assert emit([apply("min", SCORE, 2.0), apply("min", q, kv)], spelling).lines == ("v0 = fmin(score, 2.0)", "v1 = min(q_idx, kv_idx)")


# Eager ---------------------------------------------------------------------------------------------------------------------


def test_deep_expressions_compile():
    expr = SCORE
    for i in range(3000):
        expr = apply("add", apply("mul", expr, 0.5), load(0, (HEAD,), F)) if i % 2 else apply("tanh", expr)
    env = environment()
    value = env.variables["score"]
    wanted = value
    for i in range(3000):
        wanted = wanted * 0.5 + env.captures[0][:, None, None] if i % 2 else wanted.tanh()
    torch.testing.assert_close(evaluate([expr], env)[0], wanted)
    assert simplify(expr).dtype is F


def test_compiled_once():
    expr = apply("add", SCORE, 41.5)
    evaluate([expr], environment())
    before = _compiled.cache_info()
    evaluate([apply("add", SCORE, 41.5)], environment(1))
    after = _compiled.cache_info()
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)
    assert after.maxsize


def test_a_dot_of_rows_makes_no_product_of_all_elements():
    n, width = 512, 64
    left, right = torch.randn(n, width), torch.randn(n, width)
    expr = reduce("sum", 0, apply("mul", load(0, (q, axis(0)), F), load(1, (kv, axis(0)), F)), size(0, 1))
    env = Env({"q_idx": torch.arange(n)[:, None], "kv_idx": torch.arange(n)}, (left, right))
    with torch.profiler.profile(profile_memory=True) as profile:
        actual = evaluate([expr], env)[0]
    most = max(event.self_cpu_memory_usage for event in profile.events())
    assert most < n * n * width  # bytes; the product would be four times that
    torch.testing.assert_close(actual, left @ right.T, rtol=1e-4, atol=1e-4)


def test_a_body_that_does_not_read_its_axis():
    env = environment()
    times = evaluate([reduce("sum", 0, SCORE, size(4, 1)), reduce("sum", 0, const(1.5), size(4, 1))], env)
    torch.testing.assert_close(times[0], env.variables["score"] * 4)
    assert times[1] == 6.0


def test_numbers_become_tensors_of_the_right_type():
    values = evaluate([const(True), const(3), const(0.1), param(0, F), apply("add", param(0, INT), 2**40), size(4, 0)], environment())
    assert [v.dtype for v in values] == [torch.bool, torch.int32, torch.float64, torch.float64, torch.int64, torch.int32]
    assert values[2].item() == 0.1
    assert values[4].item() == 3 + 2**40


IN_TORCH = {
    "floordiv": "floor_divide",
    "mod": "remainder",
    "min": "minimum",
    "max": "maximum",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "not": "bitwise_not",
    "shl": "bitwise_left_shift",
    "shr": "bitwise_right_shift",
}


@pytest.mark.parametrize("name", sorted(OPS))
def test_numbers_alone(name):
    # every operation of run-time numbers only: no operand is a tensor
    arity = OPS[name].arity
    kind = F if OPS[name].typing.name in ("FLOATING", "PREDICATE", "ARITHMETIC", "COMPARISON", "SELECT") else INT
    args = [param(i % 2, kind) for i in range(arity)]
    if name == "where":
        args[0] = const(True)
    typed = apply(name, *args)
    env = environment()
    value = evaluate([node(name, typed.args, typed.dtype)], env)[0]
    numbers = env.floats if kind is F else env.ints
    wanted = [torch.tensor(numbers[i % 2], dtype=torch.float64 if kind is F else torch.int32) for i in range(arity)]
    if name == "where":
        wanted[0] = torch.tensor(True)
    torch.testing.assert_close(value, getattr(torch, IN_TORCH.get(name, name))(*wanted), equal_nan=True)


DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_captured_tensors_of_every_dtype(dtype):
    table = torch.tensor([0, 1, 2, 100]).to(dtype)
    kind = T if dtype is torch.bool else L if dtype is torch.int64 else F if dtype.is_floating_point else INT
    value = evaluate([load(0, (q,), kind)], Env({"q_idx": torch.tensor([3, -3, 2])}, (table,)))[0]
    assert value.dtype is {T: torch.bool, L: torch.int64, F: torch.float32, INT: torch.int32}[kind]
    assert value.tolist() == table[[3, 1, 2]].to(value.dtype).tolist()


def test_captured_numbers_without_dimensions():
    assert evaluate([apply("mul", SCORE, load(0, (), F))], Env({"score": torch.ones(2)}, (torch.tensor(3.0),)))[0].tolist() == [3.0, 3.0]


def test_a_computed_index_is_kept_inside_its_tensor():
    # what it reads beyond is masked: table[q - kv] of a causal mask
    table = torch.arange(3.0)
    env = Env({"q_idx": torch.arange(8)[:, None], "kv_idx": torch.tensor([0, 7])}, (table,))
    value = evaluate([load(0, (apply("sub", q, kv),), F)], env)[0]
    assert value[:, 0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2]
    assert value[:, 1].tolist() == [0, 0, 0, 0, 0, 1, 2, 0]


def test_a_coordinate_beyond_a_captured_tensor_is_an_error():
    with pytest.raises(IndexError):
        evaluate([load(0, (q,), F)], Env({"q_idx": torch.tensor([4])}, (torch.zeros(4),)))


def test_evaluation_under_autograd_vmap_and_forward_mode():
    expr = apply("mul", apply("max", SCORE, 0.25), load(0, (HEAD,), F))
    h = torch.arange(3)
    slopes = torch.tensor([1.0, 2.0, 3.0])

    def function(score):
        return evaluate([expr], Env({"score": score, "h": h}, (slopes,)))[0]

    score = torch.tensor([0.0, 1.0, 2.0])
    assert torch.func.vmap(function)(score.expand(2, 3)).tolist() == [[0.25, 2.0, 6.0]] * 2
    assert torch.func.jvp(function, (score,), (torch.ones(3),))[1].tolist() == [0.0, 2.0, 3.0]
    assert torch.func.grad(lambda s: function(s).sum())(score).tolist() == [0.0, 2.0, 3.0]
    assert to_infix(expr) == "max(score, 0.25) * c0[h]"


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(golden())
