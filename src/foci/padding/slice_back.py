"""A product whose inner dim has a bad size, cut in two.

Rows whose length is no multiple of 16 bytes make a product slow. Where a generated loop writes the left matrix, it can as well write
only the columns up to the last good size; the product takes those, and the few that are left are added to its result:

    A B = A[:, :c] B[:c] + sum over j >= c of A[:, j] B[j]

Both sides of the sum are computed from what the loop reads, the second where the result is written. So nothing is copied, nothing is
padded, and nothing needs a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from foci.compat.aten import OpOverload
from foci.padding.dims import CREATIONS
from foci.padding.model import Machine
from foci.padding.padded_op import Growth, call, lengthened, resized
from foci.padding.reading import VIEWS, Origin, Product, find_base, find_origin

__all__ = ["Cut", "choose_cut", "cut", "may_be_cut", "seconds_cut"]

aten = torch.ops.aten
prims = torch.ops.prims

SHORTEST: Final = 16
"""Times the columns that are left at most: a shorter product gains nothing."""


@dataclass(frozen=True, eq=False)
class Cut:
    """A product that can be cut.

    Attributes:
        product: with a bad inner dim.
        growth: all dims that are tied to it.
        loops: operations that are done for each part; what they read is sliced.
        size: of the inner dim.
        length: of the first part.
    """

    product: Product
    growth: Growth
    loops: frozenset[fx.Node]
    size: int
    length: int


def may_be_cut(product: Product, machine: Machine) -> bool:
    """Whether all that makes a product slow is the length of its left matrix's rows, which a loop writes."""
    bad = [matrix for matrix in product.matrices if matrix.fault(machine.load) is not None]
    known = product.node.target in _PRODUCTS and not product.node.kwargs
    return known and [matrix.role for matrix in bad] == ["a"] and find_origin(bad[0].base) is Origin.LOOP


def choose_cut(product: Product, growth: Growth, machine: Machine) -> Cut | None:
    """How to cut a product, or None if that is impossible or leaves it slow.

    Args:
        product: that may be cut, the only one that reads or writes dims of the set.
        growth: the set of dims that are tied to the inner one.
        machine: that it will run on.
    """
    left = product.matrices[0]
    per_load = machine.load // product.dtype.itemsize
    length = product.shape.k // per_load * per_load
    loops = _loops(product.node, growth)
    written = left.node in loops and left.base in loops
    parts = {node for reader in (*loops, product.node) for node in reader.all_input_nodes if growth.dims(node)}
    if not written or not all(_is_sliced(node, growth, loops) for node in parts) or length < SHORTEST * per_load:
        return None
    return Cut(product, growth, loops, product.shape.k, length)


_PRODUCTS: Final = frozenset({aten.mm.default, aten.bmm.default, aten.addmm.default})


def _loops(product: fx.Node, growth: Growth) -> frozenset[fx.Node]:
    """Return what is computed for this product alone, element by element, backwards from it."""
    loops: dict[fx.Node, None] = {product: None}
    todo = [product]
    while todo:
        for operand in todo.pop().all_input_nodes:
            alone = all(user in loops or _is_dead(user) for user in operand.users)
            if operand not in loops and alone and _is_loop(operand, growth):
                loops[operand] = None
                todo.append(operand)
    return frozenset(loops) - {product}


def _is_sliced(node: fx.Node, growth: Growth, loops: frozenset[fx.Node]) -> bool:
    """Whether parts of an operand are had for nothing: it lies in memory, or its loop is done for each part."""
    if len(growth.dims(node)) != 1:
        return False
    base = find_base(node)
    return node in loops or base.target in CREATIONS or find_origin(base) is not Origin.LOOP


def _is_dead(node: fx.Node) -> bool:
    """Decompositions leave what nobody reads."""
    return not node.users and not node.is_impure()


