"""Which kernel takes which problem: warpgroups, tiles and stages, by padded head dims and what a score asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from foci.backends.causal import is_causal
from foci.backends.triton.schedules import padded
from foci.problem import Problem

__all__ = ["Schedule", "forward_schedule"]


@dataclass(frozen=True)
class Schedule:
    """How a forward is cut up. `name` is C2, two consumers that overlap products with softmax, or N3, three that do not; `why` is
    what `explain` says of it."""

    name: str
    consumers: int
    overlapped: bool
    tile_kv: int
    stages: int
    why: str

    @property
    def tile_q(self) -> int:
        return 64 * self.consumers


C2: Final = Schedule("C2", 2, True, 128, 2, "two warpgroups that overlap products and softmax, with registers for scores and masks")
N3: Final = Schedule("N3", 3, False, 128, 2, "three warpgroups in turn, as scores are plain")
WIDE: Final = Schedule("C2", 2, True, 64, 2, "two warpgroups that overlap products and softmax, 64 keys at a time for wide heads")


def forward_schedule(problem: Problem) -> Schedule:
    """N3 where scores are plain, rows are found by arithmetic and its 160 registers suffice, else C2."""
    if max(padded(problem.head_dim), padded(problem.value_dim)) > 128:
        return WIDE
    formula, variant = problem.formula, problem.variant
    is_plain = variant.score.op == "var" and not formula.dropout
    is_simple = formula.block_size is None and (is_causal(variant) or variant.mask.op == "const")
    return N3 if is_plain and is_simple else C2
