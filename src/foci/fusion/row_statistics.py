"""Row statistics: reductions of scores along the keys, and where each is read."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from foci.fusion.fx_utils import (
    Call,
    Size,
    as_call,
    fixed_number,
    is_tensor,
    is_written,
    needs_grad,
    node_rank,
    node_shape,
    runs_without_gradients,
    same_size,
    single,
)
from foci.fusion.indices import Digit, Index, NeedsSplit, NoRule, broadcast_index
from foci.fusion.symbolic_element import stops_gradient
from foci.fusion.value_numbering import Values
from foci.fusion.views import step
from foci.ir import expr as ir

__all__ = ["atoms", "is_over", "less_logsumexp", "moved", "number_beside", "same_shape"]


def atoms(shape: Sequence[Size]) -> Index:
    """An index of a tensor whose dimensions have names of their own."""
    return tuple(() if same_size(n, 1) else (Digit(ir.axis(-1 - i), n),) for i, n in enumerate(shape))


def same_shape(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes have equal sizes for every value of their symbols."""
    return node_rank(a) == node_rank(b) and all(map(same_size, node_shape(a), node_shape(b)))


def moved(node: fx.Node, index: Index) -> tuple[fx.Node, Index] | None:
    """One view towards the source; None where there is none, none that positions alone decide, or one that stops the gradient."""
    try:
        return None if stops_gradient(node) else step(node, index, _constant, _unread)
    except (NoRule, NeedsSplit):
        return None


def _constant(size: Size) -> ir.Expr:
    if isinstance(size, int):
        return ir.const(size)
    raise NoRule("a size that is no constant")


def _unread(node: fx.Node, index: Index) -> ir.Expr:
    raise NoRule("an index that is a tensor")


def is_over(call: Call, index: Index, dim: int) -> bool:
    """Whether a reduction over `dim`, read at `index`, is that of the same row."""
    dim_argument = single(call.argument(1, "dim", call.kwargs.get("axis")))
    rows = atoms(node_shape(call.args[0]))
    if not isinstance(dim_argument, int) or dim_argument % len(rows) != dim:
        return False
    keeps_dim, rest = bool(call.argument(2, "keepdim", False)), iter(index)
    row_index = [next(rest) if keeps_dim or n != dim else () for n in range(len(rows))]
    return all(n == dim or a == b for n, (a, b) in enumerate(zip(rows, row_index, strict=True)))


def less_logsumexp(node: fx.Node, values: Values) -> tuple[fx.Node, int] | None:
    """(x, dim) where the node is exp(x - logsumexp(x, dim)), with the logarithm from one function or from several."""
    call = as_call(node)
    inner = as_call(call.args[0]) if call is not None and call.name == "exp" and call.args and is_tensor(call.args[0]) else None
    if call is None or call.in_place or inner is None or inner.name != "sub" or inner.in_place or inner.kwargs or len(inner.args) != 2:
        return None
    if not all(map(is_tensor, inner.args)) or not same_shape(inner.args[0], node):
        return None
    source, logarithm = inner.args
    stops = needs_grad(node) != needs_grad(source) and not runs_without_gradients(node)
    if stops or needs_grad(logarithm) != needs_grad(source) or is_written(call.args[0]) or is_written(source):
        return None
    dim = _over(logarithm, _broadcast(source, logarithm), source, values)
    return None if dim is None else (source, dim)


def _broadcast(source: fx.Node, other: fx.Node) -> Index:
    """Index in the other tensor for each element of the source."""
    return broadcast_index(atoms(node_shape(source)), node_shape(other))


def _over(node: fx.Node, index: Index, source: fx.Node, values: Values) -> int | None:
    """The dimension whose logsumexp of the source the node holds at `index`."""
    while (call := as_call(node)) is not None and is_tensor(node) and not _is_other(node, call, source):
        if call.name == "logsumexp":
            return _reduced(call, index, source) if values.same(call.args[0], source) else None
        if call.name == "log":
            return _match_sum_of_exp(call.args[0], index, source, None, values)
        if call.name == "add" and len(call.args) == 2 and not call.kwargs and all(map(is_tensor, call.args)):
            dims = (_match_shifted_logsumexp(a, b, index, source, values) for a, b in (call.args, call.args[::-1]))
            return next((dim for dim in dims if dim is not None), None)
        following = moved(node, index)
        if following is None:
            return None
        node, index = following
    return None


def _is_other(node: fx.Node, call: Call, source: fx.Node) -> bool:
    """Whether a node is written, or cut from the gradient of what it is computed of."""
    return call.in_place or is_written(node) or needs_grad(node) != needs_grad(source)


def _reduced(call: Call, index: Index, source: fx.Node) -> int | None:
    dim = single(call.argument(1, "dim", call.kwargs.get("axis")))
    if not isinstance(dim, int) or not is_over(call, index, dim % node_rank(source)):
        return None
    return dim % node_rank(source)


def _match_shifted_logsumexp(shift: fx.Node, logged: fx.Node, index: Index, source: fx.Node, values: Values) -> int | None:
    """Match m + log(sum(exp(x - m))), m constant over a row."""
    at, place = _resolved(shift, broadcast_index(index, node_shape(shift))), broadcast_index(index, node_shape(logged))
    node, place = _resolved(logged, place)
    call = as_call(node)
    if call is None or call.name != "log" or _is_other(node, call, source):
        return None
    return _match_sum_of_exp(call.args[0], place, source, at, values)


def _resolved(node: fx.Node, index: Index) -> tuple[fx.Node, Index]:
    while (following := moved(node, index)) is not None:
        node, index = following
    return node, index


def _match_sum_of_exp(node: fx.Node, index: Index, source: fx.Node, shift: tuple[fx.Node, Index] | None, values: Values) -> int | None:
    """sum(exp(x - shift)), read at `index`, of each row of x."""
    node, index = _resolved(node, index)
    call = as_call(node)
    raised = as_call(call.args[0]) if call is not None and call.name == "sum" and is_tensor(call.args[0]) else None
    if call is None or raised is None or raised.name != "exp" or call.argument(3, "dtype") is not None:
        return None
    if _is_other(node, call, source) or _is_other(call.args[0], raised, source) or is_written(raised.args[0]):
        return None
    dim, term = _reduced(call, index, source) if same_shape(call.args[0], source) else None, raised.args[0]
    if dim is None or shift is None:
        return dim if values.same(term, source) else None
    inner = as_call(term)
    if inner is None or inner.name != "sub" or inner.kwargs or len(inner.args) != 2 or not all(map(is_tensor, inner.args)):
        return None
    shift_index = _broadcast(source, inner.args[1])
    along = dim - node_rank(source) + len(shift_index)
    if not values.same(inner.args[0], source) or (along >= 0 and shift_index[along]):
        return None
    there = _resolved(inner.args[1], shift_index)
    return dim if there[1] == shift[1] and values.same(there[0], shift[0]) else None


def number_beside(call: Call) -> tuple[fx.Node, float] | None:
    """(x, number) of x + number."""
    if call.name != "add" or call.in_place or call.kwargs or len(call.args) != 2:
        return None
    for x, other in (call.args, call.args[::-1]):
        number = None if is_tensor(other) else fixed_number(other)
        if is_tensor(x) and isinstance(number, (int, float)) and not isinstance(number, bool):
            return x, float(number)
    return None
