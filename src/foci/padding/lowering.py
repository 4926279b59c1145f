"""How Inductor lowers the padded operators: into the layout of the tensor that is written anyway."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._inductor import config, ir
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.virtualized import V

from foci.padding.operators import OPERATORS

__all__ = ["register"]

aten = torch.ops.aten


@functools.cache
def register() -> None:
    """Once a process."""
    register_lowering(OPERATORS["padded"], type_promotion_kind=None)(_padded)
    register_lowering(OPERATORS["padded_mm"], type_promotion_kind=None)(_product(aten.mm.default))
    register_lowering(OPERATORS["padded_bmm"], type_promotion_kind=None)(_product(aten.bmm.default))
    register_lowering(OPERATORS["padded_cat"], type_promotion_kind=None)(_padded_cat)


def _laid_out(x: Any) -> Any:
    """In the strides that the current node has, symbolic ones included."""
    strides = V.graph.current_node.meta["val"].stride()
    return ir.ExternKernel.require_exact_strides(x, strides)


def _padded(x: Any, alignment: int, smallest: int) -> Any:
    return _laid_out(x)


def _product(target: Any) -> Any:
    def lower(a: Any, b: Any, alignment: int, smallest: int) -> Any:
        # Only the extern kernel takes any strides for its result; Inductor leaves them open for it where this is set.
        settings = {"max_autotune": False, "max_autotune_gemm": False, "max_autotune_allow_flexible_layouts": True}
        with config.patch(settings):
            return _laid_out(lowerings[target](a, b))

    return lower


def _padded_cat(tensors: Any, dim: int, alignment: int, smallest: int) -> Any:
    # Inductor fixes a concatenation's strides when it makes it, by these settings.
    settings = {
        "comprehensive_padding": True,
        "padding_alignment_bytes": alignment,
        "padding_stride_threshold": smallest - 1,
        "pad_dynamic_shapes": False,
    }
    with config.patch(settings):
        return _laid_out(lowerings[aten.cat.default](tensors, dim))
