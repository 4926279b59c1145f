"""Forward and backward passes by the kernels in Triton that run on every GPU from sm_80 on: which kernels, with which arguments."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from foci.backends.contract import Given
from foci.backends.gpu.allocate import gradient_tensors, like_tensor, result_tensors, row_tensors
from foci.backends.gpu.aux_outputs import WeightCotangents
from foci.backends.gpu.backward import KeyGradients, RowInputs, RowStats, attention_key_gradient, attention_query_gradient
from foci.backends.gpu.captured_grad import bias_gradient, capture_gradients, find_query_tile_bias
from foci.backends.gpu.decode import Pages, Partials, SplitArgs, attention_decode, combine_splits, mend_splits
from foci.backends.gpu.forward import attention_forward
from foci.backends.gpu.kernel_args import Config, encode
from foci.backends.gpu.launch_builder import LaunchBuilder
from foci.backends.gpu.mask_convexity import begins_late, is_convex
from foci.backends.gpu.mend import NanFlags
from foci.backends.gpu.mend_launches import allocate_flags, key_tasks, launch_mend_gradients, launch_mend_rows, query_tasks
from foci.backends.gpu.passes import Pass, PassBuilder
from foci.backends.gpu.row_stats import prepare_rows
from foci.backends.gpu.schedules import Schedule, padded_dim, shared_bytes, split_kind, splits_for, takes_splits
from foci.backends.gpu.tensor_descriptors import stream_operand
from foci.backends.gpu.tile_tables import Sequences, TileTable
from foci.backends.problem_class import find_pair_loads
from foci.ir.derivative import score_derivative
from foci.problem import Operands, Results
from foci.variant import Variant

__all__ = ["PortableBackward", "PortableForward", "row_tiles"]


class PortableForward:
    """Forward of a plan."""

    def __init__(self, builder: PassBuilder) -> None:
        variant, formula = builder.variant, builder.problem.formula
        self.builder = builder
        self.takes_splits = takes_splits(formula)
        # a mask in memory takes little shared memory beside the streamed tiles, so two programs fit on an SM; a bias leaves room for one
        is_whole = builder.is_dense or bool(find_pair_loads(variant.score))
        is_listed = _is_listed(variant, formula.block_size)
        self.forward_kind = "forward" if is_whole else "forward_listed" if is_listed else "forward_sparse"

    def of_other_lengths(self) -> tuple[PortableForward, ...]:
        """None: they compile in a moment."""
        return ()

    def build(self, operands: Operands, sequences: Sequences, launches: LaunchBuilder) -> Results:
        """See `foci.backends.gpu.kernel.ForwardPass`."""
        query = operands.query
        rows = query.shape[:3]
        outputs = result_tensors(launches, operands, self.builder.problem)
        out, lse, row_max = outputs
        if operands.key.shape[2] == 0:
            launches.forget()
            out.zero_()
            for statistic in (lse, row_max):
                if statistic is not None:
                    statistic.fill_(-math.inf)
        elif out.numel():
            call = self.builder.begin(operands, {"out": out}, sequences, launches)
            if (kind := self.split_kind(operands)) is not None:
                self._decode(call, kind, outputs)
                return Results(*outputs)
            schedule = self.builder.schedule(self.forward_kind)
            visits = self.builder.visits(call, schedule, "queries")
            config = self.builder.config(call, schedule, visits, is_bounded=self.builder.is_by_bounds, line=call.line)
            stream = functools.partial(stream_operand, config, schedule.tile_kv, call.columns)
            launches.add(
                attention_forward, (rows[0] * rows[1] * visits.tasks,),
                query, stream(operands.key), stream(operands.value), out, lse, row_max,
                self.builder.args(call, rows[1], visits), config, call.line or call.functions.score, call.functions.by_query,
                num_warps=schedule.warps,
            )  # fmt: skip
            if self.builder.excludes:
                launch_mend_rows(
                    self.builder, call, Results(*outputs), query_tasks(self.builder, call, schedule.tile_q, visits), dependent=False
                )
        return Results(*outputs)

    def split_kind(self, operands: Operands) -> str | None:
        """The split-KV kernel of a call, "decode" or "split"; None if its keys are not split."""
        if not self.takes_splits:
            return None
        (batch, heads, length, _), (_, kv_heads, keys, _) = operands.query.shape, operands.key.shape
        return split_kind(batch, (heads, kv_heads), (length, keys), self.builder.plan.target.arch)

    def _decode(self, call: Pass, kind: str, outputs: tuple[Tensor, Tensor, Tensor | None]) -> None:
        query, key = call.operands.query, call.operands.key
        schedule = self.rows_schedule(kind, query, key)
        visits = self.group_visits(call, schedule)
        config = self.builder.config(call, schedule, visits, excludes=self.builder.excludes and kind == "decode")
        stream = functools.partial(stream_operand, config, schedule.tile_kv, call.columns)
        tiles = query.shape[0] * key.shape[1] * row_tiles(schedule, query, key)
        splits = self.count_splits(kind, schedule, tiles, triton.cdiv(key.shape[2], schedule.tile_kv))
        self.split(call, kind, schedule, visits, config, splits, (stream(key), stream(call.operands.value)), outputs, None)

    def count_splits(self, kind: str, schedule: Schedule, groups: int, tiles: int) -> int:
        """`splits_for` of a split-KV kernel."""
        taken = shared_bytes(kind, schedule, self.builder.dims, self.builder.problem.dtype.itemsize, **self.builder.read)
        # large tiles take up to all registers that a thread may have
        together = 8 // schedule.warps if kind == "split" else 16
        return splits_for(groups, tiles, self.builder.plan.target.arch, taken, together)

    def rows_schedule(self, kind: str, query: Tensor, key: Tensor) -> Schedule:
        """Schedule of a split-KV kernel. A tile holds rows of a group of heads; a decode's holds all of them."""
        schedule = self.builder.schedule(kind)
        return schedule if kind == "split" else replace(schedule, tile_q=padded_dim(query.shape[1] // key.shape[1] * query.shape[2]))

    def group_visits(self, call: Pass, schedule: Schedule) -> TileTable:
        """One tile table for all queries of a group of heads."""
        return self.builder.visits(call, replace(schedule, tile_q=padded_dim(call.operands.query.shape[2])), "queries")

    def split(
        self, call: Pass, kind: str, schedule: Schedule, visits: TileTable, config: Config, splits: int, streams: tuple[Any, Any],
        outputs: tuple[Tensor, Tensor, Tensor | None], pages: Pages | None,
    ) -> None:  # fmt: skip
        """Launch split-KV attention and the kernel that combines the splits. `streams`: sources of keys and values."""
        query, key, rows, width = call.operands.query, call.operands.key, schedule.tile_q, self.builder.dims[1]
        tiles = row_tiles(schedule, query, key)
        programs = query.shape[0] * key.shape[1] * tiles * splits
        partial = call.launches.empty((programs, rows, width), (rows * width, width, 1), torch.float32, query)
        most, total = (call.launches.empty((programs, rows), (rows, 1), torch.float32, query) for _ in range(2))
        partials, size = Partials(partial, most, total), self.builder.size(call, query.shape[1], tiles)
        # where the registers of a tile of many rows leave no room for it, a kernel of its own mends results
        for kernel in (attention_decode, mend_splits)[: 2 if self.builder.excludes and kind == "split" else 1]:
            call.launches.add(
                kernel, (programs,),
                query, *streams, partials, SplitArgs(call.strides, size, visits.table, call.numbers, call.environment, encode(splits)),
                config, call.functions.score, call.functions.mask, kind == "split", pages, num_warps=schedule.warps,
            )  # fmt: skip
        # few rows of many splits, or many rows of few
        chunk, columns, warps = (64, min(32, width), 4) if kind == "decode" else (8, min(128, width), 2)
        call.launches.add(
            combine_splits, (query.shape[0] * query.shape[1] * query.shape[2], width // columns),
            partials, *outputs, SplitArgs(call.strides, size, None, call.numbers, None, encode(splits)), config, chunk, columns,
            num_warps=warps,
        )  # fmt: skip


class _Reported(NamedTuple):
    """Flags of a backward kernel, and its tasks, which mending needs."""

    flags: NanFlags | None
    visits: TileTable
    rows: int  # of a task


class PortableBackward:
    """Backward of a plan."""

    def __init__(self, builder: PassBuilder) -> None:
        variant, formula = builder.variant, builder.problem.formula
        self.builder = builder
        # a derivative that varies over a tile takes registers; a row with few tiles has too little work for large ones
        is_sloped = score_derivative(variant.score).op != "const"
        is_short = _is_listed(variant, formula.block_size) or begins_late(variant.mask)
        self.query_kind = "query_gradient_sparse" if is_sloped or is_short else "query_gradient"
        self.key_kind = "key_gradient_scored" if is_sloped or builder.reads_tiles else "key_gradient"
        self.key_kind = "key_gradient_dropped" if formula.dropout else self.key_kind

    def build(
        self, operands: Operands, bwd_args: Given, sequences: Sequences, launches: LaunchBuilder, flow: WeightCotangents | None
    ) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
        """See `foci.backends.gpu.kernel.BackwardPass`."""
        grads = gradient_tensors(launches, operands, self.builder.wanted)
        call = self.builder.begin(operands, {"out": bwd_args.out, "dout": bwd_args.dout, **grads}, sequences, launches)
        call = call if flow is None else replace(call, numbers=call.numbers._replace(**flow))
        learned = find_query_tile_bias(self.builder, operands) if self.builder.needs_capture_grads else None
        target = None if learned is None else like_tensor(launches, operands.captures[learned.slot])
        rows = row_tensors(launches, operands, bwd_args.lse, 2)
        dq, dk, dv = (grads.get(name) for name in ("dq", "dk", "dv"))
        known: dict[int, Tensor] = {}
        of_queries = None
        if dq is not None and learned is not None and target is not None:
            flags = bias_gradient(self.builder, call, bwd_args, (rows[0], rows[1]), dq, learned, target)
            schedule = self.builder.schedule(self.query_kind)
            of_queries = _Reported(flags, self.builder.visits(call, schedule, "queries"), schedule.tile_q)
            known[learned.slot] = target
        elif dq is not None:
            of_queries = self._query_gradient(call, bwd_args, (rows[0], rows[1]), dq)
        else:
            self._prepare(call, bwd_args, (rows[0], rows[1]))
        of_keys = [self._key_gradient(call, kind, (bwd_args.dout, rows[0], rows[1]), pair) for kind, pair in self._key_passes(dk, dv)]
        if self.builder.excludes and grads:
            self._mend(call, bwd_args, (rows[0], rows[1]), (dq, dk, dv), of_queries, of_keys)
        if not self.builder.needs_capture_grads:
            return list(grads.values()), ()
        return list(grads.values()), capture_gradients(self.builder, call, (bwd_args.dout, rows[0], rows[1]), bwd_args.dlse, known)

    def _prepare(self, call: Pass, bwd_args: Given, rows: tuple[Tensor, Tensor]) -> None:
        """Launch the row statistics. The dq kernel computes them itself, so this is for a backward without dq."""
        tile = 16 if self.builder.plan.target.arch == 0 else 128 if self.builder.dims[1] <= 128 else 32
        config = self.builder.config(call, Schedule(tile, tile, 4, 1), None)
        batch, heads, _ = bwd_args.lse.shape
        call.launches.add(
            prepare_rows, (batch * heads * ((call.rows + tile - 1) // tile),),
            bwd_args.out, bwd_args.dout, bwd_args.lse, bwd_args.dlse, *rows,
            call.strides, self.builder.size(call, heads, 1), config, num_warps=4,
        )  # fmt: skip

    def _mend(
        self, call: Pass, bwd_args: Given, rows: tuple[Tensor, Tensor], grads: tuple[Tensor | None, Tensor | None, Tensor | None],
        of_queries: _Reported | None, of_keys: list[_Reported],
    ) -> None:  # fmt: skip
        """Launch the kernel that computes gradients that hold a NaN once more."""
        tasks = []
        if of_queries is not None:
            tasks.append(query_tasks(self.builder, call, of_queries.rows, of_queries.visits))
        if of_keys:
            tasks.append(key_tasks(self.builder, call, of_keys[0].rows, of_keys[0].visits))
        found = tuple(each.flags for each in (of_queries, *of_keys) if each is not None and each.flags is not None)
        # where only one kind of gradient is needed, nothing reads the other's tasks
        launch_mend_gradients(self.builder, call, bwd_args, rows, grads, found, tasks[0], tasks[-1], dependent=False)

    def _query_gradient(self, call: Pass, bwd_args: Given, rows: tuple[Tensor, Tensor], dq: Tensor) -> _Reported:
        schedule, operands = self.builder.schedule(self.query_kind), call.operands
        visits = self.builder.visits(call, schedule, "queries")
        config = self.builder.config(call, schedule, visits, is_bounded=self.builder.is_by_bounds, line=call.line)
        stream = functools.partial(stream_operand, config, schedule.tile_kv, call.columns)
        heads = operands.query.shape[1]
        programs = operands.query.shape[0] * heads * visits.tasks
        flags = allocate_flags(self.builder, call, programs)
        call.launches.add(
            attention_query_gradient, (programs,),
            operands.query, stream(operands.key), stream(operands.value),
            RowInputs(bwd_args.out, bwd_args.dout, bwd_args.lse, bwd_args.dlse, *rows), dq,
            None if flags is None else flags.flags, self.builder.args(call, heads, visits), config,
            call.line or call.functions.both, call.functions.by_query, num_warps=schedule.warps,
        )  # fmt: skip
        return _Reported(flags, visits, schedule.tile_q)

    def _key_passes(self, dk: Tensor | None, dv: Tensor | None) -> tuple[tuple[str, tuple[Tensor | None, Tensor | None]], ...]:
        """Kernels for dk and dv: one, or two if their accumulators do not fit into registers together."""
        together = self.builder.plan.target.arch == 0 or max(self.builder.dims) < 256
        if dk is not None and dv is not None and together:
            return ((self.key_kind, (dk, dv)),)
        names = (self.key_kind, self.key_kind) if together else ("key_gradient_alone", "value_gradient_alone")
        return tuple(
            (name, (dk, None) if i == 0 else (None, dv)) for i, (name, t) in enumerate(zip(names, (dk, dv), strict=True)) if t is not None
        )

    def _key_gradient(
        self, call: Pass, kind: str, rows: tuple[Tensor, Tensor, Tensor], grads: tuple[Tensor | None, Tensor | None]
    ) -> _Reported:
        schedule, operands = self.builder.schedule(kind), call.operands
        visits = self.builder.visits(call, schedule, "keys")
        config = self.builder.config(call, schedule, visits, line=call.line)
        stream = functools.partial(stream_operand, config, schedule.tile_q, call.rows)
        heads = operands.key.shape[1]
        programs = operands.key.shape[0] * heads * visits.tasks
        flags = allocate_flags(self.builder, call, programs)
        call.launches.add(
            attention_key_gradient, (programs,),
            stream(operands.query), operands.key, operands.value, stream(rows[0]),
            RowStats(*rows[1:]), KeyGradients(*grads), None if flags is None else flags.flags,
            self.builder.args(call, heads, visits), config,
            call.line or call.functions.both, call.functions.by_key, num_warps=schedule.warps,
        )  # fmt: skip
        return _Reported(flags, visits, schedule.tile_kv)


def _is_listed(variant: Variant, block_size: tuple[int, int] | None) -> bool:
    """Whether tile tables are lists: a caller's blocks, or a mask that may attend to more than one run of keys."""
    return block_size is not None or not is_convex(variant.mask, "kv_idx")


def row_tiles(schedule: Schedule, query: Tensor, key: Tensor) -> int:
    """Number of tiles of the rows of a group of heads."""
    return int(triton.cdiv(query.shape[1] // key.shape[1] * query.shape[2], schedule.tile_q))
