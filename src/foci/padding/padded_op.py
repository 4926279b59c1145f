"""Dims that grow inside a graph, so that products have good sizes; at its borders everything keeps its own.

Products are fast only if the rows that they read and write are aligned and of aligned length. A dim of bad size is therefore
made longer wherever it occurs: tensors from outside are padded with zeros, everything computed from them is computed for the
longer dim, and what leaves is cut. What stands in the padding never counts: in front of a sum, a maximum or a product over
the dim, it is replaced by the value that changes nothing, chosen by position and never computed from what was there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from foci.compat.aten import OpOverload
from foci.compat.fake import FakeTensor, FakeTensorMode, below_dispatch, has_symbols
from foci.padding.dims import CREATIONS, REDUCTIONS, RESHAPES, Reader, Slot, dim_relations
from foci.padding.pad_value import Fill, Rows, result_fill
from foci.padding.reading import VIEWS, fake_value, hints, meta_like

__all__ = ["Growth", "call", "grow", "lengthened", "resized"]

aten = torch.ops.aten
prims = torch.ops.prims


_PRODUCTS: Final = (aten.mm.default, aten.bmm.default, aten.addmm.default)
_CONTIGUOUS: Final = frozenset({*_PRODUCTS, *REDUCTIONS, prims.convert_element_type.default})


@dataclass(frozen=True, eq=False)
class Growth:
    """Dims that grow.

    Attributes:
        lengths: by dim, its size and the one that it gets.
        relations: of the graph as it is now.
    """

    lengths: Mapping[Slot, tuple[int, int]]
    relations: Reader = dim_relations

    def dims(self, node: fx.Node) -> list[int]:
        """Return the grown dims of a node's value."""
        return self._dims.get(node, [])

    @functools.cached_property
    def _dims(self) -> dict[fx.Node, list[int]]:
        dims_by_node: dict[fx.Node, list[int]] = {}
        for node, dim in self.lengths:
            dims_by_node.setdefault(node, []).append(dim)
        return {node: sorted(dims) for node, dims in dims_by_node.items()}

    @property
    def nodes(self) -> Iterable[fx.Node]:
        """Return the nodes that have grown dims, in no order."""
        return self._dims

    def and_also(self, *growths: Growth) -> Growth:
        """Return this growth and others, all at once."""
        if not growths:
            return self
        return Growth({slot: length for growth in (self, *growths) for slot, length in growth.lengths.items()}, self.relations)

    def remakes(self, node: fx.Node) -> bool:
        """Whether an operation can run with grown operands, and give a grown result where it belongs to the set."""
        if node not in self._remade:
            self._remade[node] = self._can_be_remade(node)
        return self._remade[node]

    @functools.cached_property
    def _remade(self) -> dict[fx.Node, bool]:
        return {}

    def _can_be_remade(self, node: fx.Node) -> bool:
        operands = [(operand, dim) for operand in node.all_input_nodes for dim in self.dims(operand)]
        dims = self.dims(node)
        if not operands and not (dims and node.target in CREATIONS):
            return False
        relations = self.relations(node)
        if relations is None:
            return False
        tied = {slot for tie in relations.ties for slot in tie if len(tie) > 1 or node.target in CREATIONS}
        handled = all(slot in tied or relations.handles(slot) for slot in operands)
        return handled and all((node, dim) in tied for dim in dims)


@dataclass(eq=False)
class _Rewrite:
    """The state of a graph's rewriting.

    Attributes:
        growth: that is done.
        remade: the operations that run with grown dims, in their order.
        replacements: by node, the one with grown dims that takes its place, masked where a reader needed that.
        first: by node, the same before anything was masked.
        fills: by node with grown dims, what stands in its padding, if that is known.
        maxima: by maximum over a grown dim, what it was taken of.
    """

    graph: fx.Graph
    growth: Growth
    remade: dict[fx.Node, None]
    replacements: dict[fx.Node, fx.Node] = field(default_factory=dict)
    first: dict[fx.Node, fx.Node] = field(default_factory=dict)
    fills: dict[fx.Node, Fill | None] = field(default_factory=dict)
    maxima: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def call(
        self,
        target: Any,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any] | None = None,
        like: fx.Node | None = None,
        sizes: Sequence[int] | None = None,
    ) -> fx.Node:
        return call(self.graph, target, arguments, keywords, like, sizes)


def call(
    graph: fx.Graph,
    target: Any,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any] | None = None,
    like: fx.Node | None = None,
    sizes: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> fx.Node:
    """A new node, here, that knows its value.

    Args:
        graph: to be added to, where it inserts now.
        target, arguments, keywords: of the operation.
        like: a node of the same line of the user's code.
        sizes: of the result, if it is contiguous wherever the operands' dims lie in their order; then nothing is run to find out.
        dtype: of such a result; that of `like` if not given.
    """
    node = graph.call_function(target, tuple(arguments), dict(keywords or {}))
    if like is not None:
        node.meta = meta_like(like)
        dtype = dtype if dtype is not None or sizes is None else like.meta["val"].dtype
    node.meta["val"] = _result(node, sizes, dtype)
    return node


