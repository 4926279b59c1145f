"""Tile tables, host side: which tiles each task visits. `foci.weak_cache` has them until a value that they were built from may have
changed."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import triton
from torch import Tensor

from foci import cache_check
from foci.backends.contract import Inputs, Offsets
from foci.backends.gpu.compiling import after_launches
from foci.backends.gpu.kernel_args import Size, Spans, Table, encode, table_config
from foci.backends.gpu.launch_builder import LaunchBuilder
from foci.backends.gpu.launch_list import LaunchList, Source, Template
from foci.backends.gpu.mask_convexity import is_convex
from foci.backends.gpu.schedules import Schedule
from foci.backends.gpu.stream_state import current_stream, free_stream, is_for_graphs, tensor_addresses
from foci.backends.gpu.symbolic_tokens import Count, Tokens, at_most
from foci.backends.gpu.tile_table_kernels import ClassGrid, ListShape, TileGrid, assign_tasks, classify_tiles, list_tiles, place_sequences
from foci.backends.gpu.tiles import RECORD
from foci.compat.torch import version_of
from foci.problem import Operands
from foci.weak_cache import cache_derived, find_derived, tensor_state

if TYPE_CHECKING:
    from foci.backends.gpu.passes import Pass, PassBuilder

__all__ = [
    "ALL",
    "DENSE",
    "Sequences",
    "TileTable",
    "build_visits",
    "find_sequences",
    "offset_tensors",
    "offsets_state",
    "operand_sequences",
    "sequences_at",
]

DENSE: Final = Spans(None, None, None, None, None, encode(0), encode(0))
ALL: Final = Table(None, None, encode(0), encode(0), encode(0))


@dataclass(frozen=True, eq=False)
class TileTable:
    """Tasks of a kernel and the tiles they visit."""

    tasks: int
    mode: str
    spans: Spans
    table: Table
    source: Source | None = None  # finds `tensors` for other sequences, if they depend on the lengths alone
    derived: dict[Hashable, Any] = field(default_factory=dict, init=False)  # by name, what kernels computed from these tiles

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Task records, counts and lists."""
        return self.spans.tasks, self.table.counts, self.table.lists


