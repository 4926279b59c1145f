"""What a layer computes between its products, as the device's own kernels: which, and what its backward sums."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from foci.backends.row_kernels import Backward, Column, Norm, RowKernels, Rows
from foci.environment import allowed_backends
from foci.nn.layer_ops import FIRST, IN, NORM1, NORM2, OUT, SECOND, Parameters, Plan
from foci.planner import row_kernels

__all__ = ["layer_backward", "layer_rows"]


def layer_rows(x: Tensor, plan: Plan, p: Parameters, *, needs_grad: bool) -> Rows | None:
    """Where kernels over the rows of tokens [T, E] are launched; None where torch's operations are taken.

    Args:
        x: the tokens.
        plan: of a layer.
        p: its parameters.
        needs_grad: whether gradients will be wanted.
    """
    kernels = row_kernels(x.device, allowed_backends())
    rows = None if kernels is None else kernels.place(x)
    if rows is not None and not needs_grad:
        rows.begin_norms(x.dtype, x.shape[1], plan.norm_first, p[NORM2] is not None, p[NORM2 + 1] is not None)
    return rows


@functools.lru_cache(maxsize=256)
def layer_backward(
    kernels: RowKernels, plan: Plan, wanted: tuple[bool, ...], dtype: torch.dtype, hidden: int, projected: int,
    has: tuple[bool, bool, bool, bool],
) -> Backward:  # fmt: skip
    """Return what a layer's backward sums over the tokens.

    A norm's gradient sums the columns of its result where a linear layer's output has that gradient: so its bias has. Other biases' are
    sums of their own.

    Args:
        kernels: that sum.
        plan: of the layer.
        wanted: whether the gradient is, of its tokens and each of its parameters.
        dtype: of both.
        hidden, projected: features of the feed-forward block, and of query, key and value together.
        has: whether there are scale and shift, of the first norm and the second.
    """
    behind, _, last = plan.drops
    linears = {NORM2: None if behind else OUT} if plan.norm_first else {NORM2: None if last else SECOND, NORM1: None if behind else OUT}
    norms, summed = [], set()
    for at, scales, shifts in ((NORM2, *has[2:]), (NORM1, *has[:2])):
        sums: tuple[int, ...] = (at, at + 1) if wanted[1 + at] or wanted[2 + at] else ()
        linear = linears.get(at)
        if linear is not None and wanted[2 + linear]:
            sums = at, at + 1, linear + 1
            summed.add(linear)
        norms.append(Norm(at, sums, plan.norm_first, at == NORM2 or not plan.norm_first, scales, shifts))
    kinds = {SECOND: (plan.width[0], 0), FIRST: (hidden, 2 if plan.is_gelu else 1), OUT: (plan.width[0], 0), IN: (projected, 0)}
    columns = [Column(at + 1, *kinds[at]) for at in kinds if wanted[2 + at] and at not in summed]
    return kernels.backward(dtype, plan.width[0], norms, columns)