def _result(node: fx.Node, sizes: Sequence[int] | None, dtype: torch.dtype | None) -> Any:
    """A fake one. Without symbols, from meta tensors: a mode takes most of the pass's time to look at what it is asked."""
    values = [operand.meta["val"] for operand in node.all_input_nodes]
    places = {value.device if isinstance(value, torch.Tensor) and not has_symbols(value) else None for value in values}
    if "device" in node.kwargs:
        places.add(None if values else node.kwargs["device"])  # type: ignore[arg-type]
    mode = _mode(node.graph)
    target: Any = node.target
    below = below_dispatch() if len(places) == 1 and None not in places else None
    if below is None:
        arguments, keywords = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with mode:
            return target(*arguments, **keywords)
    with below:
        if sizes is not None and values and all(map(_lies_in_order, values)):
            result = torch.empty(tuple(sizes), dtype=dtype, device="meta")
        else:
            arguments, keywords = fx.map_arg((node.args, node.kwargs), lambda n: _on_meta(n.meta["val"]))
            result = target(*arguments, **(keywords if values else {**keywords, "device": "meta"}))
    return FakeTensor(mode, result, *places)


def _lies_in_order(value: torch.Tensor) -> bool:
    """Whether an element-wise operation of it, and of others that do so, gives a contiguous result."""
    strides = [stride for size, stride in zip(value.shape, value.stride()) if size != 1]
    return strides == sorted(set(strides), reverse=True) and 0 not in strides


