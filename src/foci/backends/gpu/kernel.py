"""Host side of the kernels in Triton: which kernels a forward and a backward pass launch, with which arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.backends.contract import Given, Plan
from foci.backends.gpu.allocate import gradient_tensors, like_tensor, no_gradients, result_tensors, row_tensors
from foci.backends.gpu.aux_outputs import WeightCotangents, add_aux_outputs, add_weight_cotangents, weight_cotangents
from foci.backends.gpu.backward import attention_key_gradient, attention_query_gradient, prepare_rows
from foci.backends.gpu.captured_grad import bias_gradient, capture_gradients, find_query_tile_bias
from foci.backends.gpu.compiling import compile_in_parallel
from foci.backends.gpu.decode import Pages, attention_decode, combine_splits
from foci.backends.gpu.forward import attention_forward
from foci.backends.gpu.functions import KernelFunctions, build_functions, capture_layouts, environment_numbers, is_half
from foci.backends.gpu.kernel_args import Config, Environment, Numbers, Size, Strides, encode, encode_strides, encode_word
from foci.backends.gpu.launch_cache import KnownPasses, find_pass, keep_pass, source_of_places
from foci.backends.gpu.mask_convexity import begins_late, is_convex
from foci.backends.gpu.precompile_backward import precompile_backward
from foci.backends.gpu.recorder import Recorder
from foci.backends.gpu.schedules import (
    Schedule,
    fit_schedule,
    padded_dim,
    schedule_for,
    scratch_bytes,
    shared_bytes,
    split_kind,
    splits_for,
    takes_splits,
    vector_bytes,
)
from foci.backends.gpu.stream_state import current_stream
from foci.backends.gpu.symbolic_tokens import count_tokens
from foci.backends.gpu.tensor_descriptors import describe_layout, stream_operand, without_overlap
from foci.backends.gpu.tile_tables import ALL, DENSE, Sequences, TileTable, build_visits, operand_sequences
from foci.backends.mask_intervals import as_comparisons
from foci.backends.problem_class import find_pair_loads, tile_bytes
from foci.backends.row_gradients import add_row_gradients
from foci.compat.cuda import current_device
from foci.dropout import threshold
from foci.ir.derivative import score_derivative
from foci.problem import Cotangents, Gradients, Layout, Operands, Results

__all__ = ["Pass", "TritonKernel"]


class Tensors(NamedTuple):
    """Strides of tensors [B, H, S, D]; those of an absent tensor are the query's."""

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
    """Arguments that all kernels of a call share."""

    operands: Operands
    recorder: Recorder
    functions: KernelFunctions
    environment: Environment
    numbers: Numbers
    sequences: Sequences
    rows: int
    columns: int
    strides: Tensors
    unit: int
    is_wide: bool
    is_plain: bool
    takes_descriptors: bool

    @property
    def line(self) -> Any:
        """The function of an affine score, if it may be used: dividing by a tiny scale would overflow."""
        return self.functions.line if abs(self.operands.scale) > 1e-6 else None


