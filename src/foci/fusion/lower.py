"""A match as nodes: foci's operator, and what surrounds it."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from foci.fusion.emit import Emitter
from foci.fusion.fx_utils import is_half, node_device, node_dtype, node_shape, size_hint
from foci.fusion.indices import Digits, NeedsSplit, NoRule, broadcast_index, count_values
from foci.fusion.layout import Layout, arrange, source_place, uncast_place
from foci.fusion.masking import canonical, leading_scale, masked
from foci.fusion.match import Match, Place
from foci.fusion.profitable import obstacle
from foci.fusion.symbolic_element import Lift
from foci.fusion.views import step
from foci.ir import expr as ir
from foci.ir.expr import DType, Expr
from foci.ir.ops import apply
from foci.ir.simplify import simplify
from foci.operator.op_schema import flatten
from foci.problem import Formula, Operands, Outputs
from foci.problem import Layout as Rows
from foci.trace_functions import Bound, bind_expressions

__all__ = ["Asked", "Lowered", "Prepared", "attention", "lower", "prepare"]


@dataclass(frozen=True, eq=False)
class Asked:
    """Options of the operator's call besides its operands."""

    scale: float
    dropout: float = 0.0
    outputs: Outputs = field(default_factory=Outputs)
    blocks: fx.Node | None = None


@dataclass(frozen=True, eq=False)
class Prepared:
    """A match that can be lowered: its layout, operands and variant.

    Attributes:
        uniform: rows that attend to nothing have uniform weights.
        lowest: all scores of such rows.
        dtype: the operator computes in it.
    """

    match: Match
    layout: Layout
    query: Place
    key: Place
    value: Place
    bound: Bound
    scale: float
    uniform: bool
    lowest: float
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Lowered:
    """Node that replaces the second product, and nodes that replace logsumexps."""

    out: fx.Node
    logsumexps: dict[fx.Node, fx.Node]


def prepare(match: Match) -> Prepared:
    """Layout, operands and variant of a match.

    Raises:
        NoRule: with what stood in the way.
        NeedsSplit: where heads are repeated within one dimension.
    """
    number, element = match.lift.number, match.lift.element
    query, key, value, dtype = _operands(match)
    key, value = (source_place(p, match.atoms, number, element) for p in (key, value))
    layout = arrange(match.atoms, key, value)
    masked_score = masked(layout.placed(match.score, number))
    _check_zeroed(match, layout, masked_score.mask)
    score, scale = leading_scale(masked_score.score)
    if not math.isfinite(scale):
        raise NoRule("the scores are scaled by infinity")
    if any(e.op == "axis" and isinstance(e.value, int) and e.value < 0 for root in (score, masked_score.mask) for e in root.walk()):
        raise NoRule("the scores depend on something that is no position")
    if size_hint(count_values(layout.depth)) == 0:
        raise NoRule("query and key have no head dim: every score is 0")
    lengths = (size_hint(count_values(digits)) for digits in (layout.queries, layout.keys))
    unprofitable = obstacle(node_device(match.node).type, *lengths)
    if unprofitable is not None:
        raise NoRule(unprofitable)
    bound = bind_expressions(score, masked_score.mask, match.lift.tracer)
    uniform = masked_score.uniform and match.sink is None and not match.walk.zeroed
    if masked_score.uniform and any(-masked_score.lowest * torch.finfo(node_dtype(n)).eps < _SWALLOWED for n in match.logsumexps):
        raise NoRule("the logsumexp of rows that attend to nothing is read")
    lowest = masked_score.lowest if masked_score.uniform else -math.inf
    return Prepared(match, layout, query, key, value, bound, scale, uniform, lowest, dtype)


_SWALLOWED: Final = 16.0
"""Bound on a score, or on the logarithm of a length: added to a lowest number, it must be lost in rounding."""


