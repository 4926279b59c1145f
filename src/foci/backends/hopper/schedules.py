"""Which kernel takes which problem: warpgroups, tiles and stages, by padded head dims and what a score asks for."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import torch

from foci.backends.causal import is_causal
from foci.backends.mask_intervals import find_bounds
from foci.backends.problem_class import WORDS_AT_MOST, score_kind, tile_bytes, word_bytes
from foci.backends.triton.schedules import MULTIPROCESSORS, padded_dim
from foci.ir.expr import const
from foci.problem import Layout, Operands, Problem

__all__ = [
    "ALIKE",
    "BRIEF",
    "C2",
    "DEFAULT_SMS",
    "FINE",
    "HELD",
    "LISTED",
    "MIXED",
    "N3",
    "PAIR",
    "PIECED",
    "QUEUED",
    "RANKED",
    "RUNS",
    "SHORT",
    "SLOPE",
    "STEADY",
    "TURNED",
    "TWIN",
    "WIDE",
    "WIDER",
    "Schedule",
    "Sizes",
    "alternative_schedules",
    "count_sms",
    "dense_sizes",
    "describe_width",
    "forward_schedule",
    "padded_width",
    "width_pieces",
]


@dataclass(frozen=True)
class Schedule:
    """How a forward is cut up. `name` is C2, two consumers that overlap products with softmax, or N3 and N2, three and two that do not;
    `why` is what `explain` says of it. `persistent` programs take task after task, `strided` ones every so-manieth. `joined`: one loop for
    whole and partial tiles, half the instructions, which caches hold. `numbered`: warps free tiles of keys each by itself. `held`: queries
    stay in registers, where these suffice. `early`: overlapped consumers round weights before the values before them are waited for.
    `together`: heads whose tasks come in turn. `ordered`: the tasks of a mask's lists come by their length, longest first. `late`: without
    a mask, where a head's tasks are alike but for the last, which is shorter, those of all heads come last; packed tasks come by their
    work. `turning`: every second round of strided programs begins with the last of them, so that one that had a long task has a short one
    then. `registers`: of a consumer's thread. `programs`: how many run on a multiprocessor at a time."""

    name: str
    consumers: int
    overlapped: bool
    tile_kv: int
    stages: int
    why: str
    persistent: bool = False
    strided: bool = False
    joined: bool = False
    numbered: bool = False
    held: bool = False
    early: bool = True
    together: int = 16
    ordered: bool = False
    late: bool = False
    turning: bool = False
    registers: int = 240
    programs: int = 1

    @property
    def tile_q(self) -> int:
        """Rows of a program: 64 to a consumer."""
        return 64 * self.consumers

    @property
    def most_registers(self) -> int | None:
        """With how many a thread begins where programs share a multiprocessor: its 65536 over their threads, in steps of 8. The producer
        counts as a warpgroup. None: as many as the compiler finds for one program."""
        return None if self.programs == 1 else 65536 // (self.programs * 128 * (self.consumers + 1)) // 8 * 8


