"""Which kernel takes which problem: warpgroups, tiles and stages, by padded head dims and what a score asks for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from foci.backends.triton.bounds import bounds_of
from foci.backends.triton.schedules import padded, tile_bytes
from foci.problem import Layout, Problem

__all__ = ["C2", "N3", "SHORT", "WIDE", "Schedule", "forward_schedule"]


@dataclass(frozen=True)
class Schedule:
    """How a forward is cut up. `name` is C2, two consumers that overlap products with softmax, or N3, three that do not; `why` is
    what `explain` says of it. `persistent` programs take task after task."""

    name: str
    consumers: int
    overlapped: bool
    tile_kv: int
    stages: int
    why: str
    persistent: bool = False

    @property
    def tile_q(self) -> int:
        return 64 * self.consumers


C2: Final = Schedule("C2", 2, True, 128, 2, "two warpgroups that overlap products and softmax, with registers for masks")
N3: Final = Schedule("N3", 3, False, 128, 2, "three warpgroups in turn")
SHORT: Final = replace(N3, why="three warpgroups in turn, which take tile after tile, as runs of keys are short", persistent=True)
WIDE: Final = Schedule("C2", 2, True, 64, 2, "two warpgroups that overlap products and softmax, 64 keys at a time for wide heads")


def forward_schedule(problem: Problem) -> Schedule:
    """As measured on an H200: N3 for narrow heads, and where a row's keys begin at 0 and no more than arithmetic makes a score."""
    width = max(padded(problem.head_dim), padded(problem.value_dim))
    if width > 128:
        return WIDE
    if problem.formula.block_size is not None:
        return C2
    bounds = bounds_of(problem.variant.mask)
    if width <= 64:
        if problem.formula.dropout:
            return C2
        is_short = bounds is None or bounds.is_low
        return SHORT if is_short and problem.formula.layout is Layout.DENSE else N3
    is_simple = bounds is not None and not bounds.is_low and not problem.formula.dropout
    return N3 if is_simple and not tile_bytes(problem.variant) else C2
