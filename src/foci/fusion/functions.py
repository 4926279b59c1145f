"""A softmax written as an autograd.Function: inlined if its backward is the derivative that autograd would compute.

The backward of a Function need not be the derivative of its forward, so Functions are usually left alone. But some contain a softmax whose
result is zero under a mask, even in fully masked rows, and the backward of torch's softmax: y (g - sum g y) for its result y and gradient
g. With p the softmax of scores filled with a constant under the mask, y = p elsewhere and 0 under it, autograd's gradient is p (g - sum g
p), summed over unmasked positions, and 0 under the mask: the same. With only one of the two fills it differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from foci.compat.fake import FakeTensorMode
from foci.compat.fx import SET_GRAD_ENABLED
from foci.fusion.fake_values import making
from foci.fusion.fx_utils import Call, as_call, example_value, is_tensor, needs_grad, node_dtype, node_rank
from foci.fusion.nested import named
from foci.fusion.value_numbering import Values
from foci.fusion.weights import as_softmax

__all__ = ["open_functions", "softmaxes_in"]


def softmaxes_in(module: fx.GraphModule, node: fx.Node) -> Iterator[fx.Node]:
    """Softmaxes in the forward of the Function that a node calls; none for any other node."""
    bodies = _bodies(module, node)
    if bodies is not None:
        yield from (inner for inner in bodies[0].nodes if as_softmax(inner) is not None)


def open_functions(module: fx.GraphModule, mode: FakeTensorMode | None) -> None:
    """Puts softmaxes with their masks in the place of Functions that do nothing else."""
    for node in list(module.graph.nodes):
        bodies = _bodies(module, node)
        if bodies is None:
            continue
        softmax = _read(node, *bodies)
        if softmax is not None:
            _open(module.graph, node, bodies[0], softmax, mode)


def _bodies(module: fx.GraphModule, node: fx.Node) -> tuple[fx.Graph, fx.Graph] | None:
    """Forward and backward of the Function that a node calls."""
    if getattr(node.target, "__name__", "") != "autograd_function_apply":
        return None
    forward, backward = (named(module, body) if isinstance(body, fx.Node) else None for body in node.args[:2])
    return None if forward is None or backward is None else (forward.graph, backward.graph)


@dataclass(frozen=True)
class _Softmax:
    """A Function's forward: softmax of an input, with what a mask hides filled by a constant before it, and by 0 after it.

    Attributes:
        scores: the input.
        node: the softmax.
        dim: the dimension that sums to one.
        fill: mask and constant, or nothing.
        results: names of the filled result.
        other_steps: what mask and constant are made of.
    """

    scores: fx.Node
    node: fx.Node
    dim: int
    fill: tuple[Any, ...]
    results: frozenset[fx.Node]
    other_steps: tuple[fx.Node, ...]


def _several(value: Any) -> tuple[Any, ...]:
    """The entries of a list; a single one as it is."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _parts(graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node], tuple[Any, ...]]:
    """Inputs, operations but for switches of autograd, and outputs."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    steps = [n for n in graph.nodes if n.op not in ("placeholder", "output") and n.target is not SET_GRAD_ENABLED]
    return inputs, steps, _several(graph.output_node().args[0])


def _read(node: fx.Node, forward: fx.Graph, backward: fx.Graph) -> _Softmax | None:
    """Read the Function that a node calls, if it is a softmax and its backward the softmax's; else None."""
    inputs, steps, outputs = _parts(forward)
    softmax = _softmax(forward, steps)
    if softmax is None or softmax.scores not in inputs or len(inputs) != len(node.args) - 2 or len(outputs) != 2:
        return None
    results, saved = map(_several, outputs)
    if not results or results[0] not in softmax.results:
        return None
    arguments = zip(inputs, node.args[2:], strict=True)
    if any(isinstance(arg, fx.Node) and needs_grad(arg) for inner, arg in arguments if inner is not softmax.scores):
        return None
    if not all(call is not None and call.name == "getitem" and call.args[1] == 0 for call in map(as_call, node.users)):
        return None  # more than one result is read
    saves = [len(results) + n for n, value in enumerate(saved) if value in softmax.results]
    return softmax if _is_its_derivative(backward, inputs.index(softmax.scores), saves, softmax) else None


