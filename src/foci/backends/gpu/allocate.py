"""Allocation of a pass's tensors: results, row statistics, gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.backends.gpu.launch_builder import LaunchBuilder
from foci.backends.gpu.symbolic_tokens import count_tokens
from foci.problem import Gradients, Operands, Problem, gradient_strides, result_strides

__all__ = ["gradient_tensors", "like_tensor", "no_gradients", "result_tensors", "row_tensors"]


def result_tensors(launches: LaunchBuilder, operands: Operands, problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    """Allocate out, laid out as `foci.problem.Results` says, lse, and row maxima if they are needed."""
    query, width = operands.query, problem.value_dim
    b, h, s = query.shape[0], query.shape[1], count_tokens(operands)[0]
    shape = b, h, s, width
    out = launches.empty(shape, result_strides(shape, query.stride(), width), query.dtype, query)
    lse, *most = row_tensors(launches, operands, query, 1 + problem.formula.outputs.row_max)
    return out, lse, most[0] if most else None


def row_tensors(launches: LaunchBuilder, operands: Operands, like: Tensor, count: int) -> tuple[Tensor, ...]:
    """Allocate float32 [B, Hq, Sq] row statistics."""
    b, h, s = operands.query.shape[0], operands.query.shape[1], count_tokens(operands)[0]
    return tuple(launches.empty((b, h, s), (h * s, s, 1), torch.float32, like) for _ in range(count))


def like_tensor(launches: LaunchBuilder, tensor: Tensor) -> Tensor:
    """Allocate a contiguous tensor of the same shape and dtype."""
    return launches.empty(tensor.shape, torch.empty(tensor.shape, device="meta").stride(), tensor.dtype, tensor)


def gradient_tensors(launches: LaunchBuilder, operands: Operands, wanted: tuple[bool, bool, bool]) -> dict[str, Tensor]:
    """Allocate the gradients of query, key and value that are needed. Each has no gaps, and heads within rows, or rows within heads, as its
    tensor, so that the previous operation's backward reads it without a copy. Packed tensors whose rows may be parts of one tensor's get
    gradients laid out the same; dense ones do on request."""
    rows, columns = count_tokens(operands)
    of = {"dq": (operands.query, rows), "dk": (operands.key, columns), "dv": (operands.value, columns)}
    if all(wanted):
        width = sum(t.shape[1] * t.shape[3] for t, _ in of.values())
        if operands.cu_q is not None:
            is_joined = all(t.stride()[1:] == (t.shape[3], width, 1) for t, _ in of.values())
        else:  # each begins at a multiple of 16 bytes, as kernels are compiled for
            is_asked = operands.program is not None and operands.program.joined and rows == columns
            is_joined = is_asked and all(t.shape[1] * t.shape[3] % 8 == 0 for t, _ in of.values())
        if is_joined:
            sizes = [(*t.shape[:2], s, t.shape[3]) for t, s in of.values()]
            steps = [(s * width, width_of, width, 1) for _, _, s, width_of in sizes]
            return dict(zip(of, launches.parts(sizes, steps, operands.query.dtype, operands.query), strict=True))
    grads = {}
    for (name, (tensor, s)), on in zip(of.items(), wanted, strict=True):
        if on:
            b, h, _, d = tensor.shape
            _, head, row, _ = tensor.stride()
            shape = b, h, s, d
            grads[name] = launches.empty(shape, gradient_strides(shape, heads_in_rows=head < row), tensor.dtype, tensor)
    return grads


def no_gradients(operands: Operands, problem: Problem) -> Gradients:
    """Zero gradients, for calls in which no query attends to any key."""
    wanted = (problem.query_grad, problem.key_grad, problem.value_grad, *problem.capture_grads)
    tensors = (operands.query, operands.key, operands.value, *operands.captures)
    grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) if on else None for t, on in zip(tensors, wanted, strict=False)]
    return Gradients(grads[0], grads[1], grads[2], (*grads[3:], *(None,) * (len(tensors) - len(grads))))
