"""Attention under torch.func, whose transforms custom operators do not take part in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foci.environment import Allowed
from foci.operator.op_schema import OPTIONAL, Flat, flatten, formula_kernel
from foci.problem import Formula, Operands

__all__ = ["Transformed", "TransformedCall"]


@dataclass(frozen=True, eq=False)
class TransformedCall:
    """A call under torch.func, whose transforms see only the arguments of their own level: all tensors apart from the rest."""

    formula: Formula
    operands: Operands
    allowed: Allowed

    def tensors(self) -> list[Tensor]:
        """Query, key, value, captured tensors, and the optional ones that are there."""
        o = self.operands
        optional = [getattr(o, name) for name in OPTIONAL]
        return [o.query, o.key, o.value, *o.captures, *(t for t in optional if t is not None)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Operands:
        """The operands of these tensors, ordered as `tensors` has them."""
        count = 3 + len(self.operands.captures)
        rest = iter(tensors[count:])
        optional: dict[str, Any] = {name: next(rest) for name in OPTIONAL if getattr(self.operands, name) is not None}
        query, key, value, *captures = tensors[:count]
        return replace(self.operands, query=query, key=key, value=value, captures=tuple(captures), **optional)


class Transformed(torch.autograd.Function):
    """Attention under torch.func's grad, vjp and jacrev, which custom operators do not take part in."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: TransformedCall, *tensors: Tensor) -> Flat:
        return tuple(torch.ops.foci.attention(*flatten(call.formula, call.with_tensors(tensors), call.allowed)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Flat) -> None:
        ctx.call = inputs[0]
        ctx.save_for_backward(*inputs[1:], output[0], output[1])
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        call: TransformedCall = ctx.call
        needs = "".join(str(int(need)) for need in ctx.needs_input_grad[1 : 4 + len(call.operands.captures)])
        *tensors, out, lse = ctx.saved_tensors
        gradients = iter(_TransformedBackward.apply(call, needs, grads[0], grads[1], grads[3], grads[4], out, lse, *tensors))  # type: ignore[no-untyped-call]
        return (None, *(next(gradients) if flag == "1" else None for flag in needs), *[None] * (len(tensors) - len(needs)))


class _TransformedBackward(torch.autograd.Function):
    """The gradient of `Transformed`, with a derivative of its own: that of the plain formula's gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: TransformedCall, needs: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        grad_out, grad_lse, grad_columns, grad_weights, out, lse, *inputs = tensors
        asked = call.formula.outputs
        aux_grads = (grad_lse if asked.lse else None, grad_columns if asked.column_sums else None, grad_weights if asked.weights else None)
        flat = flatten(call.formula, call.with_tensors(inputs), call.allowed)
        return tuple(torch.ops.foci.attention_backward(grad_out, *aux_grads, out, lse, needs, *flat))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, ctx.wanted = inputs[:2]
        ctx.save_for_backward(*inputs[2:6], *inputs[8:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        count = 7 + len(ctx.call.operands.captures)  # cotangents, query, key, value, captures
        varied = [n for n in range(count) if saved[n].is_floating_point()]

        def first(*some: Tensor) -> tuple[Tensor, ...]:
            tensors = list(saved)
            for n, tensor in zip(varied, some, strict=True):
                tensors[n] = tensor
            return _formula_gradient(ctx.call, ctx.wanted, tensors)

        pull = torch.func.vjp(first, *(saved[n] for n in varied))[1]
        gradients = dict(zip(varied, pull(tuple(grads)), strict=True))
        every = [gradients.get(n) for n in range(len(saved))]
        return (None, None, *every[:4], None, None, *every[4:])


def _formula_gradient(call: TransformedCall, needs: str, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of the plain formula for cotangents of out, lse, column sums and weights, by torch.func alone."""
    cotangents, inputs = tensors[:4], list(tensors[4:])
    wanted = [n for n, flag in enumerate(needs) if flag == "1"]
    asked = call.formula.outputs
    present = (True, True, asked.column_sums, asked.weights)

    def formula(*some: Tensor) -> tuple[Tensor, ...]:
        for n, tensor in zip(wanted, some, strict=True):
            inputs[n] = tensor
        results = formula_kernel(call.formula, call.with_tensors(inputs))
        outputs = (results.out, results.lse, results.column_sums, results.weights)
        return tuple(o for o, on in zip(outputs, present, strict=True) if on and o is not None)

    pull = torch.func.vjp(formula, *(inputs[n] for n in wanted))[1]
    gradients: tuple[Tensor, ...] = pull(tuple(c for c, on in zip(cotangents, present, strict=True) if on))
    return gradients