def _is_loop(node: fx.Node, growth: Growth) -> bool:
    if not growth.dims(node) or not growth.remakes(node) or node.target in CREATIONS:
        return False
    pointwise = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
    return pointwise or node.target in VIEWS or node.target is prims.convert_element_type.default


def seconds_cut(product: Product, aligned: float, machine: Machine) -> float:
    """Estimate the seconds of a product that is cut: its result is read and written once more.

    Args:
        product: to cut.
        aligned: seconds of the same product of aligned rows.
        machine: that it will run on.
    """
    assert machine.table is not None
    shape = product.shape
    moved = 2 * shape.batch * shape.m * shape.n * product.dtype.itemsize
    return aligned + moved / machine.table.bandwidth + machine.table.launch


def cut(graph: fx.Graph, chosen_cut: Cut) -> None:
    """Puts the two parts in the product's place.

    Args:
        graph: functional; its nodes carry fake tensors.
        found: of `choose_cut`, for this graph.
    """
    node, dtype = chosen_cut.product.node, chosen_cut.product.dtype
    *bias, left, right = node.args
    with graph.inserting_before(node):
        first, last = ([_part(graph, chosen_cut, start, {}, matrix) for matrix in (left, right)] for start in (0, chosen_cut.length))
        result = _loop(graph, node.target, (*bias, *first), node)
        wide = torch.promote_types(dtype, torch.float32)
        columns = _cast(graph, _loop(graph, aten.neg.default, last[:1], last[0]), wide), _cast(graph, last[1], wide)
        rest = None
        for column in range(chosen_cut.size - chosen_cut.length):
            # subtracted at the end: of a product and a sum Inductor would make one product that reads the summand from memory
            factors = [_column(graph, matrix, dim, column) for matrix, dim in zip(columns, (-1, -2))]
            share = _loop(graph, aten.mul.Tensor, factors, node, wide)
            rest = share if rest is None else _loop(graph, aten.add.Tensor, (rest, share), node, wide)
        result = _loop(graph, aten.sub.Tensor, (_cast(graph, result, wide), rest), node, wide)
        result = _cast(graph, result, dtype)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    for loop in reversed([other for other in graph.nodes if other in chosen_cut.loops]):
        for dead in (*loop.users, loop):
            graph.erase_node(dead)


def _loop(graph: fx.Graph, target: Any, arguments: Sequence[Any], like: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
    """An operation whose result has another's sizes."""
    return call(graph, target, arguments, like=like, sizes=like.meta["val"].shape, dtype=dtype)


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    if node.meta["val"].dtype is dtype:
        return node
    return _loop(graph, prims.convert_element_type.default, (node, dtype), node, dtype)


def _column(graph: fx.Graph, matrix: fx.Node, dim: int, column: int) -> fx.Node:
    return call(graph, aten.slice.Tensor, (matrix, matrix.meta["val"].dim() + dim, column, column + 1), like=matrix)


def _part(graph: fx.Graph, chosen_cut: Cut, start: int, parts: dict[fx.Node, fx.Node], node: Any) -> fx.Node:
    """A node's value for the columns from `start` on, up to where the product is cut."""
    stop = chosen_cut.length if start == 0 else chosen_cut.size
    if node not in parts:
        (dim,) = chosen_cut.growth.dims(node)
        if node in chosen_cut.loops:
            part = Growth(dict.fromkeys(chosen_cut.growth.lengths, (chosen_cut.size, stop - start)))
            inside = {operand: operand for operand in node.all_input_nodes if not chosen_cut.growth.dims(operand)}
            inside |= {
                operand: _part(graph, chosen_cut, start, parts, operand) for operand in node.all_input_nodes if operand not in inside
            }
            arguments, keywords = fx.map_arg((node.args, node.kwargs), lambda n: inside[n])
            sizes = lengthened(node, {dim: stop - start})
            parts[node] = call(graph, node.target, resized(part, node, arguments), keywords, node, sizes)
        else:
            parts[node] = call(graph, aten.slice.Tensor, (node, dim, start, stop), like=node)
    return parts[node]
