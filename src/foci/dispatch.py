"""What every entry point calls: query, key, value, two functions and extras in, output and auxiliary outputs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from foci.backends.contract import BackwardOfRows, ForwardOfRows
from foci.column_sums import column_sums
from foci.context import observers
from foci.core import Check, Function, Tensors, allowed_for, find_call, run_now, run_packed_now
from foci.errors import ArgumentError
from foci.operator import Outline, attend_outlined, backward_now, bind_backward, bind_forward, forward_now
from foci.prepare import Extras, prepare
from foci.problem import OptionalTensors, Results

__all__ = ["PackedCall", "Passes", "RowLayout", "run", "run_packed"]


def run(tensors: Tensors, score: Function, mask: Function, extras: Extras, check: Check | None = None) -> Results:
    """Attention of checked or unchecked arguments, eager or under any tracer.

    Args:
        tensors: query, key, value as `foci.prepare.prepare` takes them.
        score, mask: functions of (score, b, h, q_idx, kv_idx) and (b, h, q_idx, kv_idx), or None.
        extras: everything else.
        check: checks tensors and extras; it is skipped for a call that was planned before.

    Raises:
        TypeError, ValueError: for wrong arguments.
        NoViableBackend: if no backend accepts the problem.
    """
    allowed = allowed_for(extras)
    if extras.sink is not None and extras.outputs.column_sums:
        return _with_sink_and_columns(tensors, score, mask, extras, check)
    if torch.compiler.is_dynamo_compiling():
        if check is not None:
            check(tensors, extras)
        from foci.dynamo_hop import run_captured  # imports Dynamo

        results = run_captured(tensors, score, mask, extras, allowed)
    else:
        results = run_now(tensors, score, mask, extras, allowed, check)
    return results if extras.sink is None else _with_sink(results, extras.sink)


def run_packed(tensors: Tensors, score: Function, mask: Function, extras: Extras, check: Check | None = None) -> Results:
    """`run` of packed tensors [T, H, D], without a sink; out is [T, Hq, Dv], and lse, the only other output to ask for, [Hq, T].

    `check` checks what `extras` says of sequences; it is skipped for a call that was planned before.
    """
    if not torch.compiler.is_dynamo_compiling():
        return run_packed_now(tensors, score, mask, extras, allowed_for(extras), check)
    if check is not None:
        check(tensors, extras)
    query, key, value = (t.transpose(0, 1).unsqueeze(0) for t in tensors)
    results = run((query, key, value), score, mask, extras)
    return Results(results.out.squeeze(0).transpose(0, 1), results.lse.squeeze(0))


class RowLayout(Protocol):
    """The layout of query, key and value [T, H, D] in rows [T, E]."""

    def split(self, rows: Tensor, /) -> Tensors:
        """Return query, key and value [T, H, D] of rows [T, E]."""

    def of_queries(self, rows: Tensor, /) -> Tensor:
        """Return an output [T, Hq * Dv] as [T, Hq, Dv]."""


class Passes:
    """The passes of a call, bound when the first layer of a batch asks for them, for those that follow.

    Args:
        no_padding: each row is a token of a sequence.
        before: the passes of a call that differs in where its sequences lie alone.
    """

    __slots__ = ("_before", "backward", "forward", "no_padding")

    def __init__(self, *, no_padding: bool = False, before: Passes | None = None) -> None:
        self.no_padding = no_padding
        self.forward: ForwardOfRows | None = None
        self.backward: BackwardOfRows | None = None
        self._before: tuple[ForwardOfRows | None, BackwardOfRows | None] = (None, None)
        if before is not None:
            self._before = before.forward or before._before[0], before.backward or before._before[1]

    def moved_forward(self, rows: Tensor, offsets: Tensor | None) -> ForwardOfRows | None:
        """The forward pass by that of the call before; asked once."""
        before, self._before = self._before[0], (None, self._before[1])
        return None if before is None or offsets is None else before.moved(rows, offsets)

    def moved_backward(self, rows: Tensor, offsets: Tensor | None) -> BackwardOfRows | None:
        """Return the backward pass, bound to other rows and offsets."""
        before, self._before = self._before[1], (self._before[0], None)
        return None if before is None or offsets is None else before.moved(rows, offsets)


class PackedCall(NamedTuple):
    """A call of packed tensors [T, H, D] outside of autograd, for those that are a node of it themselves."""

    outline: Outline
    captures: tuple[Tensor, ...]
    optional: OptionalTensors
    passes: Passes

    @staticmethod
    def of(
        tensors: Tensors, score: Function, mask: Function, extras: Extras, *, needs_grad: bool, no_padding: bool = False
    ) -> PackedCall | None:
        """The call, with gradients of query, key and value if `needs_grad`, else of what requires them; None where there is something to
        work out each time. `no_padding`: each row is a token of a sequence."""
        call = find_call(tensors, score, mask, extras, allowed_for(extras), packed=True, needs_all=needs_grad)
        return None if call is None else PackedCall(call.outline, call.tensors[3:], call.optional, Passes(no_padding=no_padding))

    def moved(self, offsets: Tensor) -> PackedCall:
        """Return the call with other sequences, of which there are as many."""
        optional = self.optional._replace(cu_q=offsets, cu_kv=offsets, q_lengths=None, kv_lengths=None)
        return self._replace(optional=optional, passes=Passes(no_padding=self.passes.no_padding, before=self.passes))

    def forward(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """out [T, Hq, Dv] and lse [Hq, T]."""
        results = forward_now(self.outline, (*tensors, *self.captures), self.optional)
        return results.out, results.lse.contiguous()

    def backward(self, tensors: Tensors, outputs: tuple[Tensor, Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
        """Gradients of query, key and value, from the outputs of `forward` and the gradient of out."""
        grad_inputs = backward_now(self.outline, (*tensors, *self.captures), self.optional, outputs, (gradient,))
        return tuple(t for t in grad_inputs[:3] if t is not None)

    def forward_rows(self, rows: Tensor, layout: RowLayout) -> tuple[Tensor, Tensor]:
        """`forward` of query, key and value side by side in rows [T, E]; out is [T, Hq * Dv]. Read lse only where the call needs
        gradients."""
        passes = self.passes
        if not observers():
            bound = passes.forward  # once: other threads may take it away
            if bound is None:
                bound = passes.forward = passes.moved_forward(rows, self.optional.cu_q) or bind_forward(
                    self.outline, rows, layout.split(rows), self.optional, no_padding=passes.no_padding
                )
            outputs = None if bound is None else bound(rows)
            if outputs is not None:
                return outputs
            passes.forward = None  # bound anew by the next
        out, lse = self.forward(layout.split(rows))
        return out.flatten(1), lse

    def backward_rows(self, rows: Tensor, outputs: tuple[Tensor, Tensor], gradient: Tensor, layout: RowLayout) -> Tensor:
        """The gradient [T, E] of these rows, from the outputs of `forward_rows` and the gradient of out."""
        passes, (out, lse) = self.passes, outputs
        if not (observers() or torch.is_grad_enabled()):
            bound = passes.backward
            if bound is None:
                bound = passes.backward = passes.moved_backward(rows, self.optional.cu_q) or bind_backward(
                    self.outline, rows, layout.split(rows), self.optional, (layout.of_queries(out), lse), layout.of_queries(gradient)
                )
            grad_rows = None if bound is None else bound(rows, out, lse, gradient)
            if grad_rows is not None:
                return grad_rows
            passes.backward = None
        return _side_by_side(self.backward(layout.split(rows), (layout.of_queries(out), lse), layout.of_queries(gradient)))

    def differentiable(self, tensors: Tensors) -> Tensor:
        """out, as autograd knows it."""
        return attend_outlined(self.outline, (*tensors, *self.captures), self.optional).out


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """[T, E] of the rows of [T, H, D]; no copy where they lie so already, in one allocation."""
    first, at, width = parts[0], parts[0].data_ptr(), sum([t.shape[1] * t.shape[2] for t in parts])
    for t in parts:
        if t.stride() != (width, t.shape[2], 1) or t.data_ptr() != at or t.shape[0] < 2:  # a row alone may have any stride
            return torch.cat(parts, 1).flatten(1)  # type: ignore[arg-type]
        at += t.shape[1] * t.shape[2] * t.element_size()
    return first.as_strided((first.shape[0], width), (width, 1))


def _with_sink(results: Results, sink: Tensor) -> Results:
    """A logit without a value scales its row by sigmoid(lse - sink), and enters the row's logsumexp."""
    lse = results.lse
    logit = sink.to(lse.dtype)[:, None]
    share = torch.sigmoid(lse - logit)
    out = (results.out * share[..., None]).to(results.out.dtype)
    weights = None if results.weights is None else (results.weights * share[..., None]).to(results.weights.dtype)
    return Results(out, torch.logaddexp(lse, logit), results.row_max, results.column_sums, weights)


def _with_sink_and_columns(tensors: Tensors, score: Function, mask: Function, extras: Extras, check: Check | None) -> Results:
    """Column sums follow from the logsumexp with the sink in it, which is known only afterwards."""
    if torch.compiler.is_dynamo_compiling():
        raise ArgumentError("column_sums cannot be returned together with a sink under torch.compile; ask for weights")
    results = run(tensors, score, mask, extras._replace(outputs=replace(extras.outputs, column_sums=False)), check)
    formula, operands = prepare(tensors, score, mask, extras._replace(dropout_p=0.0))
    return replace(results, column_sums=column_sums(formula, operands, results.lse, allowed_for(extras)))
