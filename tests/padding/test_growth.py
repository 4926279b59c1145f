"""Dims that grow inside graphs: values stay, sizes and strides that users see stay, products get good sizes."""

import pytest
import torch
import torch.nn.functional as F
from machines import Recorder, compiled, first_call_only, machine, other_sizes
from test_passes import run_both

from compiled import several


def grown(function, *inputs, on=None, **options):
    return run_both(function, *inputs, recorder=Recorder(on or machine(odd=3.0, bandwidth=1e16), grow=True), **options)


def grown_with_nan(function, *inputs, tolerance):
    """As `grown`, for results that have infinite and missing values; without gradients."""
    recorder = Recorder(machine(odd=3.0, bandwidth=1e16), grow=True)
    called = compiled(function, recorder)
    torch.testing.assert_close(called(*inputs), function(*inputs), equal_nan=True, **tolerance)
    with first_call_only(recorder):
        for other_inputs in other_sizes(inputs):
            torch.testing.assert_close(called(*other_inputs), function(*other_inputs), equal_nan=True, **tolerance)
    return recorder


def bad_lengths(recorder, itemsize=4):
    """Lengths of rows in products that are no multiple of 16 bytes."""
    rows = [size for operands in recorder.products() for sizes, strides in operands for size, stride in zip(sizes, strides) if stride == 1]
    return [size for size in rows if size * itemsize % 16 and size * itemsize >= 16]


# PAD-02
def test_linear_and_cross_entropy():
    layer, t = torch.nn.Linear(64, 2047), torch.randint(0, 2047, (256,))
    x = torch.randn(256, 64, requires_grad=True)
    recorder = grown(lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b), t), x, layer.weight, layer.bias, t)
    assert recorder.products() == [
        (((256, 64), (64, 1)), ((64, 2048), (1, 64))),
        (((256, 2048), (2048, 1)), ((2048, 64), (64, 1))),
        (((2048, 256), (1, 2048)), ((256, 64), (64, 1))),
    ]
    assert {padding.how for padding in recorder.paddings if padding.how} == {"in place", "copied"}
    # nothing is masked
    assert all(node.target is not torch.ops.aten.lt.Scalar for graph in recorder.graphs for node in graph.graph.nodes)
    # padded once for both passes
    assert sum(node.target is torch.ops.aten.constant_pad_nd.default for graph in recorder.graphs for node in graph.graph.nodes) == 2


# PAD-04
def test_infinite_and_missing_values_stay_in_their_rows():
    def loss(x, w, v):
        return torch.softmax(x @ w, 1) @ v

    x, w, v = torch.randn(64, 64), torch.randn(64, 1023), torch.randn(1023, 64)
    x[3], x[5, 1], w[:, 7], v[9] = float("nan"), float("inf"), float("-inf"), float("inf")
    recorder = grown_with_nan(loss, x, w, v, tolerance={})
    assert bad_lengths(recorder) == []


def masks(recorder):
    return [node for graph in recorder.graphs for node in graph.graph.nodes if node.target is torch.ops.aten.lt.Scalar]


def attend(q, k, v):
    return torch.softmax(q @ k.mT / 4, -1) @ v


def test_attention_of_odd_lengths():
    q, k, v = (torch.randn(4, 255, 16, requires_grad=True) for _ in range(3))
    recorder = grown(attend, q, k, v)
    assert bad_lengths(recorder) == []
    assert len(masks(recorder)) == 1  # of the scores, in front of the softmax; whatever follows has zeros behind it


# PAD-04
def test_gradients_of_attention_with_infinite_and_missing_values():
    inputs = [torch.randn(2, 255, 16, requires_grad=True) for _ in range(3)]
    with torch.no_grad():
        inputs[0][0, 3], inputs[0][1, 5, 2], inputs[2][0, 9] = float("nan"), float("inf"), float("inf")
    recorder = Recorder(machine(odd=3.0, bandwidth=1e16), grow=True)
    called = compiled(attend, recorder)

    def agree(inputs):
        got, expected = (torch.autograd.grad(f(*inputs).sum(), inputs) for f in (called, attend))
        for mine, theirs in zip(got, expected):
            torch.testing.assert_close(mine[theirs.isfinite()], theirs[theirs.isfinite()], rtol=1e-4, atol=1e-3)
            assert not mine[~theirs.isfinite()].isfinite().any()

    agree(inputs)
    assert bad_lengths(recorder) == []
    for other_inputs in other_sizes(inputs):
        agree(other_inputs)


# PAD-02
def test_layers_of_odd_widths():
    def model(x, a, b, c):
        return torch.tanh(F.gelu(x @ a) @ b) @ c

    inputs = [torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((64, 33), (33, 127), (127, 63), (63, 8))]
    assert bad_lengths(grown(model, *inputs), 8) == []


