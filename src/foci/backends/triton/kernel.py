"""A plan made runnable: which kernels a forward and a backward launch, and with what."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.backends.contract import Plan
from foci.backends.triton.arguments import Config, Environment, Numbers, Size, Strides, encode, encode_strides, encode_word
from foci.backends.triton.backward import attention_key_gradient, attention_query_gradient, prepare_rows
from foci.backends.triton.capture_gradients import capture_gradients
from foci.backends.triton.decode import attention_decode, combine_splits
from foci.backends.triton.forward import attention_forward
from foci.backends.triton.functions import Functions, environment_numbers, functions_of, is_half, lies_of
from foci.backends.triton.schedules import Schedule, padded, schedule_for, tile_bytes
from foci.backends.triton.sparsity import ALL, DENSE, Sequences, Visits, sequences_of, visits_of
from foci.backends.triton.streams import is_aligned, streamed, takes_descriptor
from foci.dropout import threshold
from foci.problem import Cotangents, Gradients, Layout, Operands, Results, empty_out

__all__ = ["Kernel", "Pass", "TritonKernel"]


class Tensors(NamedTuple):
    """Strides of the tensors laid out as [B, H, S, D]; those that a kernel lacks repeat the query's."""

    q: Strides
    k: Strides
    v: Strides
    out: Strides
    dout: Strides
    dq: Strides
    dk: Strides
    dv: Strides


@dataclass(frozen=True, eq=False)
class Pass:
    """What every kernel of one call shares."""

    operands: Operands
    functions: Functions
    environment: Environment
    numbers: Numbers
    sequences: Sequences
    tensors: dict[str, Tensor]
    unit: int
    is_wide: bool
    is_plain: bool


