"""What stands in the padding of a grown tensor, as far as it follows from how the tensor was made.

A product of finite rows with columns of zeros is zero, and less a row's maximum minus infinity stays so. Where a row holds
infinities or NaN, the padding may become NaN; that changes nothing as long as the row's own elements make every sum, product
or maximum over it infinite or NaN anyway. `Rows` says how much is known of such rows. So finite results are exact, and a
result that is infinite without padding may be NaN with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import torch
from torch import fx

from foci.compat.aten import OpOverload
from foci.compat.fake import real_values
from foci.padding.reading import VIEWS, fake_value

__all__ = ["Fill", "Rows", "result_fill"]

aten = torch.ops.aten
prims = torch.ops.prims

INFINITY: Final = float("inf")


class Rows(IntEnum):
    """Knowledge of a row whose padding is NaN instead of the fill.

    CLEAN: there is none. STRONG: an element of its own is NaN, or all are plus infinity. WEAK: an element of its own is NaN, or
    all are infinite.
    """

    CLEAN = 0
    STRONG = 1
    WEAK = 2


@dataclass(frozen=True)
class Fill:
    """A value, or NaN in rows as `rows` says."""

    value: float
    rows: Rows = Rows.CLEAN


Fills = Mapping[fx.Node, Fill | None]


def result_fill(node: fx.Node, fills: Fills, maxima: Mapping[fx.Node, fx.Node]) -> Fill | None:
    """Return the fill of a new operation's result, or None if nothing is known.

    Args:
        made: the operation.
        fills: of its grown operands; an operand that is not among them did not grow, and holds one value for each row.
        maxima: by maximum over a grown dim, what it was taken of.
    """
    if node.target in VIEWS or node.target is aten.scatter.value:
        return fills.get(node.args[0])  # type: ignore[arg-type]
    constant = _constant(node)
    if constant is not None:
        return Fill(constant)
    # Inductor defines it when it is imported
    rule = _multiply_add if str(node.target) == "prims.fma.default" else _RULES.get(node.target)
    if node.target is aten.sub.Tensor and node.args[1] in maxima and not node.kwargs:
        first = fills.get(node.args[0])  # type: ignore[arg-type]
        if maxima[node.args[1]] is node.args[0] and first is not None and first.value == -INFINITY:  # type: ignore[index]
            return Fill(-INFINITY, Rows.STRONG)
    fill = rule(node, fills) if rule is not None else None
    return fill if fill is not None else _evaluated(node, fills)


def _constant(node: Any) -> float | None:
    """Return what a node that is one value everywhere holds."""
    value = node.args[1] if isinstance(node, fx.Node) and node.target is aten.full.default and len(node.args) > 1 else None
    return float(value) if isinstance(value, (bool, int, float)) else None


def _product(node: fx.Node, fills: Fills) -> Fill | None:
    """Rows of the left matrix times columns of zeros; a row that is not finite gives nothing finite."""
    *bias, _, right = node.args[:3] if node.target is aten.addmm.default else node.args[:2]
    columns = fills.get(right)  # type: ignore[arg-type]
    if columns != Fill(0.0) or node.kwargs:
        return None
    if not bias:
        return Fill(0.0, Rows.WEAK)
    added = fills.get(bias[0])  # type: ignore[arg-type]
    return Fill(added.value, Rows.WEAK) if added is not None and added.rows is Rows.CLEAN else None


def _less(node: fx.Node, fills: Fills) -> Fill | None:
    first, second = (fills.get(arg) for arg in node.args[:2])  # type: ignore[arg-type]
    if first is None or node.kwargs or not isinstance(node.args[1], fx.Node):
        return None
    if first.value == -INFINITY and node.args[1] not in fills and first.rows <= Rows.STRONG:
        return Fill(-INFINITY, Rows.STRONG)  # a row's value that is minus infinity or NaN makes all its elements +inf or NaN
    return _sum_of_zeros(first, second)


def _more(node: fx.Node, fills: Fills) -> Fill | None:
    first, second = (fills.get(arg) for arg in node.args[:2])  # type: ignore[arg-type]
    return None if first is None or node.kwargs else _sum_of_zeros(first, second)


def _sum_of_zeros(first: Fill, second: Fill | None) -> Fill | None:
    if second is None or first.value != 0.0 or second.value != 0.0:
        return None
    return Fill(0.0, Rows.WEAK if max(first.rows, second.rows) > Rows.CLEAN else Rows.CLEAN)


def _times(node: fx.Node, fills: Fills) -> Fill | None:
    """Zero times a row's value, times a number, or times zero."""
    operands = [arg for arg in node.args[:2] if isinstance(arg, fx.Node)]
    known = [fills.get(arg) for arg in operands if arg in fills]
    if not known or any(fill is None or fill.value != 0.0 for fill in known):
        return None
    return None if len(node.all_input_nodes) == 1 and _is_clean(known[0]) else Fill(0.0, Rows.WEAK)


