"""Host side of the backward: which kernels a call launches, with which arguments.

Preparation, caches and gradients of captured tensors are those of `foci.backends.gpu`. One of four ways computes dq, dk and dv:

    fused       `bwd_dq_dk_dv`: one kernel, dq in float32 accumulators
    by chunks   `bwd_dk_dv` stores dS of some heads at a time, `bwd_dq` reads it
    short q     `bwd_short_q`: one program holds all queries of a head
    separate    `bwd_dq`, and `bwd_dk_dv`
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from foci.backends.causal import is_causal
from foci.backends.contract import Given
from foci.backends.gpu.allocate import gradient_tensors, row_tensors
from foci.backends.gpu.architectures import count_sms
from foci.backends.gpu.captured_grad import capture_gradients, find_query_tile_bias
from foci.backends.gpu.compiling import after_launches
from foci.backends.gpu.functions import capture_layouts, is_half
from foci.backends.gpu.kernel_args import encode
from foci.backends.gpu.launch_builder import LaunchBuilder
from foci.backends.gpu.mend import NanFlags
from foci.backends.gpu.mend_launches import key_tasks, launch_mend_gradients, query_tasks
from foci.backends.gpu.passes import Pass, PassBuilder, without_mask
from foci.backends.gpu.portable_passes import PortableBackward
from foci.backends.gpu.schedules import Schedule as Tiles
from foci.backends.gpu.symbolic_tokens import at_most
from foci.backends.gpu.tile_tables import Sequences, TileTable
from foci.backends.hopper.backward_schedules import (
    DK_DV_TILES,
    DK_DV_WIDE_TILES,
    DQ_TILES,
    DROPOUT_QUERIES,
    POSTPROCESS_COLUMNS,
    PREPROCESS_NUMBERS,
    REDUCE_NUMBERS,
    REDUCE_REGISTERS,
    ROW_KERNEL_REGISTERS,
    UNSPLIT_WIDTHS,
    FusedSchedule,
    TileShape,
    ds_chunk_heads,
    ds_scratch_schedule,
    ds_scratch_shape,
    fused_schedule,
    is_prefix,
    padded_widths,
    place_schedule,
    short_q_schedule,
    split_short_q,
)
from foci.backends.hopper.bwd_dk_dv import attention_key_gradient
from foci.backends.hopper.bwd_dq import attention_kept_gradient, attention_query_gradient
from foci.backends.hopper.bwd_dq_dk_dv import FusedParams, attention_gradients
from foci.backends.hopper.bwd_preprocess import Counters, Heads, RowInputs, begin_gradients, finish_query_gradient, reduce_dq_partials
from foci.backends.hopper.bwd_short_q import SplitKVPartials, attention_few_gradients
from foci.backends.hopper.config import Config, MaskedTable, make_config
from foci.backends.hopper.descriptors import describe, takes_descriptor
from foci.backends.hopper.dq_order import mark_tiles, rank_packed, rank_tiles
from foci.backends.hopper.dq_semaphore import SHARE_LINE, Order, slot_size
from foci.backends.hopper.ds_scratch import HeadChunk
from foci.backends.hopper.functions import KernelFunctions, build_functions
from foci.backends.hopper.gluon_compat import TensorDescriptor, gl
from foci.backends.hopper.kernel_args import BackwardFunctions, BackwardParams
from foci.backends.hopper.layouts import smem_layout
from foci.backends.hopper.mask_bits import pack_queries
from foci.backends.hopper.zero_fill import zero_counters
from foci.backends.mask_intervals import find_bounds
from foci.backends.problem_class import MAX_MASK_BYTES
from foci.compat.gluon import HAS_ADD
from foci.problem import Operands

__all__ = ["HopperBackward"]


_ROW_LAYOUT: Final = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
_SHARE_LAYOUT: Final = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


Grads: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]
"""(dq, dk, dv), None where not needed."""


class _DqSums(NamedTuple):
    """Float32 accumulators of dq for the fused kernel."""

    schedule: FusedSchedule
    slots: int  # query tiles of a head
    total: int  # slots of all heads and accumulators
    turns: Tensor  # ticket and semaphores, see `dq_semaphore.Order`
    added: Tensor  # the accumulators


class _DsScratch(NamedTuple):
    """Memory for dS and how it is used."""

    tiles: TileShape  # of `bwd_dq`
    ds: Tensor  # the memory
    heads: int  # key heads at a time


class _Streams(NamedTuple):
    """Operands of the backward kernels, and the descriptors made of them."""

    query: Tensor
    key: Tensor
    value: Tensor
    dout: Tensor
    ragged: bool
    lines: tuple[Tensor, Tensor, int]
    """(lse in base 2, delta), laid out for TMA by `begin_gradients`, and elements of a head in them."""

    widths: dict[int, int]
    """Padded head dims."""

    found_nan: Tensor | None
    """int32 [1], set by kernels whose results hold a NaN; None if nothing is excluded."""

    def describe(self, tensor: Tensor, rows: int) -> TensorDescriptor:
        return describe(tensor, rows, self.widths[tensor.shape[-1]], ragged=self.ragged)

    def describe_row_values(self, rows: int) -> tuple[TensorDescriptor, TensorDescriptor, int]:
        pitch = self.lines[2]
        count = self.query.shape[0] * self.query.shape[1] * pitch
        return _describe_row(self.lines[0], count, rows), _describe_row(self.lines[1], count, rows), encode(pitch)


class HopperBackward:
    """Backward of a plan. `portable`: the backward that takes what these kernels do not."""

    def __init__(self, builder: PassBuilder, portable: PortableBackward) -> None:
        self.builder = builder
        self.portable = portable
        self.problem = builder.problem
        self.variant = builder.variant
        mask, formula = self.variant.mask, self.problem.formula
        self.is_prefix = is_prefix(self.problem)
        self.is_bounded_by_key = formula.block_size is None and find_bounds(mask, "q_idx") is not None
        self.short_q = short_q_schedule(self.problem)
        self.fused = fused_schedule(self.problem) if HAS_ADD else None
        self.widths = padded_widths(self.problem)
        self.ds_tiles = ds_scratch_schedule(self.problem)
        self.splits = max(self.widths) > 128 and self.widths not in UNSPLIT_WIDTHS
        self._unmasked = PassBuilder(without_mask(builder.plan))

    def build(
        self, operands: Operands, bwd_args: Given, sequences: Sequences, launches: LaunchBuilder, flow: Any = None
    ) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
        """See `foci.backends.gpu.kernel.BackwardPass`."""
        p, query, key, value = self.problem, operands.query, operands.key, operands.value
        if not (query.numel() and key.numel() and value.numel()) or (
            self.builder.needs_capture_grads and find_query_tile_bias(self.builder, operands)
        ):
            return self.portable.build(operands, bwd_args, sequences, launches, flow)
        if p.formula.dropout and (self.fused is None or not all(self.builder.wanted)):
            # only the fused kernel supports dropout
            return self.portable.build(operands, bwd_args, sequences, launches, flow)
        tensors = (query, key, value, bwd_args.dout)
        if not all(map(takes_descriptor, tensors)):
            launches.forget()
        query, key, value, dout = (t if takes_descriptor(t) else t.contiguous() for t in tensors)
        bwd_args = bwd_args._replace(dout=dout)
        grads = gradient_tensors(launches, replace(operands, query=query, key=key, value=value), self.builder.wanted)
        call = self.builder.begin(operands, {"out": bwd_args.out, "dout": bwd_args.dout, **grads}, sequences, launches)
        lse2, delta = row_tensors(launches, operands, bwd_args.lse, 2)
        dq, dk, dv = (grads.get(name) for name in ("dq", "dk", "dv"))
        wants_all = dq is not None and dk is not None and dv is not None
        scratch = self._allocate_ds_scratch(call, query, self.ds_tiles) if wants_all and self.ds_tiles is not None else None
        short_q = self.short_q if wants_all else None
        sums = (
            self._allocate_dq_sums(call, query, self.fused)
            if wants_all and scratch is None and short_q is None and self.fused is not None
            else None
        )
        found_nan = launches.empty((1,), (1,), torch.int32, query) if self.builder.excludes else None
        lines = self._launch_preprocess(call, bwd_args, (lse2, delta), (dq, dk, dv), sums, found_nan)
        widths = dict(zip((p.head_dim, p.value_dim), self.widths, strict=True))
        streams = _Streams(query, key, value, dout, operands.cu_q is not None, lines, widths, found_nan)
        if sums is not None:
            self._launch_fused(call, streams, (dq, dk, dv), sums)
        elif scratch is not None and dq is not None:
            self._launch_by_chunks(call, streams, dq, (dk, dv), scratch)
        elif short_q is not None:
            self._launch_short_q(call, streams, (lse2, delta), (grads["dq"], grads["dk"], grads["dv"]), short_q)
        else:
            self._launch_dq_and_dk_dv(call, streams, (lse2, delta), (dq, dk, dv))
        if found_nan is not None:
            self._launch_mend(call, bwd_args, (lse2, delta), (dq, dk, dv), found_nan)
        if not any(p.capture_grads):
            return list(grads.values()), ()
        return list(grads.values()), capture_gradients(self.builder, call, (bwd_args.dout, lse2, delta), bwd_args.dlse)

    def _launch_preprocess(
        self, call: Pass, bwd_args: Given, row_values: tuple[Tensor, Tensor], grads: Grads, sums: _DqSums | None,
        found_nan: Tensor | None,
    ) -> tuple[Tensor, Tensor, int]:  # fmt: skip
        """Launch row statistics and zeroing. Returns `_Streams.lines`."""
        operands, (batch, heads, _), length = call.operands, row_values[0].shape, call.rows
        visits = self._unmasked.visits(call, Tiles(128, 128, 4, 1), "queries")
        padded_rows, pitch = row_values, length
        keep = call.numbers.keep_factor if self.problem.formula.dropout else None
        if operands.cu_q is not None or length % 4 or keep is not None:
            pitch = (length // 128 + operands.cu_q.shape[0] if operands.cu_q is not None else visits.tasks) * 128
            padded_rows = tuple(call.launches.empty((batch * heads * pitch,), (1,), torch.float32, row_values[0]) for _ in range(2))  # type: ignore[assignment]
        tile = min(max(PREPROCESS_NUMBERS // self.builder.dims[1], 16), 128)
        turns, count = (None, 0) if sums is None else (sums.turns, sums.total + 1)
        call.launches.add(
            begin_gradients, (batch * heads * visits.tasks, 128 // tile),
            RowInputs(bwd_args.out, bwd_args.dout, bwd_args.lse, bwd_args.dlse), row_values, padded_rows,
            keep, Counters(turns, encode(count), found_nan), grads, call.strides,
            Heads(self.builder.size(call, heads, visits.tasks), encode(operands.key.shape[1]), visits.spans, encode(pitch)),
            self.builder.config(call, Tiles(tile, tile, 4, 1), None), num_warps=4, maxnreg=ROW_KERNEL_REGISTERS,
        )  # fmt: skip
        return padded_rows[0], padded_rows[1], pitch

    def _launch_dq_and_dk_dv(self, call: Pass, streams: _Streams, rows: tuple[Tensor, Tensor], grads: Grads) -> None:
        """Launch one kernel for dq, another for dk and dv."""
        dq, dk, dv = grads
        if dq is not None:
            self._launch_dq(call, streams, rows, dq)
        if dk is not None or dv is not None:
            self._launch_dk_dv(call, streams, (dk, dv), self.builder.visits(call, self._dk_dv_tiles(dk, dv).tiles, "keys"))

    def _launch_dq(self, call: Pass, streams: _Streams, rows: tuple[Tensor, Tensor], dq: Tensor) -> None:
        tiles, operands, desc = DQ_TILES[max(self.widths)], call.operands, streams.describe
        visits, functions = self.builder.visits(call, tiles.tiles, "queries"), self._build_functions(operands, "q_idx")
        batch, heads = streams.query.shape[:2]
        call.launches.add(
            attention_query_gradient, (batch * heads * visits.tasks,),
            desc(streams.query, 64), desc(streams.key, tiles.tile_kv), desc(streams.value, tiles.tile_kv), desc(streams.dout, 64),
            *rows, desc(dq, 64),
            BackwardParams(
                self.builder.size(call, heads, visits.tasks), visits.spans, visits.table, operands.scale, call.environment,
                streams.found_nan,
            ),
            self._build_config(call, tiles, visits.mode), BackwardFunctions(functions.pre, functions.both, functions.mask), num_warps=4,
        )  # fmt: skip

    def _launch_short_q(
        self, call: Pass, streams: _Streams, rows: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor, Tensor], tiles: TileShape
    ) -> None:
        """Launch the short-query kernel: a program per head, or several where few heads have many keys."""
        functions, desc, (batch, heads) = self._build_functions(call.operands, "q_idx"), streams.describe, streams.query.shape[:2]
        config, size, (dq, dk, dv) = self._build_config(call, tiles, "all"), self.builder.size(call, heads, 1), grads
        tiles_each, programs = split_short_q(batch * heads, int(call.columns), tiles.tile_kv)
        partials = None
        if programs > 1:
            shape = (batch * heads * programs, 128, self.widths[0])
            sums = call.launches.empty(shape, (shape[1] * shape[2], shape[2], 1), torch.float32, streams.query)
            partials = SplitKVPartials(sums, encode(programs), encode(tiles_each))
        call.launches.add(
            attention_few_gradients, (batch * heads * programs,),
            *(desc(t, 64) for t in streams[:4]), rows, desc(dq, 64) if partials is None else None, desc(dk, 64), desc(dv, 64), partials,
            size, call.operands.scale, call.environment, streams.found_nan, config,
            BackwardFunctions(functions.pre, functions.both, functions.mask), num_warps=4,
        )  # fmt: skip
        if partials is not None:
            call.launches.add(
                reduce_dq_partials, (batch * heads, -(-call.rows * self.widths[0] // REDUCE_NUMBERS)),
                partials.sums, dq, streams.found_nan, call.strides.dq, size, partials.count, call.operands.scale, config, call.unit,
                REDUCE_NUMBERS, 8,
                num_warps=4, maxnreg=REDUCE_REGISTERS,
            )  # fmt: skip

    def _allocate_ds_scratch(self, call: Pass, query: Tensor, tiles: TileShape) -> _DsScratch | None:
        """Allocate memory for dS; None if too few heads fit to fill the GPU."""
        (batch, heads), kv_heads = query.shape[:2], call.operands.key.shape[1]
        rows, columns = ds_scratch_shape(int(call.rows), int(call.columns), is_causal=is_causal(self.variant))
        size, group = rows * columns, heads // kv_heads
        count = ds_chunk_heads(batch * kv_heads, group, int(call.columns), size)
        if count is None:
            return None
        shape, strides = (1, count * group, rows, columns), (count * group * size, size, columns, 1)
        return _DsScratch(tiles, call.launches.empty(shape, strides, query.dtype, query), count)

    def _launch_by_chunks(
        self, call: Pass, streams: _Streams, dq: Tensor, grads: tuple[Tensor | None, Tensor | None], scratch: _DsScratch
    ) -> None:
        """Launch, for one chunk of heads after another, dk and dv, which store dS, then dq = dS K."""
        (shape, ds_scratch, chunk), desc = scratch, streams.describe
        (batch, heads), kv_heads = streams.query.shape[:2], streams.key.shape[1]
        group, tasks, tiles = heads // kv_heads, -(-call.rows // shape.tile_q), encode(ds_scratch.shape[3] // 128)
        config = self._build_config(call, shape, "causal" if is_causal(self.variant) else "all")
        visits = self.builder.visits(call, self._dk_dv_tiles(*grads).tiles, "keys")
        for first in range(0, batch * kv_heads, chunk):
            count = min(chunk, batch * kv_heads - first)
            self._launch_dk_dv(call, streams, grads, visits, ds_scratch, HeadChunk(encode(first), encode(count), tiles))
            call.launches.add(
                attention_kept_gradient, (count * group * tasks,),
                _describe_ds(ds_scratch, shape.tile_kv, 64), desc(streams.key, shape.tile_kv), desc(dq, 64), streams.found_nan,
                self.builder.size(call, heads, tasks), HeadChunk(encode(first * group), encode(count * group), tiles), call.operands.scale,
                config, num_warps=4,
            )  # fmt: skip

    def _dk_dv_tiles(self, dk: Tensor | None, dv: Tensor | None) -> TileShape:
        """Tiles of `bwd_dk_dv`. With wide heads two warpgroups share the work on 64 keys where both gradients are needed."""
        return DK_DV_WIDE_TILES if self.splits and dk is not None and dv is not None else DK_DV_TILES[max(self.widths)]

    def _launch_dk_dv(
        self, call: Pass, streams: _Streams, grads: tuple[Tensor | None, Tensor | None], visits: TileTable,
        ds_scratch: Tensor | None = None, chunk: HeadChunk | None = None,
    ) -> None:  # fmt: skip
        """Launch dk and dv of all heads, or of a chunk that stores its dS in `ds_scratch`."""
        tiles, operands, desc = self._dk_dv_tiles(*grads), call.operands, streams.describe
        functions = self._build_functions(operands, "kv_idx")
        batch, kv_heads = streams.key.shape[:2]
        programs = batch * kv_heads if chunk is None else chunk.heads >> 2
        call.launches.add(
            attention_key_gradient, (programs * visits.tasks,),
            desc(streams.query, tiles.tile_q), desc(streams.key, 64), desc(streams.value, 64), desc(streams.dout, tiles.tile_q),
            *streams.describe_row_values(tiles.tile_q), *(None if t is None else desc(t, 64) for t in grads),
            None if ds_scratch is None else _describe_ds(ds_scratch, 64, tiles.tile_q), chunk,
            BackwardParams(
                self.builder.size(call, kv_heads, visits.tasks), visits.spans, visits.table, operands.scale, call.environment,
                streams.found_nan,
            ),
            self._build_config(call, tiles, visits.mode), BackwardFunctions(functions.pre, functions.both, functions.mask), num_warps=4,
        )  # fmt: skip

    def _allocate_dq_sums(self, call: Pass, query: Tensor, schedule: FusedSchedule) -> _DqSums:
        """Allocate the accumulators of dq."""
        operands, (batch, heads) = call.operands, query.shape[:2]
        if schedule.goes_round:
            programs = batch * operands.key.shape[1] * -(-call.columns // schedule.shape.tile_kv)
            schedule = place_schedule(schedule, programs, count_sms(query.device))
        by_query = self._unmasked.visits(call, schedule.shape.tiles, "queries")
        # packed: each sequence begins a new tile
        slots = call.rows // schedule.shape.tile_q + operands.cu_q.shape[0] if operands.cu_q is not None else by_query.tasks
        count = slots * (schedule.sums * batch * heads)
        turns = call.launches.empty((count + 1,), (1,), torch.int32, query)
        rows = slot_size.fn(schedule.shape.tile_q, self.widths[0]) // SHARE_LINE.value
        added = call.launches.empty((count * rows, SHARE_LINE.value), (SHARE_LINE.value, 1), torch.float32, query)
        return _DqSums(schedule, slots, count, turns, added)

    def _launch_fused(self, call: Pass, streams: _Streams, grads: Grads, sums: _DqSums) -> None:
        """Launch the fused kernel, then the kernel that converts its accumulators to dq."""
        operands, functions, launches, desc = call.operands, self._build_functions(call.operands, "kv_idx"), call.launches, streams.describe
        (batch, heads), kv_heads = streams.query.shape[:2], streams.key.shape[1]
        schedule, slots, total, turns, added = sums
        shape = schedule.shape
        by_key, by_query = (self._unmasked.visits(call, shape.tiles, side) for side in ("keys", "queries"))
        together = max(1, schedule.heads_together * kv_heads // heads)
        mode = "causal" if is_causal(self.variant) else "all"
        visits = replace(by_key, mode=mode) if self.is_prefix else self.builder.visits(call, shape.tiles, "keys")
        order = Order(
            turns, encode(slots), encode(together), encode(schedule.sums), self._rank_key_tiles(call, visits, shape, by_key.tasks)
        )
        bits = self._build_query_bits(call, visits, shape, by_key)
        has_bits, is_affine = bits is not None, functions.line is not None
        config = self._build_config(call, shape, visits.mode, schedule, has_bits=has_bits, is_affine=is_affine)
        launches.add(
            attention_gradients, (at_most(batch * kv_heads * by_key.tasks, count_sms(streams.query.device)),),
            desc(streams.query, shape.tile_q), desc(streams.key, 64), desc(streams.value, 64), desc(streams.dout, shape.tile_q),
            *streams.describe_row_values(shape.tile_q), _describe_dq_slots(added, total),
            *(None if t is None else desc(t, 64) for t in grads[1:]),
            order,
            FusedParams(
                self.builder.size(call, kv_heads, by_key.tasks), by_key.spans, MaskedTable(*visits.table, bits), operands.scale,
                call.numbers, call.environment, streams.found_nan,
            ),
            config, BackwardFunctions(functions.pre, functions.line or functions.both, functions.mask), functions.bounds,
            num_warps=4, launch_cooperative_grid=schedule.goes_round,
        )  # fmt: skip
        columns = math.gcd(self.widths[0], POSTPROCESS_COLUMNS)
        launches.add(
            finish_query_gradient, (batch * heads * by_query.tasks, shape.tile_q // 64 * self.widths[0] // columns),
            added, order, grads[0], streams.found_nan, call.strides.dq, self.builder.size(call, heads, by_query.tasks), by_query.spans,
            operands.scale, self._build_config(call, shape, "all"), call.unit, columns, num_warps=4, maxnreg=ROW_KERNEL_REGISTERS,
        )  # fmt: skip

    def _launch_mend(self, call: Pass, bwd_args: Given, rows: tuple[Tensor, Tensor], grads: Grads, found_nan: Tensor) -> None:
        """Launch the kernel that computes gradients that hold a NaN once more."""
        tiles = Tiles(128, 128, 4, 1)
        by_query, by_key = (self._unmasked.visits(call, tiles, side) for side in ("queries", "keys"))
        launch_mend_gradients(
            self.builder, call, bwd_args, rows, grads, (NanFlags(found_nan, encode(1)),),
            query_tasks(self.builder, call, 128, by_query), key_tasks(self.builder, call, 128, by_key), dependent=True,
        )  # fmt: skip

    def _rank_key_tiles(self, call: Pass, visits: TileTable, tiles: TileShape, tasks: int) -> Tensor | None:
        """Ranks of key tiles (`dq_order`). Dense: computed once per table and cached. Packed: in each pass, since lengths change."""
        counts, lists = visits.table.counts, visits.table.lists
        if counts is None:
            return None
        if call.operands.cu_q is not None:
            rows, width = tasks * (1 if visits.table.h_stride == encode(0) else call.operands.query.shape[1]), visits.table.width >> 2
            packed_ranks = call.launches.empty((rows, width), (width, 1), torch.int32, counts)
            call.launches.add(rank_packed, (rows,), packed_ranks, visits.table, visits.spans, encode(tasks), 128, 32, num_warps=4)
            return packed_ranks
        ranks = visits.derived.get("ranks")
        if ranks is None:
            rows, width = counts.shape[0], visits.table.width >> 2
            ranks = torch.empty((rows, width), dtype=torch.int32, device=counts.device)
            launches = call.launches.another((), None)  # separate: the pass reads the result
            if lists is not None:
                launches.add(zero_counters, ((rows * width + 1023) // 1024,), ranks, encode(rows * width), num_warps=4)
            config = self._build_config(call, tiles, visits.mode)
            launches.add(mark_tiles, (rows,), ranks, visits.table, config, 128, num_warps=1)
            launches.add(rank_tiles, (rows // tasks, (width + 127) // 128), ranks, visits.table, encode(tasks), 128, num_warps=4)
            after_launches(functools.partial(visits.derived.__setitem__, "ranks", ranks))
        call.launches.keep((ranks,))
        return ranks

    def _build_query_bits(self, call: Pass, visits: TileTable, tiles: TileShape, by_key: TileTable) -> Tensor | None:
        """Mask bits of partial tiles, computed once per table and cached; None if runs of queries or the mask function decide instead."""
        counts, dtype = visits.table.counts, torch.int16 if tiles.tile_q == 64 else torch.int32
        if counts is None or self.is_bounded_by_key:
            return None
        bits, shape = visits.derived.get("query bits"), (counts.shape[0], visits.table.width >> 2, tiles.tile_kv, 4)
        if bits is None and math.prod(shape) * dtype.itemsize > MAX_MASK_BYTES:
            return None
        if bits is None:
            bits = torch.empty(shape, dtype=dtype, device=counts.device)
            heads = 1 if visits.table.h_stride == encode(0) else call.operands.query.shape[1]
            call.launches.another((), None).add(
                pack_queries, (shape[0] * (tiles.tile_kv // 64), 8),
                bits, visits.table, self.builder.size(call, heads, by_key.tasks), by_key.spans, call.environment, encode(heads),
                self._build_config(call, tiles, visits.mode), call.functions.mask, 8, num_warps=4,
            )  # fmt: skip
            after_launches(functools.partial(visits.derived.__setitem__, "query bits", bits))
        call.launches.keep((bits,))
        return bits

    def _build_functions(self, operands: Operands, resident: str) -> KernelFunctions:
        return build_functions(self.variant, capture_layouts(operands.captures), half=is_half(self.problem.dtype), resident=resident)

    def _build_config(
        self,
        call: Pass,
        tiles: TileShape,
        mode: str,
        fused: FusedSchedule | None = None,
        *,
        has_bits: bool = False,
        is_affine: bool = False,
    ) -> Config:
        p = self.problem
        return make_config(
            CONSUMERS=2, OVERLAPPED=False, TILE_Q=tiles.tile_q, TILE_KV=tiles.tile_kv, STAGES=tiles.stages,
            D=p.head_dim, D_PAD=self.widths[0], DV=p.value_dim, DV_PAD=self.widths[1], MODE=mode,
            JAGGED=call.operands.cu_q is not None, PLAIN=call.is_plain, DROPOUT=p.formula.dropout, BLOCKS=p.formula.block_size is not None,
            LOW=None, MASK_BITS=has_bits, PERSISTENT=None, GROUPED=p.q_heads != p.kv_heads, BOUNDED=self.is_bounded_by_key,
            DEFERS_DQ=fused is not None and fused.defers, AFFINE=is_affine,
            DROPOUT_QUERIES=DROPOUT_QUERIES.get(tiles.tile_q) if fused is not None and p.formula.dropout else None,
            ROUND=fused is not None and fused.goes_round,
        )  # fmt: skip


def _describe_ds(ds_scratch: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe tiles of dS."""
    return TensorDescriptor(
        ds_scratch, list(ds_scratch.shape), list(ds_scratch.stride()), [1, 1, rows, columns], smem_layout.fn(rows, columns, 4)
    )


def _describe_dq_slots(added: Tensor, total: int) -> TensorDescriptor:
    """Describe the accumulators of dq. `total` may be symbolic: it follows the number of packed tokens."""
    rows, columns = added.shape
    each = rows // int(total)
    return TensorDescriptor(added, [total * each, columns], [columns, 1], [each, columns], _SHARE_LAYOUT)


def _describe_row(tensor: Tensor, count: int, rows: int) -> TensorDescriptor:
    """Describe runs of `rows` elements of a contiguous float32 tensor of `count` elements."""
    return TensorDescriptor(tensor, [count], [1], [rows], _ROW_LAYOUT)
