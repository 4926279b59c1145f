"""Functionalize in-place operations on values that the graph made itself.

`scores.masked_fill_(mask, low)` and `scores += bias` write a tensor that the graph made. If all later readers are known and none of them
reads a view, the write becomes the out-of-place operation, and later readers read its result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, fx

from foci.compat.fake import FakeTensorMode
from foci.fusion.fake_values import making
from foci.fusion.fx_utils import Call, as_call, example_tensor, example_value, node_dtype, node_rank, storage_id

__all__ = ["without_writes"]

_OPERATORS: Final[Mapping[Any, Callable[..., Any]]] = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul, operator.itruediv: operator.truediv,
    operator.iand: operator.and_, operator.ior: operator.or_, operator.ixor: operator.xor, operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod, operator.ipow: operator.pow,
}  # fmt: skip

_ROUNDING: Final = frozenset(("add", "sub", "mul", "div"))
"""Operations that are computed in the widest dtype of their operands; a write rounds the result to that of what is written."""


def without_writes(graph: fx.Graph, mode: FakeTensorMode | None) -> None:
    """Replaces in-place operations of `graph` by functional ones, where that changes nothing. Linear in the graph."""
    position = {node: n for n, node in enumerate(graph.nodes)}
    storages = {node: storage_id(node) for node in graph.nodes}
    aliases: dict[int | None, list[fx.Node]] = {}
    for node, storage in storages.items():
        aliases.setdefault(storage, []).append(node)
    for node in list(graph.nodes):
        call = as_call(node)
        if call is not None and _is_fill(call):
            target = call.args[0]
            if storages[target] is not None and _is_private(node, target, aliases[storages[target]], position):
                _fill(graph, node, position, mode)
                _rewire(node, target, position, mode)
            continue
        if call is None or not call.in_place or not call.args or not isinstance(call.args[0], fx.Node) or "out" in call.kwargs:
            continue
        target = call.args[0]
        group = aliases[storages[target]]
        dtype = None
        if storages[target] is not None and _is_private(node, target, group, position):
            dtype = _result_dtype(node, target, mode)
        if dtype is None:
            continue
        if dtype == node_dtype(target):
            _make_functional(node)
            _rewire(node, target, position, mode)
        elif dtype.is_floating_point and node_dtype(target).is_floating_point and call.name in _ROUNDING:
            _make_functional(node)
            _rewire(_rounded(graph, node, dtype, position, mode), target, position, mode)


def _is_private(node: fx.Node, target: fx.Node, group: list[fx.Node], position: Mapping[fx.Node, int]) -> bool:
    """Whether the written memory is the graph's own and only `target` itself, or the result, is read after the write."""
    written = position[node]
    for member in group:
        if member.op in ("placeholder", "get_attr") or member.op not in ("call_function", "call_method"):
            return False
        if member in (target, node) or position[member] > written:
            continue
        if any(position[user] > written for user in member.users):
            return False
    return all(position[m] <= written or m is node or _follows(m, node, target) for m in group)


def _follows(member: fx.Node, node: fx.Node, target: fx.Node) -> bool:
    """Whether a later alias was made of the written tensor by way of `target` or the result."""
    seen = member
    while seen.args and isinstance(seen.args[0], fx.Node):
        seen = seen.args[0]
        if seen is node or seen is target:
            return True
    return False


def _result_dtype(node: fx.Node, target: fx.Node, mode: FakeTensorMode | None) -> torch.dtype | None:
    """Return the dtype that the operation itself gives without the underscore; None if the result has other dims than the target, or there
    is no such operation."""
    function = _functional_target(node)
    if function is None:
        return None

    def example(operand: fx.Node) -> Any:
        value = example_value(operand)
        # without a mode, a copy without memory: nothing is computed, and no random number drawn
        return value.to("meta") if mode is None and isinstance(value, Tensor) else value

    args, kwargs = fx.map_arg((node.args, node.kwargs), example)
    if "inplace" in kwargs:
        kwargs = {**kwargs, "inplace": False}
    with making(mode), torch.no_grad():
        try:
            result = function(*args, **kwargs)
        except Exception:  # such as an operation that has no example values: the write stays
            return None
    return result.dtype if isinstance(result, Tensor) and result.dim() == node_rank(target) else None


