"""Schedules of the forward kernel, and the tables that choose one by head dim, mask, score and number of keys.

Names of schedules say how a program works, then what sets it apart:

    OVERLAP_2   two consumer warpgroups, each overlapping its softmax with its own products (C2 in `explain`)
    TURNS_3     three consumer warpgroups without such overlap: while one computes softmax, another multiplies (N3)
    TURNS_2     two of these, for short tasks (N2)
    PAIRED_2    two of these, and two programs on each SM (N2)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from foci.backends.causal import is_causal
from foci.backends.gpu.architectures import HOPPER
from foci.backends.gpu.schedules import padded_dim
from foci.backends.mask_intervals import find_bounds
from foci.backends.problem_class import MAX_MASK_BYTES, mask_bytes, score_kind, tile_bytes
from foci.ir.expr import const
from foci.problem import Layout, Operands, Problem

__all__ = [
    "OVERLAP_2",
    "OVERLAP_2_D192",
    "OVERLAP_2_D256",
    "OVERLAP_2_KV64",
    "OVERLAP_2_LISTS",
    "OVERLAP_2_LOOP",
    "PAIRED_2",
    "PAIRED_2_PACKED",
    "PAIRED_2_QUEUE",
    "PAIRED_2_SERPENTINE",
    "PAIRED_2_SORTED",
    "TURNS_2",
    "TURNS_2_SERPENTINE",
    "TURNS_3",
    "TURNS_3_BRIEF",
    "TURNS_3_LOOP",
    "TURNS_3_NAMED",
    "TURNS_3_QREG",
    "TURNS_3_QREG_SORTED",
    "TURNS_3_STATIC",
    "Schedule",
    "Sizes",
    "alternative_schedules",
    "dense_sizes",
    "describe_width",
    "forward_schedule",
    "padded_width",
    "width_pieces",
]


@dataclass(frozen=True)
class Schedule:
    """How the forward kernel divides its work."""

    name: str  # as `explain` prints it: C2, N3 or N2
    consumers: int  # warpgroups of 64 query rows each
    overlapped: bool  # each consumer overlaps its softmax with its products
    tile_kv: int  # keys of a tile
    stages: int  # tiles of keys, and of values, in flight
    why: str  # as `explain` prints it
    persistent: bool = False  # a program takes one task after another
    static: bool = False  # persistent program p takes tasks p, p + programs, ...; else the next free one, by an atomic counter
    single_loop: bool = False  # one loop for full and partial tiles: half the instructions, which fit the instruction cache
    named_barriers: bool = False  # consumer warps free K/V stages by named barriers (bar.arrive), not by one mbarrier arrival
    q_in_registers: bool = False  # queries stay in registers; needs narrow heads
    early_rounding: bool = True  # overlapped consumers round weights before they wait for the previous P V
    heads_together: int = 16  # heads whose tasks alternate
    longest_first: bool = False  # tasks of a mask's tile lists are sorted by their number of tiles, most first
    short_tasks_last: bool = False  # the shorter last task of each head comes after all others; packed tasks come by their work
    serpentine: bool = False  # static programs take every second wave in reverse, so that long and short tasks alternate
    registers: int = 240  # of a consumer's thread
    programs_per_sm: int = 1

    @property
    def tile_q(self) -> int:
        """Query rows of a program: 64 per consumer."""
        return 64 * self.consumers

    @property
    def max_registers(self) -> int | None:
        """Registers of a thread at launch where programs share an SM: 65536 over all threads, in steps of 8. The producer counts as a
        warpgroup. None leaves the number to the compiler."""
        return None if self.programs_per_sm == 1 else 65536 // (self.programs_per_sm * 128 * (self.consumers + 1)) // 8 * 8


_LOOP: Final = ", each program taking task after task"
_OVERLAP: Final = "two warpgroups that overlap products and softmax"
_PAIRED: Final = "two warpgroups in turn, 64 keys at a time, two programs to a multiprocessor" + _LOOP
OVERLAP_2: Final = Schedule("C2", 2, True, 128, 2, _OVERLAP + ", with registers for masks")
OVERLAP_2_LOOP: Final = Schedule("C2", 2, True, 128, 2, _OVERLAP + ", with registers for masks" + _LOOP, persistent=True)
OVERLAP_2_LISTS: Final = Schedule(
    "C2", 2, True, 128, 2, _OVERLAP + ", with registers for masks" + _LOOP,
    persistent=True, single_loop=True, named_barriers=True, early_rounding=False,
)  # fmt: skip
OVERLAP_2_KV64: Final = Schedule(
    "C2", 2, True, 64, 3, _OVERLAP + ", 64 keys at a time" + _LOOP,
    persistent=True, single_loop=True, named_barriers=True, early_rounding=False, heads_together=32,
)  # fmt: skip
OVERLAP_2_D256: Final = Schedule("C2", 2, True, 64, 2, _OVERLAP + ", 64 keys at a time for wide heads", named_barriers=True)
OVERLAP_2_D192: Final = Schedule("C2", 2, True, 64, 3, _OVERLAP + ", 64 keys at a time for wide heads")
TURNS_3: Final = Schedule("N3", 3, False, 128, 2, "three warpgroups in turn", registers=160)
TURNS_3_STATIC: Final = Schedule("N3", 3, False, 128, 2, "three warpgroups in turn" + _LOOP, persistent=True, static=True, registers=160)
TURNS_3_LOOP: Final = Schedule("N3", 3, False, 128, 2, "three warpgroups in turn" + _LOOP, persistent=True, registers=160)
TURNS_3_NAMED: Final = Schedule(
    "N3", 3, False, 128, 2, "three warpgroups in turn" + _LOOP, persistent=True, named_barriers=True, registers=160
)
TURNS_3_BRIEF: Final = Schedule(
    "N3", 3, False, 128, 2, "three warpgroups in turn" + _LOOP, persistent=True, single_loop=True, named_barriers=True, registers=160
)
TURNS_3_QREG: Final = Schedule(
    "N3", 3, False, 128, 3, "three warpgroups in turn" + _LOOP,
    persistent=True, single_loop=True, named_barriers=True, q_in_registers=True, short_tasks_last=True, registers=160,
)  # fmt: skip
TURNS_3_QREG_SORTED: Final = Schedule(
    "N3", 3, False, 128, 2, "three warpgroups in turn" + _LOOP,
    persistent=True, single_loop=True, named_barriers=True, q_in_registers=True, heads_together=32, longest_first=True,
    short_tasks_last=True, registers=160,
)  # fmt: skip
TURNS_2: Final = Schedule(
    "N2", 2, False, 128, 2, "two warpgroups in turn" + _LOOP, persistent=True, single_loop=True, named_barriers=True, heads_together=1
)
TURNS_2_SERPENTINE: Final = Schedule(
    "N2", 2, False, 128, 2, "two warpgroups in turn" + _LOOP,
    persistent=True, static=True, single_loop=True, named_barriers=True, heads_together=HOPPER.sms, serpentine=True,
)  # fmt: skip
PAIRED_2: Final = Schedule(
    "N2", 2, False, 64, 3, _PAIRED, persistent=True, static=True, single_loop=True, named_barriers=True, heads_together=64,
    short_tasks_last=True, registers=104, programs_per_sm=2,
)  # fmt: skip
PAIRED_2_PACKED: Final = Schedule(
    "N2", 2, False, 64, 3, _PAIRED, persistent=True, single_loop=True, named_barriers=True, short_tasks_last=True, registers=104,
    programs_per_sm=2,
)  # fmt: skip
# The next two are for masks that make a head's tasks unequal. As many heads alternate as programs run, so the tasks of a wave are equal.
PAIRED_2_QUEUE: Final = Schedule(
    "N2", 2, False, 64, 3, _PAIRED, persistent=True, single_loop=True, named_barriers=True, heads_together=2 * HOPPER.sms,
    registers=104, programs_per_sm=2,
)  # fmt: skip
PAIRED_2_SERPENTINE: Final = Schedule(
    "N2", 2, False, 64, 3, _PAIRED, persistent=True, static=True, single_loop=True, named_barriers=True,
    heads_together=2 * HOPPER.sms, serpentine=True, registers=104, programs_per_sm=2,
)  # fmt: skip
PAIRED_2_SORTED: Final = Schedule(
    "N2", 2, False, 64, 3, _PAIRED, persistent=True, single_loop=True, named_barriers=True, heads_together=HOPPER.sms,
    longest_first=True, registers=104, programs_per_sm=2,
)  # fmt: skip


@dataclass(frozen=True)
class Pace:
    """Time of one task without a mask, where every program has one: `start + key * keys` microseconds."""

    start: float
    key: float
    alone: float = 1.0  # factor for a task that has the SM to itself, where usually two programs share one
    max_waves: int = 1 << 62  # most waves for which these numbers hold; with more waves the schedule was measured to be slower
    static_waves: int = 6  # most waves up to which tasks are assigned statically


_PACES: Final[dict[str, dict[Schedule, Pace]]] = {
    # by family of head dims, see `_family`
    "slim": {TURNS_3_QREG: Pace(2.6, 0.0101), PAIRED_2: Pace(1.9, 0.0135, alone=0.65), OVERLAP_2_LOOP: Pace(1.1, 0.0079)},
    "narrow": {TURNS_3_QREG: Pace(2.6, 0.0101), PAIRED_2: Pace(2.1, 0.0150, alone=0.65), OVERLAP_2_LOOP: Pace(1.2, 0.0088)},
    "whole": {
        TURNS_3_NAMED: Pace(3.6, 0.0157),
        TURNS_2: Pace(2.1, 0.0121),
        OVERLAP_2_LOOP: Pace(3.1, 0.01025, max_waves=8, static_waves=8),
    },
    "pieces": {TURNS_3_LOOP: Pace(5.0, 0.0133, static_waves=0), TURNS_2_SERPENTINE: Pace(2.5, 0.0103)},
}
"""Fitted to the times of 82 dense problems without a mask, up to 16384 positions, on an H200 (`benchmarks/dense_sizes.py` times
such problems). All tasks are equal, so the time is the number of waves times the time of a task, and the lengths of a call decide which
schedule is fastest."""

_ANY: Final = 1 << 62
_StepsByKeys: TypeAlias = tuple[tuple[int, Schedule], ...]
Sizes: TypeAlias = tuple[int, int, int]
_DENSE: Final[dict[tuple[str, str], _StepsByKeys]] = {
    # (`_family` of head dims, `_problem_class`): the schedule up to this many keys
    ("narrow", "causal"): ((1024, PAIRED_2_SERPENTINE), (4096, PAIRED_2_QUEUE), (_ANY, TURNS_3_QREG)),
    ("narrow", "window"): ((_ANY, PAIRED_2_QUEUE),),
    ("narrow", "list"): ((2048, PAIRED_2_SORTED), (_ANY, TURNS_3_QREG_SORTED)),
    ("narrow", "score"): ((1024, PAIRED_2_SERPENTINE), (_ANY, PAIRED_2_QUEUE)),
    ("narrow", "score of a run"): ((_ANY, TURNS_3_STATIC),),
    ("narrow", "pair"): ((_ANY, TURNS_3),),
    ("whole", "causal"): ((1024, OVERLAP_2_KV64), (4096, OVERLAP_2_LOOP), (_ANY, TURNS_3)),
    ("whole", "window"): ((_ANY, OVERLAP_2_KV64),),
    ("whole", "list"): ((4096, OVERLAP_2_KV64), (_ANY, OVERLAP_2_LISTS)),
    ("whole", "score"): ((1024, OVERLAP_2_KV64), (4096, OVERLAP_2_LOOP), (_ANY, TURNS_3)),
    ("pieces", "causal"): ((2048, TURNS_2_SERPENTINE), (_ANY, TURNS_3_BRIEF)),
    ("pieces", "window"): ((2048, TURNS_2_SERPENTINE), (_ANY, OVERLAP_2_KV64)),
    ("pieces", "list"): ((2048, TURNS_2_SERPENTINE), (_ANY, OVERLAP_2_LISTS)),
    ("pieces", "score"): ((2048, TURNS_2_SERPENTINE), (_ANY, TURNS_3)),
}
_PACKED: Final[dict[tuple[str, str], _StepsByKeys]] = {
    ("narrow", "full"): ((2048, PAIRED_2_PACKED), (_ANY, TURNS_3_QREG)),
    ("narrow", "causal"): ((_ANY, PAIRED_2_PACKED),),
    ("narrow", "window"): ((_ANY, PAIRED_2_PACKED),),
    ("narrow", "list"): ((2048, PAIRED_2_PACKED), (_ANY, TURNS_3_QREG_SORTED)),
    ("narrow", "score"): ((_ANY, PAIRED_2_PACKED),),
    ("narrow", "score of a run"): ((_ANY, TURNS_3),),
    ("narrow", "pair"): ((_ANY, TURNS_3),),
    ("whole", "full"): ((_ANY, TURNS_3_BRIEF),),
    ("whole", "causal"): ((1024, OVERLAP_2_KV64), (_ANY, TURNS_3_BRIEF)),
    ("whole", "window"): ((_ANY, OVERLAP_2_KV64),),
    ("whole", "list"): ((_ANY, OVERLAP_2_LISTS),),
    ("whole", "score"): ((1024, OVERLAP_2_KV64), (_ANY, TURNS_3_BRIEF)),
    ("pieces", "full"): ((_ANY, TURNS_3_BRIEF),),
    ("pieces", "causal"): ((_ANY, TURNS_3_BRIEF),),
    ("pieces", "window"): ((_ANY, OVERLAP_2_LISTS),),
    ("pieces", "list"): ((_ANY, OVERLAP_2_LISTS),),
    ("pieces", "score"): ((_ANY, TURNS_3),),
}
"""Both tables were measured on an H200 (`benchmarks/hopper_attention.py` times their classes). They have as few steps as come near the best
schedule for each length, since each step compiles a kernel. Persistent programs gain where tasks are equal or short. They lose under a
causal mask over many keys with heads of 128, where the long tasks come first anyway. Packed tasks differ in length and often have a partial
tile, so they take a single loop. For packed sequences the longest counts, as far as the host knows it. A class without a row takes
OVERLAP_2."""

PIECES: Final = (80, 96, 160, 192)
"""Head dims that kernels process as the sum of two powers of two, without padding them to the next one."""


def padded_width(dim: int) -> int:
    """Pad a head dim as the forward does."""
    return min([padded_dim(dim), *(width for width in PIECES if width >= dim)])


def width_pieces(width: int) -> tuple[int, ...]:
    """Split a width into the powers of two that add up to it, largest first."""
    return tuple(1 << n for n in range(width.bit_length() - 1, -1, -1) if width >> n & 1)


def describe_width(name: str, dim: int, width: int) -> str:
    """Describe for `explain` how a head dim is padded and split; empty if it is a power of two already."""
    pieces = " + ".join(map(str, width_pieces(width)))
    if dim == width:
        return f"{name} = {dim} as {pieces}" if pieces != str(dim) else ""
    return f"{name} = {dim} padded to {width}" + (f" = {pieces}" if pieces != str(width) else "")


def _wide_key_schedule(problem: Problem, *, is_full: bool) -> Schedule:
    """Schedule of heads whose keys are wider than 128 and whose values are not. A persistent program has no room for a result tile of its
    own and writes it over its queries, and the next task's queries are loaded once that store is done. A task without keys loads
    no queries, so nothing would keep its result apart from the next task's queries: persistent programs need keys in every task."""
    has_keys = problem.formula.layout is Layout.DENSE and (is_full or is_causal(problem.variant))
    return OVERLAP_2_LOOP if has_keys and score_kind(problem) in ("full", "causal", "score") else OVERLAP_2


