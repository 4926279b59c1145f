"""Graphs of torch.fx, and trees of arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor, fx

from foci.compat.lookup import find

__all__ = [
    "SET_GRAD_ENABLED", "HigherOrderOperator", "base_of_view", "contiguous_strides", "is_erased", "is_higher_order", "lazy_graph_module",
    "rename", "storage_identity", "tree_leaves", "tree_map",
]  # fmt: skip


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in _leaves(value)]
    if isinstance(tree, (list, tuple)):
        return [leaf for value in tree for leaf in _leaves(value)]
    return [tree]


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _map(function, value) for name, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(function, value) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map(function, value) for value in tree)
    return function(tree)


_OWN_TREES: Final = "looks into lists, tuples and dicts alone"

tree_map: Final[Callable[[Callable[[Any], Any], Any], Any]] = find("torch.utils._pytree.tree_map", _map, without=_OWN_TREES)
"""A tree of arguments with a function applied to its leaves."""
tree_leaves: Final[Callable[[Any], list[Any]]] = find("torch.utils._pytree.tree_leaves", _leaves, without=_OWN_TREES)
"""The leaves of a tree of arguments."""

lazy_graph_module: Final[Callable[[Any, fx.Graph], fx.GraphModule]] = find(
    "torch.fx._lazy_graph_module._make_graph_module", fx.GraphModule, without="generates code for graphs that nobody runs"
)
"""A module of a graph, whose code is generated when it is first called."""

SET_GRAD_ENABLED: Final[Any] = find("torch._C._set_grad_enabled", object(), without="opens no autograd.Function that switches gradients")
"""What switches autograd on or off in Dynamo's graphs."""

HigherOrderOperator: Final[Any] = find("torch._ops.HigherOrderOperator", without="knows such operators by the name of their class")


def is_higher_order(target: Any) -> bool:
    """Whether a node's target is an operator that takes graphs."""
    if HigherOrderOperator is not None:
        return isinstance(target, HigherOrderOperator)
    return any(base.__name__ == "HigherOrderOperator" for base in type(target).__mro__)


def rename(node: fx.Node, name: str) -> None:
    """Gives a node of a finished graph another name."""
    if _rename is not None:
        _rename(node, name)


_rename: Final[Callable[[fx.Node, str], None] | None] = find(
    "torch.fx.Node._rename", without="cannot put fused graphs into exported programs whose inputs have other names"
)


def is_erased(node: fx.Node) -> bool:
    """Whether a node is no longer in its graph."""
    return node._erased if _knows_erased else all(other is not node for other in node.graph.nodes)


_knows_erased: Final[bool] = find("torch.fx.Node._erased", without="searches graphs for erased nodes") is not None


def _contiguous(shape: Any) -> tuple[Any, ...]:
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * (size if not isinstance(size, int) else max(size, 1))
    return tuple(reversed(strides))


contiguous_strides: Final[Callable[[Any], tuple[Any, ...]]] = find(
    "torch._prims_common.make_contiguous_strides_for", _contiguous, without="works out strides itself"
)
"""Strides of a contiguous tensor of these sizes."""


def storage_identity(tensor: Tensor) -> int:
    """Return the identity of the memory that views share. Raises NotImplementedError or RuntimeError where a tensor has none."""
    storage = tensor.untyped_storage()
    return int(storage._cdata) if _has_cdata else hash(storage)


_has_cdata: Final[bool] = find("torch.UntypedStorage._cdata", without="knows storages by where they lie") is not None


def base_of_view(tensor: Tensor) -> Tensor | None:
    """Return what a tensor is a view of; None if it is none, or torch does not tell."""
    return getattr(tensor, "_base", None) if _has_base else None


_has_base: Final[bool] = find("torch.Tensor._base", without="puts gradients side by side in fewer graphs") is not None
