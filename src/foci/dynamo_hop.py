"""Attention with user functions under torch.compile: one graph, no break, whatever the functions capture.

Dynamo cannot pass a Python function through a graph, except to a higher-order operator it knows. Its handling of
flex_attention's is what score and mask functions need: it runs them on 0-d tensors, lifts what they close over into
inputs and hands two graphs to the operator. `_Attention` is registered to be handled like it. Called with the two graphs
it runs them on foci's symbols and becomes an ordinary call of `foci::attention`, so nothing of it is left below Dynamo.
Where Dynamo's handling is not found, the graph breaks and attention runs between its parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from foci.compat.dynamo import trace_like_flex_attention
from foci.compat.fx import HigherOrderOperator
from foci.core import run_now
from foci.environment import Allowed
from foci.prepare import Extras, Part
from foci.problem import Outputs, Results

__all__ = ["run_captured"]

_TENSORS: Final = ("blocks", "cu_q", "cu_kv", "q_lengths", "kv_lengths", "page_table")
_OUTPUTS: Final = tuple(field.name for field in dataclasses.fields(Outputs))


def _unchanged(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score


def _everywhere(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= 0


class _Attention(HigherOrderOperator or object):  # type: ignore[misc]
    """`foci_attention(query, key, value, score graph, (tensors..., mask graph), scale, options, score inputs, mask inputs)`."""

    def __init__(self) -> None:
        super().__init__("foci_attention")

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, score: Callable[..., Any], rest: tuple[Any, ...], scale: Any,
        options: dict[str, Any], score_inputs: Sequence[Any] = (), mask_inputs: Sequence[Any] = (),
    ) -> tuple[Tensor, ...]:  # fmt: skip
        *tensors, mask = rest
        extras = Extras(
            scale=scale if options["scaled"] else None,
            dropout_p=options["dropout_p"],
            outputs=Outputs(**{name: options[name] for name in _OUTPUTS}),
            # a block size is part of the formula: a symbolic one is guarded, and another compiles anew
            block_size=(int(options["block_q"]), int(options["block_kv"])) if options["blocks"] else None,
            max_q=options["max_q"],
            max_kv=options["max_kv"],
            exact_lengths=options["exact_lengths"],
            part=Part(options["first_head"], options["first_query"], options["queries"] if options["longer"] else None)
            if options["parted"]
            else None,
            lower_right_form=options["lower_right_form"],
            **dict(zip((name for name in _TENSORS if options[name]), tensors, strict=True)),
        )
        score_function = (lambda *symbols: score(*symbols, *score_inputs)) if options["score"] else None
        mask_function = (lambda *symbols: mask(*symbols, *mask_inputs)) if options["mask"] else None
        allowed = tuple(options["allowed"].split(",")) if options["restricted"] else None
        results = run_now((query, key, value), score_function, mask_function, extras, allowed)
        return tuple(
            results.out.new_empty(0) if t is None else t
            for t in (results.out, results.lse, results.row_max, results.column_sums, results.weights)
        )


_attention: Final = _Attention() if HigherOrderOperator is not None and trace_like_flex_attention("foci_attention") else None


# what runs between two graphs; the reason is printed where a graph may not break
_run_outside: Final[Callable[..., Results]] = torch.compiler.disable(  # type: ignore[no-untyped-call]
    run_now,
    reason="foci needs names of torch._dynamo to put attention into a graph, and this release of torch lacks them; `foci env` lists them",
)


def run_captured(
    tensors: tuple[Tensor, Tensor, Tensor], score: Callable[..., Any] | None, mask: Callable[..., Any] | None, extras: Extras,
    allowed: Allowed,
) -> Results:  # fmt: skip
    """`foci.dispatch.run` as Dynamo traces it. The backends allowed are a constant of the graph, which Dynamo guards."""
    if _attention is None:
        return _run_outside(tensors, score, mask, extras, allowed)
    query, key, value = tensors
    optional = (extras.blocks, extras.cu_q, extras.cu_kv, extras.q_lengths, extras.kv_lengths, extras.page_table)
    tensor_args = [t for t in optional if t is not None]
    block_q, block_kv = (0, 0) if extras.block_size is None else extras.block_size
    outputs = extras.outputs
    part = extras.part or Part()
    options = {
        "score": score is not None, "mask": mask is not None, "scaled": extras.scale is not None,
        "dropout_p": 0.0 if extras.dropout_p == 0.0 else extras.dropout_p,
        "lse": outputs.lse, "row_max": outputs.row_max, "column_sums": outputs.column_sums, "weights": outputs.weights,
        "block_q": block_q, "block_kv": block_kv, "max_q": extras.max_q, "max_kv": extras.max_kv,
        "exact_lengths": extras.exact_lengths, "parted": extras.part is not None, "longer": part.queries is not None,
        "first_head": part.first_head, "first_query": part.first_query, "queries": part.queries or 0,
        "restricted": allowed is not None, "allowed": ",".join(allowed or ()),
        "blocks": extras.blocks is not None, "cu_q": extras.cu_q is not None, "cu_kv": extras.cu_kv is not None,
        "q_lengths": extras.q_lengths is not None, "kv_lengths": extras.kv_lengths is not None,
        "page_table": extras.page_table is not None, "lower_right_form": extras.lower_right_form,
    }  # fmt: skip
    out, lse, row_max, column_sums, weights = _attention(
        query, key, value, _unchanged if score is None else score, (*tensor_args, _everywhere if mask is None else mask),
        1.0 if extras.scale is None else extras.scale, options,
    )  # fmt: skip
    return Results(
        out,
        lse,
        row_max.detach() if outputs.row_max else None,
        column_sums if outputs.column_sums else None,
        weights if outputs.weights else None,
    )
