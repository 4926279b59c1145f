"""Products that are cut: the loop in front writes columns of a good number, the others are added to the result."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machines import Recorder, compiled, first_call_only, machine, other_sizes
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from foci.padding.padding_autograd import grow_dims

MACHINE = machine(odd=3.0, bandwidth=1e12)  # copies cost more than a look at the result


def cut(function, *inputs, on=MACHINE):
    """What the compiled function returns at its first call, and the recorder then; calls with other sizes are compared here."""
    recorder = Recorder(on, grow=True)
    called = compiled(function, recorder)
    got = called(*inputs)
    with first_call_only(recorder), torch.no_grad():
        for other_inputs in other_sizes(inputs):
            want, tolerance = function(*other_inputs), 2e-2 if inputs[0].dtype.itemsize == 2 else 1e-3
            torch.testing.assert_close(called(*other_inputs), want, rtol=tolerance, atol=10 * tolerance, equal_nan=True)
    return got, recorder


def hows(recorder):
    return {padding.how for padding in recorder.paddings}


def inputs(m, k, n, dtype=torch.float32, batch=()):
    return torch.randn(*batch, m, k, dtype=dtype), torch.randn(*batch, k, n, dtype=dtype)


# PAD-04
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("left", [1, 2, 3])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_equal_to_the_whole(dtype, left, batch):
    if (2048 + left) * dtype.itemsize % 16 == 0:
        pytest.skip("a good size")
    a, b = inputs(64, 2048 + left, 16, dtype, batch)
    got, recorder = cut(lambda a, b: torch.relu(a) @ b, a, b)
    assert hows(recorder) == {"cut"}
    assert got.dtype == dtype
    assert got.stride() == torch.relu(a).matmul(b).stride()
    expected = torch.relu(a).double() @ b.double()
    unpadded = (torch.relu(a) @ b).double()
    worst = (unpadded - expected).abs().max()
    assert (got.double() - expected).abs().max() <= 2 * worst + torch.finfo(dtype).eps * expected.abs().max()
    # each left column counts, once
    called = compiled(lambda a, b: torch.relu(a) @ b, recorder)  # one length: `cut` has compared others
    for column in range(2048, 2048 + left):
        one = torch.zeros_like(a)
        one[..., column] = 1
        torch.testing.assert_close(called(one, b), torch.relu(one) @ b)
    lengths = {operands[0][0][-1] for operands in recorder.products()}
    assert all(length * dtype.itemsize % 16 == 0 for length in lengths)


def test_nothing_is_copied_or_masked():
    rows, columns, b = torch.randn(64), torch.randn(2047), torch.randn(2047, 16)
    got, recorder = cut(lambda r, c, b: torch.sigmoid(r[:, None] * 2 + c) @ b, rows, columns, b)
    torch.testing.assert_close(got, torch.sigmoid(rows[:, None] * 2 + columns) @ b, rtol=1e-4, atol=1e-3)
    kinds = [str(node.target) for graph in recorder.graphs for node in graph.graph.nodes]
    assert not any(kind in ("aten.constant_pad_nd.default", "aten.where.self", "aten.clone.default") for kind in kinds)
    (operands,) = recorder.products()
    assert operands[0] == ((64, 2044), (2044, 1))
    (padding,) = recorder.paddings
    assert (padding.how, padding.bytes, padding.padded) == ("cut", 0, (2044, 1))


# PAD-04
def test_infinite_and_missing_values_count():
    a, b = inputs(8, 2047, 16)
    a[1, 2046], a[2, 2045], a[3, 5], b[2046, 3] = float("inf"), float("nan"), float("inf"), float("inf")
    got, recorder = cut(lambda a, b: torch.relu(a) @ b, a, b)
    assert hows(recorder) == {"cut"}
    torch.testing.assert_close(got, torch.relu(a) @ b, equal_nan=True, rtol=1e-4, atol=1e-3)


def test_a_bias_stays_with_the_product():
    a, b = inputs(64, 2047, 16)
    bias = torch.randn(16)
    got, recorder = cut(lambda a, b, c: torch.addmm(c, torch.tanh(a), b), a, b, bias)
    torch.testing.assert_close(got, torch.addmm(bias, torch.tanh(a), b), rtol=1e-4, atol=1e-3)
    assert hows(recorder) == {"cut"}


def test_views_between_the_loop_and_the_product():
    a, b = torch.randn(4, 16, 2047), torch.randn(2047, 16)
    got, recorder = cut(lambda a, b: torch.tanh(a) @ b, a, b)
    torch.testing.assert_close(got, torch.tanh(a) @ b, rtol=1e-4, atol=1e-3)
    assert hows(recorder) == {"cut"}
    assert recorder.products()[0][0] == ((64, 2044), (2044, 1))


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda a, b: (lambda t: (t @ b, t))(torch.tanh(a)), id="the left matrix leaves"),
        pytest.param(lambda a, b: torch.softmax(a, 1) @ b, id="a sum over its rows"),
        pytest.param(lambda a, b: a @ b, id="it comes from outside"),
        pytest.param(lambda a, b: torch.tanh(a) @ b @ (a.t() @ a)[:16], id="another product reads what it is made of"),
        pytest.param(lambda a, b: torch.addmm(b[0], torch.tanh(a), b, alpha=2), id="a factor"),
        pytest.param(lambda a, b: torch.tanh(a) @ b.t().contiguous().t(), id="the right matrix lies by columns"),
    ],
)
def test_what_is_not_cut(function):
    a, b = inputs(64, 2047, 16)
    got, recorder = cut(function, a, b)
    torch.testing.assert_close(got, function(a, b), rtol=1e-3, atol=1e-2)
    assert "cut" not in hows(recorder)


def test_training_grows_the_dim_for_both_passes():
    a, b = inputs(64, 2047, 16)
    b.requires_grad_()
    got, recorder = cut(lambda a, b: torch.tanh(a) @ b, a, b)
    got.sum().backward()
    torch.testing.assert_close(b.grad, torch.tanh(a).t() @ torch.ones(64, 16), rtol=1e-4, atol=1e-3)
    assert "cut" not in hows(recorder)


def test_a_cut_that_costs_more_is_not_made():
    a, b = inputs(512, 129, 512)
    _, recorder = cut(lambda a, b: torch.tanh(a) @ b, a, b, on=machine(odd=1.5, bandwidth=1e9))
    assert "cut" not in hows(recorder)


STEPS = {
    "tanh": lambda x, rows, columns: x.tanh(),
    "columns": lambda x, rows, columns: x + columns,
    "rows": lambda x, rows, columns: x * rows[:, None],
    "mask": lambda x, rows, columns: torch.where(columns > 0, x, rows[:, None]),
    "cast": lambda x, rows, columns: x.float().sin().double(),
    "positions": lambda x, rows, columns: x * torch.arange(x.shape[1]),
    "ones": lambda x, rows, columns: x - torch.ones(x.shape[1], dtype=x.dtype),
    "refold": lambda x, rows, columns: x.view(2, -1, x.shape[1]).cos().flatten(0, 1),
    "turned": lambda x, rows, columns: x.t().cos().t().contiguous(),
    "less its maximum": lambda x, rows, columns: x - x.amax(1, keepdim=True),
}


@settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5), st.sampled_from([1023, 1025, 2047]), st.booleans())
def test_random_loops(steps, k, biased):
    torch.manual_seed(0)
    a, b, rows, columns = (torch.randn(*size, dtype=torch.float64) for size in ((16, k), (k, 8), (16,), (k,)))

    def step(a, b, rows, columns):
        for name in steps:
            a = STEPS[name](a, rows, columns)
        return torch.addmm(rows[:8], a, b) if biased else a @ b

    expected = step(a, b, rows, columns)
    graph = make_fx(step, tracing_mode="fake", decomposition_table=select_decomp_table())(a, b, rows, columns)
    paddings = grow_dims(graph.graph, machine(30.0, odd=30.0, bandwidth=1e14))
    graph.graph.lint()
    graph.recompile()
    torch.testing.assert_close(graph(a, b, rows, columns), expected, rtol=1e-9, atol=1e-9 * float(1 + expected.abs().max()))
    if set(steps) <= {"tanh", "columns", "rows", "cast", "refold"}:
        assert [padding.how for padding in paddings] == ["cut"]
