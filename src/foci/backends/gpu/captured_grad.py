"""Gradients of captured tensors, host side: how each read is gathered, and how partial sums are combined."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.backends.contract import Given
from foci.backends.gpu.backward import RowInputs
from foci.backends.gpu.bias_gradient import BiasGradArgs, BiasLoops, BiasOutputs, attention_bias_gradient
from foci.backends.gpu.captured_grad_kernel import BlockShape, CaptureArgs, CaptureLoops, Gather, capture_gradient
from foci.backends.gpu.codegen import TensorLayout, triton_codegen
from foci.backends.gpu.functions import capture_layouts, cast_coordinates_early, is_half
from foci.backends.gpu.generated import jit_function
from foci.backends.gpu.kernel_args import Strides, encode, is_countable_by_eights
from foci.backends.gpu.mend import NanFlags
from foci.backends.gpu.mend_launches import allocate_flags
from foci.backends.gpu.schedules import Schedule
from foci.backends.gpu.tensor_descriptors import stream_operand
from foci.backends.gpu.tile_tables import ALL, DENSE, TileTable
from foci.backends.row_gradients import summed_derivatives
from foci.ir.derivative import CaptureDerivative, capture_derivatives
from foci.ir.emit import emit
from foci.ir.expr import const
from foci.problem import Operands

if TYPE_CHECKING:
    from foci.backends.gpu.passes import Pass, PassBuilder

__all__ = ["LearnedBias", "Way", "bias_gradient", "capture_gradients", "find_query_tile_bias"]

_PLACES: Final[dict[str | int, int]] = {"b": 0, "h": 1, "q_idx": 2, "kv_idx": 2}
_BITS: Final = 61
_STRETCH: Final = 4096
"""Keys whose float32 sums per query wait in memory at a time: queries are read again for each range of keys, which costs more than sums
that no longer fit in L2."""


@dataclass(frozen=True)
class Way:
    """How to gather the gradient of one read: "tile", "rows", "columns" or "scatter" (see `captured_grad_kernel.capture_gradient`), and
    for all but the last what indexes each dimension: a coordinate, the level of a reduction, or None where the index is 0."""

    how: str
    names: tuple[str | int | None, ...] = ()


def _choose_way(derivative: CaptureDerivative) -> Way:
    """Choose the cheapest way that is valid for a read's indices."""
    names: list[str | int | None] = []
    levels = [level for level, _ in derivative.axes]
    for index in derivative.indices:
        if index.op == "var" and index.value in _PLACES:
            names.append(str(index.value))
        elif index.op == "axis" and index.value in levels:
            names.append(int(str(index.value)))
        elif index.op == "const" and index.value == 0:
            names.append(None)
        else:
            return Way("scatter")
    used = [name for name in names if name is not None]
    if len(set(used)) < len(used):
        return Way("scatter")
    if "q_idx" in used and "kv_idx" in used:
        return Way("scatter") if levels else Way("tile", tuple(names))
    return Way("columns" if "kv_idx" in used else "rows", tuple(names))


@dataclass(frozen=True, eq=False)
class LearnedBias:
    """A captured tensor that scores add, read once at (q, kv), whose gradient is computed together with dq."""

    slot: int
    derivative: CaptureDerivative
    entries: int


def find_query_tile_bias(builder: PassBuilder, o: Operands) -> LearnedBias | None:
    """The captured bias whose tiles are those of dq, if any: every key is attended to, and each element is read by one head."""
    if not builder.is_dense or o.kv_lengths is not None or not builder.problem.query_grad:
        return None
    derivatives = capture_derivatives(builder.variant.score)
    for slot, (capture, wanted) in enumerate(zip(o.captures, builder.problem.capture_grads, strict=False)):
        slot_derivatives = [derivative for derivative in derivatives if derivative.slot == slot]
        if not wanted or len(slot_derivatives) != 1 or slot_derivatives[0].weight is not const(1.0):
            continue
        way = _choose_way(slot_derivatives[0])
        if way.how == "tile" and ("h" in way.names or o.query.shape[1] == 1) and _is_covered(builder, o, slot_derivatives[0], capture):
            return LearnedBias(slot, slot_derivatives[0], 1 if "b" in way.names else o.query.shape[0])
    return None


