"""An encoder layer of packed tokens as one node of autograd: its own nodes, and the kernels between them, cost more than small products.

The operations are those of `foci.nn.layer_ops`, in their order, and their derivatives torch's own. What backward reads is saved once, as
autograd saves it, and let go as soon as it is read. Derivatives of derivatives run the layer again as autograd knows it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from foci.backends.row_kernels import Backward, Rows, Sums
from foci.compat.torch import is_legacy_batched
from foci.dispatch import PackedCall, Passes
from foci.nn.fused_rowwise import layer_backward
from foci.nn.layer_ops import (
    FIRST,
    IN,
    NORM1,
    NORM2,
    OUT,
    SECOND,
    Attention,
    Heads,
    InferenceOps,
    LayerOps,
    Parameters,
    Plan,
    compute_layer,
)
from foci.nn.linear_ops import linear_relu
from foci.operator import Outline
from foci.problem import OptionalTensors, make_tuple

__all__ = ["compute_layer_saving"]

_aten: Final = torch.ops.aten


def compute_layer_saving(plan: Plan, attention: Attention, rows: Rows | None, x: Tensor, p: Parameters) -> Tensor:
    """A layer's output for tokens [T, E], of an attention that captures nothing; by the kernels of `rows` between products, if any."""
    out: Tensor = _apply(plan, attention, rows, x, *p)
    return out


class _SavingOps(InferenceOps):
    """Steps that keep what backward reads, in their order.

    Attributes:
        kept: of a norm its input, mean and spread, or those of both norms and None; of a linear layer its input; of the attention the
            projections and the logsumexp; what the activation's derivative is found by; and the noise of dropout.
        call: of the attention.
    """

    call: PackedCall

    def __init__(self, attention: Attention, rows: Rows | None) -> None:
        self.kept: list[Tensor | None] = []
        self._learning, self._rows = attention, rows
        self._stats: Tensor | None = None
        self._norms = 0

    @property
    def has_rows(self) -> bool:
        """Whether all norms so far were kernels of their own."""
        return self._rows is not None

    def norm(self, x: Tensor, width: tuple[int, ...], scale: Tensor | None, shift: Tensor | None, eps: float) -> Tensor:
        """Apply layer norm."""
        out = self._normed(x, None, scale, shift, eps)
        if out is None:
            out, mean, spread = torch.native_layer_norm(x, width, scale, shift, eps)
            self.kept += (x, mean, spread)
        return out

    def add_norm(
        self, new: Tensor, x: Tensor, width: tuple[int, ...], scale: Tensor | None, shift: Tensor | None, eps: float, *, both: bool
    ) -> tuple[Tensor, Tensor]:
        """As one kernel, the sum in place."""
        out = self._normed(new, x, scale, shift, eps)
        if out is None:
            total = self.add(new, x)
            return total, self.norm(total, width, scale, shift, eps)
        return new, out

    def _normed(self, x: Tensor, added: Tensor | None, scale: Tensor | None, shift: Tensor | None, eps: float) -> Tensor | None:
        """By a kernel of its own, if it can be."""
        if self._rows is None:
            return None
        stats = self._stats
        if stats is None:
            stats = self._stats = x.new_empty((2, 2, x.shape[0]), dtype=torch.float32)
        out = self._rows.norm(x, added, scale, shift, eps, stats, self._norms, keeps=True)
        if out is None:
            self._rows = None  # nor will the other be
            return None
        self._norms += 1
        self.kept += (x, stats, None)
        return out

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """Apply a linear layer, by torch."""
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


class _Facts(NamedTuple):
    """A call of a layer besides its tensors, as its backward needs it."""

    plan: Plan
    outline: Outline
    passes: Passes
    captures: int  # number of tensors that the attention's functions close over
    sums: Backward | None  # computes the sums of columns, if kernels of rows take the layer


