"""Which tiles each task visits: host side. Kept for masks that capture nothing, made anew where a value may change."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch
import triton
from torch import Tensor

from foci.backends.contract import Offsets
from foci.backends.triton.arguments import Size, Spans, Table, encode
from foci.backends.triton.convexity import is_convex
from foci.backends.triton.recording import Kept, Recording, stream_of
from foci.backends.triton.schedules import Schedule
from foci.backends.triton.visits import assign_tasks, classify_tiles, list_tiles
from foci.problem import Operands

if TYPE_CHECKING:
    from foci.backends.triton.kernel import Pass, TritonKernel

__all__ = ["ALL", "DENSE", "Sequences", "Visits", "known_sequences", "sequences_at", "sequences_of", "visits_of"]

DENSE: Final = Spans(None, None, None, None, None, encode(0))
ALL: Final = Table(None, None, encode(0), encode(0), encode(0))


@dataclass(frozen=True, eq=False)
class Visits:
    """Tasks of a kernel and the tiles they visit."""

    tasks: int
    mode: str
    spans: Spans
    table: Table


@dataclass(frozen=True, eq=False)
class Sequences:
    """Where jagged sequences lie, and what is kept for as long as they lie so.

    Attributes:
        q_start, q_length, kv_start, kv_length: int32 [sequences] on the device; None when dense.
        stays: whether another call may find the offsets as they are.
        tables: tasks by tile, number of tasks and whether they are tiles of queries (see `assign_tasks`).
        visits, recordings: what `visits_of` found, and passes that can be run again.
    """

    q_start: Tensor | None = None
    q_length: Tensor | None = None
    kv_start: Tensor | None = None
    kv_length: Tensor | None = None
    stays: bool = True
    tables: dict[tuple[int, int, bool], Tensor] = field(default_factory=dict)
    visits: Kept[Visits] = field(default_factory=lambda: Kept(32))
    recordings: Kept[Recording] = field(default_factory=lambda: Kept(256))


def sequences_of(operands: Operands) -> Sequences:
    """`sequences_at` of operands."""
    o = operands
    return sequences_at(o.query, None if o.cu_q is None else (o.cu_q, o.cu_kv, o.q_lengths, o.kv_lengths))


def sequences_at(query: Tensor, offsets: Offsets | None) -> Sequences:
    """Starts and lengths of jagged sequences, without synchronisation; made once for a set of offsets that lives unchanged.

    The layers of a model, and their backward passes, share one set, and what is kept with it.
    """
    if offsets is None:
        return _WHOLE
    read = [t for t in offsets if t is not None]
    if _changes_unseen(query, read):
        return _sequences(offsets, stays=False)
    found = known_sequences(query, offsets)
    if found is not None:
        return found
    made = _sequences(offsets, stays=True)
    _sets[_set_key(query, offsets)] = tuple(map(weakref.ref, read)), made
    if len(_sets) > _SETS:
        _sets.popitem(last=False)
    return made


def known_sequences(query: Tensor, offsets: Offsets | None) -> Sequences | None:
    """`sequences_at` if these are known."""
    if offsets is None:
        return _WHOLE
    read = [t for t in offsets if t is not None]
    if any(t.is_inference() for t in read):
        return None
    found = _sets.get(_set_key(query, offsets))
    if found is None or not all(ref() is t for ref, t in zip(found[0], read, strict=True)):
        return None
    return found[1]


def _set_key(query: Tensor, offsets: Offsets) -> tuple[object, ...]:
    return (stream_of(query), *[None if t is None else (id(t), t._version) for t in offsets])


def _sequences(offsets: Offsets, *, stays: bool) -> Sequences:
    cu_q, cu_kv, q_lengths, kv_lengths = offsets
    assert cu_q is not None
    assert cu_kv is not None
    q = cu_q.to(torch.int32)
    kv = q if cu_kv is cu_q else cu_kv.to(torch.int32)
    q_length = q.diff() if q_lengths is None else q_lengths.to(torch.int32)
    shared = kv is q and kv_lengths is q_lengths
    kv_length = q_length if shared else kv.diff() if kv_lengths is None else kv_lengths.to(torch.int32)
    return Sequences(q[:-1].contiguous(), q_length.contiguous(), kv[:-1].contiguous(), kv_length.contiguous(), stays)


def _changes_unseen(query: Tensor, read: Sequence[Tensor]) -> bool:
    """Whether tensors may change without a new version: where a CUDA graph is captured, and without version counters."""
    return (query.is_cuda and torch.cuda.is_current_stream_capturing()) or any(t.is_inference() for t in read)


_WHOLE: Final = Sequences(visits=Kept(256), recordings=Kept(1024))
"""Of every dense call."""
_sets: OrderedDict[tuple[object, ...], tuple[tuple[weakref.ref[Tensor], ...], Sequences]] = OrderedDict()
_SETS: Final = 8


def visits_of(kernel: TritonKernel, call: Pass, schedule: Schedule, side: str) -> Visits:
    """Visits of a kernel whose tasks are tiles of `side`, "queries" or "keys".

    What was found is kept for as long as lengths, numbers and captured tensors (the same objects, by their version) stay
    the same; but not across the capture of a CUDA graph, whose memory it would outlive, and whose inputs change unseen.
    """
    operands = call.operands
    read = tuple(operands.captures[slot] for slot in kernel.mask_slots)
    if not call.sequences.stays or operands.blocks is not None or _changes_unseen(operands.query, read):
        return _make(kernel, call, schedule, side)
    key = (
        kernel.variant.mask, operands.query.shape[:3], operands.key.shape[1:3], operands.max_q, operands.max_kv, operands.ints,
        operands.floats, operands.query.device, stream_of(operands.query), schedule, side, *((id(t), t._version) for t in read),
    )  # fmt: skip
    found = call.sequences.visits.find(key)
    if found is None:
        found = _make(kernel, call, schedule, side)
        call.sequences.visits.add(key, read, found)
    return found


@dataclass(frozen=True, eq=False)
class _Tasks:
    """Tasks of a kernel, and the tiles that stream by each: of keys, or of queries."""

    count: int
    width: int
    spans: Spans
    is_by_query: bool
    heads: int
    batch: int


def _make(kernel: TritonKernel, call: Pass, schedule: Schedule, side: str) -> Visits:
    operands, mask = call.operands, kernel.variant.mask
    tasks = _tasks(kernel, call, schedule, side)
    if mask.op == "const" and mask.value is True and operands.blocks is None:
        return Visits(tasks.count, "all", tasks.spans, ALL)
    is_interval = operands.blocks is None and is_convex(mask, "kv_idx" if tasks.is_by_query else "q_idx")
    visits = Visits(tasks.count, "ranges" if is_interval else "lists", tasks.spans, ALL)
    return _list(kernel, call, schedule, tasks, _classify(kernel, call, schedule, tasks, visits), visits)


def _tasks(kernel: TritonKernel, call: Pass, schedule: Schedule, side: str) -> _Tasks:
    operands = call.operands
    is_by_query = side == "queries"
    tile, other = (schedule.tile_q, schedule.tile_kv) if is_by_query else (schedule.tile_kv, schedule.tile_q)
    mine, theirs = (operands.query, operands.key) if is_by_query else (operands.key, operands.query)
    count, spans, width = triton.cdiv(mine.shape[2], tile), DENSE, triton.cdiv(theirs.shape[2], other)
    reads = kernel.variant.mask.variables()
    blocks = operands.blocks
    heads = operands.query.shape[1] if "h" in reads or (blocks is not None and blocks.shape[1] > 1) else 1
    batch = operands.query.shape[0] if "b" in reads or (blocks is not None and blocks.shape[0] > 1) else 1
    if operands.cu_q is not None:
        count += operands.cu_q.shape[0] - 1
        spans = _assign(call, tile, count, is_by_query=is_by_query)
        width, batch = triton.cdiv(operands.max_kv if is_by_query else operands.max_q, other), 1
    if operands.page_table is not None:
        spans = DENSE._replace(kv_length=call.sequences.kv_length)
        width, batch = triton.cdiv(operands.max_kv, other), operands.query.shape[0]
    return _Tasks(count, width, spans, is_by_query, heads, batch)


def _assign(call: Pass, tile: int, count: int, *, is_by_query: bool) -> Spans:
    s = call.sequences
    length = s.q_length if is_by_query else s.kv_length
    assert length is not None
    table = s.tables.get((tile, count, is_by_query))
    if table is None:
        table = s.tables[tile, count, is_by_query] = torch.empty((count, 2), dtype=torch.int32, device=length.device)
        block = 32
        assign_tasks[(triton.cdiv(length.shape[0], block),)](table, length, encode(length.shape[0]), encode(count), tile, block, 128)
    return Spans(table, s.q_start, s.q_length, s.kv_start, s.kv_length, encode(length.shape[0]))


def _size(call: Pass, tasks: _Tasks) -> Size:
    query, key = call.operands.query, call.operands.key
    return Size(*map(encode, (tasks.batch, tasks.heads, 1, tasks.count, query.shape[2], key.shape[2])))


def _classify(kernel: TritonKernel, call: Pass, schedule: Schedule, tasks: _Tasks, visits: Visits) -> Tensor:
    """int8 [batch, heads, tasks, width]."""
    blocks, size = call.operands.blocks, kernel.problem.formula.block_size
    classes = torch.empty((tasks.batch, tasks.heads, tasks.count, tasks.width), dtype=torch.int8, device=call.operands.query.device)
    given = (0, 0, 1, 1, 1)
    if blocks is not None and size is not None:
        blocks = blocks.contiguous()
        b_stride, h_stride = (0 if n == 1 else stride for n, stride in zip(blocks.shape[:2], blocks.stride()[:2], strict=True))
        given = (b_stride, h_stride, blocks.shape[3], size[0] // schedule.tile_q, size[1] // schedule.tile_kv)
    shape = tuple(map(encode, (tasks.heads, tasks.width, *given)))
    if classes.numel():
        classify_tiles[(classes.numel(),)](
            classes, blocks, _size(call, tasks), tasks.spans, call.environment, shape,
            kernel.config(call, schedule, visits), call.functions.mask, tasks.is_by_query, num_warps=4,
        )  # fmt: skip
    return classes


def _list(kernel: TritonKernel, call: Pass, schedule: Schedule, tasks: _Tasks, classes: Tensor, visits: Visits) -> Visits:
    rows, device = tasks.batch * tasks.heads * tasks.count, classes.device
    counts = torch.empty((rows, 4), dtype=torch.int32, device=device)
    lists = None if visits.mode == "ranges" else torch.empty((rows, tasks.width + 1), dtype=torch.int32, device=device)
    shape = tuple(map(encode, (tasks.heads, tasks.width, tasks.width + 1)))
    list_tiles[(rows,)](
        classes,
        counts,
        lists,
        _size(call, tasks),
        tasks.spans,
        shape,
        kernel.config(call, schedule, visits),
        tasks.is_by_query,
        128,
        num_warps=1,
    )
    b_stride = 0 if tasks.batch == 1 else tasks.heads * tasks.count
    h_stride = 0 if tasks.heads == 1 else tasks.count
    return Visits(tasks.count, visits.mode, tasks.spans, Table(counts, lists, *map(encode, (b_stride, h_stride, tasks.width + 1))))
