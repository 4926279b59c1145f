"""Every row of the tables by which graphs are read: its examples are read, and equal torch's; its counter-examples are left alone."""

# FUSE-03

import inspect
import math
import re

import pytest
import torch
import torch.nn.functional as F
from fusing import fused, learned, qkv, reasons
from spelling_harness import dynamo_graph_of, graph_of
from torch import fx

from foci.fusion import concat_scores, constructors, functionalize, products, views, weights
from foci.fusion.concat_scores import join_products
from foci.fusion.emit import Sizes
from foci.fusion.fx_utils import as_call, source_location
from foci.fusion.indices import Digit, NoRule, regroup
from foci.fusion.masking import leading_scale, masked
from foci.fusion.products import as_product
from foci.fusion.symbolic_element import Lift
from foci.fusion.weights import as_softmax
from foci.ir import expr as ir
from foci.ir.eager import Env, evaluate
from foci.ir.ops import apply
from foci.ir.simplify import simplify

NAMES = ("b", "h", "q_idx", "kv_idx")
ITSELF = object()


def result_of(module):
    result = next(n for n in module.graph.nodes if n.op == "output").args[0]
    return result[0] if isinstance(result, tuple) else result


def lifted(module, *, grad=False):
    """The expression of each element of the result, and the lift that holds what it captured."""
    node = result_of(module)
    shape = node.meta["example_value"].shape
    lift = Lift(torch.device("cpu"), lambda n, i: None, frozenset(), grad=grad)
    index = tuple(() if n == 1 else (Digit(ir.variable(name), n),) for n, name in zip(shape, NAMES[4 - len(shape) :]))
    return lift.element(node, index), lift


def check(function, *tensors, captured=None, dynamo=False):
    """The graph, whose lifted elements equal torch's; `captured` are the names of what is read besides the inputs: `ITSELF`
    is the result, which no rule took."""
    module = dynamo_graph_of(function, *tensors) if dynamo else graph_of(function, *tensors)
    expr, lift = lifted(module)
    values = dict(zip((n for n in module.graph.nodes if n.op == "placeholder"), tensors))
    captured_leaves = {leaf for leaf in lift.leaves.values() if leaf not in values}
    wanted = {result_of(module).name} if captured is ITSELF else set(captured or ())
    assert {n.name for n in captured_leaves} == wanted, captured_leaves
    for leaf in captured_leaves:
        values[leaf] = run_to(module, leaf, tensors)
    want = function(*tensors)
    variables = {}
    for n, name in zip(want.shape, NAMES[4 - want.dim() :]):
        position = torch.arange(n)
        variables[name] = position.view([n if other == name else 1 for other in NAMES])
    for name in NAMES:
        variables.setdefault(name, torch.zeros(1, 1, 1, 1, dtype=torch.int64))
    env = Env(variables, tuple(values[lift.leaves[slot]] for slot in sorted(lift.leaves)))
    (got,) = evaluate((expr,), env)
    full = got.expand((1,) * (4 - want.dim()) + tuple(want.shape)).reshape(want.shape)
    torch.testing.assert_close(full.to(want.dtype), want, rtol=0, atol=0, equal_nan=True)
    return module


def run_to(module, node, tensors):
    values = {}

    class Keep(fx.Interpreter):
        def run_node(self, n):
            values[n] = super().run_node(n)
            return values[n]

    Keep(module).run(*tensors)
    return values[node]


X = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(0))
ROWS = torch.tensor([2, 0, 1, 2])
INPUTS = {"x": X, "rows": ROWS}
READ = {"views": views.RULES, "pieces": views.PIECES, "constructors": constructors.RULES}


def texts(part, tables):
    """Each row's examples, or its counter-examples: those of a table may be read by one test."""
    return [pytest.param(rule, text, id=text) for table in tables for rule in READ[table] for text in getattr(rule, part)]


def function_of(text, inputs):
    """The expression of a row, as a function of those inputs that it names."""
    names = [name for name in inputs if re.search(rf"\b{name}\b", text)] or [next(iter(inputs))]
    return eval(f"lambda {', '.join(names)}: {text}", {"torch": torch, "F": F}), [inputs[name] for name in names]


def operations(module):
    return [call.name for n in module.graph.nodes if (call := as_call(n)) is not None]


@pytest.mark.parametrize(("rule", "text"), texts("examples", ["views", "pieces"]))
def test_a_view_moves_the_index(rule, text):
    function, tensors = function_of(text, INPUTS)
    assert set(operations(check(function, *tensors))) & set(rule.names)


