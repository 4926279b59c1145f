"""How Inductor lowers the padded operators: into the layout of the tensor that is written anyway."""

from __future__ import annotations

import functools
from typing import Any

import torch

from foci.compat.lowering import lower, lowered, restrided
from foci.padding.operators import OPERATORS

__all__ = ["register"]

aten = torch.ops.aten


@functools.cache
def register() -> None:
    """Once a process."""
    lower(OPERATORS["padded"], _padded)
    lower(OPERATORS["padded_mm"], _product(aten.mm.default))
    lower(OPERATORS["padded_bmm"], _product(aten.bmm.default))
    lower(OPERATORS["padded_cat"], _padded_cat)


def _padded(x: Any, alignment: int, smallest: int) -> Any:
    return restrided(x)


def _product(target: Any) -> Any:
    def lowering(a: Any, b: Any, alignment: int, smallest: int) -> Any:
        # Only the extern kernel takes any strides for its result; Inductor leaves them open for it where this is set.
        settings = {"max_autotune": False, "max_autotune_gemm": False, "max_autotune_allow_flexible_layouts": True}
        return restrided(lowered(target, settings, a, b))

    return lowering


def _padded_cat(tensors: Any, dim: int, alignment: int, smallest: int) -> Any:
    # Inductor fixes a concatenation's strides when it makes it, by these settings.
    settings = {
        "comprehensive_padding": True,
        "padding_alignment_bytes": alignment,
        "padding_stride_threshold": smallest - 1,
        "pad_dynamic_shapes": False,
    }
    return restrided(lowered(aten.cat.default, settings, tensors, dim))
