"""Which dims of a graph grow: those whose products gain more than the copies at the borders cost, and not more by a cut."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from foci.compat.fx import contiguous_strides
from foci.padding.choose_padding import seconds_by_rows
from foci.padding.dims import Reader, closure, dim_relations
from foci.padding.legality import rows_fix
from foci.padding.model import Machine, is_profitable_to_pad, seconds
from foci.padding.padded_op import Growth, grow
from foci.padding.reading import (
    VIEWS,
    Matrix,
    Origin,
    Product,
    fake_value,
    find_base,
    find_origin,
    find_products,
    hints,
    source_location,
)
from foci.padding.report import Padding
from foci.padding.slice_back import Cut, choose_cut, cut, may_be_cut, seconds_cut
from foci.padding.strides import ALIGNMENT, SMALLEST_STRIDE, round_up

__all__ = ["grow_dims"]


def grow_dims(graph: fx.Graph, machine: Machine) -> tuple[Padding, ...]:
    """Grows the dims of bad size that pay.

    Products that gain more by a cut are cut first. A product is slow until the last of its bad dims has grown. So all that may
    grow do at first, then one after another is left out, as long as that gains.

    Args:
        graph: functional, but for writes to its inputs at the end; its nodes carry fake tensors.
        machine: that it will run on.

    Returns:
        A line for each matrix of products with such a dim.
    """
    relations = functools.cache(dim_relations)  # each operation is looked at once, as long as the graph stays as it is
    products = list(find_products(graph, machine.load))
    paddings = []
    for product in products:
        cut_and_gain = _cut(products, product, relations, machine)
        if cut_and_gain is not None:
            paddings.append(_cut_entry(*cut_and_gain))
            cut(graph, cut_and_gain[0])
            relations.cache_clear()
    if paddings:
        products = list(find_products(graph, machine.load))
    growths = list(_growths(products, relations, machine))
    legal = [growth for growth, obstacle in growths if obstacle is None]
    taken = _chosen(legal, products, machine)
    for growth, obstacle in growths:
        reason = obstacle if growth not in taken else None
        touched = [product for product in products if _touches(product, growth)]
        gain = 0.0
        if obstacle is None:
            remaining = [other for other in taken if other is not growth]
            gain = _net(products, [*remaining, growth], machine) - _net(products, remaining, machine)
            reason = None if growth in taken else f"it gains {gain * 1e6:.1f} us, copies counted"
        paddings += _entries(touched, growth, gain, reason)
    if taken:
        grow(graph, taken[0].and_also(*taken[1:]))
    return tuple(paddings)


def _cut(products: Sequence[Product], product: Product, relations: Reader, machine: Machine) -> tuple[Cut, float] | None:
    """How a product is cut and what that gains, if it is more than by growing or by groups of rows."""
    if not may_be_cut(product, machine):
        return None
    growth, obstacle = _growth(product.matrices[0], relations, machine)
    if obstacle is not None or sum(_touches(other, growth) for other in products) > 1:
        return None
    best_cut, before, aligned = choose_cut(product, growth, machine), _time(product, None, machine), _time(product, growth, machine)
    if best_cut is None or before is None or aligned is None:
        return None
    after = seconds_cut(product, aligned, machine)
    alternatives = before - seconds_by_rows(product, aligned, machine), _net(products, [growth], machine)
    return (best_cut, before - after) if is_profitable_to_pad(before, after, 0.0) and before - after >= max(alternatives) else None


def _growths(products: Sequence[Product], relations: Reader, machine: Machine) -> Iterator[tuple[Growth, str | None]]:
    """Every set of dims of bad size that products read or write, with what forbids it to grow; none that is left to groups of rows."""
    done: set[tuple[fx.Node, int]] = set()
    for product in products:
        for matrix in product.matrices:
            if matrix.extent < machine.load and (matrix.node, matrix.inner) not in done:
                growth, obstacle = _growth(matrix, relations, machine)
                done |= growth.lengths.keys()
                if obstacle is not None or not _goes_by_rows(products, matrix, growth, machine):
                    yield growth, obstacle


def _growth(start: Matrix, relations: Reader, machine: Machine) -> tuple[Growth, str | None]:
    """Return what would grow with the rows of a matrix, and what forbids it."""
    value = fake_value(start.node)
    assert value is not None
    size = hints(value.shape)[start.inner]
    alignment = ALIGNMENT if size >= SMALLEST_STRIDE else machine.load
    length = size, round_up(size, alignment // value.dtype.itemsize)
    growth = Growth(dict.fromkeys(closure((start.node, start.inner), relations), length), relations)
    if machine.table is None:
        return growth, f"no measurements of {machine.name}: run `foci tune`"
    if any(isinstance(node.meta["val"].shape[dim], torch.SymInt) for node, dim in growth.lengths):
        return growth, "the length of its rows is symbolic"
    return growth, None


def _goes_by_rows(products: Sequence[Product], matrix: Matrix, growth: Growth, machine: Machine) -> bool:
    """Whether a product's only bad matrix is better read or written where it lies, which may cost less than a copy of it."""
    readers = [product for product in products if any(m.base is matrix.base for m in product.matrices)]
    bad = [m for m in readers[0].matrices if m.fault(machine.load) is not None]
    if len(readers) > 1 or len(bad) > 1 or rows_fix(readers[0], matrix) is None or not _has_one_home(products, matrix, growth):
        return False
    before, aligned = _time(readers[0], None, machine), _time(readers[0], growth, machine)
    if before is None or aligned is None:
        return False
    after = seconds_by_rows(readers[0], aligned, machine)
    return is_profitable_to_pad(before, after, 0.0) and before - after > _net(products, [growth], machine)