def _operands(match: Match) -> tuple[Place, Place, Place, torch.dtype]:
    """Query, key and value, narrow where they were widened, and the dtype to compute in."""
    number, element = match.lift.number, match.lift.element
    places = [match.query, match.key, match.value]
    narrow = [uncast_place(p, number, element) for p in places]
    dtypes = [match.dtypes[0], match.dtypes[0], match.dtypes[1]]
    halves = {half for _, half in narrow if half is not None} | {d for d in dtypes if is_half(d)}
    is_half_precision = [half is not None or is_half(d) for (_, half), d in zip(narrow, dtypes, strict=True)]
    if len(halves) == 1 and all(is_half_precision):
        return (*(n if half is not None else p for p, (n, half) in zip(places, narrow, strict=True)), halves.pop())  # type: ignore[return-value]
    return places[0], places[1], places[2], torch.promote_types(dtypes[0], dtypes[2])


def _check_zeroed(match: Match, layout: Layout, mask: Expr) -> None:
    """Weights that are zeroed after the softmax must be masked before it."""
    for node, index, when in match.walk.zeroed:
        zero = match.lift.element(node, broadcast_index(index, node_shape(node)))
        zero = zero if zero.dtype is DType.BOOL else apply("ne", zero, ir.const(0))
        zero = canonical(layout.placed(zero if when else apply("not", zero), match.lift.number))
        if simplify(apply("not", zero)) is not mask and simplify(apply("and", mask, zero)) is not ir.const(False):
            raise NoRule("weights that the scores do not mask are zeroed after the softmax")


