"""The eager way around the dispatcher, which costs a small call more than its arithmetic: same kernels, same derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from foci.execution import Chosen, Needs, backward_of, forward_of
from foci.operator.arguments import OPTIONAL, call_backward, cotangents_of, formula_kernel, gradients_of
from foci.problem import Formula, Gradients, Layout, Operands, Results

__all__ = ["EagerAttention", "as_batch", "packed_rows"]

Found: TypeAlias = Tensor | tuple[Tensor | None, ...]


class EagerAttention(torch.autograd.Function):
    """The eager way: no dispatcher, the same kernels."""

    @staticmethod
    def forward(ctx: Any, call: Chosen, operands: Operands, packed: bool, aside: list[Tensor], *tensors: Tensor) -> Found:
        """The output alone, with the logsumexp put `aside`, where no other is asked for: outputs cost autograd time. Else output,
        logsumexp, row maxima, column sums and weights; None for what was not asked for.

        `tensors` are query, key, value and captures; with `packed`, query, key, value and output are [T, H, D], and nothing but
        the logsumexp, [H, T], is asked for.
        """
        ctx.set_materialize_grads(False)
        r, formula = forward_of(call, operands), call.formula
        out, lse = (packed_rows(r.out), r.lse[0]) if packed else (r.out, r.lse.contiguous())
        o = operands
        optional: tuple[Tensor | None, ...] = _NOTHING
        if formula.dropout or formula.block_size is not None or formula.layout is not Layout.DENSE:
            optional = tuple(getattr(o, name) for name in OPTIONAL)
        ctx.call = (call, packed, tuple(t is not None for t in optional) if optional is not _NOTHING else None)
        ctx.numbers = (o.ints, o.floats, o.scale, o.dropout_p)
        ctx.longest = (o.max_q, o.max_kv)
        ctx.save_for_backward(*tensors, *(t for t in optional if t is not None), out, lse)
        asked = formula.outputs
        if not (asked.lse or asked.row_max or asked.column_sums or asked.weights):
            aside.append(lse)
            return out
        others = tuple(None if t is None else t.contiguous() for t in (r.row_max, r.column_sums, r.weights))
        if others[0] is not None:
            ctx.mark_non_differentiable(others[0])
        return (out, lse, *others)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call, packed, present = ctx.call
        grads = (*grads, None, None, None, None)[:5]
        saved = ctx.saved_tensors
        count = 3 + len(call.needs[3])
        optional: Any = _NOTHING
        if present is not None:
            rest = iter(saved[count:])
            optional = [next(rest) if p else None for p in present]
        tensors, results = saved[:3], Results(saved[-2], saved[-1])
        if packed:
            tensors, results = map(as_batch, tensors), Results(as_batch(saved[-2]), saved[-1].unsqueeze(0))
            grads = (None if grads[0] is None else as_batch(grads[0]), None if grads[1] is None else grads[1].unsqueeze(0), *grads[2:])
        operands = Operands(*tensors, saved[3:count], *ctx.numbers, *optional, *ctx.longest)  # type: ignore[call-arg]
        formula = call.formula
        if _is_batched(grads):
            g = _formula_backward(formula, operands, grads, call.needs)
        elif torch.is_grad_enabled():
            cotangents = cotangents_of(grads, results.out, formula.outputs)
            g = call_backward(formula, operands, results, cotangents, call.needs, call.allowed)
        else:
            g = backward_of(call, operands, results, cotangents_of(grads, results.out, formula.outputs))
        found: tuple[Tensor | None, ...] = (g.query, g.key, g.value)
        if packed:
            found = tuple(None if t is None else packed_rows(t) for t in found)
        return (None, None, None, None, *found, *g.captures)


def as_batch(rows: Tensor) -> Tensor:
    """[T, H, D] as [1, H, T, D]."""
    if torch.is_grad_enabled():
        return rows.transpose(0, 1).unsqueeze(0)
    count, heads, width = rows.shape
    step, head, last = rows.stride()
    return rows.as_strided((1, heads, count, width), (heads * head, head, step, last))  # one operation for two


def packed_rows(batch: Tensor) -> Tensor:
    """[1, H, T, D] as [T, H, D]."""
    if torch.is_grad_enabled():
        return batch.squeeze(0).transpose(0, 1)
    _, heads, count, width = batch.shape
    _, head, step, last = batch.stride()
    return batch.as_strided((count, heads, width), (step, head, last))


_NOTHING: Final = (None,) * len(OPTIONAL)


def _is_batched(tensors: Sequence[Tensor | None]) -> bool:
    is_batched = torch._C._functorch.is_legacy_batchedtensor
    return any(is_batched(t) for t in tensors if t is not None)


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
