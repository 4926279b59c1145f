"""How the dimensions of a match become batch, heads and positions, and which tensor each operand is read from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from foci.fusion.fx_utils import Size, as_call, example_tensor, is_half, is_written, same_size, size_hint
from foci.fusion.indices import Digit, Digits, Index, NeedsSplit, NoRule, coordinates, count_values, is_atom
from foci.fusion.match import Atoms, Place
from foci.fusion.views import step
from foci.ir import expr as ir
from foci.ir.expr import Expr
from foci.ir.rewrite import substitute

__all__ = ["Layout", "arrange", "source_place", "uncast_place"]

Number = Callable[[Size], Expr]


@dataclass(frozen=True, eq=False)
class Layout:
    """The dimensions of an attention in foci's order.

    Attributes:
        batch, heads: the shared dimensions; query heads are `heads`, key heads their first `kv_heads`.
        kv_heads: how many of `heads` key and value have.
        queries, keys, depth, width: the others.
    """

    batch: Digits
    heads: Digits
    kv_heads: int
    queries: Digits
    keys: Digits
    depth: Digits
    width: Digits

    def coordinates(self, number: Number) -> dict[Expr, Expr]:
        """Each atom as an expression of b, h, q_idx and kv_idx."""
        return coordinates({"b": self.batch, "h": self.heads, "q_idx": self.queries, "kv_idx": self.keys}, number)

    def placed(self, expr: Expr, number: Number) -> Expr:
        """An expression of a match's digits, as one of (b, h, q_idx, kv_idx)."""
        return substitute(expr, self.coordinates(number))


def arrange(atoms: Atoms, key: Place, value: Place) -> Layout:
    """Assign the shared dimensions to batch and heads. Heads are those that key and value lack, and the last one that they have; a single
    shared dimension is heads if its stride is smaller than that of the values' rows, as for one sequence, and results are laid out the
    same."""
    used = {d.expr for place in (key, value) for digits in place.index for d in digits}
    with_keys = [d for d in atoms.shared if d.expr in used]
    without = [d for d in atoms.shared if d.expr not in used]
    is_heads = len(with_keys) > 1 or (len(with_keys) == 1 and _lies_within(value, with_keys[0], atoms.keys))
    split = len(with_keys) - is_heads
    batch, heads = with_keys[:split], with_keys[split:]
    if not with_keys and len(without) > 1:
        batch, without = without[:1], without[1:]
    return Layout(tuple(batch), (*heads, *without), len(heads), atoms.queries, atoms.keys, atoms.depth, atoms.width)


def _lies_within(place: Place, digit: Digit, rows: Digits) -> bool:
    """Whether a dimension's steps in memory are smaller than those of others."""
    tensor, steps = example_tensor(place.node), dict[Expr, int]()
    for digits, stride in zip(place.index, () if tensor is None else tensor.stride(), strict=tensor is not None):
        within = size_hint(stride)
        for each in reversed(digits):
            steps[each.expr] = within
            within *= size_hint(each.size)
    return digit.expr in steps and all(d.expr in steps and steps[digit.expr] < steps[d.expr] for d in rows)


_WIDENING: Final = frozenset(("to", "float", "type", "convert_element_type", "double"))


def uncast_place(place: Place, number: Number, element: Callable[[fx.Node, Index], Expr]) -> tuple[Place, torch.dtype | None]:
    """The operand before it was widened to float32, and its half dtype; the operand itself and None where it was not."""
    node, index = place.node, place.index
    while True:
        call, tensor = as_call(node), example_tensor(node)
        if call is not None and tensor is not None and call.name in _WIDENING and not is_written(node):
            before = example_tensor(call.args[0])
            if before is not None and is_half(before.dtype) and tensor.dtype == torch.float32:
                return Place(call.args[0], index), before.dtype
        try:
            moved = step(node, index, number, element)
        except (NoRule, NeedsSplit):
            return place, None
        if moved is None or not _is_plain(moved[1]):
            return place, None
        node, index = moved


def source_place(place: Place, atoms: Atoms, number: Number, element: Callable[[fx.Node, Index], Expr]) -> Place:
    """Key or value before its heads were repeated.

    Raises:
        NeedsSplit: where the heads must be two dimensions to say so.
    """
    shared = {d.expr for d in atoms.shared}
    node, index, best = place.node, place.index, place
    smallest = _extent(index, shared)
    first: NeedsSplit | None = None
    needed: NeedsSplit | None = None
    while True:
        try:
            moved = step(node, index, number, element)
        except NoRule:
            break
        except NeedsSplit as request:
            if request.atom not in shared:
                break
            first = first or request
            index = _locally_split(index, request, shared)
            continue
        if moved is None or not _is_plain(moved[1]):
            break
        node, index = moved
        if not same_size(_extent(index, shared), smallest):
            smallest, best, needed = _extent(index, shared), Place(node, index), first
    if needed is not None:
        raise needed
    return best


def _extent(index: Index, shared: set[Expr]) -> Size:
    """Number of batch and head entries of an index; repeating heads only increases it."""
    return count_values([d for digits in index for d in digits if d.expr in shared])


def _locally_split(index: Index, request: NeedsSplit, shared: set[Expr]) -> Index:
    """The index with an atom in two, for this walk alone."""
    marks = [ir.axis(-(1 << 16) - 2 * len(shared) - n) for n in (0, 1)]
    shared |= set(marks)

    def parts(digit: Digit) -> Digits:
        if digit.expr is not request.atom:
            return (digit,)
        return Digit(marks[0], digit.size // request.low), Digit(marks[1], request.low)

    return tuple(tuple(p for d in digits for p in parts(d)) for digits in index)


def _is_plain(index: Index) -> bool:
    """Whether every dimension counts atoms, each once."""
    digits = [d for dim in index for d in dim]
    return all(is_atom(d) for d in digits) and len({d.expr for d in digits}) == len(digits)
