"""From scores to weights: the spellings of softmax, and what may stand between it and the second product."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from torch import fx

from foci.fusion.fx_utils import (
    CASTS,
    Call,
    as_call,
    example_value,
    fixed_number,
    is_tensor,
    is_written,
    needs_grad,
    node_dtype,
    node_rank,
    node_shape,
    same_size,
    single,
)
from foci.fusion.indices import Index, NoRule, broadcast_index
from foci.fusion.is_binary import is_truth
from foci.fusion.symbolic_element import Lift, stops_gradient
from foci.fusion.views import VIEWS, step
from foci.ir.rule import Rule, by_name
from foci.ir.simplify import simplify

__all__ = ["BETWEEN", "BETWEEN_RULES", "SOFTMAX_RULES", "Passed", "Softmax", "Walk", "as_softmax", "walk_up"]


@dataclass(frozen=True)
class Softmax:
    """A softmax in a graph.

    Attributes:
        node: its result.
        source: the scores.
        dim: the dimension that sums to one.
        inside: every node of the spelling, the result included.
    """

    node: fx.Node
    source: fx.Node
    dim: int
    inside: frozenset[fx.Node]


def as_softmax(node: fx.Node) -> Softmax | None:
    """The softmax whose result `node` is, or None."""
    call = as_call(node)
    if call is None or not is_tensor(node):
        return None
    read = _SOFTMAXES.get(call.name)
    return None if read is None else read(node, call)


def _match_softmax(node: fx.Node, call: Call) -> Softmax | None:
    source, dim = call.argument(0, "input"), call.argument(1, "dim", -1)
    if not is_tensor(source) or not isinstance(dim, int):
        return None
    return Softmax(node, source, dim % node_rank(source), frozenset({node}))


def _match_exp(node: fx.Node, call: Call) -> Softmax | None:
    inner = as_call(call.args[0]) if call.args and isinstance(call.args[0], fx.Node) else None
    if inner is None or is_written(call.args[0]):
        return None
    if inner.name == "sub":
        return _match_exp_minus_logsumexp(node, call.args[0], inner)
    if inner.name not in ("log_softmax", "_log_softmax"):
        return None
    source, dim = inner.argument(0, "input"), inner.argument(1, "dim", -1)
    return Softmax(node, source, dim % node_rank(source), frozenset({node, call.args[0]})) if isinstance(dim, int) else None


def _match_exp_minus_logsumexp(node: fx.Node, difference: fx.Node, inner: Call) -> Softmax | None:
    """exp(x - logsumexp(x, dim)), with the dimension kept or put back."""
    if len(inner.args) != 2 or inner.kwargs or not all(is_tensor(a) for a in inner.args):
        return None
    source, logarithm = inner.args
    logsumexp, inside = as_call(logarithm), {node, difference, logarithm}
    back = None
    if logsumexp is not None and logsumexp.name == "unsqueeze":
        back, logarithm = logsumexp.argument(1, "dim"), logsumexp.args[0]
        logsumexp = as_call(logarithm)
        inside.add(logarithm)
    if (
        logsumexp is None
        or logsumexp.name != "logsumexp"
        or logsumexp.args[0] is not source
        or any(map(is_written, (source, inner.args[1])))
    ):
        return None
    if needs_grad(inner.args[1]) != needs_grad(source):
        return None
    dim, rank = single(logsumexp.argument(1, "dim", logsumexp.kwargs.get("axis"))), node_rank(source)
    keeps_dim = bool(logsumexp.argument(2, "keepdim", False))
    if not isinstance(dim, int) or keeps_dim != (back is None) or (back is not None and back % rank != dim % rank):
        return None
    return Softmax(node, source, dim % rank, frozenset(inside))


# Examples are of `x` [2, 3, 4, 6].
SOFTMAX_RULES: Final[tuple[Rule[Callable[[fx.Node, Call], Softmax | None]], ...]] = (
    Rule(("softmax", "_safe_softmax"), "torch's softmax", _match_softmax,
         ("F.softmax(x, dim=-1)", "x.softmax(3)", "torch.softmax(x, dim=-1, dtype=torch.float64)"),
         ("F.softmax(x, None)", "F.softmin(x, dim=-1)")),
    Rule(("exp",), "an exponential of log_softmax, or of what remains less its own logsumexp", _match_exp,
         ("torch.log_softmax(x, -1).exp()", "(x - x.logsumexp(-1, True)).exp()", "(x - x.logsumexp(-1).unsqueeze(-1)).exp()"),
         ("x.exp()", "(x - x.amax(-1, True)).exp()", "(x * 2 - x.logsumexp(-1, True)).exp()", "(x - x.logsumexp((-1, -2), True)).exp()",
          "torch.sub(x, x.logsumexp(-1, True), alpha=2).exp()", "(lambda y: (y - y.logsumexp(-1)).exp())(x[0, 0, :, :4])",
          "(lambda y: (y - y.logsumexp(-1).unsqueeze(-2)).exp())(x[..., :4])")),
)  # fmt: skip
_SOFTMAXES: Final = by_name(SOFTMAX_RULES)


@dataclass
class Walk:
    """Operations between a softmax and the second product, read upward.

    Attributes:
        index: where the softmax is read.
        dropout: probability of dropping a weight.
        scale: a constant that multiplies the weights.
        factors: nodes that multiply the weights and are constant along each row.
        zeroed: masks, each as (node, index, truth that zeroes), of weights that become zero.
        added: what is added to the product with the values, and its factor.
        tests: nodes that ask whether a row has scores at all, which nobody else needs.
    """

    index: Index
    dropout: Any = 0.0
    scale: float = 1.0
    factors: list[fx.Node] = field(default_factory=list)
    zeroed: list[tuple[fx.Node, Index, bool]] = field(default_factory=list)
    tests: frozenset[fx.Node] = frozenset()
    added: tuple[fx.Node, Any] | None = None


def walk_up(start: fx.Node, index: Index, softmax: Softmax, between: frozenset[fx.Node], lift: Lift, *, grad: bool) -> Walk:
    """From the second product's operand up to the softmax.

    Args:
        start: the operand, read at `index`.
        softmax: where the walk ends.
        between: the nodes on the way.

    Raises:
        NoRule: where something stands between that attention does not have.
        NeedsSplit: where a view splits a dimension.
    """
    walk, node = Walk(index), start
    while node is not softmax.node:
        if grad and (stops_gradient(node) or needs_grad(node) != needs_grad(softmax.node)):
            raise NoRule(f"no gradient flows through {node.name}")
        moved = step(node, walk.index, lift.number, lift.element)
        if moved is not None and moved[0] in between:
            node, walk.index = moved
            continue
        call = as_call(node)
        if call is None:
            raise NoRule(f"{node.name} stands between the softmax and the second product")
        if call.name == "getitem" and call.args[1] == 0 and (dropout := as_call(call.args[0])) is not None and dropout.name == "dropout":
            call = dropout  # native_dropout gives the result and its mask
        source = next((a for a in call.args if isinstance(a, fx.Node) and a in between), call.kwargs.get("input"))
        rule = _BETWEEN.get(call.name)
        if not isinstance(source, fx.Node) or rule is None:
            raise NoRule(f"{call.name} stands between the softmax and the second product")
        rule(Passed(walk, node, call, source, start, index, softmax, lift))
        node = source
    return walk


class Passed(NamedTuple):
    """An operation that the walk passes.

    Attributes:
        walk: notes what the operation does to the weights.
        source: the weights above it.
        read: the second product's operand, and its index at the start of the walk.
    """

    walk: Walk
    node: fx.Node
    call: Call
    source: fx.Node
    read: fx.Node
    start: Index
    softmax: Softmax
    lift: Lift


def _check_cast(at: Passed) -> None:
    """Weights that are rounded and widened again are not those of a softmax."""
    dtype = node_dtype(at.node)
    if dtype.itemsize < node_dtype(at.read).itemsize:
        raise NoRule(f"the weights are rounded to {str(dtype).removeprefix('torch.')} and widened again")


def _pass_numbers(at: Passed) -> None:
    """A softmax without scores gives zeros already."""
    number = at.call.argument(1, "nan", None)
    if number is not None and fixed_number(number) != 0.0:
        raise NoRule("the weights of rows without scores are no zeros")


def _drop(at: Passed) -> None:
    call = at.call
    probability = fixed_number(call.argument(1, "p", 0.5))
    training = example_value(call.argument(2, "training", call.kwargs.get("train", True)))
    if training is False or probability == 0.0:
        return
    _dropped(at.walk, probability)


def _dropped(walk: Walk, probability: Any) -> None:
    if walk.dropout != 0.0:
        raise NoRule("two dropouts of the weights")
    if not isinstance(probability, (int, float)) or isinstance(probability, bool):
        raise NoRule("a dropout whose probability is no constant")
    walk.dropout = float(probability)


def _multiply(at: Passed) -> None:
    walk, call, source = at.walk, at.call, at.source
    other = call.args[1] if call.args[0] is source else call.args[0]
    value = fixed_number(other)
    if isinstance(value, (int, float)) and (call.name == "mul" or call.args[0] is source):
        walk.scale *= value if call.name == "mul" else 1 / value
        return
    if call.name == "div" or not isinstance(other, fx.Node) or not is_tensor(other):
        raise NoRule("the weights are divided by a tensor")
    dropout = _kept_at_random(other)
    if dropout is not None:
        _dropped(walk, 1.0 - dropout)
        walk.scale *= dropout
        return
    shape = node_shape(other)
    if shape and not same_size(shape[-1], 1):
        if is_truth(other):
            walk.zeroed.append((other, walk.index, False))
            return
        raise NoRule("the weights are multiplied by a tensor that differs between keys")
    if walk.index != at.start and shape and not all(same_size(n, 1) for n in shape):
        raise NoRule("the weights are multiplied by a tensor and then moved")
    walk.factors.append(other)


_RANDOM: Final = frozenset(("rand", "rand_like"))


def _kept_at_random(node: fx.Node) -> float | None:
    """The probability of a one, where the node is a random mask: `bernoulli(full(1 - p))`, `rand_like(x) > p`."""
    call = as_call(node)
    while call is not None and call.name in CASTS and isinstance(call.args[0], fx.Node):
        call = as_call(call.args[0])
    if call is None:
        return None
    if call.name == "bernoulli":
        if isinstance(call.argument(1, "p"), (int, float)):
            return float(call.argument(1, "p"))
        filled = as_call(call.args[0])
        number = filled.argument(1, "fill_value") if filled is not None and filled.name in ("full", "full_like") else None
        return float(number) if isinstance(number, (int, float)) else None
    if call.name in ("gt", "ge", "lt", "le") and isinstance(call.args[0], fx.Node) and isinstance(call.args[1], (int, float)):
        drawn = as_call(call.args[0])
        if drawn is not None and drawn.name in _RANDOM:
            return float(call.args[1]) if call.name in ("lt", "le") else 1.0 - float(call.args[1])
    return None


def _zero(at: Passed) -> None:
    walk, call, source = at.walk, at.call, at.source
    if call.name == "masked_fill":
        mask, fill, when = call.argument(1, "mask"), call.argument(2, "value"), True
    else:
        mask, kept_weights, other = call.argument(0, "condition"), call.argument(1, "input"), call.argument(2, "other")
        if is_tensor(mask) and mask is source:  # the method: x.where(condition, other)
            mask, kept_weights = kept_weights, mask
        fill, when = (other, False) if kept_weights is source else (kept_weights, True)
    if not is_tensor(mask) or not _is_zero(fill, walk.index, at.lift):
        raise NoRule("weights are replaced after the softmax")
    tested = frozenset((mask,)) if _asks_for_nan(mask, source) else _tested_empty(mask, at.softmax)
    if tested is None:
        walk.zeroed.append((mask, walk.index, when))
    elif when:
        walk.tests |= tested  # a softmax without scores gives zeros already
    else:
        raise NoRule("weights of rows with scores are zeroed")


def _is_zero(fill: Any, index: Index, lift: Lift) -> bool:
    """Whether the number, or the tensor broadcast to `index`, is zero everywhere."""
    if not is_tensor(fill):
        return bool(fixed_number(fill) == 0)
    value = simplify(lift.element(fill, broadcast_index(index, node_shape(fill))))
    return value.op == "const" and value.value == 0


def _asks_for_nan(mask: fx.Node, weights: fx.Node) -> bool:
    """Whether it asks which weights are no numbers: those of rows without scores."""
    call = as_call(mask)
    return call is not None and call.name == "isnan" and call.args[0] is weights


def _tested_empty(node: fx.Node, softmax: Softmax) -> frozenset[fx.Node] | None:
    """The nodes of a test whether a row's scores are all -inf, or None for another mask."""
    call = as_call(node)
    if call is None or call.name != "all" or not call.argument(2, "keepdim", False) or not isinstance(call.args[0], fx.Node):
        return None
    inner, dim = as_call(call.args[0]), call.argument(1, "dim", call.kwargs.get("axis"))
    if inner is None or inner.name not in ("eq", "isneginf") or not isinstance(dim, int) or inner.args[0] is not softmax.source:
        return None
    if dim % node_rank(node) != softmax.dim or (inner.name == "eq" and inner.args[1] != -math.inf):
        return None
    return frozenset({node, call.args[0]})


