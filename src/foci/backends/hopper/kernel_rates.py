"""Rates of this backend's kernels and of the backend `triton`'s, by which the planner chooses between them: `rates.toml` has the measured
ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from foci.backends.causal import is_causal
from foci.backends.data_tables import load_table, rows_by_width
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


def _read_rates(row: dict[str, list[float]]) -> Measured:
    return Measured(Pair(*row["forward"]), Backward(*row["backward"]))


_TABLE: Final = load_table(__file__, "rates.toml")
MEASURED: Final = {
    (width, kind): _read_rates(row) for width, kinds in rows_by_width(_TABLE["measured"]).items() for kind, row in kinds.items()
}
"""{(the wider head dim, padded to a width of this table; `score_kind`): rates}. A kind without a row of its width takes that of 128."""
DROPOUT: Final = {width: _read_rates(row) for width, row in rows_by_width(_TABLE["dropout"]).items()}
SHORT_Q: Final = {width: Pair(*row) for width, row in rows_by_width(_TABLE["short_q"]).items()}
_DQ_SUM_SECONDS: Final[dict[int, float]] = rows_by_width(_TABLE["dq_sum_seconds"])


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
