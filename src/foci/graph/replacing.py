"""Puts a new node in an old one's place: strides that readers rely on, and what nobody reads any more."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode

from foci.graph.lift import PASSED
from foci.graph.products import product_of
from foci.graph.reading import call_of, value_of
from foci.graph.views import VIEWS

__all__ = ["erase", "erase_dead", "fitting", "is_pure"]


def fitting(graph: fx.Graph, new: fx.Node, old: fx.Node, mode: FakeTensorMode | None) -> fx.Node:
    """`new`, contiguous where a `view` below `old`, or whoever reads it outside of the graph, would not take its strides."""
    with mode or contextlib.nullcontext(), torch.no_grad():
        try:
            leaving = _rerun(new, old)
            fits = all(new.stride() == before.stride() for new, before in leaving)
        except RuntimeError:
            fits = False
        if not fits:
            with graph.inserting_before(old):
                made = graph.call_method("contiguous", (new,))
            made.meta = {**new.meta, "example_value": value_of(new).contiguous()}
            return made
    return new


def _rerun(new: fx.Node, old: fx.Node) -> list[tuple[Tensor, Tensor]]:
    """Runs the views below `old` on the value of `new`; gives those that leave the graph, each as it is now and as it was.

    Raises:
        RuntimeError: where one fails.
    """
    values: dict[fx.Node, Any] = {old: value_of(new)}
    leaving: list[tuple[Tensor, Tensor]] = []
    stack = [old]
    while stack:
        node = stack.pop()
        for user in node.users:
            if user.op == "output" or isinstance(user.target, HigherOrderOperator):
                leaving.append((values[node], value_of(node)))
                continue
            call = call_of(user)
            if call is None or call.name not in VIEWS or user in values or user.args[:1] == ():
                continue
            if user.args[0] not in values:
                continue
            args, kwargs = fx.map_arg((user.args, user.kwargs), lambda n: values[n] if n in values else value_of(n))
            method = user.op == "call_method"
            values[user] = getattr(args[0], str(user.target))(*args[1:], **kwargs) if method else user.target(*args, **kwargs)  # type: ignore[operator]
            stack.append(user)
    return leaving


def erase(graph: fx.Graph, node: fx.Node, inside: frozenset[fx.Node]) -> None:
    """Erases `node` and what was made for it alone: nodes of the attention, and values without effects."""
    stack = [node]
    while stack:
        dead = stack.pop()
        if dead.users or dead.op not in ("call_function", "call_method") or dead.graph is not graph or dead._erased:
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
    """Erases values that nobody reads: they would look like readers of the scores."""
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op in ("call_function", "call_method") and (is_pure(node) or product_of(node) is not None):
            graph.erase_node(node)


def is_pure(node: fx.Node) -> bool:
    """Whether a node computes a value and does nothing else."""
    call = call_of(node)
    return call is not None and not call.in_place and (call.name in PASSED or call.name in _MAKERS)
