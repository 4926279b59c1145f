"""Attention as torch sees it: one differentiable function, by the shortest way that modes and transforms allow.

Plain eager calls go around the dispatcher (`autograd`), torch.func has a way of its own (`transforms`), and everything that
traces or exports sees the operators (`library`). All end in `foci.execution`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from foci import cache_check, call_cache
from foci.compat.torch import TransformType, has_tangent, is_watched, open_transforms
from foci.environment import Allowed
from foci.execution import choose_kernel
from foci.operator import library as library  # registers the operators
from foci.operator.autograd import (
    NOTHING,
    EagerAttention,
    Outline,
    as_batch,
    backward_now,
    bind_backward,
    bind_forward,
    forward_now,
    make_outline,
    packed_rows,
)
from foci.operator.op_schema import flatten, formula_kernel, unpack_results
from foci.operator.transforms import Transformed, TransformedCall
from foci.problem import Formula, Operands, OptionalTensors, Program, Results
from foci.spec import Needs, find_needs, spec_of_operator

__all__ = [
    "NOTHING",
    "Outline",
    "as_batch",
    "attend",
    "attend_outlined",
    "backward_now",
    "bind_backward",
    "bind_forward",
    "find_outline",
    "forward_now",
    "is_plain_eager",
    "make_outline",
    "optional_tensors",
    "packed_rows",
]

_PLAIN: Final = frozenset((Tensor, torch.nn.Parameter))


def attend(formula: Formula, operands: Operands, allowed: Allowed) -> Results:
    """Attention, differentiable in query, key, value and captured tensors to any order and in every mode.

    Raises:
        NoViableBackend: if no backend accepts the problem.
    """
    tensors = (operands.query, operands.key, operands.value, *operands.captures)
    transforms = open_transforms(tensors)
    if transforms is None or any(map(has_tangent, tensors)) or TransformType.Jvp in transforms:
        return formula_kernel(formula, operands)
    if TransformType.Grad in transforms:
        call = TransformedCall(formula, operands, allowed)
        return unpack_results(formula, Transformed.apply(call, *call.tensors()))  # type: ignore[no-untyped-call]
    if not is_plain_eager(tensors):
        return unpack_results(formula, torch.ops.foci.attention(*flatten(formula, operands, allowed)))
    outline = find_outline(formula, operands, tensors, find_needs(tensors), allowed)
    return attend_outlined(outline, tensors, optional_tensors(operands))


def find_outline(
    formula: Formula, operands: Operands, tensors: Sequence[Tensor], needs: Needs, allowed: Allowed, *, packed: bool = False
) -> Outline:
    """The operands without their tensors, from the cache or planned now, for a call that is prepared each time.

    Args:
        formula: of the call.
        operands: of the call.
        tensors: query, key, value and captured tensors as the outline will be given them.
        needs: which of them want a gradient.
        allowed: backends that it may use.
        packed: query, key and value are [T, H, D].

    Raises:
        NoViableBackend: if no backend accepts the problem.
    """
    outline_operands = replace(operands, query=tensors[0], key=tensors[1], value=tensors[2])
    spec = spec_of_operator(flatten(formula, outline_operands, allowed), allowed, needs)
    known: Outline | None = call_cache.recall(spec)
    if known is not None and not cache_check.ENABLED:
        return known
    # a block mask that is made anew for each call would fill the caches of tile tables
    program = Program(packed=packed) if operands.blocks is None else None
    outline = make_outline(choose_kernel(formula, operands, needs, spec.environment), operands, packed=packed, program=program)
    if known is None:
        call_cache.keep(spec, outline)
        return outline
    cache_check.compare("the cache of prepared calls", known.comparable(), outline.comparable())
    return known


def attend_outlined(outline: Outline, tensors: Sequence[Tensor], optional: OptionalTensors) -> Results:
    """Attention of query, key, value and captured tensors where `is_plain_eager` holds and the kernel is known."""
    if not outline.needs_grad:
        return forward_now(outline, tensors, optional)
    aside: list[Tensor] = []
    outputs = _apply(outline, optional, aside, *tensors)
    return Results(outputs, aside[0]) if aside else Results(*outputs)


_apply: Final[Any] = super(torch.autograd.Function, EagerAttention).apply
"""`EagerAttention.apply` less what serves torch.func alone, which `is_plain_eager` excludes."""


def optional_tensors(operands: Operands) -> OptionalTensors:
    """The operands' other tensors."""
    optional = operands.optional
    return NOTHING if all(t is None for t in optional) else optional


def is_plain_eager(tensors: Sequence[Tensor]) -> bool:
    """Whether nobody but autograd looks on: no mode, no transform, no graph that is made."""
    if is_watched() or torch.compiler.is_compiling():
        return False
    for tensor in tensors:  # noqa: SIM110  a loop, as each call asks
        if type(tensor) not in _PLAIN:
            return False
    return True
