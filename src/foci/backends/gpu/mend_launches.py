"""Host side of `foci.backends.gpu.mend`: launches that compute results once more where they hold a NaN.

A pass whose problem may exclude positions adds them last. `dependent`: they start while the previous kernel ends, by programmatic dependent
launch, which takes sm_90.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
from torch import Tensor

from foci.backends.contract import Given
from foci.backends.gpu.architectures import count_sms
from foci.backends.gpu.backward import KeyGradients, RowInputs
from foci.backends.gpu.forward import RowOutputs
from foci.backends.gpu.kernel_args import encode
from foci.backends.gpu.mend import TILE, TILES_AT_ONCE, NanFlags, mend_gradients, mend_rows
from foci.backends.gpu.passes import Pass, PassBuilder
from foci.backends.gpu.schedules import Schedule
from foci.backends.gpu.symbolic_tokens import at_most
from foci.backends.gpu.tile_tables import TileTable
from foci.problem import Results

__all__ = ["Tasks", "allocate_flags", "key_tasks", "launch_mend_gradients", "launch_mend_rows", "query_tasks"]

_WARPS: Final = 4


class Tasks(NamedTuple):
    """Tasks of a mending kernel, and the tiles that they stream."""

    tiles: Schedule
    visits: TileTable
    mode: str | None  # in place of that of `visits`


def query_tasks(builder: PassBuilder, call: Pass, rows: int, visits: TileTable) -> Tasks:
    """Tiles of `rows` queries as tasks; `visits` has the same tasks, with any tiles of keys."""
    return _tasks(builder, call, Schedule(rows, _streamed(builder), _WARPS, 1), visits, "queries")


def key_tasks(builder: PassBuilder, call: Pass, rows: int, visits: TileTable) -> Tasks:
    """Tiles of `rows` keys as tasks; `visits` has the same tasks, with any tiles of queries."""
    return _tasks(builder, call, Schedule(_streamed(builder), rows, _WARPS, 1), visits, "keys")


def _tasks(builder: PassBuilder, call: Pass, tiles: Schedule, visits: TileTable, side: str) -> Tasks:
    """Every tile is streamed, with the mask function, unless the caller's blocks say more than that."""
    if builder.problem.formula.block_size is None:
        return Tasks(tiles, visits, "every")
    return Tasks(tiles, builder.visits(call, tiles, side), None)


def _streamed(builder: PassBuilder) -> int:
    return 64 if max(builder.dims) <= 128 else 32


def launch_mend_rows(builder: PassBuilder, call: Pass, results: Results, tasks: Tasks, *, dependent: bool) -> None:
    """Add the launch that mends the forward's rows. Tasks are tiles of queries that the forward multiplies together, or several of 64."""
    operands, heads = call.operands, call.operands.query.shape[1]
    row_tiles = operands.query.shape[0] * heads * tasks.visits.tasks * max(tasks.tiles.tile_q // TILE.value, 1)
    call.launches.add(
        mend_rows, (_programs(operands.query, triton.cdiv(row_tiles, TILES_AT_ONCE.value)),),
        operands.query, operands.key, operands.value, RowOutputs(results.out, results.lse, None),
        builder.args(call, heads, tasks.visits), builder.config(call, tasks.tiles, tasks.visits, mode=tasks.mode),
        call.functions.score, call.functions.mask, dependent, num_warps=_WARPS, **_options(dependent),
    )  # fmt: skip


def launch_mend_gradients(
    builder: PassBuilder, call: Pass, given: Given, rows: tuple[Tensor, Tensor], grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    found: tuple[NanFlags, ...], by_query: Tasks, by_key: Tasks, *, dependent: bool,
) -> None:  # fmt: skip
    """Add the launch that mends gradients. `rows`: (lse in base 2, delta). `found`: the flags of all kernels of the backward."""
    operands, (batch, heads), kv_heads = call.operands, call.operands.query.shape[:2], call.operands.key.shape[1]
    tasks = batch * (heads * by_query.visits.tasks + kv_heads * by_key.visits.tasks)
    call.launches.add(
        mend_gradients, (_programs(operands.query, tasks),),
        operands.query, operands.key, operands.value, RowInputs(given.out, given.dout, given.lse, None, *rows), grads[0],
        KeyGradients(*grads[1:]), found,
        builder.args(call, heads, by_query.visits), builder.args(call, kv_heads, by_key.visits),
        builder.config(call, by_query.tiles, by_query.visits, mode=by_query.mode),
        builder.config(call, by_key.tiles, by_key.visits, mode=by_key.mode),
        call.functions.both, call.functions.mask, dependent, num_warps=_WARPS, **_options(dependent),
    )  # fmt: skip


def allocate_flags(builder: PassBuilder, call: Pass, programs: int) -> NanFlags | None:
    """Allocate flags for the programs of a kernel of the backward; None if the problem excludes nothing."""
    if not builder.excludes:
        return None
    return NanFlags(call.launches.empty((programs,), (1,), torch.int32, call.operands.query), encode(programs))


def _programs(query: Tensor, most: int) -> int:
    return at_most(most, 2 * count_sms(query.device))


def _options(dependent: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if dependent else {}
