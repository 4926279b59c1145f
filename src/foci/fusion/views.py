"""View operations, one small rule each: where in the source the element at an index of the result is.

A new form of a view, an expansion or a selection is one row of `RULES`. It then works for operands, masks, biases and for what is between
softmax and second product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from foci.fusion.fx_utils import (
    Call,
    Size,
    as_call,
    example_tensor,
    example_value,
    is_tensor,
    is_written,
    node_rank,
    node_shape,
    same_size,
    storage_id,
)
from foci.fusion.indices import Digits, Index, NoRule, broadcast_index, combine_digits, offset, one_digit, regroup
from foci.ir import expr as ir
from foci.ir.expr import Expr
from foci.ir.ops import apply
from foci.ir.rule import Rule, by_name

__all__ = ["PARTS", "PIECES", "RULES", "VIEWS", "At", "PieceOf", "step", "view_source"]


@dataclass(frozen=True)
class At:
    """A node asked for the element at `index`.

    Attributes:
        number: a size as an expression.
        element: the element of another node, for indices that are tensors.
    """

    node: fx.Node
    call: Call
    index: Index
    number: Callable[[Size], Expr]
    element: Callable[[fx.Node, Index], Expr]

    @property
    def source(self) -> fx.Node:
        """The tensor that is viewed."""
        return view_source(self.call)


Place: TypeAlias = tuple[fx.Node, Index]
Move: TypeAlias = Callable[[At], Place]


def view_source(call: Call) -> fx.Node:
    """The tensor that an operation moves."""
    source = call.argument(0, "input", call.kwargs.get("self"))
    if isinstance(source, (list, tuple)) and source:
        source = source[0]
    if not isinstance(source, fx.Node) or not is_tensor(source):
        raise NoRule(f"{call.name} of something that is no tensor")
    return source


def step(node: fx.Node, index: Index, number: Callable[[Size], Expr], element: Callable[[fx.Node, Index], Expr]) -> Place | None:
    """One move towards the source; None where the node computes, or is a copy that was written since.

    Raises:
        NoRule: where the node moves elements in a way no rule knows.
    """
    call = as_call(node)
    if call is None or not is_tensor(node):
        return None
    if call.name == "getitem" and call.args and not is_tensor(call.args[0]):
        return _part(node, call, index, number)
    rule = VIEWS.get(call.name)
    if rule is None or (is_written(node) and storage_id(view_source(call)) != storage_id(node)):
        return None
    return rule(At(node, call, index, number, element))


def _same(at: At) -> Place:
    return at.source, at.index


def _reshape(at: At) -> Place:
    return at.source, regroup(at.index, node_shape(at.node), node_shape(at.source), at.number)


def _expand(at: At) -> Place:
    return at.source, broadcast_index(at.index, node_shape(at.source))


def _dim(value: Any, rank: int) -> int:
    dim = example_value(value)
    if not isinstance(dim, int):
        raise NoRule("a dimension that is no constant")
    return dim % rank if rank else 0


def _moved(at: At, order: Sequence[int]) -> Place:
    """`order[i]` is the source's dimension that became dimension i."""
    result: list[Digits] = [()] * len(order)
    for position, dim in enumerate(order):
        result[dim] = at.index[position]
    return at.source, tuple(result)


def _transpose(at: At) -> Place:
    rank = node_rank(at.source)
    a = _dim(at.call.argument(1, "dim0", at.call.kwargs.get("axis0")), rank)
    b = _dim(at.call.argument(2, "dim1", at.call.kwargs.get("axis1")), rank)
    order = list(range(rank))
    order[a], order[b] = order[b], order[a]
    return _moved(at, order)


def _t(at: At) -> Place:
    return _moved(at, range(node_rank(at.source))[::-1])


def _last_two(at: At) -> Place:
    rank = node_rank(at.source)
    return _moved(at, [*range(rank - 2), rank - 1, rank - 2])


def _listed(call: Call, position: int, name: str) -> list[Any]:
    """Arguments that may be given one by one or as one list."""
    arguments = call.args[position:] if len(call.args) > position else (call.kwargs.get(name, ()),)
    return list(arguments[0]) if len(arguments) == 1 and isinstance(arguments[0], (list, tuple, torch.Size)) else list(arguments)


def _permute(at: At) -> Place:
    rank = node_rank(at.source)
    return _moved(at, [_dim(d, rank) for d in _listed(at.call, 1, "dims")])


