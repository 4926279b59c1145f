"""Functionalize in-place operations on values that the graph made itself.

`scores.masked_fill_(mask, low)` and `scores += bias` write a tensor that the graph made. If all later readers are known and none of them
reads a view, the write becomes the out-of-place operation, and later readers read its result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, fx

from foci.compat.fake import FakeTensorMode
from foci.fusion.fake_values import making
from foci.fusion.fx_utils import (
    Call,
    as_call,
    example_tensor,
    example_value,
    inplace_position,
    needs_grad,
    node_dtype,
    node_rank,
    runs_without_gradients,
    storage_id,
)
from foci.ir.rule import Rule, by_name

__all__ = ["ROUNDING_RULES", "WRITE_RULES", "without_writes"]


def without_writes(graph: fx.Graph, mode: FakeTensorMode | None) -> None:
    """Replaces in-place operations of `graph` by functional ones, where that changes nothing. Linear in the graph."""
    position = {node: n for n, node in enumerate(graph.nodes)}
    storages = {node: storage_id(node) for node in graph.nodes}
    aliases: dict[int | None, list[fx.Node]] = {}
    for node, storage in storages.items():
        aliases.setdefault(storage, []).append(node)
    for node in list(graph.nodes):
        call = as_call(node)
        rule = None if call is None else _WRITES.get(_form(node, call))
        if call is None or rule is None or not call.args or not isinstance(call.args[0], fx.Node):
            continue
        target = call.args[0]
        if runs_without_gradients(node) and any(map(needs_grad, node.all_input_nodes)):
            continue  # the written tensor keeps its gradient, where the functional operation gives a result without one
        if storages[target] is None or not _is_private(node, target, aliases[storages[target]], position):
            continue
        result = rule(Write(graph, node, call, target, position, mode))
        if result is not None:
            storages[result] = storages[target]  # a later write of the same tensor writes the result
            _rewire(result, target, position, mode)


@dataclass(frozen=True)
class Write:
    """A node that writes a tensor which the graph made itself.

    Attributes:
        target: the tensor.
        position: that of each node in the graph; a node that a rule inserts has the write's.
        mode: under which example values are made.
    """

    graph: fx.Graph
    node: fx.Node
    call: Call
    target: fx.Node
    position: dict[fx.Node, int]
    mode: FakeTensorMode | None


Becomes: TypeAlias = Callable[[Write], fx.Node | None]
"""Puts an operation in the place of a write, and gives the node that later readers read; None where the write stays."""


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


def _rewire(result: fx.Node, target: fx.Node, position: Mapping[fx.Node, int], mode: FakeTensorMode | None) -> None:
    """Later readers of `target` read the result of the write."""
    for user in list(target.users):
        if user is not result and position[user] > position[result]:
            user.replace_input_with(target, result)
    tensor = example_tensor(result)
    assert tensor is not None
    with making(mode):
        # a new tensor, because captures are identified by their example tensors
        result.meta["example_value"] = torch.empty_like(tensor).requires_grad_(tensor.requires_grad)


# ---- the forms of a write ----


def _form(node: fx.Node, call: Call) -> str:
    """How a node says that it writes, which is the name of a row; "" where it does not write, or in a way that no row reads."""
    if call.name == "setitem":
        return call.name
    if not call.in_place or "out" in call.kwargs:
        return ""
    if call.kwargs.get("inplace") is True:
        return "inplace=True"
    if node.op == "call_method" and str(node.target).endswith("_"):
        return "method_"
    return node.target.__name__ if node.target in _OPERATORS else ""  # type: ignore[union-attr]


def _fill(write: Write) -> fx.Node | None:
    """`x[mask] = number`, possibly with full slices before the mask, such as `x[:, :, mask]` and `x[..., mask]`."""
    _, key, number = write.call.args
    mask, target = _index_mask(key), example_tensor(write.target)
    where = None if mask is None else example_tensor(mask)
    if not isinstance(number, (int, float)) or target is None or not target.is_floating_point():
        return None
    leading = None if where is None or where.dtype is not torch.bool else _before(key, target, where)
    if mask is None or where is None or leading is None:
        return None
    trailing = target.dim() - leading - where.dim()
    if trailing:
        index: Any = (..., *(None,) * trailing)
        with write.graph.inserting_before(write.node):
            mask = write.graph.call_function(operator.getitem, (mask, index))
        write.position[mask] = write.position[write.node]
        with making(write.mode):
            mask.meta["example_value"] = where[index]
    write.node.target, write.node.args = torch.masked_fill, (write.target, mask, number)
    write.node.meta["example_value"] = target
    return write.node


def _index_mask(key: Any) -> fx.Node | None:
    last = key[-1] if isinstance(key, tuple) and key else key
    return last if isinstance(last, fx.Node) else None


def _before(key: Any, target: Tensor, where: Tensor) -> int | None:
    """Number of dimensions of the target before the mask's; None if they are not full slices."""
    lead = key[:-1] if isinstance(key, tuple) else ()
    if lead == (Ellipsis,):
        return target.dim() - where.dim()
    return len(lead) if all(isinstance(entry, slice) and entry == slice(None) for entry in lead) else None


def _keyword(write: Write) -> fx.Node | None:
    node, args = write.node, write.node.args
    function = getattr(Tensor, str(node.target), None) if node.op == "call_method" else node.target
    node.args = args[: inplace_position(node.target)]  # where the flag is given by position
    result = _operation(write, function, node.target, {**node.kwargs, "inplace": False})
    if result is None:
        node.args = args
    return result


def _method(write: Write) -> fx.Node | None:
    name = str(write.node.target).rstrip("_")
    return _operation(write, getattr(Tensor, name, None), name, write.node.kwargs)


