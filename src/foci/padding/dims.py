"""Which dims of a graph's tensors must have one size, and what each operation does with them.

A dim may grow where everything that reads it is known: element by element, by a sum or a maximum that can be told what to
leave out, by a product, or by an index that stays below the old size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from foci.compat.aten import TO_COPY, UNSAFE_VIEW, OpOverload, read_schema
from foci.padding.reading import fake_value
from foci.padding.strides import known

__all__ = ["CREATIONS", "REDUCTIONS", "RESHAPES", "Reader", "Relations", "Slot", "closure", "dim_relations"]

aten = torch.ops.aten
prims = torch.ops.prims

Slot: TypeAlias = tuple[fx.Node, int]
"""A dim of a node's value."""

CREATIONS: Final = frozenset({aten.full.default, prims.iota.default})
"""Operations that make a tensor of any size out of nothing."""

RESHAPES: Final = frozenset({aten.view.default, aten.reshape.default, UNSAFE_VIEW, aten.expand.default})
"""Operations whose second argument holds sizes."""

REDUCTIONS: Final[Mapping[Any, float]] = {
    aten.amax.default: float("-inf"),
    aten.amin.default: float("inf"),
    aten.sum.default: 0.0,
    aten.sum.dim_IntList: 0.0,
}
"""By operation: the value that changes no result."""

_SAME: Final = frozenset({TO_COPY, aten.alias.default, aten.clone.default, aten.detach.default, aten.full_like.default})


@dataclass
class Relations:
    """The relations between dims that one operation makes.

    Attributes:
        ties: sets of dims that have one size.
        reduced: dims that a sum, a maximum or a product runs over, with the value that changes nothing.
        free: dims that are only indexed: they may be larger.
    """

    ties: list[tuple[Slot, ...]] = field(default_factory=list)
    reduced: dict[Slot, float] = field(default_factory=dict)
    free: list[Slot] = field(default_factory=list)

    def handles(self, slot: Slot) -> bool:
        """Whether it is known what the operation does with a dim."""
        return slot in self.reduced or slot in self.free or any(slot in tie for tie in self.ties)


Reader: TypeAlias = Callable[[fx.Node], Relations | None]
"""`dim_relations`, or what remembers its results for a graph that stays as it is."""


def dim_relations(node: fx.Node) -> Relations | None:
    """None for an operation that nothing is known of."""
    value = fake_value(node)
    if value is None or node.op != "call_function":
        return None
    rule = _RULES.get(node.target)
    if rule is not None:
        return rule(node)
    if isinstance(node.target, OpOverload):
        tags = node.target.tags
        pointwise = torch.Tag.pointwise in tags or node.target in _SAME or node.target is prims.convert_element_type.default
        if pointwise and torch.Tag.nondeterministic_seeded not in tags and not _is_mutable(node.target):
            return _pointwise(node, _tensors(node))
    return None


def _is_mutable(operator: Any) -> bool:
    schema = read_schema(operator)
    return schema is None or bool(schema.is_mutable)


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [arg for arg in node.all_input_nodes if fake_value(arg) is not None]


def _sizes(node: fx.Node) -> list[int]:
    value = fake_value(node)
    return [known(size) for size in value.shape] if value is not None else []


def _pointwise(node: fx.Node, operands: Sequence[fx.Node]) -> Relations:
    """Dims counted from the right are one, but for those that are broadcast."""
    sizes = _sizes(node)
    ties = []
    for dim, size in enumerate(sizes):
        tie: list[Slot] = [(node, dim)]
        for operand in operands:
            theirs = _sizes(operand)
            at = dim - len(sizes) + len(theirs)
            if at >= 0 and theirs[at] == size:
                tie.append((operand, at))
        ties.append(tuple(tie))
    return Relations(ties)


def _mapped(node: fx.Node) -> Relations:
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    return Relations([((node, dim), (source, at)) for dim, at in enumerate(_mapped_dims(node)) if at is not None])