def _functional_target(node: fx.Node) -> Callable[..., Any] | None:
    """Find the function that computes the result of a write; None where there is none."""
    if node.kwargs.get("inplace") is True:
        return getattr(Tensor, str(node.target), None) if node.op == "call_method" else node.target  # type: ignore[return-value]
    if node.op == "call_method" and str(node.target).endswith("_"):
        method = getattr(Tensor, str(node.target).rstrip("_"), None)
        return method if callable(method) else None
    return _OPERATORS.get(node.target)


def _rounded(graph: fx.Graph, node: fx.Node, dtype: torch.dtype, position: dict[fx.Node, int], mode: FakeTensorMode | None) -> fx.Node:
    """Round the result of a write back to the tensor's dtype, since `node` now makes one of a wider dtype."""
    tensor = example_tensor(node)
    assert tensor is not None
    readers = list(node.users)
    with graph.inserting_after(node):
        rounded = graph.call_method("to", (node, tensor.dtype))
    for reader in readers:
        reader.replace_input_with(node, rounded)
    rounded.meta = dict(node.meta)
    position[rounded] = position[node]
    with making(mode):
        node.meta["example_value"] = torch.empty_like(tensor, dtype=dtype).requires_grad_(tensor.requires_grad)
    return rounded


def _is_fill(call: Call) -> bool:
    """Whether a call is `x[mask] = number`, possibly with full slices before the mask, such as `x[:, :, mask]` and `x[..., mask]`."""
    if call.name != "setitem" or not isinstance(call.args[0], fx.Node) or not isinstance(call.args[2], (int, float)):
        return False
    target, mask = example_tensor(call.args[0]), _index_mask(call.args[1])
    where = None if mask is None else example_tensor(mask)
    if target is None or where is None or where.dtype is not torch.bool or not target.is_floating_point():
        return False
    return _before(call.args[1], target, where) is not None


def _index_mask(key: Any) -> fx.Node | None:
    last = key[-1] if isinstance(key, tuple) and key else key
    return last if isinstance(last, fx.Node) else None


def _before(key: Any, target: Tensor, where: Tensor) -> int | None:
    """Number of dimensions of the target before the mask's; None if they are not full slices."""
    lead = key[:-1] if isinstance(key, tuple) else ()
    if lead == (Ellipsis,):
        return target.dim() - where.dim()
    return len(lead) if all(isinstance(entry, slice) and entry == slice(None) for entry in lead) else None


def _fill(graph: fx.Graph, node: fx.Node, position: dict[fx.Node, int], mode: FakeTensorMode | None) -> None:
    """`x[mask] = number` as `masked_fill(x, mask, number)`."""
    target, key, number = node.args
    mask = _index_mask(key)
    assert isinstance(target, fx.Node) and mask is not None
    target_tensor, where = example_tensor(target), example_tensor(mask)
    assert target_tensor is not None and where is not None
    leading = _before(key, target_tensor, where)
    assert leading is not None
    trailing = target_tensor.dim() - leading - where.dim()
    if trailing:
        index: Any = (..., *(None,) * trailing)
        with graph.inserting_before(node):
            mask = graph.call_function(operator.getitem, (mask, index))
        position[mask] = position[node]
        with making(mode):
            mask.meta["example_value"] = where[index]
    node.target, node.args = torch.masked_fill, (target, mask, number)
    node.meta["example_value"] = target_tensor


def _make_functional(node: fx.Node) -> None:
    """Give the node the target of `_functional_target`."""
    if node.kwargs.get("inplace") is True:
        node.kwargs = {**node.kwargs, "inplace": False}
    elif node.op == "call_method":
        node.target = str(node.target).rstrip("_")
    else:
        node.target = _OPERATORS[node.target]


def _rewire(node: fx.Node, target: fx.Node, position: Mapping[fx.Node, int], mode: FakeTensorMode | None) -> None:
    for user in list(target.users):
        if user is not node and position[user] > position[node]:
            user.replace_input_with(target, node)
    tensor = example_tensor(node)
    assert tensor is not None
    with making(mode):
        # An object of its own: captured values are told apart by their example tensors.
        node.meta["example_value"] = torch.empty_like(tensor).requires_grad_(tensor.requires_grad)
