"""Graphs inside a graph: the bodies that higher-order operators run, such as a block whose activations are computed again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from torch import fx

__all__ = ["find_body", "named", "walk_graphs"]

# Operators that do nothing with a body but run it, or a part of it, as it is written.
_RUN: Final = frozenset((
    "tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint", "wrap_with_set_grad_enabled", "wrap_with_autocast",
    "invoke_subgraph", "cond",
))  # fmt: skip


def find_body(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The body that a node of `module` names for operators which run it as it is written, else None."""
    if not node.users or not all(getattr(user.target, "__name__", "") in _RUN for user in node.users):
        return None
    return named(module, node)


def named(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The graph that a node of `module` names, None if it names anything else."""
    if node.op != "get_attr":
        return None
    owner = module
    for name in str(node.target).split("."):
        owner = getattr(owner, name)
    return owner if isinstance(owner, fx.GraphModule) else None


def walk_graphs(module: fx.GraphModule) -> Iterator[fx.Graph]:
    """The graph, and those of its bodies and of theirs."""
    yield module.graph
    for body in dict.fromkeys(inner for node in module.graph.nodes if (inner := find_body(module, node)) is not None):
        yield from walk_graphs(body)