@dataclass(frozen=True, eq=False)
class Sequences:
    """Starts and lengths of packed sequences. What is computed from them is cached as long as this object lives.

    Attributes:
        q_start, q_length, kv_start, kv_length: int32 [sequences] on the device; None when dense.
        stays: False if the offsets may change unseen, so that only the pass at hand may use what is computed from them.
        task_records: by (tile, streamed tile or 0, number of records, whether tasks are tiles of queries), see `_assigned`.
    """

    q_start: Tensor | None = None
    q_length: Tensor | None = None
    kv_start: Tensor | None = None
    kv_length: Tensor | None = None
    stays: bool = True
    task_records: dict[tuple[int, int, int, bool], Tensor] = field(default_factory=dict, init=False)

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Starts and lengths."""
        return self.q_start, self.q_length, self.kv_start, self.kv_length

    @property
    def form(self) -> tuple[object, ...]:
        """Return what a launch list depends on besides starts and lengths: the number of sequences, and which of the tensors are the
        same."""
        length = self.q_length
        return (length is not None and length.shape[0], self.q_start is self.kv_start, self.q_length is self.kv_length)


def operand_sequences(operands: Operands) -> Sequences:
    """`sequences_at` of operands."""
    o = operands
    return sequences_at(o.query, None if o.cu_q is None else (o.cu_q, o.cu_kv, o.q_lengths, o.kv_lengths))


def sequences_at(query: Tensor, offsets: Offsets | None, free: int | None = None) -> Sequences:
    """Starts and lengths of packed sequences, without synchronisation. Cached for as long as the offsets live and do not change.

    The layers of a model, and their backward passes, have the same offsets, so they share the `Sequences` and what is computed from them.
    `free`: the result of `free_stream`, if the caller has it.
    """
    if offsets is None:
        return _DENSE_SEQUENCES
    stream = current_stream(query) if free is None else free
    is_stable = free is not None or not is_for_graphs(query)
    return find_sequences(offsets, offsets_state(offsets) if is_stable else None, stream)


def find_sequences(offsets: Offsets, state: tuple[object, ...] | None, stream: int) -> Sequences:
    """Starts and lengths, cached by the state of the offsets unless it is None."""
    if state is None:
        return _sequences(offsets, stays=False)
    key = (stream, state)
    sequences: Sequences | None = find_derived("sequences", key)
    if sequences is None:
        sequences = _sequences(offsets, stays=True)
        cache_derived("sequences", key, offset_tensors(offsets), sequences)
    elif cache_check.ENABLED:
        cache_check.compare_tensors("the cache of sequences", sequences.tensors, _sequences(offsets, stays=True).tensors)
    return sequences


def offsets_state(offsets: Offsets) -> tuple[object, ...] | None:
    """`tensor_state` of offsets; None if one of them may change without a new version."""
    cu_q, cu_kv, q_lengths, kv_lengths = offsets
    assert cu_q is not None
    if cu_kv is cu_q and q_lengths is None and kv_lengths is None:  # the usual case, which each call checks
        return None if cu_q.is_inference() else (id(cu_q), version_of(cu_q), cu_q.data_ptr())
    if any(t is not None and t.is_inference() for t in offsets):
        return None
    return tuple([None if t is None else tensor_state(t) for t in offsets])


def offset_tensors(offsets: Offsets) -> tuple[Tensor, ...]:
    """The tensors of offsets; one where queries and keys have the same."""
    cu_q, cu_kv, q_lengths, kv_lengths = offsets
    if cu_q is not None and cu_kv is cu_q and q_lengths is None and kv_lengths is None:
        return (cu_q,)
    return tuple([t for t in offsets if t is not None])


def _sequences(offsets: Offsets, *, stays: bool) -> Sequences:
    cu_q, cu_kv, q_lengths, kv_lengths = offsets
    assert cu_q is not None
    assert cu_kv is not None
    q = _placed(cu_q, q_lengths)
    kv = q if cu_kv is cu_q and kv_lengths is q_lengths else _placed(cu_kv, kv_lengths)
    return Sequences(*q, *kv, stays)


def _placed(ends: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Starts and lengths, int32, from cumulative lengths; lengths from `lengths` unless None."""
    inputs = (ends.contiguous(), None if lengths is None else lengths.contiguous())
    count = ends.shape[0] - 1
    key = ("places", count, ends.dtype, None if lengths is None else lengths.dtype)

    def place(launches: LaunchBuilder) -> list[Tensor]:
        start, length = (launches.empty((count,), (1,), torch.int32, ends) for _ in range(2))
        launches.add(place_sequences, (triton.cdiv(count, 256),), *inputs, start, length, encode(count), 256)
        return [start, length]

    start, length = _repeated(key, inputs, (0, 0), place)
    return start, length


def _repeated(what: tuple[object, ...], inputs: Inputs, tokens: Tokens, way: Callable[[LaunchBuilder], list[Tensor]]) -> list[Tensor]:
    """Run the launch list that `way` builds for the inputs, or that it built before, for any number of tokens."""
    first = inputs[0]
    assert first is not None
    stream, places = free_stream(first), tensor_addresses(inputs)
    key = (*what, first.device, stream, *[(place or 0) & 15 == 0 for place in places])  # compiled for each one's
    cached: _TableLaunches | None = None if stream is None else find_derived("table launches", key)
    if cached is not None:
        return cached.bound(tokens).run(inputs, places)
    launches = LaunchBuilder(inputs, stream)
    outputs = way(launches)
    launches.finish(tokens)
    built = launches.built
    cache_derived("table launches", key, (), None if built is None else _TableLaunches(built.template))
    return outputs


class _TableLaunches:
    """Launches of `_repeated`, bound to the last numbers of tokens."""

    __slots__ = ("_bound", "_template")

    def __init__(self, template: Template) -> None:
        self._template = template
        self._bound: OrderedDict[Tokens, LaunchList] = OrderedDict()

    def bound(self, tokens: Tokens) -> LaunchList:
        """The launches for a number of tokens."""
        launch_list = self._bound.get(tokens)
        if launch_list is None:
            launch_list = self._bound[tokens] = self._template.as_built(tokens)
            if len(self._bound) > _TOKEN_COUNTS:
                self._bound.popitem(last=False)
        return launch_list


_TOKEN_COUNTS: Final = 64


def _changes_unseen(query: Tensor, read: Sequence[Tensor]) -> bool:
    """Whether tensors may change without a new version: while a CUDA graph is captured, and inference tensors."""
    return is_for_graphs(query) or any(t.is_inference() for t in read)