class _Node(torch.autograd.Function):
    """A layer of tokens, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, attention: Attention, rows: Rows | None, x: Tensor, *p: Tensor | None) -> Tensor:
        steps = _SavingOps(attention, rows)
        sums = None if rows is None else _layer_sums(plan, ctx.needs_input_grad[3:], rows, p)
        out, call = compute_layer(plan, x, p, steps), steps.call
        ctx.facts = make_tuple(_Facts, (plan, call.outline, call.passes, len(call.captures), sums if steps.has_rows else None))
        ctx.save_for_backward(*p, *call.captures, *call.optional, *steps.kept)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        facts: _Facts = ctx.facts
        plan, sums, count = facts.plan, facts.sums, facts.captures
        saved, wanted, rest = ctx.saved_tensors, ctx.needs_input_grad[3:], 12 + count + 7
        p, call_tensors, kept = saved[:12], saved[12:rest], list(saved[rest:])
        call = PackedCall(facts.outline, call_tensors[:count], OptionalTensors(*call_tensors[count:]), facts.passes)
        if torch.is_grad_enabled() or is_legacy_batched(dy):
            return (None, None, None, *_recorded(plan, (kept[0], *p), call, _dropout_masks(plan, kept), dy, wanted))
        del saved
        ctx.maybe_clear_saved_tensors()  # what is read goes, as it does between autograd's own nodes
        gradients = _Gradients(plan, p, kept, wanted, call, None if sums is None else sums.of(dy))
        return (None, None, None, gradients.of(dy), *gradients.finished())


_apply: Final[Any] = super(torch.autograd.Function, _Node).apply
"""`_Node.apply` less what serves torch.func alone, which plain eager calls are outside of."""


def _layer_sums(plan: Plan, wanted: tuple[bool, ...], rows: Rows, p: Parameters) -> Backward:
    weight_in, weight_first = p[IN], p[FIRST]
    assert weight_in is not None and weight_first is not None
    has = p[NORM1] is not None, p[NORM1 + 1] is not None, p[NORM2] is not None, p[NORM2 + 1] is not None
    sums = layer_backward(rows.kernels, plan, wanted, weight_in.dtype, weight_first.shape[0], weight_in.shape[0], has)
    sums.begin(rows)
    return sums


@functools.lru_cache(maxsize=256)
def _needed_input_gradients(wanted: tuple[bool, ...], norm_first: bool) -> dict[int, bool]:
    """Whether the gradient of each part's input is wanted: by what stands before it, or as the layer's."""
    last, first = (NORM1, IN, OUT, NORM2, FIRST, SECOND), (IN, OUT, NORM1, FIRST, SECOND, NORM2)
    reached, needs_input_grad = wanted[0], {}
    for at in last if norm_first else first:
        needs_input_grad[at] = reached
        reached = reached or wanted[1 + at] or wanted[2 + at]
    return needs_input_grad


class _Gradients:
    """Derivatives of a layer, from its end to its beginning; `kept` is what its forward kept, read from its end.

    With `sums` gradients of biases and norms are sums of columns that kernels leave on their way, `finished` once for all of them.
    """

    def __init__(
        self, plan: Plan, p: Parameters, kept: list[Any], wanted: tuple[bool, ...], call: PackedCall, sums: Sums | None = None
    ) -> None:
        self.plan, self.p, self.kept, self.wanted, self.call, self.sums = plan, p, kept, wanted, call, sums
        self.beyond = _needed_input_gradients(wanted, plan.norm_first)
        self.param_grads: list[Tensor | None] = [None] * len(p)

    def of(self, dy: Tensor) -> Tensor | None:
        """The gradient of the layer's input, if it is wanted; those of its parameters are `param_grads`."""
        dx: Tensor | None = dy
        for body, at in ((self._feed_forward, NORM2), (self._attention, NORM1)):
            if self.plan.norm_first:
                inner = body(dy, None)
                dx = None if inner is None else self._norm(inner, at, dy)
            else:
                inner = self._norm(dy, at, None)
                dx = None if inner is None else body(inner, inner)
            if dx is None:
                return None
            dy = dx
        return dx

    def finished(self) -> list[Tensor | None]:
        """The gradients of parameters, once that of the input is found."""
        if self.sums is not None:
            for at, gradient in self.sums.finish():
                if self.wanted[1 + at]:
                    self.param_grads[at] = gradient
        return self.param_grads

    def _norm(self, dy: Tensor, at: int, added: Tensor | None) -> Tensor | None:
        """The gradient of a norm's input, with another one added to it."""
        spread, mean, x = self.kept.pop(), self.kept.pop(), self.kept.pop()
        which = 0 if at == NORM1 else 1
        if spread is None and self.sums is not None:
            input_grad = self.sums.norm(at, dy, x, self.p[at], mean, which, added)
            return input_grad if self.beyond[at] else None
        if spread is None:
            mean, spread = mean[which].unsqueeze(2).unbind()
        mask = [self.beyond[at], self.wanted[1 + at], self.wanted[2 + at]]
        dx: Tensor
        dx, self.param_grads[at], self.param_grads[at + 1] = _layer_norm_backward(
            dy, x, self.plan.width, mean, spread, self.p[at], self.p[at + 1], mask
        )
        if not mask[0]:
            return None
        return dx if added is None else dx.add_(added)

    def _linear(self, dy: Tensor, x: Tensor, at: int, added: Tensor | None = None) -> Tensor | None:
        """The gradient of a linear layer's input, added to what is not needed apart."""
        if self.wanted[1 + at]:
            self.param_grads[at] = torch.mm(dy.t(), x)
        if self.wanted[2 + at] and self.sums is None:
            self.param_grads[at + 1] = dy.sum(0)
        elif self.sums is not None and at != FIRST and self.sums.is_left(at + 1):
            self.sums.columns(at + 1, dy)
        if not self.beyond[at]:
            return None
        weight: Any = self.p[at]
        return torch.mm(dy, weight) if added is None else added.addmm_(dy, weight)

    def _dropped_gradient(self, dy: Tensor, chance: float) -> Tensor:
        return _dropout_backward(dy, self.kept.pop(), chance) if chance else dy

    def _feed_forward(self, dy: Tensor, added: Tensor | None) -> Tensor | None:
        _, within, behind = self.plan.drops
        dy = self._dropped_gradient(dy, behind)
        dh = self._linear(dy, self.kept.pop(), SECOND)
        if dh is None:
            return None
        dh = self._dropped_gradient(dh, within)
        before = self.kept.pop()
        if self.sums is not None and self.sums.is_left(FIRST + 1):
            self.sums.columns(FIRST + 1, dh, before)
        else:
            dh = _gelu_backward(dh, before) if self.plan.is_gelu else _threshold_backward(dh, before, 0)
        del before
        return self._linear(dh, self.kept.pop(), FIRST, added)

    def _attention(self, dy: Tensor, added: Tensor | None) -> Tensor | None:
        dy = self._dropped_gradient(dy, self.plan.drops[0])
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


