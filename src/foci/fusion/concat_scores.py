"""Scores that are a sum of several products, as one product of features side by side: q1 k1ᵀ + q2 k2ᵀ = [q1, q2] [k1, k2]ᵀ.

Latent attention adds the scores of positions to those of contents (DeepSeek-V2, 2024, section 2.1.3), layout models add those of
text and layout (LiLT, Wang et al. 2022, equation 4). One product makes the scores, the others would be captured, each as long as the
scores themselves. Features side by side are copies, so products are joined only where these are no larger than the scores.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from foci.compat.fake import FakeTensorMode
from foci.fusion.emit import Emitter, Sizes
from foci.fusion.fx_utils import (
    CASTS,
    Call,
    Size,
    as_call,
    fixed_number,
    is_tensor,
    is_written,
    node_dtype,
    node_rank,
    node_shape,
    same_size,
    size_hint,
)
from foci.fusion.products import Product, as_product
from foci.fusion.replacing import erase
from foci.fusion.symbolic_element import stops_gradient
from foci.ir.rule import Rule, by_name

__all__ = ["RULES", "Joined", "join_products"]

_MOST_TERMS: Final = 16
_MOST_FEATURES: Final = 512
"""Largest head dim of all products concatenated: beyond it no fused kernel exists."""


@dataclass(frozen=True)
class Joined:
    """A sum and what computes it by one product.

    Attributes:
        old: the sum.
        new_nodes: what stands for it, in order; the last is the sum.
        inside: the nodes that `old` was made of: its terms, but for those that are no products.
    """

    old: fx.Node
    new_nodes: tuple[fx.Node, ...]
    inside: frozenset[fx.Node]

    def keep(self, graph: fx.Graph) -> None:
        """Erases the sum and what was made for it alone."""
        erase(graph, self.old, self.inside)

    def undo(self, graph: fx.Graph) -> None:
        """Puts the sum back."""
        self.new_nodes[-1].replace_all_uses_with(self.old)
        for node in reversed(self.new_nodes):
            graph.erase_node(node)


def join_products(graph: fx.Graph, passed: Sequence[fx.Node], sizes: Sizes, mode: FakeTensorMode | None) -> list[Joined]:
    """Puts one product in the place of every sum of several.

    Args:
        graph: is changed.
        passed: what stands above a softmax, the last first: a sum within a sum is read with it.
        sizes: where symbolic sizes are found.
        mode: under which example values are made.
    """
    joined: list[Joined] = []
    if sum(as_product(node) is not None for node in passed) < 2:
        return joined
    seen: set[fx.Node] = set()
    for node in passed:
        if node in seen or not _is_sum(node):
            continue
        within: set[fx.Node] = set()
        terms = _terms(node, within)
        seen |= within
        above = node.prev
        try:
            chosen = _chosen(node, terms)
            if len(chosen) > 1:
                other_terms = [term for term in terms if term not in chosen]
                new = _emitted(Emitter(graph, node, mode, sizes), node, list(chosen.values()), other_terms)
                joined.append(Joined(node, tuple(_between(above, new)), frozenset({*within, *(term.node for term in chosen)})))
                node.replace_all_uses_with(new)
        except Exception:  # such as a size that the graph has nowhere: the sum stays what it is
            for unused in reversed(tuple(_between(above, node.prev))):
                graph.erase_node(unused)
    return joined


def _between(above: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """The nodes after `above`, up to `last`."""
    while above is not last:
        above = above.next
        yield above


@dataclass(frozen=True, eq=False)
class _Term:
    """factor * node, of a sum; what the product makes where the node is one."""

    node: fx.Node
    factor: float
    product: Product | None


@dataclass(frozen=True)
class _Part:
    """A product in a sum.

    Attributes:
        factor: of the product.
        dtype: in which it multiplies.
        sides: its operands, each with the dimension of the sum that each of its dimensions is: None for one of size 1, -1 for one that
            the product sums over.
    """

    factor: float
    dtype: torch.dtype
    sides: tuple[tuple[fx.Node, tuple[int | None, ...]], tuple[fx.Node, tuple[int | None, ...]]]

    @property
    def features(self) -> Size:
        node, places = self.sides[0]
        return math.prod(n for n, place in zip(node_shape(node), places, strict=True) if place == -1)

    def has(self, side: int) -> frozenset[int]:
        return frozenset(place for place in self.sides[side][1] if place is not None and place >= 0)


def _is_sum(node: fx.Node) -> bool:
    call = as_call(node)
    if call is None or call.in_place or not is_tensor(node) or is_written(node) or stops_gradient(node):
        return False
    product = as_product(node)
    return call.name in ("add", "sub") if product is None else product.addend is not None


def _terms(node: fx.Node, within: set[fx.Node]) -> list[_Term]:
    """Terms of the sum; nodes that add and scale are added to `within`."""
    stack: list[tuple[fx.Node, float]] = [(node, 1.0)]
    terms: list[_Term] = []
    while stack:
        term, factor = stack.pop()
        following = _summands(term, factor) if term is node or (_is_alike(term, node) and len(terms) + len(stack) < _MOST_TERMS) else None
        if following is None:
            terms.append(_Term(term, factor, as_product(term) if _is_alike(term, node) else None))
            continue
        within.add(term)
        terms += [t for t in following if isinstance(t, _Term)]
        stack += [t for t in reversed(following) if not isinstance(t, _Term)]
    return terms


def _is_alike(term: fx.Node, total: fx.Node) -> bool:
    """Whether the term has the sum's shape and flows where it does."""
    if not is_tensor(term) or is_written(term) or stops_gradient(term) or node_rank(term) != node_rank(total):
        return False
    return node_dtype(term).is_floating_point and all(map(same_size, node_shape(term), node_shape(total)))


