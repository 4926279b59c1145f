"""The eager way around the dispatcher, which costs a small call more than its arithmetic: same kernels, same derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from foci import cache_check
from foci.backends.contract import BackwardOfRows, ForwardOfRows, Given
from foci.compat.torch import is_legacy_batched, is_transformed
from foci.context import hidden
from foci.execution import Chosen, launch_backward, launch_forward, run_backward, run_forward
from foci.operator.op_schema import call_backward, formula_kernel, name_cotangents, name_gradients
from foci.problem import Formula, Gradients, Operands, OptionalTensors, Program, Results
from foci.spec import Needs

__all__ = [
    "NOTHING",
    "EagerAttention",
    "Outline",
    "as_batch",
    "backward_now",
    "bind_backward",
    "bind_forward",
    "forward_now",
    "make_outline",
    "packed_rows",
]

Found: TypeAlias = Tensor | tuple[Tensor | None, ...]
NOTHING: Final = OptionalTensors()


class Outline(NamedTuple):
    """A call but for its tensors.

    Attributes:
        chosen: what runs it.
        ints, floats, scale, dropout_p, max_q, max_kv: as in `Operands`.
        packed: query, key, value and output are [T, H, D], and autograd knows nothing of [1, H, T, D]: views cost it more than launches.
            Nothing but the logsumexp is asked for besides, which is [H, T] then.
        program: of the call, where its launches may be kept.
        needs_grad: whether a gradient is wanted.
    """

    chosen: Chosen
    ints: tuple[int, ...]
    floats: tuple[float, ...]
    scale: float
    dropout_p: float
    max_q: int
    max_kv: int
    packed: bool
    program: Program | None
    needs_grad: bool

    def comparable(self) -> dict[str, Any]:
        """The fields that two outlines of one call have equal, for `foci.cache_check`."""
        fields = self._asdict()
        chosen: Chosen = fields.pop("chosen")
        del fields["program"]
        plan = chosen.decision.plan
        text = None if plan is None else plan.text
        return {**fields, "formula": chosen.formula, "needs": chosen.needs, "allowed": chosen.allowed, "plan": text}

    def operands(self, tensors: Sequence[Tensor], optional: OptionalTensors) -> Operands:
        """Return the operands of query, key, value and captured tensors."""
        query, key, value, *captures = tensors
        if self.packed:
            query, key, value = as_batch(query), as_batch(key), as_batch(value)
        o = self
        return Operands(query, key, value, tuple(captures), o.ints, o.floats, o.scale, o.dropout_p, *optional, o.max_q, o.max_kv, o.program)


def make_outline(chosen: Chosen, operands: Operands, *, packed: bool = False, program: Program | None = None) -> Outline:
    """Make the outline of operands: all but their tensors."""
    o, needs = operands, chosen.needs
    needs_grad = any(needs[:3]) or any(needs[3])
    return Outline(chosen, o.ints, o.floats, o.scale, o.dropout_p, o.max_q, o.max_kv, packed, program, needs_grad)


def forward_now(outline: Outline, tensors: Sequence[Tensor], optional: OptionalTensors) -> Results:
    """Attention of query, key, value and captured tensors."""
    outputs = None if outline.program is None else launch_forward(outline.chosen, outline.program, tensors, optional)
    if outputs is None:
        return _forward_anew(outline, tensors, optional)
    if cache_check.ENABLED:
        with hidden():
            anew = _forward_anew(outline._replace(program=None), tensors, optional)
        cache_check.compare_tensors("the launches of a forward pass", outputs, (anew.out, anew.lse, anew.row_max)[: len(outputs)])
    return Results(*outputs)


def _forward_anew(outline: Outline, tensors: Sequence[Tensor], optional: OptionalTensors) -> Results:
    r = run_forward(outline.chosen, outline.operands(tensors, optional))
    return Results(packed_rows(r.out), r.lse[0]) if outline.packed else r


def bind_forward(
    outline: Outline, rows: Tensor, tensors: Sequence[Tensor], optional: OptionalTensors, *, no_padding: bool
) -> ForwardOfRows | None:
    """`forward_now` of packed query, key and value, parts of rows [T, E], for other rows too; None where it is not known. lse is there to
    be read where the call needs gradients. `no_padding`: see `foci.backends.contract.Kernel`."""
    if outline.program is None or not _is_of_rows(outline, optional):
        return None
    return outline.chosen.kernel.bind_forward(
        outline.program, rows, tensors, optional, no_padding=no_padding, out_alone=not outline.needs_grad
    )


def bind_backward(
    outline: Outline, rows: Tensor, tensors: Sequence[Tensor], optional: OptionalTensors, outputs: tuple[Tensor, Tensor], gradient: Tensor
) -> BackwardOfRows | None:
    """`backward_now` likewise."""
    if outline.program is None or not _is_of_rows(outline, optional):
        return None
    return outline.chosen.kernel.bind_backward(outline.program, rows, tensors, optional, Given(*outputs, gradient))


def _is_of_rows(outline: Outline, optional: OptionalTensors) -> bool:
    """Whether a call takes nothing but query, key and value, and where their sequences lie: no seed, no pages, no captured tensors."""
    return outline.packed and optional.seed is None and optional.page_table is None and not outline.chosen.needs[3]


class EagerAttention(torch.autograd.Function):
    """The eager way: no dispatcher, the same kernels."""

    @staticmethod
    def forward(ctx: Any, outline: Outline, optional: OptionalTensors, aside: list[Tensor], *tensors: Tensor) -> Found:
        """The output alone, with the logsumexp put `aside`, where no other is asked for: outputs cost autograd time. Else output,
        logsumexp, row maxima, column sums and weights; None for what was not asked for.

        `tensors` are query, key, value and captures.
        """
        ctx.set_materialize_grads(False)
        r = forward_now(outline, tensors, optional)
        out, lse = r.out, r.lse.contiguous()
        ctx.outline = outline
        if optional is NOTHING:
            ctx.present = None
            ctx.save_for_backward(*tensors, out, lse)
        else:
            ctx.present = [t is not None for t in optional]
            ctx.save_for_backward(*tensors, out, lse, *[t for t in optional if t is not None])
        asked = outline.chosen.formula.outputs
        if not (asked.lse or asked.row_max or asked.column_sums or asked.weights):
            aside.append(lse)
            return out
        aux_outputs = tuple(None if t is None else t.contiguous() for t in (r.row_max, r.column_sums, r.weights))
        if aux_outputs[0] is not None:
            ctx.mark_non_differentiable(aux_outputs[0])
        return (out, lse, *aux_outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Gradients for the arguments of `forward`; `backward_now` finds them."""
        outline, saved, present = ctx.outline, ctx.saved_tensors, ctx.present
        count = 3 + len(outline.chosen.needs[3])
        tensors, out, lse = saved[:count], saved[count], saved[count + 1]
        optional = NOTHING
        if present is not None:
            rest = iter(saved[count + 2 :])
            optional = OptionalTensors(*[next(rest) if p else None for p in present])
        return (None, None, None, *backward_now(outline, tensors, optional, (out, lse), grads))