def _softmax(graph: fx.Graph, steps: list[fx.Node]) -> _Softmax | None:
    """The softmax that the steps are, with their one mask; else None."""
    softmaxes = [softmax for step in steps if (softmax := as_softmax(step)) is not None]
    if len(softmaxes) != 1 or not all(is_tensor(step) or _is_size(step) for step in steps):
        return None
    (softmax,) = softmaxes
    before, after = as_call(softmax.source), [step for step in steps if step in softmax.node.users]
    scores: Any = softmax.source if before is None else before.argument(0, "input")
    if not is_tensor(scores):
        return None
    spelled = {softmax.node, *after, *(() if before is None else (softmax.source,))}
    other_steps = tuple(step for step in steps if step not in spelled)
    if any(call is None or call.in_place for call in map(as_call, other_steps)) or node_dtype(softmax.node) != node_dtype(scores):
        return None
    if {user for user in _readers(scores) if not _is_size(user)} != {softmax.node if before is None else softmax.source}:
        return None
    if before is None:
        return None if after else _Softmax(scores, softmax.node, softmax.dim, (), frozenset({softmax.node}), other_steps)
    last = as_call(after[0]) if len(after) == 1 else None
    if last is None or before.in_place or _readers(softmax.source) != {softmax.node} or not _fill_alike(graph, before, last):
        return None
    results = frozenset({after[0], softmax.node} if last.in_place else after)
    return _Softmax(scores, softmax.node, softmax.dim, before.args[1:], results, other_steps)


def _readers(node: fx.Node) -> set[fx.Node]:
    """Operations that read a node. Some versions of Dynamo return everything that a forward computes; such outputs do not count."""
    return {user for user in node.users if user.op != "output"}


def _is_size(node: Any) -> bool:
    """Whether a node is a tensor's shape or one of its sizes, which Dynamo asks for where sizes are symbols."""
    call = as_call(node) if isinstance(node, fx.Node) else None
    return call is not None and (call.name == "size" or (call.name == "getitem" and _is_size(call.args[0])))


def _fill_alike(graph: fx.Graph, before: Call, after: Call) -> bool:
    """Whether both fill under one mask, the latter with 0."""
    if not all(call.name == "masked_fill" and len(call.args) == 3 for call in (before, after)):
        return False
    return Values(graph).same(before.args[1], after.args[1]) and isinstance(after.args[2], (int, float)) and after.args[2] == 0


def _is_its_derivative(backward: fx.Graph, position: int, saves: list[int], softmax: _Softmax) -> bool:
    """Whether the gradient of the input at `position`, and no other, is that of a softmax with the result, which `saves` are."""
    inputs, steps, gradients = _parts(backward)
    call = as_call(steps[0]) if len(steps) == 1 else None
    if call is None or call.name != "_softmax_backward_data":
        return False
    gradient, result = call.argument(0, "grad_output"), call.argument(1, "output")
    dim, dtype = call.argument(2, "dim"), call.argument(3, "input_dtype")
    if gradient is not inputs[0] or result not in [n for place, n in enumerate(inputs) if place in saves]:
        return False
    if not isinstance(dim, int) or dim % node_rank(softmax.node) != softmax.dim or dtype != node_dtype(softmax.node):
        return False
    return all(g is (steps[0] if n == position else None) for n, g in enumerate(gradients))


def _open(graph: fx.Graph, node: fx.Node, forward: fx.Graph, softmax: _Softmax, mode: FakeTensorMode | None) -> None:
    """Puts a softmax and its mask in the place of the Function."""
    table: dict[Any, Any] = dict(zip(_parts(forward)[0], node.args[2:], strict=True))
    trace = softmax.node.meta.get("stack_trace") or softmax.node.stack_trace

    def emit(function: Any, *args: Any) -> fx.Node:
        new = graph.call_function(function, args)
        with making(mode), torch.enable_grad():
            new.meta = {"example_value": function(*map(example_value, args)), "stack_trace": trace}
        return new

    with graph.inserting_before(node):
        for inner in softmax.other_steps:
            table[inner] = graph.node_copy(inner, table.__getitem__)
        result, fill = table[softmax.scores], [table.get(arg, arg) for arg in softmax.fill]
        if fill:
            result = emit(torch.masked_fill, result, *fill)
        result = emit(torch.softmax, result, softmax.dim)
        if fill:
            result = emit(torch.masked_fill, result, fill[0], 0)
    for user in list(node.users):
        user.replace_all_uses_with(result)
        graph.erase_node(user)
    graph.erase_node(node)
