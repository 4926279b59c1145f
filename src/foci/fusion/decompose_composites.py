"""torch's composite attention functions, opened: their nodes take the call's place, so that what is in them is recognised. And views that
ask another tensor for its sizes, with the sizes themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from foci.compat.aten import ENCODER_LAYER
from foci.compat.fake import FakeTensorMode
from foci.fusion.fake_values import making
from foci.fusion.fx_utils import Call, as_call, example_tensor, example_value
from foci.ir.rule import Rule, by_name

__all__ = ["COMPOSITE_RULES", "SIZE_RULES", "name_sizes", "open_composites"]


def open_composites(graph: fx.Graph, mode: FakeTensorMode | None) -> frozenset[fx.Node]:
    """Replaces calls of the functions of nn.MultiheadAttention and nn.TransformerEncoderLayer by what they do.

    Gives the nodes that took their place.
    """
    inserted: set[fx.Node] = set()
    for node in list(graph.nodes):
        call = as_call(node)
        rule = None if call is None else _COMPOSITES.get(call.name)
        function = None if rule is None else rule(node)
        if function is not None:
            inserted |= _opened(graph, node, function, mode)
    return frozenset(inserted)


def name_sizes(graph: fx.Graph) -> None:
    """Gives views like another tensor that one's sizes, where they are fixed: scores that are asked for their shape are read by no one."""
    for node in graph.nodes:
        call, example = as_call(node), example_tensor(node)
        rule = None if call is None or example is None else _SIZES.get(call.name)
        view = None if call is None or example is None or rule is None else rule(call, example)
        if view is not None:
            node.op, node.target, node.args, node.kwargs = "call_method", *view, {}


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


Steps: TypeAlias = Callable[[fx.Node], Callable[..., Any] | None]
"""What a composite does, as a function of its arguments; None where it stays."""


def _steps(composite: Any, function: Callable[..., Any]) -> Steps:
    def steps(node: fx.Node) -> Callable[..., Any] | None:
        is_nested = any(t.is_nested for t in map(example_tensor, node.all_input_nodes) if t is not None)
        return function if node.target is composite and not is_nested else None

    return steps


# Examples are of `x`, tokens [2, 5, 8], and of `packed`, which is nested; the others are parameters: `w` and `c` project to queries, keys
# and values, `o` and `d` the result, `u` and `g`, then `n` and `d` are the two layers of the feed-forward. `similar` has other functions.
COMPOSITE_RULES: Final[tuple[Rule[Steps], ...]] = (
    Rule(("multi_head_attention_forward",), "the attention of nn.MultiheadAttention, and its projections",
         _steps(F.multi_head_attention_forward, _attention),
         ("F.multi_head_attention_forward(x, x, x, 8, 2, w, None, None, None, False, 0.0, o, None)[0]",
          "F.multi_head_attention_forward(x, x, x, 8, 2, w, c, None, None, True, 0.0, o, d)[1]"),
         ("F.multi_head_attention_forward(packed, packed, packed, 8, 2, w, None, None, None, False, 0.0, o, None)[0]",
          "similar.multi_head_attention_forward(x)")),
    Rule(("_transformer_encoder_layer_fwd",), "a layer of nn.TransformerEncoder in inference", _steps(ENCODER_LAYER, _encoder_layer),
         ("torch._transformer_encoder_layer_fwd(x, 8, 2, w, c, o, d, True, False, 1e-5, d, d, d, d, u, g, n, d)",
          "torch._transformer_encoder_layer_fwd(x, 8, 2, w, c, o, d, False, True, 1e-5, d, d, d, d, u, g, n, d)"),
         ("torch._transformer_encoder_layer_fwd(packed, 8, 2, w, c, o, d, True, False, 1e-5, d, d, d, d, u, g, n, d)",
          "similar._transformer_encoder_layer_fwd(x)")),
)  # fmt: skip
_COMPOSITES: Final[Mapping[str, Steps]] = by_name(COMPOSITE_RULES)


# ---- views that ask another tensor for its sizes ----

Named: TypeAlias = Callable[[Call, Tensor], tuple[str, tuple[Any, ...]] | None]
"""The method that takes sizes, and its arguments, of a call and the example of its result; None where the call stays."""


def _with_sizes(call: Call, example: Tensor) -> tuple[str, tuple[Any, ...]] | None:
    if not all(isinstance(n, int) for n in example.shape):
        return None
    return call.name.removesuffix("_as"), (call.argument(0, "self", call.kwargs.get("input")), *example.shape)


# Examples are of `x` and `y` [2, 12], and of `grown` [2, 12], whose first size is a symbol.
SIZE_RULES: Final[tuple[Rule[Named], ...]] = (
    Rule(("view_as", "reshape_as", "expand_as"), "a view like another tensor, with that one's sizes", _with_sizes,
         ("x.view(24, 1).view_as(y)", "x.mT.reshape_as(other=y)", "x[:1].expand_as(y)"),
         ("grown.view_as(grown)", "grown[:1].expand_as(grown)")),
)  # fmt: skip
_SIZES: Final[Mapping[str, Named]] = by_name(SIZE_RULES)


# ---- the composite's nodes in its place ----


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
