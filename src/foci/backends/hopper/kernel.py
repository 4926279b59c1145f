"""A plan made runnable: what a forward launches, and with what."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from foci.backends.causal import is_causal
from foci.backends.contract import Plan
from foci.backends.hopper.arguments import Config
from foci.backends.hopper.descriptors import describe
from foci.backends.hopper.forward import attention_forward
from foci.backends.hopper.functions import Functions, functions_of
from foci.backends.hopper.schedules import Schedule, forward_schedule
from foci.backends.triton.arguments import Environment, Numbers, Size, encode, encode_word
from foci.backends.triton.functions import environment_numbers, lies_of
from foci.backends.triton.functions import functions_of as triton_functions_of
from foci.backends.triton.schedules import Schedule as Tiles
from foci.backends.triton.schedules import padded
from foci.backends.triton.sparsity import ALL, DENSE, Sequences, Visits, _assign, sequences_of, visits_of
from foci.dropout import threshold
from foci.problem import Operands, Results, empty_out

__all__ = ["HopperKernel", "Pass"]


@dataclass(frozen=True, eq=False)
class Pass:
    """What every kernel of one call shares."""

    operands: Operands
    functions: Any
    environment: Environment
    numbers: Numbers
    sequences: Sequences
    is_plain: bool


class HopperKernel:
    """Forward of a plan. What precedes a launch, numbers and lists of tiles, is the Triton backend's."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.problem = plan.problem
        self.dims = (padded(self.problem.head_dim), padded(self.problem.value_dim))
        formula = self.problem.formula
        self.variant = self.problem.variant
        mask = self.variant.mask
        self.mask_slots = sorted({int(str(e.value)) for e in mask.walk() if e.op == "load"})
        self.is_causal = is_causal(self.variant) and formula.block_size is None
        self.is_whole = mask.op == "const" and mask.value is True and formula.block_size is None

    def forward(self, operands: Operands, /) -> Results:
        """Attention of the operands."""
        query, outputs = operands.query, self.problem.formula.outputs
        out = empty_out(query, operands.value)
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        row_max = torch.empty_like(lse) if outputs.row_max else None
        if operands.cu_q is not None:
            out.zero_()
            lse.fill_(-math.inf)
            if row_max is not None:
                row_max.fill_(-math.inf)
        call = self.begin(operands)
        mode = "causal" if self.is_causal else "all" if self.is_whole else "ranges"
        schedule = forward_schedule(self.dims, is_plain=call.is_plain, mode=mode)
        visits = self.visits(call, schedule.tile_q, schedule.tile_kv)
        functions = self.functions(operands, "q_idx")
        batch, heads = query.shape[:2]
        is_jagged = operands.cu_q is not None
        attention_forward[(batch * heads * visits.tasks,)](
            *(describe(t, rows, ragged=is_jagged) for t, rows in ((query, 64), (operands.key, schedule.tile_kv), (operands.value, schedule.tile_kv), (out, 64))),
            lse, row_max, self.size(call, heads, visits.tasks), visits.spans, visits.table, call.numbers, call.environment,
            self.launched(call, schedule, visits.mode), functions.pre, functions.score, functions.mask, num_warps=4,
        )  # fmt: skip
        return Results(out, lse, row_max)

    def begin(self, operands: Operands) -> Pass:
        """What the kernels of one call share."""
        lies = lies_of(operands.captures)
        sizes, strides = environment_numbers(operands.captures, lies)
        p = operands.dropout_p
        return Pass(
            operands,
            triton_functions_of(self.variant, lies, half=True),
            Environment(
                tuple(map(encode, operands.ints)), operands.floats, operands.captures, tuple(map(encode, sizes)), tuple(map(encode, strides))
            ),
            Numbers(operands.scale, encode_word(threshold(p)), 0.0 if p >= 1 else 1 / (1 - p), operands.seed),
            sequences_of(operands),
            self.variant.score.op == "var" and operands.scale > 1e-30,
        )

    def size(self, call: Pass, heads: int, tasks: int) -> Size:
        """Counts for a kernel whose programs have `heads` heads and `tasks` tiles each."""
        query, key = call.operands.query, call.operands.key
        return Size(*map(encode, (query.shape[0], heads, query.shape[1] // key.shape[1], tasks, query.shape[2], key.shape[2])))

    def functions(self, operands: Operands, resident: str) -> Functions:
        """The generated functions, for kernels where `resident` stays."""
        return functions_of(self.variant, lies_of(operands.captures), half=True, resident=resident)

    def visits(self, call: Pass, tile_q: int, tile_kv: int, side: str = "queries") -> Visits:
        """Which tiles each task visits: found by arithmetic where the mask is causal or keeps everything."""
        operands = call.operands
        if not (self.is_causal or self.is_whole):
            return visits_of(self, call, Tiles(tile_q, tile_kv, 4, 1), side)
        rows, tile = (operands.query, tile_q) if side == "queries" else (operands.key, tile_kv)
        count, spans = -(-rows.shape[2] // tile), DENSE
        if operands.cu_q is not None:
            count += operands.cu_q.shape[0] - 1
            spans = _assign(call, tile, count, is_by_query=side == "queries")
        return Visits(count, "causal" if self.is_causal else "all", spans, ALL)

    def config(self, call: Pass, tiles: Tiles, visits: Visits) -> Config:
        """The compile-time side of a search for tiles."""
        is_jagged, has_blocks = call.operands.cu_q is not None, self.problem.formula.block_size is not None
        return _config((0, False, tiles.tile_q, tiles.tile_kv, 1, 0, 0, 0, 0, visits.mode, is_jagged, False, False, has_blocks))

    def launched(self, call: Pass, schedule: Schedule, mode: str) -> Config:
        """The compile-time side of a launch."""
        p = self.problem
        return _config(
            (
                schedule.consumers, schedule.overlapped, schedule.tile_q, schedule.tile_kv, schedule.stages,
                p.head_dim, self.dims[0], p.value_dim, self.dims[1], mode, call.operands.cu_q is not None,
                call.is_plain, p.formula.dropout, p.formula.block_size is not None,
            )
        )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _config(values: tuple[Any, ...]) -> Config:
    return Config(*map(tl.constexpr, values))