# Examples are of the weights `w` [B, H, Sq, Skv], which are multiplied with the values then, and the queries `q` [B, H, Sq, D].
BETWEEN_RULES: Final[tuple[Rule[Callable[[Passed], None]], ...]] = (
    Rule(tuple(sorted(CASTS)), "weights in another dtype", _check_cast, ("w.to(q.dtype)", "w.double()"),
         ("w.bfloat16().float()", "w.bfloat16().double()")),
    Rule(("nan_to_num",), "zeros for rows without scores", _pass_numbers, ("w.nan_to_num()", "w.nan_to_num(nan=0.0, posinf=1.0)"),
         ("w.clamp(0.0, 0.5)", "w.nan_to_num(nan=1.0)", "torch.nan_to_num(w, 0.5)")),
    Rule(("dropout",), "weights that are dropped, once", _drop, ("F.dropout(w, 0.5, training=False)",),
         ("F.dropout(F.dropout(w, 1.0), 1.0)", "F.alpha_dropout(w, 0.5)")),
    Rule(("mul", "div"), "a number, or one factor for each row", _multiply, ("w * 2", "w / 4", "w * q[..., :1]"),
         ("w * torch.arange(w.shape[-1])", "w / q[..., :1]", "w ** 2")),
    Rule(("masked_fill", "where"), "zeros where the scores are masked, or for rows without scores", _zero,
         ("w.masked_fill(w.isnan(), 0.0)", "torch.where(w.isnan(), 0.0, w)"),
         ("w.masked_fill(torch.arange(w.shape[-1]) > 5, 0.0)", "torch.where(q[..., :1] > 0, w, 0.0)", "w.masked_fill(w.isnan(), 0.5)")),
)  # fmt: skip
_BETWEEN: Final = by_name(BETWEEN_RULES)
BETWEEN: Final = frozenset({*VIEWS, *_BETWEEN})
"""Operations that may stand between a softmax and the second product."""
