"""Compiled graphs call the operators by name: the same results, planned once for each place, and planned anew where something changed."""

import threading

import pytest
import torch
from spelling_harness import DIM, qkv
from torch._inductor.utils import fresh_cache, run_and_get_code

import foci
from compiled import several
from foci import cache_check
from foci.fusion import inductor_pass
from foci.operator import op_impl
from foci.operator.compiled_call import Forward


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    with fresh_cache():
        yield


@pytest.fixture
def planned(monkeypatch):
    """How often a call was looked up or planned."""
    counted = []
    for name in ("forward_known", "backward_known"):
        find = getattr(op_impl, name)
        monkeypatch.setattr(op_impl, name, lambda args, name=name, find=find: counted.append(name) or find(args))
    return counted


def tensors(length=64, *, learn=False):
    return tuple(t.requires_grad_(learn) for t in qkv(length))


def attend(q, k, v):
    return torch.softmax(q @ k.mT / DIM**0.5, dim=-1) @ v


def causal_row_sums(q, k, v):
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    scores = (q @ k.mT / DIM**0.5).masked_fill(~causal, -torch.inf)
    return torch.exp(scores - scores.logsumexp(-1, keepdim=True)) @ v, scores.logsumexp(-1)


def code_of(model, *args):
    return run_and_get_code(lambda: model(*args))[1]


def test_the_code_calls_by_name():
    q, k, v = tensors(learn=True)
    model = foci.compile(attend)

    def step():
        model(q, k, v).sum().backward()

    # one length: it reads the code of one graph
    forward, backward = run_and_get_code(step)[1]
    assert "foci_buf0 = Forward(fixed=True)" in forward
    assert "Backward(fixed=True)" in backward
    assert "torch.ops.foci.attention.default(" not in forward
    assert "torch.ops.foci.attention_backward.default(" not in backward


def test_the_pass_in_inductor_calls_by_name():
    with torch._inductor.config.patch(pre_grad_custom_pass=inductor_pass):
        # one length: it reads the code of one graph
        (code,) = code_of(torch.compile(attend), *tensors())
    # an early pass, the only kind before torch 2.12, is in no key of Inductor's cache
    assert ("foci_buf0 = Forward(fixed=True)" in code) is hasattr(torch._inductor.config, "pre_grad_pass_timing")


def test_a_graph_that_foci_did_not_pass_keeps_the_operator():
    # one length: it reads the code of one graph
    code_of(foci.compile(attend), *tensors())
    torch._dynamo.reset()
    (code,) = code_of(torch.compile(lambda q, k, v: foci.attention(q, k, v)), *tensors())
    assert "torch.ops.foci.attention.default(" in code


@pytest.mark.parametrize("function", [attend, causal_row_sums])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_results_and_gradients(function, dynamic):
    model = foci.compile(function, dynamic=dynamic)
    for length in several(64, 64, 96, 128):
        q, k, v = tensors(length, learn=True)
        actual, wanted = model(q, k, v), function(q, k, v)
        torch.testing.assert_close(actual, wanted)
        pairs = (actual, wanted) if isinstance(actual, tuple) else ((actual,), (wanted,))
        grads = [torch.autograd.grad([t.square().sum() for t in some], (q, k, v)) for some in pairs]
        torch.testing.assert_close(*grads)


@pytest.mark.skipif(cache_check.ENABLED, reason="counts work that FOCI_CHECK_CACHE=1 repeats")
def test_a_place_is_planned_once(planned):
    q, k, v = tensors(learn=True)
    model = foci.compile(attend)
    for _ in range(3):
        model(q, k, v).sum().backward()
    # one length: a place of fixed sizes remembers one call
    assert planned == ["forward_known", "backward_known"]


def test_symbolic_sizes_are_looked_up_each_time(planned):
    model = foci.compile(attend, dynamic=True)
    for length in several(64, 96, 128):
        q, k, v = tensors(length)
        torch.testing.assert_close(model(q, k, v), attend(q, k, v))
    assert planned == ["forward_known"] * 3


def test_what_changes_around_it_is_noticed(planned):
    q, k, v = tensors()
    model = foci.compile(attend)
    wanted = attend(q, k, v)
    # one length: a place of fixed sizes is asked anew for what else changes
    for names in ((), ("reference",), ("blocked",), ()):
        with foci.observe() as log:
            if names:
                with foci.use(*names):
                    out = model(q, k, v)
            else:
                out = model(q, k, v)
        torch.testing.assert_close(out, wanted)
        assert not names or [call.backend for call in log.calls] == list(names)
    assert len(planned) == 4
    torch.use_deterministic_algorithms(True)
    try:
        model(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(planned) == 5


def test_one_tensor_in_two_places_is_another_call(planned):
    place = Forward(fixed=True)
    q, k, v = (t.detach() for t in tensors())
    rest = ([], *[None] * 7, [], [], 0.25, 0.0, 0, 0, "layout=dense;outputs=;dropout=0;blocks= | captures  | "
            "%0 = var[score] float | %1 = const[True] bool | return %0 %1", "*")  # fmt: skip
    for query, key, value in ((q, k, v), (q, q, v), (q, k, v)):
        out, lse, *gradients = place(query, key, value, *rest)
        scores = query @ key.mT * 0.25
        torch.testing.assert_close(out, scores.softmax(-1) @ value)
        torch.testing.assert_close(lse, scores.logsumexp(-1))
        assert gradients == [None] * 3
    assert len(planned) == 3


def test_threads_share_a_place():
    model = foci.compile(attend)
    q, k, v = tensors()
    wanted = attend(q, k, v)
    model(q, k, v)
    outs = []

    def run(name):
        for _ in range(20):
            with foci.use(name), foci.observe():
                outs.append(model(q, k, v))

    # one length: threads meet at one place
    threads = [threading.Thread(target=run, args=(name,)) for name in ("reference", "blocked")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outs) == 40
    for out in outs:
        torch.testing.assert_close(out, wanted)
