"""Which kernel takes which problem: warpgroups, tiles and stages, by padded head dims."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["Schedule", "forward_schedule"]


@dataclass(frozen=True)
class Schedule:
    """How a forward is cut up. `name` is what `explain` calls it: C2, two consumers that overlap products with softmax; N3,
    three that do not."""

    name: str
    consumers: int
    overlapped: bool
    tile_kv: int
    stages: int

    @property
    def tile_q(self) -> int:
        return 64 * self.consumers


_C2: Final = Schedule("C2", 2, True, 128, 2)
_N3: Final = Schedule("N3", 3, False, 128, 2)
_WIDE: Final = Schedule("C2", 2, True, 64, 2)


def forward_schedule(dims: tuple[int, int], *, is_plain: bool, mode: str) -> Schedule:
    """The schedule for padded head dims: N3 where rows of 192 can be cut and its 160 registers suffice, else C2.

    Args:
        dims: padded D and Dv.
        is_plain: whether weights are the softmax of plain scores, without a score function or dropout.
        mode: how tiles are visited, as `Config.MODE`.
    """
    if max(dims) > 128:
        return _WIDE
    return _N3 if is_plain and mode in ("all", "causal") else _C2
