"""What is fast where: rates of this backend's kernels and of the backend `triton`'s, by which the planner chooses between them.

Measured on an H200, bfloat16, 8192 positions, in several runs; `benchmarks/hopper_attention.py` measures them anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from foci.backends.causal import is_causal
from foci.backends.hopper.backward_schedules import few_schedule, few_shares, fused_schedule
from foci.backends.hopper.schedules import DEFAULT_SMS
from foci.backends.problem_class import score_kind
from foci.backends.triton.schedules import busy_fraction, padded_dim
from foci.problem import Layout, Problem

__all__ = ["MEASURED", "Backward", "Measured", "Pair", "Rates", "estimate_rates"]


@dataclass(frozen=True)
class Pair:
    """TFLOP/s over the attended area by the kernels of `hopper` and of `triton`."""

    hopper: float
    triton: float

    @property
    def best(self) -> float:
        """The higher of both."""
        return max(self.hopper, self.triton)

    @property
    def is_ahead(self) -> bool:
        """Whether `hopper` is as fast, or faster."""
        return self.hopper >= self.triton


@dataclass(frozen=True)
class Backward:
    """TFLOP/s of one kernel for all gradients, of several, and of those of `triton`."""

    fused: float
    apart: float
    triton: float


@dataclass(frozen=True)
class Measured:
    """Of a kind of problem, both passes."""

    forward: Pair
    backward: Backward


@dataclass(frozen=True)
class Rates:
    """Of a problem, both passes. `busy`: which part of the multiprocessors `triton`'s backward has work for, by which its rate is less."""

    forward: Pair
    backward: Pair
    busy: float


MEASURED: Final[dict[tuple[int, str], Measured]] = {
    # (the wider head dim, padded to a width of this table; kind)
    (64, "full"): Measured(Pair(489, 450), Backward(550, 445, 401)),
    (64, "causal"): Measured(Pair(473, 428), Backward(494, 426, 390)),
    (64, "window"): Measured(Pair(390, 352), Backward(334, 285, 327)),
    (64, "document"): Measured(Pair(366, 350), Backward(325, 290, 312)),
    (64, "added"): Measured(Pair(456, 381), Backward(460, 237, 331)),
    (64, "score"): Measured(Pair(353, 322), Backward(434, 237, 314)),
    (128, "full"): Measured(Pair(624, 435), Backward(568, 475, 393)),
    (128, "causal"): Measured(Pair(688, 528), Backward(571, 477, 400)),
    (128, "window"): Measured(Pair(462, 416), Backward(411, 351, 364)),
    (128, "document"): Measured(Pair(472, 416), Backward(420, 357, 358)),
    (128, "added"): Measured(Pair(636, 463), Backward(579, 473, 411)),
    (128, "score"): Measured(Pair(549, 413), Backward(506, 369, 367)),
    (128, "pair"): Measured(Pair(360, 389), Backward(0, 0, 300)),
    (128, "mask"): Measured(Pair(599, 338), Backward(0, 0, 325)),
    (192, "full"): Measured(Pair(645, 352), Backward(0, 538, 231)),
    (192, "causal"): Measured(Pair(625, 370), Backward(0, 523, 236)),
    (256, "full"): Measured(Pair(689, 456), Backward(0, 593, 298)),
    (256, "causal"): Measured(Pair(704, 494), Backward(0, 574, 313)),
}
"""What a zero stands for was not measured, and is left to `triton`; a kind without a row of its width has that of 128."""


DROPPED: Final[dict[int, Measured]] = {
    64: Measured(Pair(205, 210), Backward(331, 0, 173)),
    128: Measured(Pair(355, 271), Backward(462, 0, 246)),
}
"""With dropout, whatever the kind; of other widths as of 128. Where several kernels take the backward pass, `triton`'s do it."""


FEW_QUERIES: Final = {64: Pair(330, 140), 128: Pair(530, 150)}
"""Of the backward of 128 queries, by width, whatever the kind, where each multiprocessor has a head. Those of `triton` have tiles of keys
enough with fewer heads."""


_SUMS: Final = {64: 3e-13, 128: 0.0}
"""By width, seconds for each element of query that a kernel of all gradients takes longer than those of `triton`, whatever the keys:
float32 sums of dq are added, read and written again. Measured with heads of 64 for 8192 tokens or more: it wins by 11 to 24 % with
sequences of 128, 256 and 512, and loses with 64, which fill half of a tile. Heads of 128 win by 13 % and more, with 128 positions too."""


def estimate_rates(problem: Problem) -> Rates:
    """As measured for the kind and the padded width nearest to a problem's, with the backward that takes it, by what its sums cost."""
    kind, dim = score_kind(problem), max(problem.head_dim, problem.value_dim)
    width = next(width for width in (64, 128, 192, 256) if width >= dim)
    dropped, measured = DROPPED.get(width, DROPPED[128]), MEASURED.get((width, kind)) or MEASURED[128, kind]
    found = dropped if problem.formula.dropout else measured
    backward, busy = found.backward, busy_fraction(problem, 90)
    if (few := few_schedule(problem)) is not None:
        heads = problem.batch * problem.q_heads
        part = min(1.0, heads * few_shares(heads, problem.kv_len, few.tile_kv)[1] / DEFAULT_SMS)
        return Rates(found.forward, Pair(FEW_QUERIES[width].hopper * part, FEW_QUERIES[width].triton * busy), busy)
    is_whole = fused_schedule(problem) is not None
    own = _summed(problem, backward.fused) if is_whole else backward.apart
    if not is_whole:
        # which have as many programs as those of `triton`, or half as many
        return Rates(found.forward, Pair(own * busy, backward.triton * busy), busy)
    return Rates(found.forward, Pair(own * _filled(problem), backward.triton * busy), busy)


def _summed(problem: Problem, rate: float) -> float:
    """A rate over many keys as it is over those of a problem: sums cost the same for few. Of packed sequences the longest is known; the
    others are taken to be half as long."""
    packed = 0.5 if problem.formula.layout is Layout.JAGGED else 1.0
    flops = 2.5 * problem.flops * packed * (0.5 if is_causal(problem.variant) else 1.0)
    elements = problem.batch * problem.q_heads * problem.q_len * problem.head_dim
    return flops / (flops / rate + 1e12 * _SUMS[max(64, padded_dim(problem.head_dim))] * elements) if rate else 0.0


def _filled(problem: Problem) -> float:
    """Which part of the multiprocessors has a tile of 128 keys to work on, and which part of that has keys; rates are of problems that fill
    them all."""
    tiles = problem.batch * problem.kv_heads * -(-problem.kv_len // 128)
    return min(1.0, tiles / DEFAULT_SMS) * min(1.0, problem.kv_len / 128)
