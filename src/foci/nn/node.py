"""An encoder layer of packed tokens as one node of autograd: fewer additions of gradients, copies and nodes for the host to see to.

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
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from foci.dispatch import PackedCall
from foci.ir.memo import fingerprint
from foci.nn.direct import is_silent, linear_relu, parameter
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
    tensors = [t for t in (x, *parameters) if t is not None]
    return (
        heads.score is None
        and is_plain_eager(tensors)
        and forward_ad._current_level < 0
        and not torch._C._is_any_autocast_enabled()
        and x.dim() == 2
        and x.numel() > 0
        and len({t.dtype for t in tensors}) == 1
        and type(heads.extras.dropout_p) is float
        and (heads.mask is None or _reads_no_gradient(heads.mask))
    )


def _reads_no_gradient(mask: Function) -> bool:
    found = fingerprint(mask)
    return found is not None and not any(t.requires_grad for t in found.tensors)


def _parts(layer: Any) -> tuple[tuple[Any, ...], Parameters] | None:
    """What `_Layer` holds besides heads, and the parameters, of a layer whose parts are torch's own and have nothing that hangs on them."""
    part, is_relu = layer._modules, layer.activation is F.relu
    if not is_relu and layer.activation is not F.gelu:
        return None
    attention = part["self_attn"]
    parameters = [parameter(attention, "in_proj_weight"), parameter(attention, "in_proj_bias")]
    for module in (attention._modules["out_proj"], part["linear1"], part["linear2"]):
        if not _is_one_of(module, _LINEARS):
            return None
        parameters += (parameter(module, "weight"), parameter(module, "bias"))
    for module in (part["norm1"], part["norm2"]):
        if not _is_one_of(module, _NORMS) or module.normalized_shape != (attention.embed_dim,):
            return None
        parameters += (parameter(module, "weight"), parameter(module, "bias"))
    drops = []
    for module in (part["dropout1"], part["dropout"], part["dropout2"]):
        if not _is_one_of(module, _DROPOUTS):
            return None
        drops.append(module.p if module.training else 0.0)
    if parameters[IN] is None or parameters[NORM1] is None or parameters[NORM2] is None or max(drops) >= 1.0:
        return None
    plan = (layer.norm_first, attention.embed_dim, (part["norm1"].eps, part["norm2"].eps), not is_relu, tuple(drops))
    return plan, tuple(parameters)


def _is_one_of(module: torch.nn.Module, forwards: dict[type, Any]) -> bool:
    kind = type(module)
    return kind in forwards and kind.forward is forwards[kind] and is_silent(module)


# forwards as they were: some libraries put theirs into torch's classes
_LINEARS: Final[dict[type, Any]] = {kind: kind.forward for kind in (torch.nn.Linear, NonDynamicallyQuantizableLinear)}
_NORMS: Final[dict[type, Any]] = {torch.nn.LayerNorm: torch.nn.LayerNorm.forward}
_DROPOUTS: Final[dict[type, Any]] = {torch.nn.Dropout: torch.nn.Dropout.forward}


class _Ways(NamedTuple):
    """How a layer's forward attends and drops: outside of autograd and noting, or known to it and as was noted."""

    attend: Callable[[tuple[Tensor, Tensor, Tensor]], Tensor]
    drop: Callable[[Tensor, float], Tensor]
    linear_relu: Callable[[Tensor, Tensor, Tensor | None], Tensor]


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
        if layer.is_gelu:
            before = F.linear(x, _given(p[FIRST]), p[FIRST + 1])
            after = F.gelu(before)
        else:
            before = after = ways.linear_relu(x, _given(p[FIRST]), p[FIRST + 1])
        hidden = ways.drop(after, layer.drops[1])
        note(x, before, hidden)
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
        """The gradient of a linear layer's input, added to what is no longer needed."""
        self._linear_parameters(dy, x, at)
        weight = _given(self.p[at])
        return torch.mm(dy, weight) if added is None else added.addmm_(dy, weight)

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

        y = _forward(layer, x, p, _Ways(attend, drop, linear_relu), note)
        call = calls[0]
        ctx.layer, ctx.outline, ctx.counts = layer, call.outline, (len(call.captures), len(noises))
        ctx.save_for_backward(x, *p, *call.captures, *call.optional, *noises, *noted)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        saved, wanted, (captures, noises) = ctx.saved_tensors, ctx.needs_input_grad[1:], ctx.counts
        x, p, rest = saved[0], saved[1:13], saved[13:]
        others = captures + len(_NONE)
        call = PackedCall(ctx.outline, rest[:captures], rest[captures:others])
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(dy):
            return (None, *_recorded(ctx.layer, x, p, call, iter(rest[others : others + noises]), dy, wanted))
        gradients = _Gradients(ctx.layer, p, list(rest[others + noises :]), wanted, call)
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
        y = _forward(layer, x, p, _Ways(call.differentiable, drop, lambda *given: torch.relu(F.linear(*given))), lambda *_: None)
    inputs = [_given(t) for t, on in zip((x, *p), wanted, strict=True) if on]
    found = iter(torch.autograd.grad(y, inputs, dy, create_graph=torch.is_grad_enabled()))
    return [next(found) if on else None for on in wanted]
