"""Kernels compiled while the rest of a graph is."""

import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import async_compile

import foci
from foci.backends.compile_priority import is_waited_for
from foci.compat import lookup
from foci.compat.inductor import process_pool
from foci.execution import choose_kernel
from foci.fusion import fuse, inductor_backend, precompile
from foci.fusion.precompile import Call, _rehearse_all, begin, find_calls


def attend(q, k, v, keep):
    scores = (q @ k.mT * 0.125).masked_fill(keep == 0, float("-inf"))
    return torch.softmax(scores, -1) @ v


def fused_graph(function, *inputs):
    graphs = []

    def backend(graph_module, example_inputs):
        graphs.append(fuse(graph_module, example_inputs).graph_module)
        return graph_module

    torch._dynamo.reset()
    # one length: it only makes a graph
    torch.compile(function, backend=backend, dynamic=False)(*inputs)
    return graphs[0]


def inputs(device="cpu", dtype=torch.float32):
    q, k, v = (torch.randn(2, 3, 48, 64, device=device, dtype=dtype, requires_grad=n < 2) for n in range(3))
    return q, k, v, torch.ones(2, 1, 1, 48, device=device)


def test_a_call_is_rehearsed_as_it_will_be_made(monkeypatch):
    chosen = []

    def choose(formula, operands, needs, allowed):
        chosen.append((needs, operands.query.shape, operands.query.stride()))
        return choose_kernel(formula, operands, needs, allowed)

    monkeypatch.setattr("foci.fusion.precompile.choose_kernel", choose)
    (call,) = find_calls(fused_graph(attend, *inputs()).graph)
    with foci.observe() as log, torch.no_grad():
        call.rehearse()
    assert not log.calls
    shape, strides = (2, 3, 48, 64), (9216, 3072, 64, 1)
    assert chosen == [((False, False, False, (False,)), shape, strides), ((True, True, False, (False,)), shape, strides)]
    assert call.bytes == 4 * (3 * 2 * 3 * 48 * 64 + 2 * 48)


@pytest.mark.parametrize(("read", "wanted"), [(False, False), (True, True)])
def test_whether_a_gradient_of_the_logsumexp_comes(read, wanted):
    def with_sink(q, k, v, sink):
        scores = torch.cat([q @ k.mT, sink.expand(2, 3, 48, 1)], -1) if read else q @ k.mT + sink
        return torch.softmax(scores, -1)[..., :48] @ v

    sink = torch.zeros(1, requires_grad=True)
    (call,) = find_calls(fused_graph(with_sink, *inputs()[:3], sink).graph)
    assert call.lse_grad is wanted


def test_nothing_is_begun_without_a_gpu(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail("a thread was started"))
    begin(fused_graph(attend, *inputs()))()


def test_nobody_waits_for_what_is_rehearsed(monkeypatch):
    waited = []
    (call,) = find_calls(fused_graph(attend, *inputs()).graph)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    monkeypatch.setattr(Call, "rehearse", lambda self: waited.append(is_waited_for()))
    _rehearse_all([call])
    assert waited == [False]
    assert is_waited_for()


@pytest.mark.gpu
def test_the_first_step_finds_its_kernels_compiled(monkeypatch):
    import triton

    def softened(q, k, v, keep):  # a formula that no other test has
        scores = torch.tanh(q @ k.mT / 9) * 11 + torch.cos(keep).to(q.dtype)
        return torch.softmax(scores, -1) @ v

    beside = []

    def compiled(**_):  # by threads of the rehearsal's, so its own must be there
        beside.append(any(thread.name == "foci-ahead" for thread in threading.enumerate()))

    monkeypatch.setattr(triton.knobs.compilation, "listener", compiled)
    q, k, v, keep = inputs("cuda", torch.bfloat16)
    torch._dynamo.reset()
    # one length: it asks when the kernels of a first call are compiled
    out = foci.compile(softened, rest="eager", dynamic=False)(q, k, v, keep)
    assert beside
    out.float().square().sum().backward()
    assert all(beside)


@pytest.mark.parametrize(("threads", "ready", "submit"), [(8, True, "submit"), (8, False, None), (2, True, None), (None, True, None)])
def test_inductors_processes_help_once_they_have_started(monkeypatch, threads, ready, submit):
    pool = SimpleNamespace(use_process_pool=lambda: ready, process_pool=lambda: SimpleNamespace(submit="submit"))
    monkeypatch.setattr(async_compile, "AsyncCompile", pool)
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: threads)
    assert process_pool(None, fewest=4) == submit


def test_no_process_helps_where_options_want_one_thread(monkeypatch):
    pool = SimpleNamespace(use_process_pool=lambda: pytest.fail("asked"), process_pool=lambda: pytest.fail("asked"))
    monkeypatch.setattr(async_compile, "AsyncCompile", pool)
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 8)
    assert process_pool(1, fewest=4) is None


@pytest.mark.parametrize("name", ["get_compile_threads", "AsyncCompile.use_process_pool", "AsyncCompile.process_pool"])
def test_processes_whose_names_are_missing_are_not_used(monkeypatch, name):
    pool = SimpleNamespace(use_process_pool=lambda: True, process_pool=lambda: SimpleNamespace(submit="submit"))
    monkeypatch.setattr(async_compile, "AsyncCompile", pool)
    monkeypatch.setattr(lookup, "_names", {})
    assert process_pool(8, fewest=4) == "submit"
    monkeypatch.setattr(lookup, "_names", {})
    monkeypatch.setattr(lookup, "_patterns", [f"{async_compile.__name__}.{name}"])
    assert process_pool(8, fewest=4) is None
    assert [path.is_found for path in lookup._names.values()].count(False) == 1  # `foci env` lists it


def begun_with(monkeypatch, rest):
    """Inductor's settings, as what begins kernels meets them."""
    begun = []
    monkeypatch.setattr(precompile, "begin", lambda _, inductor: begun.append(inductor) or (lambda: None))
    monkeypatch.setattr(inductor_backend, "hand_over", lambda graph, *_: graph.forward)
    torch._dynamo.reset()
    # one length: it asks what is begun for a first call
    foci.compile(attend, rest=rest, dynamic=False)(*inputs())
    return begun


def test_only_beside_inductor_are_its_processes_asked(monkeypatch):
    assert begun_with(monkeypatch, "eager") == [None]
    assert begun_with(monkeypatch, "inductor") == [{}]


def test_inductor_is_not_imported_for_its_processes(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._inductor.async_compile", raising=False)
    assert process_pool(None, fewest=4) is None