def _over(node: fx.Node, fills: Fills) -> Fill | None:
    """Zero divided by a row's value or a number. Where that is zero, a row's own elements become infinite or NaN."""
    dividend, divisor = fills.get(node.args[0]), node.args[1]  # type: ignore[arg-type]
    if dividend is None or dividend.value != 0.0 or divisor in fills:
        return None
    return None if not isinstance(divisor, fx.Node) and _is_clean(dividend) else Fill(0.0, Rows.WEAK)


def _is_clean(fill: Fill | None) -> bool:
    """Whether numbers say all, so that a function of them can be evaluated."""
    return fill is not None and fill.rows is Rows.CLEAN


def _multiply_add(node: fx.Node, fills: Fills) -> Fill | None:
    added = fills.get(node.args[2])  # type: ignore[arg-type]
    return Fill(0.0, Rows.WEAK) if _times(node, fills) is not None and added is not None and added.value == 0.0 else None


def _exponential(node: fx.Node, fills: Fills) -> Fill | None:
    operand = fills.get(node.args[0])  # type: ignore[arg-type]
    if operand is None or operand.value != -INFINITY or operand.rows > Rows.STRONG:
        return None
    return Fill(0.0, operand.rows)


def _same(node: fx.Node, fills: Fills) -> Fill | None:
    return fills.get(node.args[0]) if "device" not in node.kwargs else None  # type: ignore[arg-type]


def _negative(node: fx.Node, fills: Fills) -> Fill | None:
    operand = fills.get(node.args[0])  # type: ignore[arg-type]
    if operand is None:
        return None
    return Fill(-operand.value, Rows.WEAK if operand.rows > Rows.CLEAN else Rows.CLEAN)


_RULES: Final[Mapping[Any, Callable[[fx.Node, Fills], Fill | None]]] = {
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten.addmm.default: _product,
    aten.sub.Tensor: _less,
    aten.add.Tensor: _more,
    aten.mul.Tensor: _times,
    aten.mul.Scalar: _times,
    aten.div.Tensor: _over,
    aten.div.Scalar: _over,
    aten.exp.default: _exponential,
    aten.neg.default: _negative,
    aten.clone.default: _same,
    prims.convert_element_type.default: _same,
}


def _evaluated(node: fx.Node, fills: Fills) -> Fill | None:
    """A function of constants, element by element."""
    target = node.target
    pointwise = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags and "device" not in node.kwargs
    operands = node.all_input_nodes
    values: dict[fx.Node, float] = {}
    for operand in operands:
        fill = fills.get(operand)
        value = fill.value if fill is not None and fill.rows is Rows.CLEAN else _constant(operand) if operand not in fills else None
        if value is None:
            return None
        values[operand] = value
    if not pointwise or not operands or fake_value(node) is None:
        return None

    def evaluated() -> float:
        scalars = {operand: torch.tensor(value, dtype=operand.meta["val"].dtype, device="cpu") for operand, value in values.items()}
        arguments, keywords = fx.map_arg((node.args, node.kwargs), lambda n: scalars[n])
        return float(target(*arguments, **keywords))  # type: ignore[operator]

    result = real_values(evaluated)
    return None if result != result else Fill(result)
