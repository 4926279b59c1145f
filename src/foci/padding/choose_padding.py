"""Which of the legal paddings are done: those that pay, together with what else a product needs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import fx

from foci.padding.legality import Fix, Illegal, is_legal_to_pad, rows_fix
from foci.padding.model import Machine, is_profitable_to_pad, seconds
from foci.padding.reading import Matrix, Product, fake_value, hints
from foci.padding.strides import padding_bytes

__all__ = ["Choice", "Verdict", "decide", "seconds_by_rows"]

_BY_ROWS: Final = 1.1
"""Of a product by groups of rows: the same product of aligned rows takes this much less."""

_LAUNCHES: Final = 8
"""Of the small operations around it, for the columns at the edges."""


def seconds_by_rows(product: Product, aligned: float, machine: Machine) -> float:
    """Estimate the seconds of a product by groups of rows, all told.

    Args:
        product: whose one misaligned matrix is read or written so.
        aligned: seconds of the same product of aligned rows.
        machine: that it will run on.
    """
    assert machine.table is not None
    shape, biased = product.shape, product.node.target is torch.ops.aten.addmm.default
    copied = 2 * (shape.m + shape.n) * shape.k * product.dtype.itemsize if biased else 0  # a bias lengthens both factors
    return aligned * _BY_ROWS + copied / machine.table.bandwidth + _LAUNCHES * machine.table.launch


@dataclass(frozen=True, eq=False)
class Verdict:
    """One tensor: what was chosen for it, or why nothing was.

    Attributes:
        base: the tensor.
        products: that read or write it with misaligned rows.
        fix: chosen, or None.
        seconds: expected gain, shared with what was chosen together with it.
        reason: if nothing was chosen.
    """

    base: fx.Node
    products: tuple[Product, ...]
    fix: Fix | None
    seconds: float = 0.0
    reason: str | None = None


@dataclass(eq=False)
class Choice:
    """The state of a decision: what is misaligned, what may be done about it, and what will be."""

    machine: Machine
    products: Sequence[Product]
    fixes: Mapping[fx.Node, Fix | Illegal]
    taken: dict[fx.Node, Fix] = field(default_factory=dict)
    by_rows: dict[fx.Node, Fix] = field(default_factory=dict)
    gains: dict[fx.Node, float] = field(default_factory=dict)

    def time(self, product: Product, also: frozenset[fx.Node] = frozenset()) -> float | None:
        """Seconds of a product, with what was taken and what might be."""
        kind = self.machine.kind(product.dtype)
        assert self.machine.table is not None
        if kind is None:
            return None
        faults = {m.role: m.fault(self.machine.load, mended=m.base in self.taken or m.base in also) for m in product.matrices}
        return seconds(self.machine.table, kind, product.shape, {role: fault for role, fault in faults.items() if fault is not None})

    def good(self, product: Product) -> float | None:
        """Seconds of a product without any fault."""
        kind = self.machine.kind(product.dtype)
        assert self.machine.table is not None
        return seconds(self.machine.table, kind, product.shape, {}) if kind is not None else None

    def _misaligned(self, matrix: Matrix) -> bool:
        return matrix.alignment < self.machine.load and matrix.base not in self.taken

    def open(self, product: Product) -> list[fx.Node]:
        """Bases of a product's matrices that are misaligned as yet and may be padded."""
        bases = dict.fromkeys(m.base for m in product.matrices if self._misaligned(m) and isinstance(self.fixes[m.base], Fix))
        return list(bases)

    def cost(self, fix: Fix) -> float:
        """Seconds of the copy."""
        table, value = self.machine.table, fake_value(fix.base)
        assert table is not None
        assert value is not None
        elements = 1
        for size in hints(value.shape):
            elements *= size
        return fix.passes * elements * value.dtype.itemsize / table.bandwidth + (table.launch if fix.passes == 2 else 0.0)


