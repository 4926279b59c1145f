"""Jagged batches: torch NestedTensors, packed into tokens and cumulative lengths on the way in, nested again on the way out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foci.compat.nested import KINDS, inner_values, known_extremes, length_extremes, ragged_dim
from foci.compat.torch import disabled_torch_function_subclass
from foci.core import Function, Tensors, decision
from foci.dispatch import run
from foci.errors import ArgumentError
from foci.nested_autograd import attend_nested_now
from foci.planner import Decision
from foci.prepare import Extras, describe
from foci.problem import Results

__all__ = ["Packed", "attend_nested", "check_ungrouped", "count_heads", "decision_nested", "is_nested", "padded_sizes"]


def is_nested(*tensors: Tensor) -> bool:
    """Whether any of the tensors is nested."""
    for t in tensors:  # a loop, as each call asks; by type first, as a NestedTensor answers in Python
        if type(t) is Tensor:
            if t.is_nested:
                return True
        elif type(t) in KINDS or (isinstance(t, Tensor) and t.is_nested):
            return True
    return False


@dataclass(frozen=True, eq=False)
class Packed:
    """Sequences along one token dimension: what a NestedTensor [B, H, ragged, D] is inside.

    Attributes:
        values: [1, H, T, D].
        offsets: [B + 1], first token of each sequence, and the end of the last.
        lengths: [B], when sequences do not fill their span, else None.
        longest, shortest: lengths of the longest and shortest sequence, None where only the device knows.
    """

    values: Tensor
    offsets: Tensor
    lengths: Tensor | None
    longest: int | None
    shortest: int | None


def _check_nested(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Checks in torch's words."""
    named = (("query", query), ("key", key), ("value", value))
    for name, tensor in named:
        if tensor.is_nested and tensor.layout != torch.jagged:
            raise ArgumentError(f"{name} must be a NestedTensor of jagged layout, layout=torch.jagged; got layout {tensor.layout}")
    for what in ("dtype", "device"):
        if not getattr(query, what) == getattr(key, what) == getattr(value, what):
            got = ", ".join(f"{name} {getattr(tensor, what)}" for name, tensor in named)
            raise ArgumentError(f"Expected query, key, and value to have the same {what}; got {got}")
    if key.is_nested != value.is_nested:
        nested, dense = ("key", "value") if key.is_nested else ("value", "key")
        raise ArgumentError(f"Expected key and value to be nested together; got a nested {nested} and a dense {dense}")
    dims = (query.dim(), key.dim(), value.dim())
    if min(dims) < 3:
        raise ArgumentError(f"Expected query, key, and value to all be at least 3 dimensional; got {dims[0]}, {dims[1]} and {dims[2]}")
    if not dims[0] == dims[1] == dims[2]:
        raise ArgumentError(f"Expected query, key, and value to have one number of dimensions; got {dims[0]}, {dims[1]} and {dims[2]}")
    ragged = [ragged_dim(t) for t in (query, key, value) if t.is_nested]
    if any(dim != ragged[0] for dim in ragged):
        raise ArgumentError(f"Expected query, key, and value to all be ragged on the same dimension; got ragged dims {ragged}")
    if ragged[0] == dims[0] - 1:
        raise ArgumentError("Expected query, key, and value to be ragged in the length or before it; they are ragged in the head dim")