def _summands(node: fx.Node, factor: float) -> list[tuple[fx.Node, float] | _Term] | None:
    """The terms of a node, each a node that may have more of them or a product; None where it is one itself."""
    product, call = as_product(node), as_call(node)
    if product is not None:
        alpha, beta = _constant(product.alpha), _constant(product.beta)
        if product.addend is None or not alpha or not beta:
            return None
        return [_Term(node, factor * alpha, product), (product.addend, factor * beta)]
    rule = None if call is None or call.in_place or not call.args else _SUMS.get(call.name)
    terms = None if call is None or rule is None else rule(call, node)
    return None if terms is None else [(term, factor * weight) for term, weight in terms]


# ---- what a sum passes through ----

Weighted: TypeAlias = list[tuple[fx.Node, float]]
"""Nodes of a sum, each with its factor."""
Reader: TypeAlias = Callable[[Call, fx.Node], Weighted | None]
"""Reads a node as a sum of others; None where it is none."""


def _cast(call: Call, node: fx.Node) -> Weighted | None:
    source = call.args[0]
    if not is_tensor(source):
        return None
    return [(source, 1.0)] if torch.promote_types(node_dtype(source), node_dtype(node)) == node_dtype(node) else None


def _negative(call: Call, node: fx.Node) -> Weighted | None:
    return [(call.args[0], -1.0)]


def _added(call: Call, node: fx.Node) -> Weighted | None:
    if len(call.args) != 2 or set(call.kwargs) - {"alpha"} or not all(map(is_tensor, call.args)):
        return None
    alpha = _constant(call.kwargs.get("alpha", 1))
    return [(call.args[0], 1.0), (call.args[1], alpha * (1 if call.name == "add" else -1))] if alpha else None


def _scaled(call: Call, node: fx.Node) -> Weighted | None:
    if len(call.args) != 2 or call.kwargs:
        return None
    numbers = [_constant(arg) for arg in call.args]
    if sum(number is not None for number in numbers) != 1:
        return None
    number = numbers[0] if numbers[1] is None else numbers[1]
    return [(next(arg for arg in call.args if is_tensor(arg)), number)] if number else None


def _divided(call: Call, node: fx.Node) -> Weighted | None:
    number = _constant(call.args[1]) if len(call.args) == 2 and not call.kwargs and is_tensor(call.args[0]) else None
    return [(call.args[0], 1 / number)] if number else None


# Examples are of `s` and `t`, two products of one shape.
RULES: Final[tuple[Rule[Reader], ...]] = (
    Rule(("add", "sub"), "a sum, or a difference, of tensors of one shape", _added,
         ("s + t", "s - t", "torch.add(s, t, alpha=0.5)", "torch.sub(s, t, alpha=2)"),
         ("s + t[:, :, :1]", "torch.add(s, t, alpha=0)")),
    Rule(("neg",), "the negative of a sum", _negative, ("-s + t", "-(s + t) + s"), ("-(s * t) + t",)),
    Rule(("mul",), "a sum times a number that is not zero", _scaled, ("s * 2 + t", "0.5 * (s + t) + s"), ("s * t + t", "s * 0 + t")),
    Rule(("div",), "a sum divided by a number", _divided, ("s / 2 + t", "(s - t) / 3 + s"), ("2 / s + t", "s / t + t")),
    Rule(tuple(sorted(CASTS)), "a sum in a dtype that holds each of its values", _cast, ("s.float() + t", "(s + t).double() + s.double()"),
         ("s.half().float() + t",)),
)  # fmt: skip

_SUMS: Final[Mapping[str, Reader]] = by_name(RULES)


