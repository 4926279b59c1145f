"""What the kernels of a pass share: schedules, compile-time configurations, tile tables and arguments."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import triton.language as tl
from torch import Tensor

from foci.backends.contract import Plan
from foci.backends.gpu.functions import KernelFunctions, build_functions, capture_layouts, environment_numbers, is_half
from foci.backends.gpu.kernel_args import CallArgs, Config, Environment, Numbers, Size, Tensors, encode, encode_strides, encode_word
from foci.backends.gpu.launch_builder import LaunchBuilder
from foci.backends.gpu.launch_cache import source_of_places
from foci.backends.gpu.schedules import Schedule, fit_schedule, padded_dim, schedule_for, scratch_bytes, vector_bytes
from foci.backends.gpu.symbolic_tokens import count_tokens
from foci.backends.gpu.tensor_descriptors import describe_layout
from foci.backends.gpu.tile_tables import Sequences, TileTable, build_visits
from foci.backends.mask_intervals import as_comparisons
from foci.backends.problem_class import may_exclude, tile_bytes
from foci.dropout import threshold
from foci.ir.expr import const
from foci.problem import Layout, Operands

__all__ = ["Pass", "PassBuilder", "without_mask"]


@dataclass(frozen=True, eq=False)
class Pass:
    """Arguments that all kernels of a call share."""

    operands: Operands
    launches: LaunchBuilder
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


class PassBuilder:
    """The facts of a plan that every pass uses. It knows no kernel: `portable_passes` and the passes of other backends launch them."""

    def __init__(self, plan: Plan) -> None:
        problem, formula = plan.problem, plan.problem.formula
        self.plan = plan
        self.problem = problem
        self.variant = problem.variant
        self.dims = (padded_dim(problem.head_dim), padded_dim(problem.value_dim))
        self.reads_tiles = tile_bytes(self.variant) > 0
        self.read = {"scratch": scratch_bytes(problem), "vectors": vector_bytes(self.variant)}
        self.is_dense = self.variant.mask.op == "const" and formula.block_size is None and formula.layout is Layout.DENSE
        self.is_by_bounds = formula.block_size is None and as_comparisons(self.variant.mask, "kv_idx") is not None
        self.mask_slots = sorted({int(str(e.value)) for e in self.variant.mask.walk() if e.op == "load"})
        self.wanted = (problem.query_grad, problem.key_grad, problem.value_grad)
        self.needs_capture_grads = any(problem.capture_grads)
        self.excludes = may_exclude(self.variant, formula.block_size)
        self.schedules: dict[str, Schedule] = {}

    def schedule(self, kind: str) -> Schedule:
        """Schedule of a kernel. Under a block mask, tiles must divide its blocks."""
        schedule = self.schedules.get(kind)
        if schedule is None:
            schedule = schedule_for(kind, self.plan.target.arch, self.dims, self.problem.dtype.itemsize, **self.read)
            assert schedule is not None, "a plan is made only where a schedule exists"
            schedule = fit_schedule(schedule, self.problem.formula.block_size)
            self.schedules[kind] = schedule
        return schedule

    def read_by_masks(self, operands: Operands) -> tuple[Tensor, ...]:
        """The tensors whose values decide which tiles are scheduled."""
        read = tuple(operands.captures[slot] for slot in self.mask_slots)
        return read if operands.blocks is None else (*read, operands.blocks)

    def begin(self, operands: Operands, extra: dict[str, Tensor], sequences: Sequences, launches: LaunchBuilder) -> Pass:
        """Build the arguments that the kernels of a call share. `extra`: tensors besides query, key and value whose strides are needed."""
        tensors = {"q": operands.query, "k": operands.key, "v": operands.value} | extra
        layouts = {name: describe_layout(t) for name, t in tensors.items()}
        unit = 8 if all(layout.is_aligned for layout in layouts.values()) else 1
        lies = capture_layouts(operands.captures)
        sizes, strides = environment_numbers(operands.captures, lies)
        p = operands.dropout_p
        encoded = {name: encode_strides(layout.strides, unit) for name, layout in layouts.items()}
        tokens = count_tokens(operands)
        launches.keep(sequences.tensors, source_of_places)
        return Pass(
            operands=operands,
            launches=launches,
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

    def config(
        self, call: Pass, schedule: Schedule, visits: TileTable | None, *,
        is_bounded: bool = False, line: Any = None, excludes: bool = False, mode: str | None = None,
    ) -> Config:  # fmt: skip
        """Build the compile-time configuration of a launch. `is_bounded`, `excludes`: see `Config`. `line`: an affine score's function, or
        None. `mode`: in place of that of `visits`."""
        p = self.problem
        descriptors = schedule.descriptors and call.takes_descriptors
        precision = "ieee" if self.plan.target.arch == 0 else "tf32x3"
        return _as_constants(
            Config(
                TILE_Q=schedule.tile_q, TILE_KV=schedule.tile_kv, D=p.head_dim, D_PAD=self.dims[0], DV=p.value_dim, DV_PAD=self.dims[1],
                STAGES=schedule.stages, TURNED=schedule.turned, MODE=mode or ("all" if visits is None else visits.mode),
                JAGGED=call.operands.cu_q is not None, DESCRIPTORS=descriptors, UNIT=call.unit, WIDE=call.is_wide,
                PLAIN=call.is_plain or line is not None, AFFINE=line is not None, NEGATIVE=call.operands.scale < 0,
                SPLIT_EDGE=self.reads_tiles, DROPOUT=p.formula.dropout, BLOCKS=p.formula.block_size is not None, BOUNDED=is_bounded,
                PRECISION=precision, EXCLUDES=excludes,
            )
        )  # fmt: skip

    def visits(self, call: Pass, schedule: Schedule, side: str) -> TileTable:
        """Build, or find in the cache, the tile table of a kernel."""
        table = build_visits(self, call, schedule, side)
        call.launches.keep(table.tensors, table.source)
        return table

    def size(self, call: Pass, heads: int, tasks: int) -> Size:
        """Encoded sizes for a kernel with `heads` heads and `tasks` tasks of a head."""
        query, key = call.operands.query, call.operands.key
        return Size(*map(encode, (query.shape[0], heads, query.shape[1] // key.shape[1], tasks, call.rows, call.columns)))

    def args(self, call: Pass, heads: int, visits: TileTable) -> CallArgs:
        """Arguments of a kernel with `heads` heads and these tasks."""
        size = self.size(call, heads, visits.tasks)
        return CallArgs(call.strides, size, visits.spans, visits.table, call.numbers, call.environment)


@functools.lru_cache(maxsize=4096)
def _as_constants(config: Config) -> Config:
    return Config(*map(tl.constexpr, config))


def without_mask(plan: Plan) -> Plan:
    """Return the plan where every query attends to every key."""
    formula = plan.problem.formula
    everything = replace(formula, variant=replace(formula.variant, mask=const(True)), block_size=None)
    return replace(plan, problem=replace(plan.problem, formula=everything))
