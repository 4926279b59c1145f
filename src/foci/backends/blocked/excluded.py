"""What excluded positions hold never contributes: products that leave infinities and NaN out where the weight is that of an excluded
position, for the calls that have any. Others are told apart by sums of their operands, which take a pass over them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_not_finite", "finite", "has_not_finite"]


def has_not_finite(*tensors: Tensor) -> bool:
    """Whether some element is infinite or NaN; rarely, whether a sum of finite ones overflows. While a CUDA graph is captured nobody can
    look, so that all may be."""
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    return not all(bool(torch.isfinite(t.sum())) for t in tensors)


def finite(tensor: Tensor) -> Tensor:
    """The tensor with zeros for what is not finite."""
    return torch.where(torch.isfinite(tensor), tensor, 0.0)


def add_not_finite(total: Tensor, attended: Tensor, operand: Tensor) -> None:
    """Makes NaN of the elements of a product to which something not finite contributes.

    Args:
        total: [.., q, d], the product with `finite(operand)`.
        attended: bool [.., q, k], which positions take part.
        operand: [.., k, d].
    """
    total.masked_fill_(torch.bmm(attended.to(total.dtype), (~torch.isfinite(operand)).to(total.dtype)) > 0, torch.nan)
