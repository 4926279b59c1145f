"""Softmax by hand, exponentials over their sum, brought to `torch.softmax` where it stands between two products.

`e / e.sum(-1, keepdim=True)` is one spelling of many. The sum may lose its dimension and get it back, be of exponentials that were
computed a second time, be kept from zero, be inverted and multiplied, or divide the product with the values. The exponentials may
be powers of two, and masked after they were raised. All are one question: what is summed, and is it what is divided, element by element?
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from foci.compat.fake import FakeTensorMode
from foci.fusion.alias_analysis import Writes
from foci.fusion.emit import Emitter, Sizes
from foci.fusion.fx_utils import (
    Call,
    as_call,
    example_value,
    fixed_number,
    is_tensor,
    is_written,
    mark_no_grad,
    needs_grad,
    node_dtype,
    node_rank,
    node_shape,
    runs_without_gradients,
)
from foci.fusion.indices import Digit, Index, NoRule, broadcast_index
from foci.fusion.is_binary import is_truth
from foci.fusion.match import path_to
from foci.fusion.products import Product, as_product
from foci.fusion.replacing import erase_dead
from foci.fusion.row_statistics import atoms, is_over, less_logsumexp, moved, number_beside, same_shape
from foci.fusion.value_numbering import Values
from foci.fusion.weights import BETWEEN, as_softmax
from foci.ir import expr as ir
from foci.ir.rule import Rule, by_name

__all__ = ["MASK_RULES", "QUOTIENT_RULES", "without_softmaxes_by_hand"]


def without_softmaxes_by_hand(graph: fx.Graph, sizes: Sizes, mode: FakeTensorMode | None) -> None:
    """Brings the spellings of softmax in `graph` that stand between two products to `torch.softmax`."""
    values = Values(graph)
    changed = [_is_brought(graph, node, values, Emitter(graph, node, mode, sizes)) for node in list(graph.nodes)]
    if any(changed):
        erase_dead(graph)


def _is_brought(graph: fx.Graph, node: fx.Node, values: Values, emitter: Emitter) -> bool:
    """Whether the node was a softmax by hand; it is torch's then."""
    for quotient in _quotients(node):
        normalised = _normalised(quotient, values)
        if normalised is not None and _stands_between(quotient.node, normalised.scores, ahead=quotient.product is None):
            if not _are_unwritten(graph, quotient, normalised):
                continue
            _rewrite(graph, quotient, normalised, emitter)
            return True
    less = None if as_softmax(node) is not None else less_logsumexp(node, values)
    if less is None or not _stands_between(node, less[0], ahead=True):
        return False
    node.replace_all_uses_with(emitter.call(torch.softmax, *less))
    graph.erase_node(node)
    return True


@dataclass(frozen=True)
class _Quotient:
    """`node` = top / bottom, or top * bottom where `inverted`; with `product`, what is normalised is one of its operands, `top`."""

    node: fx.Node
    top: fx.Node
    bottom: fx.Node
    inverted: bool
    index: Index
    product: Product | None = None


@dataclass(frozen=True)
class _Normalised:
    """exp(scores), zero where a mask says so, over its sum.

    Attributes:
        masks: what is kept, each with the truth that keeps.
        factor: of the scores.
        beside: one is added to the sum: the exponential of a score of zero without a value.
        again: a softmax made the exponentials, and nothing masked them: their sum is one already.
    """

    scores: fx.Node
    dims: tuple[int, ...]
    factor: float = 1.0
    masks: tuple[tuple[fx.Node, bool], ...] = ()
    beside: bool = False
    again: bool = False


@dataclass
class _Sum:
    """A sum found above the divisor: of what, over which dimensions, and the nodes on the way."""

    source: fx.Node
    dims: frozenset[int]
    index: tuple[Any, ...]
    guarded: bool
    beside: bool
    chain: list[fx.Node] = field(default_factory=list)


Quotients: TypeAlias = Callable[[fx.Node, Call], Iterator[_Quotient]]
"""Gives the ways in which a node of a call may be a softmax by hand."""


def _softmin(node: fx.Node, call: Call) -> Iterator[_Quotient]:
    if is_tensor(call.argument(0, "input")):
        yield _Quotient(node, node, node, False, atoms(node_shape(node)))


def _divided_by_norm(node: fx.Node, call: Call) -> Iterator[_Quotient]:
    if fixed_number(call.argument(1, "p", 2.0)) == 1:
        yield _Quotient(node, call.args[0], node, False, atoms(node_shape(node)))


