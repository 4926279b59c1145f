"""Elements of tensors that a graph makes by formula, or puts together of others: what `full`, `arange`, `tril`, `pad` and `cat` hold at an
index."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import fx

from foci.compat.fake import real_values
from foci.fusion.fx_utils import (
    Call,
    Size,
    example_tensor,
    example_value,
    fixed_number,
    is_tensor,
    node_rank,
    node_shape,
    pad_arguments,
    same_size,
)
from foci.fusion.indices import Index, NoRule, combine_digits, one_digit
from foci.ir import expr as ir
from foci.ir.expr import DType, Expr
from foci.ir.ops import LEAVES, apply, cast
from foci.ir.rewrite import rewrite
from foci.ir.rule import Rule, by_name
from foci.ir.simplify import simplify
from foci.ir.trace import element_dtype

if TYPE_CHECKING:
    from foci.fusion.symbolic_element import Lift

__all__ = ["MAKERS", "RULES", "as_held"]

Maker: TypeAlias = Callable[["Lift", fx.Node, Call, Index], Expr | None]


def _filled(value: float | None) -> Maker:
    def make(lift: Lift, node: fx.Node, call: Call, index: Index) -> Expr:
        number = call.argument(1, "fill_value") if value is None else value
        if call.name == "new_full":
            number = call.argument(2, "fill_value")
        tensor = example_tensor(node)
        assert tensor is not None
        if isinstance(number, fx.Node) and is_tensor(number):
            return lift.element(number, ())
        fill = fixed_number(number)
        if isinstance(fill, torch.SymInt):
            return cast(lift.number(fill), element_dtype(tensor.dtype))
        return _held(fill, tensor.dtype)

    return make


def _held(number: Any, dtype: torch.dtype) -> Expr:
    """A number as an element of a tensor of `dtype` holds it."""
    if not isinstance(number, (bool, int, float)):
        raise NoRule("a constant that is no number")
    return cast(ir.const(as_held(number, dtype)), element_dtype(dtype))


def as_held(number: bool | int | float, dtype: torch.dtype) -> Any:
    kind = torch.float64 if isinstance(number, float) else None
    return real_values(lambda: torch.tensor(number, dtype=kind, device="cpu").to(dtype).item())


def _tensor(lift: Lift, node: fx.Node, call: Call, index: Index) -> Expr:
    tensor = example_tensor(node)
    assert tensor is not None
    data = call.argument(0, "data")
    if tensor.dim() or not isinstance(example_value(data), (bool, int, float)):
        return lift.captured(node, index)
    return _held(example_value(data), tensor.dtype)


def _arange(lift: Lift, node: fx.Node, call: Call, index: Index) -> Expr:
    numbers = [example_value(a) for a in call.args] + [example_value(call.kwargs[k]) for k in ("start", "end", "step") if k in call.kwargs]
    start, stride = (numbers[0] if len(numbers) > 1 else 0), (numbers[2] if len(numbers) > 2 else 1)
    if not all(isinstance(n, (int, float, torch.SymInt)) for n in (start, stride)):
        raise NoRule("an arange of tensors")
    tensor = example_tensor(node)
    assert tensor is not None
    if not tensor.dtype.is_floating_point:  # torch cuts both first
        start, stride = (int(n) if isinstance(n, float) else n for n in (start, stride))
    position = combine_digits(index[0], lift.number)
    if stride != 1:
        position = apply("mul", position, lift.number(stride))
    if not (isinstance(start, (int, float)) and start == 0):
        position = apply("add", position, lift.number(start))
    # Positions fit in 32 bits, whatever the tensor's integer type; products of them are widened (see `_pointwise`).
    return cast(position, element_dtype(tensor.dtype)) if tensor.dtype.is_floating_point else position


def _triangle(lower: bool) -> Maker:
    def make(lift: Lift, node: fx.Node, call: Call, index: Index) -> Expr:
        source = call.argument(0, "input")
        row, column = (combine_digits(d, lift.number) for d in index[-2:])
        limit = lift.number(example_value(call.argument(1, "diagonal", 0)))
        distance = apply("sub", column, row)
        inside = apply("le", distance, limit) if lower else apply("le", limit, distance)
        value = lift.element(source, index)
        return apply("where", inside, value, cast(ir.const(False), value.dtype))

    return make


def _eye(lift: Lift, node: fx.Node, call: Call, index: Index) -> Expr:
    return apply("eq", *(combine_digits(d, lift.number) for d in index))


def _pad(lift: Lift, node: fx.Node, call: Call, index: Index) -> Expr | None:
    source, amounts = call.args[0], call.argument(1, "pad")
    mode, fill = pad_arguments(call)
    if mode != "constant" or source in lift.on_path:
        return None
    shape, result, inside = node_shape(source), list(index), ir.const(True)
    moves: list[tuple[Expr, Expr | int]] = []
    for position in range(len(amounts) // 2):
        dim = len(shape) - 1 - position
        before, after = example_value(amounts[2 * position]), example_value(amounts[2 * position + 1])
        if before == 0 and after == 0:
            continue
        moved = apply("sub", combine_digits(index[dim], lift.number), lift.number(before))
        inside = apply("and", inside, apply("and", apply("le", 0, moved), apply("lt", moved, lift.number(shape[dim]))))
        result[dim] = one_digit(moved, shape[dim])
        moves.append((moved, lift.number(shape[dim] - 1)))
    value = lift.element(source, tuple(result))
    for moved, last in moves:
        value = _within(value, moved, last)
    return apply("where", inside, value, cast(ir.const(0.0 if fill is None else float(fill)), value.dtype))


def _cat(lift: Lift, node: fx.Node, call: Call, index: Index) -> Expr | None:
    return _beside(lift, call.argument(0, "tensors"), call.argument(1, "dim", 0) % len(index), index)


def _stacked(dim: int) -> Maker:
    """`hstack` and `vstack` of matrices and what has more dimensions."""

    def make(lift: Lift, node: fx.Node, call: Call, index: Index) -> Expr | None:
        tensors = call.argument(0, "tensors")
        return _beside(lift, tensors, dim, index) if all(node_rank(t) == len(index) >= 2 for t in tensors) else None

    return make


def _beside(lift: Lift, tensors: Sequence[fx.Node], dim: int, index: Index) -> Expr | None:
    """The element of tensors side by side along `dim`."""
    parts = [p for p in tensors if not (example_tensor(p) is not None and same_size(math.prod(node_shape(p)), 0))]
    if len(parts) == 1:
        return lift.element(parts[0], index)
    position = combine_digits(index[dim], lift.number)
    start: Size = 0
    choices: list[tuple[Expr, Expr]] = []
    for part in parts:
        size = node_shape(part)[dim]
        moved = apply("sub", position, lift.number(start))
        at = (*index[:dim], one_digit(moved, size), *index[dim + 1 :])
        start = start + size
        choices.append((apply("lt", position, lift.number(start)), _within(lift.element(part, at), moved, lift.number(size - 1))))
    value = choices[-1][1]
    for inside, other in reversed(choices[:-1]):
        value = apply("where", inside, other, value)
    return value


def _within(value: Expr, position: Expr, last: Expr | int) -> Expr:
    """An element that counts up to the last position only: what it reads at a position itself is read nowhere else.

    Positions are read as they are, as no tensor is shorter than they go; computed indices are brought inside wherever they are read.
    """
    if simplify(position).op not in LEAVES:
        return value

    def rule(e: Expr) -> Expr | None:
        if e.op != "load" or position not in e.args:
            return None
        indices = tuple(apply("min", arg, last) if arg is position else arg for arg in e.args)
        return ir.load(int(str(e.value)), indices, e.dtype)

    return rewrite(value, rule)


def _diff(lift: Lift, node: fx.Node, call: Call, index: Index) -> Expr | None:
    """Each element less the one before it; the first less what was prepended."""
    source, dim = call.args[0], call.argument(2, "dim", -1) % len(index)
    before = call.argument(3, "prepend")
    if (
        call.argument(1, "n", 1) != 1
        or call.argument(4, "append") is not None
        or element_dtype(node.meta["example_value"].dtype) is DType.BOOL
    ):
        return None
    if before is not None and not same_size(node_shape(before)[dim], 1):
        return None
    size, position = node_shape(source)[dim], combine_digits(index[dim], lift.number)

    def at(value: Expr) -> Expr:
        return lift.element(source, (*index[:dim], one_digit(value, size), *index[dim + 1 :]))

    if before is None:
        return apply("sub", at(apply("add", position, 1)), at(position))
    first = apply("sub", at(ir.const(0)), lift.element(before, (*index[:dim], (), *index[dim + 1 :])))
    rest = apply("sub", at(position), at(apply("sub", position, 1)))
    return apply("where", apply("le", position, 0), simplify(first), simplify(rest))


def _cumsum(lift: Lift, node: fx.Node, call: Call, index: Index) -> Expr | None:
    """A sum of zeros, or of ones where counting is exact; any other is captured."""
    tensor, source, dim = example_tensor(node), call.args[0], call.argument(1, "dim", call.kwargs.get("axis"))
    value = simplify(lift.element(source, index))
    if value.op != "const" or tensor is None or not isinstance(dim, int):
        return None
    if not value.value:
        return ir.const(0)
    if value.value != 1 or tensor.dtype not in _COUNTING or not index:
        return None
    count = apply("add", combine_digits(index[dim % len(index)], lift.number), 1)
    return cast(count, element_dtype(tensor.dtype)) if tensor.dtype.is_floating_point else count


_COUNTING: Final = frozenset((torch.int32, torch.int64, torch.float32, torch.float64))

# Examples are of `x`, floats [2, 3, 4, 6], and `rows`, four integers below 3.
RULES: Final[tuple[Rule[Maker], ...]] = (
    Rule(("zeros", "zeros_like", "new_zeros"), "0 everywhere", _filled(0), ("torch.zeros_like(x)", "x.new_zeros(4, 6)"),
         ("torch.zeros(4).scatter(0, rows, 1.0)",)),
    Rule(("ones", "ones_like", "new_ones"), "1 everywhere", _filled(1), ("torch.ones_like(x)", "torch.ones(4, 6)"),
         ("torch.ones(4).scatter(0, rows, 0.0)",)),
    Rule(("full", "full_like", "new_full"), "one number everywhere", _filled(None), ("x.new_full((4, 6), 3.0)", "torch.full_like(x, 3.0)"),
         ("torch.full((4, 6), 3.0).index_fill(0, rows, 1.0)",)),
    Rule(("tensor", "scalar_tensor", "as_tensor"), "one number", _tensor, ("torch.scalar_tensor(3.0).expand(4)",),
         ("torch.tensor([3.0, 1.0])",)),
    Rule(("arange",), "a multiple of the position, plus a start", _arange,
         ("torch.arange(4)[:, None] >= torch.arange(6)", "torch.arange(1, 12, 2)[None] - torch.arange(4)[:, None]",
          "torch.arange(1.5, 6.5, 1.5, dtype=torch.int64)", "torch.arange(-0.5, 3.0, dtype=torch.int32)"),
         ("torch.linspace(0.0, 1.0, 4)",)),
    Rule(("tril",), "the source up to a diagonal, else 0", _triangle(lower=True), ("torch.tril(torch.ones(4, 6))",),
         ("torch.linalg.cholesky(torch.eye(4) * 4)",)),
    Rule(("triu",), "the source from a diagonal on, else 0", _triangle(lower=False), ("torch.triu(torch.full((4, 6), 7.0), 2)",),
         ("torch.linalg.cholesky(torch.eye(4) * 4, upper=True)",)),
    Rule(("eye",), "1 where row and column are one number", _eye, ("torch.eye(4)",), ("torch.diag(x[0, 0, 0])",)),
    Rule(("diff",), "an element less the one before it", _diff,
         ("torch.diff(torch.arange(4) * 3, prepend=torch.zeros(1, dtype=torch.int64))[:, None] + torch.zeros(6)", "torch.diff(x)"),
         ("torch.diff(x, 2)", "torch.diff(x, append=x[..., :1])", "torch.diff(x, prepend=x[..., :2])", "torch.diff(x > 0)")),
    Rule(("cumsum",), "a count of ones, where counting is exact, or 0", _cumsum,
         ("(torch.diff(torch.arange(6)[None], prepend=torch.arange(6)[None, :1] - 1) != 1).cumsum(-1)", "torch.ones(2, 300).cumsum(-1)"),
         ("x.cumsum(-1)", "torch.full((2, 300), 2.0).cumsum(-1)", "torch.ones(2, 300, dtype=torch.bfloat16).cumsum(-1)")),
    Rule(("pad",), "the source inside, one number outside", _pad, ("F.pad(x, (1, 2, 0, 1), value=5.0)",),
         ('F.pad(x[0], (1, 1), mode="reflect")',)),
    Rule(("cat",), "tensors side by side", _cat, ("torch.cat([x, x * 2], dim=-1)",), ("torch.dstack([x, x * 2])",)),
    Rule(("hstack",), "tensors side by side in their second dimension", _stacked(1), ("torch.hstack([x, x * 2])",),
         ("torch.hstack([x[0, 0, 0], x[0, 1, 0]])",)),
    Rule(("vstack", "row_stack"), "tensors side by side in their first dimension", _stacked(0), ("torch.vstack([x, x * 2])",),
         ("torch.vstack([x[0, 0, 0], x[0, 1, 0]])",)),
)  # fmt: skip

MAKERS: Final[Mapping[str, Maker]] = by_name(RULES)
