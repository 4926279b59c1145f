"""Arguments of the functions of foci.fusion that make no sense: errors that name the argument, before anything runs."""

import pytest
import torch
from torch import fx

import foci
from foci.fusion import Compiler, compile, fuse, fuse_exported, inductor_pass, summary, table


class Attention(torch.nn.Module):
    def forward(self, x, mask=None):
        scores = x @ x.transpose(-2, -1)
        return torch.softmax(scores if mask is None else scores + mask, -1) @ x


X = torch.randn(1, 2, 32, 8)
GRAPH = fx.symbolic_trace(Attention(), concrete_args={"mask": None})

WRONG = (
    (lambda: fuse("a", []), TypeError, "graph_module must be a torch.fx.GraphModule; got str"),
    (lambda: fuse(Attention(), [X]), TypeError, "graph_module must be a torch.fx.GraphModule; got Attention"),
    (lambda: fuse(GRAPH, X), TypeError, "example_inputs must be a list or tuple .*; got Tensor"),
    (lambda: fuse(GRAPH, None), TypeError, "example_inputs must be a list or tuple .*; got NoneType"),
    (lambda: fuse(GRAPH, []), ValueError, "example_inputs must be one for each of the graph's inputs: x.*; got 0"),
    (lambda: fuse(GRAPH, [X, X, X]), ValueError, "example_inputs must be one for each .*; got 3"),
    (lambda: fuse(GRAPH, ["a"]), ValueError, "example_inputs: the graph does not take them: .*str"),
    (lambda: fuse(GRAPH, [torch.randn(3)]), ValueError, "example_inputs: the graph does not take them"),
    (lambda: fuse_exported("a"), TypeError, "program must be a torch.export.ExportedProgram; got str"),
    (lambda: compile(3), TypeError, "model must be a module or a function; got int"),
    (lambda: compile(Attention(), mode="q"), ValueError, "mode must be one of default.*'q'"),
    (lambda: compile(Attention(), dynamic="yes"), TypeError, "dynamic must be True, False or None; got str"),
    (lambda: compile(Attention(), fullgraph="no"), TypeError, "fullgraph must be True or False; got str"),
    (lambda: compile(Attention(), verify=1), TypeError, "verify must be True or False; got int"),
    (lambda: compile(Attention(), rest=[]), ValueError, "rest must be one of"),
    (lambda: compile(Attention(), options=[1]), TypeError, "options must be a mapping of names to values; got list"),
    (lambda: compile(Attention(), options="max"), TypeError, "options must be a mapping of names to values; got str"),
    (lambda: compile(Attention(), options={3: 1}), TypeError, "options: a name must be a str; got int"),
    (lambda: compile(Attention(), options={"q": 1}), ValueError, "options: neither foci nor Inductor has 'q'"),
    (lambda: compile(Attention(), options={"max_autotune": "q"}), TypeError, "options: 'max_autotune' must be bool; got str"),
    (lambda: compile(Attention(), options={"verify": "q"}), TypeError, "verify must be True or False; got str"),
    (lambda: compile(Attention(), options={"rest": "q"}), ValueError, "rest must be one of"),
    (lambda: Compiler(verify="no"), TypeError, "verify must be True or False; got str"),
    (lambda: Compiler(options=3), TypeError, "options must be pairs of a name and a value; got int"),
    (lambda: Compiler(options=("max_autotune",)), TypeError, "options must be pairs of a name and a value; got tuple"),
    (lambda: Compiler(options={"max_autotune": True}), TypeError, "options must be pairs of a name and a value; got dict"),
    (lambda: Compiler(options=(("verify", True),)), ValueError, "options: verify is an argument of Compiler itself"),
    (lambda: Compiler(rest="eager")("a", []), TypeError, "graph_module must be a torch.fx.GraphModule; got str"),
    (lambda: inductor_pass(GRAPH), TypeError, "graph must be a torch.fx.Graph; got"),
    (lambda: inductor_pass("a"), TypeError, "graph must be a torch.fx.Graph; got str"),
    (lambda: summary(3), TypeError, "sites must be foci.fusion.Site; got int"),
    (lambda: summary(["a"]), TypeError, "sites must be foci.fusion.Site; got str"),
    (lambda: table(3), TypeError, "sites must be foci.fusion.Site; got int"),
    (lambda: table(["a"]), TypeError, "sites must be foci.fusion.Site; got str"),
)


@pytest.mark.parametrize(("call", "kind", "words"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_nonsense_is_an_error_that_names_the_argument(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


def test_inputs_with_defaults_may_be_left_out():
    def forward(x, scale=2.0):
        return torch.softmax(x @ x.transpose(-2, -1) * scale, -1) @ x

    fused = fuse(fx.symbolic_trace(forward), [X])
    assert fused.sites[0].fused
    torch.testing.assert_close(fused.graph_module(X), forward(X))


def test_foci_compile_takes_its_own_options_as_torch_compile_does():
    torch._dynamo.reset()
    with foci.observe() as log:
        # one length: it asks whether options arrive
        out = foci.compile(Attention(), options={"verify": True, "rest": "eager"})(X)
    assert log.fusions[0].fused
    torch.testing.assert_close(out, Attention()(X))
