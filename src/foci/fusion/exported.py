"""Attention fused in programs of torch.export."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputSpec
from torch.fx.experimental.proxy_tensor import make_fx

from foci.compat.fake import detect_fake_mode
from foci.compat.fx import rename
from foci.fusion import report
from foci.fusion.fuse_pass import fuse
from foci.fusion.fusion_report import Site

__all__ = ["fuse_exported"]


def fuse_exported(program: ExportedProgram) -> tuple[ExportedProgram, tuple[Site, ...]]:
    """The program with every attention in it as one call of foci's operator, and the sites.

    Args:
        program: of torch.export.export, for inference or training. It is not changed.

    Raises:
        TypeError: for anything else.

    Example:
        >>> import torch
        >>> from foci.fusion import fuse_exported
        >>> class Attention(torch.nn.Module):
        ...     def forward(self, q, k, v):
        ...         return torch.softmax(q @ k.mT / 8, dim=-1) @ v
        >>> q = torch.randn(1, 2, 64, 64)
        >>> program, sites = fuse_exported(torch.export.export(Attention(), (q, q, q)))
        >>> torch.allclose(program.module()(q, q, q), Attention()(q, q, q), atol=1e-5), sites[0].fused
        (True, True)
    """
    if not isinstance(program, ExportedProgram):
        raise TypeError(f"program must be a torch.export.ExportedProgram; got {type(program).__name__}")
    inputs = [node.meta["val"] for node in _placeholders(program.graph_module)]
    fused = fuse(program.graph_module, inputs)
    report.tell(fused.sites)
    module = _as_exported(fused.graph_module, program.graph_module, inputs)
    signature = copy.deepcopy(program.graph_signature)
    names = dict(zip(_results(program.graph_module), _results(module), strict=True))
    signature.output_specs = [_renamed(spec, names) for spec in signature.output_specs]
    fused_program = ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )
    return fused_program, fused.sites


def _as_exported(fused: fx.GraphModule, original: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """The graph in operators alone, as an exported program has it, its inputs named as they were."""
    mode = detect_fake_mode(list(inputs))
    with mode or contextlib.nullcontext():
        module = make_fx(fused, pre_dispatch=True)(*inputs)
    for node, before in zip(_placeholders(module), _placeholders(original), strict=True):
        rename(node, before.name)
        node.target, node.meta = before.name, dict(before.meta)
    module.graph.lint()
    module.recompile()
    return module


def _renamed(spec: OutputSpec, names: Mapping[str, str]) -> OutputSpec:
    name = names.get(getattr(spec.arg, "name", None) or "")
    return spec if name is None else dataclasses.replace(spec, arg=dataclasses.replace(spec.arg, name=name))


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _results(module: fx.GraphModule) -> list[str]:
    """Names of the graph's results, in their order."""
    (result,) = next(node for node in module.graph.nodes if node.op == "output").args
    return [value.name if isinstance(value, fx.Node) else "" for value in result]
