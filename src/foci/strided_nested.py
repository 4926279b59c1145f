"""NestedTensors of strided layout, torch's older kind: packed as those of jagged layout on the way in, strided again on the way out.

Their sequences lie one after the other in a buffer that torch has no public name for, so each way costs a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foci.compat.nested import KINDS
from foci.core import Tensors
from foci.errors import ArgumentError
from foci.prepare import describe
from foci.problem import Results

__all__ = ["as_jagged", "as_strided", "has_strided"]


def has_strided(*tensors: Tensor) -> bool:
    """Whether any of the tensors is a NestedTensor of strided layout."""
    # by type first, as a NestedTensor of jagged layout answers in Python
    return any(type(t) not in KINDS and isinstance(t, Tensor) and t.is_nested and t.layout is torch.strided for t in tensors)


def as_jagged(tensors: Tensors) -> Tensors:
    """The tensors with those of strided layout, [B, H, ragged, D] or [B, ragged, D], in jagged layout. Sequences of the same lengths
    share their offsets.

    Raises:
        ArgumentError: for tensors of other dimensions, or ragged in another one than the length.
    """
    offsets: dict[tuple[int, ...], Tensor] = {}
    query, key, value = (
        _jagged(name, tensor, offsets) if has_strided(tensor) else tensor
        for name, tensor in zip(("query", "key", "value"), tensors, strict=True)
    )
    return query, key, value


def _jagged(name: str, tensor: Tensor, known: dict[tuple[int, ...], Tensor]) -> Tensor:
    if tensor.dim() not in (3, 4) or tensor.size(0) == 0:
        raise ArgumentError(
            f"{name} must be [batch, heads, ragged, head dim] or [batch, ragged, head dim] with at least one sequence; "
            f"got {tensor.dim()} dimensions, batch size {tensor.size(0)}"
        )
    parts = tensor.unbind()  # [H, S, D] or [S, D] each
    if len({(*part.shape[:-2], part.shape[-1]) for part in parts}) > 1:
        raise ArgumentError(
            f"{name} must be ragged in the length alone, [batch, heads, ragged, head dim]; got {', '.join(map(describe, parts))}"
        )
    lengths = tuple(part.shape[-2] for part in parts)
    if lengths not in known:
        known[lengths] = torch.tensor((0, *lengths), device=tensor.device).cumsum(0)
    rows = torch.cat([part.movedim(-2, 0) for part in parts])  # [T, H, D] or [T, D]
    nested: Tensor = torch.nested.nested_tensor_from_jagged(rows, known[lengths], min_seqlen=min(lengths), max_seqlen=max(lengths))
    return nested.transpose(1, 2) if tensor.dim() == 4 else nested


def as_strided(results: Results) -> Results:
    """Results with each NestedTensor in strided layout."""
    out = _strided(results.out)
    lse = out if results.lse is results.out else _strided(results.lse)
    aux_tensors = results.row_max, results.column_sums, results.weights
    return Results(out, lse, *(None if t is None else _strided(t) for t in aux_tensors))


def _strided(tensor: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor(list(tensor.unbind()), layout=torch.strided) if tensor.is_nested else tensor