def _on_meta(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _mode(graph: fx.Graph) -> FakeTensorMode:
    return next(value.fake_mode for node in graph.nodes if isinstance(value := fake_value(node), FakeTensor))


def grow(graph: fx.Graph, growth: Growth) -> None:
    """Rewrites a graph so that the dims of a set are longer inside it.

    Args:
        graph: functional, but for writes to its inputs at the end; its nodes carry fake tensors.
        growth: sets of dims that `closure` found.
    """
    olds = [node for node in graph.nodes if node.op != "output"]
    state = _Rewrite(graph, growth, {node: None for node in olds if growth.remakes(node)})
    for node in state.remade:
        _remake(state, node)
    for node in reversed(state.remade):
        if node.users:
            _cut(state, node)
        graph.erase_node(node)


def _remake(state: _Rewrite, node: fx.Node) -> None:
    growth, relations = state.growth, dim_relations(node)
    assert relations is not None
    by_operand: dict[fx.Node, fx.Node] = {}
    with state.graph.inserting_before(node):
        for operand in node.all_input_nodes:
            if growth.dims(operand) and operand not in state.replacements:
                # no earlier: what is copied right before its product still lies in the cache
                state.replacements[operand] = _padded(state, operand)
            over = {dim: relations.reduced[operand, dim] for dim in growth.dims(operand) if (operand, dim) in relations.reduced}
            by_operand[operand] = _masked(state, operand, over) if over else state.replacements.get(operand, operand)
        arguments, keywords = fx.map_arg((node.args, node.kwargs), lambda n: by_operand[n])
        arguments = resized(growth, node, arguments)
        lengths = {dim: growth.lengths[node, dim][1] for dim in growth.dims(node)}
        longer = state.call(node.target, arguments, keywords, node, lengthened(node, lengths))
    if node.target is aten.amax.default:
        state.maxima[longer] = longer.args[0]  # type: ignore[assignment]
    if growth.dims(node):
        state.replacements[node] = state.first[node] = longer
        state.fills[longer] = _fill(state, node, longer)
    else:
        node.replace_all_uses_with(longer)
        state.replacements[node] = longer


def _fill(state: _Rewrite, node: fx.Node, longer: fx.Node) -> Fill | None:
    """Return what stands in a result's padding. What is said of rows holds where one dim grew, in products that of the columns."""
    fill, dims, value = result_fill(longer, state.fills, state.maxima), state.growth.dims(node), fake_value(node)
    if fill is None or value is None or fill.rows is Rows.CLEAN:
        return fill
    return fill if len(dims) == 1 and (node.target not in _PRODUCTS or dims == [value.dim() - 1]) else None


def lengthened(node: fx.Node, lengths: Mapping[int, int]) -> list[int] | None:
    """The sizes of an operation's result with other lengths, if it is contiguous wherever the operands' dims lie in their order."""
    value, target = fake_value(node), node.target
    pointwise = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags and "memory_format" not in node.kwargs
    if value is None or not (pointwise or target in _CONTIGUOUS):
        return None
    return [lengths.get(dim, size) for dim, size in enumerate(value.shape)]


def resized(growth: Growth, node: fx.Node, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """A node's arguments, with the new lengths where they are sizes of the set."""
    dims = growth.dims(node)
    if not dims or node.target not in (*RESHAPES, *CREATIONS):
        return tuple(arguments)
    place = 0 if node.target in CREATIONS else 1
    if node.target is prims.iota.default:
        return (growth.lengths[node, 0][1],)
    sizes = [growth.lengths[node, dim][1] if dim in dims else size for dim, size in enumerate(arguments[place])]
    return (*arguments[:place], sizes, *arguments[place + 1 :])


def _padded(state: _Rewrite, node: fx.Node) -> fx.Node:
    """A tensor from outside of the set, with zeros behind it."""
    value = fake_value(node)
    assert value is not None
    lengths = [state.growth.lengths.get((node, dim), (0, 0)) for dim in reversed(range(value.dim()))]
    pads = [amount for size, grown in lengths for amount in (0, grown - size)]
    value_behind = _behind(state, node)
    padded = state.call(aten.constant_pad_nd.default, (node, pads, value_behind if value.is_floating_point() else 0), like=node)
    padded.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # one copy serves the forward and the backward pass
    state.fills[padded] = Fill(value_behind)
    return padded


def _behind(state: _Rewrite, node: fx.Node) -> float:
    """Zero, but for a bias in front of a softmax: minus infinity, so that nothing need be masked after it."""
    bias = [reader for reader in node.users if reader.target is aten.addmm.default and reader.args[0] is node]
    if len(bias) != 1 or len(node.users) != 1:
        return 0.0
    over = [reader for reader in state.remade if reader.target is aten.amax.default and state.growth.dims(reader.args[0])]  # type: ignore[arg-type]
    return float("-inf") if any(_follows(reader, bias[0]) for reader in over) else 0.0


def _follows(node: fx.Node, product: fx.Node) -> bool:
    """Whether a maximum is taken of a product's result, views and casts aside."""
    while node is not product:
        if node.target not in (*VIEWS, aten.amax.default, prims.convert_element_type.default):
            return False
        node = node.args[0]  # type: ignore[assignment]
    return True


def _masked(state: _Rewrite, node: fx.Node, over: Mapping[int, float]) -> fx.Node:
    """A grown tensor whose padding holds what changes no reduction over these dims; whoever reads it later reads that."""
    longer = state.replacements[node]
    for dim, neutral in over.items():
        fill = state.fills.get(longer)
        if fill is not None and fill.value == neutral:
            continue
        value = fake_value(longer)
        assert value is not None
        instead = state.call(aten.full.default, ([], neutral), {"dtype": value.dtype, "device": value.device})
        longer = state.call(aten.where.self, (_mask(state, node, dim), longer, instead), like=node, sizes=longer.meta["val"].shape)
        is_only_dim = len(state.growth.dims(node)) == 1
        state.fills[longer] = Fill(neutral) if is_only_dim else None
    state.replacements[node] = longer
    return longer


def _mask(state: _Rewrite, node: fx.Node, dim: int) -> fx.Node:
    """True in front of the padding, to be broadcast along the other dims."""
    value = fake_value(node)
    assert value is not None
    size, grown = state.growth.lengths[node, dim]
    # of 32 bits: a comparison that is much smaller than what it reads would be saved for the backward pass, not made anew
    settings = {"start": 0, "step": 1, "dtype": torch.int32, "device": value.device, "requires_grad": False}
    mask = state.call(aten.lt.Scalar, (state.call(prims.iota.default, (grown,), settings), size))
    behind = value.dim() - 1 - dim
    return state.call(aten.view.default, (mask, [grown, *[1] * behind])) if behind else mask


def _cut(state: _Rewrite, node: fx.Node) -> None:
    """Whoever cannot take the grown result gets it in its own size and strides."""
    current = state.replacements[node]
    if any(reader < current for reader in node.users):
        current = state.first[node]  # what was masked for a later reader does not exist yet
    value = fake_value(node)
    assert value is not None
    with state.graph.inserting_before(current.next):
        for dim in state.growth.dims(node):
            current = state.call(aten.slice.Tensor, (current, dim, 0, state.growth.lengths[node, dim][0]), like=node)
        if hints(current.meta["val"].stride()) != hints(value.stride()):
            strides = hints(value.stride())
            order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
            current = state.call(aten.permute.default, (current, order))
            current = state.call(aten.clone.default, (current,), {"memory_format": torch.contiguous_format}, like=node)
            current = state.call(aten.permute.default, (current, [order.index(dim) for dim in range(value.dim())]), like=node)
    node.replace_all_uses_with(current)
