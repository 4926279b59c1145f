"""Each rule that moves or computes elements, on an example, against torch; and what no rule may claim to know."""

# FUSE-03

import math

import pytest
import torch
import torch.nn.functional as F
from spelling_harness import graph_of
from torch import fx

from foci.fusion.functionalize import without_writes
from foci.fusion.fx_utils import source_location
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


def dynamo_graph_of(function, tensor):
    """The same as Dynamo makes it, with what the function creates itself."""
    torch._dynamo.reset()
    found = []

    def keep(module, inputs):
        found.append(module)
        return module.forward

    # one length: it only makes a graph
    torch.compile(lambda x: (function(x), x.sum())[0], backend=keep, fullgraph=True)(tensor)
    return found[0]


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
    """The lifted elements equal torch's; `captured` are the names of what is read besides the inputs."""
    module = dynamo_graph_of(function, *tensors) if dynamo else graph_of(function, *tensors)
    expr, lift = lifted(module)
    values = dict(zip((n for n in module.graph.nodes if n.op == "placeholder"), tensors))
    others = {leaf for leaf in lift.leaves.values() if leaf not in values}
    assert {n.name for n in others} == set(captured or ()), others
    for leaf in others:
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
VIEWS = {
    "view": lambda x: x.view(2, 12, 6),
    "view of parts": lambda x: x.view(6, 4, 2, 3),
    "view that merges and splits": lambda x: x.view(2, 12, 6).view(2, 3, 4, 6),
    "flatten": lambda x: torch.flatten(x, 1, 2),
    "unflatten": lambda x: x[0].unflatten(-1, (2, 3)),
    "reshape of transposed": lambda x: x.transpose(1, 2).reshape(2, 4, 18),
    "transpose": lambda x: x.transpose(-1, 1),
    "swapaxes": lambda x: x.swapaxes(0, 2),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "permute of a list": lambda x: torch.permute(x, [3, 2, 1, 0]),
    "movedim": lambda x: x.movedim(1, -1),
    "T": lambda x: x[0, 0].T,
    "mT": lambda x: x.mT,
    "t": lambda x: x[0, 1].t(),
    "unsqueeze": lambda x: x[0].unsqueeze(1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "squeeze all": lambda x: x[:1, :1].squeeze(),
    "expand": lambda x: x[:, :1].expand(2, 5, 4, 6),
    "expand by -1": lambda x: x[:, :1].expand(-1, 5, -1, -1),
    "broadcast_to": lambda x: torch.broadcast_to(x[0], (2, 3, 4, 6)),
    "repeat": lambda x: x[0].repeat(2, 1, 2),
    "tile": lambda x: x[0, 0].tile(2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1),
    "repeat_kv": lambda x: x[:, :, None].expand(2, 3, 2, 4, 6).reshape(2, 6, 4, 6),
    "select": lambda x: x.select(1, -1),
    "narrow": lambda x: x.narrow(2, 1, 2),
    "slice": lambda x: x[:, 1:, ::2],
    "slice from the end": lambda x: x[..., -3:],
    "slice to the end": lambda x: x[:, :, :-1],
    "None and ellipsis": lambda x: x[0, None, ..., 2],
    "integer": lambda x: x[:, 1],
    "split": lambda x: x.split(2, dim=3)[1],
    "chunk": lambda x: x.chunk(3, dim=-1)[2],
    "unbind": lambda x: x.unbind(1)[2],
    "flip": lambda x: x.flip(-1),
    "diagonal": lambda x: x[0].diagonal(dim1=0, dim2=1),
    "contiguous": lambda x: x.mT.contiguous(),
    "clone": lambda x: x.clone(),
    "a grid's columns": lambda x: torch.meshgrid(x[0, 0, 0], x[0, 1, :, 0], indexing="ij")[1],
    "a grid of coordinates": lambda x: torch.meshgrid(x[0, 0, 0], x[0, 1, :, 0], indexing="xy")[0],
    "a grid of three": lambda x: torch.meshgrid([x[0, 0, 0], x[0, 1, :, 0], x[:, 0, 0, 0]], indexing="xy")[1],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_moves_the_index(name):
    check(VIEWS[name], X)


GATHERS = {
    "gather": lambda x, i: torch.gather(x[0, 0], 1, i[None].expand(4, 4)),
    "take_along_dim": lambda x, i: torch.take_along_dim(x[0, 0], i[None], 1),
    "index_select": lambda x, i: x.index_select(2, i),
    "embedding": lambda x, i: F.embedding(i, x[0, 0]),
    "indexing": lambda x, i: x[0, :, i],
    "indexing by two": lambda x, i: x[0, 0][i[:, None], i[None]],
    "indexing apart": lambda x, i: x[0][i, :, i],
}


@pytest.mark.parametrize("name", GATHERS)
def test_a_gather_reads_at_an_index(name):
    check(GATHERS[name], X, ROWS)


MADE = {
    "causal by comparison": lambda x: torch.arange(4)[:, None] >= torch.arange(6),
    "tril": lambda x: torch.tril(torch.ones(4, 6)),
    "triu": lambda x: torch.triu(torch.full((4, 6), 7.0), 2),
    "eye": lambda x: torch.eye(4),
    "arange with a step": lambda x: torch.arange(1, 12, 2)[None] - torch.arange(4)[:, None],
    "zeros_like": lambda x: torch.zeros_like(x),
    "new_full": lambda x: x.new_full((4, 6), 3.0),
    "differences": lambda x: torch.diff(torch.arange(4) * 3, prepend=torch.zeros(1, dtype=torch.int64))[:, None] + torch.zeros(6),
    "sums of nothing": lambda x: (torch.diff(torch.arange(6)[None], prepend=torch.arange(6)[None, :1] - 1) != 1).cumsum(-1),
    "padded": lambda x: F.pad(x, (1, 2, 0, 1), value=5.0),
    "concatenated": lambda x: torch.cat([x, x * 2], dim=-1),
    "clamped": lambda x: x.clamp(-0.5, 0.5),
    "lowest of float16": lambda x: torch.where(x > 0, x, torch.finfo(torch.float32).min).to(torch.float16).isinf(),
    "filled": lambda x: x.masked_fill(x > 0, -1.0),
    "where as a method": lambda x: x.where(x > 0, -x),
    "rsub": lambda x: 1.0 - x.bool().float(),
    "subtracted from a number": lambda x: torch.rsub(x, 2.0),
    "no dropout": lambda x: F.dropout(x, 0.5, training=False),
}


@pytest.mark.parametrize("name", MADE)
def test_what_a_graph_makes_is_an_expression(name):
    check(MADE[name], X, dynamo=True)


CAPTURED = {
    "a product": (lambda x: (x @ x.mT) * 2, {"matmul"}),
    "a view that does not line up": (lambda x: x.reshape(8, 18) * 1, {"reshape"}),
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
    found = masked(score)
    assert found.mask is simplify(mask)
    assert found.uniform is uniform


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
    found = masked(score)
    assert found.mask is ir.const(True)
    assert not found.uniform


def test_a_constant_factor_of_every_score_is_the_scale():
    assert leading_scale(apply("add", apply("mul", S, 0.25), KV)) == (apply("add", S, KV), 0.25)
    assert leading_scale(apply("div", S, 3.0))[1] == pytest.approx(1 / 3)


def test_two_factors_are_no_scale():
    score = apply("add", apply("mul", S, 0.25), apply("mul", S, apply("mul", S, 0.5)))
    assert leading_scale(score) == (score, 1.0)


PRODUCTS = {
    "matmul": (lambda a, b: torch.matmul(a, b.mT), ("m",), ("n",), 2),
    "operator": (lambda a, b: a @ b.mT, ("m",), ("n",), 2),
    "einsum": (lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b), ("q",), ("k",), 2),
    "einsum with dots": (lambda a, b: torch.einsum("...qd, ...kd -> ...qk", a, b), ("q",), ("k",), 2),
    "einsum, heads last": (lambda a, b: torch.einsum("bhqd,bhkd->bqkh", a, b), ("q",), ("k",), 2),
    "bmm": (lambda a, b: torch.bmm(a[0], b[0].mT), ("m",), ("n",), 1),
    "baddbmm": (lambda a, b: torch.baddbmm(a[0] @ b[0].mT, a[0], b[0].mT, beta=0, alpha=0.5), ("m",), ("n",), 1),
    "linear": (lambda a, b: F.linear(a[0, 0], b[0, 0]), ("m0",), ("n",), 0),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_have_rows_columns_and_shared_dimensions(name):
    function, rows, columns, shared = PRODUCTS[name]
    product = as_product(result_of(graph_of(function, X, X)))
    assert (product.only(0), product.only(1), len(product.shared), len(product.summed)) == (rows, columns, shared, 1)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: torch.einsum("bhqd,bhkd->bqk", a, b),  # sums over the heads, too: still a product, of other labels
        lambda a, b: torch.einsum("bhqd,bhqd,bhqd->bhq", a, b, a),
        lambda a, b: torch.einsum("bhqd,bhkd->bhq", a, b),
        lambda a, b: torch.mv(a[0, 0], b[0, 0, 0]),
        lambda a, b: F.linear(a, b[0, 0], b[0, 0, :, 0]),
    ],
)
def test_what_is_no_plain_product(function):
    product = as_product(result_of(graph_of(function, X, X)))
    assert product is None or len(product.summed) != 1


SOFTMAXES = {
    "function": lambda x: F.softmax(x, dim=-1),
    "method": lambda x: x.softmax(3),
    "torch": lambda x: torch.softmax(x, dim=-1, dtype=torch.float64),
    "logarithm": lambda x: torch.log_softmax(x, -1).exp(),
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_spellings_of_softmax(name):
    module = graph_of(SOFTMAXES[name], X)
    softmax = as_softmax(result_of(module))
    assert (softmax.dim, softmax.source.op) == (3, "placeholder")


def test_what_is_no_softmax():
    assert as_softmax(result_of(graph_of(lambda x: x.sigmoid(), X))) is None


def names(module):
    return [str(n.target) for n in module.graph.nodes if n.op == "call_method"]


def test_a_write_of_a_value_of_its_own_is_an_operation():
    def function(x):
        y = x * 2
        y.masked_fill_(x > 0, 0.0)
        return y + 1

    module = graph_of(function, X)
    without_writes(module.graph, None)
    module.recompile()
    assert names(module) == ["masked_fill"]
    torch.testing.assert_close(module(X), function(X))


@pytest.mark.parametrize("name", ["add_", "sub_", "mul_", "div_"])
def test_a_write_rounds_to_the_dtype_that_is_written(name):
    def function(x):
        y = (x * 2).half()
        z = getattr(y, name)(x.exp())
        return y + z

    module = graph_of(function, X)
    without_writes(module.graph, None)
    module.recompile()
    assert names(module) == ["half", "exp", name[:-1], "to"]
    found, expected = module(X), function(X)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["an input", "a view read later", "another dtype"])
def test_a_write_that_somebody_may_see_stays(kind):
    def function(x):
        if kind == "an input":
            return x.mul_(2) + 1
        y = x * 2
        if kind == "another dtype":
            return y.half().pow_(y) + 1
        view = y.view(24, 6)
        y.mul_(2)
        return view + 1

    module = graph_of(function, X.clone())
    without_writes(module.graph, None)
    assert [n for n in names(module) if n.endswith("_")], module.code


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
    found = []

    def keep(module, inputs):
        found.extend(source_location(n) for n in module.graph.nodes if n.op == "call_function")
        return module.forward

    # one length: it only makes a graph
    torch.compile(lambda x: torch.softmax(x, -1), backend=keep)(X)
    assert found
    assert all("test_rules.py:" in place for place in found)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.bfloat16], ids=str)
