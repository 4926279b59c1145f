"""Which nodes of a graph hold the same values, because the same operation made them of the same values."""

from __future__ import annotations

from typing import Final

from torch import fx

from foci.fusion.alias_analysis import Writes
from foci.fusion.fx_utils import as_call, is_tensor, is_written, needs_grad
from foci.fusion.products import as_product
from foci.fusion.symbolic_element import PASSED

__all__ = ["Values"]

_RANDOM: Final = frozenset(("dropout",))


class Values:
    """Numbers nodes by value when first asked; linear in the graph. Nodes in memory that the graph writes are like no other,
    and one that gradients flow through is unlike one that they do not."""

    def __init__(self, graph: fx.Graph) -> None:
        Writes.of(graph)  # marks what is written
        self._graph = graph
        self._numbers: dict[fx.Node, int] = {}

    def same(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether two nodes surely hold the same values."""
        if a is b:
            return not is_written(a)
        if not self._numbers:
            self._count()
        return self._numbers.get(a, -1) == self._numbers.get(b, -2)

    def _count(self) -> None:
        known: dict[object, int] = {}
        for node in self._graph.nodes:
            self._numbers[node] = known.setdefault(self._key(node), len(known))

    def _key(self, node: fx.Node) -> object:
        call = as_call(node)
        if call is None or call.in_place or not is_tensor(node) or is_written(node) or call.name in _RANDOM:
            return node
        if call.name not in PASSED and call.name != "sum" and as_product(node) is None:
            return node
        args, kwargs = fx.map_arg((call.args, dict(call.kwargs)), lambda n: f"%{self._numbers[n]}")
        return f"{needs_grad(node)} {call.name} {args!r} {sorted(kwargs.items())!r}"
