"""Attention fused in programs of torch.export."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from torch import fx
from torch.export import ExportedProgram

from foci.graph import report
from foci.graph.recognise import fuse
from foci.graph.sites import Site

__all__ = ["fuse_exported"]


def fuse_exported(program: ExportedProgram) -> tuple[ExportedProgram, tuple[Site, ...]]:
    """The program with every attention in it as one call of foci's operator, and the sites.

    Args:
        program: of torch.export.export, for inference or training. It is not changed.

    Example:
        >>> import torch
        >>> from foci.graph import fuse_exported
        >>> class Attention(torch.nn.Module):
        ...     def forward(self, q, k, v):
        ...         return torch.softmax(q @ k.mT / 8, dim=-1) @ v
        >>> q = torch.randn(1, 2, 64, 64)
        >>> program, sites = fuse_exported(torch.export.export(Attention(), (q, q, q)))
        >>> torch.allclose(program.module()(q, q, q), Attention()(q, q, q), atol=1e-5), sites[0].fused
        (True, True)
    """
    module = program.graph_module
    fused = fuse(module, [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"])
    report.tell(fused.sites)
    signature = copy.deepcopy(program.graph_signature)
    names = dict(zip(_names(module), _names(fused.graph_module)))
    signature.output_specs = [
        dataclasses.replace(spec, arg=dataclasses.replace(spec.arg, name=names[spec.arg.name]))
        if hasattr(spec.arg, "name") and spec.arg.name in names
        else spec
        for spec in signature.output_specs
    ]
    made = ExportedProgram(
        root=fused.graph_module,
        graph=fused.graph_module.graph,
        graph_signature=signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )
    return made, fused.sites


def _names(module: fx.GraphModule) -> list[Any]:
    """Of the graph's results, in their order."""
    (result,) = next(node for node in module.graph.nodes if node.op == "output").args
    return [value.name if isinstance(value, fx.Node) else None for value in result]
