"""Measured rates of this backend's kernels and of the backend `triton`'s, by which the planner chooses between them.

Measured on an H200, bfloat16, 8192 positions, in several runs; `benchmarks/hopper_attention.py` measures them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from foci.backends.causal import is_causal
from foci.backends.gpu.architectures import HOPPER
from foci.backends.gpu.schedules import busy_fraction, padded_dim
from foci.backends.hopper.backward_schedules import fused_schedule, short_q_schedule, split_short_q
from foci.backends.problem_class import score_kind
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
    """TFLOP/s of the fused kernel, of separate kernels, and of `triton`'s."""

    fused: float
    apart: float
    triton: float


@dataclass(frozen=True)
class Measured:
    """Rates of a kind of problem, both passes."""

    forward: Pair
    backward: Backward


@dataclass(frozen=True)
class Rates:
    """Rates of a problem, both passes."""

    forward: Pair
    backward: Pair
    busy: float  # fraction of the SMs that `triton`'s backward keeps busy; its rate is scaled by it


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
"""0: not measured, and left to `triton`. A kind without a row of its width takes that of 128."""


DROPOUT: Final[dict[int, Measured]] = {
    64: Measured(Pair(205, 210), Backward(331, 0, 173)),
    128: Measured(Pair(355, 271), Backward(462, 0, 246)),
}
"""With dropout, for all kinds; other widths as 128. Without a fused kernel, `triton` computes the backward."""


SHORT_Q: Final = {64: Pair(330, 140), 128: Pair(530, 150)}
"""Backward of 128 queries, by width, for all kinds, where each SM has a head. `triton`'s kernels have enough key tiles with fewer heads."""


_DQ_SUM_SECONDS: Final = {64: 3e-13, 128: 0.0}
"""Seconds per element of query, by width, that the fused kernel takes longer than `triton`'s whatever the number of keys: float32
accumulators of dq are written and read. Measured with heads of 64 for 8192 tokens or more: the fused kernel is 11 to 24 % faster with
sequences of 128, 256 and 512, and slower with 64, which fill half of a tile. Heads of 128 are at least 13 % faster, with 128
positions too."""


def estimate_rates(problem: Problem) -> Rates:
    """Rates of the kind and width nearest to a problem's, with the backward that takes it and the cost of its accumulators."""
    kind, dim = score_kind(problem), max(problem.head_dim, problem.value_dim)
    width = next(width for width in (64, 128, 192, 256) if width >= dim)
    dropped, measured = DROPOUT.get(width, DROPOUT[128]), MEASURED.get((width, kind)) or MEASURED[128, kind]
    rates = dropped if problem.formula.dropout else measured
    backward, busy = rates.backward, busy_fraction(problem, HOPPER.arch)
    if (short_q := short_q_schedule(problem)) is not None:
        heads = problem.batch * problem.q_heads
        busy_sms = min(1.0, heads * split_short_q(heads, problem.kv_len, short_q.tile_kv)[1] / HOPPER.sms)
        return Rates(rates.forward, Pair(SHORT_Q[width].hopper * busy_sms, SHORT_Q[width].triton * busy), busy)
    is_fused = fused_schedule(problem) is not None
    hopper_rate = _add_dq_sum_time(problem, backward.fused) if is_fused else backward.apart
    if not is_fused:
        # separate kernels have as many programs as those of `triton`, or half as many
        return Rates(rates.forward, Pair(hopper_rate * busy, backward.triton * busy), busy)
    return Rates(rates.forward, Pair(hopper_rate * _busy_part(problem), backward.triton * busy), busy)


def _add_dq_sum_time(problem: Problem, rate: float) -> float:
    """Reduce a rate measured over many keys by the time of dq's accumulators, which is the same for few keys. Of packed sequences only the
    longest is known; the average is assumed to be half as long."""
    packed = 0.5 if problem.formula.layout is Layout.JAGGED else 1.0
    flops = 2.5 * problem.flops * packed * (0.5 if is_causal(problem.variant) else 1.0)
    elements = problem.batch * problem.q_heads * problem.q_len * problem.head_dim
    return flops / (flops / rate + 1e12 * _DQ_SUM_SECONDS[max(64, padded_dim(problem.head_dim))] * elements) if rate else 0.0


def _busy_part(problem: Problem) -> float:
    """Fraction of the SMs that have a tile of 128 keys, times the fraction of a tile that has keys. Rates are of problems that fill
    both."""
    tiles = problem.batch * problem.kv_heads * -(-problem.kv_len // 128)
    return min(1.0, tiles / HOPPER.sms) * min(1.0, problem.kv_len / 128)
