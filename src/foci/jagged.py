"""Jagged batches: torch NestedTensors, and packed tensors with cumulative lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foci.core import Function, Tensors, decision
from foci.dispatch import run
from foci.planner import Decision
from foci.prepare import Extras, describe
from foci.problem import Results

__all__ = ["Packed", "attend_nested", "decision_nested", "is_nested"]


def is_nested(*tensors: Tensor) -> bool:
    """Whether any of the tensors is nested."""
    return any(isinstance(t, Tensor) and t.is_nested for t in tensors)


@dataclass(frozen=True, eq=False)
class Packed:
    """Sequences along one token dimension: what a NestedTensor [B, H, ragged, D] is inside.

    Attributes:
        values: [1, H, T, D].
        offsets: [B + 1], first token of each sequence, and the end of the last.
        lengths: [B], when sequences do not fill their span, else None.
        longest: length of the longest sequence, or a bound on it.
    """

    values: Tensor
    offsets: Tensor
    lengths: Tensor | None
    longest: int


def _check_nested(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.is_nested and tensor.layout != torch.jagged:
            raise ValueError(f"{name} must be a NestedTensor of jagged layout; got layout {tensor.layout}")
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions [batch, heads, ragged length, head dim]; got {tensor.dim()}")
    if not (query.dtype == key.dtype == value.dtype and query.device == key.device == value.device):
        raise ValueError(
            "query, key and value must have one dtype and one device; got "
            + ", ".join(f"{n} {t.dtype} on {t.device}" for n, t in (("query", query), ("key", key), ("value", value)))
        )
    nested = [t for t in (query, key, value) if t.is_nested]
    if any(t._ragged_idx != 2 for t in nested):  # type: ignore[attr-defined]
        raise ValueError(f"NestedTensors must be ragged in dimension 2, the length; got {[t._ragged_idx for t in nested]}")  # type: ignore[attr-defined]
    if key.is_nested != value.is_nested:
        raise ValueError("key and value must both be NestedTensors, or both dense")


def _pack(tensor: Tensor, batch: int) -> Packed:
    """A NestedTensor as it is; a dense [B or 1, H, S, D] as B sequences of one length."""
    if tensor.is_nested:
        offsets, lengths = tensor.offsets(), tensor.lengths()  # type: ignore[attr-defined]
        return Packed(tensor.values().unsqueeze(0), offsets, lengths, tensor._get_max_seqlen())  # type: ignore[attr-defined]
    heads, length, dim = tensor.shape[1:]
    tensor = tensor.expand(batch, heads, length, dim)
    values = tensor.transpose(0, 1).reshape(1, heads, batch * length, dim)
    return Packed(values, torch.arange(batch + 1, device=tensor.device) * length, None, length)


def _unpack(values: Tensor, like: Tensor) -> Tensor:
    """[1, H, T, ...] as a NestedTensor [B, H, ragged, ...] with the offsets of `like`."""
    packed = values.squeeze(0).transpose(0, 1)
    nested = torch.nested.nested_tensor_from_jagged(
        packed,
        offsets=like.offsets(),  # type: ignore[attr-defined]
        lengths=like.lengths(),  # type: ignore[attr-defined]
        min_seqlen=like._get_min_seqlen(),  # type: ignore[attr-defined]
        max_seqlen=like._get_max_seqlen(),  # type: ignore[attr-defined]
    )
    return nested.transpose(1, 2)


def _heads(tensor: Tensor, heads: int) -> Tensor:
    return tensor.expand(tensor.shape[0], heads, *tensor.shape[2:]) if tensor.shape[1] == 1 and heads != 1 else tensor


def _packed_call(tensors: Tensors, extras: Extras) -> tuple[Tensors, Extras, int]:
    """Query, key and value packed, the extras that say where sequences lie, and the batch size."""
    query, key, value = tensors
    _check_nested(query, key, value)
    if extras.blocks is not None:
        raise ValueError("a block mask is made for one length; give nested tensors a mask function")
    if extras.outputs.weights:
        raise ValueError("weights of nested tensors are ragged in two dimensions; ask for column_sums or row_max")
    batch = max(t.shape[0] for t in tensors)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.shape[0] not in (1, batch) or (tensor.is_nested and tensor.shape[0] != batch):
            raise ValueError(f"{name} has batch size {tensor.shape[0]}; it must be {batch}" + ("" if tensor.is_nested else " or 1"))
    q, k, v = (_pack(t, batch) for t in tensors)
    if k.values.shape[2] != v.values.shape[2]:
        raise ValueError(f"key and value must have the same sequences; got {describe(k.values)} and {describe(v.values)} when packed")
    heads = max(k.values.shape[1], v.values.shape[1])
    where = replace(extras, cu_q=q.offsets, cu_kv=k.offsets, q_lengths=q.lengths, kv_lengths=k.lengths, max_q=q.longest, max_kv=k.longest)
    return (q.values, _heads(k.values, heads), _heads(v.values, heads)), where, batch


def attend_nested(tensors: Tensors, score: Function, mask: Function, extras: Extras) -> Results:
    """Attention where query, or key and value, are NestedTensors [B, H, ragged, D]; the others may be dense (JAG-01, JAG-05).

    The results have the query's layout. Sequences attend within themselves only; indices given to the functions are
    within the sequence.

    Raises:
        TypeError, ValueError: for wrong arguments.
    """
    packed, where, batch = _packed_call(tensors, extras)
    return _as_query(run(packed, score, mask, where), tensors[0], tensors[1], batch)


def decision_nested(tensors: Tensors, score: Function, mask: Function, extras: Extras) -> Decision:
    """What the planner would do with a call of `attend_nested`; nothing runs."""
    packed, where, _ = _packed_call(tensors, extras)
    return decision(packed, score, mask, where)


def _as_query(results: Results, query: Tensor, key: Tensor, batch: int) -> Results:
    def restore(values: Tensor | None, like: Tensor) -> Tensor | None:
        if values is None:
            return None
        if like.is_nested:
            return _unpack(values, like)
        heads = values.squeeze(0)
        return heads.view(heads.shape[0], batch, -1, *heads.shape[2:]).transpose(0, 1)

    out = restore(results.out, query)
    lse = restore(results.lse, query)
    assert out is not None
    assert lse is not None
    return Results(out, lse, restore(results.row_max, query), restore(results.column_sums, key))
