"""Each rule of `foci.ir.simplify`, alone: what it makes of an expression has the expression's values, special ones included.

Operands are all pairs of leaves, and many pairs of small expressions. Each result that a rule returns must come up, so that a new rule
without a case fails.
"""

import ast
import inspect
import itertools
import random
import sys

import pytest
import torch
from expressions import BATCH, COLUMN, FLOAT_ROW, INT_ROW, LOADS, OWN, ROW, SCORE, environment
from test_simplify import same

from foci.ir import simplify as module
from foci.ir.eager import Env, evaluate
from foci.ir.expr import DType, axis, const, load, node, param, reduce, size
from foci.ir.ops import OPS, apply, cast, round_to
from foci.ir.rewrite import rebuild
from foci.ir.simplify import simplify
from foci.ir.text import to_infix
from foci.ir.trace import Tracer

SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 3.0, 1e30, -1e-30, float("inf"), float("-inf"), float("nan"))
RULES = module._RULES
CAPTURED = {"table": torch.tensor([0.5, -1.0, 2.0, 0.0]), "rows": torch.tensor([[1.0], [-2.0], [0.0], [3.0]])}


def written(text):
    """The expression that a row's text is, of operands in canonical form, and its captured tensors."""
    tracer = Tracer(torch.device("cpu"))
    function = eval(f"lambda s, b, h, q, kv: {text}", {"torch": torch, **CAPTURED})
    e = tracer.trace(function, ("score", "b", "h", "q_idx", "kv_idx"))
    return rebuild(e, tuple(simplify(arg) for arg in e.args)), tracer.tensors


def texts(part):
    return [pytest.param(rule, text, id=text) for rule in module.RULES for text in getattr(rule, part)]


@pytest.mark.parametrize(("rule", "text"), texts("examples"))
def test_an_example_changes_and_keeps_its_values(rule, text):
    e, tensors = written(text)
    simpler = rule.function(e)
    assert e.op in rule.names
    assert simpler is not None and simpler is not e
    draw = torch.Generator().manual_seed(0)
    score = torch.cat((torch.tensor(SPECIAL), torch.randn(19, generator=draw))).view(2, 1, 4, 4)
    at = torch.arange(4)
    positions = {"b": at[:2].view(2, 1, 1, 1), "h": at[:1].view(1, 1, 1, 1), "q_idx": at[:, None], "kv_idx": at}
    before, after = evaluate((e, simpler), Env({"score": score, **positions}, tuple(tensors)))
    assert same(before, after), f"{to_infix(e)}  ->  {to_infix(simpler)}"


@pytest.mark.parametrize(("rule", "text"), texts("counterexamples"))
def test_what_looks_like_an_example_stays(rule, text):
    e, _ = written(text)
    assert e.op in rule.names
    assert rule.function(e) in (None, e)


def test_every_row_has_its_parts():
    assert all(rule.names and rule.meaning and rule.examples and rule.counterexamples for rule in module.RULES)


def special_environment(seed):
    """Random values, one in three special."""
    env, draw = environment(seed), random.Random(seed)
    for tensor in (env.variables["score"], env.captures[0], env.captures[1]):
        for number in range(tensor.numel()):
            if draw.random() < 1 / 3:
                tensor.view(-1)[number] = draw.choice(SPECIAL)
    return env


ENVIRONMENTS = [special_environment(seed) for seed in range(2)]
NUMBERS = [const(value) for value in (0.0, 1.0, -1.0, 2.0, 0.25, 3.0)]
LEAVES = {
    DType.FLOAT: [SCORE, LOADS["h"], LOADS["bq"], param(0, DType.FLOAT), *NUMBERS],
    DType.INT32: [ROW, COLUMN, LOADS["int"], *(const(value) for value in (0, 1, -1, 2, 4))],
    DType.INT64: [LOADS["wide"], cast(ROW, DType.INT64), param(0, DType.INT64), size(4, 1)],
    DType.BOOL: [LOADS["bool"], apply("lt", ROW, COLUMN), apply("lt", SCORE, 0.5), const(True), const(False)],
}


def small(dtype):
    """Expressions of one operation."""
    leaves = LEAVES[dtype]
    condition = LEAVES[DType.BOOL][0]
    expressions = [apply("where", condition, a, b) for a, b in itertools.product(leaves[:3] + leaves[-2:], repeat=2)]
    expressions += [apply("not", a) for a in leaves] if dtype is not DType.FLOAT else []
    if dtype is DType.BOOL:
        expressions += [apply(name, a, b) for name in ("eq", "ne", "lt", "le") for kind in LEAVES for a, b in pairs(LEAVES[kind], 6)]
        return expressions + [apply(name, a, b) for name in ("and", "or", "xor") for a, b in itertools.product(leaves, repeat=2)]
    expressions += [apply(name, a) for name in ("neg", "abs") for a in leaves]
    expressions += [apply(name, a, b) for name in ("add", "sub", "mul", "min", "max") for a, b in pairs(leaves, 8)]
    expressions += [cast(a, dtype) for kind in LEAVES if kind is not DType.FLOAT for a in LEAVES[kind]]
    if dtype is DType.FLOAT:
        expressions += [apply("mul", a, 3.0) for a in leaves[:4]]
        expressions += [apply(name, a) for name in ("floor", "ceil", "round", "trunc") for a in leaves]
        return expressions + [round_to(a, torch.float16) for a in leaves]
    return expressions + [apply(name, a, n) for name in ("mod", "floordiv") for a in leaves for n in (1, 2, 3, -2)]