_DENSE_SEQUENCES: Final = Sequences()
"""The `Sequences` of every dense call."""


class _TableKey(NamedTuple):
    """Key of a tile table."""

    classes: Hashable  # see `_key_of_classes`
    tile_q: int
    tile_kv: int
    by_work: bool
    side: str


def _key_of_classes(builder: PassBuilder, call: Pass, sequences: tuple[Sequences, ...], read: tuple[Tensor, ...]) -> Hashable:
    """Key of the classes of tiles, whatever the sizes of these. `read`: tensors that the mask reads."""
    o = call.operands
    return (
        builder.variant.mask, *map(id, sequences), o.query.shape[:2], o.key.shape[1], o.max_q, o.max_kv, o.ints, o.floats,
        o.query.device, current_stream(o.query), *map(tensor_state, read), builder.problem.formula.block_size, int(call.rows),
        int(call.columns),
    )  # fmt: skip


def build_visits(builder: PassBuilder, call: Pass, schedule: Schedule, side: str) -> TileTable:
    """Build the tile table of a kernel whose tasks are tiles of `side`, "queries" or "keys".

    The table is cached as long as lengths, numbers and captured tensors (the same objects at the same version) do not change. It is not
    cached while a CUDA graph is captured: it would outlive the graph's memory, and the graph's inputs change unseen.
    """
    operands = call.operands
    read = builder.read_by_masks(operands)
    is_unkept = operands.blocks is not None and operands.program is None  # compiled code computes a new block mask at each call
    if not call.sequences.stays or is_unkept or _changes_unseen(operands.query, read):
        return _make(builder, call, schedule, side, None)
    if cache_check.ENABLED and operands.program is None:  # results of cached launches are compared with this call's
        return _make(builder, call, schedule, side, None)
    sequences = () if operands.cu_q is None else (call.sequences,)
    what = _key_of_classes(builder, call, sequences, read)
    known = _TableKey(what, schedule.tile_q, schedule.tile_kv, schedule.by_work, side)
    table: TileTable | None = find_derived("tile tables", known)
    if table is None and call.launches.is_ahead:
        return _make(builder, call, schedule, side, None)
    if table is None:
        table = _make(builder, call, schedule, side, what)
        after_launches(functools.partial(cache_derived, "tile tables", known, (*sequences, *read), table))
    return table


_TOGETHER: Final = 1 << 22
"""The heads of a task run together if all heads' keys and values, or queries and gradients, of the longest sequence take at most this many
bytes: L2 holds several times as many."""


@dataclass(frozen=True, eq=False)
class _Tasks:
    """Tasks of a kernel: tiles of `tile` rows of queries, which tiles of `other` keys stream past, or the reverse."""

    count: int
    width: int
    spans: Spans
    is_by_query: bool
    heads: int
    batch: int
    tile: int
    other: int
    by_work: bool

    def at(self, sequences: Sequences, tokens: Tokens) -> Tensor:
        """Task records of other sequences."""
        count = self.count.of(tokens) if isinstance(self.count, Count) else self.count
        return _assigned(sequences, self.tile, count, is_by_query=self.is_by_query, other=self.other if self.by_work else 0)

    @property
    def source(self) -> Source | None:
        """`TileTable.source` of a table that visits every tile."""
        return (lambda sequences, tokens, _: (self.at(sequences, tokens), None, None)) if isinstance(self.count, Count) else None

    @property
    def with_places(self) -> Source:
        """Source of the tensors that the kernels of `tile_table_kernels` read."""
        return lambda sequences, tokens, _: (self.at(sequences, tokens), *sequences.tensors)


