"""Collectives of torch.distributed that autograd differentiates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from foci.compat.lookup import find_first

__all__ = ["all_gather_autograd"]


class _AllGather(torch.autograd.Function):
    """Tensors of all ranks, joined along the first dim; gradients are summed and scattered."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.rows = group, part.shape[0]
        joined = part.new_empty((dist.get_world_size(group) * part.shape[0], *part.shape[1:]))
        dist.all_gather(list(joined.chunk(dist.get_world_size(group))), part, group=group)
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        # summed everywhere and cut, as not every kind of process group can scatter sums
        summed = grad.contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed.narrow(0, dist.get_rank(ctx.group) * ctx.rows, ctx.rows), None


def _all_gather(part: Tensor, gather_dim: int, group: dist.ProcessGroup) -> Tensor:
    joined: Tensor = _AllGather.apply(part, group)  # type: ignore[no-untyped-call]
    return joined


_MODULE: Final = "torch.distributed._functional_collectives"

# torch 2.13 gave the same function another name.
_gather: Final[Callable[[Tensor, int, dist.ProcessGroup], Tensor]] = find_first(
    (f"{_MODULE}.all_gather_single_autograd", ("2.13", "2.15")),
    (f"{_MODULE}.all_gather_tensor_autograd", ("2.11", "2.15")),
    fallback=_all_gather,
    without="sums the gradients of keys and values on every rank, which sends more",
)


class _ContiguousGradient(torch.autograd.Function):
    """Identity whose gradient is contiguous: torch 2.11 scatters sums of contiguous gradients alone."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.contiguous()


def all_gather_autograd(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Contiguous parts of all ranks of a group, joined along their first dim. Gradients are summed over the ranks, and cut."""
    joined: Tensor = _ContiguousGradient.apply(_gather(part, 0, group))  # type: ignore[no-untyped-call]
    return joined