DEFAULT_SMS: Final = MULTIPROCESSORS[90]
_NEXT: Final = ", each program taking task after task"
C2: Final = Schedule("C2", 2, True, 128, 2, "two warpgroups that overlap products and softmax, with registers for masks")
STEADY: Final = replace(C2, why=C2.why + _NEXT, persistent=True)
RUNS: Final = replace(STEADY, joined=True, numbered=True, early=False)
FINE: Final = replace(
    RUNS, tile_kv=64, stages=3, together=32, why="two warpgroups that overlap products and softmax, 64 keys at a time" + _NEXT,
)  # fmt: skip
N3: Final = Schedule("N3", 3, False, 128, 2, "three warpgroups in turn", registers=160)
SHORT: Final = replace(N3, why=N3.why + _NEXT, persistent=True, strided=True)
PIECED: Final = replace(SHORT, strided=False)
ALIKE: Final = replace(PIECED, numbered=True)
BRIEF: Final = replace(ALIKE, joined=True)
PAIR: Final = replace(BRIEF, name="N2", consumers=2, registers=240, together=1, why="two warpgroups in turn" + _NEXT)
HELD: Final = replace(BRIEF, held=True, late=True, stages=3)
LISTED: Final = replace(HELD, ordered=True, together=32, stages=2)
TWIN: Final = replace(
    HELD, name="N2", consumers=2, tile_kv=64, held=False, registers=104, programs=2, strided=True, together=64,
    why="two warpgroups in turn, 64 keys at a time, two programs to a multiprocessor" + _NEXT,
)  # fmt: skip
MIXED: Final = replace(TWIN, strided=False, together=16)
# tasks that differ by a mask: of as many heads in turn as programs run, so that the tasks of a round are of one length
QUEUED: Final = replace(TWIN, strided=False, late=False, together=2 * DEFAULT_SMS)
SLOPE: Final = replace(QUEUED, strided=True, turning=True)
TURNED: Final = replace(PAIR, strided=True, turning=True, together=DEFAULT_SMS)
RANKED: Final = replace(QUEUED, together=DEFAULT_SMS, ordered=True)
WIDE: Final = Schedule(
    "C2", 2, True, 64, 2, "two warpgroups that overlap products and softmax, 64 keys at a time for wide heads", numbered=True
)
WIDER: Final = replace(WIDE, stages=3, numbered=False)


@dataclass(frozen=True)
class Pace:
    """Microseconds of a whole tile of queries without a mask, where every program has one: `start`, and `key` for each key. `alone`: which
    part of them a task takes that has a multiprocessor to itself where two programs share one. `rounds`: how many tasks a program takes at
    most, where with more of them this schedule was slower than these numbers say; `placed`: up to how many they are placed beforehand."""

    start: float
    key: float
    alone: float = 1.0
    rounds: int = 1 << 62
    placed: int = 6


_PACES: Final[dict[str, dict[Schedule, Pace]]] = {
    # by family of heads, as below, and "slim" of up to 32
    "slim": {HELD: Pace(2.6, 0.0101), TWIN: Pace(1.9, 0.0135, alone=0.65), STEADY: Pace(1.1, 0.0079)},
    "narrow": {HELD: Pace(2.6, 0.0101), TWIN: Pace(2.1, 0.0150, alone=0.65), STEADY: Pace(1.2, 0.0088)},
    "whole": {ALIKE: Pace(3.6, 0.0157), PAIR: Pace(2.1, 0.0121), STEADY: Pace(3.1, 0.01025, rounds=8, placed=8)},
    "pieces": {PIECED: Pace(5.0, 0.0133, placed=0), TURNED: Pace(2.5, 0.0103)},
}
"""Of dense problems without a mask, fitted to the times of 82 of them, up to 16384 positions, on an H200. Their tasks are alike, so the
time is that of as many rounds as the programs need, and lengths decide which schedule needs least."""