def _divided(node: fx.Node, call: Call) -> Iterator[_Quotient]:
    if _has_two_tensors(call):
        yield from _of_operands(node, call.args[0], call.args[1], inverted=False)


def _multiplied(node: fx.Node, call: Call) -> Iterator[_Quotient]:
    if _has_two_tensors(call):
        for top, bottom in (call.args, call.args[::-1]):
            yield from _of_operands(node, top, bottom, inverted=True)


def _has_two_tensors(call: Call) -> bool:
    return len(call.args) == 2 and not call.kwargs and all(map(is_tensor, call.args))


def _of_operands(node: fx.Node, top: fx.Node, bottom: fx.Node, *, inverted: bool) -> Iterator[_Quotient]:
    """A quotient of the operands themselves, and where `top` is a product, of each of its operands."""
    index = atoms(node_shape(node))
    if not same_shape(top, node):
        return
    yield _Quotient(node, top, bottom, inverted, index)
    product = as_product(top)
    if product is not None and _is_plain(product):
        at = dict(zip(product.out, index, strict=True))
        for side in (0, 1):
            index_of_top = tuple(() if name is None else at.get(name, _SUMMED) for name in product.labels[side])
            yield _Quotient(node, product.operands[side], bottom, inverted, index_of_top, replace(product, node=top))


# Examples are of `s`, scores, in float32. They stand for torch.softmax(s, -1), or softmin's.
QUOTIENT_RULES: Final[tuple[Rule[Quotients], ...]] = (
    Rule(("softmin",), "softmax of the negative scores", _softmin, ("F.softmin(s, -1)",), ("F.softmin(s, None)",)),
    Rule(("normalize",), "exponentials over their norm of order 1", _divided_by_norm,
         ("F.normalize((s - s.amax(-1, keepdim=True)).exp(), p=1, dim=-1)",),
         ("F.normalize((s - s.amax(-1, keepdim=True)).exp(), dim=-1)", "F.normalize(s, p=1, dim=-1)", "F.normalize(s.exp(), p=1, dim=-1)",
          "F.normalize((s - s.amax(-1, keepdim=True)).exp(), p=1, dim=-1, eps=2.0)")),
    Rule(("div",), "exponentials over their sum", _divided,
         ("s.exp() / s.exp().sum(-1, keepdim=True)", "torch.exp(s) / s.exp().sum(-1).unsqueeze(-1)",
          "(s - s.amax(-1, keepdim=True)).exp() / ((s - s.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True) + 1e-12)"),
         ("s.exp() / s.exp().sum(-1)[:, :, None]", "s.exp() / s.exp2().sum(-1, keepdim=True)",
          "s.exp() / (s.exp().sum(-1, keepdim=True) + 2)", "s.exp() / s.exp().mean(-1, keepdim=True)",
          "s.sum(-1, keepdim=True) / s.exp()")),
    Rule(("mul",), "exponentials times one over their sum", _multiplied,
         ("s.exp() * s.exp().sum(-1, keepdim=True).reciprocal()", "(1 / s.exp().sum(-1, keepdim=True)) * s.exp()"),
         ("s.exp() * s.exp().sum(-1, keepdim=True)", "s.exp() * (2 / s.exp().sum(-1, keepdim=True))")),
)  # fmt: skip

_QUOTIENTS: Final[Mapping[str, Quotients]] = by_name(QUOTIENT_RULES)


def _quotients(node: fx.Node) -> Iterator[_Quotient]:
    """The ways in which a node may be a softmax by hand."""
    call = as_call(node)
    rule = None if call is None or call.in_place or not is_tensor(node) else _QUOTIENTS.get(call.name)
    if call is not None and rule is not None:
        yield from rule(node, call)


def _is_plain(product: Product) -> bool:
    """Whether the node multiplies its own operands, adds nothing, and has one reader, so that it can be rebuilt from other operands."""
    multiplies_operands = all(operand in product.node.all_input_nodes for operand in product.operands)
    return multiplies_operands and product.addend is None and product.alpha == 1 and len(product.node.users) == 1


Unmasked: TypeAlias = tuple[fx.Node, fx.Node, bool]
_SUMMED: Final = (Digit(ir.axis(-(1 << 20)), -1),)


