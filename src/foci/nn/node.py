"""An encoder layer of packed tokens as one node of autograd: its own nodes, and the kernels between them, cost more than small products.

The operations are those of `foci.nn.layer`, in their order, and their derivatives torch's own. What backward reads is saved once, as
autograd saves it, and let go as soon as it is read. Derivatives of derivatives run the layer again as autograd knows it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from foci.dispatch import PackedCall
from foci.nn.layer import FIRST, IN, NORM1, NORM2, OUT, SECOND, Attention, Heads, Parameters, Plan, Steps, Unseen, computed
from foci.nn.products import linear_relu

__all__ = ["computed_as_node"]

_aten: Final = torch.ops.aten


def computed_as_node(plan: Plan, attention: Attention, x: Tensor, p: Parameters) -> Tensor:
    """A layer's output for tokens [T, E], of an attention that captures nothing."""
    out: Tensor = _apply(plan, attention, x, *p)
    return out


class _Keeping(Unseen):
    """Steps that keep what backward reads, in their order.

    Attributes:
        kept: of a norm its input, mean and spread; of a linear layer its input; of the attention the projections and the logsumexp; what
            the activation's derivative is found by; and the noise of dropout.
        call: of the attention.
    """

    call: PackedCall

    def __init__(self, attention: Attention) -> None:
        self.kept: list[Tensor] = []
        self._learning = attention

    def norm(self, x: Tensor, width: tuple[int, ...], scale: Tensor | None, shift: Tensor | None, eps: float) -> Tensor:
        """Layer norm."""
        out, mean, spread = torch.native_layer_norm(x, width, scale, shift, eps)
        self.kept += (x, mean, spread)
        return out

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """By torch."""
        self.kept.append(x)
        return F.linear(x, weight, bias)

    def relu(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """As one operation, where the device has it."""
        out = linear_relu(x, weight, bias)
        self.kept += (x, out)
        return out

    def gelu(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """As two operations."""
        before = self.linear(x, weight, bias)
        self.kept.append(before)
        return F.gelu(before)

    def attend(self, heads: Heads, projected: Tensor) -> Tensor:
        """Attention of the parts, outside of autograd."""
        self.call = self._learning.learning(heads, projected)
        out, lse = self.call.forward_rows(projected, heads)
        self.kept += (projected, lse)
        return out

    def drop(self, x: Tensor, chance: float) -> Tensor:
        """torch's dropout; kept is what it multiplies by: on a GPU whether that is not 0, elsewhere the factors."""
        if x.is_cuda:
            out, noise = torch.native_dropout(x, chance, True)
        else:
            noise = torch.empty_like(x).bernoulli_(1 - chance).div_(1 - chance)
            out = x * noise
        self.kept.append(noise)
        return out


class _Node(torch.autograd.Function):
    """A layer of tokens, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, attention: Attention, x: Tensor, *p: Tensor | None) -> Tensor:
        steps = _Keeping(attention)
        out, call = computed(plan, x, p, steps), steps.call
        ctx.facts = plan, call.outline, call.passes, len(call.captures)
        ctx.save_for_backward(*p, *call.captures, *call.optional, *steps.kept)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        plan, outline, passes, count = ctx.facts
        saved, wanted, rest = ctx.saved_tensors, ctx.needs_input_grad[2:], 12 + count + 7
        p, others, kept = saved[:12], saved[12:rest], list(saved[rest:])
        call = PackedCall(outline, others[:count], others[count:], passes)
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(dy):
            return (None, None, *_recorded(plan, (kept[0], *p), call, _noises(plan, kept), dy, wanted))
        del saved
        ctx.maybe_clear_saved_tensors()  # what is read goes, as it does between autograd's own nodes
        gradients = _Gradients(plan, p, kept, wanted, call)
        return (None, None, gradients.of(dy), *gradients.found)


_apply: Final[Any] = super(torch.autograd.Function, _Node).apply
"""`_Node.apply` less what serves torch.func alone, which plain eager calls are outside of."""


@functools.lru_cache(maxsize=256)
def _beyond(wanted: tuple[bool, ...], norm_first: bool) -> dict[int, bool]:
    """Whether the gradient of each part's input is wanted: by what stands before it, or as the layer's."""
    last, first = (NORM1, IN, OUT, NORM2, FIRST, SECOND), (IN, OUT, NORM1, FIRST, SECOND, NORM2)
    reached, found = wanted[0], {}
    for at in last if norm_first else first:
        found[at] = reached
        reached = reached or wanted[1 + at] or wanted[2 + at]
    return found


class _Gradients:
    """Derivatives of a layer, from its end to its beginning; `kept` is what its forward kept, read from its end."""

    def __init__(self, plan: Plan, p: Parameters, kept: list[Tensor], wanted: tuple[bool, ...], call: PackedCall) -> None:
        self.plan, self.p, self.kept, self.wanted, self.call = plan, p, kept, wanted, call
        self.beyond = _beyond(wanted, plan.norm_first)
        self.found: list[Tensor | None] = [None] * len(p)

    def of(self, dy: Tensor) -> Tensor | None:
        """The gradient of the layer's input, if it is wanted; those of its parameters are `found`."""
        given: Tensor | None = dy
        for body, at in ((self._feed_forward, NORM2), (self._attention, NORM1)):
            if self.plan.norm_first:
                inner = body(dy, None)
                inner = None if inner is None else self._norm(inner, at)
                given = None if inner is None else inner.add_(dy)
            else:
                inner = self._norm(dy, at)
                given = None if inner is None else body(inner, inner)
            if given is None:
                return None
            dy = given
        return given

    def _norm(self, dy: Tensor, at: int) -> Tensor | None:
        spread, mean, x = self.kept.pop(), self.kept.pop(), self.kept.pop()
        mask = [self.beyond[at], self.wanted[1 + at], self.wanted[2 + at]]
        dx, self.found[at], self.found[at + 1] = _layer_norm_backward(
            dy, x, self.plan.width, mean, spread, self.p[at], self.p[at + 1], mask
        )
        return dx if mask[0] else None

    def _linear(self, dy: Tensor, x: Tensor, at: int, added: Tensor | None = None) -> Tensor | None:
        """The gradient of a linear layer's input, added to what is not needed apart."""
        if self.wanted[1 + at]:
            self.found[at] = torch.mm(dy.t(), x)
        if self.wanted[2 + at]:
            self.found[at + 1] = dy.sum(0)
        if not self.beyond[at]:
            return None
        weight: Any = self.p[at]
        return torch.mm(dy, weight) if added is None else added.addmm_(dy, weight)

    def _undropped(self, dy: Tensor, chance: float) -> Tensor:
        return _undropped(dy, self.kept.pop(), chance) if chance else dy

    def _feed_forward(self, dy: Tensor, added: Tensor | None) -> Tensor | None:
        _, within, behind = self.plan.drops
        dy = self._undropped(dy, behind)
        dh = self._linear(dy, self.kept.pop(), SECOND)
        if dh is None:
            return None
        dh = self._undropped(dh, within)
        before = self.kept.pop()
        dh = _gelu_backward(dh, before) if self.plan.is_gelu else _threshold_backward(dh, before, 0)
        del before
        return self._linear(dh, self.kept.pop(), FIRST, added)

    def _attention(self, dy: Tensor, added: Tensor | None) -> Tensor | None:
        dy = self._undropped(dy, self.plan.drops[0])
        rows, lse = self.kept.pop(), self.kept.pop()
        do = self._linear(dy, rows, OUT)
        if do is None:
            return None
        projected = self.call.backward_rows(self.kept.pop(), (rows, lse), do, self.plan.heads)
        del rows, lse, do
        return self._linear(projected, self.kept.pop(), IN, added)


_layer_norm_backward: Final[Any] = _aten.native_layer_norm_backward.default
_gelu_backward: Final[Any] = _aten.gelu_backward.default
_threshold_backward: Final[Any] = _aten.threshold_backward.default


def _undropped(dy: Tensor, noise: Tensor, chance: float) -> Tensor:
    if noise.dtype == torch.bool:
        return _aten.native_dropout_backward.default(dy, noise, 1 / (1 - chance))  # type: ignore[no-any-return]
    return dy * noise


def _noises(plan: Plan, kept: list[Tensor]) -> list[Tensor]:
    """What dropout multiplied by, of what a forward kept."""
    behind, within, last = map(bool, plan.drops)
    start = 3 * plan.norm_first + 4
    found = kept[start : start + behind]
    start += behind + 3 + 2
    found += kept[start : start + within]
    start += within + 1
    return found + kept[start : start + last]


class _Again(Steps):
    """The steps as autograd knows them, with the noise that there was."""

    def __init__(self, call: PackedCall, noises: list[Tensor]) -> None:
        super().__init__(lambda heads, projected: call.differentiable(heads.split(projected)).flatten(1))
        self._noises = iter(noises)

    def drop(self, x: Tensor, chance: float) -> Tensor:
        """Leaves the same features out."""
        noise = next(self._noises)
        return x * noise / (1 - chance) if noise.dtype == torch.bool else x * noise


def _recorded(
    plan: Plan, inputs: Sequence[Tensor | None], call: PackedCall, noises: list[Tensor], dy: Tensor, wanted: tuple[bool, ...]
) -> list[Tensor | None]:
    """Gradients as autograd finds them: differentiable again, or for many cotangents at once, with the noise that there was."""
    x, *p = inputs
    assert x is not None
    with torch.enable_grad():
        y = computed(plan, x, p, _Again(call, noises))
    sources = [t for t, on in zip(inputs, wanted, strict=True) if on]
    found = iter(torch.autograd.grad(y, sources, dy, create_graph=torch.is_grad_enabled()))  # type: ignore[arg-type]
    return [next(found) if on else None for on in wanted]
