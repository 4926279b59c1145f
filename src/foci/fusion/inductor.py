"""The fuse pass as a custom pass of Inductor, for programs that keep `backend="inductor"`."""

from __future__ import annotations

from typing import Any

from torch import fx

from foci.code_fingerprint import code_fingerprint
from foci.compat.lowering import CustomGraphPass
from foci.fusion import inductor_lowering, report
from foci.fusion.fuse_pass import fuse
from foci.fusion.inductor_backend import FUSED

__all__ = ["InductorPass", "inductor_pass"]


class InductorPass(CustomGraphPass):
    """Fuses attention in the graphs that Inductor gets, before autograd is applied.

    Inductor may take a compiled graph from its cache without running any pass: then nothing is reported.
    `torch._inductor.config.pre_grad_pass_timing = "early"`, where torch has it, runs the pass each time.

    Example:
        >>> import foci, torch
        >>> from foci.fusion.inductor import inductor_pass
        >>> with torch._inductor.config.patch(pre_grad_custom_pass=inductor_pass):
        ...     model = torch.compile(torch.nn.Linear(8, 8))
    """

    def __call__(self, graph: fx.Graph) -> None:
        if not isinstance(graph, fx.Graph):
            raise TypeError(f"graph must be a torch.fx.Graph; got {type(graph).__name__}")
        module = graph.owning_module
        inputs = [node.meta.get("example_value", node.meta.get("val")) for node in graph.nodes if node.op == "placeholder"]
        if module is None or FUSED in module.meta or any(value is None for value in inputs):
            return
        inductor_lowering.register()
        fused = fuse(module, inputs)
        report.tell(fused.sites)
        if any(site.fused for site in fused.sites):
            _replace(module, fused.graph_module)

    def uuid(self) -> Any:
        """Key of this version of the pass in Inductor's cache of compiled graphs."""
        return code_fingerprint()


def _replace(module: fx.GraphModule, by: fx.GraphModule) -> None:
    """Puts the nodes of one graph into the other: Inductor holds on to the graph that it passed."""
    for name, value in (*by.named_buffers(recurse=False), *by.named_parameters(recurse=False), *by.named_children()):
        if not hasattr(module, name):
            setattr(module, name, value)
    graph = module.graph
    olds = list(graph.nodes)
    inputs = dict(zip(_placeholders(by.graph), _placeholders(graph), strict=True))
    output = olds[-1]
    with graph.inserting_before(output):
        output.args = (graph.graph_copy(by.graph, inputs),)
    for node in reversed(olds[:-1]):
        if node.op != "placeholder":
            graph.erase_node(node)


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


inductor_pass = InductorPass()
"""For `torch._inductor.config.pre_grad_custom_pass`."""