def check_ungrouped(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises a ValueError if there are fewer heads of key or value than of the query, but for one that all share."""
    heads = [count_heads(t) for t in (query, key, value) if type(t) in KINDS or not t.is_nested or t.layout == torch.jagged]
    if len(set(heads) - {1}) > 1:
        raise ArgumentError(f"query, key and value have {', '.join(map(str, heads))} heads: grouped heads need enable_gqa=True")


def count_heads(query: Tensor) -> int:
    """Heads of a query of any layout that `attention` takes; of none, the one."""
    # its values, which lack the batch, tell without a call of torch's Python; Dynamo cannot read them
    if type(query) in KINDS and not torch.compiler.is_compiling():
        values: Tensor = inner_values(query)
        dim = 0 if ragged_dim(query) > 1 else 1
        return values.size(dim) if values.dim() > dim + 2 else 1
    dim = 1 if not is_nested(query) or ragged_dim(query) > 1 else 2
    return query.shape[dim] if query.dim() > dim + 2 else 1


def padded_sizes(query: Tensor, key: Tensor) -> tuple[int, int, int, int] | None:
    """[batch, heads, longest query, longest key] of query and key of which one is nested; None unless both are of four dimensions, ragged
    in the length, and their lengths known."""
    if query.dim() != 4 or key.dim() != 4:
        return None
    longest = []
    for tensor in (query, key):
        if not tensor.is_nested:
            longest.append(tensor.shape[2])
            continue
        if tensor.layout != torch.jagged or ragged_dim(tensor) != 2:
            return None
        known = _extremes(tensor)[0]
        if known is None:
            return None
        longest.append(known)
    return max(query.shape[0], key.shape[0]), max(query.shape[1], key.shape[1]), longest[0], longest[1]


def _extremes(tensor: Tensor, among: Sequence[Tensor] = ()) -> tuple[int | None, int | None]:
    """Longest and shortest sequence of a NestedTensor, which keeps them; of others with the same sequences, the first that knows tells."""
    nested: Any = tensor
    if nested.offsets().shape[0] == 1:
        return 0, 0
    if torch.compiler.is_compiling():
        return known_extremes(nested)
    alike: list[Any] = [other for other in among if other.is_nested and _same_sequences(other, nested)]
    chosen = next((other for other in alike if None not in known_extremes(other)), nested)
    return length_extremes(chosen)


def _same_sequences(one: Any, other: Any) -> bool:
    return one.offsets() is other.offsets() and one.lengths() is other.lengths()


def _pack(tensor: Tensor, batch: int, among: Tensors) -> Packed:
    """A NestedTensor as it is; a dense [B or 1, H, S, D] as B sequences of one length; a batch of one repeated. H may lack.

    `among`: tensors of the same call, whose sequences may be the same.
    """
    if not tensor.is_nested:
        heads, length, dim = tensor.shape[1:] if tensor.dim() == 4 else (1, *tensor.shape[1:])
        values = tensor.unsqueeze(1) if tensor.dim() == 3 else tensor
        values = values.expand(batch, heads, length, dim).transpose(0, 1).reshape(1, heads, batch * length, dim)
        return Packed(values, torch.arange(batch + 1, device=tensor.device) * length, None, length, length)
    nested: Any = tensor
    offsets, lengths, values = nested.offsets(), nested.lengths(), nested.values()
    if tensor.dim() == 3:
        values = values.unsqueeze(0)
    if tensor.shape[0] == batch:
        return Packed(values.unsqueeze(0), offsets, lengths, *_extremes(tensor, among))
    heads, tokens, dim = values.shape
    repeated = values.unsqueeze(1).expand(heads, batch, tokens, dim).reshape(1, heads, batch * tokens, dim)
    starts = (torch.arange(batch + 1, device=tensor.device) * tokens + offsets[0]).clamp_max(batch * tokens)
    return Packed(repeated, starts, (lengths if lengths is not None else offsets.diff()).expand(batch), *_extremes(tensor, among))


def _unpack(values: Tensor, like: Packed, *, heads: bool) -> Tensor:
    """[1, H, T, ...] as a NestedTensor [B, H, ragged, ...], or [B, ragged, ...], with the offsets and lengths of `like`."""
    rows = values.squeeze(0).transpose(0, 1) if heads else values[0, 0]
    nested = torch.nested.nested_tensor_from_jagged(
        rows, offsets=like.offsets, lengths=like.lengths, min_seqlen=like.shortest, max_seqlen=like.longest
    )
    return nested.transpose(1, 2) if heads else nested


def _heads(tensor: Tensor, heads: int) -> Tensor:
    return tensor.expand(tensor.shape[0], heads, *tensor.shape[2:]) if tensor.shape[1] == 1 and heads != 1 else tensor


@dataclass(frozen=True, eq=False)
class _Call:
    """A call with everything packed: what `run` takes, and what the results need to be nested again."""

    tensors: Tensors
    extras: Extras
    batch: int
    query: Packed | None
    key: Packed | None


def _packed_call(tensors: Tensors, extras: Extras) -> _Call:
    if extras.blocks is not None:
        raise ArgumentError("a block mask is made for one length; give nested tensors a mask function")
    if extras.outputs.weights:
        raise ArgumentError("weights of nested tensors are ragged in two dimensions; ask for column_sums or row_max")
    query, key, value = tensors
    if query.dim() > 4:
        raise ArgumentError(
            "query, key and value ragged in the length must have 4 dimensions [batch, heads, length, head dim], or 3 without heads; "
            f"got {query.dim()}"
        )
    batch = max(t.shape[0] for t in tensors)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.shape[0] not in (1, batch):
            raise ArgumentError(f"{name} has batch size {tensor.shape[0]}; it must be {batch} or 1")
    q, k, v = (_pack(t, batch, tensors) for t in tensors)
    if k.values.shape[2] != v.values.shape[2]:
        raise ArgumentError(f"key and value must have the same sequences; got {describe(k.values)} and {describe(v.values)} when packed")
    _check_sequences(k, v)
    heads = max(k.values.shape[1], v.values.shape[1])
    where = extras._replace(
        cu_q=q.offsets, cu_kv=k.offsets, q_lengths=q.lengths, kv_lengths=k.lengths, max_q=_bound(q), max_kv=_bound(k),
        exact_lengths=q.longest is not None and k.longest is not None,
    )  # fmt: skip
    packed = (_heads(q.values, heads), _heads(k.values, heads), _heads(v.values, heads))
    return _Call(packed, where, batch, q if query.is_nested else None, k if key.is_nested else None)


def _check_sequences(key: Packed, value: Packed) -> None:
    """Checks that both have the same sequences; not where they lie in tensors of their own on a GPU: nobody waits to know."""
    if key.offsets is value.offsets and key.lengths is value.lengths:
        return
    if key.offsets.device.type != "cpu" or torch.compiler.is_compiling():
        if (key.lengths is None) != (value.lengths is None):
            raise ArgumentError("key and value must have the same sequences; one of them is narrowed and the other is not")
        return
    ours, theirs = _spans(key), _spans(value)
    if ours != theirs:
        raise ArgumentError(f"key and value must have the same sequences; got tokens {ours} and {theirs}")


def _spans(packed: Packed) -> list[tuple[int, int]]:
    starts = packed.offsets.tolist()
    lengths = packed.offsets.diff().tolist() if packed.lengths is None else packed.lengths.tolist()
    return [(start, start + length) for start, length in zip(starts, lengths, strict=False)]


def _bound(packed: Packed) -> int:
    return packed.values.shape[2] if packed.longest is None else packed.longest


def attend_nested(tensors: Tensors, score: Function, mask: Function, extras: Extras) -> Results:
    """Attention where query, or key and value, are NestedTensors; the others may be dense.

    Ragged in the length, [B, H, ragged, D] or [B, ragged, D]: sequences attend within themselves only, and indices given
    to the functions are within the sequence. Ragged in a dimension before it, [B, ragged, S, D] or [B, ragged, H, S, D]:
    every entry of it is an attention of its own, numbered by b through the whole batch. The results have the
    query's layout.

    Raises:
        TypeError, ValueError: for wrong arguments.
    """
    with disabled_torch_function_subclass():  # each question put to a NestedTensor goes through Python otherwise
        out = attend_nested_now(tensors, score, mask, extras)
    if out is not None:
        return Results(out, out)
    _check_nested(*tensors)
    if _is_over_entries(tensors):
        return _nested_entries(run(_entries(tensors), score, mask, extras), tensors[0])
    call = _packed_call(tensors, extras)
    return _as_query(run(call.tensors, score, mask, call.extras), call, heads=tensors[0].dim() == 4)


def decision_nested(tensors: Tensors, score: Function, mask: Function, extras: Extras) -> Decision:
    """Return what the planner would do with a call of `attend_nested`; nothing runs."""
    _check_nested(*tensors)
    if _is_over_entries(tensors):
        return decision(_entries(tensors), score, mask, extras)
    call = _packed_call(tensors, extras)
    return decision(call.tensors, score, mask, call.extras)


def _is_over_entries(tensors: Tensors) -> bool:
    return any(t.is_nested and ragged_dim(t) < t.dim() - 2 for t in tensors)


def _entries(tensors: Tensors) -> Tensors:
    """The values of tensors that are ragged before the length, as [entries, H, S, D]."""
    if not all(t.is_nested for t in tensors):
        raise ArgumentError("query, key and value that are ragged in a dimension before the length must all be nested")
    if tensors[0].dim() > 5 or any(ragged_dim(t) != 1 for t in tensors):
        raise ArgumentError(
            "NestedTensors ragged before the length must be [batch, ragged, length, head dim] or [batch, ragged, heads, length, head dim]; "
            f"got {tensors[0].dim()} dimensions, ragged in {ragged_dim(tensors[0])}"
        )
    values: list[Tensor] = [t.values() for t in tensors]
    if not values[0].shape[0] == values[1].shape[0] == values[2].shape[0]:
        counts = ", ".join(str(v.shape[0]) for v in values)
        raise ArgumentError(f"query, key and value must have the same number of entries in the ragged dimension; got {counts}")
    query, key, value = (v if v.dim() == 4 else v.unsqueeze(1) for v in values)
    return query, key, value


def _nested_entries(results: Results, query: Tensor) -> Results:
    source: Any = query
    longest, shortest = _extremes(query)

    def restore(values: Tensor | None) -> Any:
        if values is None:
            return None
        rows = values if query.dim() == 5 else values.squeeze(1)
        return torch.nested.nested_tensor_from_jagged(
            rows, offsets=source.offsets(), lengths=source.lengths(), min_seqlen=shortest, max_seqlen=longest
        )

    return Results(
        restore(results.out), restore(results.lse), restore(results.row_max), restore(results.column_sums), restore(results.weights)
    )


def _as_query(results: Results, call: _Call, *, heads: bool) -> Results:
    def restore(values: Tensor | None, like: Packed | None) -> Any:
        if values is None:
            return None
        if like is not None:
            return _unpack(values, like, heads=heads)
        rows = values.squeeze(0)
        rows = rows.view(rows.shape[0], call.batch, -1, *rows.shape[2:]).transpose(0, 1)
        return rows if heads else rows.squeeze(1)

    return Results(
        restore(results.out, call.query), restore(results.lse, call.query), restore(results.row_max, call.query),
        restore(results.column_sums, call.key),
    )  # fmt: skip