def _normalised(quotient: _Quotient, values: Values) -> _Normalised | None:
    call = as_call(quotient.node)
    assert call is not None
    if call.name == "softmin":
        dim = call.argument(1, "dim")
        return _Normalised(call.argument(0, "input"), (dim % node_rank(quotient.node),), -1.0) if isinstance(dim, int) else None
    total = _by_norm(quotient, call) if call.name == "normalize" else _sum_above(quotient)
    if total is None or not values.same(quotient.top, total.source) or not _is_over_rows(quotient, total):
        return None
    raised = _raised(total.source, tuple(sorted(total.dims)), total.chain)
    alone = {*total.chain, quotient.node, quotient.top, total.source, *([quotient.product.node] if quotient.product else ())}
    if raised is None or raised.dims != tuple(range(raised.dims[0], raised.dims[-1] + 1)):
        return None
    if any(user not in alone for node in alone - {quotient.node} for user in node.users):
        return None
    if not _flows_throughout(quotient, raised, alone):
        return None
    if raised.again:
        return None if total.beside or node_dtype(raised.scores) != node_dtype(quotient.node) else raised
    if total.beside:
        plain = raised.dims == (node_rank(raised.scores) - 1,) and not raised.masks and not total.guarded
        return replace(raised, beside=True) if plain and node_dtype(raised.scores) == node_dtype(quotient.node) else None
    unshifted = _without_largest(raised.scores, raised.dims[0]) if len(raised.dims) == 1 else None
    if (total.guarded and (raised.masks or unshifted is None)) or node_dtype(raised.scores) != node_dtype(quotient.node):
        return None
    return raised if unshifted is None else replace(raised, scores=unshifted)


def _flows_throughout(quotient: _Quotient, raised: _Normalised, alone: set[fx.Node]) -> bool:
    """Whether gradients flow through each node between the scores and the quotient, as they would through a softmax, or reach none."""
    if runs_without_gradients(quotient.node):
        return True  # whatever is in its place is computed without gradients, too
    learns = needs_grad(raised.scores)
    factors = () if quotient.product is None else (n for n in quotient.product.operands if n is not quotient.top)
    result_learns = learns or any(map(needs_grad, factors))
    results = {quotient.node} if quotient.product is None else {quotient.node, quotient.product.node}
    return all(needs_grad(node) == (result_learns if node in results else learns) for node in alone) and not any(
        needs_grad(mask) for mask, _ in raised.masks
    )


def _by_norm(quotient: _Quotient, call: Call) -> _Sum | None:
    """Read `normalize(e, p=1, dim)`: its divisor is the sum of e, all positive, bounded away from zero."""
    dim, least = call.argument(2, "dim", 1), fixed_number(call.argument(3, "eps", 1e-12))
    if not isinstance(dim, int) or not isinstance(least, float) or least > 1 or call.argument(4, "out") is not None:
        return None
    dims = frozenset((dim % node_rank(quotient.node),))
    return _Sum(quotient.top, dims, tuple(() if n in dims else d for n, d in enumerate(quotient.index)), guarded=True, beside=False)


def _sum_above(quotient: _Quotient) -> _Sum | None:
    """The sum that the divisor is, read at the index of the quotient."""
    node, inverted, guarded, beside, chain = quotient.bottom, False, False, False, []
    index = broadcast_index(atoms(node_shape(quotient.node)), node_shape(node))
    while (call := as_call(node)) is not None and is_tensor(node):
        chain.append(node)
        if call.name == "sum":
            return _read_sum(call, index, (guarded, beside), chain) if inverted == quotient.inverted else None
        below = _inverse(call)
        if below is not None:
            node, inverted = below, not inverted
            continue
        total = _kept_from_zero(call, node) if inverted == quotient.inverted else None
        if total is not None:
            node, guarded = total, True
            continue
        added = number_beside(call)
        if inverted == quotient.inverted and added is not None and added[1] == 1 and not beside:
            node, beside = added[0], True
            continue
        following = moved(node, index)
        if following is None:
            return None
        node, index = following
    return None


def _inverse(call: Call) -> fx.Node | None:
    """Return `x` of 1 / x."""
    inverted: Any = None
    if call.name == "reciprocal" or (call.name == "pow" and fixed_number(call.args[1]) == -1):
        inverted = call.args[0]
    if call.name == "div" and fixed_number(call.args[0]) == 1 and not call.kwargs:
        inverted = call.args[1]
    return inverted if isinstance(inverted, fx.Node) and is_tensor(inverted) else None


