"""An encoder layer of packed tokens as one node of autograd: torch spends more on a node for each operation than a GPU on the operations.

The operations are those of the layer's modules, and their derivatives those of torch. Double backward runs them again as autograd
knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from foci.dispatch import PackedCall
from foci.ir.memo import fingerprint
from foci.nn.direct import is_silent, parameter
from foci.operator import is_plain_eager
from foci.prepare import Extras

__all__ = ["Heads", "layer_as_node"]

Parameters: TypeAlias = tuple[Tensor | None, ...]
"""Weight and bias of: the projections in and out, the two linear layers, the two norms."""
Function: TypeAlias = Callable[..., Any] | None
IN, OUT, FIRST, SECOND, NORM1, NORM2 = range(0, 12, 2)
_aten: Final = torch.ops.aten


class Heads(NamedTuple):
    """What a layer's attention computes of packed tokens: query and key heads, mask and score functions, and everything else."""

    query: int
    key: int
    mask: Function
    score: Function
    extras: Extras


class _Layer(NamedTuple):
    """A layer but for its tensors."""

    heads: Heads
    norm_first: bool
    width: int
    eps: tuple[float, float]
    is_gelu: bool
    drops: tuple[float, float, float]
    """Behind the attention, within the feed-forward block and behind it."""


def layer_as_node(layer: Any, heads: Heads, x: Tensor) -> Tensor | None:
    """The layer's output for tokens [T, E]; None where it must be called as it is: somebody looks on, or it is not plain."""
    found = _parts(layer)
    if found is None or not (torch.is_grad_enabled() and _is_plain_call(heads, x, found[1])):
        return None
    plan, parameters = found
    tensors = (x, *parameters)
    if not any(t is not None and t.requires_grad for t in tensors):
        return None
    out: Tensor = _apply(_Layer(heads, *plan), *tensors)
    return out


def _is_plain_call(heads: Heads, x: Tensor, parameters: Parameters) -> bool:
    tensors = [x, *(t for t in parameters if t is not None)]
    return (
        is_plain_eager(tensors)
        and forward_ad._current_level < 0
        and not torch._C._is_any_autocast_enabled()
        and x.numel() > 0
        and all(t.dtype == x.dtype for t in tensors)
        and heads.score is None
        and type(heads.extras.dropout_p) is float
        and (heads.mask is None or _reads_no_gradient(heads.mask))
    )


def _reads_no_gradient(mask: Function) -> bool:
    found = fingerprint(mask)
    return found is not None and not any(t.requires_grad for t in found.tensors)


_LINEARS: Final = ("linear1", "linear2")
_NORMS: Final = ("norm1", "norm2")
_DROPS: Final = ("dropout1", "dropout", "dropout2")


def _parts(layer: Any) -> tuple[tuple[Any, ...], Parameters] | None:
    """What `_Layer` holds besides heads, and the parameters, of a layer whose parts are torch's own and have nothing that hangs on them."""
    part = layer._modules
    attention = part["self_attn"]
    modules = (attention._modules["out_proj"], *(part[name] for name in (*_LINEARS, *_NORMS, *_DROPS)))
    if not all(type(m).forward is _FORWARDS.get(type(m)) and is_silent(m) for m in modules):
        return None
    is_relu = layer.activation is F.relu
    if not is_relu and layer.activation is not F.gelu:
        return None
    drops = tuple(m.p if m.training else 0.0 for m in modules[5:])
    if not all(0.0 <= p < 1.0 for p in drops):
        return None
    parameters = [parameter(attention, "in_proj_weight"), parameter(attention, "in_proj_bias")]
    for module in modules[:5]:
        parameters += (parameter(module, "weight"), parameter(module, "bias"))
    if any(parameters[at] is None for at in (IN, NORM1, NORM2)):
        return None
    plan = (layer.norm_first, attention.embed_dim, (modules[3].eps, modules[4].eps), not is_relu, drops)
    return plan, tuple(parameters)


_FORWARDS: Final[dict[type, Any]] = {
    kind: kind.forward
    for kind in (torch.nn.Linear, torch.nn.modules.linear.NonDynamicallyQuantizableLinear, torch.nn.LayerNorm, torch.nn.Dropout)
}
"""As they were: some libraries put theirs into torch's classes."""


