"""Whether the elements of a tensor are zeros and ones, however they are stored."""

from __future__ import annotations

from typing import Any, Final

import torch

from foci.graph.indices import NoRule
from foci.graph.reading import CASTS, call_of, dtype_of, is_tensor, is_written, number_of
from foci.graph.views import VIEWS, source_of

__all__ = ["is_truth"]

_ONES_AND_ZEROS: Final = frozenset((
    "ones", "zeros", "eye", "ones_like", "zeros_like", "new_ones", "new_zeros",
))  # fmt: skip
_DEEPEST: Final = 16


def is_truth(node: Any, depth: int = 0) -> bool:
    """Whether a node's tensor provably holds nothing but 0 and 1: it is boolean, or was made of what is."""
    if not is_tensor(node) or is_written(node) or depth > _DEEPEST:
        return False
    if dtype_of(node) == torch.bool:
        return True
    call = call_of(node)
    if call is None:
        return False
    if call.name in VIEWS:
        try:
            return is_truth(source_of(call), depth + 1)
        except NoRule:
            return False
    if call.name in CASTS or call.name in ("tril", "triu"):
        return is_truth(call.argument(0, "input"), depth + 1)
    if call.name == "sub" and len(call.args) == 2 and number_of(call.args[0]) == 1:
        return is_truth(call.args[1], depth + 1)
    if call.name == "mul" and len(call.args) == 2:
        return all(is_truth(part, depth + 1) for part in call.args)
    return call.name in _ONES_AND_ZEROS