def decide(products: Sequence[Product], visible: frozenset[fx.Node], machine: Machine) -> tuple[list[Verdict], dict[fx.Node, Fix]]:
    """Return what becomes of every misaligned matrix, and the products that read theirs by groups of rows.

    Product after product, the set of its matrices is padded that gains most over all products which read or write one of them;
    so a second matrix is padded where the first alone would gain nothing.

    Args:
        products: of a graph.
        visible: outputs of the graph that a user sees.
        machine: that it will run on.
    """
    matrices: dict[fx.Node, list[Matrix]] = {}
    readers: dict[fx.Node, list[Product]] = {}
    for product in products:
        for matrix in product.matrices:
            matrices.setdefault(matrix.base, []).append(matrix)
            if matrix.alignment < machine.load:
                readers.setdefault(matrix.base, []).append(product)
    if machine.table is None:
        reason = f"no measurements of {machine.name}: run `foci tune`"
        return [Verdict(base, tuple(of), None, reason=reason) for base, of in readers.items()], {}
    fixes = {base: is_legal_to_pad(base, matrices[base], visible, machine.load) for base in readers}
    choice = Choice(machine, products, fixes)
    for product in products:
        _settle(choice, product, readers)
    return [_verdict(choice, base, of) for base, of in readers.items()], choice.by_rows


def _settle(choice: Choice, product: Product, readers: Mapping[fx.Node, Sequence[Product]]) -> None:
    """Takes the fixes that gain most, among all sets of those that are open for a product."""
    bases = choice.open(product)
    best: tuple[float, tuple[fx.Node, ...]] = (0.0, ())
    for count in range(1, len(bases) + 1):
        for chosen in itertools.combinations(bases, count):
            touched = dict.fromkeys(other for base in chosen for other in readers[base])
            before, after = _sum(choice, touched, frozenset()), _sum(choice, touched, frozenset(chosen))
            cost = sum(choice.cost(fix) for base in chosen if isinstance(fix := choice.fixes[base], Fix))
            if before is None or after is None or not is_profitable_to_pad(before, after, cost):
                continue
            if before - after - cost > best[0]:
                best = (before - after - cost, chosen)
    gain, chosen = best
    rows = _by_rows_instead(choice, product, gain)
    if rows is not None:
        choice.by_rows[product.node], choice.gains[rows[0].base] = rows
        choice.taken[rows[0].base] = rows[0]
        return
    for base in chosen:
        fix = choice.fixes[base]
        assert isinstance(fix, Fix)
        choice.taken[base], choice.gains[base] = fix, gain / len(chosen)


def _sum(choice: Choice, products: Mapping[Product, None], also: frozenset[fx.Node]) -> float | None:
    times = [choice.time(product, also) for product in products]
    return None if any(time is None for time in times) else sum(time for time in times if time is not None)


def _by_rows_instead(choice: Choice, product: Product, gain: float) -> tuple[Fix, float] | None:
    """Reading the left matrix or writing the result by groups of rows, if no other product is served by a copy and it gains more."""
    misaligned = [m for m in product.matrices if m.alignment < choice.machine.load and m.base not in choice.taken]
    if len(misaligned) != 1 or misaligned[0].base is not misaligned[0].node:
        return None
    matrix = misaligned[0]
    if sum(matrix.base is other.base for p in choice.products for other in p.matrices) > 1:
        return None
    fix = rows_fix(product, matrix)
    before, aligned = choice.time(product), choice.good(product)
    if fix is None or before is None or aligned is None:
        return None
    after = seconds_by_rows(product, aligned, choice.machine)
    if before - after > gain and is_profitable_to_pad(before, after, 0.0):
        return fix, before - after
    return None


def _verdict(choice: Choice, base: fx.Node, products: Sequence[Product]) -> Verdict:
    fix = choice.taken.get(base)
    if fix is not None:
        return Verdict(base, tuple(products), fix, choice.gains[base])
    legal = choice.fixes[base]
    if isinstance(legal, Illegal):
        return Verdict(base, tuple(products), None, reason=legal.reason)
    return Verdict(base, tuple(products), None, reason=_unprofitable(choice, legal, products))


def _unprofitable(choice: Choice, fix: Fix, products: Sequence[Product]) -> str:
    before = _sum(choice, dict.fromkeys(products), frozenset())
    after = _sum(choice, dict.fromkeys(products), frozenset({fix.base}))
    if before is None or after is None:
        return f"nothing like it was measured on {choice.machine.name}: run `foci tune`"
    cost = choice.cost(fix)
    value = fake_value(fix.base)
    assert value is not None
    extra = padding_bytes(fix.strides, hints(value.shape), value.dtype)
    return f"it gains {(before - after) * 1e6:.1f} us of {before * 1e6:.1f}, for copies of {cost * 1e6:.1f} us and {extra} bytes"
