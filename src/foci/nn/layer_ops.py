"""An encoder layer of packed tokens, written out: what its modules compute, of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from foci.backends.row_kernels import Rows
from foci.dispatch import PackedCall, run_packed
from foci.ir.function_fingerprint import fingerprint
from foci.nn.linear_ops import linear, linear_relu
from foci.prepare import Extras

__all__ = [
    "FIRST",
    "IN",
    "NORM1",
    "NORM2",
    "OUT",
    "SECOND",
    "Attention",
    "Heads",
    "InferenceOps",
    "LayerOps",
    "Parameters",
    "Plan",
    "compute_layer",
]

Parameters: TypeAlias = Sequence[Tensor | None]
"""Weight and bias of: the projections in and out, the two linear layers, the two norms."""
IN, OUT, FIRST, SECOND, NORM1, NORM2 = range(0, 12, 2)
"""Where the weights are among them."""
Function: TypeAlias = Callable[..., Any] | None


class Heads(NamedTuple):
    """Query and key heads, and the features of each."""

    query: int
    key: int
    width: int

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, H, D], and twice [T, Hkv, D]."""
        rows = projected.view(-1, self.query + 2 * self.key, self.width)
        q, k, v = rows.split_with_sizes((self.query, self.key, self.key), 1)
        return q, k, v

    def of_queries(self, rows: Tensor) -> Tensor:
        """[T, H, D] of [T, H * D]."""
        return rows.view(-1, self.query, self.width)


class Plan(NamedTuple):
    """The computation of a layer without its tensors; `drops` are probabilities of dropout: behind the attention, within the feed-forward
    block, behind it."""

    heads: Heads
    norm_first: bool
    width: tuple[int, ...]
    eps: tuple[float, float]
    is_gelu: bool
    drops: tuple[float, float, float]


class Attention:
    """Attention over the packed tokens of a batch; layers that attend alike share it, and what was found for the first.
    `no_padding`: each row is a token of a sequence."""

    __slots__ = ("_calls", "_extras_before", "_learning", "_mask", "_no_padding", "_offsets", "_score")

    def __init__(self, score: Function, mask: Function, extras: Extras, *, no_padding: bool = False) -> None:
        self._score, self._mask, self._extras_before, self._no_padding = score, mask, extras, no_padding
        self._offsets: Tensor | None = None
        self._calls: dict[bool, PackedCall] = {}
        self._learning: PackedCall | None = None

    def moved(self, offsets: Tensor) -> Attention:
        """Return the attention over other sequences, as many of the same bound, where there is neither score nor mask."""
        attention = Attention(None, None, self._extras_before, no_padding=self._no_padding)
        attention._offsets = offsets
        attention._calls = {needs_grad: call.moved(offsets) for needs_grad, call in self._calls.items()}
        attention._learning = None if self._learning is None else self._learning.moved(offsets)
        return attention

    @property
    def _extras(self) -> Extras:
        """Return the extras that it was made with, of the sequences that it was moved to, if it was."""
        offsets = self._offsets  # once: other threads may find it first
        if offsets is not None:
            self._extras_before, self._offsets = self._extras_before._replace(cu_q=offsets, cu_kv=offsets), None
        return self._extras_before

    @property
    def captures_nothing(self) -> bool:
        """Whether its gradients are those of query, key and value alone."""
        if self._score is None and self._mask is None:
            return True
        fingerprints = [fingerprint(self._score), fingerprint(self._mask)]
        return all(known is not None and not known.tensors for known in fingerprints)

    @property
    def captures_learn(self) -> bool:
        """Whether gradients are wanted of what it captures, as far as that is known."""
        fingerprints = [fingerprint(function) for function in (self._score, self._mask) if function is not None]
        return any(known is None or True in [t.requires_grad for t in known.tensors] for known in fingerprints)

    def learning(self, heads: Heads, projected: Tensor) -> PackedCall:
        """The call of query, key and value with gradients of them, of an attention that captures nothing."""
        call = self._learning
        if call is None:
            call = PackedCall.of(
                heads.split(projected), self._score, self._mask, self._extras, needs_grad=True, no_padding=self._no_padding
            )
            assert call is not None, "a plain call is known by functions like these"
            if not self._extras_before.dropout_p:
                self._learning = call
        return call

    def __call__(self, heads: Heads, projected: Tensor) -> Tensor:
        """[T, H * D] of query, key and value, parts of one product."""
        needs_grad = projected.requires_grad
        call = self._calls.get(needs_grad)
        if call is None:
            tensors = heads.split(projected)
            call = PackedCall.of(tensors, self._score, self._mask, self._extras, needs_grad=False, no_padding=self._no_padding)
            if call is None:
                return run_packed(tensors, self._score, self._mask, self._extras).out.flatten(1)
            if not (call.captures or self._extras_before.dropout_p):  # each layer draws a seed of its own
                self._calls[needs_grad] = call
        if call.outline.needs_grad:
            return call.differentiable(heads.split(projected)).flatten(1)
        return call.forward_rows(projected, heads)[0]