class TritonKernel(KnownPasses):
    """Forward and backward of a plan."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.problem)
        self.plan = plan
        self.problem = plan.problem
        self.variant = plan.problem.variant
        self.dims = (padded_dim(self.problem.head_dim), padded_dim(self.problem.value_dim))
        self.tile_bytes = tile_bytes(self.variant)
        self.reads_tiles = self.tile_bytes > 0
        self.read = {"scratch": scratch_bytes(self.problem), "vectors": vector_bytes(self.variant)}
        formula = self.problem.formula
        self.is_dense = self.variant.mask.op == "const" and formula.block_size is None and formula.layout is Layout.DENSE
        self.takes_splits = takes_splits(formula)
        self.is_by_bounds = formula.block_size is None and as_comparisons(self.variant.mask, "kv_idx") is not None
        is_listed = formula.block_size is not None or not is_convex(self.variant.mask, "kv_idx")
        # a mask in memory takes little shared memory beside the streamed tiles, so two programs fit on an SM; a bias leaves room for one
        is_whole = self.is_dense or bool(find_pair_loads(self.variant.score))
        self.forward_kind = "forward" if is_whole else "forward_listed" if is_listed else "forward_sparse"
        # a derivative that varies over a tile takes registers; a row with few tiles has too little work for large ones
        is_sloped = score_derivative(self.variant.score).op != "const"
        is_short = is_listed or begins_late(self.variant.mask)
        self.query_kind = "query_gradient_sparse" if is_sloped or is_short else "query_gradient"
        self.key_kind = "key_gradient_scored" if is_sloped or self.reads_tiles else "key_gradient"
        self.key_kind = "key_gradient_dropped" if formula.dropout else self.key_kind
        self.is_half, self.dense_spans, self.dense_table = is_half(self.problem.dtype), DENSE, ALL
        self.schedules: dict[str, Schedule] = {}

    @property
    def can_precompile_backward(self) -> bool:
        """Whether `_backward` has no effects but through its recorder, as `precompile_backward` needs."""
        return True

    def schedule(self, kind: str) -> Schedule:
        """Schedule of a kernel. Under a block mask, tiles must divide its blocks."""
        found = self.schedules.get(kind)
        if found is None:
            found = schedule_for(kind, self.plan.target.arch, self.dims, self.problem.dtype.itemsize, **self.read)
            assert found is not None, "a plan is made only where a schedule exists"
            found = fit_schedule(found, self.problem.formula.block_size)
            self.schedules[kind] = found
        return found

    def forward(self, operands: Operands, /) -> Results:
        """Attention of the operands."""
        if is_elsewhere(operands.query):
            with torch.cuda.device(operands.query.device):
                return self.forward(operands)
        inputs = (operands.query, operands.key, operands.value, *operands.captures, operands.seed)
        sequences, asked = operand_sequences(operands), self.problem.formula.outputs
        if asked.column_sums or asked.weights:
            return add_aux_outputs(self, operands, sequences, self._forward(operands, sequences, Recorder(inputs, None)))
        key = self.pass_key(operands, inputs[:3], inputs[3:])
        tokens = count_tokens(operands)
        found = None if key is None else find_pass(key, sequences, tokens, operands.captures)
        if found is not None:
            self.know(operands, sequences, found)
            return Results(*found.run(inputs)[: self.results])
        recorder = Recorder(inputs, None if key is None else current_stream(operands.query))
        with compile_in_parallel():
            results = self._forward(operands, sequences, recorder)
            precompile_backward(self, operands, sequences, results)
        if key is not None and (template := recorder.template()) is not None:
            made = template.as_recorded(tokens)
            keep_pass(key, sequences, self.read_by_masks(operands), made)
            self.know(operands, sequences, made)
        return results

    def _forward(self, operands: Operands, sequences: Sequences, recorder: Recorder) -> Results:
        query = operands.query
        rows = query.shape[:3]
        outputs = result_tensors(recorder, operands, self.problem)
        out, lse, row_max = outputs
        if operands.key.shape[2] == 0:
            recorder.forget()
            out.zero_()
            for statistic in (lse, row_max):
                if statistic is not None:
                    statistic.fill_(-math.inf)
        elif out.numel():
            call = self.begin(operands, {"out": out}, sequences, recorder)
            if (kind := self.split_kind(operands)) is not None:
                self._decode(call, kind, outputs)
                return Results(*outputs)
            schedule = self.schedule(self.forward_kind)
            visits = self.visits(call, schedule, "queries")
            config = self.config(call, schedule, visits, is_bounded=self.is_by_bounds, line=call.line)
            stream = functools.partial(stream_operand, config, schedule.tile_kv, call.columns)
            recorder.launch(
                attention_forward, (rows[0] * rows[1] * visits.tasks,),
                query, stream(operands.key), stream(operands.value), out, lse, row_max,
                call.strides, self.size(call, rows[1], visits.tasks), visits.spans, visits.table,
                call.numbers, call.environment, config, call.line or call.functions.score, call.functions.by_query,
                num_warps=schedule.warps,
            )  # fmt: skip
        return Results(*outputs)

    def split_kind(self, operands: Operands) -> str | None:
        """The split-KV kernel of a call, "decode" or "split"; None if its keys are not split."""
        if not self.takes_splits:
            return None
        (batch, heads, length, _), (_, kv_heads, keys, _) = operands.query.shape, operands.key.shape
        return split_kind(batch, (heads, kv_heads), (length, keys), self.plan.target.arch)

    def _decode(self, call: Pass, kind: str, outputs: tuple[Tensor, Tensor, Tensor | None]) -> None:
        query, key = call.operands.query, call.operands.key
        schedule = self.rows_schedule(kind, query, key)
        visits = self.group_visits(call, schedule)
        config = self.config(call, schedule, visits)
        stream = functools.partial(stream_operand, config, schedule.tile_kv, call.columns)
        taken = shared_bytes(kind, schedule, self.dims, self.problem.dtype.itemsize, **self.read)
        tiles = query.shape[0] * key.shape[1] * row_tiles(schedule, query, key)
        # large tiles take up to all registers that a thread may have
        together = 8 // schedule.warps if kind == "split" else 16
        splits = splits_for(tiles, triton.cdiv(key.shape[2], schedule.tile_kv), self.plan.target.arch, taken, together)
        self.split(call, kind, schedule, visits, config, splits, (stream(key), stream(call.operands.value)), outputs, None)

    def rows_schedule(self, kind: str, query: Tensor, key: Tensor) -> Schedule:
        """Schedule of a split-KV kernel. A tile holds rows of a group of heads; a decode's holds all of them."""
        found = self.schedule(kind)
        return found if kind == "split" else replace(found, tile_q=padded_dim(query.shape[1] // key.shape[1] * query.shape[2]))

    def group_visits(self, call: Pass, schedule: Schedule) -> TileTable:
        """One tile table for all queries of a group of heads."""
        return self.visits(call, replace(schedule, tile_q=padded_dim(call.operands.query.shape[2])), "queries")

    def split(
        self, call: Pass, kind: str, schedule: Schedule, visits: TileTable, config: Config, splits: int, streams: tuple[Any, Any],
        outputs: tuple[Tensor, Tensor, Tensor | None], pages: Pages | None,
    ) -> None:  # fmt: skip
        """Launch split-KV attention and the kernel that combines the splits. `streams`: sources of keys and values."""
        query, key, rows, width = call.operands.query, call.operands.key, schedule.tile_q, self.dims[1]
        tiles = row_tiles(schedule, query, key)
        programs = query.shape[0] * key.shape[1] * tiles * splits
        partial = call.recorder.empty((programs, rows, width), (rows * width, width, 1), torch.float32, query)
        most, total = (call.recorder.empty((programs, rows), (rows, 1), torch.float32, query) for _ in range(2))
        size = self.size(call, query.shape[1], tiles)
        call.recorder.launch(
            attention_decode, (programs,),
            query, *streams, partial, most, total, call.strides, size, visits.table, call.numbers, call.environment, config,
            encode(splits), call.functions.score, call.functions.mask, kind == "split", pages, num_warps=schedule.warps,
        )  # fmt: skip
        # few rows of many splits, or many rows of few
        chunk, columns, warps = (64, min(32, width), 4) if kind == "decode" else (8, min(128, width), 2)
        call.recorder.launch(
            combine_splits, (query.shape[0] * query.shape[1] * query.shape[2], width // columns),
            partial, most, total, *outputs, call.strides, size, call.numbers, config, encode(splits), chunk, columns, num_warps=warps,
        )  # fmt: skip

    def backward(self, operands: Operands, results: Results, cotangents: Cotangents, /) -> Gradients:
        """Gradients of the operands."""
        if is_elsewhere(operands.query):
            with torch.cuda.device(operands.query.device):
                return self.backward(operands, results, cotangents)
        if 0 in (operands.query.numel(), operands.key.shape[2], operands.value.numel()):
            return no_gradients(operands, self.problem)
        sequences = operand_sequences(operands)
        grad_lse, flow = cotangents.lse, weight_cotangents(operands, cotangents, sequences)
        if flow is not None:
            cotangents = add_weight_cotangents(self, operands, sequences, results, cotangents, flow)
        dlse = None if cotangents.lse is None else cotangents.lse.to(torch.float32).contiguous()
        given = Given(results.out, results.lse.contiguous(), without_overlap(cotangents.out, results.out), dlse)
        inputs = (operands.query, operands.key, operands.value, *operands.captures, operands.seed, *given)
        # other gradients of captured tensors take torch operations between launches, which are not recorded
        learned = find_query_tile_bias(self, operands) if self.problem.capture_grads.count(True) == 1 else None
        is_noted = flow is None and (learned is not None or not self.learns)
        key = self.pass_key(operands, (*inputs[:3], *given), inputs[3:-4]) if is_noted else None
        tokens = count_tokens(operands)
        found = None if key is None else find_pass(key, sequences, tokens, operands.captures)
        if found is not None and learned is not None:
            made = found.run(inputs)
            captures = tuple(made[self.gradients] if slot == learned.slot else None for slot in range(len(operands.captures)))
            return self._gradients(operands, made, captures)
        if found is not None:
            self.know(operands, sequences, found, given)
            return self._gradients(operands, found.run(inputs))
        recorder = Recorder(inputs, None if key is None else current_stream(operands.query))
        with nullcontext() if self.learns else compile_in_parallel():
            made, captures = self._backward(operands, given, sequences, recorder, flow)
        if key is not None and (template := recorder.template()) is not None:
            noted = template.as_recorded(tokens)
            keep_pass(key, sequences, self.read_by_masks(operands), noted)
            if learned is None:
                self.know(operands, sequences, noted, given)
        return add_row_gradients(self._gradients(operands, made, captures), self.problem, operands, results.lse, grad_lse)

    def _gradients(self, operands: Operands, made: Sequence[Tensor], captures: tuple[Tensor | None, ...] = ()) -> Gradients:
        """`Gradients` from the tensors of a backward pass, which begin with the needed ones of dq, dk and dv."""
        rest = iter(made)
        dq, dk, dv = (next(rest) if on else None for on in self.wanted)
        return Gradients(dq, dk, dv, captures or (None,) * len(operands.captures))

    def _backward(
        self, operands: Operands, given: Given, sequences: Sequences, recorder: Recorder, flow: WeightCotangents | None
    ) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
        grads = gradient_tensors(recorder, operands, self.wanted)
        call = self.begin(operands, {"out": given.out, "dout": given.dout, **grads}, sequences, recorder)
        call = call if flow is None else replace(call, numbers=call.numbers._replace(**flow))
        learned = find_query_tile_bias(self, operands) if self.learns else None
        target = None if learned is None else like_tensor(recorder, operands.captures[learned.slot])
        rows = row_tensors(recorder, operands, given.lse, 2)
        dq, dk, dv = (grads.get(name) for name in ("dq", "dk", "dv"))
        known: dict[int, Tensor] = {}
        if dq is not None and learned is not None and target is not None:
            bias_gradient(self, call, given, (rows[0], rows[1]), dq, learned, target)
            known[learned.slot] = target
        elif dq is not None:
            self._query_gradient(call, given, (rows[0], rows[1]), dq)
        else:
            self._prepare(call, given, (rows[0], rows[1]))
        for kind, pair in self._key_passes(dk, dv):
            self._key_gradient(call, kind, (given.dout, rows[0], rows[1]), pair)
        if not self.learns:
            return list(grads.values()), ()
        return list(grads.values()), capture_gradients(self, call, (given.dout, rows[0], rows[1]), given.dlse, known)

    def _prepare(self, call: Pass, given: Given, rows: tuple[Tensor, Tensor]) -> None:
        """Launch the row statistics. The dq kernel computes them itself, so this is for a backward without dq."""
        tile = 16 if self.plan.target.arch == 0 else 128 if self.dims[1] <= 128 else 32
        config = self.config(call, Schedule(tile, tile, 4, 1), None)
        batch, heads, _ = given.lse.shape
        call.recorder.launch(
            prepare_rows, (batch * heads * ((call.rows + tile - 1) // tile),),
            given.out, given.dout, given.lse, given.dlse, *rows, call.strides, self.size(call, heads, 1), config, num_warps=4,
        )  # fmt: skip

    def _query_gradient(self, call: Pass, given: Given, rows: tuple[Tensor, Tensor], dq: Tensor) -> None:
        schedule, operands = self.schedule(self.query_kind), call.operands
        visits = self.visits(call, schedule, "queries")
        config = self.config(call, schedule, visits, is_bounded=self.is_by_bounds, line=call.line)
        stream = functools.partial(stream_operand, config, schedule.tile_kv, call.columns)
        heads = operands.query.shape[1]
        call.recorder.launch(
            attention_query_gradient, (operands.query.shape[0] * heads * visits.tasks,),
            operands.query, stream(operands.key), stream(operands.value), given.out, given.dout, given.lse, given.dlse, *rows, dq,
            call.strides, self.size(call, heads, visits.tasks), visits.spans, visits.table,
            call.numbers, call.environment, config, call.line or call.functions.both, call.functions.by_query, num_warps=schedule.warps,
        )  # fmt: skip

    def _key_passes(self, dk: Tensor | None, dv: Tensor | None) -> tuple[tuple[str, tuple[Tensor | None, Tensor | None]], ...]:
        """Kernels for dk and dv: one, or two if their accumulators do not fit into registers together."""
        together = self.plan.target.arch == 0 or max(self.dims) < 256
        if dk is not None and dv is not None and together:
            return ((self.key_kind, (dk, dv)),)
        names = (self.key_kind, self.key_kind) if together else ("key_gradient_alone", "value_gradient_alone")
        return tuple(
            (name, (dk, None) if i == 0 else (None, dv)) for i, (name, t) in enumerate(zip(names, (dk, dv), strict=True)) if t is not None
        )

    def _key_gradient(self, call: Pass, kind: str, rows: tuple[Tensor, Tensor, Tensor], grads: tuple[Tensor | None, Tensor | None]) -> None:
        schedule, operands = self.schedule(kind), call.operands
        visits = self.visits(call, schedule, "keys")
        config = self.config(call, schedule, visits, line=call.line)
        stream = functools.partial(stream_operand, config, schedule.tile_q, call.rows)
        heads = operands.key.shape[1]
        call.recorder.launch(
            attention_key_gradient, (operands.key.shape[0] * heads * visits.tasks,),
            stream(operands.query), operands.key, operands.value, stream(rows[0]), *rows[1:], *grads,
            call.strides, self.size(call, heads, visits.tasks), visits.spans, visits.table,
            call.numbers, call.environment, config, call.line or call.functions.both, call.functions.by_key, num_warps=schedule.warps,
        )  # fmt: skip

    def begin(self, operands: Operands, extra: dict[str, Tensor], sequences: Sequences, recorder: Recorder) -> Pass:
        """Build the arguments that the kernels of a call share. `extra`: tensors besides query, key and value whose strides are needed."""
        tensors = {"q": operands.query, "k": operands.key, "v": operands.value} | extra
        layouts = {name: describe_layout(t) for name, t in tensors.items()}
        unit = 8 if all(layout.is_aligned for layout in layouts.values()) else 1
        lies = capture_layouts(operands.captures)
        sizes, strides = environment_numbers(operands.captures, lies)
        p = operands.dropout_p
        encoded = {name: encode_strides(layout.strides, unit) for name, layout in layouts.items()}
        tokens = count_tokens(operands)
        recorder.keep(sequences.tensors, source_of_places)
        return Pass(
            operands=operands,
            recorder=recorder,
            functions=build_functions(self.variant, lies, half=is_half(self.problem.dtype)),
            environment=Environment(
                tuple(map(encode, operands.ints)),
                operands.floats,
                operands.captures,
                tuple(map(encode, sizes)),
                tuple(map(encode, strides)),
            ),
            numbers=Numbers(abs(operands.scale), encode_word(threshold(p)), 0.0 if p >= 1 else 1 / (1 - p), operands.seed),
            sequences=sequences,
            rows=tokens[0],
            columns=tokens[1],
            strides=Tensors(*(encoded.get(name, encoded["q"]) for name in Tensors._fields)),
            unit=unit,
            is_wide=any(layout.is_wide for layout in layouts.values()),
            is_plain=self.variant.score.op == "var" and abs(operands.scale) > 1e-30,
            takes_descriptors=all(layout.takes_descriptor for layout in layouts.values()),
        )

    def config(self, call: Pass, schedule: Schedule, visits: TileTable | None, *, is_bounded: bool = False, line: Any = None) -> Config:
        """Build the compile-time configuration of a launch. `is_bounded`: see `Config.BOUNDED`. `line`: the function of an affine score, or
        None."""
        p = self.problem
        descriptors = schedule.descriptors and call.takes_descriptors
        precision = "ieee" if self.plan.target.arch == 0 else "tf32x3"
        return _config(
            (
                schedule.tile_q, schedule.tile_kv, p.head_dim, self.dims[0], p.value_dim, self.dims[1], schedule.stages, schedule.turned,
                "all" if visits is None else visits.mode, call.operands.cu_q is not None, descriptors, call.unit, call.is_wide,
                call.is_plain or line is not None, line is not None, call.operands.scale < 0, self.reads_tiles, p.formula.dropout,
                p.formula.block_size is not None, is_bounded, precision,
            )
        )  # fmt: skip

    def visits(self, call: Pass, schedule: Schedule, side: str) -> TileTable:
        """Build, or find in the cache, the tile table of a kernel."""
        found = build_visits(self, call, schedule, side)
        call.recorder.keep(found.tensors, found.source)
        return found

    def size(self, call: Pass, heads: int, tasks: int) -> Size:
        """Encoded sizes for a kernel with `heads` heads and `tasks` tasks of a head."""
        query, key = call.operands.query, call.operands.key
        return Size(*map(encode, (query.shape[0], heads, query.shape[1] // key.shape[1], tasks, call.rows, call.columns)))


def row_tiles(schedule: Schedule, query: Tensor, key: Tensor) -> int:
    """Number of tiles of the rows of a group of heads."""
    return int(triton.cdiv(query.shape[1] // key.shape[1] * query.shape[2], schedule.tile_q))


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether the tensor is on another GPU than the current one, on which Triton launches."""
    return tensor.is_cuda and tensor.get_device() != current_device()


@functools.lru_cache(maxsize=4096)
def _config(values: tuple[Any, ...]) -> Config:
    return Config(*map(tl.constexpr, values))
