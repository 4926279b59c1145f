"""One attention: second product, softmax, region and first product, read from the result backward into one expression.

The labels of the second product name the dimensions: summed are the keys, alone with the weights are the queries, alone with
the value is its head dim, shared are batch and heads. Each becomes atoms, and the element of the weights at those atoms is
pulled through whatever stands between, down to the first product, which must be found at exactly its own row, column and
batch. Where a view in between splits a dimension, the atom is split and the reading starts again; so B * H becomes B and H.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from foci.fusion.fx_utils import (
    CASTS,
    Call,
    Size,
    as_call,
    example_tensor,
    example_value,
    fixed_number,
    is_tensor,
    needs_grad,
    node_device,
    node_dtype,
    node_rank,
    node_shape,
    pad_arguments,
    same_size,
    single,
)
from foci.fusion.indices import Digit, Digits, Index, NeedsSplit, NoRule, broadcast_index, count_values, is_atom, offset
from foci.fusion.masking import LOWEST
from foci.fusion.materialise import estimate_prices
from foci.fusion.products import Product, as_product
from foci.fusion.symbolic_element import PASSED, Lift, stops_gradient
from foci.fusion.views import VIEWS
from foci.fusion.weights import Softmax, Walk, walk_up
from foci.ir import expr as ir
from foci.ir.expr import Expr
from foci.ir.ops import apply

__all__ = ["Atoms", "Match", "Naming", "Place", "path_to", "read"]

_MOST_PASSED = 2000


@dataclass(frozen=True)
class Place:
    """A tensor operand: a node, and what each of its dimensions counts."""

    node: fx.Node
    index: Index


@dataclass(frozen=True, eq=False)
class Atoms:
    """The dimensions of an attention, each as digits: shared (batch and heads), queries, keys, and the two head dims."""

    shared: Digits
    queries: Digits
    keys: Digits
    depth: Digits
    width: Digits


@dataclass(frozen=True, eq=False)
class Match:
    """An attention that was read.

    Attributes:
        node: what the attention replaces.
        dtypes: of the scores and of the result.
        query, key, value: the operands, indexed by atoms.
        atoms: the dimensions.
        score: the element that enters the softmax, of the variable `score` and the atoms.
        walk: what stands between softmax and second product.
        sink: the column put beside the scores before the softmax and dropped after it, read at the atoms, or its one number; or None.
        lift: holds what was captured.
        inside: nodes whose only purpose is this attention: from the first product to the second.
        out: the digits of each dimension of the result.
        logsumexps: nodes outside that read the scores only for their logsumexp over the keys, which the operator gives too.
    """

    node: fx.Node
    dtypes: tuple[torch.dtype, torch.dtype]
    query: Place
    key: Place
    value: Place
    atoms: Atoms
    score: Expr
    walk: Walk
    sink: tuple[fx.Node | float, Index] | None
    lift: Lift
    inside: frozenset[fx.Node]
    out: Index
    logsumexps: tuple[fx.Node, ...] = ()


class Naming:
    """Atoms of a second product's labels, split where views ask for it."""

    def __init__(self, second: Product) -> None:
        self._fresh = itertools.count(1)
        sizes: dict[str, Size] = {}
        for operand, labels in zip(second.operands, second.labels, strict=True):
            sizes.update((name, n) for name, n in zip(labels, node_shape(operand), strict=True) if name is not None)
        self.digits: dict[str, list[Digit]] = {name: [] if same_size(n, 1) else [self.atom(n)] for name, n in sizes.items()}

    def atom(self, size: Size) -> Digit:
        """A digit of its own."""
        return Digit(ir.axis(-next(self._fresh)), size)

    def split(self, request: NeedsSplit) -> None:
        """Puts two digits in the place of one, as a view asks for.

        Raises:
            NoRule: where none of these dimensions has that digit.
        """
        for digits in self.digits.values():
            for n, digit in enumerate(digits):
                if digit.expr is request.atom:
                    digits[n : n + 1] = [self.atom(digit.size // request.low), self.atom(request.low)]
                    return
        raise NoRule("a head dim is split between two dimensions")

    def index(self, labels: tuple[str | None, ...]) -> Index:
        """The digits of an operand's dimensions; a dimension without a label has none."""
        return tuple(() if name is None else tuple(self.digits[name]) for name in labels)

    def all(self, labels: tuple[str, ...]) -> Digits:
        """The digits of these labels, in a row."""
        return tuple(d for name in labels for d in self.digits[name])


def path_to(source: fx.Node) -> tuple[list[fx.Node], frozenset[fx.Node]]:
    """The products above a softmax's source, nearest first, and every node that was passed on the way."""
    products: list[fx.Node] = []
    seen: dict[fx.Node, None] = {}
    stack = [source]
    while stack:
        node = stack.pop()
        if node in seen or not _is_passed(node):
            continue
        seen[node] = None
        product = as_product(node)
        if product is not None:
            products.append(node)
            if product.addend is not None:
                stack.append(product.addend)
            continue
        stack.extend(reversed(node.all_input_nodes))
        if len(seen) > _MOST_PASSED:
            break
    return products, frozenset(seen)


def _is_passed(node: fx.Node) -> bool:
    call = as_call(node)
    return call is not None and (call.name in PASSED or as_product(node) is not None)


def read(
    naming: Naming, second: Product, side: int, softmax: Softmax, between: frozenset[fx.Node], first: Product, passed: frozenset[fx.Node]
) -> Match:
    """The attention between two products.

    Args:
        naming: the atoms of the second product.
        second: the product of weights and value.
        side: which of its operands is the weights.
        softmax: what made the weights.
        between: the nodes from the softmax to the second product.
        first: the product that makes the scores.
        passed: nodes above the softmax.

    Raises:
        NoRule: with what stood in the way.
        NeedsSplit: where an atom must be two.
    """
    value = 1 - side
    roles = {"queries": second.only(side), "keys": second.summed, "width": second.only(value), "shared": second.shared}
    if needs_grad(second.node) and stops_gradient(first.node):
        raise NoRule(f"no gradient flows through {first.node.name}")
    on_path = _depending(first.node, passed)
    indices: list[Index] = []
    shifted: dict[fx.Node, fx.Node] = {}

    def score(node: fx.Node, index: Index) -> Expr | None:
        if node in shifted:
            return lift.element(shifted[node], index)
        if node is not first.node:
            return None
        indices.append(index)
        return _scored(first, index, lift)

    lift = Lift(node_device(first.node), score, on_path, grad=needs_grad(second.node))
    counted = {"b": naming.all(roles["shared"]), "q_idx": naming.all(roles["queries"]), "kv_idx": naming.all(roles["keys"])}
    lift.prices = estimate_prices(node_device(first.node), counted, lift.number, needs_backward=needs_grad(second.node))
    walk = walk_up(second.operands[side], naming.index(second.labels[side]), softmax, between, lift, grad=needs_grad(second.node))
    walk.scale *= second.alpha
    if second.addend is not None and second.beta != 0:
        walk.added = (second.addend, second.beta)
    keys = naming.all(roles["keys"])
    source, sink = _without_sink(softmax, walk, keys, on_path, lift)
    if sink is None:
        shifted |= _shifted(source, softmax.dim, on_path)
    expression = lift.element(source, walk.index)
    if not indices or any(index != indices[0] for index in indices):
        raise NoRule("the scores of several positions are mixed" if indices else "the softmax does not read the first product")
    if needs_grad(second.node):
        _check_gradient((*softmax.inside, *_read_on_path(softmax, first.node, on_path)), learns=needs_grad(first.node))
    shared, queries = naming.all(roles["shared"]), naming.all(roles["queries"])
    shared, queries = _sequence(shared, queries, keys)
    left, right, depth = _operands(first, indices[0], shared, queries, keys, naming)
    atoms = Atoms(shared, queries, keys, depth, naming.all(roles["width"]))
    read_value = Place(second.operands[value], naming.index(second.labels[value]))
    return Match(
        second.node, (node_dtype(first.node), node_dtype(second.node)), left, right, read_value, atoms, expression,
        walk, sink, lift, (on_path & passed) | softmax.inside | between | walk.tests, naming.index(second.out),
        () if sink is not None else _logsumexps(softmax, on_path, passed),
    )  # fmt: skip


def _read_on_path(softmax: Softmax, first: fx.Node, on_path: frozenset[fx.Node]) -> list[fx.Node]:
    """The nodes from the softmax's source up to `first`, but for row statistics that are subtracted: a softmax is invariant to those."""
    nodes: dict[fx.Node, None] = {}
    stack = [softmax.source]
    while stack:
        node = stack.pop()
        if node in nodes or node not in on_path:
            continue
        nodes[node] = None
        under = None if node is first else _unshifted(node, softmax.dim, on_path)
        if under is not None:
            stack.append(under)
        elif node is not first:
            stack += node.all_input_nodes
    return list(nodes)


def _check_gradient(nodes: Iterable[fx.Node], *, learns: bool) -> None:
    """Check that each node hands on the gradient that the attention would.

    Args:
        learns: whether the product with the keys has a gradient.

    Raises:
        NoRule: where a node stops it.
    """
    for node in nodes:
        tensor = example_tensor(node)
        if tensor is not None and tensor.is_floating_point() and (stops_gradient(node) or (learns and not tensor.requires_grad)):
            raise NoRule(f"no gradient flows through {node.name}")


def _depending(first: fx.Node, passed: frozenset[fx.Node]) -> frozenset[fx.Node]:
    """`first` and the passed nodes that read it, directly or not."""
    dependents, stack = {first}, [first]
    while stack:
        for user in stack.pop().users:
            if user in passed and user not in dependents:
                dependents.add(user)
                stack.append(user)
    return frozenset(dependents)


def _scored(first: Product, index: Index, lift: Lift) -> Expr:
    """alpha * score + beta * addend."""
    value = ir.variable("score")
    if first.alpha != 1:
        value = apply("mul", value, lift.tracer.symbol(first.alpha).expr)
    if first.addend is None or first.beta == 0:
        return value
    added = lift.element(first.addend, broadcast_index(index, node_shape(first.addend)))
    return apply("add", value, added if first.beta == 1 else apply("mul", added, lift.tracer.symbol(first.beta).expr))


def _through_casts(node: fx.Node, on_path: frozenset[fx.Node]) -> fx.Node:
    while (call := as_call(node)) is not None and call.name in (*CASTS, "detach") and call.args[0] in on_path:
        node = call.args[0]
    return node


def _without_row_maximum(source: fx.Node, dim: int, on_path: frozenset[fx.Node]) -> fx.Node:
    """`x` if the source is `x - x.max(dim)`: softmax is invariant to a constant added to a row."""
    while (under := _unshifted(_through_casts(source, on_path), dim, on_path)) is not None:
        source = under
    return source


def _unshifted(node: fx.Node, dim: int, on_path: frozenset[fx.Node]) -> fx.Node | None:
    """`x` of x - x.max(dim), of its size."""
    call = as_call(node)
    if call is None or call.name != "sub" or len(call.args) != 2 or call.args[0] not in on_path or not is_tensor(call.args[1]):
        return None
    source, statistic = call.args
    sizes, of_rows = node_shape(source), node_shape(statistic)
    if len(node_shape(node)) != len(sizes) or not all(map(same_size, node_shape(node), sizes)):
        return None
    at = dim - len(sizes) + len(of_rows)  # where the statistic is the same for a whole row, it does not matter whose it is
    if at >= 0 and not same_size(of_rows[at], 1):
        return None
    return source if _is_statistic(statistic, source, on_path) else None


def _shifted(source: fx.Node, dim: int, on_path: frozenset[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Differences from a row's largest, each with what it is the difference of: scaled and added to, they are still no one's to see."""
    differences: dict[fx.Node, fx.Node] = {}
    node: fx.Node | None = source
    while node is not None:
        node = _through_casts(node, on_path)
        under = _unshifted(node, dim, on_path)
        if under is not None:
            differences[node] = under
        node = _scaled(node, on_path) if under is None else under
    return differences


def _scaled(node: fx.Node, on_path: frozenset[fx.Node]) -> fx.Node | None:
    """Operand that the node scales by a number, adds a score-independent term to, or masks, if it has the node's size."""
    call = as_call(node)
    if call is not None and call.name == "masked_fill":
        return _masked(call, node, on_path)
    if call is None or call.name not in ("mul", "div", "add", "sub") or len(call.args) != 2 or call.kwargs:
        return None
    inner: list[fx.Node] = [arg for arg in call.args if arg in on_path]
    if (
        len(inner) != 1
        or len(node_shape(inner[0])) != len(node_shape(node))
        or not all(map(same_size, node_shape(inner[0]), node_shape(node)))
    ):
        return None
    other = call.args[1] if call.args[0] is inner[0] else call.args[0]
    if call.name in ("mul", "div") and (is_tensor(other) or (call.name == "div" and call.args[0] is other)):
        return None
    return inner[0]


def _masked(call: Call, node: fx.Node, on_path: frozenset[fx.Node]) -> fx.Node | None:
    """Scores that are masked with a lowest number, if they have the node's size and the mask does not depend on them."""
    inner, mask, fill = call.args[0], call.argument(1, "mask"), fixed_number(call.argument(2, "value"))
    if inner not in on_path or mask in on_path or not isinstance(fill, (int, float)) or fill > LOWEST:
        return None
    return inner if node_rank(inner) == node_rank(node) and all(map(same_size, node_shape(inner), node_shape(node))) else None


def _logsumexps(softmax: Softmax, on_path: frozenset[fx.Node], passed: frozenset[fx.Node]) -> tuple[fx.Node, ...]:
    """The logsumexps over the keys of what the softmax reads, but for those that are on the way to it."""
    last = _through_casts(softmax.source, on_path)
    sources = {softmax.source, last, *(n for n in on_path if n in passed and _through_casts(n, on_path) is last)}
    users = {user: None for node in sources for user in node.users if user not in passed}
    return tuple(user for user in users if _is_logsumexp(user, softmax.dim))


def _is_logsumexp(node: fx.Node, dim: int) -> bool:
    call = as_call(node)
    if call is None or call.name != "logsumexp":
        return False
    reduced = single(call.argument(1, "dim"))
    return isinstance(reduced, int) and reduced % len(node_shape(call.args[0])) == dim


def _is_statistic(node: fx.Node, of: fx.Node, on_path: frozenset[fx.Node]) -> bool:
    """Whether the node is a statistic of the scores `of`, along some dimensions or of all, in whatever shape."""
    source, reduced = _through_casts(of, on_path), False
    while (call := as_call(node)) is not None:
        if reduced and _through_casts(node, on_path) is source:
            return True
        if call.name in _STATISTICS and not reduced:
            arguments = [call.argument(1, "dim", call.kwargs.get("axis")), call.argument(1, "other")]
            if any(is_tensor(other) for other in arguments):
                return False
            reduced = True
        elif call.name not in ("detach", *CASTS, *VIEWS) and not _is_values(call):
            return False
        operands = [n for n in node.all_input_nodes if not isinstance(example_value(n), (int, torch.SymInt))]
        if len(operands) != 1:
            return False
        node = operands[0]
    return False


_STATISTICS: Final = frozenset(("amax", "max", "logsumexp", "mean", "amin", "min"))


def _is_values(call: Any) -> bool:
    return bool(call.name == "getattr" and call.args[1] == "values")


def _without_sink(
    softmax: Softmax, walk: Walk, keys: Digits, on_path: frozenset[fx.Node], lift: Lift
) -> tuple[fx.Node, tuple[fx.Node | float, Index] | None]:
    """The scores without a column that has no value, and that column; `walk.index` becomes that of the scores."""
    source, dim = softmax.source, softmax.dim
    size, total = node_shape(softmax.node)[dim], count_values(keys)
    first = walk.index[dim] != keys
    if first and walk.index[dim] != offset(keys, ir.const(1), 1, size, lift.number):
        summed = [n for n, digits in enumerate(walk.index) if digits == keys]
        where = f"dimension {summed[0]}" if summed else "elements of several dimensions"
        raise NoRule(f"the softmax is over dimension {dim % len(walk.index)}, but the product that reads its weights sums over {where}")
    if not first and same_size(total, size):
        return source, None
    walk.index = (*walk.index[:dim], keys, *walk.index[dim + 1 :])
    column: Index = (*walk.index[:dim], (), *walk.index[dim + 1 :])
    node = _through_casts(_without_row_maximum(source, dim, on_path), on_path)
    call = as_call(node)
    if call is not None and call.name == "pad":
        return _unpadded(call, dim, (1, 0) if first else (0, 1), on_path), (_filling(call), column)
    if call is None or call.name != "cat":
        raise NoRule("the softmax is over more than the keys")
    parts = list(call.argument(0, "tensors"))
    scores = parts[-1] if first else parts[0]
    beside = parts[0] if first else parts[-1]
    if (
        call.argument(1, "dim", 0) % len(column) != dim
        or len(parts) != 2
        or beside in on_path
        or not same_size(node_shape(beside)[dim], 1)
        or not same_size(node_shape(scores)[dim], total)
    ):
        raise NoRule("the scores are concatenated with something that is no single column")
    return scores, (beside, column)


def _unpadded(call: Call, dim: int, padding: tuple[int, int], on_path: frozenset[fx.Node]) -> fx.Node:
    """Operand of a pad by `padding` along `dim` alone."""
    source: fx.Node = call.args[0]
    amounts = [example_value(n) for n in call.argument(1, "pad")]
    last = node_rank(source) - 1
    pairs = {last - n: tuple(amounts[2 * n : 2 * n + 2]) for n in range(len(amounts) // 2)}
    if source not in on_path or any(pair != (padding if at == dim else (0, 0)) for at, pair in pairs.items()) or dim not in pairs:
        raise NoRule("the softmax is over more than the keys")
    return source


def _filling(call: Call) -> float:
    mode, fill = pad_arguments(call)
    number = 0.0 if fill is None else fixed_number(fill)
    if mode != "constant" or not isinstance(number, (int, float)) or number == math.inf:
        raise NoRule("the scores are padded with something that is no number")
    return float(number)


def _sequence(shared: Digits, queries: Digits, keys: Digits) -> tuple[Digits, Digits]:
    """Return the sequence among merged query dimensions, the one as long as the keys, and the others, which are heads."""
    if len(queries) < 2 or len(keys) != 1:
        return shared, queries
    alike = [d for d in queries if same_size(d.size, keys[0].size)]
    if len(alike) != 1:
        return shared, queries
    return (*shared, *(d for d in queries if d is not alike[0])), (alike[0],)


def _operands(first: Product, index: Index, shared: Digits, queries: Digits, keys: Digits, naming: Naming) -> tuple[Place, Place, Digits]:
    """Query and key with their dimensions as atoms, and the atoms of the head dim."""
    at = dict(zip(first.out, index, strict=True))
    sides = [tuple(d for name in first.only(side) for d in at[name]) for side in (0, 1)]
    columns = next((side for side in (1, 0) if _is_whole(sides[side], keys)), None)
    if columns is None:
        raise NoRule("the first product's columns are not the keys")
    rows = sides[1 - columns]
    batch = tuple(d for name in first.shared for d in at[name])
    row_atoms = {d.expr for d in (*shared, *queries)}
    read = (*rows, *batch)
    if any(not is_atom(d) or d.expr not in row_atoms for d in read) or len({d.expr for d in read}) != len(read):
        raise NoRule("the first product is not read row by row")
    if not {d.expr for d in queries} <= {d.expr for d in rows} and queries:
        raise NoRule("the queries of the two products are not the same")
    for name in first.summed:
        if name not in at:
            size = next(n for label, n in zip(first.labels[0], node_shape(first.operands[0]), strict=True) if label == name)
            at[name] = () if same_size(size, 1) else (naming.atom(size),)
    places = [Place(first.operands[s], tuple(() if n is None else at[n] for n in first.labels[s])) for s in (1 - columns, columns)]
    return places[0], places[1], tuple(d for name in first.summed for d in at[name])


def _is_whole(digits: Digits, wanted: Digits) -> bool:
    return len(digits) == len(wanted) and all(a == b for a, b in zip(digits, wanted, strict=True))