_ANY: Final = 1 << 62
_Steps: TypeAlias = tuple[tuple[int, Schedule], ...]
Sizes: TypeAlias = tuple[int, int, int]
_DENSE: Final[dict[tuple[str, str], _Steps]] = {
    # (family of heads: narrow up to 64, whole of 128, in two pieces; what is asked of them): the schedule up to so many keys
    ("narrow", "causal"): ((1024, SLOPE), (4096, QUEUED), (_ANY, HELD)),
    ("narrow", "window"): ((_ANY, QUEUED),),
    ("narrow", "list"): ((2048, RANKED), (_ANY, LISTED)),
    ("narrow", "score"): ((1024, SLOPE), (_ANY, QUEUED)),
    ("narrow", "score of a run"): ((_ANY, SHORT),),
    ("narrow", "pair"): ((_ANY, N3),),
    ("whole", "causal"): ((1024, FINE), (4096, STEADY), (_ANY, N3)),
    ("whole", "window"): ((_ANY, FINE),),
    ("whole", "list"): ((4096, FINE), (_ANY, RUNS)),
    ("whole", "score"): ((1024, FINE), (4096, STEADY), (_ANY, N3)),
    ("pieces", "causal"): ((2048, TURNED), (_ANY, BRIEF)),
    ("pieces", "window"): ((2048, TURNED), (_ANY, FINE)),
    ("pieces", "list"): ((2048, TURNED), (_ANY, RUNS)),
    ("pieces", "score"): ((2048, TURNED), (_ANY, N3)),
}
_PACKED: Final[dict[tuple[str, str], _Steps]] = {
    ("narrow", "full"): ((2048, MIXED), (_ANY, HELD)),
    ("narrow", "causal"): ((_ANY, MIXED),),
    ("narrow", "window"): ((_ANY, MIXED),),
    ("narrow", "list"): ((2048, MIXED), (_ANY, LISTED)),
    ("narrow", "score"): ((_ANY, MIXED),),
    ("narrow", "score of a run"): ((_ANY, N3),),
    ("narrow", "pair"): ((_ANY, N3),),
    ("whole", "full"): ((_ANY, BRIEF),),
    ("whole", "causal"): ((1024, FINE), (_ANY, BRIEF)),
    ("whole", "window"): ((_ANY, FINE),),
    ("whole", "list"): ((_ANY, RUNS),),
    ("whole", "score"): ((1024, FINE), (_ANY, BRIEF)),
    ("pieces", "full"): ((_ANY, BRIEF),),
    ("pieces", "causal"): ((_ANY, BRIEF),),
    ("pieces", "window"): ((_ANY, RUNS),),
    ("pieces", "list"): ((_ANY, RUNS),),
    ("pieces", "score"): ((_ANY, N3),),
}
"""Both tables as measured on an H200, in as few steps as come near to what is best for each length, since each compiles a kernel. Programs
that take task after task gain where tasks are alike or short: not under a causal mask over many keys with heads of 128, whose long tasks
come first anyway. Packed tasks are of any length, and often have a partial tile: one loop. Of packed sequences the longest counts, as far
as the host knows it. What is missing takes C2."""

PIECES: Final = (80, 96, 160, 192)
"""Head dims that are the sum of two powers of two, and taken as such."""


def padded_width(dim: int) -> int:
    """What the forward pads a head dim to."""
    return min([padded_dim(dim), *(width for width in PIECES if width >= dim)])


def width_pieces(width: int) -> tuple[int, ...]:
    """The powers of two whose sum a width is, from the largest."""
    return tuple(1 << n for n in range(width.bit_length() - 1, -1, -1) if width >> n & 1)


