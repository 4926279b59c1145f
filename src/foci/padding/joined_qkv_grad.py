"""Gradients of query, key and value that are put side by side: made there.

Where one product makes query, key and value, as GPT-2's does, autograd puts their gradients side by side for that product's backward: a
copy of all three. Kernels can write them where they are read.
"""

from __future__ import annotations

import operator
from typing import Any, Final

import torch
from torch import fx

from foci.compat.aten import UNSAFE_VIEW
from foci.compat.fx import base_of_view
from foci.padding.reading import fake_value

__all__ = ["join_gradients"]

aten = torch.ops.aten

_WHOLE: Final = frozenset({aten.view.default, aten.reshape.default, UNSAFE_VIEW})
_TURNS: Final = frozenset({aten.permute.default, aten.transpose.int})
_COPIES: Final = frozenset({aten.clone.default})


def join_gradients(graph: fx.Graph) -> int:
    """Replaces, in a backward graph, the gradients of an attention's query, key and value [B, H, S, D] that nobody reads but their
    concatenation [B, S, E] by one call that makes this.

    Returns:
        How many there were.
    """
    joins = [(node, read) for node in graph.nodes if node.target is aten.cat.default and (read := _read(node)) is not None]
    for node, read in joins:
        maker = read[-1]
        with graph.inserting_before(node):
            joined = graph.call_function(torch.ops.foci.attention_backward_rows.default, maker.args)
        joined.meta = {**maker.meta, "val": node.meta["val"]}
        node.replace_all_uses_with(joined)
        for each in (node, *read):
            graph.erase_node(each)
    return len(joins)


def _read(cat: fx.Node) -> list[fx.Node] | None:
    """Return what a concatenation alone has read, back to the call that made all of it; None if that is not query's, key's and value's
    gradient of one attention in this order, heads within rows."""
    parts: Any = cat.args[0]
    dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    value, chains = fake_value(cat), [_chain(part) for part in parts]
    if value is None or value.dim() != 3 or dim not in (2, -1) or not value.is_contiguous():
        return None
    getitems = [chain[-1] for chain in chains if chain]
    makers = {getitem.args[0] for getitem in getitems}
    if len(chains) != 3 or [getitem.args[1] for getitem in getitems] != [0, 1, 2] or len(makers) != 1:
        return None
    (maker,) = makers
    if not isinstance(maker, fx.Node) or maker.target is not torch.ops.foci.attention_backward.default or len(maker.users) != 3:
        return None
    needs, shapes = maker.args[6], [fake_value(getitem).shape for getitem in getitems]  # type: ignore[union-attr]
    is_dense = maker.args[_CU_Q] is None and maker.args[_PAGES] is None
    if needs != "111" + "0" * len(maker.args[_CAPTURES]) or not is_dense:  # type: ignore[arg-type]
        return None
    # sizes that are numbers: each part has the rows of its gradient
    rows = [[b, s, h * d] for b, h, s, d in shapes]
    if not all(type(n) is int for row in rows for n in row) or [list(fake_value(part).shape) for part in parts] != rows:  # type: ignore[union-attr]
        return None
    if not all(_are_rows(chain, shape) for chain, shape in zip(chains, shapes, strict=True)):
        return None
    return [*(node for chain in chains for node in chain), maker]


_CAPTURES: Final = 10
_CU_Q: Final = 13
_PAGES: Final = 17
"""Among the arguments of the operator."""


def _chain(part: Any) -> list[fx.Node]:
    """A part, and what it alone is made of by moves and copies, back to a gradient; empty if it is made of anything else."""
    nodes: list[fx.Node] = []
    node = part
    while isinstance(node, fx.Node) and len(node.users) == 1:
        nodes.append(node)
        if node.target is operator.getitem:
            return nodes
        if node.target not in _WHOLE | _TURNS | _COPIES:
            break
        node = node.args[0]
    return []


def _are_rows(chain: list[fx.Node], shape: torch.Size) -> bool:
    """Whether a chain makes of a gradient [B, H, S, D] its rows [B, S, H * D]: of one that lies so, without a copy."""
    b, h, s, d = shape
    memory = torch.empty((b, s, h, d), device="meta")
    moved = memory.transpose(1, 2)
    for node in reversed(chain[:-1]):
        numbers: Any = node.args[1:]
        if node.target in _TURNS:
            moved = node.target(moved, *numbers)
        elif node.target in _WHOLE:
            if not all(type(n) is int for n in numbers[0]):
                return False
            moved = moved.reshape(numbers[0])
    return base_of_view(moved) is memory and moved.is_contiguous()