def _read_sum(call: Call, index: Index, how: tuple[bool, bool], chain: list[fx.Node]) -> _Sum | None:
    source, dim = call.argument(0, "input"), call.argument(1, "dim", call.kwargs.get("axis"))
    dims = dim if isinstance(dim, (list, tuple)) else (dim,)
    if not is_tensor(source) or call.argument(3, "dtype") is not None or not dims or not all(isinstance(d, int) for d in dims):
        return None
    summed, rest = frozenset(d % node_rank(source) for d in dims), iter(index)
    keeps_dim = bool(call.argument(2, "keepdim", False))
    full = tuple(next(rest) if keeps_dim or n not in summed else () for n in range(node_rank(source)))
    return _Sum(source, summed, full, *how, chain)


def _is_over_rows(quotient: _Quotient, total: _Sum) -> bool:
    """Whether each element is divided by the sum of its own row."""
    if len(total.index) != len(quotient.index):
        return False
    if quotient.product is not None and total.dims != {n for n, digits in enumerate(quotient.index) if digits is _SUMMED}:
        return False
    return all(n in total.dims or a == b for n, (a, b) in enumerate(zip(quotient.index, total.index, strict=True)))


def _raised(node: fx.Node, dims: tuple[int, ...], chain: list[fx.Node]) -> _Normalised | None:
    """Read the exponent's argument and its masks; nodes on the way are added to `chain`."""
    masks: list[tuple[fx.Node, bool]] = []
    shape = node
    while (call := as_call(node)) is not None and is_tensor(node) and same_shape(node, shape):
        chain.append(node)
        if call.name in ("exp", "exp2"):
            factor = 1.0 if call.name == "exp" else math.log(2)
            source = call.argument(0, "input")
            return _Normalised(source, dims, factor, tuple(masks)) if same_shape(source, shape) else None
        if call.name == "softmax":
            dim, source = call.argument(1, "dim", -1), call.argument(0, "input")
            over = isinstance(dim, int) and dims == (dim % node_rank(node),)
            return _Normalised(source, dims, 1.0, tuple(masks), again=not masks) if over else None
        above = _unmasked(call)
        if above is None:
            return None
        node, kept, truth = above
        masks.append((kept, truth))
    return None


def _unmasked(call: Call) -> Unmasked | None:
    """(x, mask, truth that keeps) of a node that is x where it is kept and else zero."""
    rule = _MASKS.get(call.name)
    return None if rule is None else rule(call)


def _times_truth(call: Call) -> Unmasked | None:
    if len(call.args) == 2 and all(map(is_tensor, call.args)):
        for x, other in (call.args, call.args[::-1]):
            if is_truth(other):
                return x, other, True
    return None


def _filled(call: Call) -> Unmasked | None:
    if fixed_number(call.argument(2, "value")) == 0 and is_tensor(call.args[0]):
        return call.args[0], call.argument(1, "mask"), False
    return None


def _where(call: Call) -> Unmasked | None:
    if len(call.args) == 3 and fixed_number(call.args[2]) == 0 and all(map(is_tensor, call.args[:2])):
        condition, x = call.args[:2]
        return (x, condition, True) if node_dtype(condition) == torch.bool else None
    return None


# Examples are of `e`, exponentials, and `keep`, a mask; what is made of both is divided by its sum.
MASK_RULES: Final[tuple[Rule[Callable[[Call], Unmasked | None]], ...]] = (
    Rule(("mul",), "exponentials times a mask, of truth or of zeros and ones", _times_truth, ("e * keep", "keep.float() * e"),
         ("e * keep.float().exp()",)),
    Rule(("masked_fill",), "exponentials, zero where the mask is true", _filled,
         ("e.masked_fill(~keep, 0)", "torch.masked_fill(e, ~keep, 0.0)"),
         ("e.masked_fill(~keep, 1)",)),
    Rule(("where",), "exponentials, zero where the mask is false", _where, ("torch.where(keep, e, 0.0)",),
         ("torch.where(keep, e, 1.0)", "torch.where(keep, 0.0, e)")),
)  # fmt: skip

_MASKS: Final[Mapping[str, Callable[[Call], Unmasked | None]]] = by_name(MASK_RULES)