@functools.lru_cache(maxsize=64)
def count_sms(device: torch.device) -> int:
    """Multiprocessors of a device; as an H200 has them where none is asked."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else DEFAULT_SMS


def describe_width(name: str, dim: int, width: int) -> str:
    """What a head dim is padded to and taken as; nothing where that is a power of two as it is."""
    pieces = " + ".join(map(str, width_pieces(width)))
    if dim == width:
        return f"{name} = {dim} as {pieces}" if pieces != str(dim) else ""
    return f"{name} = {dim} padded to {width}" + (f" = {pieces}" if pieces != str(width) else "")


def _steady(problem: Problem, *, is_full: bool) -> Schedule:
    """Of heads whose keys are wider than 128 and whose values are not, which leave registers. A persistent program's result lies where
    its queries did, for want of room, and those of the next task come once it has left: so no task may be without keys."""
    has_keys = problem.formula.layout is Layout.DENSE and (is_full or is_causal(problem.variant))
    return STEADY if has_keys and score_kind(problem) in ("full", "causal", "score") else C2


def _asked(problem: Problem) -> str:
    """What the tables above are read by. Without a score function, by what a mask keeps of a row: all keys ("full"), those up to one
    ("causal"), those from one to another ("window"), or any ("list"). With one it is "score" where keys are up to one at most, or "pair"
    if memory is read for each pair of positions, and "score of a run" under other masks, whatever is read."""
    variant = problem.variant
    bounds = find_bounds(variant.mask)
    is_run = bounds is None or bounds.is_low
    if variant.score.op != "var":
        return "score of a run" if is_run else "pair" if tile_bytes(variant) else "score"
    if variant.mask == const(True):
        return "full"
    return "list" if bounds is None else "window" if is_run else "causal"


def _family(width: int) -> str:
    """Of the wider head dim, padded, up to 128."""
    return "slim" if width <= 32 else "narrow" if width <= 64 else "whole" if len(width_pieces(width)) == 1 else "pieces"


def _microseconds(schedule: Schedule, pace: Pace, heads: int, rows: int, keys: int) -> tuple[float, int]:
    """(of so many heads, all batch entries together; rounds). A head's last tile of queries may be shorter, by whole warpgroups; all rounds
    but one are as long as tiles are on average, one as the longest."""
    tiles, rows = -(-rows // schedule.tile_q), -(-rows // 64) * 64
    programs = schedule.programs * DEFAULT_SMS
    rounds = -(-heads * tiles // programs)
    last = heads * tiles - (rounds - 1) * programs
    mean, longest = (pace.start + pace.key * keys * of / schedule.tile_q for of in (rows / tiles, min(rows, schedule.tile_q)))
    return (rounds - 1) * mean + longest * (pace.alone if last <= DEFAULT_SMS else 1.0), rounds


@functools.lru_cache(maxsize=4096)
def _soonest(family: str, heads: int, rows: int, keys: int) -> Schedule:
    """What takes least time for so many heads, all batch entries together, without a mask. In few rounds nothing is gained by asking for
    tasks, and what counts them need not be cleared."""
    found = []
    for schedule, pace in _PACES[family].items():
        microseconds, rounds = _microseconds(schedule, pace, heads, rows, keys)
        if rounds <= pace.rounds:
            found.append((microseconds, replace(schedule, strided=schedule.strided or rounds <= pace.placed)))
    return min(found, key=lambda one: one[0])[1]


def dense_sizes(operands: Operands) -> Sizes | None:
    """Of dense operands, as `forward_schedule` takes them."""
    return None if operands.cu_q is not None else (operands.query.shape[0], operands.query.shape[2], operands.key.shape[2])


def alternative_schedules(problem: Problem) -> tuple[Schedule, ...]:
    """Schedules between which the lengths at hand decide: of dense problems without a mask or a score. None where they do not."""
    formula, width = problem.formula, max(padded_width(problem.head_dim), padded_width(problem.value_dim))
    is_open = formula.block_size is None and not formula.dropout and formula.layout is Layout.DENSE and width <= 128
    return tuple(_PACES[_family(width)]) if is_open and _asked(problem) == "full" else ()


def forward_schedule(problem: Problem, sizes: Sizes | None = None) -> Schedule:
    """Of the tables above, by padded head dims, what is asked, and keys; the last step where words of a mask have no room in tiles of fewer
    keys, of which each takes as many words. Dense and without a mask: what takes least time for `sizes`, (B, Sq, Skv), or where these are
    not known for the powers of two that a problem has."""
    formula, (width, value_width) = problem.formula, (padded_width(problem.head_dim), padded_width(problem.value_dim))
    family = _family(max(width, value_width))
    if alternative_schedules(problem):
        batch, rows, keys = sizes or (problem.batch, problem.q_len, problem.kv_len)
        return _soonest(family, batch * problem.q_heads, rows, keys)
    if width > 192 or value_width > 128:
        return WIDE if max(width, value_width) == 256 else WIDER
    if formula.block_size is not None or formula.dropout:
        return C2
    asked, is_dense = _asked(problem), formula.layout is Layout.DENSE
    if width > 128:
        return _steady(problem, is_full=problem.variant.mask == const(True))
    steps = (_DENSE if is_dense else _PACKED).get((family.replace("slim", "narrow"), asked), ((_ANY, C2),))
    found = next(schedule for keys, schedule in steps if problem.kv_len <= keys)
    has_room = asked != "list" or not is_dense or word_bytes(problem, found.tile_q, found.tile_kv) <= WORDS_AT_MOST
    return found if has_room else steps[-1][1]