class _Ways(NamedTuple):
    """How a layer's forward attends and drops: outside of autograd and noting, or known to it and as was noted."""

    attend: Callable[[tuple[Tensor, Tensor, Tensor]], Tensor]
    drop: Callable[[Tensor, float], Tensor]


def _forward(layer: _Layer, x: Tensor, p: Parameters, ways: _Ways, note: Callable[..., None]) -> Tensor:
    """The layer's output; what its backward reads is noted as it comes."""

    def norm(x: Tensor, at: int) -> Tensor:
        eps = layer.eps[at == NORM2]
        out, mean, spread = torch.native_layer_norm(x, (layer.width,), p[at], p[at + 1], eps)
        note(x, mean, spread)
        return out

    def attention(x: Tensor) -> Tensor:
        projected = F.linear(x, _given(p[IN]), p[IN + 1])
        note(x, projected)
        out = ways.attend(_split(layer.heads, projected)).flatten(1)
        return ways.drop(F.linear(out, _given(p[OUT]), p[OUT + 1]), layer.drops[0])

    def feed_forward(x: Tensor) -> Tensor:
        before = F.linear(x, _given(p[FIRST]), p[FIRST + 1])
        after = F.gelu(before) if layer.is_gelu else torch.relu(before)
        hidden = ways.drop(after, layer.drops[1])
        note(x, before if layer.is_gelu else after, hidden)
        return ways.drop(F.linear(hidden, _given(p[SECOND]), p[SECOND + 1]), layer.drops[2])

    for body, at in ((attention, NORM1), (feed_forward, NORM2)):
        x = x + body(norm(x, at)) if layer.norm_first else norm(x + body(x), at)
    return x


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _split(heads: Heads, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[T, H, D], and twice [T, Hkv, D]."""
    count = heads.query + 2 * heads.key
    rows = projected.view(projected.shape[0], count, -1)
    q, k, v = rows.split_with_sizes((heads.query, heads.key, heads.key), 1)
    return q, k, v


class _Gradients:
    """Derivatives of what `_forward` does, from its end to its beginning."""

    def __init__(self, layer: _Layer, p: Parameters, noted: list[Any], wanted: tuple[bool, ...], call: PackedCall) -> None:
        self.layer, self.p, self.noted, self.wanted, self.call = layer, p, noted, wanted, call
        self.found: list[Tensor | None] = [None] * len(p)

    def of(self, dy: Tensor) -> Tensor | None:
        """The gradient of the layer's input, if it is wanted; those of its parameters are `found`."""
        for body, at in ((self._feed_forward, NORM2), (self._attention, NORM1)):
            is_last = at == NORM1 and not self.wanted[0]
            if self.layer.norm_first:
                dx = body(dy, None, is_last=False)
                dy = dy + self._norm(_given(dx), at)
            else:
                inner = self._norm(dy, at)
                dx = body(inner, inner, is_last=is_last)
                if dx is None:
                    return None
                dy = dx
        return dy if self.wanted[0] else None

    def _norm(self, dy: Tensor, at: int) -> Tensor:
        spread, mean, x = (self.noted.pop() for _ in range(3))
        mask = [True, self.wanted[1 + at], self.wanted[2 + at]]
        dx, self.found[at], self.found[at + 1] = _aten.native_layer_norm_backward.default(
            dy, x, (self.layer.width,), mean, spread, self.p[at], self.p[at + 1], mask
        )
        return dx  # type: ignore[no-any-return]

    def _linear(self, dy: Tensor, x: Tensor, at: int, added: Tensor | None = None) -> Tensor:
        """The gradient of a linear layer's input, with what is to be added."""
        self._linear_parameters(dy, x, at)
        weight = _given(self.p[at])
        return torch.mm(dy, weight) if added is None else torch.addmm(added, dy, weight)

    def _linear_parameters(self, dy: Tensor, x: Tensor, at: int) -> None:
        if self.wanted[1 + at]:
            self.found[at] = torch.mm(dy.t(), x)
        if self.wanted[2 + at]:
            self.found[at + 1] = dy.sum(0)

    def _undrop(self, dy: Tensor, p: float) -> Tensor:
        return dy if p == 0.0 else _undropped(dy, self.noted.pop(), p)

    def _feed_forward(self, dy: Tensor, added: Tensor | None, *, is_last: bool) -> Tensor:
        _, within, behind = self.layer.drops
        dy = self._undrop(dy, behind)
        hidden, noted, x = (self.noted.pop() for _ in range(3))
        dy = self._undrop(self._linear(dy, hidden, SECOND), within)
        dy = _aten.gelu_backward.default(dy, noted) if self.layer.is_gelu else _aten.threshold_backward.default(dy, noted, 0)
        return self._linear(dy, x, FIRST, added)

    def _attention(self, dy: Tensor, added: Tensor | None, *, is_last: bool) -> Tensor | None:
        dy = self._undrop(dy, self.layer.drops[0])
        lse, out, projected, x = (self.noted.pop() for _ in range(4))
        dout = self._linear(dy, out.flatten(1), OUT).view_as(out)
        parts = self.call.backward(_split(self.layer.heads, projected), (out, lse), dout)
        dy = torch.cat(parts, 1).flatten(1)
        if is_last:
            self._linear_parameters(dy, x, IN)
            return None
        return self._linear(dy, x, IN, added)


def _dropped(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """torch's dropout, and what it multiplies by: on a CPU the factors, elsewhere whether they are 0."""
    if x.is_cuda:
        out, kept = torch.native_dropout(x, p, True)
        return out, kept
    factors = torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)
    return x * factors, factors


def _undropped(dy: Tensor, noise: Tensor, p: float) -> Tensor:
    if noise.dtype == torch.bool:
        return _aten.native_dropout_backward.default(dy, noise, 1 / (1 - p))  # type: ignore[no-any-return]
    return dy * noise


class _Node(torch.autograd.Function):
    """A layer of tokens, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, x: Tensor, *p: Tensor | None) -> Tensor:
        noted: list[Tensor] = []
        noises: list[Tensor] = []
        calls: list[PackedCall] = []

        def attend(tensors: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            h = layer.heads
            call = PackedCall.of(tensors, h.score, h.mask, h.extras)
            assert call is not None, "plain calls are known by their functions"
            calls.append(call)
            out, lse = call.forward(tensors)
            noted.extend((out, lse))
            return out

        def drop(x: Tensor, chance: float) -> Tensor:
            if chance == 0.0:
                return x
            out, noise = _dropped(x, chance)
            noises.append(noise)
            noted.append(noise)
            return out

        def note(*tensors: Tensor) -> None:
            noted.extend(tensors)

        y = _forward(layer, x, p, _Ways(attend, drop), note)
        call = calls[0]
        ctx.layer, ctx.call, ctx.counts = layer, call._replace(captures=(), optional=_NONE), (len(call.captures), len(noises))
        ctx.save_for_backward(x, *p, *call.captures, *call.optional, *noises, *noted)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        captures, noises = ctx.counts
        saved: Iterator[Any] = iter(ctx.saved_tensors)

        def take(count: int) -> tuple[Any, ...]:
            return tuple([next(saved) for _ in range(count)])

        (x,), p = take(1), take(12)
        call = ctx.call._replace(captures=take(captures), optional=take(len(_NONE)))
        again = iter(take(noises))
        wanted = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(dy):
            return (None, *_recorded(ctx.layer, x, p, call, again, dy, wanted))
        gradients = _Gradients(ctx.layer, p, list(saved), wanted, call)
        dx = gradients.of(dy)
        return (None, dx, *gradients.found)


_NONE: Final = (None,) * 7
_apply: Final[Any] = super(torch.autograd.Function, _Node).apply
"""`_Node.apply` less what serves torch.func alone, which `is_plain_eager` excludes."""


def _recorded(
    layer: _Layer, x: Tensor, p: Parameters, call: PackedCall, noises: Iterator[Tensor], dy: Tensor, wanted: tuple[bool, ...]
) -> list[Tensor | None]:
    """Gradients as autograd finds them: differentiable again, or for many cotangents at once."""

    def drop(x: Tensor, chance: float) -> Tensor:
        if chance == 0.0:
            return x
        noise = next(noises)
        return x * noise / (1 - chance) if noise.dtype == torch.bool else x * noise

    with torch.enable_grad():
        y = _forward(layer, x, p, _Ways(call.differentiable, drop), lambda *_: None)
    inputs = [_given(t) for t, on in zip((x, *p), wanted, strict=True) if on]
    found = iter(torch.autograd.grad(y, inputs, dy, create_graph=torch.is_grad_enabled()))
    return [next(found) if on else None for on in wanted]