def _constant(arg: Any) -> float | None:
    number = None if is_tensor(arg) else fixed_number(arg)
    return float(number) if isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number) else None


def _chosen(total: fx.Node, terms: Sequence[_Term]) -> dict[_Term, _Part]:
    """The products that can be one with the first, aligned."""
    chosen: dict[_Term, _Part] = {}
    for term in terms:
        part = None if term.product is None else _part(term.factor, term.product)
        if part is None:
            continue
        first = next(iter(chosen.values()), part)
        turned = replace(part, sides=(part.sides[1], part.sides[0]))
        part = min(part, turned, key=lambda p: sum(len(p.has(side) ^ first.has(side)) for side in (0, 1)))
        if part.dtype == first.dtype and _pays(total, [*chosen.values(), part]):
            chosen[term] = part
    return chosen


def _part(factor: float, product: Product) -> _Part | None:
    places = {name: n for n, name in enumerate(product.out)}
    sides = tuple(
        (operand, tuple(None if name is None else places.get(name, -1) for name in labels))
        for operand, labels in zip(product.operands, product.labels, strict=True)
    )
    summed = [
        {name: n for name, n in zip(labels, node_shape(operand), strict=True) if name is not None and name not in places}
        for operand, labels in zip(product.operands, product.labels, strict=True)
    ]
    if not summed[0] or list(summed[0]) != list(summed[1]) or not all(same_size(n, summed[1][name]) for name, n in summed[0].items()):
        return None
    if any(is_written(operand) or not is_tensor(operand) for operand in product.operands):
        return None
    return _Part(factor, node_dtype(product.node), (sides[0], sides[1]))


def _pays(total: fx.Node, parts: Sequence[_Part]) -> bool:
    """Whether rows and columns are each some side's alone, and neither side is larger than the scores."""
    lengths = [size_hint(n) for n in node_shape(total)]
    features = sum(size_hint(part.features) for part in parts)
    has = [frozenset[int]().union(*(part.has(side) for part in parts)) for side in (0, 1)]
    if not has[0] - has[1] or not has[1] - has[0] or features > _MOST_FEATURES:
        return False
    return all(features * math.prod(lengths[place] for place in side) <= math.prod(lengths) for side in has)


def _emitted(emitter: Emitter, sum_node: fx.Node, parts: Sequence[_Part], other_terms: Sequence[_Term]) -> fx.Node:
    """The sum: one product of what stands side by side, and whatever is no product."""
    shape, factor = node_shape(sum_node), parts[0].factor
    names = [chr(ord("a") + n) for n in range(len(shape))]
    operands, texts = [], []
    for side in (0, 1):
        places = sorted(frozenset[int]().union(*(part.has(side) for part in parts)))
        pieces = [_piece(emitter, part, side, places, shape, part.factor / factor if side == 0 else 1.0) for part in parts]
        operands.append(emitter.call(torch.cat, tuple(pieces), -1))
        texts.append("".join(names[place] for place in places) + "z")
    total = emitter.call(torch.einsum, f"{texts[0]},{texts[1]}->{''.join(names)}", *operands)
    if factor != 1:
        total = emitter.call(operator.mul, total, factor)
    for term in other_terms:
        node = term.node if term.factor == 1 else emitter.call(operator.mul, term.node, term.factor)
        total = emitter.call(operator.add, total, node)
    return total if node_dtype(total) == node_dtype(sum_node) else emitter.method("to", total, node_dtype(sum_node))


def _piece(emitter: Emitter, part: _Part, side: int, places: Sequence[int], shape: Sequence[Size], factor: float) -> fx.Node:
    """An operand with a dimension for each of `places` and its features last, times `factor`."""
    node, node_places = part.sides[side]
    if node_dtype(node) != part.dtype:  # what autocast does
        node = emitter.method("to", node, part.dtype)
    places_left = [place for place in node_places if place is not None]
    if len(places_left) != len(node_places):
        node = emitter.method("squeeze", node, tuple(n for n, place in enumerate(node_places) if place is None))
    summed = [n for n, place in enumerate(places_left) if place == -1]
    order = [*sorted((n for n, place in enumerate(places_left) if place >= 0), key=places_left.__getitem__), *summed]
    if order != sorted(order):
        node = emitter.method("permute", node, tuple(order))
    if len(summed) > 1:
        node = emitter.method("flatten", node, -len(summed))
    for n, place in enumerate(places):
        if place not in places_left:
            node = emitter.method("unsqueeze", node, n)
    if any(place not in places_left for place in places):
        node = emitter.method("expand", node, *(emitter.size(shape[place]) if place not in places_left else -1 for place in places), -1)
    return node if factor == 1 else emitter.call(operator.mul, node, factor)