def test_ones_are_counted_where_counting_is_exact(dtype):
    """bfloat16 stops at 256."""

    def count(x):
        return torch.ones(2, 300, dtype=dtype).cumsum(-1) + x

    check(count, torch.zeros(2, 300), captured=["cumsum"] if dtype == torch.bfloat16 else None, dynamo=True)


LABELLED = {
    "addmm": lambda a, b: torch.addmm(a[:1, :1], a, b.t(), beta=0.5, alpha=2),
    "inner": lambda a, b: torch.inner(a[None], b),
    "tensordot": lambda a, b: torch.tensordot(a.t(), b, ([0], [1])),
    "tensordot of two": lambda a, b: torch.tensordot(a.view(4, 2, 3), b.view(5, 2, 3), ([1, 2], [1, 2])),
    "tensordot of the last": lambda a, b: torch.tensordot(a, b.t(), 1),
    "sums": lambda a, b: (a[:, None] * b[None]).sum(-1),
    "sums over the first": lambda a, b: (a.t()[:, :, None] * b.t()[:, None]).sum(0),
}


@pytest.mark.parametrize("name", LABELLED)
def test_products_by_their_labels(name):
    """What the labels say, summed by einsum, is what the node makes."""
    a, b = torch.randn(4, 6), torch.randn(5, 6)
    module = graph_of(LABELLED[name], a, b)
    product = as_product(result_of(module))
    letters = {label: chr(ord("a") + n) for n, label in enumerate(dict.fromkeys((*product.labels[0], *product.labels[1])))}
    operands = [run_to(module, node, (a, b)) for node in product.operands]
    operands = [t.reshape([n for n, label in zip(t.shape, labels) if label]) for t, labels in zip(operands, product.labels)]
    texts = ["".join(letters[label] for label in labels if label) for labels in product.labels]
    made = product.alpha * torch.einsum(f"{texts[0]},{texts[1]}->{''.join(letters[label] for label in product.out)}", *operands)
    if product.addend is not None:
        made = made + product.beta * run_to(module, product.addend, (a, b))
    torch.testing.assert_close(made, LABELLED[name](a, b))


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (a * a).sum(-1),
        lambda a, b: (a[:, None] * b[None]).sum(-1, keepdim=True),
        lambda a, b: (a[:, None] * b[None]).sum(),
        lambda a, b: (a[:, None] * b[None]).sum((0, 2)),
        lambda a, b: (a[:, None] * b[None]).sum(0),
        lambda a, b: (a[:, None] + b[None]).sum(-1),
    ],
)
def test_sums_that_are_no_products(function):
    assert as_product(result_of(graph_of(function, torch.randn(4, 6), torch.randn(5, 6)))) is None
