"""Integers of 8 and 16 bits in graphs. torch computes them in their own width, where they wrap; the language has 32 bits.

What may wrap is left to torch, whose result is captured; what cannot is read as an expression.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import fx

from foci.fusion.fx_utils import CASTS, Call, example_tensor, example_value, is_tensor
from foci.fusion.is_binary import is_truth
from foci.ir.narrow import is_narrow

__all__ = ["may_wrap"]

_MOVING: Final = frozenset((
    "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "eye", "tril", "triu", "cat", "hstack", "vstack", "row_stack",
    "detach",
))  # fmt: skip
"""Operations whose results are elements of their operands, zeros or ones; their numbers are no elements."""
_CHOOSING: Final = frozenset((
    "full", "full_like", "new_full", "tensor", "scalar_tensor", "as_tensor", "pad", "where", "masked_fill", "clamp", "clip", "clamp_min",
    "clamp_max", "maximum", "minimum", "max", "min", "and", "or", "xor", "bitwise_and", "bitwise_or", "bitwise_xor", "positive", "pos",
))  # fmt: skip
"""Operations whose results fit where their operands and their numbers do."""


def may_wrap(node: fx.Node, call: Call) -> bool:
    """Whether torch may compute another number than the same operation of wider integers gives."""
    tensor = example_tensor(node)
    if tensor is None:
        return False
    if is_narrow(tensor.dtype):
        if is_truth(node) or call.name in _MOVING:
            return False
        if call.name in CASTS:
            source = example_tensor(call.args[0])
            return source is None or torch.promote_types(source.dtype, tensor.dtype) != tensor.dtype
        return call.name not in _CHOOSING or not _all_fit(call, tensor.dtype)
    return not tensor.dtype.is_floating_point and _compares_narrow(call)


def _compares_narrow(call: Call) -> bool:
    """Whether the operands are narrow integers that torch first converts to a dtype that does not hold all of them."""
    if call.name in CASTS or call.name in _MOVING or len(call.args) < 2:
        return False
    values = [example_value(arg) for arg in call.args[:2]]
    if not any(isinstance(v, torch.Tensor) and is_narrow(v.dtype) for v in values):
        return False
    try:
        common = functools.reduce(torch.result_type, values)
    except TypeError:  # of what is neither tensor nor number
        return True
    return is_narrow(common) and not _all_fit(call, common)


def _all_fit(call: Call, dtype: torch.dtype) -> bool:
    """Whether a narrow dtype holds every operand and number of a call."""
    return all(_fits(arg, dtype) for arg in (*call.args, *call.kwargs.values()))


def _fits(arg: Any, dtype: torch.dtype) -> bool:
    if is_tensor(arg):
        tensor = example_tensor(arg)
        return tensor is not None and torch.promote_types(tensor.dtype, dtype) == dtype
    value = example_value(arg)
    if isinstance(value, int):
        return torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max
    return not isinstance(value, (float, torch.SymInt, torch.SymFloat))
