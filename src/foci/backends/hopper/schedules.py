"""Which kernel takes which problem: warpgroups, tiles and stages, by padded head dims and what a score asks for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from foci.backends.causal import is_causal
from foci.backends.hopper.kinds import kind_of
from foci.backends.triton.bounds import bounds_of
from foci.backends.triton.schedules import padded, tile_bytes
from foci.ir.expr import const
from foci.problem import Layout, Problem

__all__ = [
    "ALIKE",
    "BRIEF",
    "C2",
    "EVEN",
    "HELD",
    "LISTED",
    "MIXED",
    "N3",
    "PIECED",
    "RUNS",
    "SHORT",
    "SLOPE",
    "STEADY",
    "TWIN",
    "WIDE",
    "WIDER",
    "Schedule",
    "forward_schedule",
    "in_words",
    "pieces_of",
    "width_of",
]


@dataclass(frozen=True)
class Schedule:
    """How a forward is cut up. `name` is C2, two consumers that overlap products with softmax, or N3 and N2, three and two that do not;
    `why` is what `explain` says of it. `persistent` programs take task after task, `strided` ones every so-manieth. `joined`: one loop for
    whole and partial tiles, half the instructions, which caches hold. `numbered`: warps free tiles of keys each by itself. `held`: queries
    stay in registers, where these suffice. `early`: overlapped consumers round weights before the values before them are waited for.
    `together`: heads whose tasks come in turn. `ordered`: the tasks of a mask's lists come by their length, longest first. `late`: without
    a mask, where a head's tasks are alike but for the last, which is shorter, those of all heads come last; packed tasks come by their
    work. `turning`: every second round of strided programs begins with the last of them, so that one that had a long
    task has a short one then. `registers`: of a consumer's thread. `programs`: how many run on a multiprocessor at a time."""

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


_NEXT: Final = ", each program taking task after task"
C2: Final = Schedule("C2", 2, True, 128, 2, "two warpgroups that overlap products and softmax, with registers for masks")
STEADY: Final = replace(C2, why=C2.why + _NEXT, persistent=True)
RUNS: Final = replace(STEADY, joined=True, numbered=True, early=False)
N3: Final = Schedule("N3", 3, False, 128, 2, "three warpgroups in turn", registers=160)
SHORT: Final = replace(N3, why=N3.why + _NEXT, persistent=True, strided=True)
PIECED: Final = replace(SHORT, strided=False)
ALIKE: Final = replace(PIECED, numbered=True)
BRIEF: Final = replace(ALIKE, joined=True)
HELD: Final = replace(BRIEF, held=True, late=True, stages=3)
EVEN: Final = replace(HELD, strided=True, together=64)
TWIN: Final = replace(
    EVEN, name="N2", consumers=2, tile_kv=64, held=False, registers=104, programs=2,
    why="two warpgroups in turn, 64 keys at a time, two programs to a multiprocessor" + _NEXT,
)  # fmt: skip
MIXED: Final = replace(TWIN, strided=False, together=16)
SLOPE: Final = replace(TWIN, late=False, turning=True, together=2 * 132)
"""Of tasks that differ by a mask: as many heads in turn as programs run, so that the tasks of a round are of one length."""
LISTED: Final = replace(HELD, ordered=True, together=32, stages=2)
WIDE: Final = Schedule(
    "C2", 2, True, 64, 2, "two warpgroups that overlap products and softmax, 64 keys at a time for wide heads", numbered=True
)
WIDER: Final = replace(WIDE, stages=3, numbered=False)

FEW_KEYS: Final = 4096
"""Up to which a causal mask's tasks are short."""
FEWEST_KEYS: Final = 512
"""Up to which two programs of heads of 64 share a multiprocessor: one begins and ends tasks beside the other's products. Over 1024 keys
that is no more than what smaller tiles cost."""
FEWER_KEYS: Final = 1024
"""Up to which tasks without a mask are so short that it pays to place each: to ask for one costs a launch, and the last round is long."""

PIECES: Final = (80, 96, 160, 192)
"""Head dims that are the sum of two powers of two, and taken as such."""


def width_of(dim: int) -> int:
    """What the forward pads a head dim to."""
    return min([padded(dim), *(width for width in PIECES if width >= dim)])


def pieces_of(width: int) -> tuple[int, ...]:
    """The powers of two whose sum a width is, from the largest."""
    return tuple(1 << n for n in range(width.bit_length() - 1, -1, -1) if width >> n & 1)


def in_words(name: str, dim: int, width: int) -> str:
    """What a head dim is padded to and taken as; nothing where that is a power of two as it is."""
    pieces = " + ".join(map(str, pieces_of(width)))
    if dim == width:
        return f"{name} = {dim} as {pieces}" if pieces != str(dim) else ""
    return f"{name} = {dim} padded to {width}" + (f" = {pieces}" if pieces != str(width) else "")


def _steady(problem: Problem, *, is_full: bool) -> Schedule:
    """Of heads whose keys are wider than 128 and whose values are not, which leave registers. A persistent program's result lies where
    its queries did, for want of room, and those of the next task come once it has left: so no task may be without keys."""
    has_keys = problem.formula.layout is Layout.DENSE and (is_full or is_causal(problem.variant))
    return STEADY if has_keys and kind_of(problem) in ("full", "causal", "score") else C2


def _even(problem: Problem) -> Schedule:
    """Of narrow heads without a mask or score. The longest packed sequence counts, as far as the host knows it."""
    is_dense = problem.formula.layout is Layout.DENSE
    if problem.kv_len <= FEWEST_KEYS:
        return TWIN if is_dense else MIXED
    return EVEN if is_dense and problem.kv_len <= FEWER_KEYS else HELD


def _from_first(problem: Problem) -> Schedule:
    """Of narrow heads without a score, where a mask lets a row's keys begin at 0."""
    if problem.kv_len > FEWEST_KEYS:
        return HELD
    return SLOPE if problem.formula.layout is Layout.DENSE else MIXED


def forward_schedule(problem: Problem) -> Schedule:
    """As measured on an H200: N3 for narrow heads, and where a row's keys begin at 0 and no more than arithmetic makes a score.

    Persistent programs gain where tasks are alike or short: not under a causal mask over many keys, whose long tasks come first anyway.
    Packed tasks are of any length, and often have a partial tile: one loop.
    """
    formula, (width, value_width) = problem.formula, (width_of(problem.head_dim), width_of(problem.value_dim))
    if width > 192 or value_width > 128:
        return WIDE if max(width, value_width) == 256 else WIDER
    if formula.block_size is not None or formula.dropout:
        return C2
    bounds = bounds_of(problem.variant.mask)
    is_plain, is_dense = problem.variant.score.op == "var", formula.layout is Layout.DENSE
    is_short, is_full = bounds is None or bounds.is_low, problem.variant.mask == const(True)
    if width > 128:
        return _steady(problem, is_full=is_full)
    width = max(width, value_width)
    if width <= 64:
        if is_plain and bounds is None:
            return LISTED
        if is_plain and is_full:
            return _even(problem)
        if is_plain:
            return HELD if is_short else _from_first(problem)
        return SHORT if is_short and is_dense else N3
    if is_short or tile_bytes(problem.variant):
        return RUNS if is_plain else C2
    if is_plain and not is_dense:
        return BRIEF
    is_whole = len(pieces_of(width)) == 1
    if is_plain and is_full:
        return ALIKE if is_whole else PIECED
    return BRIEF if is_plain and is_whole and problem.kv_len <= FEW_KEYS else N3
