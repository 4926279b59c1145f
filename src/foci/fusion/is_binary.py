"""Whether the elements of a tensor are zeros and ones, however they are stored."""

from __future__ import annotations

from typing import Any, Final

import torch

from foci.fusion.fx_utils import CASTS, as_call, fixed_number, is_tensor, is_written, node_dtype
from foci.fusion.indices import NoRule
from foci.fusion.views import VIEWS, view_source

__all__ = ["is_truth"]

_ONES_AND_ZEROS: Final = frozenset((
    "ones", "zeros", "eye", "ones_like", "zeros_like", "new_ones", "new_zeros",
))  # fmt: skip
_DEEPEST: Final = 16


def is_truth(node: Any, depth: int = 0) -> bool:
    """Whether a node's tensor provably holds nothing but 0 and 1: it is boolean, or was made of what is."""
    if not is_tensor(node) or is_written(node) or depth > _DEEPEST:
        return False
    if node_dtype(node) == torch.bool:
        return True
    call = as_call(node)
    if call is None:
        return False
    if call.name in VIEWS:
        try:
            return is_truth(view_source(call), depth + 1)
        except NoRule:
            return False
    if call.name in CASTS or call.name in ("tril", "triu"):
        return is_truth(call.argument(0, "input"), depth + 1)
    if call.name == "sub" and len(call.args) == 2 and fixed_number(call.args[0]) == 1:
        return is_truth(call.args[1], depth + 1)
    if call.name == "mul" and len(call.args) == 2:
        return all(is_truth(part, depth + 1) for part in call.args)
    return call.name in _ONES_AND_ZEROS