def _kept_from_zero(call: Call, node: fx.Node) -> fx.Node | None:
    """A sum of 1 or more that the node still is: bounded by 1 or less, or with a number added that is too small to count."""
    if call.name in ("clamp", "clamp_min") and call.args and is_tensor(call.args[0]):
        least = fixed_number(call.argument(1, "min"))
        return call.args[0] if isinstance(least, (int, float)) and least <= 1 and call.argument(2, "max") is None else None
    constant = number_beside(call)
    return constant[0] if constant is not None and 0 <= constant[1] < torch.finfo(node_dtype(node)).eps / 4 else None


def _without_largest(node: fx.Node, dim: int) -> fx.Node | None:
    """`x` of x - x.max(dim), whose exponentials sum to 1 or more along the dimension."""
    call = as_call(node)
    if call is None or call.name != "sub" or len(call.args) != 2 or call.kwargs or not all(map(is_tensor, call.args)):
        return None
    source, largest = call.args
    if needs_grad(node) != needs_grad(source):
        return None
    index = broadcast_index(atoms(node_shape(node)), node_shape(largest))
    while (producer := as_call(largest)) is not None:
        if producer.name in ("amax", "max"):
            return source if producer.args[0] is source and is_over(producer, index, dim) else None
        if producer.name == "detach" or (producer.name in ("getitem", "getattr") and not is_tensor(producer.args[0])):
            largest = producer.args[0]
            continue
        following = moved(largest, index)
        if following is None:
            return None
        largest, index = following
    return None


def _are_unwritten(graph: fx.Graph, quotient: _Quotient, normalised: _Normalised) -> bool:
    """Whether the quotient's place would read the values that were read above it: nothing writes them between."""
    factors = () if quotient.product is None else quotient.product.node.all_input_nodes
    sources = [n for n in (normalised.scores, *(mask for mask, _ in normalised.masks), *factors) if is_written(n)]
    if not sources:
        return True
    try:
        Writes.of(graph).check_unwritten(sources, quotient.node)
    except NoRule:
        return False
    return True


_MOST_BELOW: Final = 32


def _stands_between(node: fx.Node, scores: fx.Node, *, ahead: bool) -> bool:
    """Whether there are products above and, where one is still `ahead`, below."""
    below = not ahead or any(as_product(user) is not None for user in _below(node))
    return below and bool(path_to(scores)[0])


def _below(node: fx.Node) -> Iterator[fx.Node]:
    """The readers of a node and of what it becomes."""
    stack, seen = [node], {node}
    while stack and len(seen) < _MOST_BELOW:
        for user in stack.pop().users:
            call = as_call(user)
            if call is None or user in seen:
                continue
            seen.add(user)
            yield user
            if call.name in BETWEEN:
                stack.append(user)


def _rewrite(graph: fx.Graph, quotient: _Quotient, normalised: _Normalised, emitter: Emitter) -> None:
    scores, node = normalised.scores, quotient.node
    if node_dtype(scores) != node_dtype(node):  # softmin(dtype=)
        scores = emitter.method("to", scores, node_dtype(node))
    if normalised.factor != 1.0:
        scores = emitter.call(operator.mul, scores, normalised.factor)
    for mask, keeps in normalised.masks:
        keep_mask = mask if node_dtype(mask) == torch.bool else emitter.call(operator.ne, mask, 0)
        scores = emitter.call(torch.masked_fill, scores, emitter.call(torch.logical_not, keep_mask) if keeps else keep_mask, -math.inf)
    first, last = normalised.dims[0], normalised.dims[-1]
    if normalised.beside:
        padded = emitter.call(torch.nn.functional.pad, scores, (0, 1))
        padded = emitter.call(torch.softmax, padded, first)
        weights = emitter.call(operator.getitem, padded, (..., slice(None, -1)))
    elif first == last:
        weights = emitter.call(torch.softmax, scores, first)
    else:
        weights = emitter.call(torch.softmax, emitter.method("flatten", scores, first, last), first)
        weights = emitter.method("reshape", weights, tuple(map(emitter.size, node_shape(scores))))
    if quotient.product is not None:
        old = quotient.product.node
        with graph.inserting_before(node):
            replaced = {n: n for n in old.all_input_nodes} | {quotient.top: weights}
            weights = graph.node_copy(old, replaced.__getitem__)
        weights.meta["example_value"] = example_value(node)
        if runs_without_gradients(node):
            mark_no_grad(weights)
    node.replace_all_uses_with(weights)
    graph.erase_node(node)
