"""Backward, host side: which kernels a call launches, and with what.

What precedes the launches, what is kept between calls, and gradients of captured tensors are as in the Triton backend.
"""

from __future__ import annotations

import functools
import math
import weakref
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

import torch
import triton.language as tl
from torch import Tensor

from foci.backends.causal import is_causal
from foci.backends.contract import Given, Plan
from foci.backends.hopper.backward_schedules import (
    ADDED,
    ADDING,
    AT_ONCE,
    BEGUN,
    FINISHED,
    KEYS,
    QUERIES,
    REGISTERS,
    SPLIT,
    WHOLE,
    Cut,
    Fused,
    few_schedule,
    few_shares,
    fused_schedule,
    is_prefix,
    kept_heads,
    kept_schedule,
    kept_shape,
    padded_widths,
    place_schedule,
)
from foci.backends.hopper.bwd_dk_dv import attention_key_gradient
from foci.backends.hopper.bwd_dk_dv_wide import attention_split_gradient
from foci.backends.hopper.bwd_dq import attention_query_gradient
from foci.backends.hopper.bwd_dq_dk_dv import attention_gradients
from foci.backends.hopper.bwd_dq_from_ds import HeadChunk, attention_kept_gradient
from foci.backends.hopper.bwd_preprocess import begin_gradients, finish_query_gradient, reduce_dq_partials
from foci.backends.hopper.bwd_short_q import SplitKVPartials, attention_few_gradients
from foci.backends.hopper.config import Config, MaskedTable
from foci.backends.hopper.descriptors import describe, takes_descriptor
from foci.backends.hopper.dq_order import mark_tiles, rank_packed, rank_tiles
from foci.backends.hopper.dq_semaphore import SHARE_LINE, Order, slot_size
from foci.backends.hopper.functions import KernelFunctions, build_functions
from foci.backends.hopper.gluon_compat import TensorDescriptor, gl
from foci.backends.hopper.layouts import smem_layout
from foci.backends.hopper.mask_bits import pack_queries
from foci.backends.hopper.schedules import count_sms
from foci.backends.hopper.zero_fill import zero_counters
from foci.backends.mask_intervals import find_bounds
from foci.backends.problem_class import WORDS_AT_MOST
from foci.backends.triton import kernel as host
from foci.backends.triton.allocate import gradient_tensors, row_tensors
from foci.backends.triton.captured_grad import bias_of_query_tiles, capture_gradients
from foci.backends.triton.compiling import after_launches
from foci.backends.triton.functions import capture_layouts, is_half
from foci.backends.triton.kernel_args import encode
from foci.backends.triton.recorder import Recorder
from foci.backends.triton.schedules import Schedule as Tiles
from foci.backends.triton.symbolic_tokens import at_most
from foci.backends.triton.tile_tables import Sequences, TileTable
from foci.compat.gluon import HAS_ADD
from foci.ir.expr import const
from foci.problem import Operands

__all__ = ["HopperGradients"]


_ranks: Final[weakref.WeakKeyDictionary[TileTable, Tensor]] = weakref.WeakKeyDictionary()
_words: Final[weakref.WeakKeyDictionary[TileTable, Tensor]] = weakref.WeakKeyDictionary()
"""Kept as long as the visits are that they belong to."""
_LINE: Final = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
_SHARE: Final = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


Grads: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]
"""dq, dk and dv, those that are wanted."""


class _Sums(NamedTuple):
    """Where the kernel of all gradients adds up dq: `total` slots of float32 sums, `slots` of them a head, and who has added what."""

    schedule: Fused
    slots: int
    total: int
    turns: Tensor
    added: Tensor


class _Keeping(NamedTuple):
    """How dq is cut up where gradients of scores are kept, where they lie, and of how many heads of keys at a time."""

    cut: Cut
    kept: Tensor
    heads: int


