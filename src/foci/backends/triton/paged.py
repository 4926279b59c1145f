"""Keys and values in pages: split-KV kernels read them through the page table where they lie; long queries gather them first."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.backends.contract import Inputs, Kernel, Plan
from foci.backends.gpu.allocate import result_tensors
from foci.backends.gpu.compiling import compile_in_parallel
from foci.backends.gpu.decode import Pages
from foci.backends.gpu.kernel import GpuKernel, is_elsewhere
from foci.backends.gpu.kernel_args import encode
from foci.backends.gpu.launch_builder import LaunchBuilder
from foci.backends.gpu.passes import PassBuilder
from foci.backends.gpu.portable_passes import PortableBackward, PortableForward, row_tiles
from foci.backends.gpu.schedules import Schedule, padded_dim
from foci.backends.gpu.stream_state import current_stream
from foci.backends.gpu.symbolic_tokens import count_tokens
from foci.backends.gpu.tensor_descriptors import stream_operand
from foci.backends.gpu.tile_tables import Sequences, build_visits, operand_sequences
from foci.backends.paged_gather import Gathered, jagged_plan
from foci.backends.triton.kernel import build_kernel
from foci.problem import Cotangents, Gradients, Operands, OptionalTensors, Program, Results

__all__ = ["PagedKernel"]

_PROGRAMS: Final = 1056
"""Programs that a decode is split into: several per SM, so that the last ones cost little."""
_ROWS: Final = 512
"""At most so many rows of the heads that share keys read pages where they lie. By estimate, gathering costs more up to 1024 rows: keys are
written and read twice more, and split-KV kernels reach 0.6 of the usual rate (`schedules.split_efficiency`)."""


class _Joined(LaunchBuilder):
    """Builds one launch list of split-KV kernels and those that build their tile table, since lengths differ from call to call."""

    def another(self, inputs: Inputs, stream: int | None) -> LaunchBuilder:
        return self


class PagedKernel(Kernel):
    """Forward and backward of a plan with paged keys and values."""

    def __init__(self, plan: Plan) -> None:
        self.builder = PassBuilder(plan)
        self.forward_pass = PortableForward(self.builder)
        self.native = GpuKernel(self.builder, self.forward_pass, PortableBackward(self.builder))
        self.gathered = Gathered(plan, build_kernel(jagged_plan(plan)))

    def forward(self, operands: Operands, /) -> Results:
        """Attention of the operands."""
        if is_elsewhere(operands.query):
            with torch.cuda.device(operands.query.device):
                return self.forward(operands)
        if not self.reads_pages(operands):
            return self.gathered.forward(operands)
        lengths, table = _collect_pages(operands)
        inputs = (*operands.tensors, operands.seed, lengths, table)
        key = self.native.pass_key(operands) if lengths is operands.kv_lengths else None
        launches = _Joined(inputs, None if key is None else current_stream(operands.query))
        with compile_in_parallel():
            results = self._split(operands, launches)
            launches.finish(count_tokens(operands))
        if key is not None and (built := launches.built) is not None:
            self.native.keep(key, operands, operand_sequences(operands), built, self.native.results)
        return results

    def launch_forward(self, program: Program, tensors: Inputs, optional: OptionalTensors, /) -> list[Tensor] | None:
        """See `foci.backends.contract.Kernel`. The backward gathers pages first, which no launch list holds."""
        return self.native.launch_forward(program, tensors, optional)

    def backward(self, operands: Operands, results: Results, cotangents: Cotangents, /) -> Gradients:
        """Gradients of the operands."""
        return self.gathered.backward(operands, results, cotangents)

    def reads_pages(self, operands: Operands) -> bool:
        """Whether split-KV kernels run a call: few rows per group of heads, one set of tiles for the whole group, and no other outputs."""
        (_, heads, length, _), kv_heads = operands.query.shape, operands.key.shape[1]
        if "h" in self.builder.variant.mask.variables() or self.builder.problem.formula.outputs.column_sums:
            return False
        return heads // kv_heads * length <= _ROWS and operands.max_kv > 0

    def _split(self, operands: Operands, launches: LaunchBuilder) -> Results:
        builder, query, key = self.builder, operands.query, operands.key
        lengths, table = _collect_pages(operands)
        outputs = result_tensors(launches, operands, builder.problem)
        call = builder.begin(operands, {"out": outputs[0]}, Sequences(kv_length=lengths, stays=False), launches)
        call = replace(call, columns=operands.max_kv)
        kind = "decode" if query.shape[1] // key.shape[1] * query.shape[2] <= 64 else "split"
        schedule = self._schedule(kind, operands)
        # one row of the table for all queries
        visits = build_visits(builder, call, replace(schedule, tile_q=padded_dim(query.shape[2])), "queries")
        config = builder.config(call, schedule, visits, excludes=builder.excludes and kind == "decode")
        stream = functools.partial(stream_operand, config, schedule.tile_kv, key.shape[2])
        splits = self._count_splits(kind, schedule, operands)
        pages = Pages(lengths, table, encode(table.stride(0)), encode(table.stride(1)), tl.constexpr(key.shape[2]))
        self.forward_pass.split(call, kind, schedule, visits, config, splits, (stream(key), stream(operands.value)), outputs, pages)
        return Results(*outputs)

    def _schedule(self, kind: str, operands: Operands) -> Schedule:
        """Schedule of a split-KV kernel, with tiles no longer than a page if pages are long enough: a tile within one page needs one
        look-up."""
        schedule, page = self.forward_pass.rows_schedule(kind, operands.query, operands.key), operands.key.shape[2]
        tile = schedule.tile_kv
        if page >= 32 and page & (page - 1) == 0:
            tile = min(tile, page)
        is_one = page % tile == 0
        return replace(schedule, tile_kv=tile, descriptors=schedule.descriptors and is_one)

    def _count_splits(self, kind: str, schedule: Schedule, operands: Operands) -> int:
        query, key, arch = operands.query, operands.key, self.builder.plan.target.arch
        groups, tiles = query.shape[0] * key.shape[1], triton.cdiv(operands.max_kv, schedule.tile_kv)
        if kind == "split":
            return self.forward_pass.count_splits(kind, schedule, groups * row_tiles(schedule, query, key), tiles)
        return int(max(1, min(_PROGRAMS // groups, tiles // 4)) if arch else min(3, tiles))


def _collect_pages(operands: Operands) -> tuple[Tensor, Tensor]:
    """Lengths, without gaps, and page table."""
    assert operands.kv_lengths is not None
    assert operands.page_table is not None
    return operands.kv_lengths.contiguous(), operands.page_table