def _problem_class(problem: Problem) -> str:
    """Class of a problem in the tables above.

    Without a score function, by the keys that the mask keeps of a row: all ("full"), those up to a last one ("causal"), those between a
    first and a last one ("window"), or any ("list"). With a score function: "score" where a row keeps keys up to a last one at most, "pair"
    if it reads memory for each pair of positions, and "score of a run" under any other mask.
    """
    variant = problem.variant
    bounds = find_bounds(variant.mask)
    is_run = bounds is None or bounds.is_low
    if variant.score.op != "var":
        return "score of a run" if is_run else "pair" if tile_bytes(variant) else "score"
    if variant.mask == const(True):
        return "full"
    return "list" if bounds is None else "window" if is_run else "causal"


def _family(width: int) -> str:
    """Family of the wider padded head dim: up to 32, up to 64, exactly 128, or a sum of two powers of two up to 128."""
    return "slim" if width <= 32 else "narrow" if width <= 64 else "whole" if len(width_pieces(width)) == 1 else "pieces"


def _estimate_microseconds(schedule: Schedule, pace: Pace, heads: int, rows: int, keys: int) -> tuple[float, int]:
    """Estimate (microseconds, waves) of `heads` heads, batch entries included.

    A head's last query tile may be shorter, by whole warpgroups. All waves but one take the average time of a task, one the longest.
    """
    tiles, rows = -(-rows // schedule.tile_q), -(-rows // 64) * 64
    programs = schedule.programs_per_sm * HOPPER.sms
    waves = -(-heads * tiles // programs)
    last = heads * tiles - (waves - 1) * programs
    mean, longest = (pace.start + pace.key * keys * of / schedule.tile_q for of in (rows / tiles, min(rows, schedule.tile_q)))
    return (waves - 1) * mean + longest * (pace.alone if last <= HOPPER.sms else 1.0), waves


@functools.lru_cache(maxsize=4096)
def _fastest_schedule(family: str, heads: int, rows: int, keys: int) -> Schedule:
    """Fastest schedule of `heads` heads, batch entries included, without a mask. With few waves a ticket counter gains nothing and would
    have to be cleared, so tasks are assigned statically."""
    estimates = []
    for schedule, pace in _PACES[family].items():
        microseconds, waves = _estimate_microseconds(schedule, pace, heads, rows, keys)
        if waves <= pace.max_waves:
            estimates.append((microseconds, replace(schedule, static=schedule.static or waves <= pace.static_waves)))
    return min(estimates, key=lambda one: one[0])[1]


def dense_sizes(operands: Operands) -> Sizes | None:
    """(B, Sq, Skv) of dense operands, None of packed ones."""
    return None if operands.cu_q is not None else (operands.query.shape[0], operands.query.shape[2], operands.key.shape[2])


def alternative_schedules(problem: Problem) -> tuple[Schedule, ...]:
    """Schedules among which the lengths of a call decide: for dense problems without a mask or score function, else none."""
    formula, width = problem.formula, max(padded_width(problem.head_dim), padded_width(problem.value_dim))
    is_open = formula.block_size is None and not formula.dropout and formula.layout is Layout.DENSE and width <= 128
    return tuple(_PACES[_family(width)]) if is_open and _problem_class(problem) == "full" else ()


def forward_schedule(problem: Problem, sizes: Sizes | None = None) -> Schedule:
    """Choose the schedule of a problem.

    Dense problems without a mask or score function take the fastest one for `sizes`, (B, Sq, Skv); without sizes, for the problem's own,
    which are rounded to powers of two. Others take a row of the tables above; its last step where the mask bits of smaller tiles would not
    fit, since a tile takes the same memory whatever its number of keys.
    """
    formula, (width, value_width) = problem.formula, (padded_width(problem.head_dim), padded_width(problem.value_dim))
    family = _family(max(width, value_width))
    if alternative_schedules(problem):
        batch, rows, keys = sizes or (problem.batch, problem.q_len, problem.kv_len)
        return _fastest_schedule(family, batch * problem.q_heads, rows, keys)
    if width > 192 or value_width > 128:
        return OVERLAP_2_D256 if max(width, value_width) == 256 else OVERLAP_2_D192
    if formula.block_size is not None or formula.dropout:
        return OVERLAP_2
    problem_class, is_dense = _problem_class(problem), formula.layout is Layout.DENSE
    if width > 128:
        return _wide_key_schedule(problem, is_full=problem.variant.mask == const(True))
    steps = (_DENSE if is_dense else _PACKED).get((family.replace("slim", "narrow"), problem_class), ((_ANY, OVERLAP_2),))
    schedule = next(schedule for keys, schedule in steps if problem.kv_len <= keys)
    has_room = problem_class != "list" or not is_dense or mask_bytes(problem, schedule.tile_q, schedule.tile_kv) <= MAX_MASK_BYTES
    return schedule if has_room else steps[-1][1]
