"""Schedules of the forward kernel, and which one a problem takes, by head dim, mask, score and number of keys: `forward.toml` has both."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from foci.backends.causal import is_causal
from foci.backends.data_tables import load_table
from foci.backends.gpu.architectures import HOPPER
from foci.backends.gpu.schedules import padded_dim
from foci.backends.hopper.widths import width_pieces
from foci.backends.mask_intervals import find_bounds
from foci.backends.problem_class import MAX_MASK_BYTES, mask_bytes, score_kind, tile_bytes
from foci.ir.expr import const
from foci.problem import Layout, Operands, Problem

__all__ = [
    "PACES",
    "SCHEDULES",
    "Pace",
    "Schedule",
    "Sizes",
    "alternative_schedules",
    "dense_sizes",
    "describe_width",
    "family_of_width",
    "forward_schedule",
    "pace_weights",
    "padded_width",
    "schedules_of_lengths",
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


def _read_schedule(fields: dict[str, Any]) -> Schedule:
    """A schedule of the file, which may count `heads_together` per SM."""
    together = fields.get("heads_together")
    return Schedule(**fields | ({"heads_together": together["per_sm"] * HOPPER.sms} if isinstance(together, dict) else {}))


_TABLE: Final = load_table(__file__, "forward.toml")
SCHEDULES: Final = {name: _read_schedule(fields) for name, fields in _TABLE["schedules"].items()}
"""Every schedule by its name in `forward.toml`."""
_OVERLAP_2, _OVERLAP_2_LOOP = SCHEDULES["OVERLAP_2"], SCHEDULES["OVERLAP_2_LOOP"]


@dataclass(frozen=True)
class Pace:
    """Time of one task without a mask, where every program has one: `start + key * keys` microseconds."""

    start: float
    key: float
    alone: float = 1.0  # factor for a task that has the SM to itself, where usually two programs share one
    max_waves: int = 1 << 62  # most waves for which these numbers hold; with more waves the schedule was measured to be slower
    static_waves: int = 6  # most waves up to which tasks are assigned statically


PACES: Final = {family: {SCHEDULES[name]: Pace(**fields) for name, fields in rows.items()} for family, rows in _TABLE["paces"].items()}
"""By family of head dims, see `family_of_width`."""

_ANY: Final = 1 << 62
_LENGTHS: Final = (64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384, 32768)
_BATCHES: Final = (1, 2, 8, 64)
_MAX_TOKENS: Final = 1 << 18
"""Lengths, batch sizes and most tokens of calls whose schedules a first call compiles (`schedules_of_lengths`)."""
_StepsByKeys: TypeAlias = tuple[tuple[int, Schedule], ...]
Sizes: TypeAlias = tuple[int, int, int]


def _read_steps(families: dict[str, Any]) -> dict[tuple[str, str], _StepsByKeys]:
    """{(`family_of_width` of head dims, `_problem_class`): the schedule up to so many keys}."""
    return {
        (family, problem_class): tuple((*keys, _ANY)[:1] + (SCHEDULES[name],) for name, *keys in steps)
        for family, classes in families.items()
        for problem_class, steps in classes.items()
    }


_DENSE: Final = _read_steps(_TABLE["dense"])
_PACKED: Final = _read_steps(_TABLE["packed"])

PIECES: Final = (80, 96, 160, 192)
"""Head dims that kernels process as the sum of two powers of two, without padding them to the next one."""


def padded_width(dim: int) -> int:
    """Pad a head dim as the forward does."""
    return min([padded_dim(dim), *(width for width in PIECES if width >= dim)])


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
    return _OVERLAP_2_LOOP if has_keys and score_kind(problem) in ("full", "causal", "score") else _OVERLAP_2


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


def family_of_width(width: int) -> str:
    """Family of the wider padded head dim: up to 32, up to 64, exactly 128, or a sum of two powers of two up to 128."""
    return "slim" if width <= 32 else "narrow" if width <= 64 else "whole" if len(width_pieces(width)) == 1 else "pieces"


def pace_weights(schedule: Schedule, alone: float, heads: int, rows: int, keys: int) -> tuple[float, float, int]:
    """Return (a, b, waves), by which `heads` heads, batch entries included, take a * `Pace.start` + b * `Pace.key` microseconds.

    A head's last query tile may be shorter, by whole warpgroups. All waves but one take the average time of a task, one the longest.
    """
    tiles, rows = -(-rows // schedule.tile_q), -(-rows // 64) * 64
    programs = schedule.programs_per_sm * HOPPER.sms
    waves = -(-heads * tiles // programs)
    last = heads * tiles - (waves - 1) * programs
    last_weight = alone if last <= HOPPER.sms else 1.0
    mean, longest = rows / tiles / schedule.tile_q, min(rows, schedule.tile_q) / schedule.tile_q
    return waves - 1 + last_weight, keys * ((waves - 1) * mean + last_weight * longest), waves


@functools.lru_cache(maxsize=4096)
def _fastest_schedule(family: str, heads: int, rows: int, keys: int) -> Schedule:
    """Fastest schedule of `heads` heads, batch entries included, without a mask. With few waves a ticket counter gains nothing and would
    have to be cleared, so tasks are assigned statically."""
    estimates = []
    for schedule, pace in PACES[family].items():
        starts, key_count, waves = pace_weights(schedule, pace.alone, heads, rows, keys)
        if waves <= pace.max_waves:
            microseconds = starts * pace.start + key_count * pace.key
            estimates.append((microseconds, replace(schedule, static=schedule.static or waves <= pace.static_waves)))
    return min(estimates, key=lambda one: one[0])[1]


def dense_sizes(operands: Operands) -> Sizes | None:
    """(B, Sq, Skv) of dense operands, None of packed ones."""
    return None if operands.cu_q is not None else (operands.query.shape[0], operands.query.shape[2], operands.key.shape[2])


def alternative_schedules(problem: Problem) -> tuple[Schedule, ...]:
    """Schedules among which the lengths of a call decide: for dense problems without a mask or score function, else none."""
    formula, width = problem.formula, max(padded_width(problem.head_dim), padded_width(problem.value_dim))
    is_open = formula.block_size is None and not formula.dropout and formula.layout is Layout.DENSE and width <= 128
    return tuple(PACES[family_of_width(width)]) if is_open and _problem_class(problem) == "full" else ()


def schedules_of_lengths(problem: Problem) -> tuple[Schedule, ...]:
    """Schedules that `forward_schedule` chooses for a problem with as many keys as queries, of some lengths and batch sizes."""
    if not alternative_schedules(problem):
        return tuple(dict.fromkeys(forward_schedule(replace(problem, q_len=length, kv_len=length)) for length in _LENGTHS))
    sizes = ((batch, length, length) for batch in _BATCHES for length in _LENGTHS if batch * length <= _MAX_TOKENS)
    return tuple(dict.fromkeys(forward_schedule(problem, each) for each in sizes))


def forward_schedule(problem: Problem, sizes: Sizes | None = None) -> Schedule:
    """Choose the schedule of a problem.

    Dense problems without a mask or score function take the fastest one for `sizes`, (B, Sq, Skv); without sizes, for the problem's own,
    which are rounded to powers of two. Others take a row of the tables above; its last step where the mask bits of smaller tiles would not
    fit, since a tile takes the same memory whatever its number of keys.
    """
    formula, (width, value_width) = problem.formula, (padded_width(problem.head_dim), padded_width(problem.value_dim))
    family = family_of_width(max(width, value_width))
    if alternative_schedules(problem):
        batch, rows, keys = sizes or (problem.batch, problem.q_len, problem.kv_len)
        return _fastest_schedule(family, batch * problem.q_heads, rows, keys)
    if width > 192 or value_width > 128:
        return SCHEDULES["OVERLAP_2_D256" if max(width, value_width) == 256 else "OVERLAP_2_D192"]
    if formula.block_size is not None or formula.dropout:
        return _OVERLAP_2
    problem_class, is_dense = _problem_class(problem), formula.layout is Layout.DENSE
    if width > 128:
        return _wide_key_schedule(problem, is_full=problem.variant.mask == const(True))
    steps = (_DENSE if is_dense else _PACKED).get((family.replace("slim", "narrow"), problem_class), ((_ANY, _OVERLAP_2),))
    schedule = next(schedule for keys, schedule in steps if problem.kv_len <= keys)
    has_room = problem_class != "list" or not is_dense or mask_bytes(problem, schedule.tile_q, schedule.tile_kv) <= MAX_MASK_BYTES
    return schedule if has_room else steps[-1][1]
