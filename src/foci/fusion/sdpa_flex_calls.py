"""Calls that are attention by name: torch's scaled_dot_product_attention and flex_attention, lowered to foci's operator."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import fx

from foci.blocks import classes_of_lists
from foci.fusion.emit import Emitter
from foci.fusion.fx_utils import (
    Size,
    as_call,
    example_tensor,
    example_value,
    fixed_number,
    is_tensor,
    needs_grad,
    node_device,
    node_dtype,
    node_shape,
    same_size,
)
from foci.fusion.indices import Digit, Digits, Index, NeedsSplit, NoRule, broadcast_index
from foci.fusion.lower import Asked, Prepared, attention, prepare
from foci.fusion.match import Atoms, Match, Place
from foci.fusion.materialise import estimate_prices
from foci.fusion.symbolic_element import Lift
from foci.fusion.weights import Walk
from foci.ir import expr as ir
from foci.ir.expr import DType, Expr
from foci.ir.ops import apply
from foci.problem import Outputs
from foci.trace_functions import bind

__all__ = ["is_flex", "is_sdpa", "lower_flex", "prepare_sdpa"]


def is_sdpa(node: fx.Node) -> bool:
    """Whether a node calls `scaled_dot_product_attention`."""
    call = as_call(node)
    return call is not None and call.name == "scaled_dot_product_attention" and is_tensor(node)


def is_flex(node: fx.Node) -> bool:
    """Whether a node calls FlexAttention."""
    return node.op == "call_function" and node.target is torch.ops.higher_order.flex_attention


_SDPA: Final = {
    "query": None, "key": None, "value": None, "attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None,
    "enable_gqa": False,
}  # fmt: skip
"""Arguments of scaled_dot_product_attention in their order, with their defaults."""


class _Atoms:
    """Atoms of the dimensions of a call, split where heads are grouped."""

    def __init__(self) -> None:
        self._fresh = itertools.count(1)
        self.split: dict[Expr, Size] = {}

    def of(self, size: Size) -> Digits:
        if same_size(size, 1):
            return ()
        digit = Digit(ir.axis(-next(self._fresh)), size)
        low = self.split.get(digit.expr)
        if low is None:
            return (digit,)
        return tuple(Digit(ir.axis(-next(self._fresh)), n) for n in (size // low, low))


def prepare_sdpa(node: fx.Node) -> Prepared:
    """The attention of a call of scaled_dot_product_attention.

    Raises:
        NoRule: with what stood in the way.
    """
    split: dict[Expr, Size] = {}
    for _ in range(8):
        atoms = _Atoms()
        atoms.split = split
        try:
            return prepare(_sdpa(node, atoms))
        except NeedsSplit as request:
            split[request.atom] = request.low
    raise NoRule("the heads are repeated in too many ways")


def _sdpa(node: fx.Node, atoms: _Atoms) -> Match:
    call = as_call(node)
    assert call is not None
    query, key, value, mask, dropout, causal, scale, grouped = (call.argument(n, *item) for n, item in enumerate(_SDPA.items()))
    if any((t := example_tensor(x)) is None or t.is_nested for x in (query, key, value)):
        raise NoRule("nested tensors")
    lead = node_shape(node)[:-2]
    shared = [atoms.of(n) for n in lead]
    if grouped and not same_size(node_shape(key)[-3], lead[-1]) and len(shared[-1]) == 1:
        raise NeedsSplit(shared[-1][0].expr, lead[-1] // node_shape(key)[-3])
    rows, columns, depth = (atoms.of(n) for n in (node_shape(query)[-2], *node_shape(key)[-2:]))
    width = atoms.of(node_shape(value)[-1])

    def place(operand: fx.Node, *inner: Digits) -> Place:
        shape = node_shape(operand)[:-2]
        theirs = zip(shape, shared[len(shared) - len(shape) :], lead[len(lead) - len(shape) :], strict=True)
        index = [() if same_size(n, 1) else d if same_size(n, full_size) else d[:1] for n, d, full_size in theirs]
        return Place(operand, (*index, *inner))

    number = fixed_number(dropout)
    if not isinstance(number, (int, float)):
        raise NoRule("a dropout whose probability is no constant")
    lift = Lift(node_device(query), lambda n, i: None, frozenset(), grad=needs_grad(node))
    counted = {"b": tuple(d for dim in shared for d in dim), "q_idx": rows, "kv_idx": columns}
    lift.prices = estimate_prices(node_device(query), counted, lift.number, needs_backward=needs_grad(node))
    score = _scored(lift, (*shared, rows, columns), mask, scale, node_shape(query)[-1], causal=bool(fixed_number(causal)))
    walk = Walk((*shared, rows, columns), dropout=float(number))
    flat = tuple(d for dim in shared for d in dim)
    return Match(
        node, (node_dtype(query), node_dtype(node)), place(query, rows, depth), place(key, columns, depth), place(value, columns, width),
        Atoms(flat, rows, columns, depth, width), score, walk, None, lift, frozenset({node}), (*shared, rows, width),
    )  # fmt: skip


def _scored(lift: Lift, index: Index, mask: Any, scale: Any, depth: Size, *, causal: bool) -> Expr:
    factor = 1.0 / math.sqrt(int(depth)) if scale is None else fixed_number(scale)
    if factor is None:
        raise NoRule("a scale that is a tensor")
    score = apply("mul", ir.variable("score"), float(factor))
    if causal:
        return apply("where", apply("le", *(_position(d) for d in (index[-1], index[-2]))), score, -math.inf)
    if mask is None:
        return score
    if not is_tensor(mask):
        raise NoRule("a mask that is no tensor")
    value = lift.element(mask, broadcast_index(index, node_shape(mask)))
    return apply("where", value, score, -math.inf) if value.dtype is DType.BOOL else apply("add", score, value)


def _position(digits: Digits) -> Expr:
    return digits[0].expr if digits else ir.const(0)


_NO_LIMIT: Final = 1 << 24


def lower_flex(node: fx.Node, emitter: Emitter) -> tuple[str, tuple[fx.Node | None, ...]]:
    """Adds the nodes of a call of flex_attention; gives the printed variant and what replaces its results.

    Raises:
        NoRule, TraceError: with what stood in the way.
    """
    query, key, value, score_mod, block_mask, scale, _, score_buffers, mask_buffers = node.args[:9]
    operands = [_as_node(t) for t in (query, key, value)]
    nodes = {id(example_tensor(b)): b for b in (*_listed(score_buffers), *_listed(mask_buffers)) if is_tensor(b)}
    parts = list(block_mask) if isinstance(block_mask, (tuple, list)) else []
    score = _function(node, score_mod, score_buffers)
    mask = _function(node, parts[-1], mask_buffers)
    block_size = _block_size(parts)
    bound = bind(score, mask, node_device(operands[0]), block_size)
    if any(id(t) not in nodes for t in bound.captures):
        raise NoRule("a function of flex_attention makes a tensor of its own")
    blocks = None if block_size is None else emitter.call(classes_of_lists, *parts[2:6])
    outputs = Outputs(lse=_is_read(node, 1), row_max=_is_read(node, 2))
    batch = node_shape(operands[0])[0]
    alike = [same_size(node_shape(t)[0], batch) for t in operands]
    wide = () if all(alike) else (emitter.size(batch), -1, -1, -1)
    operands = [t if same else emitter.method("expand", t, *wide) for t, same in zip(operands, alike, strict=True)]
    captures = [nodes[id(t)] for t in bound.captures]
    asked = Asked(float(fixed_number(scale)), 0.0, outputs, blocks)
    call = attention(emitter, operands, bound, captures, asked)
    logarithm = emitter.call(operator.mul, call[1], 1.0 / math.log(2.0)) if outputs.lse else None
    highest = emitter.call(operator.mul, call[2], 1.0 / math.log(2.0)) if outputs.row_max else None
    return str(bound.variant), (call[0], logarithm, highest)


def _as_node(arg: Any) -> fx.Node:
    assert isinstance(arg, fx.Node)
    return arg


def _listed(arg: Any) -> Sequence[Any]:
    return arg if isinstance(arg, (tuple, list)) else ()


def _is_read(node: fx.Node, position: int) -> bool:
    return any(u.args[1] == position and bool(u.users) for u in node.users if u.target is operator.getitem)


def _function(node: fx.Node, graph: Any, buffers: Any) -> Callable[..., Any]:
    """A subgraph as a function of symbols, with what it closes over."""
    owner = node.graph.owning_module
    assert owner is not None
    module = getattr(owner, str(graph.target))
    examples = [example_value(b) for b in _listed(buffers)]
    return lambda *symbols: module(*symbols, *examples)


def _block_size(parts: Sequence[Any]) -> tuple[int, int] | None:
    """Queries and keys of a block mask's block; None where one block covers all. A formula holds them as numbers, so that one which
    Dynamo made a symbol is guarded."""
    block_q, block_kv = int(fixed_number(parts[-3])), int(fixed_number(parts[-2]))
    return None if min(block_q, block_kv) >= _NO_LIMIT else (block_q, block_kv)