def _dropout_backward(dy: Tensor, noise: Tensor, chance: float) -> Tensor:
    if noise.dtype == torch.bool:
        return _aten.native_dropout_backward.default(dy, noise, 1 / (1 - chance))  # type: ignore[no-any-return]
    return dy * noise


def _dropout_masks(plan: Plan, kept: list[Any]) -> list[Tensor]:
    """Return what dropout multiplied by, of what a forward kept."""
    behind, within, last = map(bool, plan.drops)
    start = 3 * plan.norm_first + 4
    masks = kept[start : start + behind]
    start += behind + 3 + 2
    masks += kept[start : start + within]
    start += within + 1
    return masks + kept[start : start + last]


class _RecomputeOps(LayerOps):
    """The steps as autograd knows them, with the noise that there was."""

    def __init__(self, call: PackedCall, noises: list[Tensor]) -> None:
        super().__init__(lambda heads, projected: call.differentiable(heads.split(projected)).flatten(1))
        self._masks = iter(noises)

    def drop(self, x: Tensor, chance: float) -> Tensor:
        """Leaves the same features out."""
        noise = next(self._masks)
        return x * noise / (1 - chance) if noise.dtype == torch.bool else x * noise


def _recorded(
    plan: Plan, inputs: Sequence[Tensor | None], call: PackedCall, noises: list[Tensor], dy: Tensor, wanted: tuple[bool, ...]
) -> list[Tensor | None]:
    """Gradients as autograd finds them: differentiable again, or for many cotangents at once, with the noise that there was."""
    x, *p = inputs
    assert x is not None
    with torch.enable_grad():
        y = compute_layer(plan, x, p, _RecomputeOps(call, noises))
    sources = [t for t, on in zip(inputs, wanted, strict=True) if on]
    grads = iter(torch.autograd.grad(y, sources, dy, create_graph=torch.is_grad_enabled()))  # type: ignore[arg-type]
    return [next(grads) if on else None for on in wanted]
