"""`tensor[index]` where the index holds symbols, and rows indexed further: `bias[b][h, q_idx]`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foci.ir import expr as ir
from foci.ir.elementwise import merge_axes
from foci.ir.expr import Expr
from foci.ir.rewrite import substitute
from foci.ir.trace import Axis, Symbol, TraceError, Tracer, element_dtype
from foci.ir.user_lines import complaint

__all__ = ["index_symbol"]


def index_symbol(tracer: Tracer, source: Tensor | Symbol, index: tuple[Any, ...]) -> Symbol:
    """`source[index]` for a captured tensor or for a row."""
    if isinstance(source, Tensor):
        if source.layout is not torch.strided:
            raise TraceError(complaint(f"a captured tensor of layout {source.layout}", "capture tensor.to_dense()"))
        source, index = _slice_for_real(source, index)
        slot = tracer.slot(source)
        placeholders = [tracer.fresh_axis(ir.size(slot, d), n) for d, n in enumerate(source.shape)]
        row = Symbol(
            tracer, ir.load(slot, tuple(p.index for p in placeholders), element_dtype(source.dtype)), tuple(placeholders), source.dtype
        )
        return _index_row(tracer, row, index)
    return _index_row(tracer, source, index)


def _rank_used(index: tuple[Any, ...]) -> int:
    return sum(1 for item in index if item is not None and item is not Ellipsis)


def _expand(index: tuple[Any, ...], rank: int) -> list[Any]:
    """The index without `...`, one entry per dimension, `None`s in between."""
    used = _rank_used(index)
    if used > rank:
        raise TraceError(complaint(f"an index with {used} entries for a tensor with {rank} dimensions", "use one index per dimension"))
    full: list[Any] = [slice(None)] * (rank - used)
    spots = [n for n, item in enumerate(index) if item is Ellipsis]
    at = spots[0] if spots else len(index)
    rest = [item for item in index[at:] if item is not Ellipsis]
    return list(index[:at]) + full + rest


def _slice_for_real(tensor: Tensor, index: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
    """Applies the slices that are not `:` to the tensor itself; they need no symbols."""
    entries = _expand(index, tensor.dim())
    cuts = tuple(e if isinstance(e, slice) else slice(None) for e in entries if e is not None)
    if all(cut == slice(None) for cut in cuts):
        return tensor, tuple(entries)
    return tensor[cuts], tuple(slice(None) if isinstance(e, slice) else e for e in entries)


def _index_row(tracer: Tracer, row: Symbol, index: tuple[Any, ...]) -> Symbol:
    entries = _expand(index, row.ndim)
    if all(isinstance(e, slice) and e == slice(None) for e in entries):
        return row
    picks = {n: _as_index(tracer, e) for n, e in enumerate(entries) if e is not None and not isinstance(e, slice)}
    shared, exprs = merge_axes(list(picks.values())) if picks else ((), [])
    chosen = dict(zip(picks, exprs, strict=True))
    table: dict[Expr, Expr] = {}
    axes: list[Axis] = []
    remaining = iter(row.axes)
    placed = False
    for n, entry in enumerate(entries):
        if entry is None:
            axes.append(tracer.fresh_axis(ir.const(1), 1))
            continue
        axis = next(remaining)
        if n in chosen:
            table[axis.index] = _in_range(chosen[n], axis)
            if not placed:
                axes.extend(shared)
                placed = True
        elif entry == slice(None):
            axes.append(axis)
        else:
            raise TraceError(complaint(f"the slice {entry} of a row", "slice the captured tensor itself"))
    return Symbol(tracer, substitute(row.expr, table), tuple(axes), row.narrow)


def _as_index(tracer: Tracer, entry: Any) -> Symbol:
    if isinstance(entry, list):
        entry = torch.tensor(entry, device=tracer.device)
    symbol = tracer.symbol(entry)
    if not symbol.expr.dtype.is_integer:
        raise TraceError(complaint(f"an index of type {symbol.expr.dtype.value}", "index with integers"))
    return symbol


def _in_range(index: Expr, axis: Axis) -> Expr:
    if index.op != "const" or not isinstance(axis.length, int):
        return index
    value = index.value
    assert isinstance(value, int)
    if not -axis.length <= value < axis.length:
        raise TraceError(complaint(f"index {value} of a dimension of size {axis.length}", "use an index within the dimension"))
    return index
