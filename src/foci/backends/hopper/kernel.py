"""A plan without gradients made runnable: what a forward launches, and with what."""

from __future__ import annotations

import functools
import weakref
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.backends.contract import Plan
from foci.backends.hopper.config import Config, MaskedTable
from foci.backends.hopper.descriptors import describe
from foci.backends.hopper.forward import attention_forward
from foci.backends.hopper.functions import build_functions
from foci.backends.hopper.mask_bits import cover_keys, mark_keys, order_tasks, pack_masks
from foci.backends.hopper.schedules import Schedule, count_sms, dense_sizes, forward_schedule, padded_width
from foci.backends.hopper.zero_fill import zero_counters, zero_fill_gaps
from foci.backends.mask_intervals import find_bounds
from foci.backends.problem_class import WORDS_AT_MOST
from foci.backends.triton import kernel as host
from foci.backends.triton.allocate import result_tensors
from foci.backends.triton.compiling import after_launches
from foci.backends.triton.functions import capture_layouts
from foci.backends.triton.kernel_args import encode
from foci.backends.triton.recorder import Recorder
from foci.backends.triton.schedules import Schedule as Tiles
from foci.backends.triton.symbolic_tokens import at_most
from foci.backends.triton.tile_tables import Sequences, TileTable
from foci.ir.expr import const
from foci.problem import Operands, Results

__all__ = ["HopperKernel"]


class MaskBits(NamedTuple):
    """What is found once of the lists of a mask. Words and their limits: see `pack_masks`. Where tiles are moved to the keys that are
    attended to, lists and counts of these, and the order of tasks, longest last (`cover_keys`)."""

    words: Tensor | None = None
    limits: Tensor | None = None
    starts: Tensor | None = None
    counts: Tensor | None = None
    order: Tensor | None = None


_Ways: TypeAlias = tuple[bool, bool]
"""Whether tiles are moved to the keys that are attended to, and whether tasks are ordered."""
_partial: Final[weakref.WeakKeyDictionary[TileTable, dict[_Ways, MaskBits]]] = weakref.WeakKeyDictionary()
"""Kept as long as the visits are that they belong to, which calls with dropout and without share."""

FEW: Final = 1 << 13
"""Tiles of all tasks, visited or not, up to which a forward is too short for tiles to be moved."""


