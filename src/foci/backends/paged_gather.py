"""The paged layout for kernels that read keys in one piece: each row's pages are gathered, and the rows are jagged sequences."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foci.backends.contract import Given, Kernel, Plan
from foci.problem import Cotangents, Formula, Gradients, Layout, Operands, Results

__all__ = ["Gathered", "gathered", "jagged_plan", "paged_results"]


def jagged_plan(plan: Plan) -> Plan:
    """The plan that `gathered` operands are for."""
    return replace(plan, problem=replace(plan.problem, formula=replace(plan.problem.formula, layout=Layout.JAGGED)))


def gathered(operands: Operands, formula: Formula) -> tuple[Operands, Formula]:
    """A paged call as a jagged one, by differentiable functions: sequence b is row b, in a span of whole pages."""
    table, lengths = operands.page_table, operands.kv_lengths
    assert table is not None
    assert lengths is not None
    batch, heads, length, _ = operands.query.shape
    page = operands.key.shape[2]
    count = min(table.shape[1], -(-operands.max_kv // page))
    # entries behind the last page of a row may hold anything
    chosen = table[:, :count].clamp(0, max(0, operands.key.shape[0] - 1))
    steps = torch.arange(batch + 1, device=table.device)
    one = replace(
        operands, query=operands.query.transpose(0, 1).reshape(1, heads, batch * length, -1), key=_rows(operands.key, chosen),
        value=_rows(operands.value, chosen), cu_q=steps * length, cu_kv=steps * (count * page), kv_lengths=lengths.clamp(max=count * page),
        page_table=None, max_q=length,
    )  # fmt: skip
    return one, replace(formula, layout=Layout.JAGGED)


def _rows(pool: Tensor, chosen: Tensor) -> Tensor:
    """[1, H, B * pages * page size, D]."""
    _, heads, _, dim = pool.shape
    return pool[chosen].permute(2, 0, 1, 3, 4).reshape(1, heads, -1, dim)


def paged_results(results: Results, operands: Operands) -> Results:
    """Results of the jagged call as those of the paged one, `operands`."""
    batch, heads, length, _ = operands.query.shape

    def rows(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.view(heads, batch, length).transpose(0, 1)

    columns = results.column_sums
    if columns is not None:
        columns = _fitted(columns.view(heads, batch, -1).transpose(0, 1), operands.max_kv)
    lse = rows(results.lse)
    assert lse is not None
    out = results.out.transpose(1, 2).reshape(batch, length, heads, -1).transpose(1, 2)
    return Results(out=out, lse=lse, row_max=rows(results.row_max), column_sums=columns)


def _fitted(columns: Tensor, length: int) -> Tensor:
    missing = length - columns.shape[2]
    return torch.nn.functional.pad(columns, (0, missing)) if missing > 0 else columns[:, :, :length]


class Gathered(Kernel):
    """A kernel of the paged layout around one of the jagged layout. Gradients of query and captures; pages take none."""

    def __init__(self, plan: Plan, inner: Kernel) -> None:
        self.problem = plan.problem
        self.inner = inner

    def forward(self, operands: Operands, /) -> Results:
        """Attention of the operands."""
        one, program = gathered(operands, self.problem.formula)[0], operands.program
        outputs = None if program is None else self.inner.launch_forward(program, one.tensors, one.optional)
        return paged_results(self.inner.forward(one) if outputs is None else Results(*outputs), operands)

    def backward(self, operands: Operands, results: Results, cotangents: Cotangents, /) -> Gradients:
        """Gradients of the operands."""
        one, _ = gathered(operands, self.problem.formula)
        batch, heads, length, _ = operands.query.shape

        def packed(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.transpose(0, 1).reshape(1, heads, batch * length, *t.shape[3:])

        out, lse, dout = packed(results.out), packed(results.lse), packed(cotangents.out)
        assert out is not None
        assert lse is not None
        assert dout is not None
        columns = cotangents.column_sums
        if columns is not None:
            span = one.key.shape[2] // batch
            columns = _fitted(columns, span).transpose(0, 1).reshape(1, heads, -1)
        dlse, program, grads = packed(cotangents.lse), operands.program, None
        if program is not None and columns is None:
            grads = self.inner.launch_backward(program, one.tensors, one.optional, Given(out, lse, dout, dlse))
        if grads is None:
            gradients = self.inner.backward(one, Results(out, lse), Cotangents(dout, dlse, columns))
        else:
            rest = iter(grads)
            query, *captures = (next(rest) if on else None for on in (self.problem.query_grad, *self.problem.capture_grads))
            gradients = Gradients(query, None, None, tuple(captures))
        query = None if gradients.query is None else gradients.query.view(heads, batch, length, -1).transpose(0, 1).contiguous()
        return Gradients(query, None, None, gradients.captures)
