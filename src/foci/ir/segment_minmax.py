"""Least and greatest elements of many segments of rows at once.

Windows of 2^k elements are made from two windows of half the length, and a segment is the union of the two longest windows
that fit its ends (M. A. Bender, M. Farach-Colton, The LCA problem revisited, 2000). Windows are doubled in place and each
segment is answered when its length comes up, so memory is that of the rows, not n log n.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from foci.ir.ranges import Range

__all__ = ["segment_range"]

_CELLS: Final = 1 << 22  # elements to double; longer rows are reduced to cells first


def segment_range(rows: Tensor, row: Tensor, first: Tensor, last: Tensor) -> Range:
    """Range of `rows[row, first .. last]`, both ends included, for tensors of segments.

    Args:
        rows: [R, n], any dtype but complex, R and n at least 1.
        row: int64, in 0 .. R - 1.
        first, last: int64, `0 <= first <= last < n`; the three broadcast together.

    Returns:
        A range in their common shape: exact, or a little wide where rows hold many millions of elements. Elements
        that are nan give an unbounded range.

    Example:
        >>> rows = torch.tensor([[3, 1, 4, 1, 5, 9]])
        >>> found = segment_range(rows, torch.tensor(0), torch.tensor([0, 2]), torch.tensor([2, 5]))
        >>> found.lo, found.hi
        (tensor([1., 1.], dtype=torch.float64), tensor([4., 9.], dtype=torch.float64))
    """
    if rows.dtype in (torch.bool, torch.float16, torch.bfloat16):
        rows = rows.to(torch.uint8 if rows.dtype is torch.bool else torch.float32)
    tiled = _tiled(rows, row, first, last)
    if tiled is not None:
        return tiled
    shape = (row + first + last).shape
    cell = 1
    while rows.numel() // cell > _CELLS and cell < rows.shape[1]:
        cell *= 2
    where = tuple(at.expand(shape).reshape(-1) for at in (row, first // cell, last // cell))
    lo = _extremes(_cells(rows, cell, torch.amin), where, torch.minimum).reshape(shape)
    hi = _extremes(_cells(rows, cell, torch.amax), where, torch.maximum).reshape(shape)
    return _known(lo, hi)


def _known(lo: Tensor, hi: Tensor) -> Range:
    unknown = torch.isnan(lo) | torch.isnan(hi)
    return Range(lo.masked_fill(unknown, -torch.inf), hi.masked_fill(unknown, torch.inf))


def _tiled(rows: Tensor, row: Tensor, first: Tensor, last: Tensor) -> Range | None:
    """Every row cut into segments of one length: no doubling needed."""
    count = first.numel()
    if row.shape != (len(rows), 1) or first.shape != (1, count) or last.shape != first.shape or not count:
        return None
    length, width = int(last[0, 0]) + 1, rows.shape[1]
    start = torch.arange(count, device=rows.device) * length
    is_tiled = torch.equal(row[:, 0], torch.arange(len(rows), device=rows.device)) and torch.equal(first[0], start)
    if not is_tiled or not torch.equal(last[0], (start + (length - 1)).clamp(max=width - 1)) or count * length < width:
        return None
    return _known(_cells(rows, length, torch.amin).to(torch.float64), _cells(rows, length, torch.amax).to(torch.float64))


def _cells(rows: Tensor, cell: int, extreme: Callable[..., Tensor]) -> Tensor:
    if cell == 1:
        return rows
    full_columns = rows.shape[1] // cell * cell
    cells = extreme(rows[:, :full_columns].reshape(len(rows), -1, cell), -1)
    return cells if full_columns == rows.shape[1] else torch.cat([cells, extreme(rows[:, full_columns:], 1, keepdim=True)], 1)


def _extremes(rows: Tensor, where: tuple[Tensor, ...], extreme: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The extreme of each segment, float64."""
    row, first, last = where
    result = torch.empty(row.shape, dtype=torch.float64, device=rows.device)
    if not row.numel():
        return result
    length = last - first + 1
    longest = int(length.max())
    windows, width = rows, 1
    while width <= longest:
        now = (length >= width) & (length < 2 * width)
        chosen = slice(None) if bool(now.all()) else now.nonzero().squeeze(1)
        at = row[chosen]
        result[chosen] = extreme(windows[at, first[chosen]], windows[at, last[chosen] - (width - 1)]).to(torch.float64)
        if 2 * width <= longest:
            windows = extreme(windows[:, : windows.shape[1] - width], windows[:, width:])
        width *= 2
    return result