class LayerOps:
    """The operations of a layer of tokens [T, E], as autograd and autocast know them."""

    def __init__(self, attention: Callable[[Heads, Tensor], Tensor]) -> None:
        self._attention = attention

    def norm(self, x: Tensor, width: tuple[int, ...], scale: Tensor | None, shift: Tensor | None, eps: float) -> Tensor:
        """Apply layer norm."""
        return torch.layer_norm(x, width, scale, shift, eps)

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """Apply a linear layer, by torch."""
        return F.linear(x, weight, bias)

    def relu(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """As two operations."""
        return torch.relu(F.linear(x, weight, bias))

    def gelu(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """As two operations."""
        return F.gelu(self.linear(x, weight, bias))

    def attend(self, heads: Heads, projected: Tensor) -> Tensor:
        """Attention of the parts."""
        return self._attention(heads, projected)

    def drop(self, x: Tensor, chance: float) -> Tensor:
        """torch's dropout."""
        return F.dropout(x, chance)

    def add(self, new: Tensor, x: Tensor) -> Tensor:
        """Add into a new tensor."""
        return x + new

    def add_norm(
        self, new: Tensor, x: Tensor, width: tuple[int, ...], scale: Tensor | None, shift: Tensor | None, eps: float, *, both: bool
    ) -> tuple[Tensor, Tensor]:
        """The sum, which is needed with `both` alone, and its layer norm."""
        total = self.add(new, x)
        return total, self.norm(total, width, scale, shift, eps)


class InferenceOps(LayerOps):
    """Layer operations where nothing observes them: no autograd, hooks or modes.

    Args:
        attention: of query, key and value.
        rows: where kernels over tokens are launched; None for torch's operations.
    """

    def __init__(self, attention: Callable[[Heads, Tensor], Tensor], rows: Rows | None = None) -> None:
        super().__init__(attention)
        self._rows = rows

    def norm(self, x: Tensor, width: tuple[int, ...], scale: Tensor | None, shift: Tensor | None, eps: float) -> Tensor:
        """As one kernel."""
        out = None if self._rows is None else self._rows.norm(x, None, scale, shift, eps, keeps=False)
        return super().norm(x, width, scale, shift, eps) if out is None else out

    def add_norm(
        self, new: Tensor, x: Tensor, width: tuple[int, ...], scale: Tensor | None, shift: Tensor | None, eps: float, *, both: bool
    ) -> tuple[Tensor, Tensor]:
        """As one kernel, in place."""
        out = None if self._rows is None else self._rows.norm(new, x, scale, shift, eps, keeps=both)
        return super().add_norm(new, x, width, scale, shift, eps, both=both) if out is None else (new, out)

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """By the library that is fast on the device."""
        return linear(x, weight, bias)

    def relu(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """As one operation, where the device has it."""
        return linear_relu(x, weight, bias)

    def add(self, new: Tensor, x: Tensor) -> Tensor:
        """Add in place."""
        return new.add_(x)


def compute_layer(plan: Plan, x: Tensor, p: Parameters, by: LayerOps) -> Tensor:
    """A layer's output for tokens [T, E]."""
    heads, norm_first, width, (eps1, eps2), is_gelu, (behind, within, last) = plan
    weight_in, bias_in, weight_out, bias_out, weight1, bias1, weight2, bias2, scale1, shift1, scale2, shift2 = p
    y = by.norm(x, width, scale1, shift1, eps1) if norm_first else x
    y = by.linear(by.attend(heads, by.linear(y, weight_in, bias_in)), weight_out, bias_out)
    norm = (scale2, shift2, eps2) if norm_first else (scale1, shift1, eps1)
    total, y = by.add_norm(by.drop(y, behind) if behind else y, x, width, *norm, both=norm_first)
    x = total if norm_first else y
    y = by.gelu(y, weight1, bias1) if is_gelu else by.relu(y, weight1, bias1)
    y = by.linear(by.drop(y, within) if within else y, weight2, bias2)
    y = by.drop(y, last) if last else y
    return by.add(y, x) if norm_first else by.add_norm(y, x, width, scale2, shift2, eps2, both=False)[1]
