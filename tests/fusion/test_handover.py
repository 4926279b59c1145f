"""What foci adds to the way in which Inductor compiles the rest: nothing of it is seen in what is computed."""

import gc

import pytest
import torch
from torch._inductor import async_compile, config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule

import foci
from foci.fusion import fuse, inductor_backend


class Watch(CustomGraphPass):
    """What holds where a graph is lowered."""

    def __init__(self):
        self.seen = []

    def __call__(self, graph):
        self.seen.append((gc.isenabled(), config.graph_partition))

    def uuid(self):
        return None


def attend(x):
    return torch.softmax(x @ x.mT * 0.5, -1) @ x


def compiled(watch, **options):
    torch._dynamo.reset()
    # one length: the tests look at one graph in Inductor's hands
    return foci.compile(attend, rest="inductor", options={"post_grad_custom_post_pass": watch, "fx_graph_cache": False, **options})


@pytest.fixture
def tokens():
    torch.manual_seed(0)
    return torch.randn(2, 3, 24, 8, requires_grad=True)


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_while_graphs_are_compiled(tokens, enabled):
    watch = Watch()
    (gc.enable if enabled else gc.disable)()
    try:
        compiled(watch)(tokens).sum().backward()
        after = gc.isenabled()
    finally:
        gc.enable()
    assert [collects for collects, _ in watch.seen] == [False, False]  # forward and backward
    assert after == enabled


def test_the_collector_comes_back_after_an_error(tokens):
    class Fails(Watch):
        def __call__(self, graph):
            raise ValueError("no")

    with pytest.raises(Exception, match="no"):
        compiled(Fails())(tokens)
    assert gc.isenabled()


@pytest.mark.parametrize(("options", "partitioned"), [({}, False), ({"triton.cudagraphs": True}, True), ({"graph_partition": True}, True)])
def test_graphs_are_partitioned_where_they_are_recorded(tokens, options, partitioned):
    watch = Watch()
    with torch.no_grad(), config.patch(graph_partition=True):
        torch.testing.assert_close(compiled(watch, **options)(tokens), attend(tokens))
    assert [is_partitioned for _, is_partitioned in watch.seen] == [partitioned]


def test_code_of_fused_graphs_is_made_where_somebody_runs_it():
    graphs = []

    def backend(graph_module, inputs):
        fusion = fuse(graph_module, inputs)
        graphs.append((fusion.graph_module, isinstance(graph_module, _LazyGraphModule)))
        return graph_module.forward

    torch._dynamo.reset()
    x = torch.randn(1, 2, 20, 8)
    # one length: it reads one graph
    torch.compile(attend, backend=backend)(x)
    ((fused, lazy),) = graphs
    assert lazy and isinstance(fused, _LazyGraphModule) and fused._needs_recompile()
    torch.testing.assert_close(fused(x)[0], attend(x))


@pytest.mark.parametrize(("device", "settings", "times"), [("cuda", {}, 1), ("cuda", {"compile_threads": 1}, 0), ("cpu", {}, 0)])
def test_processes_for_gpus_start_before_all_else(monkeypatch, device, settings, times):
    started = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: started.append(device), raising=False)
    with FakeTensorMode():
        inductor_backend.start_workers([3, torch.empty(2, device=device)], settings)
    assert len(started) == times
    monkeypatch.delattr(async_compile, "maybe_warm_pool")  # as in other releases
    with FakeTensorMode():
        inductor_backend.start_workers([torch.empty(2, device=device)], settings)
