"""torch's composite attention functions, opened: their nodes take the call's place, so that what is in them is recognised. And views that
ask another tensor for its sizes, with the sizes themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from foci.compat.aten import ENCODER_LAYER
from foci.compat.fake import FakeTensorMode
from foci.fusion.fake_values import making
from foci.fusion.fx_utils import as_call, example_tensor, example_value

__all__ = ["name_sizes", "open_composites"]


def open_composites(graph: fx.Graph, mode: FakeTensorMode | None) -> frozenset[fx.Node]:
    """Replaces calls of the functions of nn.MultiheadAttention and nn.TransformerEncoderLayer by what they do.

    Gives the nodes that took their place.
    """
    inserted: set[fx.Node] = set()
    for node in list(graph.nodes):
        function = _COMPOSITES.get(node.target) if node.op == "call_function" else None
        if function is not None and not any(t.is_nested for t in map(example_tensor, node.all_input_nodes) if t is not None):
            inserted |= _opened(graph, node, function, mode)
    return frozenset(inserted)


_LIKE_ANOTHER: Final[Mapping[str, str]] = {"view_as": "view", "reshape_as": "reshape", "expand_as": "expand"}


def name_sizes(graph: fx.Graph) -> None:
    """Gives views like another tensor that one's sizes, where they are fixed: scores that are asked for their shape are read by no one."""
    for node in graph.nodes:
        call = as_call(node)
        example = example_tensor(node)
        if call is None or example is None or call.name not in _LIKE_ANOTHER or not all(isinstance(n, int) for n in example.shape):
            continue
        node.op, node.target = "call_method", _LIKE_ANOTHER[call.name]
        node.args, node.kwargs = (call.argument(0, "self", call.kwargs.get("input")), *example.shape), {}


def _attention(*args: Any, **kwargs: Any) -> Any:
    return F.multi_head_attention_forward(*args, **kwargs)


def _encoder_layer(
    src: Tensor, width: int, heads: int, qkv: Tensor, qkv_bias: Tensor, out: Tensor, out_bias: Tensor, use_gelu: bool, norm_first: bool,
    eps: float, norm1: Tensor, norm1_bias: Tensor, norm2: Tensor, norm2_bias: Tensor, up: Tensor, up_bias: Tensor, down: Tensor,
    down_bias: Tensor, mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """Decomposition of torch's inference kernel of nn.TransformerEncoderLayer. Its mask is true where a position is masked."""
    keep = None
    if mask is not None:
        hidden = mask.to(torch.bool)
        keep = ~(hidden[:, None, None] if mask_type == 1 else hidden)

    def attend(x: Tensor) -> Tensor:
        q, k, v = (t.reshape(*t.shape[:2], heads, -1).transpose(1, 2) for t in F.linear(x, qkv, qkv_bias).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return F.linear(mixed.transpose(1, 2).flatten(2), out, out_bias)

    def feed(x: Tensor) -> Tensor:
        inner = F.linear(x, up, up_bias)
        return F.linear(F.gelu(inner) if use_gelu else F.relu(inner), down, down_bias)

    def first(x: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), norm1, norm1_bias, eps)

    def second(x: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), norm2, norm2_bias, eps)

    if norm_first:
        x = src + attend(first(src))
        return x + feed(second(x))
    x = first(src + attend(src))
    return second(x + feed(x))


_COMPOSITES: Final[Mapping[Any, Callable[..., Any]]] = {
    F.multi_head_attention_forward: _attention,
    ENCODER_LAYER: _encoder_layer,
}


def _opened(graph: fx.Graph, node: fx.Node, function: Callable[..., Any], mode: FakeTensorMode | None) -> set[fx.Node]:
    kwargs = dict(node.kwargs)
    if isinstance(example_value(node), tuple) and not any(user.args[1] == 1 for user in node.users if len(user.args) > 1):
        kwargs["need_weights"] = False  # nobody reads them
    inputs = list(dict.fromkeys(_nodes((node.args, kwargs))))

    def run(*values: Any) -> Any:
        table = dict(zip(inputs, values, strict=True))
        args, named = fx.map_arg((node.args, kwargs), table.__getitem__)
        return function(*args, **named)

    values = example_value(node)
    grad = any(isinstance(v, Tensor) and v.requires_grad for v in (values if isinstance(values, tuple) else (values,)))
    with making(mode), torch.set_grad_enabled(grad):
        traced = make_fx(run, pre_dispatch=True)(*(example_value(n) for n in inputs))
    return _inserted(graph, node, traced.graph, inputs)


def _nodes(args: Any) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.map_arg(args, nodes.append)
    return nodes


def _inserted(graph: fx.Graph, node: fx.Node, body: fx.Graph, inputs: list[fx.Node]) -> set[fx.Node]:
    table = dict(zip((n for n in body.nodes if n.op == "placeholder"), inputs, strict=True))
    copies: set[fx.Node] = set()
    for inner in body.nodes:
        if inner.op == "placeholder":
            continue
        if inner.op == "output":
            results = inner.args[0]
            break
        with graph.inserting_before(node):
            copy = graph.node_copy(inner, table.__getitem__)
        if copy.target == torch.ops.aten.view.default:  # traced with the strides of torch's attention, which need not be foci's
            copy.target = torch.ops.aten.reshape.default
        copy.meta = {"example_value": inner.meta.get("val"), "stack_trace": node.stack_trace}
        table[inner] = copy
        copies.add(copy)
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(table[results])
    for user in list(node.users):
        user.replace_all_uses_with(table[results[user.args[1]]])
        graph.erase_node(user)
    graph.erase_node(node)
    return copies
