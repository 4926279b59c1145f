"""Attention of NestedTensors in plain eager calls, by their inner tensors: each NestedTensor operator of torch takes longer on the host
than attention takes on a GPU.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from foci.compat.nested import HAS_FIELDS, KINDS, inner_lengths, inner_offsets, inner_values, length_extremes, nested_of_rows, ragged_dim
from foci.compat.torch import is_forward_ad_open
from foci.core import Function, Tensors
from foci.dispatch import PackedCall, Passes, run_packed
from foci.ir.function_fingerprint import fingerprint
from foci.operator import is_plain_eager
from foci.prepare import Extras
from foci.problem import OUT_ALONE, OptionalTensors

__all__ = ["attend_nested_now"]

_RAGGED: Final = 2


def attend_nested_now(tensors: tuple[Any, Any, Any], score: Function, mask: Function, extras: Extras) -> Tensor | None:
    """Attention of NestedTensors [B, H, ragged, D], eagerly; None where there is more to it than their values and offsets."""
    query, key, value = tensors
    if not HAS_FIELDS or torch.compiler.is_compiling() or not _are_plain(tensors):
        return None
    e = extras
    if e.outputs is not OUT_ALONE or e.sink is not None or e.blocks is not None or not _fit(*tensors):
        return None
    q = _spans(query)
    k = q if inner_offsets(key) is q[0] else _spans(key)
    where = Extras(
        OUT_ALONE, scale=e.scale, dropout_p=e.dropout_p, cu_q=q[0], cu_kv=k[0], max_q=q[1], max_kv=k[1], honour_sdp_flags=e.honour_sdp_flags
    )
    if torch.is_grad_enabled() and not (_reads_no_gradient(score) and _reads_no_gradient(mask)):
        return None
    if not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)):
        return _nested(run_packed(_rows(tensors), score, mask, where).out, query)
    with torch.no_grad():
        call = PackedCall.of(_rows(tensors), score, mask, where, needs_grad=True)
    out: Tensor | None = None if call is None else _apply(call, *tensors)
    return out


def _are_plain(tensors: tuple[Any, Any, Any]) -> bool:
    """Whether each is nested and its values, all of them, are [H, tokens, D], and neither a transform nor a mode looks on."""
    inside = []
    for tensor in tensors:
        if type(tensor) not in KINDS:
            return False
        values: Tensor = inner_values(tensor)
        if ragged_dim(tensor) != _RAGGED or inner_lengths(tensor) is not None or values.dim() != 3 or values.numel() == 0:
            return False
        inside.append(values)
    return is_plain_eager(inside) and not is_forward_ad_open()


def _fit(query: Any, key: Any, value: Any) -> bool:
    """Whether one sequence of queries meets one of keys, and all is of one kind; whatever else is for others to refuse or to take."""
    q, k, v = map(inner_values, (query, key, value))
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        return False
    heads = k.size(0)
    if heads != v.size(0) or k.size(1) != v.size(1) or q.size(0) % heads:  # one head of queries for many of keys is repeated elsewhere
        return False
    of_query, of_key = inner_offsets(query), inner_offsets(key)
    return of_key is inner_offsets(value) and (of_query is of_key or of_query.shape == of_key.shape)


def _reads_no_gradient(function: Function) -> bool:
    if function is None:
        return True
    closure = fingerprint(function)
    return closure is not None and not any(t.requires_grad for t in closure.tensors)


def _spans(tensor: Any) -> tuple[Tensor, int]:
    """Offsets, and the longest sequence, which they keep."""
    return inner_offsets(tensor), length_extremes(tensor)[0]


def _rows(tensors: tuple[Any, ...]) -> Tensors:
    """[tokens, H, D] of each."""
    query, key, value = map(inner_values, tensors)
    return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)


def _nested(rows: Tensor, like: Any) -> Tensor:
    """[tokens, H, D] as a NestedTensor [B, H, ragged, D] with the sequences of another."""
    return nested_of_rows(rows.transpose(0, 1), like)


class _NestedAttention(torch.autograd.Function):
    """Attention of NestedTensors as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, call: PackedCall, *tensors: Tensor) -> Tensor:
        out, lse = call.forward(_rows(tensors))
        ctx.set_materialize_grads(False)  # torch has no zeros like a NestedTensor whose lengths are symbols
        ctx.outline, ctx.count = call.outline, len(call.captures)
        ctx.save_for_backward(*tensors, out, lse, *call.captures, *call.optional)
        return _nested(out, tensors[0])

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        if gradient is None:
            return (None,) * 4
        saved = ctx.saved_tensors
        tensors, out, lse, rest = saved[:3], saved[3], saved[4], saved[5:]
        call = PackedCall(ctx.outline, rest[: ctx.count], OptionalTensors(*rest[ctx.count :]), Passes())
        is_plain = type(gradient) in KINDS and ragged_dim(gradient) == _RAGGED and inner_lengths(gradient) is None
        if torch.is_grad_enabled() or not is_plain:
            return (None, *_recorded(call, tensors, gradient, ctx.needs_input_grad[1:]))
        grads = call.backward(_rows(tensors), (out, lse), inner_values(gradient).transpose(0, 1))
        return (None, *[_nested(rows, like) for rows, like in zip(grads, tensors, strict=True)])


_apply: Final[Any] = super(torch.autograd.Function, _NestedAttention).apply
"""`_NestedAttention.apply` less what serves torch.func alone, which `is_plain_eager` excludes."""


def _recorded(call: PackedCall, tensors: tuple[Any, ...], gradient: Any, wanted: tuple[bool, ...]) -> list[Tensor | None]:
    """Gradients as autograd finds them, differentiable again."""
    with torch.enable_grad():
        query, key, value = (t.values().transpose(0, 1) for t in tensors)
        out = call.differentiable((query, key, value))
    inputs = [t for t, on in zip(tensors, wanted, strict=True) if on]
    grad_rows = gradient.values().transpose(0, 1)
    grads = iter(torch.autograd.grad(out, inputs, grad_rows, create_graph=torch.is_grad_enabled()))
    return [next(grads) if on else None for on in wanted]