def pairs(items, count):
    return random.Random(0).sample([*itertools.product(items, repeat=2)], min(count, len(items) ** 2))


POOL = {dtype: [*dict.fromkeys(map(simplify, leaves + small(dtype)))] for dtype, leaves in LEAVES.items()}


def operands_of(name, draw):
    """Operands for an operation, canonical ones: all pairs of leaves, and drawn ones."""
    width = OPS[name].arity if name in OPS else 1
    for dtype in POOL:
        kinds = [DType.BOOL, dtype, dtype] if name == "where" else [dtype] * width
        yield from itertools.product(*(LEAVES[kind] for kind in kinds))
        for _ in range(600):
            yield tuple(draw.choice(POOL[kind]) for kind in kinds)
        for _ in range(100):  # two that are one, and one that holds the other
            first = draw.choice(POOL[kinds[-1]])
            yield (*(draw.choice(POOL[kind]) for kind in kinds[:-2]), *(first,) * min(width, 2))


def cases(name):
    """Expressions of an operation, whose operands are canonical."""
    draw = random.Random(name)
    everything = [e for dtype in POOL for e in POOL[dtype]]
    if name == "cast":
        for e in everything:
            yield from (node("cast", (e,), dtype) for dtype in DType if dtype is not e.dtype)
    elif name == "round_to":
        yield from (round_to(e, dtype) for e in POOL[DType.FLOAT] for dtype in (torch.float16, torch.bfloat16))
    elif name == "load":
        yield from (
            load(1, (cast(BATCH, kind), cast(row, kind)), DType.FLOAT) for kind in (DType.INT32, DType.INT64) for row in (ROW, const(2))
        )
    elif name == "reduce":
        bodies = [FLOAT_ROW, apply("mul", FLOAT_ROW, SCORE), cast(INT_ROW, DType.FLOAT), const(2.0)]
        yield from (
            reduce(kind, OWN, body, extent) for kind in ("sum", "max", "min") for body in bodies for extent in (const(1), size(4, 1))
        )
        truths = [apply("lt", FLOAT_ROW, 0.0), LOADS["bool"], const(True), const(False), apply("lt", axis(OWN), ROW)]
        yield from (reduce(kind, OWN, body, extent) for kind in ("any", "all") for body in truths for extent in (const(1), size(4, 1)))
    else:
        for operands in operands_of(name, draw):
            try:
                yield apply(name, *operands)
            except (TypeError, ValueError, OverflowError, ZeroDivisionError):  # the operation is not for this dtype
                continue
        if name in ("and", "or"):  # constants that no operation has folded
            yield from (node(name, (const(value),) * 2, DType.BOOL) for value in (True, False))


SEEN: set[int] = set()
"""Lines of the module that ran."""


def watched(rule, e):
    """What a rule makes of an expression; notes the lines that ran."""

    def trace(frame, event, _):
        if frame.f_code.co_filename != module.__file__:
            return None
        SEEN.add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return rule(e)
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_keeps_values(name):
    count = 0
    for e in dict.fromkeys(e for e in cases(name) if e.op == name):
        simpler = watched(RULES[name], e)
        if simpler is None or simpler is e:
            continue
        count += 1
        assert simpler.dtype is e.dtype, f"{to_infix(e)}  ->  {to_infix(simpler)}"
        for env in ENVIRONMENTS:
            before, after = evaluate((e, simpler), env)
            assert same(before, after), f"{to_infix(e)}  ->  {to_infix(simpler)}"
    assert count, f"no case of {name}"


def test_each_result_of_a_rule_came_up():
    for name in RULES:
        for e in cases(name):
            if e.op == name:
                watched(RULES[name], e)
    tree = ast.parse(inspect.getsource(module))
    rules = {rule.__name__ for rule in RULES.values()} | {"_chain", "_of_truth", "_bool_comparison"}
    returns = [
        node.lineno
        for function in tree.body
        if isinstance(function, ast.FunctionDef) and function.name in rules
        for node in ast.walk(function)
        if isinstance(node, ast.Return)
    ]
    lines = inspect.getsource(module).splitlines()
    assert [f"{number}: {lines[number - 1].strip()}" for number in returns if number not in SEEN] == []
