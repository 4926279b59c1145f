"""What surrounds a call: fused by Inductor on both sides, and caches that are full."""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import foci
from compiled import several
from foci import execution, trace_functions


# FLEX-13
def test_inductor_makes_inputs_once_and_fuses_what_follows():
    def layer(x, y):
        shared = (x.sin() * 2 + y).relu()  # query, key and value at once
        return (foci.attention(shared, shared, shared, mask=foci.masks.window(5)) * 3 - y).tanh()

    x, y = torch.randn(2, 2, 4, 64, 16).unbind(0)
    with torch.no_grad():
        # one length: it reads the code of one graph
        out, (code,) = run_and_get_code(torch.compile(layer, fullgraph=True), x, y)
        torch.testing.assert_close(out, layer(x, y))
    called = code[code.index("def call(") :]
    assert len(re.findall(r"torch\.ops\.foci\.attention\.default\(", called)) == 1
    assert len(re.findall(r"^\s+(?:cpp_fused|triton_poi)\w*\(", called, re.MULTILINE)) == 2  # one before it, one behind it


@pytest.fixture
def tiny_caches(monkeypatch):
    for name in ("_STRUCTURES", "_SETS_OF_NUMBERS"):
        monkeypatch.setattr(trace_functions, name, 2)
    trace_functions._traces.clear()


def factors(count):
    """Functions that differ in what they compute."""
    names = ["sin", "cos", "tanh", "exp", "abs", "neg", "sigmoid", "square", "relu", "expm1"]
    return [eval(f"lambda s, b, h, i, j: s.{name}() * 0.3") for name in names[:count]]


# FLEX-10
@pytest.mark.slow
def test_more_functions_than_caches_hold(tiny_caches):
    q = torch.randn(1, 2, 40, 8, requires_grad=True)
    for _ in range(2):
        for function in factors(8):
            with foci.observe() as log:
                out = foci.flex_attention(q, q, q, score_mod=function)
                (grad,) = torch.autograd.grad(out.sum(), q)
            with foci.use("reference"):
                want = foci.flex_attention(q, q, q, score_mod=function)
            torch.testing.assert_close(out, want)
            torch.testing.assert_close(grad, torch.autograd.grad(want.sum(), q)[0], atol=1e-3, rtol=1e-3)
            assert {call.backend for call in (*log.calls, *log.backward_calls)}.isdisjoint({"reference"})
    assert len(trace_functions._traces) <= 2 and len(execution._plans) <= execution._CAPACITY


# FLEX-10
@torch._dynamo.config.patch(recompile_limit=2)
def test_dynamo_out_of_recompilations():
    torch._dynamo.reset()
    q = torch.randn(1, 2, 40, 8)

    @torch.compile(backend="aot_eager")
    def attend(q, function):
        return foci.flex_attention(q, q, q, score_mod=function)

    for function in several(*factors(5)):
        with foci.observe() as log:
            out = attend(q, function)
        assert [call.backend for call in log.calls] != ["reference"] and len(log.calls) == 1
        torch.testing.assert_close(out, foci.flex_attention(q, q, q, score_mod=function))
    torch._dynamo.reset()


# SDPA-16
def test_deterministic_algorithms_with_warnings_only(recwarn):
    q = torch.randn(1, 2, 40, 8, requires_grad=True)
    table = torch.randn(2, 9, requires_grad=True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        runs = [
            torch.autograd.grad(foci.attention(q, q, q, score=foci.scores.relative_position(table)).square().sum(), (q, table))
            for _ in range(2)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert not recwarn.list


TRACED = {
    "plain": lambda q, slope: foci.attention(q, q, q),
    "a mask": lambda q, slope: foci.scaled_dot_product_attention(q, q, q, is_causal=True),
    "a captured tensor": lambda q, slope: foci.flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s - slope[h] * (i - j)),
}


@pytest.mark.filterwarnings("ignore")  # torch's of tracing: sizes are compared
@pytest.mark.parametrize("name", TRACED)
def test_traced_by_torchscript(name):
    function = TRACED[name]
    traced = torch.jit.trace(function, (torch.randn(2, 4, 9, 8), torch.rand(4)), check_trace=False)
    q, slope = torch.randn(3, 4, 11, 8, requires_grad=True), torch.rand(4)
    actual, want = traced(q, slope), function(q, slope)
    torch.testing.assert_close(actual, want)
    torch.testing.assert_close(torch.autograd.grad(actual.square().sum(), q), torch.autograd.grad(want.square().sum(), q))