def _make(builder: PassBuilder, call: Pass, schedule: Schedule, side: str, known: Hashable) -> TileTable:
    """Build a tile table. `known`: key by which tile classes are cached, None if they are not."""
    operands, mask = call.operands, builder.variant.mask
    tasks = _tasks(builder, call, schedule, side)
    if mask.op == "const" and mask.value is True and operands.blocks is None:
        return TileTable(tasks.count, "all", tasks.spans, ALL, tasks.source)
    is_interval = operands.blocks is None and is_convex(mask, "kv_idx" if tasks.is_by_query else "q_idx")
    visits = TileTable(tasks.count, "ranges" if is_interval else "lists", tasks.spans, ALL)
    launches = call.launches.another(operands.captures, free_stream(operands.query))
    launches.keep((tasks.spans.tasks, *call.sequences.tensors), tasks.with_places)
    grid = _grid(call, schedule, tasks)
    classes: Tensor | None = None
    if known is not None and operands.cu_q is None:
        # forward and backward, and the tables of both sides, share the classes
        classes = find_derived("tile classes", (known, grid.grain))
    if classes is None:
        classes = _classify(builder, call, schedule, tasks, grid, launches)
        if known is not None and operands.cu_q is None:
            read = builder.read_by_masks(operands)
            after_launches(functools.partial(cache_derived, "tile classes", (known, grid.grain), read, classes))
    table = _list(call, tasks, grid, classes, visits, launches)
    if launches is not call.launches:
        launches.finish((call.rows, call.columns))
    built = None if builder.mask_slots or tasks.source is None else launches.built
    return table if built is None else replace(table, source=functools.partial(_listed, tasks, built.template))


def _listed(tasks: _Tasks, template: Template, sequences: Sequences, tokens: Tokens, captures: Inputs) -> Inputs:
    """`TileTable.source` of a table from `_list`."""
    bound = template.bound(sequences, tokens, captures)
    _, counts, *lists = bound.run(captures)
    return tasks.at(sequences, tokens), counts, lists[0] if lists else None


def _tasks(builder: PassBuilder, call: Pass, schedule: Schedule, side: str) -> _Tasks:
    operands = call.operands
    is_by_query = side == "queries"
    tile, other = (schedule.tile_q, schedule.tile_kv) if is_by_query else (schedule.tile_kv, schedule.tile_q)
    mine, theirs = (call.rows, call.columns) if is_by_query else (call.columns, call.rows)
    count, spans, width = (mine + tile - 1) // tile, DENSE, triton.cdiv(int(theirs), other)
    reads = builder.variant.mask.variables()
    blocks = operands.blocks
    heads = operands.query.shape[1] if "h" in reads or (blocks is not None and blocks.shape[1] > 1) else 1
    batch = operands.query.shape[0] if "b" in reads or (blocks is not None and blocks.shape[0] > 1) else 1
    if operands.cu_q is not None:
        sequences = operands.cu_q.shape[0] - 1
        # at most so many end within a tile, and none has more tiles than the longest; one task is spare
        count = at_most(count + sequences, sequences * triton.cdiv(operands.max_q if is_by_query else operands.max_kv, tile) + 1)
        table = _assigned(
            call.sequences, tile, int(count), is_by_query=is_by_query, other=other if schedule.by_work else 0, launches=call.launches
        )
        longest = max(operands.max_q, operands.max_kv)
        together = longest * operands.query.shape[1] * (operands.query.shape[3] + operands.value.shape[3]) * operands.query.itemsize
        spans = Spans(table, *call.sequences.tensors, encode(sequences), encode(together <= _TOGETHER))
        width, batch = triton.cdiv(operands.max_kv if is_by_query else operands.max_q, other), 1
    if operands.page_table is not None:
        spans = DENSE._replace(kv_length=call.sequences.kv_length)
        width, batch = triton.cdiv(operands.max_kv, other), operands.query.shape[0]
    return _Tasks(count, width, spans, is_by_query, heads, batch, tile, other, schedule.by_work)


def _assigned(
    sequences: Sequences, tile: int, count: int, *, is_by_query: bool, other: int = 0, launches: LaunchBuilder | None = None
) -> Tensor:
    """Task records of `count` tiles of queries, or of keys, cached as long as the sequences live. They are sorted by work if `other`, the
    rows of a streamed tile, is not 0; else by length. `launches`: of the pass, in case it only compiles ahead."""
    known = (tile, other, count, is_by_query)
    table = sequences.task_records.get(known)
    if table is not None:
        return table
    lengths = (sequences.q_length, sequences.kv_length)
    length, stream_length = lengths if is_by_query else lengths[::-1]
    assert length is not None

    def assign(launches: LaunchBuilder) -> list[Tensor]:
        rows = Count(count, "t[0]")
        tasks = launches.empty((rows, record), (record, 1), torch.int32, length)
        sizes = (encode(length.shape[0]), encode(rows))
        launches.add(
            assign_tasks, (triton.cdiv(length.shape[0], 32),), tasks, length, stream_length, sequences.tensors, *sizes, tile, other, 32, 128
        )
        return [tasks]

    record: int = RECORD.value
    if launches is not None and launches.is_ahead:
        return assign(launches)[0]
    (table,) = _repeated(("tasks", tile, other, is_by_query, *sequences.form), sequences.tensors, (count, 0), assign)
    sequences.task_records[known] = table
    return table