def _mapped_dims(node: fx.Node) -> list[int | None]:
    """For each dim of a view: the dim of what it views, whole and alone; None for a dim that is none."""
    return list(_MAPS[node.target](node, _sizes(node.args[0]), _sizes(node)))  # type: ignore[arg-type]


def _by_permute(node: fx.Node, theirs: Sequence[int], ours: Sequence[int]) -> Iterator[int | None]:
    yield from (dim % len(theirs) for dim in node.args[1])  # type: ignore[union-attr, operator, misc]


def _by_transpose(node: fx.Node, theirs: Sequence[int], ours: Sequence[int]) -> Iterator[int | None]:
    order = list(range(len(theirs)))
    first, second = (0, 1) if len(node.args) == 1 else (node.args[1], node.args[2])
    if len(order) > 1:
        order[first], order[second] = order[second], order[first]  # type: ignore[index]
    yield from order


def _by_extent(node: fx.Node, theirs: Sequence[int], ours: Sequence[int]) -> Iterator[int | None]:
    """A dim is whole if as much lies inside it as before."""
    inside: dict[tuple[int, int], int] = {}
    extent = 1
    for at in range(len(theirs) - 1, -1, -1):
        inside.setdefault((extent, theirs[at]), at)
        extent *= theirs[at]
    dims: list[int | None] = []
    extent = 1
    for size in reversed(ours):
        dims.append(inside.get((extent, size)) if size != 1 else None)
        extent *= size
    yield from reversed(dims)


def _by_broadcast(node: fx.Node, theirs: Sequence[int], ours: Sequence[int]) -> Iterator[int | None]:
    offset = len(ours) - len(theirs)
    yield from (dim - offset if dim >= offset and theirs[dim - offset] == size else None for dim, size in enumerate(ours))


def _by_slice(node: fx.Node, theirs: Sequence[int], ours: Sequence[int]) -> Iterator[int | None]:
    cut = int(node.args[1]) % len(theirs) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    yield from (None if dim == cut else dim for dim in range(len(ours)))


def _by_select(node: fx.Node, theirs: Sequence[int], ours: Sequence[int]) -> Iterator[int | None]:
    cut = int(node.args[1]) % len(theirs)  # type: ignore[arg-type]
    yield from (dim for dim in range(len(theirs)) if dim != cut)


_Map: TypeAlias = Callable[[fx.Node, Sequence[int], Sequence[int]], Iterator[int | None]]

_MAPS: Final[Mapping[Any, _Map]] = {
    aten.permute.default: _by_permute,
    aten.t.default: _by_transpose,
    aten.transpose.int: _by_transpose,
    aten.view.default: _by_extent,
    aten.reshape.default: _by_extent,
    UNSAFE_VIEW: _by_extent,
    aten.unsqueeze.default: _by_extent,
    aten.squeeze.default: _by_extent,
    aten.squeeze.dim: _by_extent,
    aten.squeeze.dims: _by_extent,
    aten.expand.default: _by_broadcast,
    aten.slice.Tensor: _by_slice,
    aten.select.int: _by_select,
}


def _reduced_dims(node: fx.Node) -> list[int]:
    """Return the dims of the operand that a reduction runs over."""
    rank = len(_sizes(node.args[0]))  # type: ignore[arg-type]
    dims: Any = node.args[1] if len(node.args) > 1 else None
    return sorted(dim % rank for dim in dims) if dims and node.target is not aten.sum.default else list(range(rank))


def _reduction(node: fx.Node) -> Relations:
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    over = _reduced_dims(node)
    keep = len(_sizes(node)) == len(_sizes(source)) and len(over) > 0
    kept = [dim for dim in range(len(_sizes(source))) if dim not in over]
    ties = [((node, dim if keep else index), (source, dim)) for index, dim in enumerate(kept)]
    return Relations(list(ties), {(source, dim): REDUCTIONS[node.target] for dim in over})


