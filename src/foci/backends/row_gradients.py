"""Gradients of captured tensors that a score adds to whole rows: `score + bias[b, h, q_idx]`.

A softmax does not change when all scores of a row do, so that the gradients of a row's scores add up to the gradient of its logsumexp,
exactly. Summing them instead would gather the rounding of a half precision `out`.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from foci.backends.sequences import coordinates, sequences
from foci.ir.derivative import CaptureDerivative, capture_derivatives
from foci.ir.eager import Env, evaluate
from foci.ir.expr import Expr
from foci.problem import Formula, Gradients, Layout, Operands, Problem, accumulation_dtype

__all__ = ["add_row_gradients", "summed_derivatives"]


@functools.lru_cache(maxsize=1024)
def summed_derivatives(score: Expr) -> tuple[CaptureDerivative, ...]:
    """The derivatives whose gradients are sums over scores: those that are not constant along a row."""
    return tuple(d for d in capture_derivatives(score) if not _is_constant_in_rows(d))


def _is_constant_in_rows(derivative: CaptureDerivative) -> bool:
    reads = derivative.weight.variables().union(*(index.variables() for index in derivative.indices))
    return not derivative.axes and not reads & {"score", "kv_idx"}


def add_row_gradients(gradients: Gradients, problem: Problem, operands: Operands, lse: Tensor, grad_lse: Tensor | None) -> Gradients:
    """Adds the contribution of the derivatives that are constant along rows. It is zero without a gradient of lse.

    Args:
        gradients: the sums over the other derivatives.
        problem: which captured tensors want a gradient.
        operands: the call.
        lse: [B, Hq, Sq], -inf for rows that attend to nothing.
        grad_lse: the caller's gradient of it.
    """
    if grad_lse is None or not any(problem.capture_grads):
        return gradients
    wanted = {slot for slot, asked in enumerate(problem.capture_grads) if asked}
    rows = [d for d in capture_derivatives(problem.variant.score) if d.slot in wanted and _is_constant_in_rows(d)]
    if not rows or 0 in lse.shape:
        return gradients
    env = Env(_rows(operands, problem.formula), operands.captures, operands.ints, operands.floats, accumulation_dtype(operands.query.dtype))
    flowing = torch.where(lse == -torch.inf, 0.0, grad_lse.double())[..., None]  # [B, Hq, Sq, 1]
    captures = list(gradients.captures)
    for derivative in rows:
        capture, gradient = operands.captures[derivative.slot], captures[derivative.slot]
        total = torch.zeros(capture.shape, dtype=torch.float64, device=capture.device) if gradient is None else gradient.double()
        captures[derivative.slot] = _scattered(total, derivative, flowing, env).to(capture.dtype)
    return replace(gradients, captures=tuple(captures))


def _scattered(total: Tensor, derivative: CaptureDerivative, flowing: Tensor, env: Env) -> Tensor:
    """`total` and each row's contribution at its indices, added in one order."""
    weight, *indices = evaluate((derivative.weight, *derivative.indices), env)
    terms = torch.where(flowing == 0, 0.0, flowing * weight)  # a derivative may be infinite in a row whose gradient is zero
    place = torch.zeros((), dtype=torch.int64, device=total.device)
    for length, index in zip(total.shape, indices, strict=True):
        wide = index.to(torch.int64)
        place = place * length + torch.where(wide < 0, wide + length, wide).clamp(0, length - 1)
    flat, at = total.reshape(-1), place.expand(terms.shape).reshape(-1)
    if flat.device.type == "cpu":
        return flat.scatter_add(0, at, terms.reshape(-1)).view(total.shape)
    return flat.index_put((at,), terms.reshape(-1), accumulate=True).view(total.shape)  # sorts its indices first


def _rows(operands: Operands, formula: Formula) -> dict[str, Tensor]:
    """The coordinates of every row, broadcasting to [B, Hq, Sq, 1]. Reads no offsets on the host."""
    query, device = operands.query, operands.query.device
    if formula.layout is Layout.DENSE:
        return coordinates(sequences(operands, formula.layout)[0], query.shape[0], query.shape[1], device)
    assert operands.cu_q is not None
    assert operands.cu_kv is not None
    starts = operands.cu_q.to(torch.int64)
    token = torch.arange(query.shape[2], device=device)
    b = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp(max=starts.shape[0] - 2)
    q_lengths = starts.diff() if operands.q_lengths is None else operands.q_lengths
    kv_lengths = operands.cu_kv.diff() if operands.kv_lengths is None else operands.kv_lengths
    q_len, kv_len = q_lengths[b], kv_lengths[b]
    # tokens of no sequence contribute nothing, but must not index beyond a captured tensor
    q_idx = torch.minimum(token - starts[b], q_len - 1).clamp(min=0)
    by_token = {"b": b, "q_idx": q_idx, "q_len": q_len, "kv_len": kv_len}
    heads = torch.arange(query.shape[1], dtype=torch.int32, device=device).view(1, -1, 1, 1)
    return {"h": heads, **{name: t.to(torch.int32).view(1, 1, -1, 1) for name, t in by_token.items()}}