@pytest.mark.parametrize(("rule", "text"), texts("examples", ["constructors"]))
def test_what_a_graph_makes_is_an_expression(rule, text):
    function, tensors = function_of(text, INPUTS)
    assert set(operations(check(function, *tensors, dynamo=True))) & set(rule.names)


@pytest.mark.parametrize(("rule", "text"), texts("counterexamples", READ))
def test_what_looks_like_an_example_is_captured(rule, text):
    function, tensors = function_of(text, INPUTS)
    check(function, *tensors, captured=ITSELF, dynamo=rule in constructors.RULES)


TABLES = {"views": views.VIEWS, "pieces": views._PIECES, "constructors": constructors.MAKERS}


@pytest.mark.parametrize(
    ("table", "rule", "text"), [pytest.param(table, *row.values, id=row.id) for table in READ for row in texts("counterexamples", [table])]
)
def test_what_looks_like_an_example_is_a_near_miss(table, rule, text, monkeypatch):
    """Were its operation the row's, the row would read it, as what it is not. Where it is, a condition of the row declines it."""
    function, tensors = function_of(text, INPUTS)
    is_made = rule in constructors.RULES
    node = result_of((dynamo_graph_of if is_made else graph_of)(function, *tensors))
    name = as_call(node.args[0] if table == "pieces" else node).name
    if name in rule.names:
        return
    monkeypatch.setitem(TABLES[table], name, rule.function)
    if rule.names == tuple(views.PARTS):
        monkeypatch.setitem(views.PARTS, name, 1)
    with pytest.raises(AssertionError):
        check(function, *tensors, captured=ITSELF, dynamo=is_made)