def test_products_one_after_another_mask_in_between():
    inputs = [torch.randn(*size, requires_grad=True) for size in ((64, 64), (64, 127), (127, 64))]
    assert bad_lengths(grown(lambda x, a, b: x @ a @ b, *inputs)) == []


def test_an_embedding_tied_to_the_last_layer():
    index, target = torch.randint(0, 2047, (8, 16)), torch.randint(0, 2047, (128,))

    def loss(w, b):
        return F.cross_entropy(F.linear(F.embedding(index, w).tanh().flatten(0, 1), w, b), target)

    assert bad_lengths(grown(loss, torch.randn(2047, 64, requires_grad=True), torch.zeros(2047, requires_grad=True))) == []


def test_copies_are_made_right_before_their_products():
    recorder = grown(lambda x, y, w: torch.softmax(x + y, 1) @ w, torch.randn(64, 127), torch.randn(64, 127), torch.randn(127, 64))
    (graph,) = recorder.graphs
    kinds = [getattr(node.target, "__name__", "").split(".")[0] for node in graph.graph.nodes]
    assert kinds.index("div") < len(kinds) - 1 - kinds[::-1].index("constant_pad_nd") < kinds.index("mm")


def test_what_the_user_sees_is_cut():
    def both(x, w):
        logits = x @ w.t()
        return logits, torch.log_softmax(logits, 1), logits.argmax(1), logits.sort(1).values[:, :5]

    recorder = grown(both, torch.randn(256, 64), torch.randn(2047, 64))
    assert bad_lengths(recorder) == []


def test_dropout_draws_what_it_would():
    def model(x, a, b):
        return F.dropout(x @ a, 0.5) @ b

    x, a, b = torch.randn(64, 64), torch.randn(64, 127), torch.randn(127, 64)
    results = []
    for recorder in (Recorder(machine(1.0)), Recorder(machine(odd=3.0, bandwidth=1e16), grow=True)):
        called = compiled(model, recorder)
        torch.manual_seed(0)
        results.append([called(x, a, b)])
        with first_call_only(recorder):
            results[-1] += [called(*other_inputs) for other_inputs in other_sizes((x, a, b))]
    torch.testing.assert_close(*results)
    assert bad_lengths(recorder) == []


def test_reductions_of_every_kind():
    def model(x, w):
        y = x @ w
        z = y.sin()
        return z.sum(), z.sum(1), z.amax(1), z.amin(0), z.mean(), z.var(1), z.prod(1), (z > 0).sum(1), z.logsumexp(0), z.cumsum(1)

    assert bad_lengths(grown(model, torch.randn(64, 64), torch.randn(64, 127))) == []


# PAD-06
@pytest.mark.parametrize("kind", ["forward", "training"])
def test_a_symbolic_batch(kind):
    recorder = Recorder(machine(odd=3.0, bandwidth=1e16), grow=True)
    torch._dynamo.reset()
    w = torch.randn(64, 2047, requires_grad=kind == "training")

    def loss(x):
        return (x @ w).logsumexp(1).sum()

    called = torch.compile(loss, backend=recorder, dynamic=True)
    for size in several(64, 130, 71):
        x = torch.randn(size, 64)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_static(w)
        torch.testing.assert_close(called(x), loss(x), rtol=1e-4, atol=1e-3)
    assert "in place" in {padding.how for padding in recorder.paddings}


# PAD-06
def test_a_symbolic_length_is_refused():
    recorder = Recorder(machine(odd=3.0, bandwidth=1e16), grow=True)
    torch._dynamo.reset()
    w = torch.randn(64, 2047)
    torch._dynamo.mark_dynamic(w, 1)
    # one length: it reads why one graph is refused
    torch.compile(lambda x, w: (x @ w).logsumexp(1), backend=recorder)(torch.randn(8, 64), w)
    assert any("symbolic" in (padding.reason or "") for padding in recorder.paddings)


# PAD-02
def test_copies_that_cost_more_are_refused():
    recorder = grown(lambda x, w: x @ w.t(), torch.randn(8, 64), torch.randn(2047, 64), on=machine(odd=3.0, bandwidth=1e8))
    assert {padding.how for padding in recorder.paddings} == {None}
    assert "copies counted" in recorder.paddings[0].reason


# PAD-04
def test_rows_that_grow_say_nothing_of_columns():
    # the product's rows grow; its sum over them must not see what stands behind them
    def model(x, w, v):
        return torch.exp((x @ w).t() @ v).sum(0), (x.t() @ v).t().exp().sum(1)

    x, w, v = torch.randn(64, 127), torch.randn(127, 8), torch.randn(64, 16)
    w[3, 2] = float("inf")
    assert bad_lengths(grown_with_nan(model, x, w, v, tolerance={"rtol": 1e-4, "atol": 1e-3})) == []
