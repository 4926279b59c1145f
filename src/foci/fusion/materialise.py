"""Which values of a graph stay tensors.

foci can inline the operations behind a bias into the score function, which computes them again for every score, or let the graph compute
the bias once and read it. Inlining saves memory and finds masks. But a gather costs one read for each score, and a value that all heads
or batch entries share is computed again for each of them. So foci prices each value both ways, from the leaves upward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor, fx

from foci.backends.contract import CaptureFacts
from foci.fusion.fx_utils import Call, Size, as_call, example_tensor, example_value, is_tensor, needs_grad, reads_only_shape, size_hint
from foci.fusion.indices import Digits, coordinates
from foci.fusion.masking import is_low
from foci.fusion.products import as_product
from foci.fusion.profitable import PRICED, estimate_seconds
from foci.fusion.views import VIEWS
from foci.ir import expr as ir
from foci.ir.expr import DType, Expr
from foci.ir.rewrite import substitute
from foci.ir.simplify import simplify
from foci.planner import find_target, seconds_per_score
from foci.problem import Target

__all__ = ["Choice", "Materialise", "estimate_prices"]

Choice: TypeAlias = Literal["inline", "tensor", "copy"]
"""The kernel computes an element for every score, reads it from its tensor, or from a copy where a row's elements are neighbours."""

_GAIN: Final = 0.9
"""A value stays a tensor only below this fraction of the price of inlining it: estimates are rough, and inlining takes no memory."""
_MOST_NODES: Final = 64


@dataclass(frozen=True, eq=False)
class Materialise:
    """Prices of one attention's values.

    Attributes:
        target: the device that it would run on.
        scores: how many there are.
        coordinates: each atom as an expression of the positions.
        needs_backward: whether gradients are wanted.
    """

    target: Target
    scores: float
    coordinates: Mapping[Expr, Expr]
    needs_backward: bool

    def choose(self, node: fx.Node, drawn: Expr, indices: tuple[Expr, ...], leaves: Mapping[int, fx.Node], copied: Set[fx.Node]) -> Choice:
        """How a node's element is read.

        Args:
            node: the node that the element belongs to.
            drawn: the element as an expression of others.
            indices: where it lies in the node's tensor.
            leaves: nodes of the captured tensors so far, by slot.
            copied: those of the leaves that are read from a contiguous copy.
        """
        tensor = example_tensor(node)
        if tensor is None or drawn.dtype is not DType.FLOAT or tensor.dim() < 2 or any(is_low(e) for e in drawn.walk()):
            return "inline"
        facts = tuple(_describe_capture(_tensor(leaves[slot]), is_copied=leaves[slot] in copied) for slot in sorted(leaves))
        expression = self._reads(drawn, facts)
        if not expression:
            return "inline"
        below = {leaves[int(str(e.value))] for e in drawn.walk() if e.op == "load"}
        expression += sum(self._copying(leaf) for leaf in below if leaf in copied)
        load = ir.load(len(facts), indices, DType.FLOAT)
        as_it_is, laid_out = (self._reads(load, (*facts, _describe_capture(tensor, is_copied=copied))) or 0.0 for copied in (False, True))
        laid_out = math.inf if _is_dense_in_rows(tensor) else laid_out + self._copying(node)
        cost = min(as_it_is, laid_out) + self._making(node, below) / _readers(node)
        if cost >= _GAIN * expression:
            return "inline"
        return "copy" if laid_out < as_it_is else "tensor"

    def _reads(self, expr: Expr, facts: Sequence[CaptureFacts]) -> float | None:
        """Seconds of an expression over all scores; None on targets without prices."""
        placed = simplify(substitute(expr, dict(self.coordinates)))
        each = seconds_per_score(placed, tuple(facts), self.target, needs_backward=self.needs_backward)
        return None if each is None else each * self.scores

    def _copying(self, node: fx.Node) -> float:
        return estimate_seconds("contiguous", _elements(node), needs_backward=self.needs_backward and needs_grad(node)) / _readers(node)

    def _making(self, node: fx.Node, below: Collection[fx.Node]) -> float:
        """Seconds of the operations from the tensors `below` up to the node, which run if the node stays a tensor."""
        total, seen, stack = 0.0, set[fx.Node](), [node]
        while stack and len(seen) < _MOST_NODES:
            at = stack.pop()
            call = as_call(at)
            if at in seen or at in below or call is None or example_tensor(at) is None or as_product(at) is not None:
                continue
            seen.add(at)
            if not _is_view(at, call):
                total += estimate_seconds(call.name, _elements(at), needs_backward=self.needs_backward and needs_grad(at))
            stack.extend(at.all_input_nodes)
        return total


_GATHERS: Final = frozenset(("gather", "take_along_dim", "index_select", "embedding"))
_COPIES: Final = frozenset(("contiguous", "clone"))


def _is_view(node: fx.Node, call: Call) -> bool:
    """Whether a node's elements are its source's, in the same memory."""
    if call.name == "getitem":
        return not any(is_tensor(part) for part in (call.args[1] if isinstance(call.args[1], (tuple, list)) else (call.args[1],)))
    if call.name in _COPIES:
        source = example_tensor(call.args[0])
        return call.name == "contiguous" and source is not None and source.stride() == example_value(node).stride()
    return call.name == "detach" or (call.name in VIEWS and call.name not in _GATHERS)


def estimate_prices(
    device: torch.device, groups: Mapping[str, Digits], number: Callable[[Size], Expr], *, needs_backward: bool
) -> Materialise | None:
    """Prices for an attention whose dimensions are these digits, by the variable that counts them; "b" will do for all shared ones. None
    on devices where separate operations have no price."""
    if device.type not in PRICED:
        return None
    scores = math.prod(float(size_hint(d.size)) for digits in groups.values() for d in digits)
    return Materialise(find_target(device), scores, coordinates(groups, number), needs_backward)


def _tensor(node: fx.Node) -> Tensor:
    tensor = example_tensor(node)
    assert tensor is not None
    return tensor


def _elements(node: fx.Node) -> float:
    """Number of elements that a tensor has in memory; an expanded dimension counts once."""
    tensor = _tensor(node)
    return float(math.prod(size_hint(n) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if size_hint(stride) != 0))


def _describe_capture(tensor: Tensor, *, is_copied: bool) -> CaptureFacts:
    units = [dim for dim, stride in enumerate(tensor.stride()) if size_hint(stride) == 1 and size_hint(tensor.shape[dim]) > 1]
    unit = tensor.dim() - 1 if is_copied else units[-1] if units else -1
    return CaptureFacts(unit, tensor.requires_grad)


def _is_dense_in_rows(tensor: Tensor) -> bool:
    """Whether a copy would not lay the elements of a row side by side any better, or would repeat some."""
    return size_hint(tensor.stride()[-1]) == 1 or any(size_hint(s) == 0 for s in tensor.stride())


def _readers(node: fx.Node) -> int:
    """Number of operations that read a tensor or a view of it: they share the cost of computing it."""
    count, stack, seen = 0, [node], {node}
    while stack:
        for user in stack.pop().users:
            call = as_call(user)
            if user in seen or reads_only_shape(user):
                continue
            seen.add(user)
            if call is not None and _is_view(user, call):
                stack.append(user)
            else:
                count += 1
    return max(1, count)
