"""Graphs drawn at random: padded and as they are, the same values and the same strides for the user."""

import hypothesis.strategies as st
import pytest
import torch
from functorch.compile import make_boxed_func
from hypothesis import HealthCheck, given, settings
from machines import Recorder, machine
from torch._functorch.aot_autograd import aot_function
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode

SIZES = st.sampled_from([5, 8, 33, 127, 1025])


class Program:
    """Steps on a stack of matrices; each takes what it finds and leaves a matrix."""

    def __init__(self, steps, returned):
        self.steps, self.returned = steps, returned

    def __call__(self, *matrices):
        stack = list(matrices)
        for name, first, second in self.steps:
            a, b = stack[first % len(stack)], stack[second % len(stack)]
            result = STEPS[name](a, b)
            stack.append(result if max(result.shape) < 2200 else result[:1027, :1027])
        return tuple(stack[-1 - index % len(stack)] for index in self.returned)


def _product(a, b):
    if a.shape[1] == b.shape[0]:
        return a @ b
    if a.shape[1] == b.shape[1]:
        return a @ b.t()
    return a.t() @ a


def _biased(a, b):
    return torch.addmm(a.sum(0) if a.shape[1] == b.shape[1] else b.sum(0), a.t() @ a if a.shape[1] == b.shape[1] else b.t() @ b, b.t() @ b)


def _cat(a, b):
    return torch.cat([a, b], 1) if a.shape[0] == b.shape[0] else torch.cat([a, a[:, :3]], 1)


def _in_place(a, b):
    product = a * 0.5
    product[:, 1:].add_(a[:, :-1])
    return product.mul_(2)


def _slice(a, b):
    return a[: max(1, a.shape[0] - 1), : max(1, a.shape[1] - 1)]


def _refold(a, b):
    return a.reshape(1, *a.shape).expand(2, *a.shape).reshape(2 * a.shape[0], a.shape[1])


STEPS = {
    "product": _product,
    "batched": lambda a, b: torch.bmm(torch.stack([a, a * 2]), torch.stack([a, a]).mT).flatten(0, 1),
    "biased": _biased,
    "softmax": lambda a, b: torch.softmax(a, -1),
    "normed": lambda a, b: (a - a.mean(1, keepdim=True)).tanh(),
    "cat": _cat,
    "transpose": lambda a, b: a.t(),
    "slice": _slice,
    "refold": _refold,
    "in place": _in_place,
    "sum": lambda a, b: a + b if a.shape == b.shape else a.sin(),
}

PROGRAMS = st.builds(
    Program,
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 8), st.integers(0, 8)), min_size=2, max_size=7),
    st.lists(st.integers(0, 8), min_size=1, max_size=2),
)


def as_it_is(graph, inputs):
    return make_boxed_func(graph)


def run_both(program, inputs, trained, grow):
    """Outputs and gradients of the program as it is and padded, and the paddings."""
    recorder = Recorder(machine(4.0), grow=grow)
    results = []
    plain = {"fw_compiler": as_it_is, "decompositions": select_decomp_table()}
    for compilers in (plain, recorder.compilers()):
        called = aot_function(program, **compilers)
        leaves = [x.clone().requires_grad_(trained) for x in inputs]
        with torch._guards.tracing(torch._guards.TracingContext(FakeTensorMode())):
            outputs = called(*leaves)
        used = [out for out in outputs if out.requires_grad]
        gradients = torch.autograd.grad(sum(out.square().mean() for out in used), leaves, allow_unused=True) if used else ()
        results.append((*outputs, *gradients))
    return *results, recorder.paddings


def compare(program, m, k, n, trained, grow):
    """The same values and strides padded and as it is, or an error. Returns the paddings."""
    torch.manual_seed(0)
    inputs = [torch.randn(m, k, dtype=torch.float64), torch.randn(k, n, dtype=torch.float64)]
    *results, paddings = run_both(program, inputs, trained, grow)
    for expected, got in zip(*results, strict=True):
        assert (expected is None) == (got is None)
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8 * float(1 + expected.detach().abs().max()))
            assert got.stride() == expected.stride()
    return paddings


# PAD-04
@pytest.mark.slow
@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(PROGRAMS, SIZES, SIZES, SIZES, st.booleans(), st.booleans())
def test_padded_equals_unpadded(program, m, k, n, trained, grow):
    compare(program, m, k, n, trained, grow)


# PAD-04
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(PROGRAMS, SIZES, SIZES, SIZES, st.booleans(), st.sampled_from([float("nan"), float("inf"), float("-inf")]), st.randoms())
def test_finite_results_stay_where_others_are_not(program, m, k, n, trained, bad, random):
    torch.manual_seed(0)
    inputs = [torch.randn(m, k, dtype=torch.float64), torch.randn(k, n, dtype=torch.float64)]
    for x in inputs:
        x.view(-1)[random.randrange(x.numel())] = bad
    expected, got, _ = run_both(program, inputs, trained, grow=True)
    for theirs, mine in zip(expected, got, strict=True):
        if theirs is not None:
            finite = theirs.isfinite()
            assert not mine[~finite].isfinite().any()
            torch.testing.assert_close(mine[finite], theirs[finite], rtol=1e-8, atol=1e-6)


# PAD-02
@pytest.mark.parametrize("trained", [False, True])
def test_one_product_is_padded_in_every_way(trained):
    program = Program([("normed", 0, 0), ("product", 2, 1)], [0])
    paddings = compare(program, 127, 1025, 127, trained, grow=False)
    assert {padding.how for padding in paddings} == {"in place", "copied", "written twice"}
