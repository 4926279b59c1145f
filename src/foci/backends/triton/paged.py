"""Keys and values in pages: decoding reads them through the page table where they lie; longer queries gather them first."""

from __future__ import annotations

import functools
from typing import Final

import torch
import triton
import triton.language as tl

from foci.backends.contract import Plan
from foci.backends.paging import Gathered, jagged_plan
from foci.backends.triton.arguments import encode
from foci.backends.triton.decode import Pages, attention_decode, combine_splits
from foci.backends.triton.kernel import TritonKernel, is_elsewhere
from foci.backends.triton.recording import Recorder
from foci.backends.triton.schedules import Schedule, padded
from foci.backends.triton.sparsity import Sequences
from foci.backends.triton.streams import streamed
from foci.problem import Cotangents, Gradients, Operands, Results, empty_out

__all__ = ["PagedKernel"]

_PROGRAMS: Final = 1056
"""Programs that a decode is split into: several for each multiprocessor, so that the last ones cost little."""


class PagedKernel:
    """Forward and backward of a plan of the paged layout."""

    def __init__(self, plan: Plan) -> None:
        self.native = TritonKernel(plan)
        self.gathered = Gathered(plan, TritonKernel(jagged_plan(plan)))

    def forward(self, operands: Operands, /) -> Results:
        """Attention of the operands."""
        if is_elsewhere(operands.query):
            with torch.cuda.device(operands.query.device):
                return self.forward(operands)
        return self._decode(operands) if self.is_decode(operands) else self.gathered.forward(operands)

    def backward(self, operands: Operands, results: Results, cotangents: Cotangents, /) -> Gradients:
        """Gradients of the operands."""
        return self.gathered.backward(operands, results, cotangents)

    def is_decode(self, operands: Operands) -> bool:
        """Few rows for each group of heads, one set of tiles for the whole group, and nothing asked for but rows."""
        (_, heads, length, _), kv_heads = operands.query.shape, operands.key.shape[1]
        if "h" in self.native.variant.mask.variables() or self.native.problem.formula.outputs.column_sums:
            return False
        return length <= 16 and heads // kv_heads * length <= 64 and operands.max_kv > 0

    def _decode(self, operands: Operands) -> Results:
        kernel, query, key, value, table = self.native, operands.query, operands.key, operands.value, operands.page_table
        assert table is not None
        assert operands.kv_lengths is not None
        lengths = operands.kv_lengths.clamp(max=operands.max_kv).to(torch.int32)
        batch, heads, length, _ = query.shape
        out = empty_out(query, value)
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        row_max = torch.empty_like(lse) if kernel.problem.formula.outputs.row_max else None
        call = kernel.begin(operands, {"out": out}, Sequences(kv_length=lengths, stays=False), Recorder((), None))
        strides = call.strides
        schedule = self._schedule(operands)
        visits = kernel.visits(call, schedule, "queries")
        config = kernel.config(call, schedule, visits)
        stream = functools.partial(streamed, config, schedule.tile_kv, key.shape[2])
        groups, tiles = batch * key.shape[1], triton.cdiv(operands.max_kv, schedule.tile_kv)
        splits = max(1, min(_PROGRAMS // groups, tiles // 4)) if kernel.plan.target.arch else min(3, tiles)
        rows, width = schedule.tile_q, kernel.dims[1]
        partial = query.new_empty((groups * splits, rows, width), dtype=torch.float32)
        most, total = (query.new_empty((groups * splits, rows), dtype=torch.float32) for _ in range(2))
        table = table.to(torch.int32).contiguous()
        pages = Pages(lengths, table, encode(table.stride(0)), tl.constexpr(key.shape[2]))
        size = kernel.size(call, heads, visits.tasks)
        attention_decode[(groups * splits,)](
            query, stream(key), stream(value), partial, most, total, strides, size, visits.table, call.numbers, call.environment,
            config, encode(splits), call.functions.score, call.functions.mask, pages, num_warps=schedule.warps,
        )  # fmt: skip
        columns = min(32, width)
        combine_splits[(batch * heads * length, width // columns)](
            partial,
            most,
            total,
            out,
            lse,
            row_max,
            call.strides,
            size,
            call.numbers,
            config,
            encode(splits),
            64,
            columns,
            num_warps=4,
        )
        return Results(out, lse, row_max)

    def _schedule(self, operands: Operands) -> Schedule:
        """That of decoding, its tiles no longer than a page where that is long enough: a tile in one page needs one look-up."""
        found, page = self.native.schedule("decode"), operands.key.shape[2]
        tile = found.tile_kv
        if page >= 32 and page & (page - 1) == 0:
            tile = min(tile, page)
        is_one = page % tile == 0
        rows = padded(operands.query.shape[1] // operands.key.shape[1] * operands.query.shape[2])
        return Schedule(rows, tile, found.warps, found.stages, found.descriptors and is_one)
