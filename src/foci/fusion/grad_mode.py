"""Where a graph runs with gradients off, and example values that say so.

A view that is made under `torch.no_grad()` requires no gradient. Its fake tensor says that it does, and so do the values computed of it. A
pass that believed them would send gradients where eager sends none.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor, fx

from foci.compat.fx import SET_GRAD_ENABLED, is_higher_order, tree_leaves, tree_map
from foci.compat.torch import is_transformed
from foci.fusion.alias_analysis import written_nodes
from foci.fusion.fx_utils import as_call, example_value, mark_no_grad, runs_without_gradients, storage_id

__all__ = ["correct_gradients", "starts_with_gradients"]


def correct_gradients(graph: fx.Graph, *, enabled: bool) -> None:
    """Mark the nodes that run with gradients off, and detach the example values that gradients do not reach.

    Args:
        enabled: whether gradients are on where the graph starts.
    """
    _mark(graph, enabled=enabled)
    if not any(map(runs_without_gradients, graph.nodes)):
        return
    last_write = _last_writes(graph)
    detached: dict[int, tuple[Any, Any]] = {}  # by the identity of an example, which stays alive here

    def detach(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad or is_transformed(value):
            return value
        if id(value) not in detached:  # `detach` refuses a view whose base is written later
            detached[id(value)] = (value, value.data)
        return detached[id(value)][1]

    stopped: set[fx.Node] = set()
    for n, node in enumerate(graph.nodes):
        if not _requires_grad(example_value(node)):
            continue
        if written_nodes(node):  # gives the tensor that it writes
            held = detached.get(id(example_value(node)))
            if held is not None:
                stopped.add(node)
                node.meta["example_value"] = held[1]
        elif _is_stopped(node, stopped) and last_write.get(node, -1) < n:
            stopped.add(node)
            node.meta["example_value"] = tree_map(detach, example_value(node))


def starts_with_gradients(node: fx.Node) -> bool:
    """Whether gradients are on where a body starts that `node` runs."""
    if getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled":
        return bool(node.args[0])
    return not runs_without_gradients(node)


_ENTER, _EXIT = "_enter_inference_mode", "_exit_inference_mode"
_MAKES_LEAVES: Final = frozenset(("requires_grad", "requires_grad_"))


def _mark(graph: fx.Graph, *, enabled: bool) -> None:
    inference: list[bool] = []
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if node.target is SET_GRAD_ENABLED:
            enabled = bool(node.args[0])
        elif name == _ENTER:
            inference.append(bool(node.args[0]) if node.args else True)
        elif name == _EXIT and inference:
            inference.pop()
        elif node.op in ("call_function", "call_method", "call_module") and not (enabled and True not in inference):
            mark_no_grad(node)


def _last_writes(graph: fx.Graph) -> dict[fx.Node, int]:
    """The position of the last write with gradients to each tensor: what is written, and what it is a view of, require one then."""
    last: dict[fx.Node, int] = {}
    for n, node in enumerate(graph.nodes):
        for target in () if runs_without_gradients(node) else written_nodes(node):
            source: Any = target
            while isinstance(source, fx.Node) and storage_id(source) in (storage_id(target), None) and last.get(source) != n:
                last[source] = n
                source = source.args[0] if source.args else None
    return last


def _is_stopped(node: fx.Node, stopped: set[fx.Node]) -> bool:
    """Whether gradients are off where a node is made, or reach none of what it is made of."""
    if node.op not in ("call_function", "call_method") or node.kwargs.get("requires_grad") or _makes_leaf(node):
        return False
    if is_higher_order(node.target):
        return not starts_with_gradients(node)
    if runs_without_gradients(node):
        return True
    operands = node.all_input_nodes
    return not stopped.isdisjoint(operands) and not any(_requires_grad(example_value(n)) for n in operands)


def _makes_leaf(node: fx.Node) -> bool:
    call = as_call(node)
    return call is not None and call.name in _MAKES_LEAVES


def _requires_grad(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value))
