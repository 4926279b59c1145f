"""The eager way around the dispatcher, which costs a small call more than its arithmetic: same kernels, same derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foci.execution import Allowed, Needs, run_backward, run_forward
from foci.operator.arguments import OPTIONAL, Flat, call_backward, cotangents_of, formula_kernel, gradients_of, outputs_of
from foci.problem import Formula, Gradients, Operands, Results

__all__ = ["EagerAttention"]


class EagerAttention(torch.autograd.Function):
    """The eager way: no dispatcher, the same kernels."""

    @staticmethod
    def forward(ctx: Any, formula: Formula, operands: Operands, needs: Needs, allowed: Allowed, *tensors: Tensor) -> Flat:
        ctx.set_materialize_grads(False)
        outputs = outputs_of(run_forward(formula, operands, needs, allowed))
        optional = [getattr(operands, name) for name in OPTIONAL]
        ctx.call = (formula, needs, allowed, [o is not None for o in optional])
        ctx.numbers = (operands.ints, operands.floats, operands.scale, operands.dropout_p)
        ctx.longest = (operands.max_q, operands.max_kv)
        ctx.save_for_backward(*tensors, *(o for o in optional if o is not None), outputs[0], outputs[1])
        ctx.mark_non_differentiable(outputs[2])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        formula, needs, allowed, present = ctx.call
        *saved, out, lse = ctx.saved_tensors
        count = 3 + len(needs[3])
        rest = iter(saved[count:])
        optional = (next(rest) if p else None for p in present)
        operands = Operands(*saved[:3], tuple(saved[3:count]), *ctx.numbers, *optional, *ctx.longest)  # type: ignore[call-arg]
        if _is_batched(grads):
            g = _formula_backward(formula, operands, grads, needs)
        else:
            run = call_backward if torch.is_grad_enabled() else run_backward
            g = run(formula, operands, Results(out, lse), cotangents_of(grads, out, formula.outputs), needs, allowed)
        return (None, None, None, None, g.query, g.key, g.value, *g.captures)


def _is_batched(tensors: Sequence[Tensor | None]) -> bool:
    return any(t is not None and torch._C._functorch.is_legacy_batchedtensor(t) for t in tensors)


def _formula_backward(formula: Formula, operands: Operands, grads: Sequence[Tensor | None], needs: Needs) -> Gradients:
    """Gradients for a whole batch of cotangents (`is_grads_batched`), whose tensors no kernel can read."""
    flags = (*needs[:3], *needs[3])
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_(on) for t, on in zip((operands.query, operands.key, operands.value, *operands.captures), flags)]
        results = formula_kernel(formula, replace(operands, query=leaves[0], key=leaves[1], value=leaves[2], captures=tuple(leaves[3:])))
    outputs = (results.out, results.lse, None, results.column_sums, results.weights)
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o is not None and g is not None and o.requires_grad]
    wanted = [leaf for leaf, on in zip(leaves, flags) if on]
    found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    return gradients_of([next(found) if on else None for on in flags])