def backward_now(
    outline: Outline, tensors: Sequence[Tensor], optional: OptionalTensors, outputs: tuple[Tensor, Tensor], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value and captured tensors, from the outputs of `forward_now`, out and logsumexp, and the gradients of its
    results."""
    out, lse = outputs
    is_batched, is_recorded = False, torch.is_grad_enabled()
    resolved: list[Tensor | None] = []
    for grad in grads:
        is_batched = is_batched or (grad is not None and is_legacy_batched(grad))
        is_recorded = is_recorded or (grad is not None and is_transformed(grad))
        resolved.append(None if grad is None else grad.resolve_neg())
    grads = resolved + [None] * (5 - len(resolved))
    # launches that are kept know nothing of gradients of column sums and weights
    may_repeat = not is_batched and not is_recorded and grads[3] is None and grads[4] is None
    if may_repeat and outline.program is not None and grads[0] is not None:
        gradients = _known_gradients(outline, outline.program, tensors, optional, Given(out, lse, grads[0], grads[1]))
        if gradients is not None:
            if cache_check.ENABLED:
                with hidden():
                    anew = backward_now(outline._replace(program=None), tensors, optional, outputs, grads)
                cache_check.compare_tensors("the launches of a backward pass", gradients, anew)
            return gradients
    results = Results(out, lse)
    if outline.packed:
        results = Results(as_batch(out), lse.unsqueeze(0))
        grads = (None if grads[0] is None else as_batch(grads[0]), None if grads[1] is None else grads[1].unsqueeze(0), *grads[2:])
    g = _gradients(outline, outline.operands(tensors, optional), results, grads, is_batched=is_batched, is_recorded=is_recorded)
    dqkv = (g.query, g.key, g.value)
    return (*(map(_packed_or_none, dqkv) if outline.packed else dqkv), *g.captures)


def _packed_or_none(batch: Tensor | None) -> Tensor | None:
    return None if batch is None else packed_rows(batch)


def _known_gradients(
    outline: Outline, program: Program, tensors: Sequence[Tensor], optional: OptionalTensors, bwd_args: Given
) -> tuple[Tensor | None, ...] | None:
    """Compute the gradients by launches that are kept, if they are."""
    gradients = launch_backward(outline.chosen, program, tensors, optional, bwd_args)
    if gradients is None:
        return None
    q, k, v, captures = outline.chosen.needs
    if len(gradients) == 3 + len(captures):
        return tuple(gradients)
    rest = iter(gradients)
    return tuple([next(rest) if on else None for on in (q, k, v, *captures)])


def _gradients(
    outline: Outline, operands: Operands, results: Results, grads: Sequence[Tensor | None], *, is_batched: bool, is_recorded: bool
) -> Gradients:
    chosen, formula = outline.chosen, outline.chosen.formula
    if is_batched:
        return _formula_backward(formula, operands, grads, chosen.needs)
    cotangents = name_cotangents(grads, results.out, formula.outputs)
    if is_recorded:
        return call_backward(formula, operands, results, cotangents, chosen.needs, chosen.allowed)
    return run_backward(chosen, operands, results, cotangents)


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


def _formula_backward(formula: Formula, operands: Operands, grads: Sequence[Tensor | None], needs: Needs) -> Gradients:
    """Gradients for a whole batch of cotangents (`is_grads_batched`), whose tensors no kernel can read."""
    flags = (*needs[:3], *needs[3])
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_(on) for t, on in zip((operands.query, operands.key, operands.value, *operands.captures), flags)]
        results = formula_kernel(formula, replace(operands, query=leaves[0], key=leaves[1], value=leaves[2], captures=tuple(leaves[3:])))
    outputs = (results.out, results.lse, None, results.column_sums, results.weights)
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o is not None and g is not None and o.requires_grad]
    wanted = [leaf for leaf, on in zip(leaves, flags) if on]
    gradients = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    return name_gradients([next(gradients) if on else None for on in flags])