class TritonKernel:
    """Forward and backward of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.problem = plan.problem
        self.variant = plan.problem.variant
        self.dims = (padded(self.problem.head_dim), padded(self.problem.value_dim))
        self.mask_slots = sorted({int(str(e.value)) for e in self.variant.mask.walk() if e.op == "load"})
        self.tile_bytes = tile_bytes(self.variant)
        self.reads_tiles = self.tile_bytes > 0
        formula = self.problem.formula
        self.is_dense = self.variant.mask.op == "const" and formula.block_size is None and formula.layout is Layout.DENSE
        self.is_half = is_half(self.problem.dtype)
        self.dense_spans, self.dense_table = DENSE, ALL
        self.schedules: dict[str, Schedule] = {}

    def schedule(self, kind: str) -> Schedule:
        """How a kernel is cut up. A caller's block mask limits tiles to what divides its blocks."""
        found = self.schedules.get(kind)
        if found is None:
            scratch = self.tile_bytes if self.reads_tiles else int(self.problem.formula.dropout)
            found = schedule_for(kind, self.plan.target.arch, self.dims, self.problem.dtype.itemsize, scratch=scratch)
            assert found is not None, "a plan is made only where a schedule exists"
            blocks = self.problem.formula.block_size
            if blocks is not None:
                tile_q, tile_kv = (math.gcd(tile, block) for tile, block in zip((found.tile_q, found.tile_kv), blocks, strict=True))
                found = Schedule(tile_q, tile_kv, found.warps, found.stages, found.descriptors, found.turned)
            self.schedules[kind] = found
        return found

    def forward(self, operands: Operands, /) -> Results:
        """Attention of the operands."""
        query, outputs = operands.query, self.problem.formula.outputs
        is_jagged = operands.cu_q is not None
        out = empty_out(query, operands.value)
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        row_max = torch.empty_like(lse) if outputs.row_max else None
        if is_jagged or operands.key.shape[2] == 0:
            out.zero_()
            lse.fill_(-math.inf)
            if row_max is not None:
                row_max.fill_(-math.inf)
        if out.numel() and operands.key.shape[2]:
            call = self.begin(operands, {"out": out})
            if self.is_decode(operands):
                self._decode(call, (out, lse, row_max))
                return Results(out, lse, row_max)
            schedule = self.schedule("forward" if self.is_dense or self.reads_tiles else "forward_sparse")
            visits = self.visits(call, schedule, "queries")
            config = self.config(call, schedule, visits)
            stream = functools.partial(streamed, config, schedule.tile_kv)
            attention_forward[(query.shape[0] * query.shape[1] * visits.tasks,)](
                query, stream(operands.key), stream(operands.value), out, lse, row_max,
                self.strides(call), self.size(call, query.shape[1], visits.tasks), visits.spans, visits.table,
                call.numbers, call.environment, config, call.functions.score, call.functions.mask, num_warps=schedule.warps,
            )  # fmt: skip
        return Results(out, lse, row_max)

    def is_decode(self, operands: Operands) -> bool:
        """Few rows for each group of heads, and many keys; one table of visits for the whole group."""
        (_, heads, length, _), (_, kv_heads, keys, _) = operands.query.shape, operands.key.shape
        if operands.cu_q is not None or operands.blocks is not None or "h" in self.variant.mask.variables():
            return False
        return length <= 16 and heads // kv_heads * length <= 64 and keys >= (32 if self.plan.target.arch == 0 else 1024)

    def _decode(self, call: Pass, outputs: tuple[Tensor, Tensor, Tensor | None]) -> None:
        query, key = call.operands.query, call.operands.key
        found = self.schedule("decode")
        rows = padded(query.shape[1] // key.shape[1] * query.shape[2])
        schedule = Schedule(rows, found.tile_kv, found.warps, found.stages, found.descriptors)
        visits = self.visits(call, schedule, "queries")
        config = self.config(call, schedule, visits)
        stream = functools.partial(streamed, config, schedule.tile_kv)
        groups, tiles = query.shape[0] * key.shape[1], triton.cdiv(key.shape[2], schedule.tile_kv)
        splits = max(1, min(_PROGRAMS // groups, tiles // 4)) if self.plan.target.arch else min(3, tiles)
        partial = query.new_empty((groups * splits, rows, self.dims[1]), dtype=torch.float32)
        most, total = (query.new_empty((groups * splits, rows), dtype=torch.float32) for _ in range(2))
        size, strides = self.size(call, query.shape[1], visits.tasks), self.strides(call)
        attention_decode[(groups * splits,)](
            query, stream(key), stream(call.operands.value), partial, most, total, strides, size, visits.table,
            call.numbers, call.environment, config, encode(splits), call.functions.score, call.functions.mask, num_warps=schedule.warps,
        )  # fmt: skip
        columns = min(32, self.dims[1])
        combine_splits[(query.shape[0] * query.shape[1] * query.shape[2], self.dims[1] // columns)](
            partial, most, total, *outputs, strides, size, call.numbers, config, encode(splits), 64, columns, num_warps=4
        )

    def backward(self, operands: Operands, results: Results, cotangents: Cotangents, /) -> Gradients:
        """Gradients of the operands."""
        p, query, key, value = self.problem, operands.query, operands.key, operands.value
        fresh = torch.zeros_like if operands.cu_q is not None or 0 in (query.numel(), key.numel(), value.numel()) else torch.empty_like
        wanted = (p.query_grad, p.key_grad, p.value_grad)
        dq, dk, dv = (
            fresh(t, memory_format=torch.contiguous_format) if on else None for t, on in zip((query, key, value), wanted, strict=True)
        )
        if query.numel() and value.numel() and p.needs_backward:
            dout = cotangents.out
            call = self.begin(
                operands, {"out": results.out, "dout": dout} | {n: t for n, t in (("dq", dq), ("dk", dk), ("dv", dv)) if t is not None}
            )
            rows = self._prepare(call, results, cotangents)
            if dq is not None:
                self._query_gradient(call, dout, rows, dq)
            for kind, grads in self._key_passes(dk, dv):
                self._key_gradient(call, kind, (dout, *rows), grads)
            if any(p.capture_grads):
                return Gradients(dq, dk, dv, capture_gradients(self, call, (dout, *rows), cotangents.lse))
        empty = tuple(torch.zeros_like(t) if on else None for t, on in zip(operands.captures, p.capture_grads, strict=False))
        return Gradients(dq, dk, dv, empty or tuple(None for _ in operands.captures))

    def _prepare(self, call: Pass, results: Results, cotangents: Cotangents) -> tuple[Tensor, Tensor]:
        lse2, delta = torch.empty_like(results.lse), torch.empty_like(results.lse)
        tile = 16 if self.plan.target.arch == 0 else 128 if self.dims[1] <= 128 else 32
        config = self.config(call, Schedule(tile, tile, 4, 1), None)
        batch, heads, length = results.lse.shape
        dlse = None if cotangents.lse is None else cotangents.lse.to(torch.float32).contiguous()
        prepare_rows[(batch * heads * triton.cdiv(length, tile),)](
            results.out,
            cotangents.out,
            results.lse.contiguous(),
            dlse,
            lse2,
            delta,
            self.strides(call),
            self.size(call, heads, 1),
            config,
            num_warps=4,
        )
        return lse2, delta

    def _query_gradient(self, call: Pass, dout: Tensor, rows: tuple[Tensor, Tensor], dq: Tensor) -> None:
        schedule, operands = self.schedule("query_gradient"), call.operands
        visits = self.visits(call, schedule, "queries")
        config = self.config(call, schedule, visits)
        stream = functools.partial(streamed, config, schedule.tile_kv)
        heads = operands.query.shape[1]
        attention_query_gradient[(operands.query.shape[0] * heads * visits.tasks,)](
            operands.query, stream(operands.key), stream(operands.value), dout, *rows, dq,
            self.strides(call), self.size(call, heads, visits.tasks), visits.spans, visits.table,
            call.numbers, call.environment, config, call.functions.both, call.functions.mask, num_warps=schedule.warps,
        )  # fmt: skip

    def _key_passes(self, dk: Tensor | None, dv: Tensor | None) -> tuple[tuple[str, tuple[Tensor | None, Tensor | None]], ...]:
        """dk and dv in one kernel, or in two where their accumulators would not fit the registers together."""
        together = self.plan.target.arch == 0 or max(self.dims) < 256
        name = "key_gradient" if self.variant.score.op == "var" and not self.problem.formula.dropout else "key_gradient_scored"
        if dk is not None and dv is not None and together:
            return ((name, (dk, dv)),)
        names = (name, name) if together else ("key_gradient_alone", "value_gradient_alone")
        return tuple(
            (name, (dk, None) if i == 0 else (None, dv)) for i, (name, t) in enumerate(zip(names, (dk, dv), strict=True)) if t is not None
        )

    def _key_gradient(self, call: Pass, kind: str, rows: tuple[Tensor, Tensor, Tensor], grads: tuple[Tensor | None, Tensor | None]) -> None:
        schedule, operands = self.schedule(kind), call.operands
        visits = self.visits(call, schedule, "keys")
        config = self.config(call, schedule, visits)
        stream = functools.partial(streamed, config, schedule.tile_q)
        heads = operands.key.shape[1]
        attention_key_gradient[(operands.key.shape[0] * heads * visits.tasks,)](
            stream(operands.query), operands.key, operands.value, stream(rows[0]), *rows[1:], *grads,
            self.strides(call), self.size(call, heads, visits.tasks), visits.spans, visits.table,
            call.numbers, call.environment, config, call.functions.both, call.functions.mask, num_warps=schedule.warps,
        )  # fmt: skip

    def begin(self, operands: Operands, extra: dict[str, Tensor]) -> Pass:
        """What the kernels of one call share."""
        tensors = {"q": operands.query, "k": operands.key, "v": operands.value} | extra
        unit = 8 if all(map(is_aligned, tensors.values())) else 1
        lies = lies_of(operands.captures)
        sizes, strides = environment_numbers(operands.captures, lies)
        p = operands.dropout_p
        return Pass(
            operands=operands,
            functions=functions_of(self.variant, lies, half=is_half(self.problem.dtype)),
            environment=Environment(
                tuple(map(encode, operands.ints)),
                operands.floats,
                operands.captures,
                tuple(map(encode, sizes)),
                tuple(map(encode, strides)),
            ),
            numbers=Numbers(abs(operands.scale), encode_word(threshold(p)), 0.0 if p >= 1 else 1 / (1 - p), operands.seed),
            sequences=sequences_of(operands),
            tensors=tensors,
            unit=unit,
            is_wide=any(stride * 512 >= 2**31 for t in tensors.values() for stride in t.stride()[2:]),
            is_plain=self.variant.score.op == "var" and abs(operands.scale) > 1e-30,
        )

    def config(self, call: Pass, schedule: Schedule, visits: Visits | None) -> Config:
        """The compile-time side of a launch."""
        p = self.problem
        streams = (
            (call.operands.key, call.operands.value) if schedule.tile_q >= schedule.tile_kv else (call.operands.query, call.operands.key)
        )
        descriptors = schedule.descriptors and call.unit == 8 and all(takes_descriptor(t) for t in (*streams, *call.tensors.values()))
        precision = "ieee" if self.plan.target.arch == 0 else "tf32x3"
        return _config(
            (
                schedule.tile_q, schedule.tile_kv, p.head_dim, self.dims[0], p.value_dim, self.dims[1], schedule.stages, schedule.turned,
                "all" if visits is None else visits.mode, call.operands.cu_q is not None, descriptors, call.unit, call.is_wide,
                call.is_plain, call.operands.scale < 0, self.reads_tiles, p.formula.dropout, p.formula.block_size is not None, precision,
            )
        )  # fmt: skip

    def strides(self, call: Pass) -> Tensors:
        """Strides of a call's tensors."""
        query = call.operands.query
        return Tensors(*(encode_strides(call.tensors.get(name, query), call.unit) for name in Tensors._fields))

    def visits(self, call: Pass, schedule: Schedule, side: str) -> Visits:
        """Which tiles each task of a kernel visits."""
        return visits_of(self, call, schedule, side)

    def size(self, call: Pass, heads: int, tasks: int) -> Size:
        """Counts for a kernel whose programs have `heads` heads and `tasks` tiles each."""
        query, key = call.operands.query, call.operands.key
        return Size(*map(encode, (query.shape[0], heads, query.shape[1] // key.shape[1], tasks, query.shape[2], key.shape[2])))


Kernel = TritonKernel
_PROGRAMS: Final = 1056
"""Programs a decode is split into: several for each multiprocessor, so that the last ones cost little."""


@functools.lru_cache(maxsize=4096)
def _config(values: tuple[Any, ...]) -> Config:
    return Config(*map(tl.constexpr, values))