class _Streams(NamedTuple):
    """Tensors that descriptors describe, and what makes these."""

    query: Tensor
    key: Tensor
    value: Tensor
    dout: Tensor
    ragged: bool
    lines: tuple[Tensor, Tensor, int]
    """lse in base 2 and delta in lines that TMA may copy, and elements of a head in them."""

    widths: dict[int, int]
    """What head dims are padded to."""

    def of(self, tensor: Tensor, rows: int) -> TensorDescriptor:
        return describe(tensor, rows, self.widths[tensor.shape[-1]], ragged=self.ragged)

    def rows_of(self, rows: int) -> tuple[TensorDescriptor, TensorDescriptor, int]:
        pitch = self.lines[2]
        count = self.query.shape[0] * self.query.shape[1] * pitch
        return _line(self.lines[0], count, rows), _line(self.lines[1], count, rows), encode(pitch)


class HopperGradients(host.TritonKernel):
    """The backward of a plan."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        mask, formula = self.variant.mask, self.problem.formula
        self.is_prefix = is_prefix(self.problem)
        self.is_bounded_by_key = formula.block_size is None and find_bounds(mask, "q_idx") is not None
        self.few = few_schedule(self.problem)
        self.fused = fused_schedule(self.problem) if HAS_ADD else None
        self.widths = padded_widths(self.problem)
        self.kept = kept_schedule(self.problem)
        self.splits = max(self.widths) > 128 and self.widths not in WHOLE
        self._tasks = host.TritonKernel(_without_mask(plan))

    def _backward(
        self, operands: Operands, given: Given, sequences: Sequences, recorder: Recorder, flow: Any = None
    ) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
        p, query, key, value = self.problem, operands.query, operands.key, operands.value
        if not (query.numel() and key.numel() and value.numel()) or (self.learns and bias_of_query_tiles(self, operands)):
            return super()._backward(operands, given, sequences, recorder, flow)
        if p.formula.dropout and (self.fused is None or not all(self.wanted)):
            # the other kernels here know no dropout
            return super()._backward(operands, given, sequences, recorder, flow)
        tensors = (query, key, value, given.dout)
        if not all(map(takes_descriptor, tensors)):
            recorder.forget()
        query, key, value, dout = (t if takes_descriptor(t) else t.contiguous() for t in tensors)
        given = given._replace(dout=dout)
        grads = gradient_tensors(recorder, replace(operands, query=query, key=key, value=value), self.wanted)
        call = self.begin(operands, {"out": given.out, "dout": given.dout, **grads}, sequences, recorder)
        lse2, delta = row_tensors(recorder, operands, given.lse, 2)
        dq, dk, dv = (grads.get(name) for name in ("dq", "dk", "dv"))
        is_whole = dq is not None and dk is not None and dv is not None
        keeping = self._keeping(call, query, self.kept) if is_whole and self.kept is not None else None
        few = self.few if is_whole else None
        sums = self._sums(call, query, self.fused) if is_whole and keeping is None and few is None and self.fused is not None else None
        lines = self._begin(call, given, (lse2, delta), (dq, dk, dv), sums)
        widths = dict(zip((p.head_dim, p.value_dim), self.widths, strict=True))
        streams = _Streams(query, key, value, dout, operands.cu_q is not None, lines, widths)
        if sums is not None:
            self._all_gradients(call, streams, (dq, dk, dv), sums)
        elif keeping is not None and dq is not None:
            self._kept(call, streams, dq, (dk, dv), keeping)
        elif few is not None:
            self._few(call, streams, (lse2, delta), (grads["dq"], grads["dk"], grads["dv"]), few)
        else:
            self._apart(call, streams, (lse2, delta), (dq, dk, dv))
        if not any(p.capture_grads):
            return list(grads.values()), ()
        return list(grads.values()), capture_gradients(self, call, (given.dout, lse2, delta), given.dlse)

    def _begin(
        self, call: host.Pass, given: Given, rows: tuple[Tensor, Tensor], grads: Grads, sums: _Sums | None
    ) -> tuple[Tensor, Tensor, int]:
        """What precedes the others, in one launch. Returns what `_Streams` calls lines."""
        operands, (batch, heads, _), length = call.operands, rows[0].shape, call.rows
        found = host.TritonKernel.visits(self._tasks, call, Tiles(128, 128, 4, 1), "queries")
        lines, pitch = rows, length
        keep = call.numbers.keep_factor if self.problem.formula.dropout else None
        if operands.cu_q is not None or length % 4 or keep is not None:
            pitch = (length // 128 + operands.cu_q.shape[0] if operands.cu_q is not None else found.tasks) * 128
            lines = tuple(call.recorder.empty((batch * heads * pitch,), (1,), torch.float32, rows[0]) for _ in range(2))  # type: ignore[assignment]
        tile = min(max(BEGUN // self.dims[1], 16), 128)
        turns, count = (None, 0) if sums is None else (sums.turns, sums.total + 1)
        call.recorder.launch(
            begin_gradients, (batch * heads * found.tasks, 128 // tile),
            given.out, given.dout, given.lse, given.dlse, rows, None if lines is rows else lines, keep, turns, encode(count), grads,
            call.strides, self.size(call, heads, found.tasks), encode(operands.key.shape[1]), found.spans, encode(pitch),
            self.config(call, Tiles(tile, tile, 4, 1), None), num_warps=4, maxnreg=REGISTERS,
        )  # fmt: skip
        return lines[0], lines[1], pitch

    def _apart(self, call: host.Pass, streams: _Streams, rows: tuple[Tensor, Tensor], grads: Grads) -> None:
        """dq in one kernel; dk and dv in another."""
        dq, dk, dv = grads
        if dq is not None:
            self._queries(call, streams, rows, dq)
        if dk is not None and dv is not None and self.splits:
            self._split(call, streams, (dk, dv), self._found(call, SPLIT, "keys"))
        elif dk is not None or dv is not None:
            self._keys(call, streams, (dk, dv), self._found(call, KEYS[max(self.widths)], "keys"))

    def _queries(self, call: host.Pass, streams: _Streams, rows: tuple[Tensor, Tensor], dq: Tensor) -> None:
        cut, operands, of = QUERIES[max(self.widths)], call.operands, streams.of
        visits, functions = self._found(call, cut, "queries"), self._functions(operands, "q_idx")
        batch, heads = streams.query.shape[:2]
        call.recorder.launch(
            attention_query_gradient, (batch * heads * visits.tasks,),
            of(streams.query, 64), of(streams.key, cut.tile_kv), of(streams.value, cut.tile_kv), of(streams.dout, 64), *rows, of(dq, 64),
            self.size(call, heads, visits.tasks), visits.spans, visits.table, operands.scale,
            call.environment, self._cut_config(call, cut, visits.mode), functions.pre, functions.both, functions.mask, num_warps=4,
        )  # fmt: skip

    def _few(self, call: host.Pass, streams: _Streams, rows: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor, Tensor], cut: Cut) -> None:
        """All gradients of heads of few queries, a program for each, or several where there are few heads of many keys."""
        functions, of, (batch, heads) = self._functions(call.operands, "q_idx"), streams.of, streams.query.shape[:2]
        config, size, (dq, dk, dv) = self._cut_config(call, cut, "all"), self.size(call, heads, 1), grads
        tiles, programs = few_shares(batch * heads, int(call.columns), cut.tile_kv)
        shares = None
        if programs > 1:
            shape = (batch * heads * programs, 128, self.widths[0])
            sums = call.recorder.empty(shape, (shape[1] * shape[2], shape[2], 1), torch.float32, streams.query)
            shares = SplitKVPartials(sums, encode(programs), encode(tiles))
        call.recorder.launch(
            attention_few_gradients, (batch * heads * programs,),
            *(of(t, 64) for t in streams[:4]), *rows, of(dq, 64) if shares is None else None, of(dk, 64), of(dv, 64), shares, size,
            call.operands.scale, call.environment, config, functions.pre, functions.both, functions.mask, num_warps=4,
        )  # fmt: skip
        if shares is not None:
            call.recorder.launch(
                reduce_dq_partials, (batch * heads, -(-call.rows * self.widths[0] // ADDED)),
                shares.sums, dq, call.strides.dq, size, shares.count, call.operands.scale, config, call.unit, ADDED, 8,
                num_warps=4, maxnreg=ADDING,
            )  # fmt: skip

    def _keeping(self, call: host.Pass, query: Tensor, cut: Cut) -> _Keeping | None:
        """Where gradients of scores are kept; None where too few heads fit to fill the card."""
        (batch, heads), kv_heads = query.shape[:2], call.operands.key.shape[1]
        rows, columns = kept_shape(int(call.rows), int(call.columns), is_causal=is_causal(self.variant))
        size, group = rows * columns, heads // kv_heads
        count = kept_heads(batch * kv_heads, group, int(call.columns), size)
        if count is None:
            return None
        shape, strides = (1, count * group, rows, columns), (count * group * size, size, columns, 1)
        return _Keeping(cut, call.recorder.empty(shape, strides, query.dtype, query), count)

    def _kept(self, call: host.Pass, streams: _Streams, dq: Tensor, grads: tuple[Tensor | None, Tensor | None], keeping: _Keeping) -> None:
        """dk and dv of some heads, which leave the gradients of their scores, and dq by a product of these, until all heads are done."""
        (cut, kept, chunk), of, (batch, heads), kv_heads = keeping, streams.of, streams.query.shape[:2], streams.key.shape[1]
        group, tasks, tiles = heads // kv_heads, -(-call.rows // cut.tile_q), encode(kept.shape[3] // 128)
        config = self._cut_config(call, cut, "causal" if is_causal(self.variant) else "all")
        found = self._found(call, SPLIT if self.splits else KEYS[max(self.widths)], "keys")
        by_key = self._split if self.splits else self._keys
        for first in range(0, batch * kv_heads, chunk):
            count = min(chunk, batch * kv_heads - first)
            by_key(call, streams, grads, found, kept, HeadChunk(encode(first), encode(count), tiles))
            call.recorder.launch(
                attention_kept_gradient, (count * group * tasks,),
                _map(kept, cut.tile_kv, 64), of(streams.key, cut.tile_kv), of(dq, 64),
                self.size(call, heads, tasks), HeadChunk(encode(first * group), encode(count * group), tiles), call.operands.scale,
                config, num_warps=4,
            )  # fmt: skip

    def _keys(
        self, call: host.Pass, streams: _Streams, grads: tuple[Tensor | None, Tensor | None], visits: TileTable, kept: Tensor | None = None,
        chunk: HeadChunk | None = None,
    ) -> None:  # fmt: skip
        """dk and dv, of all heads or of a chunk, whose gradients of scores are then left in `kept`."""
        cut, operands, of = KEYS[max(self.widths)], call.operands, streams.of
        functions = self._functions(operands, "kv_idx")
        batch, kv_heads = streams.key.shape[:2]
        programs = batch * kv_heads if chunk is None else chunk.heads >> 2
        call.recorder.launch(
            attention_key_gradient, (programs * visits.tasks,),
            of(streams.query, cut.tile_q), of(streams.key, 64), of(streams.value, 64), of(streams.dout, cut.tile_q),
            *streams.rows_of(cut.tile_q), *(None if t is None else of(t, 64) for t in grads),
            None if kept is None else _map(kept, 64, cut.tile_q), chunk,
            self.size(call, kv_heads, visits.tasks), visits.spans, visits.table, operands.scale,
            call.environment, self._cut_config(call, cut, visits.mode), functions.pre, functions.both, functions.mask,
            grads[0] is not None, grads[1] is not None, num_warps=4,
        )  # fmt: skip

    def _split(
        self, call: host.Pass, streams: _Streams, grads: tuple[Tensor | None, Tensor | None], visits: TileTable, kept: Tensor | None = None,
        chunk: HeadChunk | None = None,
    ) -> None:  # fmt: skip
        """The same of wide heads."""
        operands, of = call.operands, streams.of
        functions = self._functions(operands, "kv_idx")
        batch, kv_heads = streams.key.shape[:2]
        programs = batch * kv_heads if chunk is None else chunk.heads >> 2
        call.recorder.launch(
            attention_split_gradient, (programs * visits.tasks,),
            *(of(t, 64) for t in streams[:4]), *streams.rows_of(64), *(None if t is None else of(t, 64) for t in grads),
            None if kept is None else _map(kept, 64, 64), chunk,
            self.size(call, kv_heads, visits.tasks), visits.spans, visits.table, operands.scale,
            call.environment, self._cut_config(call, SPLIT, visits.mode), functions.pre, functions.both, functions.mask, num_warps=4,
        )  # fmt: skip

    def _sums(self, call: host.Pass, query: Tensor, schedule: Fused) -> _Sums:
        """What dq is added up in."""
        operands, (batch, heads) = call.operands, query.shape[:2]
        if schedule.goes_round:
            programs = batch * operands.key.shape[1] * -(-call.columns // schedule.cut.tile_kv)
            schedule = place_schedule(schedule, programs, count_sms(query.device))
        by_query = host.TritonKernel.visits(self._tasks, call, schedule.cut.tiles, "queries")
        # a sequence begins anew in a tile
        slots = call.rows // schedule.cut.tile_q + operands.cu_q.shape[0] if operands.cu_q is not None else by_query.tasks
        count = slots * (schedule.sums * batch * heads)
        turns = call.recorder.empty((count + 1,), (1,), torch.int32, query)
        rows = slot_size.fn(schedule.cut.tile_q, self.widths[0]) // SHARE_LINE.value
        added = call.recorder.empty((count * rows, SHARE_LINE.value), (SHARE_LINE.value, 1), torch.float32, query)
        return _Sums(schedule, slots, count, turns, added)

    def _all_gradients(self, call: host.Pass, streams: _Streams, grads: Grads, sums: _Sums) -> None:
        """One kernel for all; the sums of dq lie in slots, a slot to a tile of queries."""
        operands, functions, recorder, of = call.operands, self._functions(call.operands, "kv_idx"), call.recorder, streams.of
        (batch, heads), kv_heads = streams.query.shape[:2], streams.key.shape[1]
        schedule, slots, total, turns, added = sums
        cut = schedule.cut
        by_key, by_query = (host.TritonKernel.visits(self._tasks, call, cut.tiles, side) for side in ("keys", "queries"))
        together = max(1, schedule.together * kv_heads // heads)
        mode = "causal" if is_causal(self.variant) else "all"
        found = replace(by_key, mode=mode) if self.is_prefix else self._found(call, cut, "keys")
        order = Order(turns, encode(slots), encode(together), tl.constexpr(schedule.sums), self._ranked(call, found, cut, by_key.tasks))
        words = self._query_words(call, found, cut, by_key)
        has_words, is_line = words is not None, functions.line is not None
        config = self._cut_config(call, cut, found.mode, schedule, has_words=has_words, is_line=is_line)
        recorder.launch(
            attention_gradients, (at_most(batch * kv_heads * by_key.tasks, count_sms(streams.query.device)),),
            of(streams.query, cut.tile_q), of(streams.key, 64), of(streams.value, 64), of(streams.dout, cut.tile_q),
            *streams.rows_of(cut.tile_q), _slots(added, total),
            *(None if t is None else of(t, 64) for t in grads[1:]),
            order, self.size(call, kv_heads, by_key.tasks), by_key.spans, MaskedTable(*found.table, words),
            operands.scale, call.numbers, call.environment, config,
            functions.pre, functions.line or functions.both, functions.mask, functions.bounds,
            num_warps=4, launch_cooperative_grid=schedule.goes_round,
        )  # fmt: skip
        columns = math.gcd(self.widths[0], FINISHED)
        recorder.launch(
            finish_query_gradient, (batch * heads * by_query.tasks, cut.tile_q // 64 * self.widths[0] // columns),
            added, order, grads[0], call.strides.dq, self.size(call, heads, by_query.tasks), by_query.spans,
            operands.scale, config, call.unit, columns, num_warps=4, maxnreg=REGISTERS,
        )  # fmt: skip

    def _ranked(self, call: host.Pass, found: TileTable, cut: Cut, tasks: int) -> Tensor | None:
        """Ranks of the tiles of keys of a table, which are found once; packed, in each pass, as lengths change."""
        counts, lists = found.table.counts, found.table.lists
        if counts is None:
            return None
        if call.operands.cu_q is not None:
            rows, width = tasks * (1 if found.table.h_stride == encode(0) else call.operands.query.shape[1]), found.table.width >> 2
            made = call.recorder.empty((rows, width), (width, 1), torch.int32, counts)
            call.recorder.launch(rank_packed, (rows,), made, found.table, found.spans, encode(tasks), 128, 32, num_warps=4)
            return made
        ranks = _ranks.get(found)
        if ranks is None:
            rows, width = counts.shape[0], found.table.width >> 2
            ranks = torch.empty((rows, width), dtype=torch.int32, device=counts.device)
            recorder = Recorder((), None)  # by itself: a pass reads what it made
            if lists is not None:
                recorder.launch(zero_counters, ((rows * width + 1023) // 1024,), ranks, encode(rows * width), num_warps=4)
            config = self._cut_config(call, cut, found.mode)
            recorder.launch(mark_tiles, (rows,), ranks, found.table, config, 128, num_warps=1)
            recorder.launch(rank_tiles, (rows // tasks, (width + 127) // 128), ranks, found.table, encode(tasks), 128, num_warps=4)
            after_launches(functools.partial(_ranks.__setitem__, found, ranks))
        call.recorder.keep((ranks,))
        return ranks

    def _query_words(self, call: host.Pass, found: TileTable, cut: Cut, by_key: TileTable) -> Tensor | None:
        """Words of a table's partial tiles, which are found once; None where ends of runs say what is kept, or the mask itself."""
        counts, dtype = found.table.counts, torch.int16 if cut.tile_q == 64 else torch.int32
        if counts is None or self.is_bounded_by_key:
            return None
        words, shape = _words.get(found), (counts.shape[0], found.table.width >> 2, cut.tile_kv, 4)
        if words is None and math.prod(shape) * dtype.itemsize > WORDS_AT_MOST:
            return None
        if words is None:
            words = torch.empty(shape, dtype=dtype, device=counts.device)
            heads = 1 if found.table.h_stride == encode(0) else call.operands.query.shape[1]
            Recorder((), None).launch(
                pack_queries, (shape[0] * (cut.tile_kv // 64), 8),
                words, found.table, self.size(call, heads, by_key.tasks), by_key.spans, call.environment, encode(heads),
                self._cut_config(call, cut, found.mode), call.functions.mask, 8, num_warps=4,
            )  # fmt: skip
            after_launches(functools.partial(_words.__setitem__, found, words))
        call.recorder.keep((words,))
        return words

    def _found(self, call: host.Pass, cut: Cut, side: str) -> TileTable:
        """As the Triton backend finds them: masks of any kind by classes of tiles."""
        return host.TritonKernel.visits(self, call, cut.tiles, side)

    def _functions(self, operands: Operands, resident: str) -> KernelFunctions:
        return build_functions(self.variant, capture_layouts(operands.captures), half=is_half(self.problem.dtype), resident=resident)

    def _cut_config(
        self, call: host.Pass, cut: Cut, mode: str, whole: Fused | None = None, *, has_words: bool = False, is_line: bool = False
    ) -> Config:
        p = self.problem
        return _config(
            (
                2, False, cut.tile_q, cut.tile_kv, cut.stages, p.head_dim, self.widths[0], p.value_dim, self.widths[1], mode,
                call.operands.cu_q is not None, call.is_plain, p.formula.dropout, p.formula.block_size is not None,
                None, has_words, None, p.q_heads != p.kv_heads, self.is_bounded_by_key, whole is not None and whole.defers, is_line,
            ),
            AT_ONCE=AT_ONCE.get(cut.tile_q) if whole is not None and p.formula.dropout else None,
            ROUND=whole is not None and whole.goes_round,
        )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _config(values: tuple[Any, ...], **others: int | None) -> Config:
    return Config(*map(tl.constexpr, values))._replace(**{name: tl.constexpr(value) for name, value in others.items()})


def _without_mask(plan: Plan) -> Plan:
    formula = plan.problem.formula
    everything = replace(formula, variant=replace(formula.variant, mask=const(True)), block_size=None)
    return replace(plan, problem=replace(plan.problem, formula=everything))


def _map(kept: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of tiles of gradients of scores."""
    return TensorDescriptor(kept, list(kept.shape), list(kept.stride()), [1, 1, rows, columns], smem_layout.fn(rows, columns, 4))


def _slots(added: Tensor, total: int) -> TensorDescriptor:
    """A descriptor of so many slots of sums, a number that follows the tokens of a pass."""
    rows, columns = added.shape
    each = rows // int(total)
    return TensorDescriptor(added, [total * each, columns], [columns, 1], [each, columns], _SHARE)


def _line(tensor: Tensor, count: int, rows: int) -> TensorDescriptor:
    """A descriptor of runs of a float32 tensor of so many elements, which is contiguous."""
    return TensorDescriptor(tensor, [count], [1], [rows], _LINE)
