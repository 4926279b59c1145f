"""A call as the flat arguments and outputs that operators take and give, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from foci.compat.fake import detect_fake_mode
from foci.environment import Allowed
from foci.execution import as_written
from foci.problem import Cotangents, Formula, Gradients, Layout, Operands, OptionalTensors, Results
from foci.problem import Outputs as Asked
from foci.spec import Needs

__all__ = [
    "OPTIONAL",
    "Flat",
    "call_backward",
    "flatten",
    "formula_kernel",
    "name_cotangents",
    "name_gradients",
    "pack_results",
    "unflatten",
    "unpack_results",
]

Flat: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
OPTIONAL: Final = OptionalTensors._fields


def formula_kernel(formula: Formula, operands: Operands) -> Results:
    """The formula in plain differentiable torch operations: forward-mode AD and second derivatives go through it."""
    from foci.backends.blocked.differentiable import differentiable
    from foci.backends.paged_gather import gathered, paged_results
    from foci.backends.reference import formula as plain

    if formula.layout is Layout.PAGED:
        one, jagged = gathered(operands, formula)
        return paged_results(formula_kernel(jagged, one), operands)
    if detect_fake_mode([operands.query]) is not None:
        return plain(operands, formula)  # a graph is made: there are no values to find tiles by, and sizes may be symbols
    with as_written(operands.query):
        return differentiable(operands, formula)


def unpack_results(formula: Formula, outputs: Sequence[Tensor]) -> Results:
    """Results, from the operator's flat outputs."""
    asked = formula.outputs
    out, lse, row_max, column_sums, weights = outputs
    return Results(
        out=out,
        lse=lse,
        row_max=row_max.detach() if asked.row_max else None,
        column_sums=column_sums if asked.column_sums else None,
        weights=weights if asked.weights else None,
    )


def pack_results(results: Results) -> Flat:
    """The operator's flat outputs: an empty tensor for what nobody asked for."""
    none = results.out.new_empty
    return (
        results.out,
        results.lse.contiguous(),
        none(0) if results.row_max is None else results.row_max.contiguous(),
        none(0) if results.column_sums is None else results.column_sums.contiguous(),
        none(0) if results.weights is None else results.weights.contiguous(),
    )


def flatten(formula: Formula, operands: Operands, allowed: Allowed) -> tuple[Any, ...]:
    """The arguments of the operator. `unflatten` is its inverse."""
    o = operands
    return (
        o.query, o.key, o.value, list(o.captures), *o.optional, list(o.ints), list(o.floats),
        o.scale, o.dropout_p, o.max_q, o.max_kv, formula.line, "*" if allowed is None else ",".join(allowed),
    )  # fmt: skip


def unflatten(args: Sequence[Any]) -> tuple[Formula, Operands, Allowed]:
    """The formula, the operands and the backends allowed, from the operator's flat arguments."""
    query, key, value, captures, *optional, ints, floats, scale, dropout_p, max_q, max_kv, formula, allowed = args
    numbers = (tuple(ints), tuple(floats), scale, dropout_p)
    operands = Operands(query, key, value, tuple(captures), *numbers, *optional, max_q, max_kv)  # type: ignore[call-arg]
    return Formula.parse(formula), operands, None if allowed == "*" else tuple(name for name in allowed.split(",") if name)


def name_cotangents(grads: Sequence[Tensor | None], out: Tensor, asked: Asked) -> Cotangents:
    """Return what autograd gives, by name; zeros for an output that nobody used."""
    grad_out, grad_lse, _, grad_columns, grad_weights = grads
    return Cotangents(
        torch.zeros_like(out) if grad_out is None else grad_out,
        grad_lse,
        grad_columns if asked.column_sums else None,  # an empty tensor stands for what nobody asked for
        grad_weights if asked.weights else None,
    )


def call_backward(
    formula: Formula, operands: Operands, results: Results, cotangents: Cotangents, needs: Needs, allowed: Allowed
) -> Gradients:
    """Gradients by the backward operator."""
    c = cotangents
    text = "".join(str(int(n)) for n in (*needs[:3], *needs[3]))
    flat = flatten(formula, operands, allowed)
    grads = iter(torch.ops.foci.attention_backward(c.out, c.lse, c.column_sums, c.weights, results.out, results.lse, text, *flat))
    return name_gradients([next(grads) if need else None for need in (*needs[:3], *needs[3])])


def name_gradients(grads: Sequence[Tensor | None]) -> Gradients:
    """Gradients by name, from the backward operator's outputs in their order."""
    return Gradients(grads[0], grads[1], grads[2], tuple(grads[3:]))
