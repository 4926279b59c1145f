"""Adds nodes to a graph before a place in it, each with the example value it makes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx

from foci.compat.fake import FakeTensorMode
from foci.fusion.fake_values import making
from foci.fusion.fx_utils import Size, example_value, is_written, mark_no_grad, needs_grad, node_shape, runs_without_gradients, same_size
from foci.fusion.indices import Digits, NoRule, count_values, is_atom, symbolic_expression
from foci.fusion.match import Place

__all__ = ["Emitter", "Sizes"]


_SHARED_COPY: Final = "foci_shared_copy"


class Sizes:
    """Nodes that hold a graph's symbolic sizes: a node that is the number, or a dimension of a tensor."""

    def __init__(self, graph: fx.Graph) -> None:
        self._found: dict[object, tuple[fx.Node, int | None]] = {}
        for node in graph.nodes:
            value: object = example_value(node)
            if isinstance(value, torch.SymInt):
                self._found.setdefault(value.node.expr, (node, None))
            elif isinstance(value, Tensor):
                for dim, n in enumerate(map(symbolic_expression, value.shape)):
                    if not isinstance(n, int):
                        self._found.setdefault(n, (node, dim))

    def find(self, expr: object) -> tuple[fx.Node, int | None] | None:
        """The node, and its dim, that holds a symbolic size; None if no node does."""
        return self._found.get(expr)


class Emitter:
    """Adds nodes before `place`.

    Args:
        graph: the graph.
        place: the node whose result the new nodes replace; they take its stack trace.
        mode: under which example values are made.
        sizes: where symbolic sizes are found.
    """

    def __init__(self, graph: fx.Graph, place: fx.Node, mode: FakeTensorMode | None, sizes: Sizes) -> None:
        self.graph, self.place, self._mode, self._sizes = graph, place, mode, sizes
        tensor = example_value(place)
        self._grad = isinstance(tensor, Tensor) and tensor.requires_grad
        self._known: dict[object, Any] = {}

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A call of a function, in front of the place."""
        with self.graph.inserting_before(self.place):
            node = self.graph.call_function(target, args, kwargs)
        return self._valued(node, lambda a, k: target(*a, **k))

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of a tensor's method, in front of the place."""
        with self.graph.inserting_before(self.place):
            node = self.graph.call_method(name, args, kwargs)
        return self._valued(node, lambda a, k: getattr(a[0], name)(*a[1:], **k))

    def copy_contiguous(self, node: fx.Node) -> fx.Node:
        """A contiguous copy of the node's tensor. One copy is shared by all attentions that read it, unless the tensor is written in place
        or the copy was made where gradients were off."""
        for user in node.users:
            if _SHARED_COPY in user.meta and user < self.place and not is_written(node) and needs_grad(user) == needs_grad(node):
                return user
        copied = self.method("contiguous", node)
        copied.meta[_SHARED_COPY] = True
        return copied

    def _valued(self, node: fx.Node, run: Callable[[Any, Any], Any]) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), example_value)
        with making(self._mode), torch.set_grad_enabled(self._grad):
            value = run(args, kwargs)
            # under no_grad, a fake view of a tensor that requires a gradient says that it does, too
            stops = not self._grad and isinstance(value, Tensor) and value.requires_grad
            node.meta["example_value"] = value.data if stops else value
        if runs_without_gradients(self.place):
            mark_no_grad(node)
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in self.place.meta:
                node.meta[key] = self.place.meta[key]
        return node

    def size(self, size: Any) -> Any:
        """A size as an argument: a number, or the node that has it."""
        if not isinstance(size, torch.SymInt):
            return size
        return self._symbolic(size.node.expr)

    def _symbolic(self, expr: Any) -> Any:
        if expr not in self._known:
            self._known[expr] = self._built(expr)
        return self._known[expr]

    def _built(self, expr: Any) -> Any:
        source = self._sizes.find(expr)
        if source is not None:
            node, dim = source
            return node if dim is None else self.method("size", node, dim)
        if expr.is_Integer:
            return int(expr)
        rule = next((op for kind, op in _ARITHMETIC if type(expr).__name__ == kind), None)
        if rule is None:
            raise NoRule(f"a size, {expr}, that the graph has nowhere")
        parts = [self._symbolic(part) for part in expr.args]
        total = parts[0]
        for part in parts[1:]:
            total = rule(total, part) if not isinstance(total, fx.Node) and not isinstance(part, fx.Node) else self.call(rule, total, part)
        return total

    def operand(self, place: Place, groups: Sequence[Digits], *, full_sizes: Sequence[bool]) -> fx.Node:
        """The operand's tensor with one dimension for each group of atoms.

        A group that it lacks entirely becomes an expanded dimension if `whole` says so, else one of size 1.
        """
        node, flat = place.node, [d for dim in place.index for d in dim]
        if any(not is_atom(d) for d in flat):
            raise NoRule("an operand is not read whole")
        have = [d.expr for d in flat]
        node = self._reshaped(node, [d.size for d in flat])
        target_digits = [d for group in groups for d in group]
        order = [have.index(d.expr) for d in target_digits if d.expr in have]
        if len(order) != len(have):
            raise NoRule("an operand has a dimension that the attention does not")
        if order != sorted(order):
            node = self.method("permute", node, tuple(order))
        return self._grouped(node, groups, set(have), full_sizes)

    def _grouped(self, node: fx.Node, groups: Sequence[Digits], have: set[Any], full_sizes: Sequence[bool]) -> fx.Node:
        sizes: list[Size] = []
        full: list[Size] = []
        for group, expanded in zip(groups, full_sizes, strict=True):
            partly = expanded or any(d.expr in have for d in group)
            sizes += [d.size if d.expr in have else 1 for d in group]
            full += [d.size if partly or d.expr in have else 1 for d in group]
        lacking = any(d.expr not in have for group in groups for d in group)
        if lacking:
            node = self._reshaped(node, sizes)
            if not all(same_size(a, b) for a, b in zip(sizes, full, strict=True)):
                node = self.method("expand", node, *(self.size(n) for n in full))
        parts = [count_values(g) if w or any(d.expr in have for d in g) else 1 for g, w in zip(groups, full_sizes, strict=True)]
        return self._reshaped(node, parts)

    def _reshaped(self, node: fx.Node, sizes: Sequence[Size]) -> fx.Node:
        shape = node_shape(node)
        if len(shape) == len(sizes) and all(same_size(a, b) for a, b in zip(shape, sizes, strict=True)):
            return node
        return self.method("reshape", node, tuple(self.size(n) for n in sizes))

    def result(self, node: fx.Node, groups: Sequence[Digits], index: Sequence[Digits], shape: Sequence[Size]) -> fx.Node:
        """The inverse: a tensor with a dimension for each group, as one of `shape` whose dimensions count `index`."""
        flat = [d for group in groups for d in group]
        node = self._reshaped(node, [d.size for d in flat])
        have = [d.expr for d in flat]
        order = [have.index(d.expr) for dim in index for d in dim]
        if order != sorted(order):
            node = self.method("permute", node, tuple(order))
        return self._reshaped(node, shape)


_ARITHMETIC: Final[tuple[tuple[str, Callable[..., Any]], ...]] = (
    ("Add", operator.add),
    ("Mul", operator.mul),
    ("Pow", operator.pow),
    ("FloorDiv", operator.floordiv),
    ("CleanDiv", operator.floordiv),
    ("PythonMod", operator.mod),
    ("Mod", operator.mod),
)
