"""Host side of the forward: which kernels a call launches, with which arguments."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias

import torch
import triton
from torch import Tensor

from foci.backends.causal import is_causal
from foci.backends.gpu.allocate import result_tensors
from foci.backends.gpu.architectures import count_sms
from foci.backends.gpu.compiling import after_launches
from foci.backends.gpu.functions import capture_layouts
from foci.backends.gpu.kernel_args import encode
from foci.backends.gpu.launch_builder import LaunchBuilder
from foci.backends.gpu.mend_launches import launch_mend_rows, query_tasks
from foci.backends.gpu.passes import Pass, PassBuilder, without_mask
from foci.backends.gpu.portable_passes import PortableForward
from foci.backends.gpu.schedules import Schedule as Tiles
from foci.backends.gpu.symbolic_tokens import at_most
from foci.backends.gpu.tile_tables import Sequences, TileTable
from foci.backends.hopper.config import Config, MaskedTable, make_config
from foci.backends.hopper.descriptors import describe
from foci.backends.hopper.forward import attention_forward
from foci.backends.hopper.functions import build_functions
from foci.backends.hopper.kernel_args import ForwardFunctions, ForwardParams
from foci.backends.hopper.mask_bits import PackedMask, cover_keys, mark_keys, order_tasks, pack_masks
from foci.backends.hopper.schedules import Schedule, dense_sizes, forward_schedule, padded_width, schedules_of_lengths
from foci.backends.hopper.zero_fill import zero_counters, zero_fill_gaps
from foci.backends.mask_intervals import find_bounds
from foci.backends.problem_class import MAX_MASK_BYTES
from foci.ir.expr import const
from foci.problem import Layout, Operands, Results

__all__ = ["HopperForward"]


class MaskBits(NamedTuple):
    """Precomputed from the tile lists of a mask, see `foci.backends.hopper.mask_bits`."""

    bits: Tensor | None = None  # mask bits of partial tiles
    limits: Tensor | None = None  # which of them each 64 rows need
    starts: Tensor | None = None  # lists of moved tiles, by first key (`cover_keys`), if tiles are moved
    counts: Tensor | None = None  # counts of these lists
    order: Tensor | None = None  # tasks with the most tiles last, if they are sorted


_TableOptions: TypeAlias = tuple[bool, bool]
"""(whether tiles are moved to the attended keys, whether tasks are sorted)."""

MIN_LIST_ENTRIES: Final = 1024
"""Entries of a list for which `cover_keys` is compiled at least, so that one kernel does for up to 64 thousand keys."""
SHORT_FORWARD_TILES: Final = 1 << 13
"""Up to this many tiles in all tasks, visited or not, a forward is too short for moving tiles to pay."""


class HopperForward:
    """Forward of a plan. `portable`: the forward that takes calls without tiles."""

    def __init__(self, builder: PassBuilder, portable: PortableForward) -> None:
        bounds = find_bounds(builder.variant.mask)
        self.builder = builder
        self.portable = portable
        self.problem = builder.problem
        self.variant = builder.variant
        self.is_bounded = bounds is not None and self.problem.formula.block_size is None
        self.has_low = bounds is not None and bounds.is_low
        self.is_even = self.is_bounded and self.variant.mask == const(True)
        # last keys of 64 rows from a multiple of 64 on are all of one tile
        self.has_one_partial = self.is_bounded and (self.is_even or is_causal(self.variant))
        self.fixed_schedule: Schedule | None = None  # None: the one that the lengths decide on
        self.fixed_is_long: bool | None = None  # whether tiles of lists are moved; None: the lengths decide
        self._unmasked = PassBuilder(without_mask(builder.plan)) if self.is_bounded else builder

    def build(self, operands: Operands, sequences: Sequences, launches: LaunchBuilder) -> Results:
        """See `foci.backends.gpu.kernel.ForwardPass`."""
        query, is_jagged = operands.query, operands.cu_q is not None
        if 0 in (*query.shape, *operands.key.shape, *operands.value.shape):
            return self.portable.build(operands, sequences, launches)
        out, lse, row_max = result_tensors(launches, operands, self.problem)
        call = self.builder.begin(operands, {"out": out}, sequences, launches)
        is_plain = call.is_plain and operands.scale > 0
        schedule = self.fixed_schedule or forward_schedule(self.problem, dense_sizes(operands))
        tiles = Tiles(schedule.tile_q, schedule.tile_kv, 4, 1, by_work=self.is_even and schedule.short_tasks_last)
        visits = self._find_visits(call, tiles)
        size = self.builder.size(call, query.shape[1], visits.tasks)
        layouts = capture_layouts(operands.captures)
        functions = build_functions(self.variant, layouts, half=True, resident="q_idx", divided=True)
        if not functions.takes(operands.scale, operands.floats):
            functions = build_functions(self.variant, layouts, half=True, resident="q_idx")
        is_affine = functions.line is not None
        mask_bits, count = self._find_mask_bits(call, schedule, tiles, visits), query.shape[0] * query.shape[1] * visits.tasks
        table = visits.table
        if mask_bits.starts is not None:
            table = table._replace(counts=mask_bits.counts, lists=mask_bits.starts)
        sources = (
            describe(t, n, padded_width(t.shape[-1]), ragged=is_jagged)
            for t, n in ((query, 64), (operands.key, schedule.tile_kv), (operands.value, schedule.tile_kv), (out, 64))
        )
        programs, tickets, halved = self._programs(count, schedule, operands, visits, launches)
        masked_table = MaskedTable(
            *table, mask_bits.bits, mask_bits.limits, tickets, encode(halved), mask_bits.order, self._encode_short_last(schedule, operands)
        )
        launches.add(
            attention_forward, (programs,),
            *sources, lse, row_max,
            ForwardParams(size, visits.spans, masked_table, call.numbers._replace(scale=operands.scale), call.environment),
            self._config(schedule, visits.mode, is_jagged=is_jagged, is_plain=is_plain, mask_bits=mask_bits, is_affine=is_affine),
            ForwardFunctions(functions.pre, functions.line or functions.score, functions.mask, functions.bounds),
            num_warps=4, launch_pdl=schedule.persistent, maxnreg=schedule.max_registers,
        )  # fmt: skip
        if is_jagged:
            places = (call.strides.out, size, visits.spans, self.builder.config(call, tiles, visits))
            launches.add(zero_fill_gaps, (query.shape[1],), out, lse, row_max, *places, between=True, launch_pdl=True)
        if self.builder.excludes:
            launch_mend_rows(
                self.builder, call, Results(out, lse, row_max), query_tasks(self.builder, call, schedule.tile_q, visits), dependent=True
            )
        return Results(out, lse, row_max)

    def of_other_lengths(self) -> Iterator[HopperForward]:
        """See `foci.backends.gpu.kernel.ForwardPass`. None for packed sequences, whose tables depend on lengths."""
        if self.problem.formula.layout is Layout.DENSE:
            are_long = (None,) if self.is_bounded else (False, True)
            for schedule, is_long in itertools.product(schedules_of_lengths(self.problem), are_long):
                other = copy.copy(self)
                other.fixed_schedule, other.fixed_is_long = schedule, is_long
                yield other

    def _programs(
        self, tasks: int, schedule: Schedule, operands: Operands, visits: TileTable, launches: LaunchBuilder
    ) -> tuple[int, Tensor | None, int]:
        """(number of programs, ticket counter of persistent ones or None, how many of the last tasks are split between two programs).

        Packed sequences keep the counter in their task table. Equal tasks are split if they would keep less than half of the programs busy
        in the last wave.
        """
        if not schedule.persistent:
            return tasks, None, 0
        programs = at_most(tasks, schedule.programs_per_sm * count_sms(operands.query.device))
        if operands.cu_q is not None:
            return programs, None if schedule.static else visits.spans.tasks, 0
        tickets = None
        if not schedule.static and programs < tasks:
            tickets = launches.empty((1,), (1,), torch.int32, operands.query)
            launches.add(zero_counters, (1,), tickets, encode(1), num_warps=4, launch_pdl=True)
        elif not schedule.static:  # the kernel does not touch it, so no run allocates it
            tickets = torch.empty(1, dtype=torch.int32, device=operands.query.device)
            launches.keep((tickets,))
        in_last_round = tasks % programs if self.is_even else 0
        return programs, tickets, in_last_round if 2 * in_last_round <= programs else 0

    def _find_visits(self, call: Pass, tiles: Tiles) -> TileTable:
        """Which tiles of keys each task visits. With bounds the kernel computes them, and the table is that of an unmasked problem."""
        if not self.is_bounded:
            return self.builder.visits(call, tiles, "queries")
        return replace(self._unmasked.visits(call, tiles, "queries"), mode="bounds")

    def _encode_short_last(self, schedule: Schedule, operands: Operands) -> int | None:
        """`MaskedTable.short_last`: encoded 1 if heads have a shorter last task that comes after all others, else 0; None if not
        applicable."""
        if not (self.is_even and schedule.short_tasks_last) or operands.cu_q is not None:
            return None
        return encode(int(0 < operands.query.shape[2] % schedule.tile_q < operands.query.shape[2]))

    def _find_mask_bits(self, call: Pass, schedule: Schedule, tiles: Tiles, visits: TileTable) -> MaskBits:
        """Mask bits of a table, computed once and cached. None where other sequences will reuse the launch, or the bits would be too
        large."""
        lists = visits.table.lists
        if lists is None or visits.source is not None or 16 * lists.numel() * tiles.tile_q > MAX_MASK_BYTES:
            return MaskBits()
        query, formula = call.operands.query, self.problem.formula
        is_long = self.fixed_is_long
        if is_long is None:
            is_long = query.shape[0] * query.shape[1] * visits.tasks * lists.shape[1] > SHORT_FORWARD_TILES
        # with blocks and dropout tiles are where the caller's classes, and random numbers, are
        options = (
            is_long and formula.block_size is None and not formula.dropout,
            is_long and schedule.longest_first and call.operands.cu_q is None,
        )
        mask_bits = visits.derived.get(("mask bits", options))  # calls with and without dropout share a table but not these options
        if mask_bits is None:
            mask_bits = self._build_mask_bits(call, options, tiles, visits, lists)
            after_launches(functools.partial(visits.derived.__setitem__, ("mask bits", options), mask_bits))
        call.launches.keep(mask_bits)
        return mask_bits

    def _build_mask_bits(self, call: Pass, options: _TableOptions, tiles: Tiles, visits: TileTable, lists: Tensor) -> MaskBits:
        """Compute the mask bits of partial tiles; in a long forward also move tiles and sort tasks."""
        query, table, (moves, sorts) = call.operands.query, visits.table, options
        heads = 1 if table.h_stride == encode(0) else query.shape[1]
        size, mask = self.builder.size(call, heads, visits.tasks), call.functions.mask
        places = (visits.spans, call.environment, encode(heads), self.builder.config(call, tiles, visits))
        rows, width = lists.shape
        tables = call.launches.another((), None)  # separate: the pass reads the result
        bits = MaskBits(
            torch.empty((lists.numel(), tiles.tile_q, 4), dtype=torch.int32, device=lists.device),
            torch.zeros((rows, tiles.tile_q // 64, 2), dtype=torch.int32, device=lists.device),
        )
        assert table.counts is not None
        if moves:
            bits = bits._replace(starts=torch.zeros_like(lists), counts=torch.zeros_like(table.counts))
            keys = torch.zeros((rows, width, tiles.tile_kv), dtype=torch.int8, device=lists.device)
            tables.add(mark_keys, (rows, 8), keys, table, size, *places, mask, 8, num_warps=4)
            cover_args, entries = (bits.starts, bits.counts, keys), max(MIN_LIST_ENTRIES, triton.next_power_of_2(width))
            tables.add(cover_keys, (rows,), *cover_args, table, size, visits.spans, places[-1], entries, 1024, num_warps=4)
            table = table._replace(counts=bits.counts, lists=bits.starts)
        if sorts:
            bits = bits._replace(order=torch.empty(rows, dtype=torch.int32, device=lists.device))
            tables.add(order_tasks, (rows // visits.tasks, triton.cdiv(visits.tasks, 64)), bits.order, table.counts, size, 64, num_warps=4)
        tables.add(
            pack_masks, (rows * (tiles.tile_q // 64), 8),
            PackedMask(bits.bits, bits.limits), table, size, *places, mask, 8, bits.starts is not None, num_warps=4,
        )  # fmt: skip
        return bits

    def _config(self, schedule: Schedule, mode: str, *, is_jagged: bool, is_plain: bool, mask_bits: MaskBits, is_affine: bool) -> Config:
        """Compile-time configuration of a launch."""
        p = self.problem
        return make_config(
            CONSUMERS=schedule.consumers, OVERLAPPED=schedule.overlapped, TILE_Q=schedule.tile_q, TILE_KV=schedule.tile_kv,
            STAGES=schedule.stages, D=p.head_dim, D_PAD=padded_width(p.head_dim), DV=p.value_dim, DV_PAD=padded_width(p.value_dim),
            MODE=mode, JAGGED=is_jagged, PLAIN=is_plain, DROPOUT=p.formula.dropout, BLOCKS=p.formula.block_size is not None,
            LOW=mode == "bounds" and self.has_low, MASK_BITS=mask_bits.bits is not None, PERSISTENT=schedule.persistent,
            AFFINE=is_affine, SINGLE_LOOP=schedule.single_loop, ONE_PARTIAL=self.has_one_partial, NAMED_BARRIERS=schedule.named_barriers,
            EXACT_MAX=p.formula.outputs.row_max, Q_IN_REGISTERS=schedule.q_in_registers,
            EARLY_ROUNDING=schedule.early_rounding and not p.formula.dropout, KEY_STARTS=mask_bits.starts is not None,
            HEADS_TOGETHER=schedule.heads_together, REGISTERS=schedule.registers, SERPENTINE=schedule.serpentine,
        )  # fmt: skip
