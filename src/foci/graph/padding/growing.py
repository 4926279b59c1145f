"""Which dims of a graph grow: those whose products gain more than the copies at the borders cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import fx

from foci.graph.padding.decide import BY_ROWS
from foci.graph.padding.dims import closure, relations_of
from foci.graph.padding.growth import Growth, grow, is_remade
from foci.graph.padding.legal import rows_fix
from foci.graph.padding.model import Machine, is_profitable_to_pad, seconds
from foci.graph.padding.reading import VIEWS, Matrix, Origin, Product, base_of, hints, location_of, origin_of, products_of, value_of
from foci.graph.padding.report import Padding
from foci.graph.padding.strides import ALIGNMENT, SMALLEST_STRIDE, round_up

__all__ = ["grow_dims"]


def grow_dims(graph: fx.Graph, machine: Machine) -> tuple[Padding, ...]:
    """Grows, one after another, the sets of dims of bad size that pay.

    Args:
        graph: functional, but for writes to its inputs at the end; its nodes carry fake tensors.
        machine: that it will run on.

    Returns:
        A line for each matrix of products with such a dim.
    """
    paddings: list[Padding] = []
    done: set[tuple[fx.Node, int]] = set()
    while (start := next(_bad(graph, machine, done), None)) is not None:
        growth, obstacle = _growth(start, machine)
        products = _touched(products_of(graph, machine.load), growth)
        gain, cost = _gain(products, growth, machine), _cost(graph, growth, machine)
        done |= growth.slots
        reason = obstacle or _refusal(products, growth, gain, cost, machine)
        paddings += _entries(products, growth, None if reason else gain - cost, reason)
        if reason is None:
            grow(graph, growth)
    return tuple(paddings)


def _bad(graph: fx.Graph, machine: Machine, done: set[tuple[fx.Node, int]]) -> Iterator[Matrix]:
    """Matrices whose rows are of bad length, if nothing was decided about them."""
    for product in products_of(graph, machine.load):
        yield from (m for m in product.matrices if m.extent < machine.load and (m.node, m.inner) not in done)


def _growth(start: Matrix, machine: Machine) -> tuple[Growth, str | None]:
    """What would grow with the rows of a matrix, and what forbids it."""
    value = value_of(start.node)
    assert value is not None
    slots = frozenset(closure((start.node, start.inner)))
    size = hints(value.shape)[start.inner]
    alignment = ALIGNMENT if size >= SMALLEST_STRIDE else machine.load
    growth = Growth(slots, size, round_up(size, alignment // value.dtype.itemsize))
    if machine.table is None:
        return growth, f"no measurements of {machine.name}: run `foci tune`"
    if any(isinstance(node.meta["val"].shape[dim], torch.SymInt) for node, dim in slots):
        return growth, "the length of its rows is symbolic"
    return growth, None


def _touched(products: Iterable[Product], growth: Growth) -> list[Product]:
    return [product for product in products if any((m.node, m.inner) in growth.slots for m in product.matrices)]


def _time(product: Product, growth: Growth | None, machine: Machine) -> float | None:
    kind = machine.kind(product.dtype)
    if kind is None or machine.table is None:
        return None
    left = [m for m in product.matrices if growth is None or (m.node, m.inner) not in growth.slots]
    return seconds(machine.table, kind, product.shape, {m.role: fault for m in left if (fault := m.fault(machine.load))})


def _gain(products: Sequence[Product], growth: Growth, machine: Machine) -> float:
    times = [(_time(product, None, machine), _time(product, growth, machine)) for product in products]
    return sum(before - after for before, after in times if before is not None and after is not None)


def _cost(graph: fx.Graph, growth: Growth, machine: Machine) -> float:
    """Seconds of copies at the borders, and of masking what no generated loop reads or writes."""
    if machine.table is None:
        return 0.0
    passes = 0.0
    launches = 0
    for node in graph.nodes:
        dims = growth.dims(node)
        if not dims:
            continue
        moved = 0
        if not is_remade(node, growth) and _is_read_whole(node, growth):
            moved += 2
        if _is_masked(node, growth) and origin_of(base_of(node)) is Origin.PRODUCT:
            moved += 2
        if _leaves(node, growth) and origin_of(base_of(node)) is not Origin.INPUT and any(_outer(node, dim) for dim in dims):
            moved += 2 if origin_of(base_of(node)) is Origin.PRODUCT else 1
        if moved:
            value = value_of(node)
            assert value is not None
            passes += moved * math.prod(hints(value.shape)) * value.dtype.itemsize
            launches += 1
    return passes / machine.table.bandwidth + launches * machine.table.launch


def _is_read_whole(node: fx.Node, growth: Growth) -> bool:
    """Whether somebody but a generated loop, which would pad while reading, reads a tensor from outside, through views too."""
    for reader in node.users:
        if reader.target in VIEWS and growth.dims(reader) and is_remade(reader, growth):
            if _is_read_whole(reader, growth):
                return True
        elif origin_of(reader) is Origin.PRODUCT and is_remade(reader, growth):
            return True
    return False


def _is_masked(node: fx.Node, growth: Growth) -> bool:
    """Whether a product runs over a grown dim of it."""
    for reader in node.users:
        relations = relations_of(reader) if origin_of(reader) is Origin.PRODUCT else None
        if relations is not None and any((node, dim) in relations.reduced for dim in growth.dims(node)):
            return True
    return False


def _leaves(node: fx.Node, growth: Growth) -> bool:
    return any(reader.op == "output" or (reader.target not in VIEWS and not is_remade(reader, growth)) for reader in node.users)


def _outer(node: fx.Node, dim: int) -> bool:
    """Whether a dim lies inside another, so that cutting it leaves gaps."""
    value = value_of(node)
    assert value is not None
    strides, sizes = hints(value.stride()), hints(value.shape)
    return any(size > 1 and stride > strides[dim] for size, stride in zip(sizes, strides))


def _refusal(products: Sequence[Product], growth: Growth, gain: float, cost: float, machine: Machine) -> str | None:
    before = sum(time for product in products if (time := _time(product, None, machine)) is not None)
    if before == 0.0:
        return f"nothing like it was measured on {machine.name}: run `foci tune`"
    if not is_profitable_to_pad(before, before - gain, cost):
        return f"it gains {gain * 1e6:.1f} us of {before * 1e6:.1f}, for copies of {cost * 1e6:.1f} us"
    if len(products) == 1 and gain - cost < before - (before - gain) * BY_ROWS:
        matrices = [m for m in products[0].matrices if m.fault(machine.load) is not None]
        if len(matrices) == 1 and origin_of(matrices[0].base) is Origin.INPUT and rows_fix(products[0], matrices[0]) is not None:
            return "it is read by rows"
    return None


def _entries(products: Sequence[Product], growth: Growth, gain: float | None, reason: str | None) -> Iterator[Padding]:
    """One line for each matrix, however many products read it."""
    bases: dict[fx.Node, list[Product]] = {}
    for product in products:
        for matrix in product.matrices:
            if growth.dims(matrix.base):
                bases.setdefault(matrix.base, []).append(product)
    for base, readers in bases.items():
        value = value_of(base)
        assert value is not None
        sizes, strides = hints(value.shape), hints(value.stride())
        named = tuple(dict.fromkeys(map(str, readers)))
        location = next((found for product in readers if (found := location_of(product.node))), None)
        if gain is None:
            yield Padding(base.name, named, sizes, strides, reason=reason, location=location)
            continue
        grown = [growth.grown if dim in growth.dims(base) else size for dim, size in enumerate(sizes)]
        padded = torch.empty_strided(sizes, strides, device="meta").new_empty(grown).stride()
        copied = not is_remade(base, growth)
        taken = (math.prod(grown) - (0 if copied else math.prod(sizes))) * value.dtype.itemsize
        how = "copied" if copied else "in place"
        yield Padding(base.name, named, sizes, strides, tuple(padded), how, gain / len(bases), taken, location=location)
