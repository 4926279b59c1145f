"""Products that ignore infinities and NaN at masked positions, so that what is stored there never reaches the result.

They are only used where an operand is not finite somewhere, which a sum over it shows.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_not_finite", "finite", "has_not_finite"]


def has_not_finite(*tensors: Tensor) -> bool:
    """Whether some element is infinite or NaN; rarely also if a sum of finite ones overflows. True while a CUDA graph is captured, when
    values cannot be read."""
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
