"""Attention as torch sees it: one differentiable function, by the shortest way that the surroundings allow.

Plain eager calls go around the dispatcher (`eager`), torch.func has a way of its own (`transforms`), and everything that
traces or exports sees the operators (`library`). All end in `foci.execution`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from foci.execution import Allowed, Needs, run_forward
from foci.operator import library as library  # registers the operators
from foci.operator.arguments import NO_NEEDS, flatten, formula_kernel, results_of
from foci.operator.eager import EagerAttention, as_batch, packed_rows
from foci.operator.transforms import Transformed, TransformedCall
from foci.problem import Formula, Operands, Results

__all__ = ["as_batch", "attend", "attend_packed", "packed_rows", "takes_packed"]

_Kind: Final = torch._C._functorch.TransformType
_PLAIN: Final = (Tensor, torch.nn.Parameter)


def attend(formula: Formula, operands: Operands, allowed: Allowed) -> Results:
    """Attention, differentiable in query, key, value and captured tensors to any order and in every mode.

    Raises:
        NoViableBackend: if no backend accepts the problem.
    """
    tensors = (operands.query, operands.key, operands.value, *operands.captures)
    transforms = _transforms()
    if _has_forward_gradient(tensors) or _Kind.Jvp in transforms:
        return formula_kernel(formula, operands)
    if _Kind.Grad in transforms:
        call = TransformedCall(formula, operands, allowed)
        return results_of(formula, Transformed.apply(call, *call.tensors()))  # type: ignore[no-untyped-call]
    if not _is_plain_eager(tensors):
        return results_of(formula, torch.ops.foci.attention(*flatten(formula, operands, allowed)))
    needs: Needs = (*NO_NEEDS, (False,) * len(operands.captures))
    if torch.is_grad_enabled():
        needs = (tensors[0].requires_grad, tensors[1].requires_grad, tensors[2].requires_grad, tuple(t.requires_grad for t in tensors[3:]))
        if any(needs[:3]) or any(needs[3]):
            return Results(*EagerAttention.apply(formula, operands, needs, allowed, False, *tensors))  # type: ignore[no-untyped-call]
    return run_forward(formula, operands, needs, allowed)


def takes_packed(tensors: Sequence[Tensor]) -> bool:
    """Whether `attend_packed` may be given these: a gradient is asked for, and nothing but autograd looks on."""
    device = tensors[0].device.type
    return (
        torch.is_grad_enabled()
        and any(t.requires_grad for t in tensors)
        and _is_plain_eager(tensors)
        and torch.autograd.forward_ad._current_level < 0
        and not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device))
    )


def attend_packed(formula: Formula, operands: Operands, allowed: Allowed, tensors: tuple[Tensor, Tensor, Tensor]) -> Results:
    """Attention of packed tensors [T, H, D], for which `takes_packed` holds: out [T, Hq, Dv] and lse [Hq, T].

    Args:
        operands: with query, key and value as [1, H, T, D], of which autograd knows nothing: views cost it more than launches.
        tensors: query, key and value, that gradients are for.

    Raises:
        NoViableBackend: if no backend accepts the problem.
    """
    if not _is_plain_eager(operands.captures):
        query, key, value = map(as_batch, tensors)
        results = attend(formula, replace(operands, query=query, key=key, value=value), allowed)
        return Results(packed_rows(results.out), results.lse[0])
    needs: Needs = (*(t.requires_grad for t in tensors), tuple(t.requires_grad for t in operands.captures))  # type: ignore[assignment]
    found = EagerAttention.apply(formula, operands, needs, allowed, True, *tensors, *operands.captures)  # type: ignore[no-untyped-call]
    return Results(*found)


def _is_plain_eager(tensors: Sequence[Tensor]) -> bool:
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.compiler.is_compiling()
        and all(type(t) in _PLAIN for t in tensors)
    )


def _transforms() -> list[Any]:
    """Kinds of the torch.func transforms that are open."""
    functorch = torch._C._functorch
    if functorch.peek_interpreter_stack() is None:
        return []
    return [level.key() for level in functorch.get_interpreter_stack() or ()]


def _has_forward_gradient(tensors: Sequence[Tensor]) -> bool:
    return torch.autograd.forward_ad._current_level >= 0 and any(
        torch.autograd.forward_ad.unpack_dual(t).tangent is not None  # type: ignore[no-untyped-call]
        for t in tensors
        if t.is_floating_point()
    )
