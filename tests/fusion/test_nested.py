"""Attention in the bodies of higher-order operators, such as a block whose activations are computed again."""

import pytest
import torch
from spelling_harness import cast, compare, compiled, fused_only, qkv
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import foci
from compiled import several
from foci.fusion import Compiler, fuse
from foci.fusion.nested import walk_graphs


def attend(q, k, v):
    return (q @ k.transpose(-2, -1) * 0.35).softmax(-1) @ v


def twice(q, k, v):
    for _ in range(2):
        q = checkpoint(attend, q, k, v, use_reentrant=False)
    return q


def with_weights(q, k, v):
    def body(q, k, v):
        weights = (q @ k.mT * 0.35).softmax(-1)
        return weights @ v, weights

    return checkpoint(body, q, k, v, use_reentrant=False)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", [Compiler(rest="eager"), fused_only], ids=["autograd's graph", "as it is"])
def test_checkpointed_blocks_are_fused(backend, dynamic):
    run, counted = compiled(twice, dynamic=dynamic, backend=backend)
    with foci.observe() as log:
        for length in several(20, 27, 33):
            compare(twice, qkv(length), torch.float32, run, backward=True)
    graphs = 1 if dynamic else 2  # one for the first length, one for the others
    assert counted.graphs == graphs
    assert [site.fused for site in log.fusions] == [True, True] * graphs
    assert all("test_nested.py:" in site.location for site in log.fusions)


def test_a_body_that_is_not_fused_stays_as_it_was():
    run, _ = compiled(with_weights, backend=fused_only)
    with foci.observe() as log:
        for length in several(20, 27, 33):
            compare(with_weights, qkv(length), torch.float32, run, backward=True)
    assert len(log.fusions) == 2
    assert all(not site.fused and "returned" in site.reason for site in log.fusions)


def test_what_is_computed_again_drops_the_same_weights():
    def block(q, k, v):
        return checkpoint(
            lambda *operands: F.dropout((operands[0] @ operands[1].mT).softmax(-1), 0.4) @ operands[2], q, k, v, use_reentrant=False
        )

    run, _ = compiled(block)
    with foci.observe() as log:
        for length in several(64, 67, 80):
            q, k, v = cast(qkv(length), torch.float64, grad=True)
            out = run(q, k, v)
            cotangent = torch.randn_like(out)
            (grad,) = torch.autograd.grad(out, v, cotangent)
            # linear in the values: with one and the same mask, <out, g> = <v, dv>
            torch.testing.assert_close((out * cotangent).sum(), (v * grad).sum())
    assert [site.fused for site in log.fusions] == [True, True]


def test_what_leaves_a_body_lies_as_before():
    class Block(nn.Module):
        def forward(self, q, k, v):
            def body(q, k, v):
                return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))

            return checkpoint(body, q, k, v, use_reentrant=False).view(-1)

    run, _ = compiled(Block(), backend=fused_only)
    with foci.observe() as log:
        for length in several(20, 27, 33):
            operands = tuple(t.transpose(1, 2).contiguous() for t in qkv(length))
            compare(Block(), operands, torch.float32, run, backward=True)
    assert [site.fused for site in log.fusions] == [True, True]


def test_the_graph_given_keeps_its_bodies():
    seen = []

    def backend(graph_module, example_inputs):
        before = [str(graph) for graph in walk_graphs(graph_module)]
        fused = fuse(graph_module, example_inputs)
        assert [str(graph) for graph in walk_graphs(graph_module)] == before
        seen.append(fused.graph_module)
        return fused.graph_module

    torch._dynamo.reset()
    # one length: it reads one graph
    torch.compile(twice, backend=backend)(*qkv(20))
    calls = [n for graph in walk_graphs(seen[0]) for n in graph.nodes if n.target is torch.ops.foci.attention.default]
    assert len(calls) == 2


def test_functions_of_other_operators_are_no_bodies():
    body = fx.symbolic_trace(attend)
    graph = fx.Graph()
    q, k, v = (graph.placeholder(name) for name in "qkv")
    named = graph.get_attr("body")
    graph.output(graph.call_function(torch.ops.higher_order.flex_attention, (q, k, v, named)))
    module = fx.GraphModule({"body": body}, graph)
    assert list(walk_graphs(module)) == [graph]


def test_branches_are_fused():
    def either(q, k, v, sign):
        return torch.cond(sign.sum() > 0, lambda q, k, v: attend(q, k, v), lambda q, k, v: attend(q * 2, k, v) + 1, (q, k, v))

    run, _ = compiled(either)
    for length, sign in ((length, sign) for length in several(20, 27, 33) for sign in (torch.ones(1), -torch.ones(1))):
        with torch.no_grad(), foci.observe() as log:
            torch.testing.assert_close(run(*qkv(length), sign), either(*qkv(length), sign))
        assert all(site.fused for site in log.fusions)
