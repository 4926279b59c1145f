"""Aliasing checks: values that are written after they were read, and scores with other readers, must not be fused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from torch import fx

from foci.compat.fx import is_higher_order, tree_leaves
from foci.fusion.declared_writes import declared_writes
from foci.fusion.fx_utils import as_call, is_tensor, mark_written, reads_only_shape, source_location, storage_id
from foci.fusion.indices import NoRule
from foci.fusion.nested import named
from foci.fusion.replacing import is_pure
from foci.fusion.views import VIEWS

__all__ = ["Writes", "check_exclusive", "written_nodes"]


@dataclass(frozen=True, eq=False)
class Writes:
    """Positions of nodes, and the in-place writes to each storage in order.

    `of` also marks the nodes whose storage is written.
    """

    position: dict[fx.Node, int]
    by_storage: dict[int | None, list[tuple[int, fx.Node]]]

    @staticmethod
    def of(graph: fx.Graph) -> Writes:
        """Reads a graph: which nodes write in place, and to what."""
        position: dict[fx.Node, int] = {}
        by_storage: dict[int | None, list[tuple[int, fx.Node]]] = {}
        for n, node in enumerate(graph.nodes):
            position[node] = n
            for target in written_nodes(node):
                storage = storage_id(target)
                if storage is not None:
                    by_storage.setdefault(storage, []).append((n, node))
        for node in graph.nodes if by_storage else ():
            if storage_id(node) in by_storage:
                mark_written(node)
        return Writes(position, by_storage)

    def check_unwritten(self, nodes: Iterable[fx.Node], until: fx.Node) -> None:
        """Raises NoRule if a tensor that the attention reads is written between where it was read and `until`."""
        sources = frozenset(nodes)
        if not any(self.by_storage.get(storage_id(n)) for n in sources):
            return
        end, region = self.position[until], _between(sources, until)
        for node in sources:
            read = min((self.position[u] for u in node.users if u in region), default=end)
            for at, writer in self.by_storage.get(storage_id(node), ()):
                if read < at < end:
                    raise NoRule(f"{node.name} is written in place ({source_location(writer) or writer.name}) before the second product")

    def add(self, new_nodes: Iterable[fx.Node], old: fx.Node) -> None:
        """Nodes that took the place of `old`."""
        for node in new_nodes:
            self.position[node] = self.position[old]
            self.by_storage.setdefault(storage_id(node), self.by_storage.get(storage_id(old), []))

    def followers(self, nodes: Sequence[fx.Node], last: fx.Node, needed: Iterable[fx.Node]) -> list[fx.Node]:
        """Nodes between `nodes` and `last` that depend on `nodes`, in order: they can be moved after `last`.

        Raises:
            NoRule: where it cannot: it does more than compute, or `last` itself depends on it by way of `needed`.
        """
        end, following, stack = self.position[last], set(), list(nodes)
        while stack:
            for user in stack.pop().users:
                if user not in following and self.position.get(user, end) < end:
                    following.add(user)
                    stack.append(user)
        for node in following:
            if not is_pure(node) or any(self.by_storage.get(storage_id(n)) for n in node.all_input_nodes):
                raise NoRule(f"{node.name} ({source_location(node)}) reads the logsumexp of the scores before the product with the values")
        if not following.union(nodes).isdisjoint(needed):
            raise NoRule("the attention depends on the logsumexp of its own scores")
        return sorted(following, key=self.position.__getitem__)


_MOST_BETWEEN: Final = 4000


def _between(sources: frozenset[fx.Node], until: fx.Node) -> frozenset[fx.Node]:
    """The nodes on the ways from `sources` to `until`, and others above it."""
    ancestors, stack = {until}, [until]
    while stack and len(ancestors) < _MOST_BETWEEN:
        node = stack.pop()
        if node in sources or reads_only_shape(node):
            continue
        stack += [n for n in node.all_input_nodes if n not in ancestors]
        ancestors.update(node.all_input_nodes)
    return frozenset(ancestors)


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node writes."""
    if is_higher_order(node.target):
        return [n for n in node.all_input_nodes if is_tensor(n)] if _runs_writes(node) else []
    call = as_call(node)
    if call is None or not (call.in_place or call.name == "setitem"):
        return []
    written = [*declared_writes(node), node.kwargs.get("out")]
    if all(target is None for target in written):
        written = [call.args[0] if call.args else call.kwargs.get("input")]
    return list(dict.fromkeys(target for target in tree_leaves(written) if isinstance(target, fx.Node)))


_PURE: Final = frozenset(("flex_attention", "foci_attention"))
"""Higher-order operators that write nothing."""


def _runs_writes(node: fx.Node) -> bool:
    """Whether a higher-order operator may write what it is given: one of its bodies does, or it has none that can be read."""
    if getattr(node.target, "__name__", "") in _PURE:
        return False
    module = node.graph.owning_module
    bodies = [named(module, n) for n in node.all_input_nodes] if module is not None else []
    graphs = [body.graph for body in bodies if body is not None]
    return not graphs or any(map(_writes_inputs, graphs))


def _writes_inputs(graph: fx.Graph) -> bool:
    """Whether a graph writes memory that it did not make."""
    inputs = {storage_id(n) for n in graph.nodes if n.op in ("placeholder", "get_attr")} | {None}
    return any(storage_id(target) in inputs for node in graph.nodes for target in written_nodes(node))


def check_exclusive(inside: frozenset[fx.Node], last: fx.Node, values: frozenset[fx.Node], known: Sequence[fx.Node] = ()) -> None:
    """Raises NoRule if a node of the attention is read from outside it, but for `known` readers."""
    for node in inside:
        if node is last:
            continue
        for user in node.users:
            if user in inside or user in known or (user is last and node not in values) or reads_only_shape(user):
                continue
            raise NoRule(f"{node.name} ({source_location(node) or 'scores'}) is also {_how_read(user, source_location(node))}")


def _how_read(user: fx.Node, beside: str) -> str:
    """Describe what a reader does with a value, and where, unless it is at `beside`."""
    if user.op == "output":
        return "returned"
    call, place = as_call(user), source_location(user)
    done = f"{'written in place' if _is_written(user) else 'read'} by `{call.name if call else user.name}`"
    return done if not place or place == beside else f"{done} at {place}"


def _is_written(user: fx.Node) -> bool:
    """Whether a reader is, or is a view for, a write in place."""
    call = as_call(user)
    if call is None:
        return False
    if call.in_place or call.name == "setitem":
        return True
    return call.name in VIEWS and any(_is_written(u) for u in user.users)
