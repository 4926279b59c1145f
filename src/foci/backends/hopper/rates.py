"""What is fast where: rates of this backend's kernels and of the backend `triton`'s, by which the planner chooses between them.

Measured on an H200, bfloat16, 8192 positions; `benchmarks/hopper_attention.py` measures them anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from foci.backends.causal import is_causal
from foci.backends.triton.bounds import bounds_of
from foci.backends.triton.schedules import padded, tile_bytes
from foci.problem import Problem

__all__ = ["MEASURED", "Pair", "Rates", "kind_of", "rates_of"]


@dataclass(frozen=True)
class Pair:
    """TFLOP/s over the attended area by the kernels of `hopper` and of `triton`."""

    hopper: float
    triton: float

    @property
    def best(self) -> float:
        return max(self.hopper, self.triton)

    @property
    def is_ahead(self) -> bool:
        return self.hopper >= self.triton


@dataclass(frozen=True)
class Rates:
    """Of a kind of problem, both passes."""

    forward: Pair
    backward: Pair


MEASURED: Final[dict[tuple[int, str], Rates]] = {
    # (the wider head dim, padded; kind)
    (64, "full"): Rates(Pair(491, 444), Pair(441, 354)),
    (64, "causal"): Rates(Pair(509, 399), Pair(382, 368)),
    (64, "window"): Rates(Pair(385, 321), Pair(291, 329)),
    (64, "document"): Rates(Pair(341, 335), Pair(290, 315)),
    (64, "score"): Rates(Pair(377, 356), Pair(237, 328)),
    (128, "full"): Rates(Pair(624, 435), Pair(553, 393)),
    (128, "causal"): Rates(Pair(688, 528), Pair(525, 400)),
    (128, "window"): Rates(Pair(462, 416), Pair(399, 361)),
    (128, "document"): Rates(Pair(469, 345), Pair(363, 358)),
    (128, "score"): Rates(Pair(547, 463), Pair(441, 391)),
    (128, "pair"): Rates(Pair(360, 389), Pair(0, 300)),
    (256, "full"): Rates(Pair(689, 456), Pair(373, 296)),
    (256, "causal"): Rates(Pair(704, 494), Pair(355, 298)),
}
"""What a zero stands for was not measured, and is left to `triton`; a kind without a row of its width has that of 128."""


def kind_of(problem: Problem) -> str:
    """What its rate depends on: "pair" for scores that read memory for each pair of positions, "score" for other score functions;
    else by the mask, "full", "causal", "window" for one run of keys a row, "document" for the rest."""
    variant = problem.variant
    if tile_bytes(variant):
        return "pair"
    if variant.score.op != "var":
        return "score"
    bounds = bounds_of(variant.mask) if problem.formula.block_size is None else None
    if bounds is None:
        return "document"
    if bounds.is_low:
        return "window"
    return "causal" if is_causal(variant) else "full"


def rates_of(problem: Problem) -> Rates:
    """As measured for the kind and the padded width nearest to a problem's."""
    kind, width = kind_of(problem), max(64, padded(problem.head_dim), padded(problem.value_dim))
    return MEASURED.get((width, kind)) or MEASURED[128, kind]