def _movedim(at: At) -> Place:
    rank = node_rank(at.source)
    dims = [at.call.argument(1, "source"), at.call.argument(2, "destination")]
    source, target = ([_dim(d, rank) for d in (x if isinstance(x, (list, tuple)) else [x])] for x in dims)
    order: list[int | None] = [None] * rank
    for a, b in zip(source, target, strict=True):
        order[b] = a
    rest = iter(d for d in range(rank) if d not in source)
    return _moved(at, [next(rest) if d is None else d for d in order])


def _unsqueeze(at: At) -> Place:
    dim = _dim(at.call.argument(1, "dim"), node_rank(at.node))
    return at.source, at.index[:dim] + at.index[dim + 1 :]


def _squeeze(at: At) -> Place:
    shape = node_shape(at.source)
    dim = at.call.argument(1, "dim")
    dims = range(len(shape)) if dim is None else [_dim(d, len(shape)) for d in (dim if isinstance(dim, (list, tuple)) else [dim])]
    remaining = iter(at.index)
    return at.source, tuple(() if d in dims and same_size(size, 1) else next(remaining) for d, size in enumerate(shape))


def _repeat(at: At) -> Place:
    shape = node_shape(at.source)
    index = at.index[len(at.index) - len(shape) :]
    result: list[Digits] = []
    for digits, repeated, size in zip(index, node_shape(at.node)[len(at.index) - len(shape) :], shape, strict=True):
        if same_size(size, 1) or same_size(repeated, size):
            result.append(() if same_size(size, 1) else digits)
        else:
            result.append(regroup((digits,), (repeated,), (repeated // size, size), at.number)[1])
    return at.source, tuple(result)


def _repeat_interleave(at: At) -> Place:
    times, dim = at.call.argument(1, "repeats"), at.call.argument(2, "dim")
    if is_tensor(times) or dim is None:
        raise NoRule("repeat_interleave by a tensor or over all elements")
    at_dim = _dim(dim, node_rank(at.source))
    size, repeated = node_shape(at.source)[at_dim], node_shape(at.node)[at_dim]
    high = regroup((at.index[at_dim],), (repeated,), (size, example_value(times)), at.number)[0]
    return at.source, (*at.index[:at_dim], high, *at.index[at_dim + 1 :])


def _selected(at: At, dim: int, digits: Digits | None, *, inserted: bool = False) -> Place:
    """`at.index` with dimension `dim` replaced, or inserted."""
    before, after = at.index[:dim], at.index[dim if inserted else dim + 1 :]
    return at.source, (*before, digits or (), *after)


def _integer(at: At, value: Any) -> Expr:
    """An integer argument, which may be a symbolic one, as an expression."""
    number = example_value(value)
    if isinstance(number, (int, torch.SymInt)):
        return at.number(number)
    raise NoRule("a position that is no integer")


def _counted(at: At, value: Any, size: Size) -> Expr:
    """An index, counted from the end if it is negative."""
    position = example_value(value)
    negative = position < 0 if isinstance(position, int) else False
    return _integer(at, position + size if negative else position)


def _select(at: At) -> Place:
    shape = node_shape(at.source)
    dim = _dim(at.call.argument(1, "dim"), len(shape))
    return _selected(at, dim, one_digit(_counted(at, at.call.argument(2, "index"), shape[dim]), shape[dim]), inserted=True)


def _sliced(at: At, digits: Digits, size: Size, taken: Size, start: Any, step_size: Any) -> Digits:
    """Digits of a dimension of which `taken` entries were sliced from `start` on."""
    if step_size not in (None, 1) and not isinstance(step_size, int):
        raise NoRule("a slice of a step that is no constant")
    first = example_value(start)
    if (first is None or (isinstance(first, int) and first == 0)) and step_size in (None, 1):
        return digits
    if same_size(size, taken):
        return digits
    return offset(digits, ir.const(0) if first is None else _clamped(at, first, size), step_size or 1, size, at.number)


def _clamped(at: At, first: Any, size: Size) -> Expr:
    if isinstance(first, int) and first < 0:
        if isinstance(size, int):
            return at.number(max(0, first + size))
        return at.number(first + size)
    return at.number(first)


def _narrow(at: At) -> Place:
    shape = node_shape(at.source)
    dim = _dim(at.call.argument(1, "dim"), len(shape))
    digits = _sliced(at, at.index[dim], shape[dim], node_shape(at.node)[dim], at.call.argument(2, "start"), None)
    return _selected(at, dim, digits)


def _slice(at: At) -> Place:
    shape = node_shape(at.source)
    dim = _dim(at.call.argument(1, "dim", 0), len(shape))
    digits = _sliced(at, at.index[dim], shape[dim], node_shape(at.node)[dim], at.call.argument(2, "start"), at.call.argument(4, "step"))
    return _selected(at, dim, digits)


def _flip(at: At) -> Place:
    shape = node_shape(at.source)
    dims = {_dim(d, len(shape)) for d in _listed(at.call, 1, "dims")}
    index = list(at.index)
    for dim in dims:
        last = apply("sub", at.number(shape[dim]), 1)
        index[dim] = one_digit(apply("sub", last, combine_digits(index[dim], at.number)), shape[dim])
    return at.source, tuple(index)


def _diagonal(at: At) -> Place:
    offset_by = at.call.argument(1, "offset", 0)
    rank = node_rank(at.source)
    a, b = _dim(at.call.argument(2, "dim1", 0), rank), _dim(at.call.argument(3, "dim2", 1), rank)
    if example_value(offset_by) != 0:
        raise NoRule("a diagonal beside the main one")
    rest = iter(at.index[:-1])
    shape = node_shape(at.source)
    value = combine_digits(at.index[-1], at.number)
    return at.source, tuple(one_digit(value, shape[d]) if d in (a, b) else next(rest) for d in range(rank))


def _gather(at: At) -> Place:
    along = at.call.name == "take_along_dim"  # which has the indices before the dim
    source, dim = at.source, _dim(at.call.argument(2 if along else 1, "dim"), node_rank(at.source))
    index_node = at.call.argument(1 if along else 2, "indices" if along else "index")
    if not isinstance(index_node, fx.Node):
        raise NoRule("gather by something that is no tensor")
    size = node_shape(source)[dim]
    at_index = broadcast_index(at.index, node_shape(index_node))
    picked = one_digit(at.element(index_node, at_index), size)
    source_index = list(broadcast_index(at.index, node_shape(source)) if along else at.index)
    source_index[dim] = picked
    return source, tuple(() if same_size(n, 1) else d for d, n in zip(source_index, node_shape(source), strict=True))


def _index_select(at: At) -> Place:
    dim = _dim(at.call.argument(1, "dim"), node_rank(at.source))
    picked = at.element(at.call.argument(2, "index"), (at.index[dim],))
    return _selected(at, dim, one_digit(picked, node_shape(at.source)[dim]))


def _embedding(at: At) -> Place:
    first, second = at.call.argument(0, "input"), at.call.argument(1, "weight")
    tensor = example_tensor(first)
    table, ids = (first, second) if tensor is not None and tensor.is_floating_point() else (second, first)
    if example_value(at.call.argument(3, "max_norm")) is not None and table is second:
        raise NoRule("an embedding that renormalises its table")
    rows = node_shape(table)[0]
    return table, (one_digit(at.element(ids, at.index[:-1]), rows), at.index[-1])


def _getitem(at: At) -> Place:
    entries = at.call.args[1]
    entries = list(entries) if isinstance(entries, (tuple, list)) else [entries]
    shape = node_shape(at.source)
    taken = sum(1 for e in entries if e is not None and e is not Ellipsis)
    if Ellipsis in [e for e in entries if not isinstance(e, fx.Node)]:
        where = next(n for n, e in enumerate(entries) if e is Ellipsis)
        entries[where : where + 1] = [slice(None)] * (len(shape) - taken)
    else:
        entries += [slice(None)] * (len(shape) - taken)
    return at.source, _indexed(at, entries, shape)


def _indexed(at: At, entries: list[Any], shape: Sequence[Size]) -> Index:
    """The source's index under basic and advanced indexing."""
    tensors = [n for n, e in enumerate(entries) if is_tensor(e)]
    if any((t := example_tensor(entries[n])) is not None and t.dtype in (torch.bool, torch.uint8) for n in tensors):
        raise NoRule("indexing by a boolean mask")
    ranks = [node_rank(entries[n]) for n in tensors]
    width = max(ranks, default=0)
    together = not tensors or tensors == list(range(tensors[0], tensors[0] + len(tensors)))
    rest = list(at.index)
    picked: Index = ()
    if tensors:
        before = sum(1 for e in entries[: tensors[0]] if e is None or isinstance(e, slice)) if together else 0
        picked = tuple(rest[before : before + width])
        del rest[before : before + width]
    result: list[Digits] = []
    remaining, sizes = iter(rest), iter(shape)
    for entry in entries:
        if entry is None:
            next(remaining)
            continue
        size = next(sizes)
        if isinstance(entry, slice):
            result.append(_by_slice(at, next(remaining), size, entry))
        elif is_tensor(entry):
            value = at.element(entry, broadcast_index(picked, node_shape(entry)))
            result.append(one_digit(value, size))
        else:
            result.append(one_digit(_counted(at, entry, size), size))
    return tuple(result)


def _by_slice(at: At, digits: Digits, size: Size, entry: slice) -> Digits:
    if entry.start is None and entry.stop is None and entry.step is None:
        return digits
    return _sliced(at, digits, size, -1, entry.start, example_value(entry.step))


@dataclass(frozen=True)
class PieceOf:
    """One result of an operation that has several, asked for the element at `index`.

    Attributes:
        producer: the node that makes all of them.
        call: its operation.
        which: the number of this one.
        number: a size as an expression.
    """

    producer: fx.Node
    call: Call
    which: int
    index: Index
    number: Callable[[Size], Expr]


Piece: TypeAlias = Callable[[PieceOf], Place | None]


def _part(node: fx.Node, call: Call, index: Index, number: Callable[[Size], Expr]) -> Place | None:
    """Source of one result of split, chunk, unbind or meshgrid."""
    producer = call.args[0]
    producer_call = as_call(producer) if isinstance(producer, fx.Node) else None
    if producer_call is None or not isinstance(call.args[1], int):
        return None
    rule = _PIECES.get(producer_call.name)
    return None if rule is None else rule(PieceOf(producer, producer_call, call.args[1], index, number))


def _split(at: PieceOf) -> Place | None:
    source = view_source(at.call)
    shape, parts = node_shape(source), example_value(at.producer)
    dim = _dim(at.call.argument(PARTS[at.call.name], "dim", 0), len(shape))
    which = at.which % len(parts)
    if at.call.name == "unbind":
        return source, (*at.index[:dim], one_digit(at.number(which), shape[dim]), *at.index[dim:])
    start = sum(p.shape[dim] for p in parts[:which])
    digits = at.index[dim]
    if not (isinstance(start, int) and start == 0):
        digits = offset(digits, at.number(start), 1, shape[dim], at.number)
    return source, (*at.index[:dim], digits, *at.index[dim + 1 :])


def _meshgrid(at: PieceOf) -> Place | None:
    """A grid varies along one dimension only."""
    args = at.call.args
    axes = args[0] if args and isinstance(args[0], (list, tuple)) else args
    which = at.which % len(axes)
    source = axes[which]
    if not is_tensor(source):
        return None
    is_transposed = at.call.kwargs.get("indexing") == "xy" and which < 2 and len(axes) > 1
    return source, (at.index[1 - which if is_transposed else which],) if node_rank(source) else ()


PARTS: Final = {"split": 2, "chunk": 2, "tensor_split": 2, "split_with_sizes": 2, "unsafe_chunk": 2, "unsafe_split": 2, "unbind": 1}
"""Operations that split a tensor, and which of their arguments is the dim."""

# Examples are of `x`, floats [2, 3, 4, 6], and `rows`, four integers below 3.
RULES: Final[tuple[Rule[Move], ...]] = (
    Rule(("contiguous", "clone", "alias", "lift_fresh_copy", "cpu", "cuda", "resolve_conj", "resolve_neg"),
         "a copy has its source's elements", _same, ("x.mT.contiguous()", "x.clone()"), ("x.msort()",)),
    Rule(("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"),
         "elements keep their order under other dimensions, which must line up", _reshape,
         ("x.view(2, 12, 6)", "x.view(6, 4, 2, 3)", "x.view(2, 12, 6).view(2, 3, 4, 6)", "torch.flatten(x, 1, 2)", "x.view_as(x)",
          "x[0].unflatten(-1, (2, 3))", "x.transpose(1, 2).reshape(2, 4, 18)"), ("x.reshape(8, 18)",)),
    Rule(("expand", "expand_as", "broadcast_to"), "a dimension of size 1 is read at 0 wherever the result is read", _expand,
         ("x[:, :1].expand(2, 5, 4, 6)", "x[:, :1].expand(-1, 5, -1, -1)", "torch.broadcast_to(x[0], (2, 3, 4, 6))",
          "x[:, :, None].expand(2, 3, 2, 4, 6).reshape(2, 6, 4, 6)"), ("torch.outer(x[0, 0, 0], x[0, 1, 0])",)),
    Rule(("repeat", "tile"), "a dimension repeats as a whole", _repeat, ("x[0].repeat(2, 1, 2)", "x[0, 0].tile(2, 1)"),
         ("torch.kron(x[0, 0], x[0, 1])",)),
    Rule(("repeat_interleave",), "each entry of a dimension repeats a fixed number of times", _repeat_interleave,
         ("x.repeat_interleave(2, dim=1)",), ("x.repeat_interleave(2)", "x.repeat_interleave(rows, 2, output_size=5)")),
    Rule(("transpose",), "two dimensions change places", _transpose, ("x.transpose(-1, 1)", "x.swapaxes(0, 2)"),
         ("x.roll(1, -1)",)),
    Rule(("t",), "the dimensions of a matrix change places", _t, ("x[0, 0].T", "x[0, 1].t()"), ("x[0, 0].rot90()",)),
    Rule(("adjoint",), "the last two dimensions change places", _last_two, ("x.mT", "x.adjoint()"), ("x.rot90(1, (-2, -1))",)),
    Rule(("permute",), "dimensions in another order", _permute, ("x.permute(0, 2, 3, 1)", "torch.permute(x, [3, 2, 1, 0])"),
         ("torch.fft.fftshift(x, (0, 1, 2, 3))",)),
    Rule(("movedim",), "some dimensions move, the others keep their order", _movedim, ("x.movedim(1, -1)",), ("x.roll(1, 1)",)),
    Rule(("unsqueeze",), "a new dimension of size 1", _unsqueeze, ("x[0].unsqueeze(1)",), ("x[0, 0, :, :4].unfold(0, 4, 1)",)),
    Rule(("squeeze",), "dimensions of size 1 go", _squeeze, ("x[:1].squeeze(0)", "x[:1, :1].squeeze()"), ("x[:1].argmax(0)",)),
    Rule(("select",), "one entry of a dimension", _select, ("x.select(1, -1)",), ("x.amax(1, False)",)),
    Rule(("narrow",), "some neighbours of a dimension", _narrow, ("x.narrow(2, 1, 2)",), ("x[0, 0].unfold(0, 2, 1)",)),
    Rule(("slice",), "entries of a dimension from one on, by a step", _slice, ("torch.ops.aten.slice.Tensor(x, 2, 1, 4, 2)",),
         ("torch.ops.aten.slice.Tensor(x, 2, 1, 4, x.size(0))",)),
    Rule(("flip",), "dimensions from their end on", _flip, ("x.flip(-1)",), ("x.roll(1, -1)",)),
    Rule(("diagonal",), "entries at which two dimensions agree", _diagonal, ("x[0].diagonal(dim1=0, dim2=1)",),
         ("x[0].diagonal(1, 0, 1)",)),
    Rule(("gather", "take_along_dim"), "an index along one dimension, read at every position", _gather,
         ("torch.gather(x[0, 0], 1, rows[None].expand(4, 4))", "torch.take_along_dim(x[0, 0], rows[None], 1)"),
         ("torch.take_along_dim(x[0, 0], rows)",)),
    Rule(("index_select",), "an index along one dimension, the same for all others", _index_select, ("x.index_select(2, rows)",),
         ("x.index_fill(2, rows, 0.0)",)),
    Rule(("embedding",), "rows of a table", _embedding, ("F.embedding(rows, x[0, 0])",), ("F.embedding(rows, x[0, 0] * 1, max_norm=1.0)",)),
    Rule(("getitem",), "basic and advanced indexing", _getitem,
         ("x[:, 1:, ::2]", "x[..., -3:]", "x[:, :, :-1]", "x[0, None, ..., 2]", "x[:, 1]", "x[0, :, rows]",
          "x[0, 0][rows[:, None], rows[None]]", "x[0][rows, :, rows]"), ("x[0, 0].index_put((rows,), x[0, 0, :1])",)),
)  # fmt: skip
PIECES: Final[tuple[Rule[Piece], ...]] = (
    Rule(tuple(PARTS), "a piece of a dimension, or one of its entries", _split,
         ("x.split(2, dim=3)[1]", "x.chunk(3, dim=-1)[2]", "x.unbind(1)[2]"), ("x.sort(-1)[0]",)),
    Rule(("meshgrid",), "a vector that is read along one dimension of a grid", _meshgrid,
         ('torch.meshgrid(x[0, 0, 0], x[0, 1, :, 0], indexing="ij")[1]', 'torch.meshgrid(x[0, 0, 0], x[0, 1, :, 0], indexing="xy")[0]',
          'torch.meshgrid([x[0, 0, 0], x[0, 1, :, 0], x[:, 0, 0, 0]], indexing="xy")[1]'),
         ("torch.broadcast_tensors(x[0, 0, 0], x[0, 1])[0]",)),
)  # fmt: skip

VIEWS: Final[Mapping[str, Move]] = by_name(RULES)
_PIECES: Final[Mapping[str, Piece]] = by_name(PIECES)
