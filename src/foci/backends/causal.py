"""Which masks are the upper-left causal one, in whatever way it was written."""

from __future__ import annotations

from typing import Final

from foci.ir.expr import Expr, variable
from foci.ir.ops import apply
from foci.ir.simplify import simplify
from foci.variant import Variant

__all__ = ["is_causal"]


def _masks() -> frozenset[Expr]:
    q_idx, kv_idx = variable("q_idx"), variable("kv_idx")
    mask = apply("le", kv_idx, q_idx)
    return frozenset((mask, simplify(mask)))


_MASKS: Final = _masks()


def is_causal(variant: Variant) -> bool:
    """Whether the mask is `kv_idx <= q_idx`. The lower-right one needs exact lengths, which a problem does not have."""
    return variant.mask in _MASKS