def _has_one_home(products: Sequence[Product], matrix: Matrix, growth: Growth) -> bool:
    """Whether a matrix that is read comes from outside or a loop; of one that is written, whether its dims are of no other product."""
    if matrix.role == "out":
        return sum(_touches(product, growth) for product in products) == 1
    return find_origin(matrix.base) not in (Origin.PRODUCT, Origin.CONSTANT) and matrix.base is matrix.node


def _chosen(legal: Sequence[Growth], products: Sequence[Product], machine: Machine) -> list[Growth]:
    taken = list(legal)
    while taken:
        without = [[other for other in taken if other is not growth] for growth in taken]
        nets = [_net(products, rest, machine) for rest in without]
        best = max(range(len(nets)), key=lambda index: nets[index])
        touched = [product for product in products if _touches(product, taken[best])]
        before = sum(time for product in touched if (time := _time(product, None, machine)) is not None)
        if is_profitable_to_pad(before, before - (_net(products, taken, machine) - nets[best]), 0.0):
            return taken
        taken = without[best]
    return taken


def _touches(product: Product, growth: Growth) -> bool:
    return any((m.node, m.inner) in growth.lengths for m in product.matrices)


def _net(products: Sequence[Product], growths: Sequence[Growth], machine: Machine) -> float:
    """Seconds that growing gains over all products, less those that it costs."""
    if not growths:
        return 0.0
    together = growths[0].and_also(*growths[1:])
    return _gain(products, together, machine) - _cost(together, machine)


def _time(product: Product, growth: Growth | None, machine: Machine) -> float | None:
    kind = machine.kind(product.dtype)
    if kind is None or machine.table is None:
        return None
    left = [m for m in product.matrices if growth is None or (m.node, m.inner) not in growth.lengths]
    return seconds(machine.table, kind, product.shape, {m.role: fault for m in left if (fault := m.fault(machine.load))})


def _gain(products: Sequence[Product], growth: Growth, machine: Machine) -> float:
    touched = [product for product in products if _touches(product, growth)]
    times = [(_time(product, None, machine), _time(product, growth, machine)) for product in touched]
    return sum(before - after for before, after in times if before is not None and after is not None)


