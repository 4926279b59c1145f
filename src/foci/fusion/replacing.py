"""Replaces a node by a new one: keeps strides that readers rely on, and erases what is no longer read."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from foci.compat.fake import FakeTensorMode
from foci.compat.fx import is_erased, is_higher_order
from foci.fusion.declared_writes import declared_writes
from foci.fusion.fake_values import making
from foci.fusion.fx_utils import as_call, example_value, same_size
from foci.fusion.products import as_product
from foci.fusion.symbolic_element import PASSED
from foci.fusion.views import VIEWS

__all__ = ["erase", "erase_dead", "fitting", "is_pure"]


def fitting(graph: fx.Graph, new: fx.Node, old: fx.Node, mode: FakeTensorMode | None) -> fx.Node:
    """`new`, contiguous where a `view` below `old`, or whoever reads it outside of the graph, would not take its strides."""
    with making(mode), torch.no_grad():
        try:
            fits = all(_rerun(new, old))
        except Exception:  # a view that does not fit, or whatever a node says to strides it was not made for
            fits = False
        if not fits:
            with graph.inserting_before(old):
                contiguous = graph.call_method("contiguous", (new,))
            contiguous.meta = {**new.meta, "example_value": example_value(new).contiguous()}
            return contiguous
    return new


def _rerun(new: fx.Node, old: fx.Node) -> list[bool]:
    """Rerun the users of `old` on the value of `new` as long as strides differ. Returns whether each value that leaves the graph keeps its
    strides.

    Raises:
        Exception: where a node fails.
    """
    values: dict[fx.Node, Any] = {old: example_value(new)}
    leaving: list[bool] = []
    stack = [old]
    while stack:
        node = stack.pop()
        for user in node.users:
            fits = _lie_alike(values[node], example_value(node))
            if user.op == "output" or is_higher_order(user.target):
                leaving.append(fits)
            elif user not in values and not fits and _hands_strides_on(user, node):
                values[user] = _run(user, values)
                stack.append(user)
    return leaving


def _run(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """A node's value for other values of what it reads."""
    call = as_call(node)
    read = node.args[0] if node.args else None
    if call is not None and call.in_place:
        written = declared_writes(node)
        if isinstance(read, fx.Node) and read in values and (not written or read in written):
            return values[read]
        return example_value(node)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n] if n in values else example_value(n))
    method = node.op == "call_method"
    return getattr(args[0], str(node.target))(*args[1:], **kwargs) if method else node.target(*args, **kwargs)  # type: ignore[operator]


def _hands_strides_on(user: fx.Node, node: fx.Node) -> bool:
    """Whether a result may inherit its operand's strides: views do, and elementwise operations."""
    call, result, read = as_call(user), example_value(user), example_value(node)
    if (call is not None and call.name in VIEWS) or user.target is operator.getitem:
        return True
    is_alike = isinstance(result, Tensor) and isinstance(read, Tensor) and result.dim() == read.dim()
    return is_alike and all(map(same_size, result.shape, read.shape))


def _lie_alike(now: Any, before: Any) -> bool:
    if isinstance(now, (list, tuple)):
        return isinstance(before, (list, tuple)) and all(map(_lie_alike, now, before))
    return not isinstance(now, Tensor) or all(map(same_size, now.stride(), before.stride()))


def erase(graph: fx.Graph, node: fx.Node, inside: frozenset[fx.Node]) -> None:
    """Erases `node` and what was made for it alone: nodes of the attention, and values without effects."""
    stack = [node]
    while stack:
        dead = stack.pop()
        if dead.users or dead.op not in ("call_function", "call_method") or dead.graph is not graph or is_erased(dead):
            continue
        if dead is not node and dead not in inside and not is_pure(dead):
            continue
        operands = list(dead.all_input_nodes)
        graph.erase_node(dead)
        stack.extend(operands)


_MAKERS = frozenset((
    "arange", "zeros", "ones", "full", "tensor", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "tril",
    "triu", "eye", "size", "sym_size", "sum", "softmax", "any", "all",
))  # fmt: skip


def erase_dead(graph: fx.Graph) -> None:
    """Erase values without readers, and assertions that always hold, which would look like readers of the scores."""
    for node in reversed(list(graph.nodes)):
        if _asserts_what_is_known(node) or (
            not node.users and node.op in ("call_function", "call_method") and (is_pure(node) or as_product(node) is not None)
        ):
            graph.erase_node(node)


def _asserts_what_is_known(node: fx.Node) -> bool:
    """Whether a node asserts dtype, device and layout of a tensor that the graph computes: torch.export notes them at each cast."""
    call = as_call(node)
    if call is None or call.name != "_assert_tensor_metadata" or node.users:
        return False
    source, tensor = call.argument(0, "a"), example_value(call.argument(0, "a"))
    if not isinstance(source, fx.Node) or source.op == "placeholder" or not isinstance(tensor, Tensor):
        return False
    shape = (call.argument(1, "size"), call.argument(2, "stride"))
    rest = (call.argument(3, "dtype"), call.kwargs.get("device"), call.kwargs.get("layout"))
    facts = (tensor.dtype, tensor.device, tensor.layout)
    return shape == (None, None) and all(expected is None or expected == one for expected, one in zip(rest, facts, strict=True))


def is_pure(node: fx.Node) -> bool:
    """Whether a node computes a value and does nothing else."""
    call = as_call(node)
    return call is not None and not call.in_place and (call.name in PASSED or call.name in _MAKERS)