def _product(node: fx.Node) -> Relations:
    *bias, left, right = node.args[:3] if node.target in (aten.addmm.default, aten.baddbmm.default) else node.args[:2]
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    rank = len(_sizes(node))
    ties: list[tuple[Slot, ...]] = [((node, rank - 2), (left, rank - 2)), ((node, rank - 1), (right, rank - 1))]
    ties += [((node, 0), (left, 0), (right, 0))] if rank == 3 else []
    for operand in bias:
        assert isinstance(operand, fx.Node)
        ties += _pointwise(node, [operand]).ties
    inner = (left, rank - 1), (right, rank - 2)
    return Relations([*ties, inner], dict.fromkeys(inner, 0.0))


def _cat(node: fx.Node) -> Relations:
    parts: list[fx.Node] = node.args[0]  # type: ignore[assignment]
    rank = len(_sizes(node))
    along = int(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % rank  # type: ignore[arg-type]
    return Relations([((node, dim), *((part, dim) for part in parts)) for dim in range(rank) if dim != along])


def _gather(node: fx.Node) -> Relations:
    source, dim, index = node.args[:3]
    assert isinstance(source, fx.Node)
    assert isinstance(index, fx.Node)
    rank = len(_sizes(source))
    along = int(dim) % rank  # type: ignore[arg-type]
    return Relations([((node, d), (index, d)) for d in range(rank)], free=[(source, along)])


def _scatter(node: fx.Node) -> Relations:
    source, dim = node.args[:2]
    rank = len(_sizes(source))  # type: ignore[arg-type]
    at = dim % rank  # type: ignore[operator]
    return Relations([((node, at), (source, at))])  # type: ignore[list-item]


def _embedding(node: fx.Node) -> Relations:
    table: fx.Node = node.args[0]  # type: ignore[assignment]
    return Relations([((node, len(_sizes(node)) - 1), (table, 1))], free=[(table, 0)])


def _index(node: fx.Node) -> Relations:
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    indices: Sequence[Any] = node.args[1]  # type: ignore[assignment]
    if len(indices) != 1 or indices[0] is None or _is_mask(indices[0]):
        return Relations()
    shift = len(_sizes(indices[0])) - 1
    ties = [((node, dim + shift), (source, dim)) for dim in range(1, len(_sizes(source)))]
    return Relations(list(ties), free=[(source, 0)])


def _index_put(node: fx.Node) -> Relations:
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    indices: Sequence[Any] = node.args[1]  # type: ignore[assignment]
    if len(indices) != 1 or indices[0] is None or _is_mask(indices[0]):
        return Relations()
    return Relations([((node, 0), (source, 0))])


def _is_mask(node: fx.Node) -> bool:
    value = fake_value(node)
    return value is None or value.dtype in (torch.bool, torch.uint8)


_RULES: Final[Mapping[Any, Callable[[fx.Node], Relations]]] = {
    **dict.fromkeys(_MAPS, _mapped),
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys((aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default), _product),
    **dict.fromkeys(CREATIONS, lambda node: Relations([((node, dim),) for dim in range(len(_sizes(node)))])),
    aten.cat.default: _cat,
    aten.gather.default: _gather,
    aten.scatter.value: _scatter,
    aten.scatter.src: lambda node: Relations(),
    aten.embedding.default: _embedding,
    aten.index.Tensor: _index,
    aten.index_put.default: _index_put,
}


def closure(start: Slot, relations: Reader = dim_relations) -> list[Slot]:
    """All dims that must have the size of one: those that operations tie to it, and on; in the order in which they are found.

    Args:
        start: the one.
        relations: `dim_relations`, or what remembers its results for a graph that stays as it is.
    """
    slots = {start: None}
    todo = [start]
    while todo:
        slot = todo.pop()
        for node in (slot[0], *slot[0].users):
            found_there = relations(node)
            for tie in found_there.ties if found_there is not None else ():
                if slot in tie:
                    fresh = [other for other in tie if other not in slots]
                    slots.update(dict.fromkeys(fresh))
                    todo.extend(fresh)
    return list(slots)
