"""Views that torch composes of others, opened: `aten.mT` becomes a transpose, so that each rule knows few names.

Dynamo of torch 2.15 writes `x.mT`, `x.mH`, `x.T` and `x.H` as operators of ATen, and later releases may add others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from foci.compat.aten import OpOverload, OpOverloadPacket, read_schema
from foci.compat.fake import FakeTensorMode
from foci.fusion.fake_values import making
from foci.fusion.fx_utils import as_call, example_value, is_tensor
from foci.fusion.symbolic_element import PASSED
from foci.fusion.views import PARTS
from foci.ir.rule import Rule

__all__ = ["RULE", "open_views"]

_KNOWN: Final = PASSED | frozenset(PARTS)


def open_views(graph: fx.Graph, mode: FakeTensorMode | None) -> None:
    """Replaces each view that no rule knows by the views that torch makes it of; one that is itself basic stays."""
    for node in list(graph.nodes):
        steps = RULE.function(node, mode)
        if steps is not None:
            _put(graph, node, steps, mode)


Steps: TypeAlias = Callable[[fx.Node, FakeTensorMode | None], fx.Graph | None]
"""What an operator does to its first argument; None where it stays."""


def _is_view(node: fx.Node) -> bool:
    """Whether an operator of ATen gives one tensor that lies in the memory of its first argument, and writes nothing."""
    target = node.target
    if isinstance(target, OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]  # type: ignore[no-untyped-call]
    elif isinstance(target, OpOverload):
        overloads = [target]
    else:
        return False
    return is_tensor(node) and all(map(_gives_a_view, overloads))


def _gives_a_view(overload: Any) -> bool:
    schema = read_schema(overload)
    if schema is None:
        return False
    aliases = [value.alias_info for value in (*schema.arguments[:1], *schema.returns)]
    return len(schema.returns) == 1 and len(aliases) == 2 and all(a is not None and not a.is_write for a in aliases)


def _steps(node: fx.Node, mode: FakeTensorMode | None) -> fx.Graph | None:
    """Return what a view that no rule knows does to its source; None where it is one basic operation, or cannot be run."""
    call = as_call(node)
    if call is None or call.name in _KNOWN or not _is_view(node):
        return None
    rest, named = fx.map_arg((node.args[1:], node.kwargs), example_value)

    def run(source: Any) -> Any:
        return node.target(source, *rest, **named)  # type: ignore[operator]

    try:
        with making(mode), torch.no_grad():
            traced = make_fx(run)(example_value(node.args[0]))
    except Exception:  # a view that is no view of this tensor stays as it is
        return None
    operations = [step for step in traced.graph.nodes if step.op not in ("placeholder", "output")]
    same = len(operations) == 1 and operations[0].target in (node.target, getattr(node.target, "default", None))
    inputs = [step for step in traced.graph.nodes if step.op == "placeholder"]
    reads_one = all(step.op == "call_function" for step in operations) and len(inputs) == 1
    return traced.graph if reads_one and not same else None


# Examples are of `x` [4, 6].
RULE: Final[Rule[Steps]] = Rule(
    ("aten.*",), "a view that torch composes of others, as its schema and a trace say", _steps,
    ("torch.ops.aten.mT(x)", "torch.ops.aten.numpy_T(x)", "torch.ops.aten.mH.default(x)"),
    ("torch.ops.aten.unfold(x, 1, 2, 1)", "torch.ops.aten.moveaxis.int(x, 0, 1)", "torch.ops.aten.fliplr(x)",
     "torch.ops.aten.arccosh_(x)"))  # fmt: skip


def _put(graph: fx.Graph, node: fx.Node, steps: fx.Graph, mode: FakeTensorMode | None) -> None:
    table: dict[fx.Node, Any] = {}
    value = example_value(node)
    for step in steps.nodes:
        if step.op == "placeholder":
            table[step] = node.args[0]
        elif step.op == "output":
            node.replace_all_uses_with(table[step.args[0]])
        else:
            with graph.inserting_before(node):
                table[step] = graph.node_copy(step, table.__getitem__)
            args, named = fx.map_arg((table[step].args, table[step].kwargs), example_value)
            with making(mode), torch.set_grad_enabled(value.requires_grad):
                table[step].meta = {**node.meta, "example_value": step.target(*args, **named)}
    graph.erase_node(node)
