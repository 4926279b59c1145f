"""Spellings that are brought to another before anything is recognised: rewrites of a few nodes."""

from __future__ import annotations

import operator

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from foci.graph.emit import Emitter, Sizes
from foci.graph.products import Product, product_of
from foci.graph.reading import Call, call_of, is_tensor, rank_of, value_of

__all__ = ["divided_early"]


def divided_early(graph: fx.Graph, sizes: Sizes, mode: FakeTensorMode | None) -> None:
    """Brings `(exp(x) @ v) / exp(x).sum(-1)` to `(exp(x) / exp(x).sum(-1)) @ v`."""
    for node in list(graph.nodes):
        call = call_of(node)
        if call is None or call.name != "div" or len(call.args) != 2 or not all(is_tensor(a) for a in call.args):
            continue
        product, total = product_of(call.args[0]), call_of(call.args[1])
        if product is None or total is None or not _is_late(product, total):
            continue
        raised = product.operands[0]
        emitter = Emitter(graph, node, mode, sizes)
        quotient = emitter.call(operator.truediv, raised, call.args[1])
        with graph.inserting_before(node):
            copy = graph.node_copy(product.node, {**{n: n for n in product.node.all_input_nodes}, raised: quotient}.__getitem__)
        copy.meta["example_value"] = value_of(node)
        node.replace_all_uses_with(copy)
        graph.erase_node(node)
        graph.erase_node(product.node)


def _is_late(product: Product, total: Call) -> bool:
    """Whether the left operand is exp(x), summed over by the product, and `total` its sum over the same dimension."""
    raised = product.operands[0]
    exponential = call_of(raised)
    if exponential is None or exponential.name != "exp" or total.name != "sum" or total.args[0] is not raised:
        return False
    dim = total.argument(1, "dim", total.kwargs.get("axis"))
    dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    labels = product.labels[0]
    return (
        dim in (-1, rank_of(raised) - 1)
        and bool(total.argument(2, "keepdim", False))
        and labels[-1] in product.summed
        and product.out[:-1] == labels[:-1]
        and product.addend is None
        and len(product.node.users) == 1
    )