def _cost(growth: Growth, machine: Machine) -> float:
    """Seconds of copies at the borders, and of masking what no generated loop reads or writes."""
    if machine.table is None:
        return 0.0
    passes = 0.0
    launches = 0
    for node in growth.nodes:
        dims = growth.dims(node)
        moved = 0
        if not growth.remakes(node) and _is_read_whole(node, growth):
            # along rows, the copy's reads and writes are misaligned by turns
            moved += 4 if any(_is_inner(node, dim) for dim in dims) else 2
        if _is_masked(node, growth) and find_origin(find_base(node)) is Origin.PRODUCT:
            moved += 2
        if _leaves(node, growth) and find_origin(find_base(node)) is not Origin.INPUT and any(_outer(node, dim) for dim in dims):
            moved += 2 if find_origin(find_base(node)) is Origin.PRODUCT else 1
        if moved:
            value = fake_value(node)
            assert value is not None
            passes += moved * math.prod(hints(value.shape)) * value.dtype.itemsize
            launches += 1
    return passes / machine.table.bandwidth + launches * machine.table.launch


def _is_read_whole(node: fx.Node, growth: Growth) -> bool:
    """Whether somebody but a generated loop, which would pad while reading, reads a tensor from outside, through views too."""
    for reader in node.users:
        if reader.target in VIEWS and growth.dims(reader) and growth.remakes(reader):
            if _is_read_whole(reader, growth):
                return True
        elif find_origin(reader) is Origin.PRODUCT and growth.remakes(reader):
            return True
    return False


def _is_masked(node: fx.Node, growth: Growth) -> bool:
    """Whether a product runs over a grown dim of it."""
    for reader in node.users:
        relations = growth.relations(reader) if find_origin(reader) is Origin.PRODUCT else None
        if relations is not None and any((node, dim) in relations.reduced for dim in growth.dims(node)):
            return True
    return False


def _leaves(node: fx.Node, growth: Growth) -> bool:
    return any(reader.op == "output" or (reader.target not in VIEWS and not growth.remakes(reader)) for reader in node.users)


def _is_inner(node: fx.Node, dim: int) -> bool:
    """Whether a dim runs along rows."""
    value = fake_value(node)
    assert value is not None
    return value.dim() > 1 and hints(value.stride())[dim] == 1


def _outer(node: fx.Node, dim: int) -> bool:
    """Whether a dim lies inside another, so that cutting it leaves gaps."""
    value = fake_value(node)
    assert value is not None
    strides, sizes = hints(value.stride()), hints(value.shape)
    return any(size > 1 and stride > strides[dim] for size, stride in zip(sizes, strides))


def _cut_entry(chosen_cut: Cut, gain: float) -> Padding:
    product = chosen_cut.product
    left = product.matrices[0]
    value = fake_value(left.node)
    assert value is not None
    sizes, strides = hints(value.shape), hints(value.stride())
    shorter = contiguous_strides((*sizes[:-1], chosen_cut.length))
    return Padding(left.base.name, (str(product),), sizes, strides, shorter, "cut", gain, location=source_location(product.node))


def _entries(products: Sequence[Product], growth: Growth, gain: float, reason: str | None) -> Iterator[Padding]:
    """One line for each matrix, however many products read it."""
    bases: dict[fx.Node, list[Product]] = {}
    for product in products:
        for matrix in product.matrices:
            if growth.dims(matrix.base):
                bases.setdefault(matrix.base, []).append(product)
    for base, readers in bases.items():
        value = fake_value(base)
        assert value is not None
        sizes, strides = hints(value.shape), hints(value.stride())
        named = tuple(dict.fromkeys(map(str, readers)))
        location = next((place for product in readers if (place := source_location(product.node))), None)
        if reason is not None:
            yield Padding(base.name, named, sizes, strides, reason=reason, location=location)
            continue
        grown = [growth.lengths.get((base, dim), (0, size))[1] for dim, size in enumerate(sizes)]
        padded = contiguous_strides(grown)
        copied = not growth.remakes(base)
        taken = (math.prod(grown) - (0 if copied else math.prod(sizes))) * value.dtype.itemsize
        how = "copied" if copied else "in place"
        yield Padding(base.name, named, sizes, strides, tuple(padded), how, gain / len(bases), taken, location=location)
