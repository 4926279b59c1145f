"""Example values of a graph's nodes: those that it came with are kept, those that it lacks are made as its compiler would."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import foci
from compiled import several
from foci.fusion import Compiler, fuse
from foci.fusion.fx_utils import example_value


def attend(x):
    return torch.softmax(x @ x.mT * 0.3, -1) @ x


def padded(x):
    """Writes by index, whose node has no value, and pads by a symbolic length, as Mamba's hybrids do."""
    heads = torch.arange(x.shape[1])
    inverse = torch.empty_like(heads)
    inverse[heads.flip(0)] = heads
    pieces = F.pad(x, (0, 0, 0, (8 - x.shape[2] % 8) % 8, 0, 0)).unflatten(2, (-1, 8))
    return attend(x)[:, inverse] + pieces.sum((2, 3))[:, :, None]


def test_a_symbolic_length_is_padded_beside_a_write_by_index():
    torch._dynamo.reset()
    compiled = torch.compile(padded, backend=Compiler(rest="eager"), dynamic=True)
    for length in several(20, 27, 35):
        x = torch.randn(2, 3, length, 16, requires_grad=True)
        with foci.observe() as log:
            out = compiled(x)
        (grad,) = torch.autograd.grad(out.square().mean(), x)
        assert len(log.calls) == 1
        expected = padded(x)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(grad, torch.autograd.grad(expected.square().mean(), x)[0])


@pytest.mark.parametrize("dynamic", [False, True])
def test_values_that_a_graph_came_with_are_kept(dynamic):
    seen = []

    def keep(graph_module, example_inputs):
        before = {node.name: example_value(node) for node in graph_module.graph.nodes}
        fused = fuse(graph_module, example_inputs).graph_module
        seen.append([example_value(n) is before[n.name] for n in fused.graph.nodes if n.name in before and "example_value" in n.meta])
        return fused

    torch._dynamo.reset()
    # one length: it reads one graph
    torch.compile(padded, backend=keep, dynamic=dynamic)(torch.randn(2, 3, 20, 16))
    assert len(seen[0]) > 8 and all(seen[0])


def test_values_that_a_graph_lacks_are_made():
    """One node of many, behind a write and around an autocast that have no values."""

    def narrow(x):
        with torch.autocast("cpu", torch.bfloat16):
            return padded(x)

    def lacking(graph_module, example_inputs):
        product = next(
            n for n in graph_module.graph.nodes if example_value(n) is not None and n.op == "call_function" and "matmul" in str(n.target)
        )
        del product.meta["example_value"]
        fused = fuse(graph_module, example_inputs)
        assert [site.fused for site in fused.sites] == [True]
        return fused.graph_module

    torch._dynamo.reset()
    # one length: it takes one graph's values away
    torch.compile(narrow, backend=lacking, dynamic=True)(torch.randn(2, 3, 20, 16))


def test_a_graph_without_values_is_fused():
    class Module(torch.nn.Module):
        def forward(self, x):
            return attend(x)

    traced = fx.symbolic_trace(Module())
    x = torch.randn(2, 3, 20, 16)
    fused = fuse(traced, [x])
    assert fused.sites[0].fused
    torch.testing.assert_close(fused.graph_module(x), attend(x))