class _Grid(NamedTuple):
    """Grid of tile classes, `lines` by `columns` for each head: of pieces of tiles if dense, of whole tiles if packed."""

    grain: tuple[int, int]  # queries and keys of a class
    lines: int
    columns: int
    each: tuple[int, int]  # classes of a tile along queries and along keys


_GRAIN: Final = 64


def _grid(call: Pass, schedule: Schedule, tasks: _Tasks) -> _Grid:
    tiles = (schedule.tile_q, schedule.tile_kv)
    if call.operands.cu_q is not None:
        return _Grid(tiles, tasks.count, tasks.width, (1, 1))
    q, kv = (gcd(tile, _GRAIN) for tile in tiles)
    keys = call.columns if call.operands.page_table is None else call.operands.max_kv
    return _Grid((q, kv), triton.cdiv(int(call.rows), q), triton.cdiv(int(keys), kv), (tiles[0] // q, tiles[1] // kv))


def _size(call: Pass, tasks: _Tasks) -> Size:
    return Size(*map(encode, (tasks.batch, tasks.heads, 1, tasks.count, call.rows, call.columns)))


def _classify(builder: PassBuilder, call: Pass, schedule: Schedule, tasks: _Tasks, grid: _Grid, launches: LaunchBuilder) -> Tensor:
    """Classify the grid: int8 [batch, heads, lines, columns]."""
    blocks, size = call.operands.blocks, builder.problem.formula.block_size
    area = grid.lines * grid.columns
    strides = (tasks.heads * area, area, grid.columns, 1)
    classes = launches.empty((tasks.batch, tasks.heads, grid.lines, grid.columns), strides, torch.int8, call.operands.query)
    block_layout = (0, 0, 1, 1, 1)
    if blocks is not None and size is not None:
        blocks = blocks.contiguous()
        launches.forget()
        b_stride, h_stride = (0 if n == 1 else stride for n, stride in zip(blocks.shape[:2], blocks.stride()[:2], strict=True))
        block_layout = (b_stride, h_stride, blocks.shape[3], size[0] // grid.grain[0], size[1] // grid.grain[1])
    tile_grid = TileGrid(*map(encode, (tasks.heads, grid.lines, grid.columns, *block_layout)))
    is_packed = call.operands.cu_q is not None
    if classes.numel():
        launches.add(
            classify_tiles, (tasks.batch * tasks.heads * area,),
            classes, blocks, _size(call, tasks), tasks.spans, call.environment, tile_grid,
            table_config(*grid.grain, is_packed=is_packed), call.functions.mask, tasks.is_by_query or not is_packed, num_warps=4,
        )  # fmt: skip
    return classes


def _list(call: Pass, tasks: _Tasks, grid: _Grid, classes: Tensor, visits: TileTable, launches: LaunchBuilder) -> TileTable:
    rows, width = tasks.batch * tasks.heads * tasks.count, tasks.width + 1
    counts = launches.empty((rows, 4), (4, 1), torch.int32, classes)
    lists = None if visits.mode == "ranges" else launches.empty((rows, width), (width, 1), torch.int32, classes)
    is_packed = call.operands.cu_q is not None
    shape = ListShape(*map(encode, (tasks.heads, tasks.width, width, tasks.other, tasks.is_by_query)))
    if tasks.is_by_query or is_packed:
        along = (grid.lines, grid.columns, 1, *grid.each, grid.columns)
    else:
        along = (grid.columns, 1, grid.columns, *grid.each[::-1], grid.lines)
    class_grid = ClassGrid(*map(encode, (grid.lines * grid.columns, *along)))
    launches.add(
        list_tiles, (rows,),
        classes, counts, lists, _size(call, tasks), tasks.spans, shape, class_grid,
        table_config(0, 0, mode=visits.mode, is_packed=is_packed, is_forced=call.operands.blocks is not None), 128, num_warps=1,
    )  # fmt: skip
    b_stride = 0 if tasks.batch == 1 else tasks.heads * tasks.count
    h_stride = 0 if tasks.heads == 1 else tasks.count
    return replace(visits, table=Table(counts, lists, *map(encode, (b_stride, h_stride, width))))