def bias_gradient(
    builder: PassBuilder, call: Pass, bwd_args: Given, rows: tuple[Tensor, Tensor], dq: Tensor, learned: LearnedBias, target: Tensor
) -> NanFlags | None:
    """Compute dq, `rows` with lse in base 2 and delta, and `target` with the gradient of the bias. Returns the kernel's flags."""
    o, schedule = call.operands, builder.schedule("bias_gradient")
    grid, is_summed = _grid(call.operands, schedule), learned.entries > 1
    strides = _by_name(_choose_way(learned.derivative), target)
    steps = tuple(strides.get(name, 0) for name in ("b", "h", "q_idx", "kv_idx"))
    is_contiguous = steps[3] == 1 and all(step % 8 == 0 for step in steps[:3]) and is_countable_by_eights(steps[:3])
    units = tuple(step // 8 for step in steps[:3]) if is_contiguous else steps[:3]
    programs = grid.batch // learned.entries * grid.heads * grid.tiles[0]
    stretch = min(grid.tiles[1], max(1, _STRETCH // schedule.tile_kv)) if is_summed else grid.tiles[1]
    sums = waiting = None
    if is_summed:
        area, rows_of_dq = schedule.tile_q * schedule.tile_kv, schedule.tile_q * builder.dims[0]
        sums = call.launches.empty((programs, stretch, area), (stretch * area, area, 1), torch.float32, dq)
        waiting = call.launches.empty(
            (programs, learned.entries, rows_of_dq), (learned.entries * rows_of_dq, rows_of_dq, 1), torch.float32, dq
        )
    flags = allocate_flags(builder, call, programs)
    config = builder.config(call, schedule, TileTable(0, "all", DENSE, ALL), excludes=flags is not None)
    keys = functools.partial(stream_operand, config, schedule.tile_kv, call.columns)
    args = BiasGradArgs(
        call.strides, Strides(*map(encode, (*units, steps[3]))), builder.size(call, grid.heads, grid.tiles[0]),
        BiasLoops(encode(learned.entries), encode(stretch)), call.numbers, call.environment,
    )  # fmt: skip
    call.launches.add(
        attention_bias_gradient, (programs,),
        o.query, keys(o.key), keys(o.value), RowInputs(bwd_args.out, bwd_args.dout, bwd_args.lse, bwd_args.dlse, *rows),
        BiasOutputs(dq, target, sums, waiting, None if flags is None else flags.flags), args, config, call.functions.both,
        call.functions.mask, is_contiguous, num_warps=schedule.warps,
    )  # fmt: skip
    return flags


def capture_gradients(
    builder: PassBuilder,
    call: Pass,
    rows: tuple[Tensor, Tensor, Tensor],
    cotangent: Tensor | None,
    known: Mapping[int, Tensor] | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of the captured tensors that the problem asks for, each in its tensor's shape and dtype; without those of reads that
    are constant along rows.

    Args:
        rows: gradient of out, lse in base 2, delta.
        cotangent: gradient of lse.
        known: those that are there already, by slot.
    """
    wanted = builder.problem.capture_grads
    exact = functools.cache(lambda: _exact_rows(builder, call, rows, cotangent))
    captures = call.operands.captures
    reads: dict[int, list[CaptureDerivative]] = {}
    for derivative in summed_derivatives(builder.variant.score):
        reads.setdefault(derivative.slot, []).append(derivative)
    grads: list[Tensor | None] = []
    for slot, capture in enumerate(captures):
        if not (slot < len(wanted) and wanted[slot]):
            grads.append(None)
            continue
        if known is not None and slot in known:
            grads.append(known[slot])
            continue
        slot_derivatives = reads.get(slot, [])
        if len(slot_derivatives) == 1 and _choose_way(slot_derivatives[0]).how == "tile":
            make = torch.empty_like if _is_covered(builder, call.operands, slot_derivatives[0], capture) else torch.zeros_like
            grads.append(_tile(builder, call, rows, slot_derivatives[0], make(capture, memory_format=torch.contiguous_format)))
            continue
        total = torch.zeros(capture.shape, dtype=torch.float32, device=capture.device)
        for derivative in slot_derivatives:
            how = _choose_way(derivative).how
            gather = {"tile": _tile, "scatter": _scatter}.get(how, _reduced)
            total += gather(builder, call, rows if how == "tile" else exact(), derivative, torch.zeros_like(total))
        grads.append(total.to(capture.dtype))
    return tuple(grads)


def _is_covered(builder: PassBuilder, o: Operands, derivative: CaptureDerivative, capture: Tensor) -> bool:
    """Whether the tiles write every element of a captured tensor's gradient, so that it need not be zeroed."""
    grid = _grid(o, builder.schedule("captures"))
    counts: dict[str | int | None, int] = {"b": grid.batch, "h": grid.heads, "q_idx": grid.lengths[0], "kv_idx": grid.lengths[1], None: 1}
    return all(counts.get(name) == n for name, n in zip(_choose_way(derivative).names, capture.shape, strict=True))


def _exact_rows(
    builder: PassBuilder, call: Pass, rows: tuple[Tensor, Tensor, Tensor], cotangent: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows with delta recomputed in float32: a sum over many positions would accumulate the rounding of a half-precision `out`."""
    dout, lse2, delta = rows
    if call.operands.cu_q is not None or not is_half(builder.problem.dtype):
        return rows
    # what flows into the weights is in the cotangent already
    alone = replace(call, numbers=call.numbers._replace(flow_columns=None, flow_weights=None))
    schedule = builder.schedule("captures")
    grid = _grid(call.operands, schedule)
    sums = torch.zeros((grid.batch, grid.heads, grid.tiles[0] * schedule.tile_q), dtype=torch.float32, device=delta.device)
    launch = _Launch(sums, (sums.stride(0), sums.stride(1), 1, 0), (1, 1), "rows")
    _launch(builder, alone, (dout, lse2, torch.zeros_like(delta)), None, launch)
    exact = sums[:, :, : grid.lengths[0]].contiguous()
    return dout, lse2, exact if cotangent is None else exact - cotangent


@functools.cache
def _unit_part() -> Any:
    return jit_function("part", "def part(score, b, h, q_idx, kv_idx, q_len, kv_len, env, entry):\n    return 1.0, 0\n")


@functools.lru_cache(maxsize=1024)
def _part(derivative: CaptureDerivative, layouts: tuple[TensorLayout, ...], *, half: bool, scatters: bool) -> Any:
    """Jit function of (weight, offset) of a read."""
    weight = cast_coordinates_early(derivative.weight)
    indices = derivative.indices if scatters else ()
    codegen = triton_codegen(layouts, half=half)
    extents = [emit((extent,), codegen).results[0] for _, extent in derivative.axes]
    counters = [
        f"r{level} = (entry // {' // '.join(extents[i + 1 :]) or 1}) % {extents[i]}" for i, (level, _) in enumerate(derivative.axes)
    ]
    emitted = emit((weight, *indices), codegen)
    layout = layouts[derivative.slot]
    offset = "0"
    for dim, text in enumerate(emitted.results[1:]):
        size = f"(env.sizes[{layout.first + dim}] >> 2)"
        offset = f"({offset}) * {size} + tl.cast(wrap(tl.cast({text}, tl.int32), {size}), tl.int64)"
    body = "\n".join(f"    {line}" for line in (*counters, *emitted.lines, f"return {emitted.results[0]}, {offset}"))
    return jit_function("part", f"def part(score, b, h, q_idx, kv_idx, q_len, kv_len, env, entry):\n{body}\n")


def count_entries(derivative: CaptureDerivative, captures: Sequence[Tensor]) -> tuple[int, ...] | None:
    """Number of entries of each reduction around a read, outermost first; None if it varies with position."""
    counts = []
    for _, extent in derivative.axes:
        if extent.op == "size" and isinstance(extent.value, tuple):
            counts.append(captures[int(str(extent.value[0]))].shape[int(str(extent.value[1]))])
        elif extent.op == "const" and isinstance(extent.value, int):
            counts.append(extent.value)
        else:
            return None
    return tuple(counts)


@dataclass(frozen=True)
class _Grid:
    """Batch entries (or sequences), heads, longest lengths and tiles."""

    batch: int
    heads: int
    lengths: tuple[int, int]
    tiles: tuple[int, int]


def _grid(o: Operands, schedule: Schedule) -> _Grid:
    is_jagged = o.cu_q is not None
    lengths = (o.max_q, o.max_kv) if is_jagged else (o.query.shape[2], o.key.shape[2])
    batch = o.cu_q.shape[0] - 1 if o.cu_q is not None else o.query.shape[0]
    return _Grid(batch, o.query.shape[1], lengths, (triton.cdiv(lengths[0], schedule.tile_q), triton.cdiv(lengths[1], schedule.tile_kv)))


@dataclass(frozen=True, eq=False)
class _Launch:
    """Output of a launch: a tensor with strides along b, h, q and kv, what a program sums over, and how."""

    out: Tensor
    strides: tuple[int, int, int, int]
    inner: tuple[int, int]
    how: str
    unit: Tensor | None = None
    entries: int = 1


def _launch(
    builder: PassBuilder, call: Pass, rows: tuple[Tensor, Tensor, Tensor], derivative: CaptureDerivative | None, launch: _Launch
) -> None:
    schedule = builder.schedule("captures")
    grid = _grid(call.operands, schedule)
    outer = (grid.batch // launch.inner[0], grid.heads // launch.inner[1])
    tiles = {"tile": grid.tiles[0] * grid.tiles[1], "columns": grid.tiles[1]}.get(launch.how, grid.tiles[0])
    programs = outer[0] * outer[1] * tiles
    if programs == 0:
        return
    part = _unit_part()
    if derivative is not None:
        part = _part(
            derivative, capture_layouts(call.operands.captures), half=is_half(builder.problem.dtype), scatters=launch.how == "scatter"
        )
    o, s = call.operands, call.sequences
    config = builder.config(call, schedule, TileTable(0, "captures", DENSE, ALL))
    spans = DENSE._replace(q_start=s.q_start, q_length=s.q_length, kv_start=s.kv_start, kv_length=s.kv_length)
    limits = tuple(min(n, most) for n, most in zip(grid.lengths, (2**29, 2**29), strict=True))
    b_step, h_step, q_step, kv_step = launch.strides
    is_contiguous = launch.how == "tile" and kv_step == 1 and q_step % 8 == 0
    steps = (b_step, h_step, q_step // 8 if is_contiguous else q_step, kv_step)
    queries = functools.partial(stream_operand, config, schedule.tile_q, call.rows)
    keys = functools.partial(stream_operand, config, schedule.tile_kv, call.columns)
    blocks, shape = _blocks(builder, call, schedule)
    args = CaptureArgs(
        *rows[1:], launch.out, launch.unit, blocks, shape, call.strides, builder.size(call, grid.heads, 1), spans,
        CaptureLoops(*map(encode, (*outer, *grid.tiles, *launch.inner, *limits, launch.entries))), Strides(*map(encode, steps)),
        call.numbers, call.environment,
    )  # fmt: skip
    gather = Gather(*map(tl.constexpr, (launch.how, is_contiguous, bool(derivative and derivative.axes))))
    call.launches.add(
        capture_gradient, (programs,),
        queries(o.query), keys(o.key), keys(o.value), queries(rows[0]), args, config, part, call.functions.mask, call.functions.both,
        gather, num_warps=schedule.warps, num_stages=1,
    )  # fmt: skip


def _blocks(builder: PassBuilder, call: Pass, schedule: Schedule) -> tuple[Tensor | None, BlockShape | None]:
    """Classes of the caller's block mask, and their layout."""
    blocks, size = call.operands.blocks, builder.problem.formula.block_size
    if blocks is None or size is None:
        return None, None
    blocks = blocks.contiguous()
    b_stride, h_stride = (0 if n == 1 else stride for n, stride in zip(blocks.shape[:2], blocks.stride()[:2], strict=True))
    shape = (b_stride, h_stride, blocks.shape[3], size[0] // schedule.tile_q, size[1] // schedule.tile_kv)
    return blocks, BlockShape(*map(encode, shape))


def _by_name(way: Way, tensor: Tensor) -> dict[str | int, int]:
    return {name: stride for name, stride in zip(way.names, tensor.stride(), strict=True) if name is not None}


def _tile(builder: PassBuilder, call: Pass, rows: tuple[Tensor, Tensor, Tensor], derivative: CaptureDerivative, out: Tensor) -> Tensor:
    way = _choose_way(derivative)
    strides = _by_name(way, out)
    grid = _grid(call.operands, builder.schedule("captures"))
    inner = (1 if "b" in strides else grid.batch, 1 if "h" in strides else grid.heads)
    steps = tuple(strides.get(name, 0) for name in ("b", "h", "q_idx", "kv_idx"))
    _launch(builder, call, rows, derivative, _Launch(out, (steps[0], steps[1], steps[2], steps[3]), inner, "tile"))
    return out


def _reduced(builder: PassBuilder, call: Pass, rows: tuple[Tensor, Tensor, Tensor], derivative: CaptureDerivative, out: Tensor) -> Tensor:
    """Sums of rows or columns for each batch entry and head, then over dimensions that do not index."""
    way = _choose_way(derivative)
    schedule = builder.schedule("captures")
    grid = _grid(call.operands, schedule)
    side = int(way.how == "columns")
    length = grid.tiles[side] * (schedule.tile_kv if side else schedule.tile_q)
    extents = _entries(derivative, call)
    sums = torch.zeros((grid.batch, grid.heads, length, *extents), dtype=torch.float32, device=out.device)
    strides = (grid.heads * length, length, 1, 0)
    _launch(builder, call, rows, derivative, _Launch(sums, strides, (1, 1), way.how, entries=math.prod(extents)))
    places = _PLACES | {level: 3 + i for i, (level, _) in enumerate(derivative.axes)}
    kept = [places[name] for name in way.names if name is not None]
    sums = sums[:, :, : grid.lengths[side]]
    gone = [dim for dim in range(sums.dim()) if dim not in kept]
    counts = (grid.batch, grid.heads, grid.lengths[side], *extents)
    reduced = sums.sum(gone) if gone else sums
    order = sorted(kept)
    reduced = reduced.permute([order.index(place) for place in kept])
    target = out[tuple(0 if name is None else slice(0, counts[places[name]]) for name in way.names)]
    target += reduced.reshape(target.shape)
    return out


def _entries(derivative: CaptureDerivative, call: Pass) -> tuple[int, ...]:
    counts = count_entries(derivative, call.operands.captures)
    assert counts is not None, "such a problem is declined"
    return counts


def _scatter(builder: PassBuilder, call: Pass, rows: tuple[Tensor, Tensor, Tensor], derivative: CaptureDerivative, out: Tensor) -> Tensor:
    """Contributions as integer multiples of a unit, so small that none is lost and so large that no sum overflows."""
    schedule = builder.schedule("captures")
    grid, entries = _grid(call.operands, schedule), math.prod(_entries(derivative, call))
    length = grid.tiles[0] * schedule.tile_q
    sizes = torch.zeros((grid.batch, grid.heads, length), dtype=torch.float32, device=out.device)
    _launch(builder, call, rows, derivative, _Launch(sizes, (sizes.stride(0), sizes.stride(1), 1, 0), (1, 1), "largest", entries=entries))
    largest = sizes.amax().double() if sizes.numel() else sizes.new_zeros((), dtype=torch.float64)
    count = max(1, grid.batch * grid.heads * grid.lengths[0] * grid.lengths[1] * entries)
    exponent = _BITS - math.ceil(math.log2(count + 1)) - torch.ceil(torch.log2(largest.clamp_min(1e-300)))
    units = torch.exp2(exponent.clamp(-900.0, 900.0)).reshape(1)
    int_sums = torch.zeros(out.shape, dtype=torch.int64, device=out.device)
    _launch(builder, call, rows, derivative, _Launch(int_sums, (0, 0, 0, 0), (1, 1), "scatter", units, entries))
    total = (int_sums.double() / units).float()
    return torch.where(torch.isfinite(largest), total, torch.nan)
