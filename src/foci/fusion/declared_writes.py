"""Tensors that an operation writes though its name does not end in an underscore: by its schema, or by what its arguments ask for."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from foci.compat.aten import OpOverload, OpOverloadPacket, read_schema

__all__ = ["declared_writes"]

Parameter: TypeAlias = tuple[int | None, str]
"""Position, None for a keyword alone, and name."""


def declared_writes(node: fx.Node) -> tuple[Any, ...]:
    """The arguments that a node writes by its schema, or because it trains running statistics or renormalises a table."""
    if node.op != "call_function":
        return ()
    parameters = _written_parameters(node.target)
    conditional = _CONDITIONAL.get(getattr(getattr(node.target, "overloadpacket", node.target), "__name__", ""))
    if conditional is not None:
        (position, name, default), functional, other = conditional
        switch = _argument(node, (position, name), default)
        if switch is not None and switch is not False:
            is_functional = getattr(torch.nn.functional, getattr(node.target, "__name__", ""), None) is node.target
            parameters += functional if is_functional else other
    values = (_argument(node, parameter) for parameter in parameters)
    return tuple(value for value in values if value is not None)


def _argument(node: fx.Node, parameter: Parameter, default: Any = None) -> Any:
    position, name = parameter
    if position is not None and len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


_RUNNING: Final = (((1, "running_mean"), (2, "running_var")), ((3, "running_mean"), (4, "running_var")))
_TABLE: Final = (((1, "weight"),), ())
# By name: the argument that asks for the write, with its default; what a function of torch.nn.functional writes, and what torch's does.
_CONDITIONAL: Final[Mapping[str, tuple[tuple[int, str, Any], tuple[Parameter, ...], tuple[Parameter, ...]]]] = {
    "batch_norm": ((5, "training", False), *_RUNNING), "native_batch_norm": ((5, "training", False), *_RUNNING),
    "cudnn_batch_norm": ((5, "training", False), *_RUNNING), "miopen_batch_norm": ((5, "training", False), *_RUNNING),
    "_batch_norm_impl_index": ((5, "training", False), *_RUNNING), "instance_norm": ((5, "use_input_stats", True), *_RUNNING),
    "embedding": ((3, "max_norm", None), *_TABLE), "embedding_bag": ((3, "max_norm", None), *_TABLE),
}  # fmt: skip


@functools.cache
def _written_parameters(target: Any) -> tuple[Parameter, ...]:
    """The tensors that an operator writes according to its schema; of several overloads by position, those that each writes."""
    name = getattr(target, "__name__", "")
    if getattr(torch, name, None) is target:
        target = getattr(torch.ops.aten, name, None)
    if isinstance(target, OpOverload):
        return _written_in(target)
    if not isinstance(target, OpOverloadPacket):
        return ()
    overloads = [_written_in(getattr(target, name)) for name in target.overloads()]  # type: ignore[no-untyped-call]
    named = {parameter: None for written in overloads for parameter in written if parameter[0] is None}
    return (*(p for p in overloads[0] if p[0] is not None and all(p in written for written in overloads)), *named) if overloads else ()


def _written_in(overload: Any) -> tuple[Parameter, ...]:
    schema = read_schema(overload)
    if schema is None:
        return ()
    written = ((n, a) for n, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    return tuple((None if a.kwarg_only else n, a.name) for n, a in written)