class HopperKernel(host.TritonKernel):
    """Forward of a plan. What precedes its launches, and what is kept between calls, is as in the Triton backend."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        formula = self.problem.formula
        bounds = find_bounds(self.variant.mask)
        self.is_bounded = bounds is not None and formula.block_size is None
        self.has_low = bounds is not None and bounds.is_low
        self.is_even = self.is_bounded and self.variant.mask == const(True)
        self._unmasked = host.TritonKernel(_without_mask(plan)) if self.is_bounded else self

    def _forward(self, operands: Operands, sequences: Sequences, recorder: Recorder) -> Results:
        query, is_jagged = operands.query, operands.cu_q is not None
        if 0 in (*query.shape, *operands.key.shape, *operands.value.shape):
            return super()._forward(operands, sequences, recorder)
        out, lse, row_max = result_tensors(recorder, operands, self.problem)
        call = self.begin(operands, {"out": out}, sequences, recorder)
        is_plain = call.is_plain and operands.scale > 0
        schedule = forward_schedule(self.problem, dense_sizes(operands))
        tiles = Tiles(schedule.tile_q, schedule.tile_kv, 4, 1, by_work=self.is_even and schedule.late)
        visits = self._visits(call, tiles)
        size = self.size(call, query.shape[1], visits.tasks)
        lies = capture_layouts(operands.captures)
        functions = build_functions(self.variant, lies, half=True, resident="q_idx", divided=True)
        if not functions.takes(operands.scale, operands.floats):
            functions = build_functions(self.variant, lies, half=True, resident="q_idx")
        is_line = functions.line is not None
        partial, count = self._partial(call, schedule, tiles, visits), query.shape[0] * query.shape[1] * visits.tasks
        table = visits.table
        if partial.starts is not None:
            table = table._replace(counts=partial.counts, lists=partial.starts)
        sources = (
            describe(t, n, padded_width(t.shape[-1]), ragged=is_jagged)
            for t, n in ((query, 64), (operands.key, schedule.tile_kv), (operands.value, schedule.tile_kv), (out, 64))
        )
        programs, tickets, halved = self._programs(count, schedule, operands, visits, recorder)
        marked = MaskedTable(*table, partial.words, partial.limits, tickets, encode(halved), partial.order, self._late(schedule, operands))
        recorder.launch(
            attention_forward, (programs,),
            *sources, lse, row_max, size, visits.spans, marked, call.numbers._replace(scale=operands.scale), call.environment,
            self._config(schedule, visits.mode, is_jagged=is_jagged, is_plain=is_plain, partial=partial, is_line=is_line),
            functions.pre, functions.line or functions.score, functions.mask, functions.bounds, num_warps=4, launch_pdl=schedule.persistent,
            maxnreg=schedule.most_registers,
        )  # fmt: skip
        if is_jagged:
            places = (call.strides.out, size, visits.spans, self.config(call, tiles, visits))
            recorder.launch(zero_fill_gaps, (query.shape[1],), out, lse, row_max, *places, between=True, launch_pdl=True)
        return Results(out, lse, row_max)

    def _programs(
        self, tasks: int, schedule: Schedule, operands: Operands, visits: TileTable, recorder: Recorder
    ) -> tuple[int, Tensor | None, int]:
        """(programs for so many tasks, what persistent ones count them by, how many of the last tasks are for two programs each).
        Packed, that is in the table of tasks.

        Equal tasks that would keep less than half of the programs busy in a last round are halved.
        """
        if not schedule.persistent:
            return tasks, None, 0
        programs = at_most(tasks, schedule.programs * count_sms(operands.query.device))
        if operands.cu_q is not None:
            return programs, None if schedule.strided else visits.spans.tasks, 0
        tickets = None if schedule.strided else recorder.empty((1,), (1,), torch.int32, operands.query)
        if tickets is not None and programs < tasks:
            recorder.launch(zero_counters, (1,), tickets, encode(1), num_warps=4, launch_pdl=True)
        last = tasks % programs if self.is_even else 0
        return programs, tickets, last if 2 * last <= programs else 0

    def _visits(self, call: host.Pass, tiles: Tiles) -> TileTable:
        """Which tiles of keys each task visits; by a mask's bounds it finds them by arithmetic."""
        if not self.is_bounded:
            return self.visits(call, tiles, "queries")
        return replace(self._unmasked.visits(call, tiles, "queries"), mode="bounds")

    def _late(self, schedule: Schedule, operands: Operands) -> int | None:
        """1 where the last task of each head, shorter than its others, is to come behind all of these, else 0, encoded; None if none is."""
        if not (self.is_even and schedule.late) or operands.cu_q is not None:
            return None
        return encode(int(0 < operands.query.shape[2] % schedule.tile_q < operands.query.shape[2]))

    def _partial(self, call: host.Pass, schedule: Schedule, tiles: Tiles, visits: TileTable) -> MaskBits:
        """What is kept of lists, found once: not where the pass is to be known for other sequences."""
        lists = visits.table.lists
        if lists is None or visits.source is not None or 16 * lists.numel() * tiles.tile_q > WORDS_AT_MOST:
            return MaskBits()
        query, formula = call.operands.query, self.problem.formula
        is_long = query.shape[0] * query.shape[1] * visits.tasks * lists.shape[1] > FEW
        # with blocks and dropout tiles are where the caller's classes, and random numbers, are
        ways = (
            is_long and formula.block_size is None and not formula.dropout,
            is_long and schedule.ordered and call.operands.cu_q is None,
        )
        found = _partial.get(visits, {}).get(ways)
        if found is None:
            found = self._marked(call, ways, tiles, visits, lists)
            after_launches(functools.partial(_keep, visits, ways, found))
        call.recorder.keep(found)
        return found

    def _marked(self, call: host.Pass, ways: _Ways, tiles: Tiles, visits: TileTable, lists: Tensor) -> MaskBits:
        """Words of the partial tiles, and in a long forward where tiles are best to begin, and the order of tasks."""
        query, table, (moves, ordered) = call.operands.query, visits.table, ways
        heads = 1 if table.h_stride == encode(0) else query.shape[1]
        size, mask = self.size(call, heads, visits.tasks), call.functions.mask
        places = (visits.spans, call.environment, encode(heads), self.config(call, tiles, visits))
        rows, width = lists.shape
        alone = Recorder((), None)  # by itself: a pass reads what it made
        new = MaskBits(
            torch.empty((lists.numel(), tiles.tile_q, 4), dtype=torch.int32, device=lists.device),
            torch.zeros((rows, tiles.tile_q // 64, 2), dtype=torch.int32, device=lists.device),
        )
        assert table.counts is not None
        if moves:
            new = new._replace(starts=torch.zeros_like(lists), counts=torch.zeros_like(table.counts))
            keys = torch.zeros((rows, width, tiles.tile_kv), dtype=torch.int8, device=lists.device)
            alone.launch(mark_keys, (rows, 8), keys, table, size, *places, mask, 8, num_warps=4)
            found, across = (new.starts, new.counts, keys), triton.next_power_of_2(width)
            alone.launch(cover_keys, (rows,), *found, table, size, visits.spans, places[-1], across, 1024, num_warps=4)
            table = table._replace(counts=new.counts, lists=new.starts)
        if ordered:
            new = new._replace(order=torch.empty(rows, dtype=torch.int32, device=lists.device))
            alone.launch(order_tasks, (rows // visits.tasks, triton.cdiv(visits.tasks, 64)), new.order, table.counts, size, 64, num_warps=4)
        alone.launch(
            pack_masks, (rows * (tiles.tile_q // 64), 8),
            new.words, new.limits, table, size, *places, mask, 8, new.starts is not None, num_warps=4,
        )  # fmt: skip
        return new

    def _config(self, schedule: Schedule, mode: str, *, is_jagged: bool, is_plain: bool, partial: MaskBits, is_line: bool) -> Config:
        """What a launch is compiled for."""
        p = self.problem
        return _config(
            (
                schedule.consumers, schedule.overlapped, schedule.tile_q, schedule.tile_kv, schedule.stages,
                p.head_dim, padded_width(p.head_dim), p.value_dim, padded_width(p.value_dim), mode, is_jagged, is_plain,
                p.formula.dropout, p.formula.block_size is not None, mode == "bounds" and self.has_low,
                partial.words is not None, schedule.persistent,
            ),
            LINE=is_line, JOINED=schedule.joined, NUMBERED=schedule.numbered, EXACT=p.formula.outputs.row_max, HELD=schedule.held,
            EARLY=schedule.early and not p.formula.dropout, STARTS=partial.starts is not None, TOGETHER=schedule.together,
            REGISTERS=schedule.registers, TURNING=schedule.turning,
        )  # fmt: skip


def _keep(visits: TileTable, ways: _Ways, found: MaskBits) -> None:
    _partial.setdefault(visits, {})[ways] = found


def _without_mask(plan: Plan) -> Plan:
    formula = plan.problem.formula
    everything = replace(formula, variant=replace(formula.variant, mask=const(True)))
    return replace(plan, problem=replace(plan.problem, formula=everything))


@functools.lru_cache(maxsize=4096)
def _config(values: tuple[Any, ...], **others: int) -> Config:
    return Config(*map(tl.constexpr, values))._replace(**{name: tl.constexpr(value) for name, value in others.items()})