COMPUTED = {
    "clamped": lambda x: x.clamp(-0.5, 0.5),
    "lowest of float16": lambda x: torch.where(x > 0, x, torch.finfo(torch.float32).min).to(torch.float16).isinf(),
    "filled": lambda x: x.masked_fill(x > 0, -1.0),
    "where as a method": lambda x: x.where(x > 0, -x),
    "rsub": lambda x: 1.0 - x.bool().float(),
    "subtracted from a number": lambda x: torch.rsub(x, 2.0),
    "no dropout": lambda x: F.dropout(x, 0.5, training=False),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_a_graph_computes_is_an_expression(name):
    check(COMPUTED[name], X, dynamo=True)


CAPTURED = {
    "a product": (lambda x: (x @ x.mT) * 2, {"matmul"}),
    "a sum": (lambda x: x.sum(1) + 1, {"sum_1"}),
    "a logarithm": (lambda x: x.abs().log() + 1, {"log"}),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_what_no_rule_knows_is_captured(name):
    function, captured = CAPTURED[name]
    check(function, X, captured=captured)


def test_a_value_without_gradient_is_captured_where_its_operands_have_one():
    module = graph_of(lambda x: x.detach() * 2, X.clone().requires_grad_())
    _, with_grad = lifted(module, grad=True)
    _, without = lifted(module, grad=False)
    assert [n.op for n in with_grad.leaves.values()] == ["call_method"]
    assert [n.op for n in without.leaves.values()] == ["placeholder"]


def atom(number, size):
    return Digit(ir.axis(-number), size)


def test_merged_digits_split_again_into_themselves():
    b, h, s = atom(1, 2), atom(2, 3), atom(3, 5)
    assert regroup(((b, h), (s,)), (6, 5), (2, 3, 5), ir.const) == ((b,), (h,), (s,))


def test_dimensions_that_do_not_line_up_have_no_rule():
    with pytest.raises(NoRule):
        regroup(((atom(1, 6),), (atom(2, 5),)), (6, 5), (10, 3), ir.const)


S, Q, KV, B = (ir.variable(n) for n in ("score", "q_idx", "kv_idx", "b"))
LOW = torch.finfo(torch.float32).min
CAUSAL = apply("le", KV, Q)
PADDING = ir.load(0, (B, KV), ir.DType.BOOL)


@pytest.mark.parametrize(
    ("score", "mask", "uniform"),
    [
        (apply("where", CAUSAL, S, -math.inf), CAUSAL, False),
        (apply("where", CAUSAL, S, LOW), CAUSAL, False),
        (apply("where", PADDING, S, LOW), PADDING, True),
        (apply("where", PADDING, S, -math.inf), PADDING, False),
        (apply("add", S, apply("where", PADDING, 0.0, LOW)), PADDING, True),
        (apply("add", S, apply("mul", apply("sub", 1.0, apply("where", PADDING, 1.0, 0.0)), LOW)), PADDING, True),
        (apply("max", apply("where", PADDING, S, LOW), LOW), PADDING, True),
        (apply("mul", apply("where", PADDING, S, LOW), 0.5), PADDING, True),
        (apply("where", apply("and", CAUSAL, apply("le", 0, Q)), S, -math.inf), CAUSAL, False),
    ],
)
def test_lowest_scores_become_a_mask(score, mask, uniform):
    result = masked(score)
    assert result.mask is simplify(mask)
    assert result.uniform is uniform


@pytest.mark.parametrize(
    "score",
    [
        apply("where", PADDING, S, -1e4),  # scores may come near
        apply("add", apply("where", CAUSAL, S, LOW), apply("where", PADDING, 0.0, LOW)),  # two levels: -inf and lowest
        apply("where", apply("lt", S, 0.0), LOW, S),  # by the score
        apply("tanh", apply("where", PADDING, S, LOW)),
    ],
)
def test_other_scores_stay_scores(score):
    result = masked(score)
    assert result.mask is ir.const(True)
    assert not result.uniform


def test_a_constant_factor_of_every_score_is_the_scale():
    assert leading_scale(apply("add", apply("mul", S, 0.25), KV)) == (apply("add", S, KV), 0.25)
    assert leading_scale(apply("div", S, 3.0))[1] == pytest.approx(1 / 3)


def test_two_factors_are_no_scale():
    score = apply("add", apply("mul", S, 0.25), apply("mul", S, apply("mul", S, 0.5)))
    assert leading_scale(score) == (score, 1.0)


A, Y = X, torch.randn(2, 3, 5, 6, generator=torch.Generator().manual_seed(1))
SIDES = {"a": A, "b": Y}


@pytest.mark.parametrize("text", [text for rule in products.RULES for text in rule.counterexamples])
def test_what_is_no_product(text):
    function, tensors = function_of(text, SIDES)
    assert as_product(result_of(graph_of(function, *tensors))) is None


def test_a_sum_over_heads_is_a_product_of_other_labels():
    product = as_product(result_of(graph_of(lambda a, b: torch.einsum("bhqd,bhkd->bqk", a, b), A, Y)))
    assert product.summed == ("h", "d")


@pytest.mark.parametrize("text", [text for rule in weights.SOFTMAX_RULES for text in rule.examples])
def test_spellings_of_softmax(text):
    function, tensors = function_of(text, INPUTS)
    softmax = as_softmax(result_of(graph_of(function, *tensors)))
    assert (softmax.dim, softmax.source.op) == (3, "placeholder")
    torch.testing.assert_close(function(X).to(X.dtype), X.softmax(3))


@pytest.mark.parametrize("text", [text for rule in weights.SOFTMAX_RULES for text in rule.counterexamples])
def test_what_is_no_softmax(text):
    function, tensors = function_of(text, INPUTS)
    assert as_softmax(result_of(graph_of(function, *tensors))) is None


def attention_through(text):
    """Attention whose weights go through an expression of a row."""
    function, _ = function_of(text, {"w": None, "q": None})
    reads_queries = "q" in inspect.signature(function).parameters

    def attend(q, k, v):
        weights = (q @ k.mT).softmax(-1)
        weights = function(weights, q) if reads_queries else function(weights)
        return weights @ (v if weights.dtype == v.dtype else v.to(weights.dtype))

    return attend


@pytest.mark.parametrize("text", [text for rule in weights.BETWEEN_RULES for text in rule.examples])
def test_what_may_stand_between_the_softmax_and_the_values(text):
    assert [site.fused for site in fused(attention_through(text), *learned(*qkv())).sites] == [True]


@pytest.mark.parametrize("text", [text for rule in weights.BETWEEN_RULES for text in rule.counterexamples])
def test_what_may_not_stand_there(text):
    backend = fused(attention_through(text), *learned(*qkv()))
    assert not any(site.fused for site in backend.sites)
    assert all(reasons(backend))


def summed(text):
    """The graph of an expression of two products, and the sums in it that became one product."""
    function, _ = function_of(text, {"s": None, "t": None})
    reads_both = len(inspect.signature(function).parameters) == 2
    tensors = [torch.randn(2, 3, 40, 4, generator=torch.Generator().manual_seed(n)) for n in range(4)]

    def compute(q, k, other_q, other_k):
        return function(q @ k.mT, other_q @ other_k.mT) if reads_both else function(q @ k.mT)

    module = graph_of(compute, *tensors)
    return (
        module,
        compute(*tensors),
        tensors,
        join_products(module.graph, list(reversed(module.graph.nodes))[1:], Sizes(module.graph), None),
    )


@pytest.mark.parametrize(("rule", "text"), [(rule, text) for rule in concat_scores.RULES for text in rule.examples])
def test_a_sum_of_products_becomes_one(rule, text):
    module, want, tensors, joined = summed(text)
    assert set(operations(module)) & set(rule.names)
    assert len(joined) == 1
    module.graph.eliminate_dead_code()
    module.recompile()
    assert sum(as_product(node) is not None for node in module.graph.nodes) == 1
    torch.testing.assert_close(module(*tensors), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", [text for rule in concat_scores.RULES for text in rule.counterexamples])
def test_other_sums_keep_their_products(text):
    *_, joined = summed(text)
    assert not joined


BY_NAME = {
    "two operands": lambda x: torch.sub(input=torch.mul(input=x, other=3.0), other=torch.ones(6)),
    "a multiple": lambda x: torch.add(input=x, other=torch.ones(6), alpha=2),
    "the larger": lambda x: torch.maximum(input=x, other=torch.zeros(())),
    "methods": lambda x: x.mul(other=3.0).masked_fill(mask=x > 0, value=1.0),
    "a choice": lambda x: torch.where(condition=x > 0, input=x, other=0.0),
    "a method's choice": lambda x: x.where(x > 0, other=0.0),
    "masked": lambda x: torch.masked_fill(input=x, mask=x > 0, value=1.0),
    "a function of one": lambda x: torch.relu(input=x),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_operands_by_name(name):
    check(BY_NAME[name], X, dynamo=True)


def test_locations_are_the_users():
    torch._dynamo.reset()
    locations = []

    def keep(module, inputs):
        locations.extend(source_location(n) for n in module.graph.nodes if n.op == "call_function")
        return module.forward

    # one length: it only makes a graph
    torch.compile(lambda x: torch.softmax(x, -1), backend=keep)(X)
    assert locations
    assert all("test_rules.py:" in place for place in locations)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.bfloat16], ids=str)
def test_ones_are_counted_where_counting_is_exact(dtype):
    """bfloat16 stops at 256."""

    def count(x):
        return torch.ones(2, 300, dtype=dtype).cumsum(-1) + x

    check(count, torch.zeros(2, 300), captured=["cumsum"] if dtype == torch.bfloat16 else None, dynamo=True)


@pytest.mark.parametrize(("rule", "text"), [pytest.param(rule, text, id=text) for rule in products.RULES for text in rule.examples])
def test_products_by_their_labels(rule, text):
    """What the labels say, summed by einsum, is what the node makes."""
    function, tensors = function_of(text, SIDES)
    module = graph_of(function, *tensors)
    node = result_of(module)
    product = as_product(node)
    assert as_call(node).name in rule.names
    assert all(product.only(side) for side in (0, 1))
    assert product.summed
    letters = {label: chr(ord("a") + n) for n, label in enumerate(dict.fromkeys((*product.labels[0], *product.labels[1])))}
    operands = [run_to(module, operand, tensors) for operand in product.operands]
    operands = [t.reshape([n for n, label in zip(t.shape, labels) if label]) for t, labels in zip(operands, product.labels)]
    equation = ["".join(letters[label] for label in labels if label) for labels in product.labels]
    actual = product.alpha * torch.einsum(f"{equation[0]},{equation[1]}->{''.join(letters[label] for label in product.out)}", *operands)
    if product.addend is not None:
        actual = actual + product.beta * run_to(module, product.addend, tensors)
    torch.testing.assert_close(actual, function(*tensors))


ALL = (
    *views.RULES, *views.PIECES, *constructors.RULES, *products.RULES, *weights.SOFTMAX_RULES, *weights.BETWEEN_RULES,
    *functionalize.WRITE_RULES, *functionalize.ROUNDING_RULES,
)  # fmt: skip


def test_every_row_has_its_parts():
    assert all(rule.names and rule.meaning and rule.examples and rule.counterexamples for rule in ALL)
    assert len({rule.meaning for rule in ALL}) == len(ALL)
