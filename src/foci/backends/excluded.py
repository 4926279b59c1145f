"""Products that ignore infinities and NaN at excluded positions, so that what is stored there never reaches a result or a gradient.

The kernels of `blocked` use the helpers at the top, only where an operand is not finite somewhere, which a sum over it shows. The
differentiable formulas use `scores` and `weighted_values`. The derivative of each is the other one, so derivatives of every order ignore
excluded positions too.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from foci.compat.fake import detect_fake_mode
from foci.compat.torch import is_legacy_batched, is_transformed

__all__ = ["add_not_finite", "finite", "has_not_finite", "scores", "weighted_values"]


# ---- for kernels ----


def has_not_finite(*tensors: Tensor) -> bool:
    """Whether some element is infinite or NaN; rarely also if a sum of finite ones overflows. True while a CUDA graph is captured, when
    values cannot be read; False on the device meta, which has none."""
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    return not all(t.is_meta or bool(torch.isfinite(t.sum())) for t in tensors)


def finite(tensor: Tensor) -> Tensor:
    """The tensor with zeros for what is not finite."""
    return torch.where(torch.isfinite(tensor), tensor, 0.0)


def add_not_finite(total: Tensor, attended: Tensor, operand: Tensor) -> None:
    """Set the elements of a product to NaN where something not finite contributes.

    Args:
        total: [.., q, d], the product with `finite(operand)`.
        attended: bool [.., q, k], which positions take part.
        operand: [.., k, d].
    """
    total.masked_fill_(torch.bmm(attended.to(total.dtype), (~torch.isfinite(operand)).to(total.dtype)) > 0, torch.nan)


# ---- for differentiable formulas ----


def scores(query: Tensor, key: Tensor, attended: Tensor | None) -> Tensor:
    """Products [.., q, k] of queries and keys, 0 where the position is excluded.

    Args:
        query: [.., q, d].
        key: [.., k, d].
        attended: bool, broadcasts to [.., q, k]; None where every position is attended to.
    """
    if attended is None:
        return query @ key.mT
    result: Tensor = _scores(query, key, attended.expand(*query.shape[:-1], key.shape[-2]))
    return result


def weighted_values(weights: Tensor, value: Tensor, attended: Tensor | None) -> Tensor:
    """Sums [.., q, d] of values by weights, over the attended positions alone.

    Args:
        weights: [.., q, k]; what excluded positions hold is not read.
        value: [.., k, d].
        attended: bool, broadcasts to [.., q, k]; None where every position is attended to.
    """
    if attended is None:
        return weights @ value
    result: Tensor = _weighted_values(weights, value, attended.expand(weights.shape))
    return result


def _may_hold_not_finite(tensor: Tensor) -> bool:
    """Whether an element is infinite or NaN; True where values cannot be read."""
    if is_transformed(tensor) or is_legacy_batched(tensor) or detect_fake_mode([tensor]) is not None:
        return True
    return has_not_finite(tensor)


class _Product(torch.autograd.Function):
    """A product over attended positions; its inputs are two factors and `attended`."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)


def _product_tangent(product: Any, ctx: Any, left_tangent: Tensor | None, right_tangent: Tensor | None) -> Tensor:
    """Tangent of a product that is linear in each factor."""
    left, right, attended = ctx.saved_tensors
    terms: list[Tensor] = []
    if left_tangent is not None:
        terms.append(product(left_tangent, right, attended))
    if right_tangent is not None:
        terms.append(product(left, right_tangent, attended))
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


class _Scores(_Product):
    @staticmethod
    def forward(query: Tensor, key: Tensor, attended: Tensor) -> Tensor:
        return torch.where(attended, query @ key.mT, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, attended = ctx.saved_tensors
        query_grad = _weighted_values(grad, key, attended) if ctx.needs_input_grad[0] else None
        key_grad = _weighted_values(grad.mT, query, attended.mT) if ctx.needs_input_grad[1] else None
        return query_grad, key_grad, None

    @staticmethod
    def jvp(ctx: Any, query_tangent: Tensor | None, key_tangent: Tensor | None, _: None) -> Tensor:
        return _product_tangent(_scores, ctx, query_tangent, key_tangent)


class _WeightedValues(_Product):
    @staticmethod
    def forward(weights: Tensor, value: Tensor, attended: Tensor) -> Tensor:
        weights = torch.where(attended, weights, 0.0)
        product = weights @ value
        if not _may_hold_not_finite(value):
            return product
        reached = attended.to(value.dtype) @ (~torch.isfinite(value)).to(value.dtype)
        return torch.where(reached > 0, product, weights @ finite(value))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, value, attended = ctx.saved_tensors
        weights_grad = _scores(grad, value, attended) if ctx.needs_input_grad[0] else None
        value_grad = _weighted_values(weights.mT, grad, attended.mT) if ctx.needs_input_grad[1] else None
        return weights_grad, value_grad, None

    @staticmethod
    def jvp(ctx: Any, weights_tangent: Tensor | None, value_tangent: Tensor | None, _: None) -> Tensor:
        return _product_tangent(_weighted_values, ctx, weights_tangent, value_tangent)


_scores: Final[Any] = _Scores.apply
_weighted_values: Final[Any] = _WeightedValues.apply
