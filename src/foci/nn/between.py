"""What a layer computes between its products, as the device's own kernels: which, and what its backward sums."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from foci.context import allowed_backends
from foci.nn.layer import FIRST, IN, NORM1, NORM2, OUT, SECOND, Parameters, Plan
from foci.planner import target_of

if TYPE_CHECKING:
    from foci.backends.triton.rowwise import Backward, Rows

__all__ = ["backward_of", "rows_of"]

_BACKENDS: Final = frozenset(("triton", "hopper"))
"""Those that launch Triton's kernels: where neither may be taken, nothing here is."""


def rows_of(x: Tensor, plan: Plan, p: Parameters, *, learns: bool) -> Rows | None:
    """Where kernels over the rows of tokens [T, E] are launched; None where torch's operations are taken.

    Args:
        x: the tokens.
        plan: of a layer.
        p: its parameters.
        learns: whether gradients will be wanted.
    """
    module = _kernels(x.device)
    if module is None:
        return None
    allowed = allowed_backends()
    if allowed is not None and _BACKENDS.isdisjoint(allowed):
        return None
    found: Rows | None = module.Rows.of(x)
    if found is not None and not learns and not found.is_captured:
        module.begin_norms(found.device, x.dtype, x.shape[1], plan.norm_first, p[NORM2] is not None, p[NORM2 + 1] is not None)
    return found


@functools.lru_cache(maxsize=16)
def _kernels(device: torch.device) -> Any:
    """The module of kernels; on the CPU Triton's interpreter runs them, which is for tests."""
    target = target_of(device)
    has_them = "triton" in target.features and target.arch >= 80 if device.type == "cuda" else device.type == "cpu" and _is_interpreted()
    if not has_them:
        return None
    from foci.backends.triton import rowwise

    return rowwise


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.lru_cache(maxsize=256)
def backward_of(
    plan: Plan, wanted: tuple[bool, ...], dtype: torch.dtype, hidden: int, projected: int, has: tuple[bool, bool, bool, bool]
) -> Backward:
    """What a layer's backward sums over the tokens.

    A norm's gradient sums the columns of its result where a linear layer's output has that gradient: so its bias has. Other biases' are
    sums of their own.

    Args:
        plan: of the layer.
        wanted: whether the gradient is, of its tokens and each of its parameters.
        dtype: of both.
        hidden, projected: features of the feed-forward block, and of query, key and value together.
        has: whether there are scale and shift, of the first norm and the second.
    """
    from foci.backends.triton.rowwise import Backward, Column, Norm

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
    return Backward(dtype, plan.width[0], norms, columns)