_OPERATORS: Final[Mapping[Any, Callable[..., Any]]] = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul, operator.itruediv: operator.truediv,
    operator.iand: operator.and_, operator.ior: operator.or_, operator.ixor: operator.xor, operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod, operator.ipow: operator.pow,
}  # fmt: skip


def _operator(write: Write) -> fx.Node | None:
    function = _OPERATORS[write.node.target]
    return _operation(write, function, function, write.node.kwargs)


def _operation(write: Write, function: Any, target: Any, kwargs: dict[str, Any]) -> fx.Node | None:
    """Put `function`, which is the node's `target` then, in the write's place if its result has the written dtype or is rounded to it."""
    node, written = write.node, node_dtype(write.target)
    dtype = _result_dtype(write, function, kwargs) if callable(function) else None
    rounds = _ROUNDED.get(write.call.name)
    if dtype is None or (dtype != written and (rounds is None or not rounds(dtype, written))):
        return None
    node.target, node.kwargs = target, kwargs
    return node if dtype == written else _rounded(write, dtype)


def _result_dtype(write: Write, function: Callable[..., Any], named: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype that the operation itself gives; None if the result has other dims than the target."""

    def example(operand: fx.Node) -> Any:
        value = example_value(operand)
        # without a mode, a copy without memory: nothing is computed, and no random number drawn
        return value.to("meta") if write.mode is None and isinstance(value, Tensor) else value

    args, kwargs = fx.map_arg((write.node.args, named), example)
    with making(write.mode), torch.no_grad():
        try:
            result = function(*args, **kwargs)
        except Exception:  # such as an operation that has no example values: the write stays
            return None
    return result.dtype if isinstance(result, Tensor) and result.dim() == node_rank(write.target) else None


# Examples are statements that write `y`, which is `x * 2`: `x` floats [2, 3, 4, 6], `mask` where they are positive, `rows` four integers.
WRITE_RULES: Final[tuple[Rule[Becomes], ...]] = (
    Rule(("setitem",), "one number where a mask is true: masked_fill", _fill,
         ("y[mask] = 0.0", "y[:, :, mask[0, 0]] = -1.0", "y[..., mask[0, 0]] = 2", "y[:, mask[0, :, 0, 0]] = 1.0",
          "y[mask] = 0.0; y[~mask] = 1.0"),
         ("y[mask] = x.mean()", "y[:, rows] = 0.0", "y[0, mask[0]] = 0.0", "y = y.int(); y[mask] = 1", "x[mask] = 0.0")),
    Rule(("method_",), "a method with an underscore: the method without", _method,
         ("y.mul_(3)", "y = y.masked_fill_(mask, 0.0)", "y.clamp_(min=x)", "y = (y > 1).logical_and_(mask)"),
         ("y.gt_(0.0)", "y = y.half(); y.clamp_(min=x)", "y.unsqueeze_(0)", "y.zero_()", "x.mul_(3)")),
    Rule(("inplace=True",), "a function that is asked to write: the same, asked not to", _keyword,
         ("F.relu(y, inplace=True)", "y = F.leaky_relu(input=y, inplace=True)", "F.relu(y, True)", "y = F.hardtanh(y, -0.5, 0.5, True)"),
         ("F.relu(x, inplace=True)", "F.leaky_relu(x, 0.1, True)", "z = y[0]; F.relu(y, inplace=True); y = y + z")),
    Rule(tuple(function.__name__ for function in _OPERATORS), "an augmented assignment: its operator", _operator,
         ("y += x", "y /= 2", "y = y > 1; y &= mask"),
         ("y = y.half(); y **= x", "y = y.int(); y <<= 1", "x += 1", "z = y.view(-1); y += 1; y = z")),
)  # fmt: skip
_WRITES: Final[Mapping[str, Becomes]] = by_name(WRITE_RULES)


# ---- results in a wider dtype ----

Rounds: TypeAlias = Callable[[torch.dtype, torch.dtype], bool]
"""Whether a write rounds what is computed in the first dtype to the second, that of the tensor."""


def _is_float_to_float(computed: torch.dtype, written: torch.dtype) -> bool:
    return computed.is_floating_point and written.is_floating_point


ROUNDING_RULES: Final[tuple[Rule[Rounds], ...]] = (
    Rule(("add", "sub", "mul", "div"), "computed in the widest dtype of the operands, then rounded to the written one", _is_float_to_float,
         ("y = y.half(); y.add_(x)", "y = y.half(); y -= x", "y = y.half(); y *= x", "y = y.bfloat16(); y /= x",
          "y = y.half(); y += x; y.mul_(x)"),
         ("y = y.half(); y.pow_(x)", "y = y.half(); y.clamp_(x)", "y = y.int(); y += rows[:, None]")),
)  # fmt: skip
_ROUNDED: Final[Mapping[str, Rounds]] = by_name(ROUNDING_RULES)


def _rounded(write: Write, dtype: torch.dtype) -> fx.Node:
    """Round the result of a write back to the tensor's dtype, since the node now makes one of a wider dtype."""
    node = write.node
    tensor = example_tensor(node)
    assert tensor is not None
    readers = list(node.users)
    with write.graph.inserting_after(node):
        rounded = write.graph.call_method("to", (node, tensor.dtype))
    for reader in readers:
        reader.replace_input_with(node, rounded)
    rounded.meta = dict(node.meta)
    write.position[rounded] = write.position[node]
    with making(write.mode):
        node.meta["example_value"] = torch.empty_like(tensor, dtype=dtype).requires_grad_(tensor.requires_grad)
    return rounded
