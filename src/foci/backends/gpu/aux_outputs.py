"""Outputs that need the weights, and their gradients, host side: a separate pass beside the fused kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from foci.backends.gpu.attention_weights_kernels import weigh_columns, weigh_rows
from foci.backends.gpu.kernel_args import encode
from foci.backends.gpu.launch_builder import LaunchBuilder
from foci.backends.gpu.schedules import Schedule
from foci.backends.gpu.tile_tables import Sequences
from foci.problem import Cotangents, Operands, Results

if TYPE_CHECKING:
    from foci.backends.gpu.passes import PassBuilder

__all__ = ["WeightCotangents", "add_aux_outputs", "add_weight_cotangents", "weight_cotangents"]

WeightCotangents: TypeAlias = dict[str, Any]


def add_aux_outputs(builder: PassBuilder, operands: Operands, sequences: Sequences, results: Results) -> Results:
    """Add column sums and weights to the results, if the problem asks for them."""
    query, key, asked = operands.query, operands.key, builder.problem.formula.outputs
    (batch, heads, length, _), keys = query.shape, key.shape[2]
    columns = query.new_zeros((batch, heads, keys), dtype=torch.float32) if asked.column_sums else None
    weights = query.new_zeros((batch, heads, length, keys)) if asked.weights else None
    if query.numel() and keys:
        call = builder.begin(operands, {"out": results.out}, sequences, LaunchBuilder((), None))
        schedule = _schedule(builder)
        visits = builder.visits(call, schedule, "keys")
        call.launches.add(
            weigh_columns, (batch * heads * visits.tasks,),
            query, key, results.lse, columns, weights, builder.args(call, heads, visits), builder.config(call, schedule, visits),
            call.functions.both, call.functions.mask, num_warps=schedule.warps,
        )  # fmt: skip
    return replace(results, column_sums=columns, weights=weights)


def weight_cotangents(operands: Operands, cotangents: Cotangents, sequences: Sequences) -> WeightCotangents | None:
    """Gradients of the weights, as fields of `kernel_args.Numbers`; None if there are none."""
    if cotangents.column_sums is None and cotangents.weights is None:
        return None
    columns, weights = (None if t is None else t.to(torch.float32).contiguous() for t in (cotangents.column_sums, cotangents.weights))
    counts = (operands.query.shape[1], operands.query.shape[2], operands.key.shape[2])
    fields = {"flow_columns": columns, "flow_weights": weights, "flow_start": sequences.kv_start}
    return {**fields, "flow_counts": tuple(map(encode, counts))}


def add_weight_cotangents(
    builder: PassBuilder, operands: Operands, sequences: Sequences, results: Results, cotangents: Cotangents, flow: WeightCotangents
) -> Cotangents:
    """Cotangents of out and lse with sum_j p g subtracted from that of lse, so that delta includes the gradients of the weights."""
    query = operands.query
    if not query.numel() or not operands.key.shape[2]:
        return replace(cotangents, column_sums=None, weights=None)
    call = builder.begin(operands, {"out": results.out}, sequences, LaunchBuilder((), None))
    batch, heads, length, _ = query.shape
    sums = torch.zeros((batch, heads, length), dtype=torch.float32, device=query.device)
    schedule = _schedule(builder)
    visits = builder.visits(call, schedule, "queries")
    args = builder.args(call, heads, visits)
    call.launches.add(
        weigh_rows, (batch * heads * visits.tasks,),
        query, operands.key, results.lse.contiguous(), sums, args._replace(numbers=call.numbers._replace(**flow)),
        builder.config(call, schedule, visits), call.functions.both, call.functions.mask, num_warps=schedule.warps,
    )  # fmt: skip
    lse: Tensor = -sums if cotangents.lse is None else cotangents.lse.to(torch.float32) - sums
    return Cotangents(cotangents.out, lse)


def _schedule(builder: PassBuilder) -> Schedule:
    """Schedule of the captured gradients' kernel, which has room for as much, but without tensor descriptors."""
    return replace(builder.schedule("captures"), descriptors=False)