def attention(
    emitter: Emitter, operands: Sequence[fx.Node], bound: Bound, captures: Sequence[fx.Node], asked: Asked
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """A call of the operator on [B, H, S, D] operands: the nodes of `out`, `lse` and `row_max`."""
    seed = None
    if asked.dropout > 0.0:
        seed = emitter.call(torch.randint, 0, 2**63 - 1, (1,), dtype=torch.int64, device=node_device(operands[0]))
    formula = Formula(bound.variant, Rows.DENSE, asked.outputs, asked.dropout > 0.0, bound.block_size)
    ints, floats = (tuple(emitter.size(n) for n in numbers) for numbers in (bound.ints, bound.floats))
    # Nodes stand where tensors and numbers will be.
    arguments: Any = (*operands, tuple(captures), ints, floats, asked.scale, asked.dropout, seed, asked.blocks)
    call = emitter.call(torch.ops.foci.attention.default, *flatten(formula, Operands(*arguments), None))
    out, lse, row_max = (emitter.call(operator.getitem, call, n) for n in range(3))
    return out, lse, row_max


def captured_nodes(emitter: Emitter, bound: Bound, lift: Lift, device: torch.device) -> list[fx.Node]:
    """The nodes of the captured tensors, on the attention's device, copied to be contiguous where that pays."""
    nodes = []
    for tensor in bound.captures:
        node = lift.leaves[lift.tracer.slot(tensor)]
        if node in lift.copied:
            node = emitter.copy_contiguous(node)
        if tensor.device != device:
            if tensor.dim():
                raise NoRule(f"{node.name} is on {tensor.device}, the scores on {device}")
            node = emitter.method("to", node, device)
        nodes.append(node)
    return nodes


def lower(prepared: Prepared, emitter: Emitter) -> Lowered:
    """Adds the nodes; gives those that replace the second product and what else reads the scores."""
    match, layout = prepared.match, prepared.layout
    groups = (layout.batch, layout.heads, layout.queries, layout.depth)
    kv_heads = layout.heads[: layout.kv_heads]
    query = emitter.operand(prepared.query, groups, full_sizes=(True, True, True, True))
    key = emitter.operand(prepared.key, (layout.batch, kv_heads, layout.keys, layout.depth), full_sizes=(True, True, True, True))
    value = emitter.operand(prepared.value, (layout.batch, kv_heads, layout.keys, layout.width), full_sizes=(True, True, True, True))
    operands = [_cast(emitter, node, prepared.dtype) for node in (query, key, value)]
    captures = captured_nodes(emitter, prepared.bound, match.lift, node_device(query))
    outputs = Outputs(lse=match.sink is not None or prepared.uniform or bool(match.logsumexps))
    out, lse, _ = attention(emitter, operands, prepared.bound, captures, Asked(prepared.scale, match.walk.dropout, outputs))
    if match.sink is not None:
        out = _with_sink(emitter, match, layout, out, lse)
    if prepared.uniform:
        out = _with_uniform_rows(emitter, out, lse, operands[2])
    if match.walk.scale != 1.0:
        out = emitter.call(operator.mul, out, match.walk.scale)
    result_groups = (layout.batch, layout.heads, layout.queries, layout.width)
    out = emitter.result(out, result_groups, match.out, node_shape(match.node))
    for factor in match.walk.factors:
        out = emitter.call(operator.mul, out, factor)
    if match.walk.added is not None:
        addend, factor = match.walk.added
        out = emitter.call(torch.add, addend if factor == 1 else emitter.call(operator.mul, addend, factor), out)
    logsumexps = {node: _logsumexp(emitter, prepared, lse, node) for node in match.logsumexps}
    return Lowered(_cast(emitter, out, match.dtypes[1]), logsumexps)


def _logsumexp(emitter: Emitter, prepared: Prepared, lse: fx.Node, node: fx.Node) -> fx.Node:
    """Replacement of a logsumexp of the scores."""
    layout, groups = prepared.layout, (prepared.layout.batch, prepared.layout.heads, prepared.layout.queries)
    index = [digits for digits in prepared.match.walk.index if digits != layout.keys or not digits]
    if len(node_shape(node)) > len(index):  # keepdim
        index.insert(prepared.match.walk.index.index(layout.keys), ())
    if {d.expr for dim in index for d in dim} != {d.expr for group in groups for d in group}:
        raise NoRule("the logsumexp is of scores that several heads share")
    if math.isfinite(prepared.lowest):
        lse = emitter.call(torch.where, emitter.call(operator.eq, lse, -math.inf), prepared.lowest, lse)
    return _cast(emitter, emitter.result(lse, groups, index, node_shape(node)), node_dtype(node))


def _cast(emitter: Emitter, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if node_dtype(node) == dtype else emitter.method("to", node, dtype)


def _with_sink(emitter: Emitter, match: Match, layout: Layout, out: fx.Node, lse: fx.Node) -> fx.Node:
    """A logit without a value scales its row by sigmoid(lse - sink)."""
    assert match.sink is not None
    node, index = match.sink
    logit: fx.Node | float
    if isinstance(node, fx.Node):
        place = _narrowest(Place(node, index), match)
        groups: tuple[Digits, ...] = (layout.batch, layout.heads, layout.queries)
        logit = _cast(emitter, emitter.operand(place, groups, full_sizes=(False, False, False)), node_dtype(lse))
    else:
        logit = node
    share = emitter.call(torch.sigmoid, emitter.call(operator.sub, lse, logit))
    scaled = emitter.call(operator.mul, out, emitter.method("unsqueeze", share, -1))
    return _cast(emitter, scaled, node_dtype(out))


def _narrowest(place: Place, match: Match) -> Place:
    node, index = place.node, place.index
    while True:
        try:
            moved = step(node, index, match.lift.number, match.lift.element)
        except (NoRule, NeedsSplit):
            return Place(node, index)
        if moved is None or any(d.expr.op != "axis" for dim in moved[1] for d in dim):
            return Place(node, index)
        node, index = moved


def _with_uniform_rows(emitter: Emitter, out: fx.Node, lse: fx.Node, value: fx.Node) -> fx.Node:
    """Rows that attend to nothing take the mean of the values."""
    mean = emitter.method("mean", value, 2, True)
    heads, kv_heads = node_shape(out)[1], node_shape(value)[1]
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads != kv_heads:
        mean = emitter.method("repeat_interleave", mean, heads // kv_heads, 1)
    nothing = emitter.call(operator.eq, emitter.method("unsqueeze", lse, -1), -math.inf)
    return emitter.call(torch.where, nothing, mean, out)
